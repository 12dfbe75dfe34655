"""What a batch becomes: the loss of all its pairs, in chunks or at once; validation; samples."""

from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor

from helicon.engine.task import Batch
from helicon.metrics.retrieval import Retrieval
from helicon.models.musiclm.mulan import Latents, MuLaN
from helicon.models.musiclm.task import MuLaNTask
from helicon.models.musiclm.towers import TextTransformer
from models.musiclm.test_mulan import KINDS
from models.musiclm.tiny import PLAIN, audio_tower, mulan, text_tower

TEXTS = ["a loud noise", "a soft tone", "a chirp", "a very long and rather soft noise that rises", "a pluck"]
EQUALS = [*TEXTS[:3], TEXTS[1], TEXTS[0]]


def batch(count: int = 5, lengths: bool = True) -> Batch:
    generator = torch.Generator().manual_seed(0)
    audio = torch.randn(count, 1500, generator=generator) * 0.1
    found: Batch = {"audio": audio, "texts": TEXTS[:count]}
    return {**found, "audio_lengths": torch.tensor([1500, 900, 1500, 300, 1200])[:count]} if lengths else found


def gradients(model: MuLaN, loss: Tensor) -> dict[str, Tensor]:
    parameters = dict(model.named_parameters())
    return dict(zip(parameters, torch.autograd.grad(loss, list(parameters.values())), strict=True))


# ---------------------------------------------------------------------- chunks


@pytest.mark.parametrize("kind", KINDS)
def test_chunks_have_the_loss_and_the_gradients_of_the_whole_batch(kind: str) -> None:
    model = mulan(2, audio=PLAIN, **KINDS[kind])
    read = MuLaNTask(model).read({**batch(), "texts": EQUALS})
    whole = MuLaNTask(model).forward(read)
    expected = gradients(model, whole)
    assert any("log_temperature" in name for name in expected) and all(g.abs().max() > 0 for g in expected.values())
    loss = MuLaNTask(model, chunk_size=2).forward(read)
    torch.testing.assert_close(loss, whole, atol=1e-6, rtol=1e-5)
    for name, gradient in gradients(model, loss).items():
        torch.testing.assert_close(gradient, expected[name], atol=1e-5, rtol=1e-4, msg=name)


def test_a_chunk_is_the_same_when_it_is_passed_again() -> None:
    """What is random in training: spans that are hidden, speeds, and patches and features that are left out."""
    model = mulan(2, audio={"ff_dropout": 0.2, "attn_dropout": 0.2, "spec_aug_time_mask": 6})
    read = MuLaNTask(model).read(batch())
    torch.manual_seed(3)
    parts = [
        model.embed_audio(audio, lengths)
        for audio, lengths in zip(read["audio"].split(2), read["audio_lengths"].split(2), strict=True)
    ]
    audio = Latents(*(torch.cat(each, dim=-2) for each in zip(*parts, strict=True)))
    once = model.contrast(audio, model.embed_text(read["texts"], text_mask=read["text_mask"]))
    expected = gradients(model, once)
    torch.manual_seed(3)
    loss = MuLaNTask(model, chunk_size=2).forward(read)
    torch.testing.assert_close(loss, once)
    torch.manual_seed(4)  # what comes in between does not matter
    for name, gradient in gradients(model, loss).items():
        torch.testing.assert_close(gradient, expected[name], atol=1e-5, rtol=1e-4, msg=name)


def test_one_chunk_at_a_time_is_kept() -> None:
    """Each is passed again right before its gradient is taken, and not all of them before."""
    model, events = mulan(1), []

    def note(module: Any, inputs: Any, output: Tensor) -> None:
        events.append("pass")
        output.register_hook(lambda gradient: events.append("gradient"))

    model.audio.to_token.register_forward_hook(note)
    loss = MuLaNTask(model, chunk_size=2).forward(MuLaNTask(model).read(batch()))
    assert events == ["pass"] * 3
    loss.backward()
    assert events[3:] == ["pass", "gradient"] * 3


def test_chunks_that_cannot_be_are_refused() -> None:
    model, read = mulan(), mulan().read_texts(TEXTS)
    with pytest.raises(ValueError, match="chunk_size=0 must be at least 1"):
        model(batch()["audio"], **read, chunk_size=0)
    with pytest.raises(ValueError, match="chunk_size=0 must be at least 1"):
        MuLaNTask(model, chunk_size=0)
    with pytest.raises(ValueError, match="leave generator out"):
        model(batch()["audio"], **read, chunk_size=2, generator=torch.Generator())


# ---------------------------------------------------------------------- what is read


def test_captions_are_padded_and_never_cut() -> None:
    """63: in the package that it replaces all are cut to the shortest one of the batch."""
    model = mulan().eval()
    read = MuLaNTask(model).read(batch())
    assert read["texts"].shape == (5, 48) and read["text_mask"].sum(dim=1).tolist() == [len(t) + 2 for t in TEXTS]
    latents = model.get_text_latents(read["texts"], text_mask=read["text_mask"])
    for text, latent in zip(TEXTS, latents, strict=True):
        torch.testing.assert_close(latent, model.get_text_latents(raw_texts=[text])[0], atol=1e-5, rtol=1e-5)


