"""Seeded furniture and simple solids with true captions: something to learn with nothing downloaded.

    "a tall round table"    "a low square stool"    "a low wide box"    "a tall lamp"

Each mesh is a function of (seed, index) alone and the same on every machine. It is made of closed prisms in a cube,
with y up and nothing but four-cornered faces (cut in two for triangles), and then stretched: how high and how wide it is
against its depth makes the words. `describe_mesh` finds them again by looking, also in a mesh that a model made.
"""

import functools
import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.utils.data import Dataset

from helicon.data.mesh import Mesh, MeshTransform
from helicon.metrics.mesh import surface_points

Pair = tuple[str, str]  # a kind, as it is or with its footprint before it ("round table"), and a height
Outline = list[tuple[float, float]]  # x and z of the corners of a convex polygon
Solid = tuple[Float[Tensor, "v 3"], Int[Tensor, "f 4"]]
Draw = Callable[[float, float], float]  # a number between two

HEIGHTS = {"low": (0.45, 0.65), "tall": (1.4, 1.8)}  # against the longer side of the ground
FOOTPRINTS = {
    "box": ("square", "wide"),
    "cylinder": ("",),
    "bucket": ("",),
    "table": ("round", "square", "wide"),
    "stool": ("round", "square"),
    "chair": ("",),
    "bench": ("",),
    "shelf": ("",),
    "lamp": ("",),
}
KINDS = tuple(FOOTPRINTS)
LONG_KINDS = ("bench", "shelf")  # wide as they are, so the caption need not say it
WIDTHS = {"wide": (1.8, 2.2), "": (1.0, 1.0)}  # against the depth
IS_TALL, IS_WIDE = 1.0, 1.4  # from where on the words apply
NUM_SIDES = (8,)  # of what is round
MOST_SIDES = 24  # with which a lamp has 196 triangles
LOWEST_RESOLUTION = 64  # bins in which the parts stay apart
NUM_POINTS = 384  # on a surface, to compare it by
FARTHEST = 0.16  # mean distance of such points in the cube [-1, 1], up to which a mesh is of a kind


def _between(place: float, low: float, high: float) -> float:
    return low + (high - low) * place


def _rectangle(x: float, z: float, half_x: float, half_z: float) -> Outline:
    return [(x - half_x, z - half_z), (x - half_x, z + half_z), (x + half_x, z + half_z), (x + half_x, z - half_z)]


@dataclass(frozen=True)
class _Style:
    """How a thing stands on the ground, and how finely what is round is cut."""

    is_round: bool
    num_sides: int

    @property
    def ground(self) -> Outline:
        return self.circle(1.0) if self.is_round else _rectangle(0, 0, 1, 1)

    def circle(self, radius: float) -> Outline:
        quarter = self.num_sides // 4
        turns = [math.pi / 2 * step / quarter for step in range(quarter)]
        # The other quarters are the first one turned, so that what should be opposite is so exactly.
        points = [(math.cos(turn), -math.sin(turn)) for turn in turns]
        points += [(z, -x) for x, z in points]
        points += [(-x, -z) for x, z in points]
        return [(radius * x, radius * z) for x, z in points]


def _prism(outline: Outline, low: float, high: float, top: Outline | None = None) -> Solid:
    """From one outline up to another (or the same); of an even number of corners, each end is a row of quads."""
    n = len(outline)
    corners = [(x, low, z) for x, z in outline] + [(x, high, z) for x, z in top or outline]
    sides = [(i, (i + 1) % n, n + (i + 1) % n, n + i) for i in range(n)]
    ends = [(0, i, i + 1, i + 2) for i in range(1, n - 1, 2)]
    quads = sides + [tuple(reversed(end)) for end in ends] + [tuple(n + i for i in end) for end in ends]
    return torch.tensor(corners, dtype=torch.float64), torch.tensor(quads)


def _box(draw: Draw, style: _Style) -> list[Solid]:
    return [_prism(style.ground, -1, 1)]


def _bucket(draw: Draw, style: _Style) -> list[Solid]:
    return [_prism(style.circle(draw(0.45, 0.6)), -1, 1, top=style.circle(1.0))]


