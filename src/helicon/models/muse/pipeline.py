"""Muse: text to image in two steps, a base MaskGit and a super-resolution MaskGit (Chang et al. 2023).

Letters: b batch, c channels, h height, w width.
"""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from PIL import Image
from torch import Tensor

from helicon.models.muse.maskgit import MaskGit
from helicon.nn.network import Network


class Muse(Network):
    """A base MaskGit and the super-resolution MaskGit that enlarges its pictures."""

    def __init__(self, base: MaskGit, superres: MaskGit):
        super().__init__()
        if superres.cond_image_size is None:
            raise ValueError("superres must be a MaskGit with cond_image_size, the size of the pictures base makes")
        self.base_maskgit, self.superres_maskgit = base, superres

    @torch.no_grad()
    def forward(
        self,
        texts: Sequence[str],
        cond_scale: float = 3.0,
        temperature: float = 1.0,
        timesteps: int = 18,
        superres_timesteps: int | None = None,
        return_lowres: bool = False,
        return_pil_images: bool = True,
        *,
        seed: int | None = None,
        **options: Any,
    ) -> Any:
        """A list of PIL images (or a tensor with values in [0, 1]); with `return_lowres` also the base's, behind it.

        `options` go to `MaskGit.generate` of both: negative_texts, sampler, ...
        """
        options |= {"cond_scale": cond_scale, "temperature": temperature, "seed": seed}
        low = self.base_maskgit.generate(texts, timesteps=timesteps, **options)
        steps = timesteps if superres_timesteps is None else superres_timesteps
        high = self.superres_maskgit.generate(texts, cond_images=low, timesteps=steps, **options)
        made = [pil_images(pictures) if return_pil_images else pictures for pictures in (high, low)]
        return tuple(made) if return_lowres else made[0]


def pil_images(images: Float[Tensor, "b c h w"]) -> list[Image.Image]:
    """Pictures with values in [0, 1]; what lies outside is clamped, for bytes would wrap around."""
    pixels = images.detach().float().clamp(0, 1).mul(255).round().byte().permute(0, 2, 3, 1).cpu().numpy()
    return [Image.fromarray(picture[..., 0] if picture.shape[-1] == 1 else picture) for picture in pixels]
