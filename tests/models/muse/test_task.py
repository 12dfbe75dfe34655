import copy
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn
from torch.nn import functional as F

from helicon.engine.task import Loss
from helicon.metrics.image import psnr
from helicon.models.muse.task import VQGanVAETask
from helicon.models.muse.vqgan import VQGanVAE


class Backbone(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(3, 4, 3, stride=2), nn.ReLU(), nn.Dropout(0.5))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.layers(images)


def tiny(**changes: Any) -> VQGanVAE:
    torch.manual_seed(0)
    return VQGanVAE(
        **{"dim": 8, "layers": 2, "discr_layers": 2, "encdec_resnet_groups": 4, "codebook_size": 64, **changes}
    )


def batch(size: int = 2) -> dict[str, torch.Tensor]:
    return {"images": torch.rand(size, 3, 16, 20, generator=torch.Generator().manual_seed(1))}


def losses_at(task: VQGanVAETask, step: int) -> dict[str, Loss]:
    outputs = task.forward(batch())
    return {update.network: update.loss(outputs) for update in task.updates(step)}


def parameters_with_gradient(vae: VQGanVAE) -> set[str]:
    return {name.split(".")[0] for name, p in vae.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(("every", "with_penalty"), [(4, [0, 4, 8]), (3, [0, 3, 6, 9]), (1, list(range(10))), (0, [])])
def test_the_gradient_penalty_has_the_cadence_asked_for(every: int, with_penalty: list[int]):
    """D-R1: in the reference the discriminator pays it at every step, whatever is asked."""
    task = VQGanVAETask(tiny(), apply_grad_penalty_every=every)
    paid = [step for step in range(10) if "gradient_penalty" in losses_at(task, step)["discriminator"].parts]
    assert paid == with_penalty


def test_a_step_without_penalty_costs_the_discriminator_no_second_derivative():
    """D-R1 and D-R2: what is not asked for is not computed, and leaving it out works."""
    vae = tiny()
    task, logits = VQGanVAETask(vae, apply_grad_penalty_every=2), []
    vae.discr.register_forward_hook(lambda module, inputs, output: logits.append(inputs[0].requires_grad))
    outputs = task.forward(batch())
    discriminator, _ = task.updates(1)
    discriminator.loss(outputs).total.backward()
    assert logits == [False]  # one call for real and fake images together, which need no gradient


def test_both_updates_share_one_reconstruction():
    vae, calls = tiny(), []
    vae.autoencoder.register_forward_hook(lambda *_: calls.append(1))
    losses_at(VQGanVAETask(vae), 0)
    assert len(calls) == 1


def test_each_update_trains_its_own_network_and_nobody_elses():
    """D-R8: in the reference gradients of discriminator and backbone enter the clipping of the autoencoder's."""
    vae = tiny(vgg=Backbone())
    task = VQGanVAETask(vae)
    for network, own in (("discriminator", "discr"), ("generator", "autoencoder")):
        vae.zero_grad()
        losses_at(task, 0)[network].total.backward()
        assert parameters_with_gradient(vae) == {own}
        assert all(p.grad is None for p in vae.vgg.parameters())


def test_gradient_norms_do_not_grow_from_step_to_step():
    """D-R8: nothing is left over from one step to the next."""
    vae = tiny(vgg=Backbone())
    task = VQGanVAETask(vae)
    norms = []
    for _ in range(3):
        vae.zero_grad()
        losses_at(task, 1)["generator"].total.backward()
        everything = [*vae.parameters(), *vae.vgg.parameters()]
        norms.append(torch.stack([p.grad.norm() for p in everything if p.grad is not None]).norm())
    torch.testing.assert_close(norms[1:], norms[:1] * 2)


def test_the_adversary_starts_when_asked():
    task = VQGanVAETask(tiny(), discr_start_step=3)
    early, late = losses_at(task, 2), losses_at(task, 3)
    assert list(early) == ["generator"] and "adversarial" not in early["generator"].parts
    assert list(late) == ["discriminator", "generator"] and "adversarial" in late["generator"].parts


@pytest.mark.parametrize("changes", [{"use_gan": False}, {"use_vgg_and_gan": False}])
def test_training_without_a_gan(changes: dict[str, Any]):
    """D-R7: the reference's trainer fails. D-V3: its loss leaves the quantizer's out."""
    vae = tiny(**changes)
    task = VQGanVAETask(vae)
    assert list(task.networks) == ["generator"]
    losses = losses_at(task, 0)
    assert list(losses) == ["generator"]
    parts = losses["generator"].parts
    torch.testing.assert_close(losses["generator"].total.detach(), parts["reconstruction"] + parts["quantizer"])
    losses["generator"].total.backward()
    assert all(p.grad is not None for p in vae.parameters())


def test_what_is_trained_averaged_and_frozen():
    vae = tiny(vgg=Backbone())
    task = VQGanVAETask(vae)
    assert task.networks == {"generator": vae.autoencoder, "discriminator": vae.discr}
    assert task.averaged == ("generator",) and task.frozen == {"perceptual": vae.perceptual}
    task.train_mode(True)
    assert vae.autoencoder.training and vae.discr.training and not any(m.training for m in vae.perceptual.modules())
    assert (task.unit, task.units(batch(3))) == ("images", 3)


def test_networks_are_called_through_the_tasks_own_table():
    """The loop puts the distributed wrappers there."""
    vae, called = tiny(), []

    class Wrapper(nn.Module):
        def __init__(self, name: str, module: nn.Module):
            super().__init__()
            self.name, self.module = name, module

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            called.append(self.name)
            return self.module(*args, **kwargs)

    task = VQGanVAETask(vae)
    task.networks = {name: Wrapper(name, network) for name, network in task.networks.items()}
    losses_at(task, 0)
    assert called == ["generator", "discriminator", "discriminator", "discriminator"]  # the second for the penalty


@pytest.mark.parametrize("changes", [{}, {"l2_recon_loss": True}, {"vgg": Backbone()}, {"use_gan": False}])
def test_validation_measures_the_reconstruction_alone(changes: dict[str, Any]):
    """D-V4: the reference has no validation loss."""
    vae, images = tiny(**changes).eval(), batch()["images"]
    before = copy.deepcopy(vae.state_dict())
    with torch.no_grad():
        loss = VQGanVAETask(vae).validate(batch())
        reconstructed = vae(images)
        expected = (F.mse_loss if "l2_recon_loss" in changes else F.l1_loss)(reconstructed, images)
        if "vgg" in changes:
            expected = expected + vae.perceptual(reconstructed, images)
    torch.testing.assert_close(loss.total, expected)
    assert loss.parts["psnr"].item() == pytest.approx(psnr(reconstructed, images).mean().item(), rel=1e-5)
    assert 0 < loss.parts["codebook_use"].item() <= 1 and 1 <= loss.parts["perplexity"].item() <= 64
    assert not {"adversarial", "quantizer"} & loss.parts.keys()
    assert all(torch.equal(value, before[name]) for name, value in vae.state_dict().items())


def test_samples_are_one_grid_of_originals_and_both_reconstructions_without_a_graph(tmp_path: Path):
    """D-R10: the reference keeps the graph, and shows the averaged and the online network different images."""
    task = VQGanVAETask(tiny().eval())
    pictures = batch(10)
    online = task.sample(pictures, seed=0)
    assert not online.requires_grad and online.shape == (8, 3, 16, 20)
    files = task.present(pictures, {"online": online, "ema": online.clamp(0, 1) * 0.5})
    assert list(files) == ["reconstructions.png"]
    files["reconstructions.png"](tmp_path / "grid.png")
    pixels = np.asarray(Image.open(tmp_path / "grid.png"))
    assert pixels.shape == (3 * 16 + 2 * 2, 8 * 20 + 7 * 2, 3)
    original = pictures["images"][0].mul(255).round().byte().permute(1, 2, 0).numpy()
    assert (pixels[:16, :20] == original).all()


def test_negative_options_are_refused():
    with pytest.raises(ValueError, match="apply_grad_penalty_every=-1"):
        VQGanVAETask(tiny(), apply_grad_penalty_every=-1)


TWO_PROCESSES = """
import copy, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from helicon.models.muse.task import VQGanVAETask
from helicon.models.muse.vqgan import VQGanVAE

dist.init_process_group("gloo")
rank, others = dist.get_rank(), dist.get_world_size()
assert others == 2
torch.manual_seed(0)
vae = VQGanVAE(dim=8, layers=2, discr_layers=2, encdec_resnet_groups=4, fsq_levels=[4, 4])
batches = torch.rand(2, 3, 3, 16, 16)

# What every rank's batch asks for by itself, on one process and against the average of the two weights.
alone = copy.deepcopy(vae)
local = [alone.generator_loss(x, alone.autoencoder(x), alone.discr)[1]["adversarial_weight"] for x in batches]
mean_weight = torch.stack(local).mean()
alone.adaptive_weight, alone.adversarial_weight = False, mean_weight.item()
for images in batches:
    (alone.generator_loss(images, alone.autoencoder(images), alone.discr)[0] / 2).backward()
    with torch.no_grad():
        fake = alone.autoencoder(images).images
    (alone.discriminator_loss(images, fake, alone.discr, True)[0] / 2).backward()

task = VQGanVAETask(vae)
task.networks = {name: DistributedDataParallel(n, gradient_as_bucket_view=True) for name, n in task.networks.items()}
outputs = task.forward({"images": batches[rank]})
discriminator, generator = task.updates(0)
discriminator.loss(outputs).total.backward()
task.networks["discriminator"] = vae.discr.requires_grad_(False)
loss = generator.loss(outputs)
loss.total.backward()
torch.testing.assert_close(loss.parts["adversarial_weight"], mean_weight)
assert local[0] != local[1]
for together, expected in zip(vae.parameters(), alone.parameters(), strict=True):
    torch.testing.assert_close(together.grad, expected.grad, rtol=1e-4, atol=1e-5)
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_two_processes_descend_one_loss_with_one_adaptive_weight(tmp_path: Path):
    script = tmp_path / "two_processes.py"
    script.write_text(TWO_PROCESSES)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", str(script)]
    subprocess.run(launch, check=True, timeout=600)
