"""From what stands on the command line to picture files: the image family's side of `helicon generate`.

Letters: b pictures, c channels, h height, w width.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar

import torch
from jaxtyping import Bool, Float
from PIL import Image, ImageOps
from torch import Tensor
from torch.nn import functional as F

from helicon.config import signature_without
from helicon.data.dataset import BadFile
from helicon.data.image import ImageTransform, to_channels, to_tensor
from helicon.metrics.contact_sheet import Sheet, contact_sheet, sheet_of_prompts
from helicon.models.muse.generate import Decoding, Filler
from helicon.models.muse.maskgit import MaskGit, some_of
from helicon.models.muse.pipeline import Muse, pil_images
from helicon.nn.network import Network

# Arguments of `MaskGit.generate` that are no options of a command: tensors, and what the maker sets itself.
NOT_OPTIONS = (
    *("self", "texts", "text_embeds", "cond_images", "cond_token_ids", "images", "repaint"),
    *("batch_size", "seed", "return_ids", "classes"),
)


@dataclass(frozen=True)
class Picture:
    """A picture with values in [0, 1]."""

    pixels: Float[Tensor, "c h w"]

    def write(self, path: Path) -> None:
        (picture,) = pil_images(self.pixels[None])
        if picture.mode == "RGBA" and path.suffix.lower() in (".jpg", ".jpeg"):
            picture = to_channels(picture, 3)  # of which a jpeg has no more
        picture.save(path)


def _with_options_of_maskgit(constructor: Callable[..., Any]) -> inspect.Signature:
    """The signature a user (and the checker of options) sees: the constructor's own keywords and those of `MaskGit.generate`."""
    _, *own, _ = inspect.signature(constructor).parameters.values()
    return inspect.Signature([*own, *signature_without(MaskGit.generate, *NOT_OPTIONS).parameters.values()])


