"""The codec through its real trainer: where sounds may come from, and what a run leaves behind."""

import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import soundfile
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import helicon
from helicon.data.audio import SoundDataset
from helicon.data.synthetic_sounds import SyntheticSounds
from helicon.models.soundstream.model import SoundStream
from helicon.models.soundstream.trainers import SoundStreamTrainer, training_sounds
from models.soundstream.tiny import HZ, sound, tiny

LENGTH = 160


def trainer(model: SoundStream | None = None, **options: Any) -> SoundStreamTrainer:
    chosen = {
        "num_train_steps": 2,
        "batch_size": 2,
        "grad_accum_every": 1,
        "warmup_steps": 0,
        "valid_frac": 0.0,
        "tensorboard": False,
        "results_folder": "run",
    }
    return SoundStreamTrainer(tiny() if model is None else model, **{**chosen, **options})


def wave(number: int, length: int = LENGTH) -> Tensor:
    """A constant of its own: recognised from any crop."""
    return torch.full((length,), 0.05 * (number + 1))


def folder_of_sounds(name: str = "sounds", count: int = 6, length: int = 400, hz: int = HZ) -> Path:
    folder = Path(name)
    (folder / "below").mkdir(parents=True)
    for number in range(count):
        path = folder / ("below" if number % 2 else "") / f"{number}.wav"
        soundfile.write(path, wave(number, length).numpy(), hz, subtype="FLOAT")
    return folder


class Own(Dataset):
    """A user's dataset, whose samples are whatever `make` says."""

    def __init__(self, make: Callable[[int], Any], count: int = 6):
        self.make, self.count = make, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        return self.make(index)


def heard(run: SoundStreamTrainer, steps: int) -> list[int]:
    """Which sounds the network was given in the first steps."""
    numbers: list[int] = []

    def note(network: nn.Module, inputs: tuple[Any, ...]) -> None:
        assert inputs[0].shape == (2, 1, LENGTH)
        numbers.extend(round(float(audio.mean()) / 0.05) - 1 for audio in inputs[0])

    with run.task.networks["generator"].register_forward_pre_hook(note):
        for _ in range(steps):
            run.train_step()
    return numbers


def state(run: SoundStreamTrainer) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in run.task.model.own_state().items()}


# ---------------------------------------------------------------------------------------------- where sounds come from

SOURCES: dict[str, Callable[[], dict[str, Any]]] = {
    "folder": lambda: {"folder": folder_of_sounds(), "data_max_length": LENGTH},
    "folder by seconds": lambda: {"folder": str(folder_of_sounds()), "data_max_length_seconds": LENGTH / HZ},
    "sound dataset": lambda: {"dataset": SoundDataset(folder_of_sounds(), HZ, max_length=LENGTH)},
    "tensors": lambda: {"dataset": Own(wave)},
    "longer tensors": lambda: {"dataset": Own(lambda n: wave(n, 300)), "data_max_length": LENGTH},
    "tuples with text": lambda: {"dataset": Own(lambda n: ("a sound", wave(n)))},
    "dicts": lambda: {"dataset": Own(lambda n: {"audio": wave(n)})},
    "other rate": lambda: {
        "dataset": Own(lambda n: {"audio": wave(n, 400), "sample_hz": 2 * HZ}),
        "data_max_length": LENGTH,
    },
    "loader of tensors": lambda: {"train_dataloader": DataLoader(Own(wave), batch_size=2, shuffle=True)},
    "loader of tuples": lambda: {
        "train_dataloader": DataLoader(Own(lambda n: (n, wave(n))), batch_size=2, shuffle=True),
        "ds_fields": ("_", "audio"),
    },
}


@pytest.mark.parametrize("source", SOURCES)
def test_every_source_gives_its_sounds_each_once_an_epoch(source: str):
    """20: in the reference seconds that are no whole number break the dataset."""
    numbers = heard(trainer(**SOURCES[source](), num_train_steps=100), 6)
    assert sorted(numbers[:6]) == sorted(numbers[6:]) == list(range(6))
    assert numbers[:6] != numbers[6:], "in an order of their own each time"


def test_short_sounds_are_padded_and_their_lengths_known():
    dataset = Own(lambda n: wave(n, 100 + n))
    run = trainer(dataset=dataset, data_max_length=LENGTH)
    seen = []
    forward = run.task.forward
    run.task.forward = lambda batch: seen.append(batch) or forward(batch)
    run.train()
    assert all(batch["audio"].shape == (2, LENGTH) for batch in seen)
    for batch in seen:
        numbers = (batch["audio"][:, 0] / 0.05).round().int() - 1
        assert batch["audio_lengths"].tolist() == (100 + numbers).tolist()


