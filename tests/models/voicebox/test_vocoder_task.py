"""A vocoder against its discriminators, in the real loop: who is trained by what, what is heard, and that it learns."""

from pathlib import Path
from typing import Any

import pytest
import soundfile
import torch
from torch import Tensor
from torch.utils.data import DataLoader

import helicon
from helicon.data.audio import SoundDataset
from helicon.data.synthetic_sounds import SyntheticSounds
from helicon.engine.task import Loss
from helicon.metrics.audio import log_mel_distance
from helicon.models.voicebox.features import MelVoco
from helicon.models.voicebox.vocoder import Vocoder
from helicon.models.voicebox.vocoder_task import VocoderTask, VocoderTrainer
from models.soundstream.tiny import HZ, sound
from models.voicebox.test_vocoder import tiny


def losses_at(task: VocoderTask, step: int, batch: dict[str, Tensor] | None = None) -> dict[str, Loss]:
    outputs = task.forward({"audio": sound()} if batch is None else batch)
    return {update.network: update.loss(outputs) for update in task.updates(step)}


def trainer(vocoder: Vocoder | None = None, **options: Any) -> VocoderTrainer:
    chosen = {"num_train_steps": 2, "batch_size": 2, "tensorboard": False, "results_folder": "run", "valid_frac": 0.0}
    return VocoderTrainer(tiny() if vocoder is None else vocoder, **{**chosen, **options})


def made_up(count: int = 6) -> SyntheticSounds:
    return SyntheticSounds(count, HZ, 0.5)


def test_both_updates_share_one_forward_and_one_look_at_the_real_sound():
    vocoder, calls = tiny(), []
    vocoder.generator.register_forward_hook(lambda *_: calls.append("generator"))
    vocoder.discriminators.register_forward_hook(lambda module, inputs, _: calls.append(len(inputs[0])))
    losses_at(VocoderTask(vocoder), 0)
    assert calls == ["generator", 4, 2]


@pytest.mark.parametrize("kind", ["hinge", "least_squares"])
def test_each_update_trains_its_own_network_and_nobody_elses(kind: Any):
    vocoder = tiny(adversarial_loss=kind)
    task = VocoderTask(vocoder)
    assert task.networks == {"generator": vocoder.generator, "discriminator": vocoder.discriminators}
    assert task.averaged == ("generator",)
    for network, own in (("discriminator", "discriminators"), ("generator", "generator")):
        vocoder.zero_grad()
        losses_at(task, 0)[network].total.backward()
        assert {name.split(".")[0] for name, p in vocoder.named_parameters() if p.grad is not None} == {own}
        assert all(p.grad is not None for p in getattr(vocoder, own).parameters())


def test_the_adversary_starts_when_asked_and_every_term_has_a_name():
    task = VocoderTask(tiny(), discr_start_step=3)
    early, late = losses_at(task, 2), losses_at(task, 3)
    assert list(early) == ["generator"] and set(early["generator"].parts) == {"mel"}
    assert list(late) == ["discriminator", "generator"]
    assert set(late["generator"].parts) == {"mel", "adversarial", "feature"}
    alone = losses_at(VocoderTask(tiny(discr_periods=(), discr_windows=())), 3)
    assert list(alone) == ["generator"]


def test_padding_is_neither_heard_nor_judged():
    vocoder = tiny(discr_periods=(), discr_windows=())
    task, lengths = VocoderTask(vocoder), torch.tensor([205, 130])
    clean, dirty = sound(), sound()
    dirty[1, 130:] = 9.0
    first, second = (losses_at(task, 0, {"audio": x, "audio_lengths": lengths})["generator"] for x in (clean, dirty))
    torch.testing.assert_close(first.total, second.total)
    both = task.validate({"audio": dirty, "audio_lengths": lengths}).total
    apart = [task.validate({"audio": clean[row : row + 1, :n]}).total for row, n in enumerate((205, 130))]
    torch.testing.assert_close(both, torch.stack(apart).mean(), rtol=1e-4, atol=1e-4)
    assert task.weight({"audio": dirty, "audio_lengths": lengths}) == 335


def test_validation_is_the_log_mel_distance_and_the_same_each_time():
    task, batch = VocoderTask(tiny()), {"audio": sound()[:, None]}
    found = task.validate(batch)
    made = task.model(task.model.mel.log_mel(sound()))[:, :205]
    torch.testing.assert_close(found.total, log_mel_distance(made, sound(), HZ).mean())
    assert torch.equal(task.validate(batch).total, found.total)
    assert set(found.parts) == {"log_mel_distance", "stft_distance"}