def _table(draw: Draw, style: _Style) -> list[Solid]:
    under, half = 1 - draw(0.2, 0.3), draw(0.09, 0.13)
    out = 0.5 if style.is_round else 0.75
    legs = [_prism(_rectangle(x, z, half, half), -1, under) for x in (-out, out) for z in (-out, out)]
    return [_prism(style.ground, under, 1), *legs]


def _stool(draw: Draw, style: _Style) -> list[Solid]:
    under, half = 1 - draw(0.35, 0.5), draw(0.1, 0.14)
    places = [(0.0, -0.65), (-0.55, 0.45), (0.55, 0.45)]
    return [
        _prism(style.ground, under, 1),
        *(_prism(_rectangle(*place, half, half), -1, under) for place in places),
    ]


def _chair(draw: Draw, style: _Style) -> list[Solid]:
    seat, half, thick = draw(-0.15, 0.05), draw(0.09, 0.13), draw(0.15, 0.2)
    legs = [_prism(_rectangle(x, z, half, half), -1, seat) for x in (-0.75, 0.75) for z in (-0.75, 0.75)]
    back = _prism(_rectangle(0, -0.8, 0.9, 0.1), seat + thick, 1)
    return [_prism(_rectangle(0, 0, 1, 1), seat, seat + thick), back, *legs]


def _bench(draw: Draw, style: _Style) -> list[Solid]:
    under, half = 1 - draw(0.3, 0.45), draw(0.08, 0.12)
    return [
        _prism(_rectangle(0, 0, 1, 1), under, 1),
        *(_prism(_rectangle(x, 0, half, 0.85), -1, under) for x in (-0.75, 0.75)),
    ]


def _shelf(draw: Draw, style: _Style) -> list[Solid]:
    half, thick = draw(0.06, 0.09), draw(0.12, 0.18)
    inside = 1 - 2 * half
    sides = [_prism(_rectangle(x, 0, half, 1), -1, 1) for x in (half - 1, 1 - half)]
    boards = [_prism(_rectangle(0, 0, inside, 0.9), low, low + thick) for low in (-0.85, -thick / 2, 0.85 - thick)]
    return [*sides, *boards]


def _lamp(draw: Draw, style: _Style) -> list[Solid]:
    shade, half, foot = draw(0.1, 0.3), draw(0.08, 0.12), -1 + draw(0.12, 0.2)
    return [
        _prism(style.circle(draw(0.5, 0.65)), -1, foot),
        _prism(_rectangle(0, 0, half, half), foot, shade),
        _prism(style.circle(1.0), shade, 1, top=style.circle(draw(0.45, 0.6))),
    ]


# In the cube, which each of them fills.
SOLIDS: dict[str, Callable[[Draw, _Style], list[Solid]]] = {
    "box": _box,
    "cylinder": _box,
    "bucket": _bucket,
    "table": _table,
    "stool": _stool,
    "chair": _chair,
    "bench": _bench,
    "shelf": _shelf,
    "lamp": _lamp,
}


def _build(kind: str, footprint: str, num_sides: int, draw: Draw) -> Mesh:
    solids = SOLIDS[kind](draw, _Style(footprint == "round" or kind == "cylinder", num_sides))
    starts = np.cumsum([0, *(len(vertices) for vertices, _ in solids)])
    faces = [quads + int(start) for (_, quads), start in zip(solids, starts[:-1], strict=True)]
    return Mesh(torch.cat([vertices for vertices, _ in solids]), torch.cat(faces))


def _triangles(quads: Int[Tensor, "f 4"]) -> Int[Tensor, "g 3"]:
    return quads[:, [0, 1, 2, 0, 2, 3]].reshape(-1, 3)


@dataclass(frozen=True)
class MeshAttributes:
    """What a mesh is: the words of its caption. (Made by a model, it may be of no kind.)"""

    kind: str | None
    height: str
    footprint: str  # round, square, wide; empty where the kind has but one

    @property
    def caption(self) -> str:
        words = (self.height, self.footprint, self.kind or "thing")
        return f"a {' '.join(word for word in words if word)}"