def test_a_target_beside_the_noisy_sound_reaches_the_task():
    dataset = Own(lambda n: {"audio": -wave(n, 300), "target": wave(n, 300)})
    run = trainer(tiny(denoise_conditioning=True), dataset=dataset, data_max_length=LENGTH, with_target=True)
    seen = []
    forward = run.task.forward
    run.task.forward = lambda batch: seen.append(batch) or forward(batch)
    run.train()
    assert seen and all(torch.equal(batch["audio"], -batch["target"]) for batch in seen)


def test_the_validation_set_given_is_the_one_used():
    """10: in the reference it is overwritten by a split, or by the training set."""
    run = trainer(dataset=Own(wave), val_dataset=Own(lambda n: -wave(n), 3), val_num_batches=None, valid_frac=0.5)
    batches = list(run.feed.valid.validation(None))
    assert sum(len(batch["audio"]) for batch in batches) == 3 and all((b["audio"] < 0).all() for b in batches)
    assert len(run.feed.train.dataset) == 6


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"folder": "sounds"}, "data_max_length or data_max_length_seconds is needed: how much of a sound"),
        ({"folder": "nowhere", "data_max_length": 9}, "the data folder nowhere does not exist"),
        ({"folder": "sounds", "dataset": Own(wave)}, "a folder or a dataset of sounds, not both"),
        ({}, "give either a dataset"),
        (
            {"folder": "sounds", "data_max_length": 9, "with_target": True},
            "with_target=True needs a dataset whose samples",
        ),
        ({"dataset": SyntheticSounds(4, 2 * HZ)}, "the sounds have 16000 samples a second and the codec 8000"),
        ({"dataset": Own(wave), "discr_start_step": -1}, "must not be negative"),
    ],
)
def test_what_cannot_be_trained_on_is_told_in_one_sentence(options: dict[str, Any], sentence: str):
    folder_of_sounds()
    with pytest.raises(ValueError, match=sentence) as caught:
        trainer(**options)
    assert "\n" not in str(caught.value)


def test_the_data_of_recipes():
    made_up = training_sounds("synthetic", sample_hz=HZ, data_max_length=4000, num_samples=3, seed=1)
    assert len(made_up) == 3 and made_up[0]["audio"].shape == (4000,)
    files = training_sounds(folder_of_sounds(hz=2 * HZ), sample_hz=HZ, data_max_length_seconds=0.02, channels=2)
    assert files[0]["audio"].shape == (2, 160)
    assert trainer(dataset=files, model=tiny(input_channels=2)).feed.train.dataset is files


# ---------------------------------------------------------------------------------------------- what a run does


def test_samples_of_every_time_are_kept_and_validation_is_measured():
    """11: in the reference each sample overwrites the last, and there is no validation loss."""
    run = trainer(dataset=Own(wave), val_dataset=Own(wave, 3), save_results_every=1)
    run.train()
    names = {path.name for path in Path("run/samples").iterdir()}
    assert {
        f"step-0000000{step}-0{n}-{kind}.wav"
        for step in (1, 2)
        for n in (0, 1)
        for kind in ("original", "online", "ema")
    } < names
    assert {"step-00000001-spectrograms.png", "step-00000002-spectrograms.png"} < names
    logged = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
    validated = [line for line in logged if "valid_loss" in line]
    assert [line["step"] for line in validated] == [1, 2]
    assert {"valid_wave", "valid_mel", "valid_si_sdr", "valid_log_mel_distance", "valid_codebook_use"} <= validated[
        0
    ].keys()
    assert any("audio_seconds_per_second" in line for line in logged)


def test_networks_are_in_training_mode_after_a_validation():
    """1: in the reference training turns off with the first validation."""
    run = trainer(dataset=Own(wave), val_dataset=Own(wave, 3), save_results_every=1)
    modes = []
    run.task.model.autoencoder.register_forward_hook(lambda module, *_: modes.append(module.quantizer.training))
    run.train()
    assert modes[0] and modes.count(True) == 2, "both steps in training mode, and all that looks in the other"
    assert modes.count(False) > 0


def test_each_network_has_its_own_clipping_and_rate():
    """4: in the reference discr_max_grad_norm fails under DDP. 14: warmup_steps=0 fails. 15: clipping is shared."""
    run = trainer(
        dataset=Own(wave),
        warmup_steps=0,
        max_grad_norm=0.1,
        discr_max_grad_norm=0.2,
        discr_lr=1e-5,
        discr_warmup_steps=5,
    )
    clips = {name: optimizer.settings.max_grad_norm for name, optimizer in run.optimizers.items()}
    assert clips == {"generator": 0.1, "discriminator": 0.2}
    logs = run.train_step()
    assert logs["lr"].item() == pytest.approx(2e-4) and logs["discriminator_lr"].item() == pytest.approx(2e-6)
    assert {"grad_norm", "discriminator_grad_norm", "gradient_penalty"} <= logs.keys()


