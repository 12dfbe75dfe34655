"""The stages as they learn and generate: losses by hand, ends, forgetting, waves and tokens alike, prompts of sound."""

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from helicon.models.audiolm import transformers
from helicon.models.audiolm.stage import Losses
from models.audiolm.tiny import (
    ALL_CODES,
    COARSE,
    CODES,
    CONDITIONS,
    FINE,
    IDS,
    KINDS,
    SEMANTIC,
    TEXTS,
    Kind,
    as_tuple,
    chirps,
    given,
    lengths_of,
    stage_with_codec,
    wav2vec,
)

LENGTHS = (960, 600)
ENDS = torch.tensor([True, False])
each_kind = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS.keys())
each_condition = pytest.mark.parametrize("options", CONDITIONS.values(), ids=CONDITIONS.keys())


def ends(kind: Kind, rows: slice = slice(None)) -> dict[str, Tensor]:
    return {"is_end": ENDS[rows]} if kind.has_end else {}


def entropies(logits: Tensor, labels: dict[tuple[int, ...], int]) -> Tensor:
    """Of each label, by the place its logits have."""
    return torch.stack([-F.log_softmax(logits[place], dim=-1)[label] for place, label in labels.items()])


def flat_labels(codes: Tensor) -> dict[tuple[int, ...], int]:
    flat = codes.flatten(1)
    return {(b, n): int(flat[b, n]) for b in range(len(flat)) for n in range(flat.shape[1]) if flat[b, n] >= 0}


# ------------------------------------------------------------------ losses


def test_semantic_loss_by_hand() -> None:
    stage = KINDS["semantic"].stage()
    logits = stage.transformer(ids=IDS)
    labels = flat_labels(IDS) | {(0, 6): SEMANTIC}  # the first row ends, the second is cut off
    assert len(labels) == 10
    loss = stage(semantic_token_ids=IDS, is_end=ENDS, return_loss=True)
    torch.testing.assert_close(loss, entropies(logits, labels).mean())
    del labels[0, 6]
    torch.testing.assert_close(stage(semantic_token_ids=IDS, return_loss=True), entropies(logits, labels).mean())


@pytest.mark.parametrize("weight", [1.0, 0.25, 0.0])
def test_coarse_loss_by_hand(weight: float) -> None:
    stage = KINDS["coarse"].stage(semantic_cross_entropy_loss_weight=weight)
    tokens = KINDS["coarse"].tokens
    semantic, coarse = stage.transformer(**tokens)
    codes = flat_labels(tokens["coarse_token_ids"]) | {(0, 3 * COARSE): CODES}
    first, second = entropies(semantic, flat_labels(IDS)), entropies(coarse, codes)
    losses = stage(**tokens, is_end=ENDS, return_losses=True)
    assert isinstance(losses, Losses)
    count = len(second) + (len(first) if weight else 0)
    torch.testing.assert_close(losses.total, (weight * first.sum() + second.sum()) / count)
    torch.testing.assert_close(losses.parts["coarse_cross_entropy"], second.mean())
    assert ("semantic_cross_entropy" in losses.parts) == bool(weight)
    if weight:
        torch.testing.assert_close(losses.parts["semantic_cross_entropy"], first.mean())


@pytest.mark.parametrize("weight", [1.0, 0.25, 0.0])
def test_fine_loss_by_hand(weight: float) -> None:
    stage = KINDS["fine"].stage(coarse_cross_entropy_loss_weight=weight)
    tokens = KINDS["fine"].tokens
    coarse, fine = stage.transformer(**tokens)
    first = entropies(coarse, flat_labels(tokens["coarse_token_ids"]))
    second = entropies(fine, flat_labels(tokens["fine_token_ids"]))
    losses = stage(token_ids=ALL_CODES, return_losses=True)
    count = len(second) + (len(first) if weight else 0)
    torch.testing.assert_close(losses.total, (weight * first.sum() + second.sum()) / count)
    assert losses.parts.keys() == {"coarse_cross_entropy", "fine_cross_entropy"} - (
        {"coarse_cross_entropy"} if not weight else set()
    )


def test_delayed_loss_by_hand() -> None:
    stage = KINDS["delayed"].stage()
    logits = stage.transformer(**KINDS["delayed"].tokens)
    labels: dict[tuple[int, ...], int] = {}
    for row, length in enumerate(lengths_of(ALL_CODES)):
        for frame in range(length):
            for quantizer in range(COARSE + FINE):
                labels[row, frame + quantizer, quantizer] = int(ALL_CODES[row, frame, quantizer])
    labels[0, 3, 0] = CODES  # the first quantizer says that the first row ends
    loss = stage(**KINDS["delayed"].tokens, is_end=ENDS, return_loss=True)
    torch.testing.assert_close(loss, entropies(logits, labels).mean())


