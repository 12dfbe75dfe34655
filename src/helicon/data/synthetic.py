"""Seeded pictures of simple shapes with true captions: something to learn with nothing downloaded.

    "a large red circle on a blue background at the top left"

Each picture is a function of (seed, index) alone and the same on every machine: choices come from a hash, edges are
drawn from signed distances with operations that round exactly, and the result has 8 bits a channel, like a file.
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, UInt8
from torch.utils.data import Dataset

Array = np.ndarray
Pair = tuple[str, str]  # shape and colour

COLOURS = {
    "red": (214, 39, 40),
    "orange": (255, 140, 0),
    "yellow": (250, 225, 50),
    "green": (40, 160, 60),
    "blue": (40, 80, 210),
    "purple": (130, 50, 160),
    "white": (240, 240, 240),
    "black": (25, 25, 25),
}
PLACES = {
    "at the top left": (0.28, 0.28),
    "at the top": (0.5, 0.28),
    "at the top right": (0.72, 0.28),
    "at the left": (0.28, 0.5),
    "in the centre": (0.5, 0.5),
    "at the right": (0.72, 0.5),
    "at the bottom left": (0.28, 0.72),
    "at the bottom": (0.5, 0.72),
    "at the bottom right": (0.72, 0.72),
}
# The radius, as a part of the picture's side. A huge shape has room in the centre alone.
SIZES = {"small": (0.09, 0.13), "large": (0.20, 0.25), "huge": (0.30, 0.38)}
JITTER = 0.03  # of the place
SHADE = 0.15  # how much darker or lighter a background gets towards its edges
TINT = 12  # how far a colour strays from the one it is named after, of 255


def _circle(x: Array, y: Array, radius: float) -> Array:
    return np.sqrt(x * x + y * y) - radius


def _ring(x: Array, y: Array, radius: float) -> Array:
    return np.abs(np.sqrt(x * x + y * y) - 0.75 * radius) - 0.25 * radius


def _box(x: Array, y: Array, width: float, height: float) -> Array:
    return np.maximum(np.abs(x) - width, np.abs(y) - height)


def _square(x: Array, y: Array, radius: float) -> Array:
    return _box(x, y, 0.85 * radius, 0.85 * radius)


def _cross(x: Array, y: Array, radius: float) -> Array:
    return np.minimum(_box(x, y, radius, 0.33 * radius), _box(x, y, 0.33 * radius, radius))


def _triangle(x: Array, y: Array, radius: float) -> Array:
    """Apex up: inside all of three lines."""
    side = np.abs(x) * 0.866025 - y * 0.5
    return np.maximum(side, y) - 0.5 * radius


def _star(x: Array, y: Array, radius: float) -> Array:
    """A pentagram, apex up, is inside at least four of its five lines: the second largest distance decides."""
    x = np.abs(x)
    lines = [-y, 0.951057 * x - 0.309017 * y, 0.587785 * x + 0.809017 * y]
    lines += [-0.951057 * x - 0.309017 * y, -0.587785 * x + 0.809017 * y]
    largest, second = lines[0], np.full_like(lines[1], -np.inf)
    for line in lines[1:]:
        second = np.maximum(second, np.minimum(largest, line))
        largest = np.maximum(largest, line)
    return second - 0.309017 * radius


SHAPES: dict[str, Callable[[Array, Array, float], Array]] = {
    "circle": _circle,
    "square": _square,
    "triangle": _triangle,
    "star": _star,
    "ring": _ring,
    "cross": _cross,
}


@dataclass(frozen=True)
class Attributes:
    """What is in a picture: the words of its caption, and the numbers behind them (parts of the picture's side)."""

    shape: str
    colour: str
    size: str
    place: str
    background: str
    x: float
    y: float
    radius: float

    @property
    def caption(self) -> str:
        article = "an" if self.background[0] in "aeiou" else "a"
        return f"a {self.size} {self.colour} {self.shape} on {article} {self.background} background {self.place}"


class SyntheticShapes(Dataset[dict[str, Any]]):
    """`num_samples` pictures {"images": [3, n, n], "texts": caption}.

    (shape, colour) pairs in `held_out` are never drawn; another dataset with `only` those tests what was made of them.
    `kinds` (of shapes), `sizes` and `places` are the words to choose from, and without `shaded` colours are flat and exactly
    those named: huge flat shapes in the centre are the quickest to learn.
    """

    def __init__(
        self,
        num_samples: int,
        image_size: int,
        seed: int = 0,
        *,
        held_out: Sequence[Pair] = (),
        only: Sequence[Pair] = (),
        kinds: Sequence[str] = tuple(SHAPES),
        sizes: Sequence[str] = ("small", "large"),
        places: Sequence[str] = tuple(PLACES),
        shaded: bool = True,
    ):
        if num_samples < 1 or image_size < 1:
            raise ValueError(f"num_samples={num_samples}, image_size={image_size}: both must be at least 1")
        _check_words("kinds", kinds, SHAPES)
        every = [(shape, colour) for shape in kinds for colour in COLOURS]
        for pair in (*held_out, *only):
            if pair not in every:
                raise ValueError(
                    f"{pair} is no pair of a shape ({', '.join(kinds)}) and a colour ({', '.join(COLOURS)})"
                )
        self.pairs = [pair for pair in only or every if pair not in held_out]
        if not self.pairs:
            raise ValueError("every pair of a shape and a colour is held out: leave at least one")
        _check_words("sizes", sizes, SIZES)
        _check_words("places", places, PLACES)
        if "huge" in sizes and set(places) != {"in the centre"}:
            raise ValueError('a huge shape does not fit beside the centre: give places=["in the centre"] with it')
        self.sizes, self.places, self.shaded = list(sizes), list(places), shaded
        self.num_samples, self.image_size, self.seed = num_samples, image_size, seed

    def __len__(self) -> int:
        return self.num_samples

    def attributes(self, index: int) -> Attributes:
        """What picture `index` shows, without drawing it."""
        return self._attributes(self._draws(index))

    def fetch(self, index: int, generator: torch.Generator | None = None) -> dict[str, Any]:
        """The generator goes unused: these pictures are not augmented, as a mirrored one would belie its caption."""
        draws = self._draws(index)
        attributes = self._attributes(draws)
        pixels = self._draw(attributes, draws)
        images = torch.from_numpy(pixels).to(torch.float32).div_(255)
        return {"images": images, "texts": attributes.caption}

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.fetch(index)

    def _draws(self, index: int) -> Iterator[float]:
        """Sixteen numbers in [0, 1) from (seed, index)."""
        if not 0 <= index < self.num_samples:
            raise IndexError(f"there is no picture {index} among {self.num_samples}")
        digest = hashlib.blake2b(f"shapes {self.seed} {index}".encode(), digest_size=64).digest()
        return iter((np.frombuffer(digest, dtype="<u4") / 2**32).tolist())

    def _attributes(self, draws: Iterator[float]) -> Attributes:
        shape, colour = _choose(self.pairs, draws)
        size, place = _choose(self.sizes, draws), _choose(self.places, draws)
        background = _choose([name for name in COLOURS if name != colour], draws)
        smallest, largest = SIZES[size]
        x, y = (centre + JITTER * (2 * next(draws) - 1) for centre in PLACES[place])
        return Attributes(shape, colour, size, place, background, x, y, smallest + (largest - smallest) * next(draws))

    def _draw(self, attributes: Attributes, draws: Iterator[float]) -> UInt8[Array, "3 n n"]:
        n = self.image_size
        across = (np.arange(n, dtype=np.float32) + 0.5) / n
        x, y = across[None, :] - attributes.x, across[:, None] - attributes.y
        distance = SHAPES[attributes.shape](x, y, attributes.radius)
        coverage = np.clip(0.5 - distance * n, 0, 1)  # an edge is one pixel wide

        colour, behind = (_flat(name) for name in (attributes.colour, attributes.background))
        if self.shaded:
            colour, behind = _tinted(colour, draws), _tinted(behind, draws)
            slopes = [np.float32(SHADE * (2 * next(draws) - 1)) for _ in range(2)]
            behind = behind * (1 + (across[None, :] - 0.5) * slopes[0] + (across[:, None] - 0.5) * slopes[1])
        picture = behind + (colour - behind) * coverage
        return np.clip(picture + 0.5, 0, 255).astype(np.uint8)


def _check_words(name: str, given: Sequence[str], known: Mapping[str, Any]) -> None:
    unknown = [word for word in given if word not in known]
    if unknown or not given or isinstance(given, str):
        raise ValueError(f"{name}={given!r}: give a list of at least one of {', '.join(known)}")


def _choose(options: Sequence[Any], draws: Iterator[float]) -> Any:
    return options[int(next(draws) * len(options))]


def _flat(name: str) -> Float[Array, "3 1 1"]:
    return np.array(COLOURS[name], dtype=np.float32)[:, None, None]


def _tinted(colour: Float[Array, "3 1 1"], draws: Iterator[float]) -> Float[Array, "3 1 1"]:
    return colour + np.array([[[TINT * (2 * next(draws) - 1)]] for _ in range(3)], dtype=np.float32)


@dataclass(frozen=True)
class Recognised:
    """What a picture seems to show; None where nothing stands out from the background."""

    shape: str | None
    colour: str | None
    background: str


def recognise(picture: Float[torch.Tensor, "3 n n"]) -> Recognised:
    """Tells by rules alone what a picture like these shows, also a blurred or generated one.

    The background is the colour of most of the edge. The shape's colour is, of all the other colours, the one most pixels
    are near to. How far each pixel lies between the two says how much of it the shape covers, and the shape is the one
    that, drawn at the same centre at the best of many sizes, covers most nearly the same.
    """
    pixels = np.clip(picture.detach().cpu().float().numpy().transpose(1, 2, 0), 0, 1) * 255
    names, palette = list(COLOURS), np.array(list(COLOURS.values()), dtype=np.float32)
    distance = np.sqrt(np.square(pixels[:, :, None] - palette).sum(axis=-1))
    nearest = distance.argmin(axis=-1)
    edge = np.concatenate([nearest[0], nearest[-1], nearest[:, 0], nearest[:, -1]])
    behind = int(np.bincount(edge).argmax())
    seen = nearest[(nearest != behind) & (distance.min(axis=-1) < 45)]
    if len(seen) < 0.005 * nearest.size:
        return Recognised(None, None, names[behind])
    colour = int(np.bincount(seen).argmax())
    corners = pixels[[0, 0, -1, -1], [0, -1, 0, -1]].mean(axis=0)
    axis = palette[colour] - corners
    between = (pixels - corners) @ axis / (axis @ axis)
    covered = np.clip(2 * between - 0.5, 0, 1)  # steeper than it is: the shade of a background is no part of the shape
    return Recognised(_best_shape(covered), names[colour], names[behind])


def _best_shape(covered: Float[Array, "n n"]) -> str:
    n = len(covered)
    across = (np.arange(n, dtype=np.float32) + 0.5) / n
    inner = covered > 0.5
    centre_x, centre_y = (inner.sum(axis=axis) @ across / max(1, inner.sum()) for axis in (0, 1))
    soft, shift = _softened(covered), np.linspace(-0.02, 0.02, 3, dtype=np.float32)
    x = (across - centre_x)[None, None, None, :] - shift[None, :, None, None]
    y = (across - centre_y)[None, None, :, None] - shift[:, None, None, None]

    def error(shape: Callable[[Array, Array, float], Array], radius: float) -> float:
        drawn = _softened(np.clip(0.5 - shape(x, y, radius) * n, 0, 1))
        both = np.square(np.maximum(drawn, soft)).sum(axis=(-1, -2))
        return float((np.square(drawn - soft).sum(axis=(-1, -2)) / both).min())

    radii = [0.08 + 0.01 * step for step in range(33)]
    errors = {name: min(error(shape, radius) for radius in radii) for name, shape in SHAPES.items()}
    return min(errors, key=errors.__getitem__)


def _softened(covered: Float[Array, "... n n"]) -> Float[Array, "... n n"]:
    """The means of 3 x 3 pixels: a star that lost its tips is still more like a star than like a square."""
    n = covered.shape[-1]
    padded = np.pad(covered, [(0, 0)] * (covered.ndim - 2) + [(1, 1), (1, 1)], mode="edge")
    return np.mean([padded[..., row : row + n, column : column + n] for row in range(3) for column in range(3)], axis=0)