def test_the_average_is_of_the_codec_alone_and_copies_codebooks():
    """21: the reference averages discriminators and mixes codebooks, and saves three copies of everything."""
    run = trainer(dataset=Own(wave), num_train_steps=3, ema_update_after_step=0, ema_update_every=1)
    run.train()
    saved = load_file("run/checkpoints/step-00000003/ema.safetensors")
    assert saved and all(name.startswith("autoencoder.") for name in saved)
    online = load_file("run/checkpoints/step-00000003/model.safetensors")
    codebooks = [name for name in saved if name.endswith("codebook")]
    assert codebooks and all(torch.equal(saved[name], online[name]) for name in codebooks)
    weights = "autoencoder.decoder."
    assert any(not torch.equal(saved[name], online[name]) for name in saved if name.startswith(weights))


def test_tokenize_uses_the_averaged_weights_and_leaves_everything_as_it_was():
    """8: the reference's tokenize is a NameError."""
    run = trainer(dataset=Own(sound_of), num_train_steps=4, lr=1e-2, ema_update_after_step=0, ema_update_every=1)
    run.train()
    before, audio = state(run), sound()
    codes = run.tokenize(audio)
    assert torch.equal(codes, run.ema_tokenizer(audio)) and codes.shape == (2, 26, 3)
    assert torch.equal(codes, helicon.load("run").tokenize(audio))
    assert not torch.equal(codes, helicon.load("run", use_ema=False).tokenize(audio))
    assert all(torch.equal(value, before[name]) for name, value in state(run).items())
    with pytest.raises(ValueError, match="keeps no averaged weights"):
        _ = trainer(dataset=Own(wave), use_ema=False, results_folder="other").ema_tokenizer


def sound_of(number: int) -> Tensor:
    return sound(1, LENGTH, seed=number)[0]


def test_set_model_as_ema_model_does_what_its_name_says():
    """8: the reference's copies the other way."""
    run = trainer(dataset=Own(wave), num_train_steps=3, ema_update_after_step=0, ema_update_every=1)
    run.train()
    averages = [value.clone() for value in run.ema.average]
    assert not all(torch.equal(a, b) for a, b in zip(averages, run.ema.online, strict=True))
    run.set_model_as_ema_model_()
    assert all(torch.equal(a, b) for a, b in zip(averages, run.ema.online, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(averages, run.ema.average, strict=True))


def test_two_trainers_in_one_process_and_a_trainer_is_no_module():
    """12: eval() runs the reference's whole training. 18: a second trainer is forbidden for ever."""
    first, second = (trainer(dataset=Own(wave), results_folder=name) for name in ("a", "b"))
    assert not isinstance(first, nn.Module) and not hasattr(first, "eval")
    first.train()
    second.train()
    assert first.unwrapped_soundstream is first.task.model and second.steps == 2


def test_a_resumed_run_equals_the_unbroken_one_bit_for_bit():
    """6: with the balance of the losses, which is a running mean. 7: and the last step is saved."""
    options = {"dataset": Own(sound_of), "num_train_steps": 4, "save_model_every": 2, "discr_start_step": 1}
    whole = trainer(**options, results_folder="whole")
    whole.train()
    broken = trainer(**options, results_folder="broken")
    for _ in range(2):
        broken.train_step()
    broken.writer.wait()
    resumed = trainer(**options, results_folder="broken", resume=True)
    assert resumed.step == 2
    resumed.train()
    assert all(torch.equal(value, state(whole)[name]) for name, value in state(resumed).items())
    assert (state(whole)["loss.balancer.counts"] > 1).all()
    assert Path("broken/checkpoints/step-00000004").is_dir()


REFERENCE = (
    "soundstream num_train_steps batch_size data_max_length data_max_length_seconds folder dataset val_dataset train_dataloader "
    "val_dataloader lr grad_accum_every wd warmup_steps scheduler scheduler_kwargs discr_warmup_steps discr_scheduler "
    "discr_scheduler_kwargs max_grad_norm discr_max_grad_norm save_results_every save_model_every log_losses_every results_folder "
    "valid_frac random_split_seed use_ema ema_beta ema_update_after_step ema_update_every apply_grad_penalty_every dl_num_workers "
    "accelerator accelerate_kwargs init_process_group_timeout_seconds dataloader_drop_last split_batches use_wandb_tracking "
    "force_clear_prev_results"
)


def test_every_keyword_of_the_reference_is_known():
    from helicon.engine.options import ALIASES

    known = inspect.signature(SoundStreamTrainer).parameters
    assert not {ALIASES.get(name, name) for name in REFERENCE.split()} - known.keys()
    assert (known["lr"].default, known["grad_accum_every"].default, known["warmup_steps"].default) == (2e-4, 4, 1000)