@pytest.mark.parametrize("name", ["coarse", "fine"])
def test_what_is_not_predicted_is_no_loss(name: str) -> None:
    option = {"coarse": "project_semantic_logits", "fine": "project_coarse_logits"}[name]
    stage = KINDS[name].stage(KINDS[name].build(**{option: False}))
    losses = stage(**KINDS[name].tokens, return_losses=True)
    assert losses.parts.keys() == {f"{name}_cross_entropy"}
    torch.testing.assert_close(losses.total, losses.parts[f"{name}_cross_entropy"])


@each_condition
@each_kind
def test_the_loss_of_a_batch_is_that_of_its_rows(kind: Kind, options: dict[str, Any]) -> None:
    """Each weighs as many tokens as it has."""
    stage = kind.stage(kind.build(**options))
    together = stage(**kind.tokens, **ends(kind), **given(options), return_loss=True)
    total, count = torch.zeros(()), 0
    for row in range(2):
        rows = slice(row, row + 1)
        loss = stage(**kind.alone(row), **ends(kind, rows), **given(options, rows), return_loss=True)
        labels = int(stage.num_labels(**kind.alone(row), **ends(kind, rows)))
        total, count = total + loss * labels, count + labels
    torch.testing.assert_close(together, total / count, atol=1e-5, rtol=1e-5)
    assert count == stage.num_labels(**kind.tokens, **ends(kind))


@each_kind
def test_without_a_loss_it_gives_logits(kind: Kind) -> None:
    stage = kind.stage()
    tokens = {
        "ids" if name == "semantic_token_ids" and len(kind.tokens) == 1 else name: ids
        for name, ids in kind.tokens.items()
    }
    for said, expected in zip(as_tuple(stage(**kind.tokens)), as_tuple(stage.transformer(**tokens)), strict=True):
        assert torch.equal(said, expected[:, : said.shape[1]])


def test_flat_codes_and_codes_of_all_quantizers_are_understood() -> None:
    fine, coarse = KINDS["fine"].stage(), KINDS["coarse"].stage()
    expected = fine(**KINDS["fine"].tokens, return_loss=True)
    flat = {name: ids.flatten(1) for name, ids in KINDS["fine"].tokens.items()}
    assert torch.equal(fine(**flat, return_loss=True), expected)
    assert torch.equal(fine(token_ids=ALL_CODES, return_loss=True), expected)
    more = torch.cat((ALL_CODES, ALL_CODES[..., :1]), dim=-1)  # a codec may have more quantizers than are learned
    assert torch.equal(fine(token_ids=more, return_loss=True), expected)
    with pytest.raises(ValueError, match=r"\[2, 5, 4\] must be \[b, t, 5\], of all quantizers"):
        fine(token_ids=ALL_CODES[..., :4], return_loss=True)
    codes = KINDS["coarse"].tokens["coarse_token_ids"]
    assert torch.equal(
        coarse(semantic_token_ids=IDS, coarse_token_ids=codes.flatten(1), return_loss=True),
        coarse(semantic_token_ids=IDS, coarse_token_ids=codes, return_loss=True),
    )


@pytest.mark.parametrize("name", KINDS)
def test_waves_and_tokens_give_the_same_loss(name: str) -> None:
    stage = stage_with_codec(name, **({} if name == "fine" else {"unique_consecutive": True}))
    for_codec, for_tokenizer = chirps(LENGTHS), chirps(LENGTHS, 16000)
    waves = {"raw_wave": for_tokenizer, "raw_wave_for_codec": for_codec}
    tokens: dict[str, Tensor] = {}
    if name != "fine":
        tokens["semantic_token_ids"] = wav2vec()(for_tokenizer)
    if name in ("fine", "delayed"):
        tokens["token_ids"] = stage.codec.encode(for_codec)
    if name == "coarse":
        tokens["coarse_token_ids"] = stage.codec.encode(for_codec)[..., :2]
    if name in ("semantic", "fine"):
        waves = {"raw_wave": for_tokenizer if name == "semantic" else for_codec}
    assert torch.equal(stage(**waves, return_loss=True), stage(**tokens, return_loss=True))


def test_repeated_tokens_do_not_count() -> None:
    stage, plain = KINDS["semantic"].stage(unique_consecutive=True), KINDS["semantic"].stage()
    ids = torch.tensor([[3, 3, 5, 5, 5, 3], [4, 4, 2, -1, -1, -1]])
    once = torch.tensor([[3, 5, 3], [4, 2, -1]])
    torch.testing.assert_close(
        stage(semantic_token_ids=ids, is_end=ENDS, return_loss=True),
        plain(semantic_token_ids=once, is_end=ENDS, return_loss=True),
    )
    assert plain(semantic_token_ids=ids, return_loss=True) != plain(semantic_token_ids=once, return_loss=True)