class SyntheticMeshes(Dataset[dict[str, Any]]):
    """`num_samples` meshes {"vertices": [v, 3], "faces": [f, 3 or 4], "face_edges": [e, 2], "texts": caption}.

    (kind, height) pairs in `held_out` never appear; another dataset with `only` those tests what was made of them. `kinds`
    and `heights` are the words to choose from, and `num_sides` the numbers of sides that what is round may have (8 by default: 12 to 76
    triangles; with 24, up to 196, of which those that have no area on a coarse grid are missing).
    """

    def __init__(
        self,
        num_samples: int,
        seed: int = 0,
        *,
        num_discrete_coors: int = 128,
        quads: bool = False,
        edges: bool = True,
        held_out: Sequence[Pair] = (),
        only: Sequence[Pair] = (),
        kinds: Sequence[str] = KINDS,
        heights: Sequence[str] = tuple(HEIGHTS),
        num_sides: Sequence[int] = NUM_SIDES,
    ):
        if num_samples < 1:
            raise ValueError(f"num_samples={num_samples}: it must be at least 1")
        if num_discrete_coors < LOWEST_RESOLUTION:
            raise ValueError(
                f"num_discrete_coors={num_discrete_coors}: these meshes need {LOWEST_RESOLUTION} or more to keep their parts apart"
            )
        _check_words("kinds", kinds, KINDS)
        _check_words("heights", heights, tuple(HEIGHTS))
        self.choices = _choices(kinds, heights, held_out, only)
        if not num_sides or any(number % 4 or not 8 <= number <= MOST_SIDES for number in num_sides):
            raise ValueError(f"num_sides={num_sides!r}: give a list of multiples of 4 from 8 to {MOST_SIDES}")
        self.num_samples, self.seed, self.num_sides = num_samples, seed, tuple(num_sides)
        self.transform = MeshTransform(num_discrete_coors, quads, edges=edges)

    def __len__(self) -> int:
        return self.num_samples

    def attributes(self, index: int) -> MeshAttributes:
        """What mesh `index` is, without making it."""
        return self._attributes(self._draws(index))

    def fetch(self, index: int, generator: torch.Generator | None = None) -> dict[str, Any]:
        """The generator goes unused: these meshes are not augmented, as a stretched one would belie its caption."""
        draws = self._draws(index)
        words = self._attributes(draws)
        assert words.kind is not None

        def draw(low: float, high: float) -> float:
            return _between(next(draws), low, high)

        is_wide = words.footprint == "wide" or words.kind in LONG_KINDS
        width, height = draw(*WIDTHS["wide" if is_wide else ""]), draw(*HEIGHTS[words.height])
        # (Without a choice nothing is drawn.)
        num_sides = self.num_sides[int(next(draws) * len(self.num_sides)) if len(self.num_sides) > 1 else 0]
        mesh = _build(words.kind, words.footprint, num_sides, draw)
        vertices = mesh.vertices * torch.tensor([width, height * width, 1.0], dtype=torch.float64)
        faces = mesh.faces if self.transform.quads else _triangles(mesh.faces)
        return self.transform(Mesh(vertices, faces), f"mesh {index}") | {"texts": words.caption}

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.fetch(index)

    def _draws(self, index: int) -> Iterator[float]:
        """Sixteen numbers in [0, 1) from (seed, index)."""
        if not 0 <= index < self.num_samples:
            raise IndexError(f"there is no mesh {index} among {self.num_samples}")
        digest = hashlib.blake2b(f"meshes {self.seed} {index}".encode(), digest_size=64).digest()
        return iter((np.frombuffer(digest, dtype="<u4") / 2**32).tolist())

    def _attributes(self, draws: Iterator[float]) -> MeshAttributes:
        """A pair of kind and height, each as often; then one of the footprints they leave."""
        pairs = list(self.choices)
        kind, height = pairs[int(next(draws) * len(pairs))]
        footprints = self.choices[kind, height]
        return MeshAttributes(kind, height, footprints[int(next(draws) * len(footprints))])