class PictureMaker:
    """Makes pictures with a MaskGit (from texts, classes or nothing, from a smaller picture, or a part of one anew) or a Muse."""

    suffixes: ClassVar[tuple[str, ...]] = (".png", ".jpg", ".jpeg", ".webp")

    def __init__(
        self,
        network: Network,
        *,
        texts: Sequence[str] = (),
        image: Path | None = None,
        repaint: Path | None = None,
        superres: Network | None = None,
        classes: int | str | Sequence[int | str] = (),
        extend: Sequence[int] | None = None,
        superres_timesteps: int | None = None,
        **options: Any,
    ):
        """
        Args:
            texts, classes: what the pictures shall show: one of each for every picture, or one for all. Classes by name or number.
            image: the picture to enlarge (super-resolution), or to change (with `repaint` or `extend`).
            repaint: what is white in this picture is painted again.
            extend: how many pixels to add to `image` at its left, top, right and bottom, which must make it square; the whole is then
                scaled to the network's `image_size`.
            superres: enlarges the pictures that `network` makes.
            superres_timesteps: the steps of the second stage.
            options: those of `MaskGit.generate`, which are:
            negative_texts: what the pictures shall not be; guidance leads away from it.
            fmap_size: tokens a side; no other number than that of the pictures the network learned from.
            timesteps: in how many steps the tokens of a picture are filled in.
            sampler: which tokens are filled in first: those the network is surest of (confidence, or reference as the package
                muse-maskgit-pytorch does it), or those of places spread evenly over the picture (halton).
            temperature: of the tokens; 0 takes the likeliest.
            topk_filter_thres: tokens are drawn from the likeliest 1 - topk_filter_thres of the codebook.
            choice_temperature: of the noise on the confidence, at the first step.
            can_remask_prev_masked: tokens that stayed may be masked again.
            force_not_use_token_critic: choose by the network's own confidence, even where it has a critic.
            critic_noise_scale: of the noise on the critic's scores, at the first step.
            cond_scale: how closely the text is followed; 1 is no guidance.
            cond_scale_schedule: linear begins with no guidance, and ends with cond_scale.
        """
        if superres is not None:
            network = _two_stages(network, superres)
        assert isinstance(network, (MaskGit, Muse))
        self.network, self.options = network, dict(options)
        self.base: MaskGit = network.base_maskgit if isinstance(network, Muse) else network
        if self.base.vae is None:
            raise ValueError("this MaskGit learned from token ids, without a tokenizer: it makes no pictures")
        if isinstance(network, Muse):
            self.options["superres_timesteps"] = superres_timesteps
        elif superres_timesteps is not None:
            raise ValueError("superres_timesteps belongs to two stages: name the second with --superres")
        _check_decoding(self.options)
        for stage in (network.base_maskgit, network.superres_maskgit) if isinstance(network, Muse) else (network,):
            stage.filler = Filler(compile=False)  # to compile takes longer than to make a few sheets
        self.conditions = self._conditions(list(texts), classes, self.options.pop("negative_texts", None))
        self.options |= self._given_pictures(image, repaint, extend)

    __signature__ = _with_options_of_maskgit(__init__)

    @property
    def prompts(self) -> list[str]:
        """The words under each picture; of negative texts those that tell pictures apart."""
        classes = [
            f"class {given}" if isinstance(given, int) else given for given in self.conditions.get("classes", ())
        ]
        negative = [f"not {text}" for text in self.conditions.get("negative_texts", ())]
        if len(set(negative)) == 1:
            negative = []
        given = [words for words in (self.conditions.get("texts"), classes, negative) if words]
        return [", ".join(words) for words in zip(*given, strict=True)] or [""]

    def make(self, which: Sequence[int], seed: int) -> list[Picture]:
        """A picture for each of these prompts, as one batch."""
        chosen = {name: [values[index] for index in which] for name, values in self.conditions.items()}
        options = {**self.options, **chosen, "batch_size": len(which), "seed": seed}
        if isinstance(self.network, Muse):
            made = self.network(options.pop("texts", None), return_pil_images=False, **options)
        else:
            made = self.network.generate(**options)
        return [Picture(pixels) for pixels in made.float().cpu()]

    def beside(self, path: Path) -> None:
        """(Nothing is: they are pictures.)"""

    def sheet(self, pictures: Sequence[Picture]) -> Sheet:
        draw = lambda rows, captions: contact_sheet([_batch(row) for row in rows], captions)
        return sheet_of_prompts(pictures, self.prompts, draw)

    def _conditions(
        self, texts: list[str], classes: int | str | Sequence[int | str], negative_texts: Sequence[str] | None
    ) -> dict[str, list[Any]]:
        """What each picture is made from, as many of everything as there are prompts."""
        transformer = self.base.transformer
        if texts and not transformer.condition_on_text:
            instead = "" if transformer.class_emb is None else ", and name classes instead, as in classes=[0]"
            raise ValueError(f"this MaskGit was trained without texts: leave --text out{instead}")
        if transformer.condition_on_text and transformer.text_encoder is None:
            raise ValueError("this MaskGit reads embedded texts: call its generate with text_embeds, in Python")
        if transformer.condition_on_text and not texts:
            raise ValueError('this MaskGit makes pictures from words: say which, as in --text "a red circle"')
        given: dict[str, list[Any]] = {
            "texts": texts,
            "classes": self._classes(classes),
            "negative_texts": list(negative_texts or ()),
        }
        given = {name: values for name, values in given.items() if values}
        count = max(map(len, given.values()), default=1)
        for name, values in given.items():
            if len(values) not in (1, count):
                raise ValueError(f"there are {len(values)} {name} for {count} pictures: give one for all, or {count}")
        return {name: values * (count // len(values)) for name, values in given.items()}

    def _classes(self, classes: int | str | Sequence[int | str]) -> list[int | str]:
        """By name where they have names, so that both of two stages know which are meant."""
        table, names = self.base.transformer.class_emb, self.base.class_names
        is_given = isinstance(classes, int) or bool(classes)
        if table is None:
            if is_given:
                raise ValueError("this MaskGit was trained without classes: leave classes out")
            return []
        if not is_given:
            first, known = (0, f"0 to {table.num_embeddings - 1}") if names is None else (names[0], some_of(names))
            raise ValueError(f"this MaskGit makes pictures of classes: say which of {known}, as in classes=[{first}]")
        numbers = self.base.class_numbers(classes)
        return [*numbers] if names is None else [names[number] for number in numbers]

    def _given_pictures(
        self, image: Path | None, repaint: Path | None, extend: Sequence[int] | None
    ) -> dict[str, Tensor]:
        """The pictures among the options, as `MaskGit.generate` wants them."""
        low_size = self.base.cond_image_size
        changes = repaint is not None or extend is not None
        if isinstance(self.network, Muse) and (image is not None or changes):
            raise ValueError(
                "a pair of stages starts from words alone: paint with the base run, and enlarge the result with the second run"
            )
        if low_size is not None and changes:
            raise ValueError("this MaskGit enlarges pictures: --repaint and extend are for one that makes them")
        if low_size is not None and image is None:
            raise ValueError(
                "this MaskGit enlarges pictures: give one with --image, or make it the --superres of a base run"
            )
        if low_size is None and (image is not None) != changes:
            raise ValueError(
                "give --image, the picture, together with --repaint, one that is white where it is to be painted again, or with "
                "extend=[left,top,right,bottom], the pixels to add to it"
            )
        if repaint is not None and extend is not None:
            raise ValueError("--repaint and extend both change a picture: give one of them")
        if image is None:
            return {}
        vae = self.base.vae if self.base.cond_vae is None else self.base.cond_vae
        assert vae is not None
        if low_size is not None:
            return {"cond_images": self._read(image, low_size, vae.channels, at_own_size=True)}
        if extend is not None:
            return self._extended(image, extend, vae.channels)
        assert repaint is not None
        size = self.base.image_size
        pixels, region = self._read(image, size, vae.channels), self._read(repaint, size, channels=1)[:, 0] > 0.5
        _check_repaint(image, repaint, region)
        return {"images": pixels, "repaint": region}

    def _extended(self, path: Path, extend: Sequence[int], channels: int) -> dict[str, Tensor]:
        """The picture scaled and put where it belongs in one of `image_size`, and the region around it."""
        size = self.base.image_size
        picture = _decoded(path, ImageTransform(size, channels))
        left, top, right, bottom = _scaled_margins(path, extend, size)
        picture = picture.resize((size - left - right, size - top - bottom), Image.Resampling.BICUBIC)
        pixels = to_tensor(picture)[None].to(self.base.device)
        # The edge goes on outwards, so that the tokens inside it, which stay, see no border that is not there.
        pixels = F.pad(pixels, (left, right, top, bottom), mode="replicate")
        region = torch.ones(1, size, size, dtype=torch.bool, device=self.base.device)
        region[:, top : size - bottom, left : size - right] = False
        return {"images": pixels, "repaint": region}

    def _read(self, path: Path, size: int, channels: int, at_own_size: bool = False) -> Float[Tensor, "1 c h w"]:
        """The middle square of a picture, scaled to the size asked for. (MaskGit itself scales what it enlarges, as it learned to.)"""
        transform = ImageTransform(size, channels)
        try:
            picture = transform.decode(path, str(path))
            if at_own_size:
                transform = ImageTransform(min(picture.size), channels)
            return transform(picture, str(path))[None].to(self.base.device)
        except BadFile as error:
            raise ValueError(str(error)) from error


def _two_stages(base: Network, superres: Network) -> Muse:
    if isinstance(base, MaskGit) and isinstance(superres, MaskGit):
        return Muse(base, superres)
    option, network = ("RUN", base) if not isinstance(base, MaskGit) else ("--superres", superres)
    raise ValueError(f"{option} holds a {type(network).__name__}, and two stages are two MaskGits")


def _check_decoding(options: Mapping[str, Any]) -> None:
    """Refuses numbers that cannot be, before anything is made."""
    known = {entry.name for entry in fields(Decoding)}
    Decoding(**{name: value for name, value in options.items() if name in known})


def _check_repaint(image: Path, repaint: Path, region: Bool[Tensor, "1 h w"]) -> None:
    (width, height), (other_width, other_height) = _size(image), _size(repaint)
    if (width, height) != (other_width, other_height):
        raise ValueError(
            f"{image} is {width} x {height} and {repaint} is {other_width} x {other_height}: they must be of one size"
        )
    if not region.any():
        raise ValueError(f"nothing in {repaint} is white, and so nothing would be painted again")


def _decoded(path: Path, transform: ImageTransform) -> Image.Image:
    try:
        return to_channels(transform.decode(path, str(path)), transform.channels)
    except BadFile as error:
        raise ValueError(str(error)) from error


def _scaled_margins(path: Path, extend: Sequence[int], size: int) -> tuple[int, ...]:
    """The pixels to add to a picture, as pixels of one of `size` that it becomes a part of."""
    words = f"extend=[{','.join(map(str, extend))}]"
    if len(extend) != 4 or min(extend) < 0 or not any(extend):
        raise ValueError(
            f"{words} must be four numbers of pixels to add, as in extend=[64,64,64,64]: left, top, right, bottom"
        )
    left, top, right, bottom = extend
    width, height = (side + more for side, more in zip(_size(path), (left + right, top + bottom), strict=True))
    if width != height:
        missing = abs(width - height)
        where = "at the top or bottom" if width > height else "at the left or right"
        raise ValueError(
            f"{words} makes {path} {width} x {height}, and it must be square: add {missing} pixels more {where}"
        )
    margins = tuple(round(pixels * size / width) for pixels in extend)
    if not any(margins) or margins[0] + margins[2] >= size or margins[1] + margins[3] >= size:
        raise ValueError(f"{words} leaves nothing to paint, or nothing of {path}, in a picture of {size} x {size}")
    return margins


def _size(path: Path) -> tuple[int, int]:
    with Image.open(path) as image:
        return ImageOps.exif_transpose(image).size


def _batch(pictures: Sequence[Picture]) -> Float[Tensor, "b c h w"]:
    return torch.stack([picture.pixels for picture in pictures])
