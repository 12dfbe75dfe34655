import copy
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch
from PIL import Image
from torch import nn

from helicon.engine.task import Loss
from helicon.metrics.audio import log_mel_distance, si_sdr, spectrogram_image
from helicon.models.soundstream.losses import PENALTY
from helicon.models.soundstream.model import SoundStream
from helicon.models.soundstream.task import SoundStreamTask, write_wave
from models.soundstream.tiny import HZ, sound, tiny


def batch(size: int = 2, length: int = 205) -> dict[str, Any]:
    return {"audio": sound(size, length)}


def losses_at(task: SoundStreamTask, step: int, given: dict[str, Any] | None = None) -> dict[str, Loss]:
    outputs = task.forward(batch() if given is None else given)
    return {update.network: update.loss(outputs) for update in task.updates(step)}


def parameters_with_gradient(model: SoundStream) -> set[str]:
    return {name.split(".")[0] for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(("every", "with_penalty"), [(4, [0, 4, 8]), (3, [0, 3, 6, 9]), (0, [])])
def test_the_gradient_penalty_has_the_cadence_asked_for(every: int, with_penalty: list[int]):
    task = SoundStreamTask(tiny(), apply_grad_penalty_every=every)
    paid = [step for step in range(10) if PENALTY in losses_at(task, step)["discriminator"].parts]
    assert paid == with_penalty


def test_both_updates_share_one_reconstruction_and_one_look_at_the_real_sound():
    """16: the reference runs the generator twice a step, on different data. 5: and calls discriminators four times."""
    model, calls = tiny(), []
    model.autoencoder.register_forward_hook(lambda *_: calls.append("generator"))
    model.discriminators.register_forward_hook(lambda module, inputs, _: calls.append(len(inputs[0])))
    losses_at(SoundStreamTask(model), 1)
    assert calls == ["generator", 4, 2]


def test_the_codebooks_learn_once_a_step():
    """16: in the reference also from the discriminators' pass."""
    model, quantizer = tiny(), tiny().autoencoder.quantizer
    quantizer.load_state_dict(model.autoencoder.quantizer.state_dict())
    task = SoundStreamTask(model)
    with torch.no_grad():
        quantizer(model.autoencoder.encode(batch()["audio"][:, None]))
    for loss in losses_at(task, 0).values():
        loss.total.backward()
    expected = quantizer.state_dict()
    for name, value in model.autoencoder.quantizer.state_dict().items():
        torch.testing.assert_close(value, expected[name])


def test_each_update_trains_its_own_network_and_nobody_elses():
    """15: in the reference the discriminators' gradients enter the clipping of the autoencoder's."""
    model = tiny()
    task = SoundStreamTask(model)
    for network, own in (("discriminator", "discriminators"), ("generator", "autoencoder")):
        model.zero_grad()
        losses_at(task, 0)[network].total.backward()
        assert parameters_with_gradient(model) == {own}
        assert all(p.grad is not None for p in getattr(model, own).parameters())


def test_the_adversary_starts_when_asked():
    task = SoundStreamTask(tiny(), discr_start_step=3)
    early, late = losses_at(task, 2), losses_at(task, 3)
    assert list(early) == ["generator"] and set(early["generator"].parts) & {"adversarial", "feature"} == set()
    assert list(late) == ["discriminator", "generator"] and {"adversarial", "feature"} <= set(late["generator"].parts)


def test_training_without_an_adversary():
    model = tiny(discr_periods=(), discr_windows=())
    task = SoundStreamTask(model)
    losses = losses_at(task, 0)
    assert list(task.networks) == list(losses) == ["generator"]
    losses["generator"].total.backward()
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize("options", [{}, {"use_lookup_free_quantizer": True}])
def test_every_term_has_a_name(options: dict[str, Any]):
    task = SoundStreamTask(tiny(**options))
    losses = losses_at(task, 0)
    parts = losses["generator"].parts
    assert set(parts) == {"wave", "mel", "adversarial", "feature", "quantizer", "perplexity", "codebook_use"}
    assert set(losses["discriminator"].parts) == {"discriminator", PENALTY}
    weighted = sum(weight * parts[name] for name, weight in task.model.loss.weights.items()) + parts["quantizer"]
    torch.testing.assert_close(losses["generator"].total.detach(), weighted)
    assert not any(part.requires_grad for loss in losses.values() for part in loss.parts.values())


def test_what_is_trained_and_averaged():
    """21: the reference averages the discriminators too, and mixes codebooks with their own past."""
    model = tiny()
    task = SoundStreamTask(model)
    assert task.networks == {"generator": model.autoencoder, "discriminator": model.discriminators}
    assert task.averaged == ("generator",) and not task.frozen
    assert task.unit == "audio_seconds" and task.units({"audio": torch.zeros(6, HZ // 2)}) == 3


def test_networks_are_called_through_the_tasks_own_table():
    """The loop puts the distributed wrappers there."""
    model, called = tiny(), []

    class Wrapper(nn.Module):
        def __init__(self, name: str, module: nn.Module):
            super().__init__()
            self.name, self.module = name, module

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            called.append(self.name)
            return self.module(*args, **kwargs)

    task = SoundStreamTask(model)
    task.networks = {name: Wrapper(name, network) for name, network in task.networks.items()}
    losses_at(task, 0)
    assert called == ["generator", "discriminator", "discriminator", "discriminator"]  # the second for the penalty


# ---------------------------------------------------------------------------------------------- lengths and targets


def test_padding_is_not_learned_from():
    """45: the reference pads with zeros and learns them."""
    task = SoundStreamTask(tiny(balance_losses=False))
    padded, cropped = batch(), {"audio": sound()[:, :120]}
    padded["audio"][:, 120:] = 7.0
    padded["audio_lengths"] = torch.tensor([120, 120])
    assert task.weight(padded) == task.weight(cropped) == 240
    torch.manual_seed(0)
    of_padded = losses_at(task, 1, padded)
    task = SoundStreamTask(tiny(balance_losses=False))
    torch.manual_seed(0)
    of_cropped = losses_at(task, 1, cropped)
    for name in ("wave", "mel", "quantizer"):
        torch.testing.assert_close(of_padded["generator"].parts[name], of_cropped["generator"].parts[name])


def test_a_batch_with_a_target_is_compared_with_it():
    """41: in the reference only the error of the wave is."""
    model = tiny(denoise_conditioning=True).eval()
    task, noisy, clean = SoundStreamTask(model), sound(), sound(seed=4)
    outputs = task.forward({"audio": noisy, "target": clean})
    assert torch.equal(outputs.target, clean[:, None])
    assert torch.equal(outputs.reconstruction.audio, model(noisy, is_denoising=True, return_recons_only=True))
    flags = torch.tensor([True, False])
    nn.init.normal_(model.autoencoder.decoder_film.scale_shift.weight)
    both = [task.forward({"audio": noisy, "target": clean, "is_denoising": f}) for f in (flags, ~flags)]
    assert not torch.equal(both[0].reconstruction.audio, both[1].reconstruction.audio)
    plain = SoundStreamTask(tiny().eval()).forward({"audio": noisy, "target": clean})
    assert torch.equal(plain.target, clean[:, None]), "a codec that is told nothing can learn to denoise too"


def test_validation_measures_the_reconstruction_alone():
    """11: the reference has no validation loss."""
    model, audio = tiny().eval(), batch()["audio"][:, None]
    before = copy.deepcopy(model.state_dict())
    with torch.no_grad():
        loss = SoundStreamTask(model).validate(batch())
        reconstructed = model(audio, return_recons_only=True)
    terms = model.loss.distances(reconstructed, audio)
    torch.testing.assert_close(loss.total, model.loss.total(terms))
    torch.testing.assert_close(loss.parts["log_mel_distance"], log_mel_distance(reconstructed, audio, HZ).mean())
    codes = model.encode(audio)
    assert loss.counts["codes"].sum(dim=1).tolist() == [codes[..., 0].numel()] * codes.shape[-1]
    used = SoundStreamTask(model).summary(loss.counts)
    torch.testing.assert_close(used["si_sdr"], si_sdr(reconstructed, audio).mean())
    assert 0 < used["codebook_use"] <= 1 <= used["perplexity"] <= 16
    assert not {"adversarial", "feature", "quantizer"} & loss.parts.keys()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_silence_has_no_share_in_the_mean_of_the_decibels():
    """Each silent clip would put -100 into it. The mean is over the sounds of all batches, however they are spread."""
    task, audio = SoundStreamTask(tiny().eval()), sound(3)
    lengths = torch.tensor([205, 120, 80, 205])
    given = {"audio": torch.cat((audio, torch.zeros(1, 205))), "audio_lengths": lengths}
    given["audio"][2, :80] = 0.2  # no sound either, and what is padding does not matter
    with torch.no_grad():
        made = task.forward(given)
        expected = si_sdr(made.reconstruction.audio, made.target, lengths)[:2].mean()
        parts = [task.validate({name: value[rows] for name, value in given.items()}) for rows in ([0], [1, 2], [3])]
        summed = {name: sum(loss.counts[name] for loss in parts) for name in parts[0].counts}
        silent = task.validate({name: value[2:] for name, value in given.items()})
    torch.testing.assert_close(task.summary(summed)["si_sdr"], expected)
    assert "si_sdr" not in task.summary(silent.counts) and silent.total.isfinite()


# ---------------------------------------------------------------------------------------------- samples


def present(given: dict[str, Any], folder: Path, **options: Any) -> list[str]:
    task = SoundStreamTask(tiny(**options).eval())
    online = task.sample(given, seed=0)
    assert not online.requires_grad
    for name, write in task.present(given, {"online": online, "ema": online * 0.5}).items():
        write(folder / name)
    return sorted(path.name for path in folder.iterdir())


def test_samples_are_numbered_files_beside_their_originals_and_a_picture(tmp_path: Path):
    """11: in the reference all samples overwrite one file."""
    found = present(batch(6), tmp_path)
    kinds = ["ema", "online", "original"]
    assert found == [*(f"{number:02d}-{kind}.wav" for number in range(4) for kind in kinds), "spectrograms.png"]
    waves = {name: soundfile.read(tmp_path / name)[0] for name in found if name.endswith("wav")}
    original = batch(6)["audio"]
    for number in range(4):
        np.testing.assert_allclose(waves[f"{number:02d}-original.wav"], original[number], atol=1e-4)
        np.testing.assert_allclose(waves[f"{number:02d}-ema.wav"] * 2, waves[f"{number:02d}-online.wav"], atol=1e-4)
    assert not np.array_equal(waves["00-online.wav"], waves["01-online.wav"])
    width, height = spectrogram_image(original[0], HZ).size
    with Image.open(tmp_path / "spectrograms.png") as picture:
        assert picture.size == (3 * width, 4 * height)


def test_samples_are_as_long_as_their_sounds_and_stereo_where_they_are(tmp_path: Path):
    given = {
        "audio": torch.stack([sound(), sound(seed=4)], dim=1),
        "target": torch.stack([sound(seed=8), sound(seed=9)], dim=1),
        "audio_lengths": torch.tensor([205, 50]),
    }
    found = present(given, tmp_path, input_channels=2)
    assert [name for name in found if name.startswith("01")] == [
        "01-ema.wav",
        "01-online.wav",
        "01-original.wav",
        "01-target.wav",
    ]
    assert soundfile.read(tmp_path / "01-online.wav")[0].shape == (50, 2)
    assert soundfile.read(tmp_path / "00-target.wav")[1] == HZ


def test_a_disk_that_cannot_be_written_is_an_os_error(tmp_path: Path):
    """(The loop then goes on, and says so.)"""
    with pytest.raises(OSError, match="could not be written"):
        write_wave(tmp_path / "no folder" / "x.wav", torch.zeros(1, 9), HZ)


def test_negative_options_are_refused():
    with pytest.raises(ValueError, match="apply_grad_penalty_every=-1"):
        SoundStreamTask(tiny(), apply_grad_penalty_every=-1)


# ---------------------------------------------------------------------------------------------- two processes, compiled

TWO_PROCESSES = """
import os, sys
import copy, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from helicon.models.soundstream.task import SoundStreamTask
sys.path.insert(0, sys.argv[1])
from models.soundstream.tiny import sound, tiny

dist.init_process_group("gloo")
rank, others = dist.get_rank(), dist.get_world_size()
assert others == 2
FSQ = {"use_finite_scalar_quantizer": True, "finite_scalar_quantizer_levels": [5, 3], "codebook_size": None}
model = tiny(**FSQ, quantize_dropout_cutoff_index=2)
batches = [sound(3, seed=1), 5 * sound(3, seed=2)]

# What the mean of the two ranks' gradients is, each balanced by the mean size of both.
alone = copy.deepcopy(model)
sizes = []
for index, audio in enumerate(batches):
    each = copy.deepcopy(model)
    outputs = SoundStreamTask(each).forward({"audio": audio})
    leaf = outputs.reconstruction.audio.detach().requires_grad_()
    sizes.append({
        name: torch.autograd.grad(term, leaf)[0].flatten(1).norm(dim=1).mean()
        for name, term in each.loss.distances(leaf, outputs.target).items()
    })
assert abs(sizes[0]["wave"] / sizes[1]["wave"] - 1) > 0.5

task = SoundStreamTask(model, apply_grad_penalty_every=1)
task.networks = {name: DistributedDataParallel(n, gradient_as_bucket_view=True) for name, n in task.networks.items()}
for step in range(2):
    outputs = task.forward({"audio": batches[rank]})
    discriminator, generator = task.updates(step)
    wrapped = task.networks["discriminator"]
    discriminator.loss(outputs).total.backward()
    task.networks["discriminator"] = model.discriminators.requires_grad_(False)
    generator.loss(outputs).total.backward()
    task.networks["discriminator"] = wrapped
    model.discriminators.requires_grad_(True)
    if step == 0:
        place = model.loss.balancer.names.index("wave")
        mean = model.loss.weights["wave"] * (sizes[0]["wave"] + sizes[1]["wave"]) / 2
        torch.testing.assert_close(model.loss.balancer.sums[place], mean)
    with torch.no_grad():
        for p in model.parameters():
            p.sub_(0.01 * p.grad)
            p.grad = None
for name, value in model.state_dict().items():
    both = [torch.empty_like(value) for _ in range(2)]
    dist.all_gather(both, value)
    assert torch.equal(both[0], both[1]), name
dist.barrier()
os._exit(0)  # gloo's threads do not always end in order
"""


@pytest.mark.slow
def test_two_processes_stay_equal_discriminators_too_and_balance_alike(tmp_path: Path):
    """3: in the reference the ranks' discriminators drift apart, by several backward passes of one forward."""
    script = tmp_path / "two_processes.py"
    script.write_text(TWO_PROCESSES)
    tests = str(Path(__file__).parents[2])
    launch = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc_per_node",
        "2",
        str(script),
        tests,
    ]
    subprocess.run(launch, check=True, timeout=600)


COMPILED = """
import sys
import torch
sys.path.insert(0, sys.argv[1])
from helicon.models.soundstream.task import SoundStreamTask
from models.soundstream.tiny import sound, tiny

values = []
for compiled in (False, True):
    task = SoundStreamTask(tiny(), apply_grad_penalty_every=2)
    if compiled:
        for network in task.networks.values():
            network.compile(backend="aot_eager")
    for step in range(2):
        torch.manual_seed(step)
        outputs = task.forward({"audio": sound()})
        losses = [update.loss(outputs) for update in task.updates(step)]
        for loss in losses:
            loss.total.backward()
    gradients = torch.stack([p.grad.norm() for p in task.model.parameters()])
    values.append((torch.stack([loss.total.detach() for loss in losses]), gradients))
torch.testing.assert_close(values[0], values[1], rtol=1e-4, atol=1e-5)
"""


@pytest.mark.slow
def test_compiled_networks_give_the_same_losses(tmp_path: Path):
    script = tmp_path / "compiled.py"
    script.write_text(COMPILED)
    subprocess.run([sys.executable, str(script), str(Path(__file__).parents[2])], check=True, timeout=800)


def test_a_step_reads_all_of_a_batch_but_its_texts():
    task = SoundStreamTask(tiny())
    audio = sound()
    given = {"audio": audio, "audio_lengths": [audio.shape[-1] - 8] * len(audio), "texts": ["a"] * len(audio)}
    assert task.read(given).keys() == {"audio", "audio_lengths"}
