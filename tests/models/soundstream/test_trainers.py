"""The codec through its real trainer: where sounds may come from, and what a run leaves behind."""

import inspect
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import soundfile
import torch
from accelerate.tracking import GeneralTracker
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import helicon
from helicon.data.audio import SoundDataset, get_dataloader
from helicon.data.synthetic_sounds import SyntheticSounds
from helicon.engine.optim import LossScale
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
    numbers = heard(trainer(**SOURCES[source](), num_train_steps=100, discr_start_step=100), 6)
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
        (
            {"folder": "sounds", "data_max_length": 0},
            "data_max_length=0 is too short: the number of samples must be at",
        ),
        (
            {"dataset": Own(wave), "data_max_length_seconds": 1e-9},
            "data_max_length_seconds=1e-09 is too short: the number of samples must be at least 1 at 8000 Hz",
        ),
        (
            {"folder": "sounds", "data_max_length": 9, "data_max_length_seconds": 1.0},
            "give data_max_length or data_max_length_seconds, not both",
        ),
        ({"dataset": SyntheticSounds(4, HZ), "data_max_length": 9}, "the sounds of this dataset are cut already"),
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
    chosen = training_sounds("synthetic", sounds={"kinds": ["pluck"], "held_out": [["pluck", "low"]]})
    assert chosen.pairs == [("pluck", "middle"), ("pluck", "high")]
    with pytest.raises(ValueError, match=r"data.sounds chooses among made-up sounds, and the source is sounds"):
        training_sounds("sounds", sounds={"kinds": ["pluck"]})
    with pytest.raises(ValueError, match=r"data.sounds"):
        training_sounds("synthetic", sounds={"colours": ["red"]})
    files = training_sounds(folder_of_sounds(hz=2 * HZ), sample_hz=HZ, data_max_length_seconds=0.02)
    assert files[0]["audio"].shape == (160,)


def test_the_sounds_of_recipes_have_the_channels_of_the_codec():
    """(Nothing but `model.input_channels=2` is needed.)"""
    mono = wave(0, 400)
    Path("sounds").mkdir()
    soundfile.write("sounds/0.wav", torch.stack((mono, -mono), dim=1).numpy(), HZ, subtype="FLOAT")
    soundfile.write("sounds/1.wav", mono.numpy(), HZ, subtype="FLOAT")
    files = training_sounds("sounds", sample_hz=HZ, data_max_length=400)
    made_up = training_sounds("synthetic", sample_hz=HZ, data_max_length=4000, num_samples=3)
    stereo = tiny(input_channels=2)
    found = trainer(dataset=files, model=stereo).feed.train.dataset
    assert torch.equal(found[0]["audio"], torch.stack((mono, -mono)))
    assert torch.equal(found[1]["audio"], torch.stack((mono, mono)))
    both = trainer(dataset=made_up, model=stereo, results_folder="made-up").feed.train.dataset[0]
    assert torch.equal(both["audio"], made_up[0]["audio"].expand(2, -1)) and both["texts"] == made_up[0]["texts"]
    assert trainer(dataset=made_up, results_folder="mono").feed.train.dataset is made_up
    trainer(dataset=files, model=stereo, results_folder="stereo").train_step()


@pytest.mark.parametrize("options", [{}, {"input_channels": 2}], ids=["mono", "stereo"])
def test_a_loader_may_tell_the_lengths(options: dict[str, Any]):
    shape = (2,) if options else ()
    waves = Own(lambda n: wave(n, 100 + n).expand(*shape, -1).clone())
    loader = get_dataloader(waves, batch_size=2, with_lengths=True)
    run = trainer(tiny(**options), train_dataloader=loader)
    assert run.prepare(next(iter(loader)))["audio_lengths"].tolist() == [100, 101]
    run.train_step()