# ------------------------------------------------------------------ ends


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", ["semantic", "coarse", "delayed"])
def test_only_what_truly_ends_is_taught_to_end(name: str, training: bool) -> None:
    """At the place where the row ends, whatever the mode: a crop that ended nothing must not teach to stop."""
    kind = KINDS[name]
    stage = kind.stage().train(training)
    end = SEMANTIC if name == "semantic" else CODES
    labels = [*stage.labels(**kind.tokens, is_end=torch.tensor([True, True])).values()][-1]
    places = [(labels[row] == end).nonzero().flatten().tolist() for row in range(2)]
    expected = {"semantic": [[6], [3]], "coarse": [[9], [15]], "delayed": [[3 * 5], [5 * 5]]}[name]
    assert places == expected
    for is_end in (None, torch.tensor([False, False])):
        assert ([*stage.labels(**kind.tokens, is_end=is_end).values()][-1] != end).all()
    mixed = [*stage.labels(**kind.tokens, is_end=torch.tensor([False, True])).values()][-1]
    assert (mixed[0] != end).all() and (mixed[1] == end).sum() == 1


def test_the_fine_stage_has_no_end() -> None:
    with pytest.raises(TypeError, match="is_end"):
        KINDS["fine"].stage()(token_ids=ALL_CODES, return_loss=True, is_end=ENDS)


# ------------------------------------------------------------------ forgetting