def _check_words(name: str, given: Sequence[str], known: Sequence[str]) -> None:
    if not given or isinstance(given, str) or any(word not in known for word in given):
        raise ValueError(f"{name}={given!r}: give a list of at least one of {', '.join(known)}")


def _choices(
    kinds: Sequence[str], heights: Sequence[str], held_out: Sequence[Pair], only: Sequence[Pair]
) -> dict[Pair, list[str]]:
    """The footprints to choose from, for each kind and height."""
    every = [(kind, height, footprint) for kind in kinds for height in heights for footprint in FOOTPRINTS[kind]]

    def is_meant(pair: Pair, choice: tuple[str, str, str]) -> bool:
        kind, height, footprint = choice
        return pair in ((kind, height), (f"{footprint} {kind}", height))

    for pair in (*held_out, *only):
        if not any(is_meant(pair, choice) for choice in every):
            raise ValueError(f"{pair} is no pair of a kind ({', '.join(kinds)}) and a height ({', '.join(heights)})")
    choices: dict[Pair, list[str]] = {}
    for choice in every:
        is_asked_for = not only or any(is_meant(pair, choice) for pair in only)
        if is_asked_for and not any(is_meant(pair, choice) for pair in held_out):
            choices.setdefault(choice[:2], []).append(choice[2])
    if not choices:
        raise ValueError("every pair of a kind and a height is held out: leave at least one")
    return choices


def describe_mesh(vertices: Float[Tensor, "v 3"], faces: Int[Tensor, "f n"]) -> MeshAttributes | None:
    """Tells by rules alone what a mesh like these is, also a damaged or generated one; None if there is nothing.

    Its sides tell the height and the width. Its kind is the one of which an example, stretched to the same box, has its
    surface nearest, in the mean distance from points of either to the nearest of the other.
    """
    faces = faces[(faces >= 0).all(dim=1)].cpu()
    vertices = vertices.detach().cpu().double()
    used = vertices[faces.unique()]
    if len(faces) == 0 or not used.isfinite().all():
        return None
    sides = (used.amax(dim=0) - used.amin(dim=0)).clamp(min=1e-9)
    points = _surface((vertices - used.amin(dim=0)) / sides * 2 - 1, faces)
    if points is None:
        return None
    names, examples = _examples()
    distances = torch.cdist(points.expand_as(examples), examples)
    errors = (distances.amin(dim=1).mean(dim=1) + distances.amin(dim=2).mean(dim=1)) / 2
    kind, footprint = names[int(errors.argmin())]
    width, height, depth = sides.tolist()
    tall = "tall" if height > IS_TALL * max(width, depth) else "low"
    if errors.min() > FARTHEST:
        return MeshAttributes(None, tall, "")
    if footprint == "square" and "wide" in FOOTPRINTS[kind] and max(width, depth) > IS_WIDE * min(width, depth):
        footprint = "wide"
    return MeshAttributes(kind, tall, footprint)


@functools.cache
def _examples() -> tuple[list[Pair], Float[Tensor, "m p 3"]]:
    """Each kind and footprint with smaller and with larger parts: points on its surface."""
    names, surfaces = [], []
    for kind, footprints in FOOTPRINTS.items():
        for footprint in footprints:
            if footprint == "wide":  # a stretched square
                continue
            for place in (0.2, 0.8):
                mesh = _build(kind, footprint, NUM_SIDES[0], functools.partial(_between, place))
                surface = _surface(mesh.vertices, mesh.faces)
                assert surface is not None
                names.append((kind, footprint))
                surfaces.append(surface)
    return names, torch.stack(surfaces)


def _surface(vertices: Float[Tensor, "v 3"], faces: Int[Tensor, "f n"]) -> Float[Tensor, "p 3"] | None:
    """Points spread evenly over the surface, the same each time; None where it has no area."""
    points = surface_points(vertices[faces][None], torch.ones(1, len(faces), dtype=torch.bool), NUM_POINTS)[0]
    return points if points.isfinite().all() else None
