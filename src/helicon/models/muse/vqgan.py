"""VQGanVAE: an image tokenizer. Images to a grid of discrete codes and back (VQGAN, Esser et al. 2020; MAGVIT-v2, Yu et al. 2023).

`vae.autoencoder` holds encoder, quantizer and decoder, `vae.discr` the discriminator it is trained against. An image of
s pixels a side becomes a grid of s / 2^layers codes. Images have values in [0, 1].

Letters: b batch, c image channels, h height, w width (of the image, or of the code grid where said), d encoded channels, n positions.
"""

import copy
import difflib
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from helicon.models.muse import losses
from helicon.models.muse.discriminator import Discriminator
from helicon.models.muse.layers import ChannelNorm, GatedResidualBlock, ImageConv, PositionAttention, ResidualBlock
from helicon.models.muse.perceptual import PerceptualLoss
from helicon.nn.codes import check_ids
from helicon.nn.network import Network
from helicon.quantize.base import Quantized
from helicon.quantize.finite_scalar import FiniteScalarQuantizer
from helicon.quantize.lookup_free import LookupFreeQuantizer
from helicon.quantize.rows import RowQuantizer
from helicon.quantize.vector import VectorQuantizer

CODEBOOK_SIZE = 65536
VQ_DEFAULTS: Mapping[str, Any] = {
    "codebook_dim": 256,
    "decay": 0.8,
    "commitment_weight": 1.0,
    "kmeans_init": True,
    "use_cosine_sim": True,
    "threshold_ema_dead_code": 2,  # without it most codes are never used again after the first steps
}
LFQ_DEFAULTS: Mapping[str, Any] = {"diversity_gamma": 4.0}

LossParts = dict[str, Tensor]


@dataclass(frozen=True)
class Reconstruction:
    """What the autoencoder makes of images `[b, c, h, w]`."""

    images: Tensor  # [b, c, h, w], float32
    quantized: Quantized  # values [b, n, d] and codes [b, n], row by row
    last_input: Tensor  # [b, d, h, w] what entered the last layer, detached: for the adaptive weight (losses.py)