@each_kind
def test_it_forgets_in_training_alone(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[float] = []
    real = transformers.remembered
    monkeypatch.setattr(
        transformers, "remembered", lambda x, forget_prob: asked.append(forget_prob) or real(x, forget_prob)
    )
    stage = kind.stage(mask_prob=0.3)
    stage.eval()
    usual = stage(**kind.tokens, return_loss=True)
    assert asked == [] and torch.equal(stage(**kind.tokens, return_loss=True), usual)
    stage.train()
    losses = {float(stage(**kind.tokens, return_loss=True).detach()) for _ in range(8)}
    assert asked == [0.3] * 8 and len(losses) > 1
    stage.eval()
    assert torch.equal(stage(**kind.tokens, return_loss=True), usual)
    never = kind.stage(mask_prob=0.0).train()
    asked.clear()
    torch.testing.assert_close(never(**kind.tokens, return_loss=True), usual)
    assert asked == []


def test_the_owners_mode_decides() -> None:
    """The mode of the transformer inside is its own affair: training starts and ends with the stage."""
    stage = KINDS["semantic"].stage(mask_prob=0.3).train()
    stage.transformer.eval()
    assert stage.forget_prob == 0.3
    stage.eval()
    stage.transformer.train()
    assert stage.forget_prob == 0.0
    owner = torch.nn.ModuleList([stage])
    assert owner.train()[0].forget_prob == 0.3 and owner.eval()[0].forget_prob == 0.0


# ------------------------------------------------------------------ learning


@pytest.mark.parametrize("name", KINDS)
def test_every_weight_takes_part_in_a_step(name: str) -> None:
    kind = KINDS[name]
    stage = kind.stage(kind.build(**CONDITIONS["text"])).train()
    stage(**kind.tokens, **ends(kind), text=TEXTS, return_loss=True).backward()
    assert [name for name, weight in stage.named_parameters() if weight.grad is None] == []


@pytest.mark.parametrize(("name", "part"), [("coarse", "semantic"), ("fine", "coarse")])
def test_a_part_without_weight_takes_part_too(name: str, part: str) -> None:
    """With gradients of zero, for which distributed training would wait in vain."""
    stage = KINDS[name].stage(**{f"{part}_cross_entropy_loss_weight": 0.0}).train()
    stage(**KINDS[name].tokens, return_loss=True).backward()
    weights = dict(stage.named_parameters())
    assert [name for name, weight in weights.items() if weight.grad is None] == []
    unused = "transformer.to_semantic_logits.weight" if name == "coarse" else "transformer.coarse.logit_weights"
    assert weights[unused].grad.abs().sum() == 0


@each_kind
def test_texts_reach_the_transformer(kind: Kind) -> None:
    stage = kind.stage(kind.build(**CONDITIONS["text"]))
    losses = [stage(**kind.tokens, text=text, return_loss=True) for text in (TEXTS, ["a drum", "silence"])]
    losses.append(stage(**kind.tokens, text_embeds=stage.embed_text(TEXTS), return_loss=True))
    losses.append(stage(**kind.tokens, cond_drop_prob=1.0, return_loss=True))
    assert losses[0] != losses[1] and losses[0] != losses[3]
    torch.testing.assert_close(losses[0], losses[2])
    with pytest.raises(ValueError, match="this network reads texts"):
        stage(**kind.tokens, return_loss=True)
    with pytest.raises(ValueError, match="does not take texts"):
        kind.stage()(**kind.tokens, text=TEXTS)


# ------------------------------------------------------------------ prompts of sound


def test_semantic_tokens_go_on_from_a_sound() -> None:
    stage = stage_with_codec("semantic", unique_consecutive=True)
    wave, lengths = chirps(LENGTHS), torch.tensor(LENGTHS)
    prompt = stage.prompt_ids(wave, lengths, 8000)
    assert lengths_of(prompt)[0] != lengths_of(prompt)[1]
    made = stage.generate(
        max_length=9, prime_wave=wave, prime_wave_input_sample_hz=8000, prime_lengths=lengths, temperature=0.0
    )
    expected = stage.generate(max_length=9, prime_ids=prompt, temperature=0.0)
    assert torch.equal(made, expected)
    for row, count in enumerate(lengths_of(prompt)):
        assert torch.equal(made[row, :count], prompt[row, :count])


@pytest.mark.parametrize("name", ["coarse", "delayed"])
def test_codes_go_on_from_a_sound(name: str) -> None:
    stage = stage_with_codec(name)
    wave, lengths = chirps((200, 120)), torch.tensor([200, 120])
    codes = stage.codec.encode(wave, lengths)[..., : 2 if name == "coarse" else 3]
    options = {"semantic_token_ids": IDS, "max_time_steps": 7, "temperature": 0.0}
    prompt = {"coarse": "prime_coarse_token_ids", "delayed": "prime_token_ids"}[name]
    made = stage.generate(**options, prime_wave=wave, prime_lengths=lengths)
    assert torch.equal(made, stage.generate(**options, **{prompt: codes}))
    assert torch.equal(made[0, :5], codes[0, :5]) and torch.equal(made[1, :3], codes[1, :3])
    sound = stage.generate(**options, prime_wave=wave, prime_lengths=lengths, reconstruct_wave=True)
    assert [len(row) for row in sound] == [length * 40 for length in lengths_of(made)]
    expected = stage.codec.decode(made)
    torch.testing.assert_close(sound[0], expected[0, 0, : len(sound[0])])


def test_fine_codes_go_on_from_a_sound() -> None:
    stage = stage_with_codec("fine")
    wave = chirps((400, 240))
    codes = stage.codec.encode(wave)
    fine = stage.generate(
        coarse_token_ids=codes[..., :2], prime_wave=wave, prime_lengths=torch.tensor([200, 120]), temperature=0.0
    )
    assert torch.equal(fine[0, :5], codes[0, :5, 2:]) and torch.equal(fine[1, :3], codes[1, :3, 2:])
    sound = stage.generate(coarse_token_ids=codes[..., :2], temperature=0.0, reconstruct_wave=True)
    made = stage.generate(coarse_token_ids=codes[..., :2].flatten(1), temperature=0.0)
    torch.testing.assert_close(sound, stage.codec.decode(torch.cat((codes[..., :2], made), dim=-1))[:, 0])


def test_texts_may_come_as_ids() -> None:
    """As they come to a network that is compiled, which must not see strings."""
    stage = KINDS["coarse"].stage(KINDS["coarse"].build(**CONDITIONS["prefix"]))
    read = stage.transformer.read_texts(TEXTS, multiple_of=16)
    assert read["text_ids"].shape == (2, 16)
    options = {"semantic_token_ids": IDS, "max_time_steps": 4, "temperature": 0.0}
    assert torch.equal(stage.generate(**options, **read), stage.generate(**options, text=TEXTS))


def test_keywords_that_users_know_are_there() -> None:
    """Those of the classes of the same names in audiolm-pytorch."""
    known = {
        "semantic": "max_length text text_embeds prime_wave prime_wave_input_sample_hz prime_ids batch_size cond_scale "
        "filter_thres temperature use_kv_cache include_eos_in_output",
        "coarse": "semantic_token_ids prime_wave prime_wave_input_sample_hz prime_coarse_token_ids text text_embeds "
        "max_time_steps cond_scale filter_thres temperature reconstruct_wave use_kv_cache",
        "fine": "coarse_token_ids prime_wave prime_wave_input_sample_hz prime_fine_token_ids text text_embeds cond_scale "
        "filter_thres temperature reconstruct_wave use_kv_cache mask_out_generated_fine_tokens",
    }
    for name, keywords in known.items():
        assert set(keywords.split()) <= set(inspect.signature(KINDS[name].wrapper.generate).parameters)
