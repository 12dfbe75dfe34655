"""K-means on the device: which of k centroids a frame is nearest to, and where to put them.

Fitting goes over the frames in shuffled mini-batches (Sculley 2010, "Web-scale k-means clustering"), each centroid
following the mean of what falls to it. It begins with centroids drawn far apart (k-means++, Arthur and Vassilvitskii
2007, with several tries a draw) and moves those that nothing falls to. All random numbers come from the seed and all
sums are matrix products, so the same frames give the same centroids.

Letters: n frames, m frames of a mini-batch, d features, k centroids.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from helicon.nn.network import WEIGHTS_FILE, load_state

CHUNK = 16384  # frames compared with all centroids at once
INITIAL_FRAMES = 16  # for each centroid, from which the first centroids are drawn
REMEMBERED = 0.25  # of what a centroid has seen, after a pass: early batches were shared out among other centroids

Progress = Callable[[int, int], None]  # what is done, of how much


@dataclass(frozen=True)
class KMeansReport:
    """How well centroids stand for the frames they were fitted to."""

    num_frames: int
    inertia: float  # the mean squared distance of a frame from its centroid
    variance: float  # the same from the mean of all frames: what one centroid would leave
    num_used: int  # centroids that some frame is nearest to
    perplexity: float  # as many centroids, all used equally, would be as hard to guess

    @property
    def unexplained(self) -> float:
        """The part of the variance that centroids leave."""
        return self.inertia / self.variance if self.variance else 0.0


class KMeans(nn.Module):
    """`codebook_size` centroids of `dim` features, NaN until they are fitted or loaded."""

    centroids: Tensor

    def __init__(self, dim: int, codebook_size: int):
        super().__init__()
        if codebook_size < 2:
            raise ValueError(f"codebook_size={codebook_size}: it must be at least 2")
        self.codebook_size = codebook_size
        self.register_buffer("centroids", torch.full((codebook_size, dim), torch.nan))
        self.is_fitted = False

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "KMeans":
        # They go along, but stay in single precision: half of it would give other tokens.
        self.centroids = self.centroids.to(fn(self.centroids).device)
        return self

    @torch.no_grad()
    def forward(self, frames: Float[Tensor, "*b d"]) -> Int[Tensor, "*b"]:
        """The nearest centroid of each frame."""
        if not self.is_fitted:
            self.is_fitted = not bool(self.centroids.isnan().any())
        if not self.is_fitted:
            raise ValueError("the clusters are not fitted yet: run `helicon fit-kmeans`, or call fit")
        with torch.autocast(frames.device.type, enabled=False):
            rows = frames.float().reshape(-1, frames.shape[-1]).split(CHUNK)
            ids = [_nearest(row, self.centroids)[0] for row in rows]
        return torch.cat(ids).reshape(frames.shape[:-1])

    @torch.no_grad()
    def fit(
        self,
        frames: Float[Tensor, "n d"],
        *,
        seed: int = 0,
        passes: int = 10,
        batch_size: int = 4096,
        progress: Progress | None = None,
    ) -> KMeansReport:
        """Puts the centroids among `frames`, which may be on another device than the centroids."""
        if len(frames) < self.codebook_size:
            raise ValueError(
                f"{self.codebook_size} clusters cannot be found in {len(frames)} frames: give more audio, or fewer clusters"
            )
        if num_bad := int((~frames.isfinite()).any(dim=1).sum()):
            raise ValueError(
                f"{num_bad} of {len(frames)} frames are not finite: leave out the sounds they come from, or check the model"
            )
        generator = torch.Generator().manual_seed(seed)
        with torch.autocast(self.centroids.device.type, enabled=False):
            self._scatter(frames, generator)
            self.is_fitted = True
            weights = self.centroids.new_zeros(self.codebook_size)
            for number in range(passes):
                used = self._pass(frames, weights, batch_size, generator)
                if number < passes - 1:
                    self._revive(frames, used, weights, generator)
                weights *= REMEMBERED
                if progress is not None:
                    progress(number + 1, passes)
            return self._report(frames)

    def _scatter(self, frames: Float[Tensor, "n d"], generator: torch.Generator) -> None:
        """Centroids drawn among some of the frames, each with a probability that grows with the squared distance to those before."""
        some = _drawn(frames, INITIAL_FRAMES * self.codebook_size, generator).to(self.centroids)
        tries = 2 + int(math.log(self.codebook_size))
        self.centroids[0] = some[0]
        distances = _squared_distances(some, some[:1])[:, 0]
        for number in range(1, self.codebook_size):
            candidates = _weighted_draw(distances, tries, generator)
            left = torch.minimum(distances[:, None], _squared_distances(some, some[candidates]))
            best = left.sum(dim=0).argmin()
            self.centroids[number] = some[candidates[best]]
            distances = left[:, best]

    def _pass(
        self, frames: Float[Tensor, "n d"], weights: Float[Tensor, " k"], batch_size: int, generator: torch.Generator
    ) -> Float[Tensor, " k"]:
        """Once over the frames; `weights` counts what each centroid has seen. Returns how many frames fell to each."""
        used = torch.zeros_like(weights)
        for rows in torch.randperm(len(frames), generator=generator).split(batch_size):
            batch = frames[rows.to(frames.device)].to(self.centroids)
            members = F.one_hot(_nearest(batch, self.centroids)[0], self.codebook_size).to(batch)
            counts = members.sum(dim=0)
            weights += counts
            used += counts
            step = (members.T @ batch - counts[:, None] * self.centroids) / weights.clamp(min=1)[:, None]
            self.centroids += step
        return used

    def _revive(
        self,
        frames: Float[Tensor, "n d"],
        used: Float[Tensor, " k"],
        weights: Float[Tensor, " k"],
        generator: torch.Generator,
    ) -> None:
        """Moves centroids that nothing falls to onto frames that are far from theirs."""
        some = _drawn(frames, INITIAL_FRAMES * self.codebook_size, generator).to(self.centroids)
        places = _weighted_draw(_nearest(some, self.centroids)[1], min(len(some), self.codebook_size), generator)
        order = (used == 0).cumsum(dim=0) - 1  # the first unused one takes the first place, and so on
        moved = (used == 0) & (order < len(places))
        self.centroids.copy_(torch.where(moved[:, None], some[places[order.clamp(0, len(places) - 1)]], self.centroids))
        weights.masked_fill_(moved, 0)

    def _report(self, frames: Float[Tensor, "n d"]) -> KMeansReport:
        counts = torch.zeros(self.codebook_size, dtype=torch.float64)
        inertia = variance = 0.0
        mean = frames.mean(dim=0).to(self.centroids)
        for batch in frames.split(CHUNK):
            batch = batch.to(self.centroids)
            ids, distances = _nearest(batch, self.centroids)
            counts += ids.bincount(minlength=self.codebook_size).cpu()
            inertia += float(distances.double().sum())
            variance += float((batch - mean).square().sum(dtype=torch.float64))
        share = counts / len(frames)
        entropy = -float(torch.special.xlogy(share, share).sum())
        return KMeansReport(
            len(frames), inertia / len(frames), variance / len(frames), int((counts > 0).sum()), math.exp(entropy)
        )


def read_centroids(path: str | Path) -> tuple[Float[Tensor, "k d"], Tensor | None]:
    """The centroids in a folder that `helicon fit-kmeans` made, or in a safetensors file; and the fingerprint of the model
    whose features they are, where it was saved with them."""
    path = Path(path).expanduser()
    file = path / WEIGHTS_FILE if path.is_dir() else path
    if not file.is_file():
        raise ValueError(f"there are no clusters at {path}: make them with `helicon fit-kmeans`")
    if file.suffix != ".safetensors":
        raise ValueError(f"{path} may be a pickle, which is never read: make clusters with `helicon fit-kmeans`")
    state = load_state(file)
    tables = [value for value in state.values() if value.ndim == 2 and value.is_floating_point()]
    if len(tables) != 1:
        raise ValueError(
            f"{path} holds {len(tables)} tables of numbers, and not the one of centroids [clusters, features]"
        )
    return tables[0].float(), next((value for name, value in state.items() if name.endswith("fingerprint")), None)


def _squared_distances(frames: Float[Tensor, "m d"], centroids: Float[Tensor, "k d"]) -> Float[Tensor, "m k"]:
    products = frames @ centroids.T
    return (frames.square().sum(dim=1, keepdim=True) - 2 * products + centroids.square().sum(dim=1)).clamp(min=0)


def _nearest(
    frames: Float[Tensor, "m d"], centroids: Float[Tensor, "k d"]
) -> tuple[Int[Tensor, " m"], Float[Tensor, " m"]]:
    """The nearest centroid of each frame, and its squared distance."""
    # The frame's own length is the same for all centroids, and rounding of the sum would only blur the comparison.
    closeness, ids = (centroids.square().sum(dim=1) - 2 * frames @ centroids.T).min(dim=1)
    return ids, (closeness + frames.square().sum(dim=1)).clamp(min=0)


def _drawn(frames: Float[Tensor, "n d"], count: int, generator: torch.Generator) -> Float[Tensor, "m d"]:
    """At most `count` of the frames, in random order."""
    return frames[torch.randperm(len(frames), generator=generator)[:count].to(frames.device)]


def _weighted_draw(weights: Float[Tensor, " m"], count: int, generator: torch.Generator) -> Int[Tensor, " c"]:
    """`count` different places, each with a probability in proportion to its weight, as the first of a race."""
    times = torch.empty(len(weights)).exponential_(generator=generator).to(weights)
    return (weights / times).topk(count).indices