def test_a_window_that_no_crop_fills_is_told_of(caplog: pytest.LogCaptureFixture):
    """What a frame never saw in training it sees in every longer recording: the codec got worse from second to second."""
    sounds = Own(wave)  # of 160 samples: 20 frames
    trainer(tiny(attn_window_size=20), dataset=sounds).train_step()
    trainer(tiny(use_local_attn=False), dataset=sounds, results_folder="without").train_step()
    assert "attn_window_size" not in caplog.text
    longer = trainer(tiny(attn_window_size=25), dataset=sounds, results_folder="longer")
    longer.train_step()
    longer.train_step()
    assert caplog.text.count("attn_window_size=25 frames, and these sounds have 20") == 1
    assert "give data_max_length_seconds=0.03 or more, or a smaller window" in caplog.text


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (
            {"data_max_length": 3999},
            r"data_max_length=3999 is too short: the number of samples must be at least 4000 at 8000 Hz \(0.5 s\)",
        ),
        ({"data_max_length": 0}, "data_max_length=0 is too short"),
        ({"data_max_length_seconds": 0.4}, "data_max_length_seconds=0.4 is too short"),
        ({"data_max_length": 4000, "data_max_length_seconds": 1.0}, "not both"),
    ],
)
def test_made_up_sounds_that_are_too_short_are_told_in_the_words_of_the_user(options: dict[str, Any], sentence: str):
    with pytest.raises(ValueError, match=sentence):
        training_sounds("synthetic", sample_hz=HZ, **options)


# ---------------------------------------------------------------------------------------------- what a run does


def test_samples_of_every_time_are_kept_and_validation_is_measured():
    """11: in the reference each sample overwrites the last, and there is no validation loss."""
    heard = Own(lambda n: sound(1, LENGTH, seed=n)[0] if n else wave(n), 3)
    run = trainer(dataset=Own(wave), val_dataset=heard, save_results_every=1)
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
    assert all(-99 < line["valid_si_sdr"] < 99 for line in validated), "of two sounds: the first does not move"
    assert any("audio_seconds_per_second" in line for line in logged)


def test_validation_looks_at_the_number_of_batches_asked_for():
    """9: in the reference it is a bool: one batch, or none and an error."""
    for asked, looked in ((2, 2), (None, 3)):
        run = trainer(dataset=Own(wave), val_dataset=Own(wave, 5), val_num_batches=asked, results_folder=f"run{asked}")
        batches = []
        validate = run.task.validate
        run.task.validate = lambda batch, to=batches, validate=validate: to.append(batch) or validate(batch)
        run.validate()
        assert len(batches) == looked


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
    averaged, online = run.ema_tokenizer, run.unwrapped_soundstream
    assert torch.equal(codes, averaged.tokenize(audio)) and codes.shape == (2, 26, 3)
    assert not averaged.training and not any(weight.requires_grad for weight in averaged.parameters())
    assert not torch.equal(codes, online.tokenize(audio)) and all(w.requires_grad for w in online.parameters())
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


def test_a_codec_takes_its_weights_from_a_run_as_well_as_from_a_checkpoint():
    averaged = {"ema_update_after_step": 0, "ema_update_every": 1}
    trainer(dataset=Own(sound_of), num_train_steps=3, lr=1e-2, save_model_every=2, **averaged).train()
    earlier, newest = (f"run/checkpoints/step-0000000{step}" for step in (2, 3))
    codec, codes = tiny(), {}
    for folder in (earlier, newest, "run"):
        codec.load_from_trainer_saved_obj(folder)
        codes[folder] = codec.tokenize(sound())
    assert torch.equal(codes["run"], codes[newest]) and not torch.equal(codes["run"], codes[earlier])
    assert codec.source == Path(newest).resolve() and torch.equal(codes["run"], helicon.load("run").tokenize(sound()))


def test_what_the_discriminators_iterators_said_stands_elsewhere():
    run = trainer(dataset=Own(wave))
    for name in ("multiscale_discriminator_iter", "multiscale_discriminator_optim_iter"):
        assert not hasattr(run, name)
    with pytest.raises(AttributeError, match=r'loop over trainer.raw\["discriminator"\].members.values\(\)'):
        _ = run.multiscale_discriminator_iter
    with pytest.raises(AttributeError, match=r'use trainer.optimizers\["discriminator"\]'):
        _ = run.multiscale_discriminator_optim_iter
    assert list(run.raw["discriminator"].members.values()) and run.optimizers["discriminator"]


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
    for name in ("whole", "broken"):
        assert sorted(path.name for path in Path(name, "checkpoints").iterdir()) == ["step-00000002", "step-00000004"]