def test_ids_in_place_of_texts() -> None:
    text = TextTransformer(16, 1, num_tokens=9, dim_head=8, heads=2, pad_id=8)
    model = MuLaN(audio_tower(**PLAIN), text, 12)
    ids = torch.tensor([[1, 2, 3, 4], [0, 5, -1, -1], [1, 2, 3, 4]])  # 0 is an id like others
    own = {"audio": batch(3)["audio"], "text_token_ids": ids}
    task = MuLaNTask(model)
    read = task.read(own)
    latents = model.get_text_latents(read["texts"], text_mask=read["text_mask"])
    torch.testing.assert_close(latents[1:2], model.get_text_latents(ids[1:2, :2], text_mask=ids[1:2, :2] >= 0))
    with task.keeping() as kept, torch.no_grad():
        task.validate(own)
    assert kept[0].captions == read["caption_ids"].tolist()
    assert read["caption_ids"].unique(return_inverse=True)[1].unique().tolist() == [0, 1]
    assert read["caption_ids"][0] == read["caption_ids"][2]
    with pytest.raises(ValueError, match=r'these sounds have no texts.*captions="column", "beside" or "folder"'):
        task.read({"audio": own["audio"]})


def test_ids_that_were_padded_by_a_tokenizer_have_the_loss_of_those_that_were_not() -> None:
    text = TextTransformer(16, 1, num_tokens=9, dim_head=8, heads=2, pad_id=3)
    model = MuLaN(audio_tower(**PLAIN), text, 12).eval()
    task, audio = MuLaNTask(model), batch(3)["audio"]
    tight, loose = (
        {"audio": audio, "text_token_ids": torch.tensor(rows)}
        for rows in (
            [[1, 2, 0, 4], [0, 5, -1, -1], [0, 5, -1, -1]],
            [[1, 2, 0, 4, 3, 3], [0, 5, 3, -1, -1, -1], [0, 5, 3, 3, 3, 3]],
        )
    )
    assert task.read(loose)["caption_ids"].equal(task.read(tight)["caption_ids"])
    with torch.no_grad():
        expected = task.validate(tight).total
        torch.testing.assert_close(task.validate(loose).total, expected)
        torch.testing.assert_close(task.forward(task.read(loose)), expected)
        ids = loose["text_token_ids"].masked_fill(loose["text_token_ids"] < 0, 3)
        torch.testing.assert_close(model(audio, ids), expected)
    assert model.caption_ids(ids).equal(task.read(tight)["caption_ids"]), "in whatever width another process has them"


def test_captions_that_are_cut_to_the_same_are_the_same() -> None:
    model = MuLaN(audio_tower(**PLAIN), text_tower(max_seq_len=8), 12).eval()
    task, texts = MuLaNTask(model), ["a tone, low", "a tone, high", "a chirp"]
    ids = task.read({**batch(3), "texts": texts})["caption_ids"]
    assert ids[0] == ids[1] != ids[2]
    expected = model(batch(3)["audio"], raw_texts=texts, caption_ids=torch.tensor([0, 0, 1]))
    torch.testing.assert_close(model(batch(3)["audio"], raw_texts=texts), expected)


def test_pairs_of_equal_captions_are_not_told_apart() -> None:
    """In training and in validation, and what is recorded sees tensors alone."""
    model = mulan(audio=PLAIN).eval()
    task, own = MuLaNTask(model), {**batch(), "texts": EQUALS}
    read = task.read(own)
    assert all(isinstance(value, Tensor) for value in read.values())
    audio, text = model(own["audio"], raw_texts=EQUALS, lengths=own["audio_lengths"], return_all_latents=True)
    expected = model.contrast(audio, text, caption_ids=torch.tensor([0, 1, 2, 1, 0]))
    for loss in (task.forward(read), task.validate(own).total):
        torch.testing.assert_close(loss, expected)
    assert (model.contrast(audio, text) - expected).abs() > 1e-3


# ---------------------------------------------------------------------- validation


@pytest.mark.parametrize("kind", ["decoupled", "sigmoid"])
def test_a_pair_alone_has_no_part_in_the_validation_loss(kind: str) -> None:
    model = mulan(**KINDS[kind]).eval()
    task = MuLaNTask(model)
    with task.keeping() as kept, torch.no_grad():
        losses = [task.validate(one) for one in (batch(), batch(1))]
    assert all(loss.total.isfinite() for loss in losses)
    assert [task.weight(one) for one in (batch(), batch(1))] == [5.0, 0.0]
    assert [len(pairs.audio) for pairs in kept] == [5, 1], "but it is found like others"
    assert Retrieval.of(*(torch.cat([getattr(p, name) for p in kept]) for name in ("audio", "text"))).audio_to_text


def test_nothing_is_kept_unless_it_is_asked_for() -> None:
    task = MuLaNTask(mulan().eval())
    with task.keeping():
        pass
    with torch.no_grad():
        task.validate(batch())
    assert task._kept is None


# ---------------------------------------------------------------------- samples


def test_samples_are_a_picture_and_a_table() -> None:
    task = MuLaNTask(mulan().eval())
    own = {**batch(), "texts": [TEXTS[0], *TEXTS[:4]]}
    with torch.no_grad():
        similarities = task.sample(own, seed=0)
    assert similarities.shape == (5, 5) and similarities[:, 0].allclose(similarities[:, 1], atol=1e-5)
    files = task.present(own, {"online": similarities})
    for name, write in files.items():
        write(Path(name))
    with Image.open("similarities-online.png") as picture:
        assert picture.size == (5 * 24, 5 * 24)
    lines = Path("captions-online.txt").read_text().splitlines()
    assert len(lines) == 5 * (1 + 3) and lines[0] == TEXTS[0]
    best = similarities[2].argmax().item()
    assert lines[9].split(maxsplit=1)[1] == own["texts"][best]
    assert len({line.split(maxsplit=1)[1] for line in lines[1:4]}) == 3, "each caption once"