class Encoder(nn.Module):
    def __init__(
        self,
        widths: Sequence[int],
        channels: int,
        num_blocks: Sequence[int],
        groups: int,
        first_kernel_size: int,
        attention: bool,
    ):
        super().__init__()
        self.first = ImageConv(channels, widths[0], first_kernel_size, padding=first_kernel_size // 2)
        layers: list[nn.Module] = []
        for width_in, width_out, blocks in zip(widths[:-1], widths[1:], num_blocks, strict=True):
            layers += [ChannelNorm(width_in), nn.SiLU(), nn.Conv2d(width_in, width_out, 4, stride=2, padding=1)]
            layers += [ResidualBlock(width_out, groups) for _ in range(blocks)]
        if attention:
            layers.append(PositionAttention(widths[-1], groups))
        self.layers = nn.Sequential(*layers, ChannelNorm(widths[-1]))

    def forward(self, images: Float[Tensor, "b c h w"]) -> Float[Tensor, "b d code_h code_w"]:
        return self.layers(self.first(images * 2 - 1))


class Decoder(nn.Module):
    """The encoder's mirror image, with gated blocks. Its last layer stands apart: the adaptive weight needs what enters it."""

    def __init__(self, widths: Sequence[int], channels: int, num_blocks: Sequence[int], groups: int, attention: bool):
        super().__init__()
        layers: list[nn.Module] = [PositionAttention(widths[-1], groups)] if attention else []
        for width_out, width_in, blocks in reversed(list(zip(widths[:-1], widths[1:], num_blocks, strict=True))):
            layers += [GatedResidualBlock(width_in, groups) for _ in range(blocks)]
            layers += [ChannelNorm(width_in), nn.SiLU()]
            layers += [nn.ConvTranspose2d(width_in, width_out, 4, stride=2, padding=1)]
        self.layers = nn.Sequential(*layers, ChannelNorm(widths[0]), nn.SiLU())
        self.last = nn.Conv2d(widths[0], channels, 3, padding=1)
        nn.init.constant_(self.last.bias, 0.5)  # type: ignore[arg-type]  # the middle of the range of images

    def forward(
        self, fmap: Float[Tensor, "b d code_h code_w"]
    ) -> tuple[Float[Tensor, "b c h w"], Float[Tensor, "b e h w"]]:
        """The images, and what entered the last layer."""
        last_input = self.layers(fmap)
        return self.last(last_input).float(), last_input


class Autoencoder(nn.Module):
    """Encoder, quantizer and decoder: what is trained, averaged and used. Called, it reconstructs images."""

    def __init__(self, encoder: Encoder, quantizer: RowQuantizer, decoder: Decoder, downsampling: int):
        super().__init__()
        self.encoder = encoder
        self.quantizer = quantizer
        self.decoder = decoder
        self.downsampling = downsampling

    def encode(self, images: Float[Tensor, "b c h w"]) -> tuple[Float[Tensor, "b d code_h code_w"], Quantized]:
        """The quantized feature map, and how it came about. Sides that the code grid does not divide are padded."""
        channels = self.encoder.first.in_channels
        if images.ndim != 4 or not images.is_floating_point():
            raise ValueError(
                f"images must be floats in [0, 1] of shape [b, c, h, w], and these are {images.dtype} {list(images.shape)}"
            )
        if images.shape[1] != channels:
            raise ValueError(f"this autoencoder takes images of {channels} channels, got {images.shape[1]}")
        height, width = images.shape[-2:]
        padding = (0, -width % self.downsampling, 0, -height % self.downsampling)
        if any(padding):
            images = F.pad(images, padding, mode="replicate")
        features = self.encoder(images.contiguous(memory_format=torch.channels_last))
        quantized = self.quantizer(rearrange(features, "b d h w -> b (h w) d"))
        return rearrange(quantized.values, "b (h w) d -> b d h w", h=features.shape[2]), quantized

    def decode_ids(self, ids: Int[Tensor, "b code_h code_w"]) -> Float[Tensor, "b c h w"]:
        values = self.quantizer.decode(rearrange(ids, "b h w -> b (h w)"))
        return self.decoder(rearrange(values, "b (h w) d -> b d h w", h=ids.shape[1]))[0]

    def forward(self, images: Float[Tensor, "b c h w"]) -> Reconstruction:
        fmap, quantized = self.encode(images)
        reconstructed, last_input = self.decoder(fmap)
        height, width = images.shape[-2:]
        return Reconstruction(reconstructed[..., :height, :width], quantized, last_input.detach())


class VQGanVAE(Network):
    unsaved_arguments: ClassVar[tuple[str, ...]] = ("vgg",)

    perceptual: PerceptualLoss | None
    discr: Discriminator | None

    def __init__(
        self,
        *,
        dim: int,
        channels: int = 3,
        layers: int = 4,
        l2_recon_loss: bool = False,
        use_hinge_loss: bool = True,
        vgg: nn.Module | str | Path | None = None,
        lookup_free_quantization: bool = True,
        codebook_size: int = CODEBOOK_SIZE,
        vq_kwargs: Mapping[str, Any] = VQ_DEFAULTS,
        lfq_kwargs: Mapping[str, Any] = LFQ_DEFAULTS,
        use_vgg_and_gan: bool = True,
        discr_layers: int = 4,
        encdec_layer_mults: Sequence[int] | None = None,
        encdec_num_resnet_blocks: int | Sequence[int] = 1,
        encdec_resnet_groups: int = 16,
        encdec_first_conv_kernel_size: int = 5,
        fsq_levels: Sequence[int] | None = None,
        attention: bool = False,
        use_gan: bool = True,
        perceptual_weight: float = 1.0,
        adversarial_weight: float = 0.1,
        adaptive_weight: bool = True,
        **kwargs: Any,
    ):
        """
        Args:
            dim: channels at the image's own resolution; level i has dim * encdec_layer_mults[i] (2^i by default).
            layers: how many times the image is halved.
            l2_recon_loss: squared instead of absolute error.
            use_hinge_loss: hinge instead of cross-entropy for the discriminator.
            vgg: the perceptual loss's backbone (perceptual.py): a module, or a `transformers` model by name or folder; None for
                no perceptual loss. It is lent: frozen, and neither trained nor saved here.
            lookup_free_quantization: codes from signs (MAGVIT-v2) instead of a learned codebook.
            vq_kwargs: for the learned codebook (`VectorQuantizer`); single ones also as `vq_<name>`.
            lfq_kwargs: for `LookupFreeQuantizer`.
            use_vgg_and_gan: False trains on the reconstruction error alone.
            encdec_num_resnet_blocks: residual blocks at the deepest level, or a number for every level.
            fsq_levels: finite scalar quantization with these levels, in place of the other two.
            attention: attention over positions at the deepest level.
            use_gan: False leaves out the discriminator alone.
            adversarial_weight: of the adversarial loss; 1 lets it pull as hard as all the rest, which can be too hard early on.
            adaptive_weight: first scale the adversarial loss so that it pulls at the last layer as strongly as the reconstruction does.
        """
        super().__init__()
        vq_keywords = _vq_keywords(kwargs)
        mults = list(encdec_layer_mults or (2**level for level in range(layers)))
        blocks = encdec_num_resnet_blocks
        num_blocks = [0] * (layers - 1) + [blocks] if isinstance(blocks, int) else list(blocks)
        for name, given in (("encdec_layer_mults", mults), ("encdec_num_resnet_blocks", num_blocks)):
            if len(given) != layers:
                raise ValueError(f"{name}={given} must have one number for each of the {layers} layers")
        for name, number in (("dim", dim), ("channels", channels), ("layers", layers), ("discr_layers", discr_layers)):
            if number < 1:
                raise ValueError(f"{name}={number} must be at least 1")
        if vgg is not None and not use_vgg_and_gan:
            raise ValueError(
                "vgg is given but use_vgg_and_gan=False: write use_gan=False to keep the perceptual loss alone"
            )

        widths = [dim, *(dim * mult for mult in mults)]
        self.layers, self.channels, self.encoded_dim = layers, channels, widths[-1]
        self.perceptual_weight, self.adversarial_weight = perceptual_weight, adversarial_weight
        self.adaptive_weight = adaptive_weight
        self._reconstruction_error = F.mse_loss if l2_recon_loss else F.l1_loss
        self._generator_error = losses.hinge_generator_loss if use_hinge_loss else losses.bce_generator_loss
        self._discriminator_error = losses.hinge_discriminator_loss if use_hinge_loss else losses.bce_discriminator_loss

        quantizer = _quantizer(
            self.encoded_dim,
            codebook_size,
            fsq_levels,
            lfq_kwargs if lookup_free_quantization else None,
            {**vq_kwargs, **vq_keywords},
        )
        self.codebook_size: int = quantizer.codebook_size
        groups = encdec_resnet_groups
        self.autoencoder = Autoencoder(
            Encoder(widths, channels, num_blocks, groups, encdec_first_conv_kernel_size, attention),
            quantizer,
            Decoder(widths, channels, num_blocks, groups, attention),
            2**layers,
        )
        self.discr = None
        if use_vgg_and_gan and use_gan:
            self.discr = Discriminator([dim, *(dim * 2**level for level in range(discr_layers))], channels, groups)
        # Not a submodule: its weights are not this network's to train, average, count or save (see _apply).
        if vgg is not None and not isinstance(vgg, PerceptualLoss):
            vgg = PerceptualLoss(vgg)
        self.__dict__["perceptual"] = vgg
        self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> "VQGanVAE":
        """Moves the lent backbone along with the rest."""
        if self.perceptual is not None:
            self.perceptual._apply(fn, recurse)
        return super()._apply(fn, recurse)

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    @property
    def vgg(self) -> nn.Module | None:
        """The backbone of the perceptual loss."""
        return None if self.perceptual is None else self.perceptual.backbone

    def get_encoded_fmap_size(self, image_size: int) -> int:
        """Codes a side for an image of `image_size` pixels a side."""
        return -(-image_size // 2**self.layers)

    def copy_for_eval(self) -> "VQGanVAE":
        """A frozen copy to encode and decode with, without discriminator and backbone; this network stays as it is."""
        copied = copy.deepcopy(self)
        copied.discr = None
        copied.__dict__["perceptual"] = None
        copied.arguments = {**copied.arguments, "vgg": None, "use_vgg_and_gan": False}
        return copied.requires_grad_(False).eval()

    def encode(
        self, img: Float[Tensor, "b c h w"]
    ) -> tuple[Float[Tensor, "b d code_h code_w"], Int[Tensor, "b code_h code_w"], Float[Tensor, ""]]:
        """The quantized feature map, its codes, and the quantizer's loss."""
        fmap, quantized = self.autoencoder.encode(img)
        return fmap, rearrange(quantized.codes, "b (h w) -> b h w", h=fmap.shape[2]), quantized.loss

    def decode(self, fmap: Float[Tensor, "b d code_h code_w"]) -> Float[Tensor, "b c h w"]:
        return self.autoencoder.decoder(fmap)[0]

    def decode_from_ids(self, ids: Int[Tensor, "b code_h code_w"]) -> Float[Tensor, "b c h w"]:
        if ids.ndim != 3:
            raise ValueError(f"ids of shape {list(ids.shape)} are no grid: give [b, h, w], as encode does")
        check_ids(ids, self.codebook_size)  # signs would be made of any number
        return self.autoencoder.decode_ids(ids)

    def forward(
        self,
        img: Float[Tensor, "b c h w"],
        return_loss: bool = False,
        return_discr_loss: bool = False,
        return_recons: bool = False,
        add_gradient_penalty: bool = True,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """The reconstruction; or the generator's or the discriminator's loss, with the reconstruction where `return_recons`."""
        if return_loss and return_discr_loss:
            raise ValueError(
                "ask for return_loss or for return_discr_loss: the two are descended by different networks"
            )
        if not return_discr_loss:
            reconstruction = self.autoencoder(img)
            if not return_loss:
                return reconstruction.images
            loss, _ = self.generator_loss(img, reconstruction, self.discr)
        else:
            if self.discr is None:
                raise ValueError(
                    "this VQGanVAE was built without a discriminator (use_vgg_and_gan or use_gan is False)"
                )
            with torch.no_grad():
                reconstruction = self.autoencoder(img)
            loss, _ = self.discriminator_loss(img, reconstruction.images, self.discr, add_gradient_penalty)
        return (loss, reconstruction.images) if return_recons else loss

    def image_loss(
        self, images: Float[Tensor, "b c h w"], targets: Float[Tensor, "b c h w"]
    ) -> tuple[Float[Tensor, ""], LossParts]:
        """How far images are from those they should be: the error of pixels, and of what the backbone sees in them."""
        error = self._reconstruction_error(images, targets)
        parts = {"reconstruction": error.detach()}
        if self.perceptual is None:
            return error, parts
        perceptual = self.perceptual(images, targets)
        return error + self.perceptual_weight * perceptual, parts | {"perceptual": perceptual.detach()}

    def generator_loss(
        self,
        images: Float[Tensor, "b c h w"],
        reconstruction: Reconstruction,
        discriminator: nn.Module | None,
        across_ranks: bool = False,
    ) -> tuple[Float[Tensor, ""], LossParts]:
        """The autoencoder's loss; its gradient reaches the autoencoder alone. Without a discriminator it has no adversarial term.

        Where nothing is differentiated (validation) the adaptive weight is not defined and the adversarial term left out.
        `across_ranks` averages the adaptive weight over the processes, all of which must then call this together.
        """
        targets = images.float()
        trains = reconstruction.images.requires_grad and torch.is_grad_enabled()
        leaf = reconstruction.images.detach().requires_grad_(trains)
        loss, parts = self.image_loss(leaf, targets)
        gradient = torch.autograd.grad(loss, leaf)[0] if trains else None
        if discriminator is not None and (trains or not self.adaptive_weight):
            adversarial = self._generator_error(discriminator(leaf))
            weight = torch.full_like(adversarial, self.adversarial_weight, requires_grad=False)
            if gradient is not None:
                (pull,) = torch.autograd.grad(adversarial, leaf)
                if self.adaptive_weight:
                    adaptive = losses.adaptive_weight(
                        reconstruction.last_input, self.autoencoder.decoder.last, gradient, pull
                    )
                    weight = weight * (losses.average_over_ranks(adaptive) if across_ranks else adaptive)
                gradient = gradient + weight * pull
            loss = loss.detach() + weight * adversarial.detach()
            parts |= {"adversarial": adversarial.detach(), "adversarial_weight": weight}
        if gradient is not None:
            loss = losses.with_known_gradient(reconstruction.images, loss, gradient)
        quantized = reconstruction.quantized
        return loss + quantized.loss, {**parts, "quantizer": quantized.loss.detach(), **quantized.parts}

    def discriminator_loss(
        self,
        images: Float[Tensor, "b c h w"],
        reconstructed: Float[Tensor, "b c h w"],
        discriminator: nn.Module,
        with_penalty: bool,
    ) -> tuple[Float[Tensor, ""], LossParts]:
        """The discriminator's loss; its gradient reaches the discriminator alone."""
        logits = discriminator(torch.cat([images.float(), reconstructed.detach()]))
        real, fake = logits.chunk(2)
        loss = self._discriminator_error(real, fake)
        parts = {
            "discriminator": loss.detach(),
            "real_logits": real.detach().mean(),
            "fake_logits": fake.detach().mean(),
        }
        if not with_penalty:
            return loss, parts
        # Compiled graphs cannot be differentiated twice.
        with torch.compiler.set_stance("force_eager"):
            penalty = losses.gradient_penalty(partial(discriminator, full_precision=True), images)
        return loss + penalty, {**parts, "gradient_penalty": penalty.detach()}


def _quantizer(
    dim: int,
    codebook_size: int,
    fsq_levels: Sequence[int] | None,
    lfq_kwargs: Mapping[str, Any] | None,
    vq_kwargs: Mapping[str, Any],
) -> RowQuantizer:
    """The first of the three kinds that is asked for."""
    if fsq_levels is not None:
        size = math.prod(fsq_levels)
        if codebook_size not in (CODEBOOK_SIZE, size):
            raise ValueError(
                f"fsq_levels={list(fsq_levels)} make {size} codes, not {codebook_size}: leave codebook_size out"
            )
        return FiniteScalarQuantizer(dim, list(fsq_levels))
    if lfq_kwargs is not None:
        return LookupFreeQuantizer(dim, codebook_size, **lfq_kwargs)
    return VectorQuantizer(dim, codebook_size, **vq_kwargs)


def _vq_keywords(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """`vq_<name>` keywords by name; any other, or one the quantizer does not have, is a mistake."""
    own = [name for name in inspect.signature(VQGanVAE.__init__).parameters if name not in ("self", "kwargs")]
    quantizers = [
        f"vq_{name}" for name in inspect.signature(VectorQuantizer).parameters if name not in ("dim", "codebook_size")
    ]
    for key in kwargs:
        if key not in quantizers:
            near = difflib.get_close_matches(key, [*own, *quantizers], n=1)
            raise TypeError(f"VQGanVAE has no argument {key!r}" + (f"; did you mean {near[0]!r}?" if near else ""))
    return {key.removeprefix("vq_"): value for key, value in kwargs.items()}
