"""Muse: text to image in two steps, a base MaskGit and a super-resolution MaskGit (Chang et al. 2023).

Letters: b batch, c channels, h height, w width.
"""

from collections.abc import Mapping, Sequence
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
        if base.image_size != superres.cond_image_size:
            raise ValueError(
                f"base makes pictures of {base.image_size} pixels a side, and superres has learned to enlarge those of "
                f"{superres.cond_image_size}: pair stages of one size"
            )
        self.base_maskgit, self.superres_maskgit = base, superres

    @torch.no_grad()
    def forward(
        self,
        texts: Sequence[str] | None,
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

        `options` go to `MaskGit.generate` of both: negative_texts, sampler, ... But superres is given no texts, and no classes, if it
        reads none: base has drawn what they say.
        """
        options |= {"texts": texts, "cond_scale": cond_scale, "temperature": temperature, "seed": seed}
        low = self.base_maskgit.generate(timesteps=timesteps, **options)
        steps = timesteps if superres_timesteps is None else superres_timesteps
        options = _read_by(self.superres_maskgit, options)
        high = self.superres_maskgit.generate(cond_images=low, timesteps=steps, **options)
        made = [pil_images(pictures) if return_pil_images else pictures for pictures in (high, low)]
        return tuple(made) if return_lowres else made[0]


def _read_by(stage: MaskGit, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of `MaskGit.generate` without the texts and classes that this stage does not read."""
    texts = () if stage.transformer.condition_on_text else ("texts", "text_embeds", "negative_texts")
    classes = () if stage.transformer.class_emb is not None else ("classes",)
    return {name: value for name, value in options.items() if name not in (*texts, *classes)}


def pil_images(images: Float[Tensor, "b c h w"]) -> list[Image.Image]:
    """Pictures with values in [0, 1]; what lies outside is clamped, for bytes would wrap around."""
    pixels = images.detach().float().clamp(0, 1).mul(255).round().byte().permute(0, 2, 3, 1).cpu().numpy()
    return [Image.fromarray(picture[..., 0] if picture.shape[-1] == 1 else picture) for picture in pixels]
