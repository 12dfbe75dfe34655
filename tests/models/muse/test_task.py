import copy
import math
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
from helicon.models.muse.generate import Filler
from helicon.models.muse.maskgit import MaskGit
from helicon.models.muse.task import MaskGitTask, VQGanVAETask
from helicon.models.muse.transformer import MaskGitTransformer
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
    assert torch.equal(loss.counts["codes"][0], torch.bincount(vae.encode(images)[1].flatten(), minlength=64).float())
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
import os
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
dist.barrier()
os._exit(0)  # gloo's threads do not always end in order
"""


@pytest.mark.slow
def test_two_processes_descend_one_loss_with_one_adaptive_weight(tmp_path: Path):
    script = tmp_path / "two_processes.py"
    script.write_text(TWO_PROCESSES)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", str(script)]
    subprocess.run(launch, check=True, timeout=600)


# ---------------------------------------------------------------------------------------------- MaskGit

TEXTS = ["a red circle", "blue", "green"]
BYTES = {"name": "bytes", "dim": 12, "depth": 1, "heads": 2, "dim_head": 6}


def maskgit(transformer: dict[str, Any] | None = None, vae: bool = True, **options: Any) -> MaskGit:
    tokenizer = tiny(use_vgg_and_gan=False) if vae else None
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"num_tokens": 64, "dim": 20, "seq_len": 64, "depth": 1, "heads": 2, "dim_head": 6}
    return MaskGit(32, MaskGitTransformer(**{**sizes, **(transformer or {"t5_name": BYTES})}), vae=tokenizer, **options)


def captioned(rows: int = 3) -> dict[str, Any]:
    images = torch.rand(rows, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    return {"images": images, "texts": (TEXTS * 4)[:rows]}


def loss_of(task: MaskGitTask, pictures: dict[str, Any], step: int = 0) -> Loss:
    torch.manual_seed(4)
    (update,) = task.updates(step)
    assert update.network == "model"
    return update.loss(task.forward(pictures))


def test_maskgit_learns_the_same_from_pictures_and_from_their_tokens():
    network = maskgit()
    task, pictures = MaskGitTask(network), captioned()
    from_pictures = loss_of(task, pictures)
    ids = network.tokenize(pictures["images"])
    for tokens in (ids, ids.flatten(1)):
        from_ids = loss_of(task, {"ids": tokens, "texts": TEXTS})
        torch.testing.assert_close(from_ids.total, from_pictures.total)
    embedded = {"ids": ids, "text_embeds": network.transformer.encode_text(TEXTS).detach()}
    torch.testing.assert_close(loss_of(task, embedded).total, from_pictures.total)
    lengths = torch.tensor([14, 6, 7])
    torch.testing.assert_close(loss_of(task, {**embedded, "text_embeds_lengths": lengths}).total, from_pictures.total)
    assert loss_of(task, {**embedded, "text_embeds_lengths": lengths - 3}).total != from_pictures.total
    assert from_pictures.total.requires_grad and set(from_pictures.parts) == {"cross_entropy", "accuracy"}
    assert "critic" in loss_of(MaskGitTask(maskgit(self_token_critic=True)), pictures).parts
    with pytest.raises(
        ValueError, match=r"reads texts, .* data\.captions=beside, column or folder in a recipe.*text_embeds"
    ):
        task.forward({"ids": ids})
    with pytest.raises(ValueError, match=r"conditioned on classes, .* with data\.classes=folder in a recipe"):
        MaskGitTask(maskgit({"num_classes": 3})).forward({"ids": ids, "texts": TEXTS})


def test_maskgit_s_tokenizers_are_frozen_and_outside_of_what_is_trained():
    network = maskgit()
    task = MaskGitTask(network)
    assert task.networks == {"model": network} and task.frozen == {"vae": network.vae}
    task.train_mode(True)
    assert network.training and not network.vae.training
    other = tiny(use_vgg_and_gan=False)
    larger = MaskGit(32, network.transformer, vae=other, cond_vae=other, cond_image_size=16)
    assert set(MaskGitTask(larger).frozen) == {"vae", "cond_vae"}
    assert set(MaskGitTask(MaskGit(32, network.transformer, vae=other, cond_image_size=16)).frozen) == {"vae"}


def test_maskgit_counts_tokens_and_every_row_weighs_the_same():
    task = MaskGitTask(maskgit())
    assert (task.unit, task.units(captioned(3)), task.weight(captioned(3))) == ("tokens", 3 * 64, 3.0)
    assert task.weight({"ids": torch.zeros(2, 4, 4, dtype=torch.long)}) == 2.0
    assert task.units({"ids": torch.zeros(2, 4, 4, dtype=torch.long)}) == 32


def test_maskgit_is_called_through_the_tasks_own_table_and_sees_no_strings():
    """A compiled network would be compiled anew for every caption."""
    network, seen = maskgit(), []
    task = MaskGitTask(network)
    task.networks = {"model": lambda *args, **kwargs: seen.append((args, kwargs)) or network(*args, **kwargs)}
    loss_of(task, captioned())
    ((ids,), keywords) = seen[0]
    assert ids.shape == (3, 8, 8) and not ids.is_floating_point()
    assert keywords.keys() == {"text_ids", "text_mask", "cond_token_ids", "return_losses"}
    assert keywords["text_ids"].shape == (3, 16)


def test_super_resolution_is_shown_the_small_picture():
    """D-X1: also by the task."""
    network = maskgit(cond_image_size=16)
    task, pictures = MaskGitTask(network), captioned()
    loss = loss_of(task, pictures).total
    ids, low = network.tokenize(pictures["images"]), network.tokenize_low_resolution(pictures["images"])
    torch.testing.assert_close(loss_of(task, {"ids": ids, "cond_ids": low, "texts": TEXTS}).total, loss)
    assert loss_of(task, {"ids": ids, "cond_ids": 63 - low, "texts": TEXTS}).total != loss
    assert task.sample(pictures, seed=0).shape == (3, 3, 32, 32)


def test_validation_masks_tokens_and_drops_no_text():
    network = maskgit(cond_drop_prob=1.0, self_token_critic=True).eval()
    task = MaskGitTask(network)
    values = []
    for texts in (TEXTS, ["x", "y", "z"]):
        torch.manual_seed(0)
        values.append(task.validate({**captioned(), "texts": texts}))
    assert values[0].total == values[0].parts["cross_entropy"] != values[1].total


def test_samples_are_what_the_captions_say_with_the_captions_below(tmp_path: Path):
    task = MaskGitTask(maskgit(), sample_timesteps=2, sample_cond_scale=2.0)
    pictures = captioned(10)
    made = task.sample(pictures, seed=3)
    assert made.shape == (8, 3, 32, 32) and not made.requires_grad
    expected = task.model.generate(pictures["texts"][:8], timesteps=2, cond_scale=2.0, seed=3)
    assert torch.equal(made, expected) and torch.equal(task.sample(pictures, seed=3), made)
    files = task.present(pictures, {"online": made, "ema": made})
    files["samples.png"](tmp_path / "sheet.png")
    sheet = Image.open(tmp_path / "sheet.png")
    assert sheet.width == 8 * 128 + 7 * 6 and sheet.height > 3 * 128
    first = pictures["images"][0].mul(255).round().byte().permute(1, 2, 0).numpy()
    assert (np.asarray(sheet)[:128:4, :128:4] == first).all()


def test_samples_in_training_are_made_without_compiling_and_the_sampler_stays_as_it_was(monkeypatch):
    """What a GPU would compile and capture for a few pictures, and the memory for it."""
    seen, fill = [], Filler.fill
    monkeypatch.setattr(Filler, "fill", lambda filler, *args: seen.append(filler) or fill(filler, *args))
    task = MaskGitTask(maskgit(), sample_timesteps=1)
    own = task.model.filler
    task.sample(captioned(3), seed=0)
    MaskGitTask(task.model, sample_texts=["one"], sample_timesteps=1).sample(captioned(3), seed=0)
    assert [(filler.capture, filler.compile) for filler in seen] == [(False, None)] * 2  # compiles where it captures
    assert task.model.filler is own


def test_samples_of_texts_of_ones_own_of_classes_and_of_nothing():
    wanted = MaskGitTask(maskgit(), sample_texts=["one", "two"], sample_timesteps=1)
    made = wanted.sample(captioned(3), seed=0)
    assert len(made) == 2 and list(wanted.present(captioned(3), {"online": made})) == ["samples.png"]
    classes = MaskGitTask(maskgit({"num_classes": 4}), sample_timesteps=1)
    labelled = {**captioned(3), "classes": torch.tensor([0, 1, 2])}
    assert len(classes.sample(labelled, seed=0)) == 3 and loss_of(classes, labelled).total.isfinite()
    assert classes._captions(labelled, 2) == ["class 0", "class 1"]
    free = MaskGitTask(maskgit({"condition_on_text": False}), sample_timesteps=1)
    assert len(free.sample(captioned(3), seed=0)) == 3 and free._captions(captioned(3), 2) == ["", ""]
    blind = MaskGitTask(maskgit(vae=False))
    assert blind.sample(captioned(), 0) is None and blind.present(captioned(), {"online": None}) == {}
    for network in (maskgit({"num_classes": 4}), maskgit(cond_image_size=16)):
        with pytest.raises(ValueError, match="leave them out"):
            MaskGitTask(network, sample_texts=["a"])


def test_samples_that_cannot_be_made_are_refused_before_training():
    for options, said in (
        ({"sample_timesteps": 0}, "timesteps=0"),
        ({"sample_cond_scale": math.nan}, "cond_scale=nan"),
    ):
        with pytest.raises(ValueError, match=said):
            MaskGitTask(maskgit(), **options)


def test_maskgit_every_weight_learns_in_every_step():
    for options in ({"self_cond": True, "t5_name": BYTES}, {"num_classes": 3}):
        network = maskgit(options)
        pictures = {**captioned(), "classes": torch.tensor([0, 1, 2])}
        loss_of(MaskGitTask(network), pictures).total.backward()
        assert all(p.grad is not None for p in network.parameters())