def test_two_channels_are_refused():
    with pytest.raises(ValueError, match="one channel, not 2"):
        VocoderTask(tiny()).forward({"audio": torch.zeros(1, 2, 200)})


# -------------------------------------------------------------------------------------------------------- the trainer


def test_a_step_of_the_loop_moves_both_networks():
    run = trainer(dataset=made_up())
    before = {name: value.clone() for name, value in run.task.model.own_state().items()}
    logs = run.train_step()
    moved = {
        name.split(".")[0] for name, value in run.task.model.own_state().items() if not torch.equal(value, before[name])
    }
    assert {"generator", "discriminators"} <= moved
    assert {"mel", "adversarial", "feature", "discriminator"} <= set(logs)


def test_a_run_leaves_samples_beside_their_originals_and_a_vocoder_that_can_be_loaded():
    run = trainer(dataset=made_up(), valid_frac=0.4, save_results_every=2, save_model_every=2)
    run.train()
    names = {path.name for path in Path("run/samples").rglob("*") if path.is_file()}
    assert any(name.endswith("00-original.wav") for name in names) and any("00-ema.wav" in name for name in names)
    assert any(name.endswith("spectrograms.png") for name in names)
    again = helicon.load("run")
    assert isinstance(again, Vocoder)
    frames = again.mel.log_mel(sound())
    with run.inference():
        torch.testing.assert_close(again(frames), run.task.model(frames))
    features = MelVoco(n_mels=12, sampling_rate=HZ, n_fft=128, hop_length=32, vocoder=again)
    assert torch.equal(features.decode(frames), again(frames))


def folder_of_sounds() -> Path:
    Path("sounds").mkdir()
    for number in range(4):
        soundfile.write(f"sounds/{number}.wav", sound(1, 9000, seed=number)[0].numpy(), HZ)
    return Path("sounds")


@pytest.mark.parametrize(
    "source",
    [
        lambda: {"folder": folder_of_sounds()},
        lambda: {"folder": folder_of_sounds(), "data_max_length_seconds": 1.0},
        lambda: {"dataset": SoundDataset(folder_of_sounds(), HZ, max_length=HZ)},
        lambda: {"dataset": [sound(1, HZ, seed=number)[0] for number in range(4)]},
        lambda: {"train_dataloader": DataLoader([(0, sound(1, HZ)[0])] * 4, batch_size=2), "ds_fields": ("_", "audio")},
    ],
)
def test_where_sounds_may_come_from(source: Any):
    run, heard = trainer(**source()), []
    run.task.networks["generator"].register_forward_hook(lambda module, inputs, out: heard.append(tuple(out.shape)))
    run.train_step()
    assert heard == [(2, HZ)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"folder": "a", "dataset": made_up()}, "a folder or a dataset of sounds, not both"),
        ({"dataset": made_up(), "data_max_length_seconds": 1.0}, "cut already"),
        ({"dataset": SyntheticSounds(4, 16000)}, "the sounds have 16000 samples a second and the vocoder 8000"),
        (
            {"folder": "a", "data_max_length_seconds": 0.0},
            "data_max_length_seconds=0.0 is too short: the number of samples must be at least 1",
        ),
    ],
)
def test_what_cannot_be_learned_from_is_refused(options: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        trainer(**options)


@pytest.mark.slow
def test_it_learns_a_sound_better_than_griffin_lim_can_guess_it():
    """One second of a pluck, from its spectra alone, in about 5 seconds."""
    wave = torch.as_tensor(SyntheticSounds(1, HZ, 1.0)[0]["audio"]).float()[None]
    mel = {"n_mels": 40, "sampling_rate": HZ, "n_fft": 256, "hop_length": 64}
    guess = MelVoco(**mel)
    guessed = log_mel_distance(guess.decode(guess.encode(wave))[:, :HZ], wave, HZ).item()
    losses = {"multi_spectral_window_powers_of_two": (6, 8, 10), "multi_spectral_n_mels": (10, 40, 80)}
    torch.manual_seed(0)
    vocoder = Vocoder(**mel, **losses, dim=128, depth=2, mult=2, discr_periods=(), discr_windows=())
    run = trainer(vocoder, dataset=[wave[0]] * 2, batch_size=1, num_train_steps=200, lr=5e-3, use_ema=False)
    for _ in range(200):
        run.train_step()
    learned = log_mel_distance(MelVoco(**mel, vocoder=vocoder).decode(guess.encode(wave))[:, :HZ], wave, HZ).item()
    assert learned < 0.5 < 0.5 * guessed
