"""What networks share that read texts: who reads them, what becomes of them, and what is said where they are missing."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor

from helicon.models.text import ByteTextEncoder, PretrainedTextEncoder
from helicon.models.text.conditioning import Context, TextConditioned, stacked

BYTES = {"name": "bytes", "dim": 12, "depth": 1, "heads": 2, "dim_head": 6}
TEXTS = ["a bell", "rain"]


class Reader(TextConditioned):
    def __init__(
        self,
        dim: int = 10,
        t5_name: Any = None,
        text_embed_dim: int | None = None,
        reads_texts: bool = True,
    ):
        super().__init__()
        self._build_text(dim, t5_name, text_embed_dim, reads_texts)


def write_t5(folder: Path) -> Path:
    torch.manual_seed(0)
    config = transformers.T5Config(vocab_size=9, d_model=14, num_layers=1, num_heads=2, d_kv=7, d_ff=16)
    transformers.T5EncoderModel(config).save_pretrained(folder)
    words = {"<pad>": 0, "</s>": 1, "<unk>": 2, "a": 3, "bell": 4, "rain": 5}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", unk_token="<unk>"
    ).save_pretrained(folder)
    return folder


def test_texts_are_read_and_projected() -> None:
    torch.manual_seed(0)
    network = Reader(t5_name=BYTES)
    assert isinstance(network.text_encoder, ByteTextEncoder)
    context = network.text_context(texts=TEXTS)
    assert context is not None
    assert context.embeddings.shape == (2, 8, 10) and context.mask.sum(dim=1).tolist() == [8, 6]
    expected = network.text_proj(network.encode_text(TEXTS))  # type: ignore[misc]
    torch.testing.assert_close(context.embeddings[context.mask], expected[context.mask])


def test_a_network_may_read_none() -> None:
    network = Reader(reads_texts=False)
    assert network.text_encoder is None and network.text_proj is None
    assert list(network.parameters()) == []
    assert network.text_context() is None
    network.check_texts()
    with pytest.raises(ValueError, match="this Reader has no text encoder: it does not take texts"):
        network.text_context(texts=TEXTS)
    with pytest.raises(ValueError, match="this Reader does not take texts: build it with condition_on_text=True"):
        network.text_context(text_embeds=torch.zeros(1, 2, 3))


def test_embeddings_need_no_encoder_and_are_padded_with_zeros() -> None:
    network = Reader(text_embed_dim=5)
    assert network.text_encoder is None
    embeds = torch.randn(2, 3, 5)
    embeds[1, 1:] = 0
    context = network.text_context(text_embeds=embeds)
    assert context is not None and context.mask.tolist() == [[True, True, True], [True, False, False]]
    given = network.text_context(text_embeds=embeds, text_mask=torch.ones(2, 3, dtype=torch.bool))
    assert given is not None and given.mask.all()
    with pytest.raises(ValueError, match="text_embeds have 4 features, and this Reader takes 5"):
        network.text_context(text_embeds=embeds[..., :4])
    with pytest.raises(ValueError, match="this Reader has no text encoder: give text_embeds"):
        network.encode_text(TEXTS)


def test_embeddings_of_another_precision_are_welcome() -> None:
    network = Reader(text_embed_dim=5)
    embeds = torch.randn(2, 3, 5)
    half = network.text_context(text_embeds=embeds.bfloat16())
    whole = network.text_context(text_embeds=embeds)
    assert half is not None and whole is not None and half.embeddings.dtype == torch.float32
    torch.testing.assert_close(half.embeddings, whole.embeddings, atol=0.1, rtol=0.1)


def test_ids_are_padded_to_few_lengths_and_say_the_same() -> None:
    network = Reader(t5_name=BYTES)
    read = network.read_texts(TEXTS, multiple_of=5)
    assert read["text_ids"].shape == (2, 10) and read["text_mask"].sum(dim=1).tolist() == [8, 6]
    short, padded = network.text_context(texts=TEXTS), network.text_context(**read)
    assert short is not None and padded is not None
    torch.testing.assert_close(padded.embeddings[:, :8][short.mask], short.embeddings[short.mask])
    assert not padded.mask[:, 8:].any()


def test_a_frozen_encoder_gives_embeddings_that_can_be_learned_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In single precision, which inference tensors would refuse; and it is found again from another folder."""
    write_t5(tmp_path / "t5")
    monkeypatch.chdir(tmp_path)
    network = Reader(t5_name="t5")
    assert isinstance(network.text_encoder, PretrainedTextEncoder)
    assert network.arguments["t5_name"] == str((tmp_path / "t5").resolve())
    read = network.read_texts(TEXTS, multiple_of=4)
    assert read["text_embeds"].shape[1:] == (4, 14) and read.keys() == {"text_embeds", "text_mask"}
    context = network.text_context(texts=TEXTS)
    assert context is not None
    context.embeddings.sum().backward()
    assert all(weight.grad is not None for weight in network.parameters())
    assert not any(name.startswith("text_encoder") for name, _ in network.named_parameters())
    given = network.text_context(**read)
    assert given is not None
    torch.testing.assert_close(given.embeddings[given.mask], context.embeddings[context.mask])


def test_inference_tensors_can_be_learned_from() -> None:
    """No layer sees one. (Those that keep their input for the backward pass, as norms do on a GPU, would refuse it.)"""
    network = Reader(text_embed_dim=5)
    assert network.text_proj is not None
    network.text_proj.register_forward_pre_hook(lambda module, inputs: kept.append(inputs[0]))
    kept: list[Tensor] = []
    with torch.inference_mode():
        embeds = torch.randn(2, 3, 5)
    context = network.text_context(text_embeds=embeds)
    assert context is not None
    context.embeddings.square().sum().backward()
    assert all(weight.grad is not None for weight in network.parameters())
    assert not kept[0].is_inference()


def test_a_missing_or_doubled_text_is_named() -> None:
    network = Reader(t5_name=BYTES)
    embeds = torch.zeros(2, 3, 12)
    with pytest.raises(ValueError, match="give one of texts and text_embeds, not both"):
        network.check_texts(texts=TEXTS, text_embeds=embeds)
    with pytest.raises(ValueError, match="this network reads texts: give texts or text_embeds"):
        network.check_texts(0.5)
    network.check_texts(1.0)
    network.check_texts(texts=TEXTS)


def test_the_probability_of_a_drop() -> None:
    network = Reader(t5_name=BYTES)
    assert network.draw_keep(3, 0.0) is None
    dropped = network.draw_keep(3, 1.0)
    assert dropped is not None and not dropped.any()
    torch.manual_seed(0)
    some = network.draw_keep(4000, 0.25)
    assert some is not None and abs(some.float().mean() - 0.75) < 0.03


def test_two_contexts_as_one_batch() -> None:
    def context(length: int, value: float) -> Context:
        return Context(torch.full((2, length, 3), value), torch.ones(2, length, dtype=torch.bool))

    for first, second in ((context(4, 1.0), context(1, 2.0)), (context(1, 2.0), context(4, 1.0))):
        both = stacked(first, second)
        assert both.embeddings.shape == (4, 4, 3)
        assert both.mask.sum(dim=1).tolist() == [first.mask.shape[1]] * 2 + [second.mask.shape[1]] * 2
        kept: Tensor = both.embeddings[both.mask]
        assert set(kept.unique().tolist()) == {1.0, 2.0} and (both.embeddings[~both.mask] == 0).all()