def test_the_step_is_in_the_checkpoint_and_not_in_its_name():
    """5: the reference reads it from the path, in which there may be any number, or none."""
    run = trainer(dataset=Own(wave))
    run.train()
    run.save("experiment-7/best")
    later = trainer(dataset=Own(wave), num_train_steps=3, results_folder="later")
    later.load("experiment-7/best")
    assert later.step == 2
    later.train()
    assert Path("later/checkpoints/step-00000003").is_dir()


def test_a_resumed_run_goes_on_with_its_loss_scale():
    """6: (fp16 needs a GPU; here a scale is put in by hand.)"""
    run, other = (trainer(dataset=Own(wave), results_folder=name) for name in ("a", "b"))
    run.scale = LossScale(torch.device("cpu"), initial=2.0**5)
    run.train()
    other.scale = LossScale(torch.device("cpu"))
    other.load("a")
    assert (other.scale.value.item(), other.scale.good_steps.item()) == (2.0**5, 2)


class Wandb(GeneralTracker):
    """What Accelerate's tracker of that name looks like from outside."""

    name = "wandb"
    requires_logging_directory = False
    run = SimpleNamespace(id="abc")

    @property
    def tracker(self) -> SimpleNamespace:
        return self.run

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        pass

    def log(self, values: dict[str, Any], step: int | None = None, **_: Any) -> None:
        pass


def test_a_resumed_run_is_the_same_run_for_its_tracker(monkeypatch: pytest.MonkeyPatch):
    """6: in the reference it is a new one."""
    trainer(dataset=Own(wave), trackers=[Wandb()]).train()
    resumed = trainer(dataset=Own(wave), trackers=[Wandb()], num_train_steps=3, resume=True)
    asked, start = [], resumed.accelerator.init_trackers
    monkeypatch.setattr(resumed.accelerator, "init_trackers", lambda *a, **k: asked.append(k) or start(*a, **k))
    resumed.train()
    assert [keywords["init_kwargs"] for keywords in asked] == [{"wandb": {"id": "abc", "resume": "allow"}}]


def test_a_folder_that_is_not_there_need_not_be_cleared():
    """13: in the reference it is a FileNotFoundError."""
    trainer(dataset=Own(wave), results_folder="not/there", force_clear_prev_results=True).train()
    assert Path("not/there/checkpoints/step-00000002").is_dir()


TWO_PROCESSES = """
import os, sys
import torch, torch.distributed as dist
sys.path.insert(0, sys.argv[1])
from models.soundstream.tiny import sound, tiny
from helicon.models.soundstream.trainers import SoundStreamTrainer

sounds = [sound(1, 160, seed=number)[0] for number in range(16)]
run = SoundStreamTrainer(
    tiny(), dataset=sounds, val_dataset=sounds[:4], num_train_steps=3, batch_size=2, grad_accum_every=2, warmup_steps=0,
    discr_max_grad_norm=1e-4, apply_grad_penalty_every=2, tensorboard=False, results_folder="run"
)
before = {name: value.clone() for name, value in run.task.model.state_dict().items()}
norms = []
run.train(lambda logs: norms.append(logs["discriminator_grad_norm"].item()))
assert min(norms) > 1e-4, f"there is something to clip: {norms}"
moved = set()
for name, value in run.task.model.state_dict().items():
    both = [torch.empty_like(value) for _ in range(2)]
    dist.all_gather(both, value)
    assert torch.equal(both[0], both[1]), name
    moved |= set() if torch.equal(value, before[name]) else {name.partition(".")[0]}
assert moved == {"autoencoder", "discriminators", "loss"}, moved
dist.barrier()
os._exit(0)  # gloo's threads do not always end in order
"""


@pytest.mark.slow
def test_both_processes_have_one_codec_and_the_same_discriminators(tmp_path: Path):
    """3: in the reference the ranks' discriminators drift apart. 4: and clipping them fails on a wrapped network."""
    script = tmp_path / "two_processes.py"
    script.write_text(TWO_PROCESSES)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    subprocess.run([*launch, str(script), str(Path(__file__).parents[2])], check=True, timeout=600)


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
