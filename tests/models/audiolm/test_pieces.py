"""Sounds longer than what was learned from, piece by piece: each piece goes on from the one before, and rows do not disturb each other."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from models.audiolm.tiny import (
    ALL_CODES,
    COARSE,
    CODES,
    FINE,
    IDS,
    KINDS,
    SEMANTIC,
    lengths_of,
    padded,
    stage_with_codec,
)


def test_fine_codes_in_pieces() -> None:
    """A piece is made from its own frames alone, behind the end of the piece before."""
    stage = KINDS["fine"].stage()
    codes = padded(2, 11, COARSE, high=CODES, lengths=(11, 4), seed=5)
    made = stage.generate(coarse_token_ids=codes, max_frames=4, temperature=0.0)
    assert lengths_of(made) == [11, 4] and made.shape == (2, 11, FINE)
    for begin, end, known in ((0, 4, 0), (3, 7, 1), (6, 10, 1), (7, 11, 3)):
        piece = stage.generate(
            coarse_token_ids=codes[:1, begin:end],
            prime_fine_token_ids=made[:1, begin : begin + known] if known else None,
            temperature=0.0,
        )
        assert torch.equal(piece, made[:1, begin:end])
    whole = stage.generate(coarse_token_ids=codes[1:, :4], temperature=0.0)
    assert torch.equal(made[1:, :4], whole)


def test_pieces_go_on_from_prompts_of_unequal_length() -> None:
    stage = KINDS["fine"].stage()
    codes, prompts = padded(2, 9, COARSE, high=CODES, lengths=(9, 8), seed=5), ALL_CODES[..., COARSE:]
    made = stage.generate(coarse_token_ids=codes, prime_fine_token_ids=prompts, max_frames=3, seed=0)
    assert lengths_of(made) == [9, 8]
    assert torch.equal(made[0, :3], prompts[0, :3]) and torch.equal(made[1, :5], prompts[1])


@pytest.mark.parametrize(("lengths", "known"), [((30, 13, 22), (0, 0, 0)), ((30, 30, 17), (12, 3, 17))])
def test_the_pieces_of_a_row_are_those_it_has_alone(lengths: tuple[int, ...], known: tuple[int, ...]) -> None:
    stage = KINDS["fine"].stage()
    codes = padded(3, 30, COARSE, high=CODES, lengths=lengths, seed=6)
    prompts = padded(3, 17, FINE, high=CODES, lengths=known, seed=7)
    options = {"max_frames": 10, "temperature": 0.0}
    made = stage.generate(coarse_token_ids=codes, prime_fine_token_ids=prompts, **options)
    for row, (length, count) in enumerate(zip(lengths, known, strict=True)):
        alone = stage.generate(
            coarse_token_ids=codes[row : row + 1, :length],
            prime_fine_token_ids=prompts[row : row + 1, :count] if count else None,
            **options,
        )
        assert torch.equal(made[row, :length], alone[0]) and (made[row, length:] == -1).all()


def test_pieces_longer_than_the_sound_are_one() -> None:
    stage = KINDS["fine"].stage()
    codes = ALL_CODES[..., :COARSE]
    one, pieces = (stage.generate(coarse_token_ids=codes, max_frames=most, seed=1) for most in (None, 50))
    assert torch.equal(one, pieces)
    assert stage.generate(coarse_token_ids=codes[:, :1], seed=1).shape == (2, 1, FINE)
    with pytest.raises(ValueError, match="max_frames=1 must be at least 2"):
        stage.generate(coarse_token_ids=codes, max_frames=1)


def endless(stage: Any) -> Any:
    """The same stage; it never ends a sound."""
    network = stage.transformer
    with torch.no_grad():
        if stage.condition_name == "semantic":
            network.to_logits.weight[-1] = 0
        else:
            getattr(network, "coarse", network).logit_weights[:, -1] = 0
    return stage


def test_semantic_tokens_in_pieces() -> None:
    """A piece goes on from the last quarter of what is there, the first from a whole prompt that leaves room."""
    stage = endless(KINDS["semantic"].stage())
    prompts = padded(3, 10, high=SEMANTIC, lengths=(10, 6, 0), seed=8)
    made = stage.generate(max_length=21, max_tokens=8, prime_ids=prompts, temperature=0.0)
    assert made.shape == (3, 21) and (made >= 0).all()
    spans = (
        [(8, 16, 10), (13, 21, 16)],  # where a piece begins and ends, and from where on it is new
        [(0, 8, 6), (6, 14, 8), (12, 20, 14), (13, 21, 20)],
        [(0, 8, 0), (6, 14, 8), (12, 20, 14), (13, 21, 20)],
    )
    for row, pieces in enumerate(spans):
        assert torch.equal(made[row, : pieces[0][2]], prompts[row, : pieces[0][2]])
        for begin, end, new in pieces:
            heard = made[row : row + 1, begin:new]
            piece = stage.generate(max_length=end - begin, prime_ids=heard if new > begin else None, temperature=0.0)
            assert torch.equal(piece[0], made[row, begin:end])
    one, pieces = (stage.generate(max_length=8, max_tokens=most, batch_size=2, seed=1) for most in (None, 8))
    assert torch.equal(one, pieces)
    with pytest.raises(ValueError, match="max_tokens=1 must be at least 2"):
        stage.generate(max_length=8, max_tokens=1)


def test_pieces_of_semantic_tokens_begin_with_a_frame() -> None:
    stage = endless(KINDS["semantic"].stage())
    stage.__dict__["wav2vec"] = SimpleNamespace(groups=2)
    made = stage.generate(max_length=20, max_tokens=12, temperature=0.0)
    again = stage.generate(max_length=12, prime_ids=made[:, 8:12], temperature=0.0)
    assert made.shape == (1, 20) and torch.equal(again, made[:, 8:20])


@pytest.mark.parametrize("name", ["coarse", "delayed"])
def test_codes_in_pieces(name: str) -> None:
    """A piece is made from the semantic tokens of its own time, 4 frames each, behind the end of the piece before."""
    stage = endless(stage_with_codec(name, unique_consecutive=False))
    ids = padded(2, 7, high=SEMANTIC, lengths=(7, 4), seed=9)
    made = stage.generate(semantic_token_ids=ids, max_time_steps=26, max_frames=12, temperature=0.0)
    assert lengths_of(made) == [26, 16], "a sound lasts no longer than its tokens"
    prime = "prime_coarse_token_ids" if name == "coarse" else "prime_token_ids"
    spans = [(0, 0, 12, 0), (0, 9, 21, 12), (0, 14, 26, 21), (1, 0, 12, 0), (1, 4, 16, 12)]
    for row, begin, end, new in spans:
        heard = {prime: made[row : row + 1, begin:new]} if new > begin else {}
        first = round(begin / 4 + 1e-9)
        own = ids[row : row + 1, first : min(first + 3, lengths_of(ids)[row])]
        piece = stage.generate(semantic_token_ids=own, max_time_steps=12, **heard, temperature=0.0)
        assert torch.equal(piece[0], made[row, begin:end])
    one, pieces = (
        stage.generate(semantic_token_ids=ids, max_time_steps=12, max_frames=most, seed=1) for most in (None, 12)
    )
    assert torch.equal(one, pieces)


@pytest.mark.parametrize("name", ["coarse", "delayed"])
def test_the_pieces_of_codes_are_those_a_row_has_alone(name: str) -> None:
    """Also where one of them ends before the others do."""
    stage = stage_with_codec(name, unique_consecutive=False)
    ids = padded(3, 12, high=SEMANTIC, lengths=(12, 12, 5), seed=9)
    quantizers = stage.transformer.num_coarse_quantizers if name == "coarse" else stage.transformer.num_quantizers
    prime = "prime_coarse_token_ids" if name == "coarse" else "prime_token_ids"
    prompts = padded(3, 20, quantizers, high=16, lengths=(20, 7, 3), seed=7)
    options = {"max_time_steps": 45, "max_frames": 12, "temperature": 0.0}
    made = stage.generate(semantic_token_ids=ids, **{prime: prompts}, **options)
    assert lengths_of(made)[0] < 45, "one of them is to end by itself"
    for row, (tokens, frames) in enumerate(zip((12, 12, 5), (20, 7, 3), strict=True)):
        own = {"semantic_token_ids": ids[row : row + 1, :tokens], prime: prompts[row : row + 1, :frames]}
        alone = stage.generate(**own, **options)
        assert torch.equal(made[row, : alone.shape[1]], alone[0]) and (made[row, alone.shape[1] :] == -1).all()
        assert torch.equal(alone[0, :frames], prompts[row, :frames])


def test_codes_whose_tokens_tell_no_time_are_not_made_in_pieces() -> None:
    for stage in (stage_with_codec("coarse", unique_consecutive=True), KINDS["coarse"].stage()):
        with pytest.raises(ValueError, match="max_frames=4 needs semantic tokens that each have their time"):
            stage.generate(semantic_token_ids=IDS, max_frames=4)
    with pytest.raises(ValueError, match="max_frames=1 must be at least 2"):
        stage_with_codec("delayed", unique_consecutive=False).generate(semantic_token_ids=IDS, max_frames=1)
