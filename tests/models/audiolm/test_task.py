from pathlib import Path

import pytest
import soundfile
import torch

from helicon.models.audiolm.stage import Stage
from helicon.models.audiolm.task import StageTask
from models.audiolm.tiny import ALL_CODES, IDS, KINDS, TEXTS
from models.soundstream.tiny import tiny

BATCH = {
    "semantic_token_ids": IDS.clamp(min=0),
    "semantic_token_ids_lengths": torch.tensor([6, 3]),
    "token_ids": ALL_CODES.clamp(min=0),
    "token_ids_lengths": torch.tensor([3, 5]),
    "is_end": torch.tensor([True, False]),
}


def task(name: str, **options: object) -> StageTask:
    kind = KINDS[name]
    return StageTask(kind.stage(kind.build(**options)))


@pytest.mark.parametrize("name", KINDS)
def test_the_weight_is_the_number_of_tokens_that_the_loss_is_a_mean_over(name: str) -> None:
    whole = task(name)
    both = whole.forward(dict(BATCH)).total * whole.weight(dict(BATCH))
    alone = []
    for row in range(2):
        batch = {key: value[row : row + 1] for key, value in BATCH.items()}
        alone.append(whole.forward(dict(batch)).total * whole.weight(dict(batch)))
    torch.testing.assert_close(both, sum(alone), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", KINDS)
def test_tokens_are_made_once_for_a_batch(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    made = Stage._codes_of
    monkeypatch.setattr(Stage, "_codes_of", lambda stage, batch: asked.append(1) or made(stage, batch))
    checked, batch = task(name), dict(BATCH)
    checked.weight(batch)
    first = checked.forward(batch).total
    assert torch.equal(checked.forward(batch).total, first)
    assert len(asked) == (0 if name == "semantic" else 1)
    assert checked.units(batch) == sum(ids.numel() for ids in KINDS[name].tokens.values())


@pytest.mark.parametrize("name", KINDS)
def test_texts_reach_the_network_and_are_always_there_for_validation(name: str) -> None:
    checked = task(name, has_condition=True, t5_name=None, cond_drop_prob=1.0)
    checked.model.train()
    first = {**BATCH, "texts": TEXTS}
    other = {**BATCH, "texts": ["a door", "a dog"]}
    checked.model.mask_prob = 0.0
    assert torch.equal(checked.forward(dict(first)).total, checked.forward(dict(other)).total), "all are dropped"
    checked.model.eval()
    assert not torch.equal(checked.validate(dict(first)).total, checked.validate(dict(other)).total)


def test_embedded_texts_have_their_lengths() -> None:
    checked = task("semantic", has_condition=True, cond_dim=4)
    embedded = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0))
    lengths = torch.tensor([3, 1])
    batch = {**BATCH, "text_embeds": embedded, "text_embeds_lengths": lengths}
    before = checked.validate(dict(batch)).total
    embedded[1, 1:] = 7.0
    assert torch.equal(checked.validate(dict(batch)).total, before)


@pytest.mark.parametrize("name", ["coarse", "fine", "delayed"])
def test_samples_are_sounds_beside_their_originals(name: str) -> None:
    kind = KINDS[name]
    codec = tiny(codebook_size=7, rq_num_quantizers=5)
    checked = StageTask(kind.stage(codec=codec))
    batch = dict(BATCH)
    first, again = (checked.sample(batch, seed=3) for _ in range(2))
    assert first is not None and again is not None
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    files = checked.present(batch, {"online": first})
    assert sorted(files) == ["00-online.wav", "00-original.wav", "01-online.wav", "01-original.wav", "spectrograms.png"]
    for file, write in files.items():
        write(Path(file))
    samples, hz = soundfile.read("01-original.wav")
    assert hz == codec.sample_hz and len(samples) == 5 * codec.downsample_factor
    assert Path("spectrograms.png").stat().st_size > 0


def test_a_semantic_stage_makes_no_sound() -> None:
    checked = task("semantic")
    assert checked.sample(dict(BATCH), seed=0) is None and checked.present(dict(BATCH), {"online": None}) == {}
