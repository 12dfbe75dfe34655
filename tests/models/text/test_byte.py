"""The built-in encoder over bytes."""

import logging
import re

import jaxtyping
import pytest
import torch

from helicon.models.text import ByteTextEncoder, TextEncoder
from helicon.models.text.byte import BEGIN, END, PAD
from helicon.nn.network import Network, load_network


def encoder(**options: int) -> ByteTextEncoder:
    torch.manual_seed(0)
    return ByteTextEncoder(24, **{"depth": 2, "heads": 3, "dim_head": 10, **options}).eval()


def test_tokens_are_bytes_between_begin_and_end() -> None:
    ids, mask = encoder().tokenize(["aé", ""])
    assert ids.tolist() == [[BEGIN, 97, 0xC3, 0xA9, END], [BEGIN, END, PAD, PAD, PAD]]
    assert mask.tolist() == [[True] * 5, [True, True, False, False, False]]


def test_padded_equals_single() -> None:
    network = encoder()
    texts = ["a red circle", "", "ein grüner Würfel 🎲 auf Papier", "x"]
    batch = network.encode(texts)
    assert isinstance(network, TextEncoder) and batch.embeddings.shape[-1] == network.dim == 24
    for row, text in enumerate(texts):
        alone = network.encode([text])
        length = len(text.encode()) + 2
        assert batch.mask[row].sum() == length and alone.mask.all()
        torch.testing.assert_close(batch.embeddings[row, :length], alone.embeddings[0], atol=1e-5, rtol=1e-5)
        assert (batch.embeddings[row, length:] == 0).all()


def test_it_reads_in_both_directions_and_by_position() -> None:
    network = encoder()
    first, second = network.encode(["ab..."]).embeddings, network.encode(["ab..!"]).embeddings
    assert (first[0, 0] - second[0, 0]).abs().max() > 1e-4
    swapped = network.encode(["ba..."]).embeddings
    assert (first[0, 4] - swapped[0, 4]).abs().max() > 1e-4


def test_long_texts_lose_whole_characters_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    network = encoder(max_length=6)
    with caplog.at_level(logging.WARNING):
        ids, _ = network.tokenize(["abcd", "abcé", "longer still"])
    assert ids.tolist() == [[BEGIN, *b"abcd", END], [BEGIN, *b"abc", END, PAD], [BEGIN, *b"long", END]]
    assert len(caplog.records) == 1 and "has 7 byte tokens and is cut to max_length=6" in caplog.text
    with pytest.raises(ValueError, match="max_length=1 leaves no room"):
        encoder(max_length=1)


def test_odd_inputs() -> None:
    network = encoder()
    assert network.encode([]).embeddings.shape == (0, 2, 24)
    assert torch.equal(network.encode(["\ud800x"]).embeddings, network.encode(["?x"]).embeddings)
    with pytest.raises(ValueError, match="takes a list of texts"):
        network.encode("a red circle")


@pytest.mark.parametrize("other", [["a bell"], None, 3])
def test_texts_that_are_no_strings_are_refused(other: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # a user's run has no type checker to catch it
    with pytest.raises(ValueError, match=re.escape(f"the texts hold {other!r}, which is no string: give a string")):
        encoder().encode(["rain", other])  # type: ignore[list-item]


def test_it_learns_to_tell_texts_apart() -> None:
    """Which of two letters comes first, from the embedding of the begin token alone: needs attention and positions."""
    torch.manual_seed(0)
    network = ByteTextEncoder(16, depth=2, heads=2, dim_head=8)
    head = torch.nn.Linear(16, 1)
    optimizer = torch.optim.Adam([*network.parameters(), *head.parameters()], lr=3e-3)
    texts = [f"{'.' * left}{word}{'.' * (4 - left)}" for left in range(5) for word in ("ab", "ba")]
    labels = torch.tensor([0.0, 1.0] * 5)
    losses = []
    for _ in range(200):
        loss = torch.nn.functional.binary_cross_entropy_with_logits(head(network(texts).embeddings[:, 0])[:, 0], labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[0] > 0.5 and losses[-1] < 0.05


def test_saved_equals_loaded(tmp_path) -> None:
    network = encoder()
    network.save_pretrained(tmp_path)
    loaded = load_network(tmp_path)
    assert isinstance(loaded, ByteTextEncoder) and isinstance(loaded, Network)
    assert torch.equal(loaded.encode(["a"]).embeddings, network.encode(["a"]).embeddings)
