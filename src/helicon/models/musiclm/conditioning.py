"""What AudioLM is conditioned on in MusicLM (Agostinelli et al. 2023, arXiv:2301.11325): codes of MuLaN's latents.

A latent is told in a few codes, each of what those before it leave (residual k-means). While the stages learn, the codes are
those of the sound; when they generate, those of a text, which lies close to it. So they learn from sounds alone.

The codebooks are fitted once and never move again: a code that meant another thing in each stage, or changed its meaning while they
are trained, would mean nothing. Its embeddings are learned in each stage, and saved with it.

Letters: b batch, n samples, d features of a latent, q quantizers, k codes of each, e features of an embedding.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from helicon.models.musiclm.mulan import MuLaN, begins_in
from helicon.models.semantic.kmeans import KMeans, KMeansReport, Progress
from helicon.nn.network import Network

Lengths = Int[Tensor, " b"]
Dims = int | Sequence[int]

SOUNDS_A_CODE = 8  # or more of them should be there: with hardly more sounds than codes, each has one to itself
KEPT = 10  # one sound of so many is kept from the fit
TOO_FEW = "each code needs one or more"
NOTHING = 1e-10  # the square of what is left of unit vectors, where it is but rounding


class TooFewSounds(ValueError):
    """To put so many codes among them."""


@dataclass(frozen=True)
class CodesReport(KMeansReport):
    """How the first codebook is used by the sounds it was fitted to, and what all codebooks leave (`inertia`) of those kept from it."""

    num_kept: int = 0  # 0 where there were too few: what is left is then told of those that were fitted


class MuLaNEmbedQuantizer(Network):
    """Sounds and texts to `rq_num_quantizers` codes each. Fit it before use.

    Made by `helicon fit-kmeans --model RUN`, read by `helicon.load`.
    """

    mulan: MuLaN
    codebooks: Tensor  # [q, k, d], NaN until they are fitted

    def __init__(
        self,
        mulan: MuLaN,
        conditioning_dims: Dims,
        rq_num_quantizers: int = 8,
        rq_ema_decay: float = 0.9,
        codebook_size: int = 1024,
        namespaces: Sequence[str] = ("semantic", "coarse", "fine"),
    ):
        """
        Args:
            mulan: a trained one, which stays as it is.
            conditioning_dims: features of the embeddings that `forward` gives, in every namespace or in each.
            rq_ema_decay: without effect: codebooks are fitted once (`fit`), and do not follow what they meet later.
            namespaces: who asks: each has embeddings of its own. A stage of that name begins to learn with them where its transformer
                has as many features; one of another size (as with what `helicon fit-kmeans` makes) begins with its own.
        """
        super().__init__()
        if rq_num_quantizers < 1:
            raise ValueError(f"rq_num_quantizers={rq_num_quantizers}: it must be at least 1")
        if codebook_size < 2:
            raise ValueError(f"codebook_size={codebook_size}: it must be at least 2")
        if getattr(mulan.audio, "accept_spec", False):
            raise ValueError(
                "this MuLaN takes spectra (accept_spec=True), and cannot hear sounds: give one that takes waves"
            )
        self.__dict__["mulan"] = mulan  # not a submodule: its weights and its mode are not this network's to change
        self.namespaces, self.default_namespace = tuple(namespaces), namespaces[0] if len(namespaces) == 1 else None
        self.num_quantizers, self.codebook_size = rq_num_quantizers, codebook_size
        self.sample_hz = mulan.sample_hz
        self.register_buffer("codebooks", torch.full((rq_num_quantizers, codebook_size, mulan.dim_latent), torch.nan))
        dims = _dims(conditioning_dims, self.namespaces)
        self.embeddings = nn.ParameterDict(
            {name: torch.randn(rq_num_quantizers, codebook_size, dim) for name, dim in dims.items()}
        )
        self._has_fit = False

    def _apply(self, fn: Callable[..., Tensor], recurse: bool = True) -> "MuLaNEmbedQuantizer":
        """To another device, with MuLaN, but always in single precision: half of it would give other codes."""
        device = fn(self.codebooks).device
        super()._apply(lambda tensor: tensor.to(device), recurse)
        self.mulan.to(device)
        return self

    @property
    def device(self) -> torch.device:
        return self.codebooks.device

    @property
    def is_fitted(self) -> bool:
        self._has_fit = self._has_fit or not bool(self.codebooks.isnan().any())
        return self._has_fit

    @torch.no_grad()
    def fit(
        self,
        waves: Iterable[tuple[Tensor, Tensor | None]],
        *,
        seed: int = 0,
        max_sounds: int | None = None,
        reading: Progress | None = None,
        clustering: Progress | None = None,
    ) -> CodesReport:
        """Puts the codebooks among the latents of sounds: batches `[b, n]` at `sample_hz`, and their lengths.

        Of more than `max_sounds` the first are taken. A tenth of them is kept from the fit, to see what is left of sounds that it
        does not know; where too few would remain, none.
        """
        if self.is_fitted:
            raise ValueError(
                "this quantizer is fitted, and stages may have learned what its codes mean: build a new one to fit"
            )
        if max_sounds is not None and max_sounds < self.codebook_size:  # before they are read
            raise self._too_few(max_sounds, TOO_FEW)
        latents = self._read(waves, max_sounds, reading)
        if num_bad := int((~latents.isfinite()).any(dim=1).sum()):
            raise ValueError(
                f"what MuLaN makes of {num_bad} of the {len(latents)} sounds is not finite: leave out sounds of enormous numbers, or "
                "train MuLaN anew where it is so of all"
            )
        fitted, kept = _apart(latents, self.codebook_size)
        if len(fitted) < self.codebook_size:
            raise self._too_few(len(latents), TOO_FEW)
        codebooks, reports, left = [], [], fitted
        for level in range(self.num_quantizers):
            if _size(left if level else left - left.mean(dim=0)) < NOTHING:
                what = f"after {level} nothing is left to tell" if level else "they are heard as one"
                raise self._too_few(len(latents), what)
            kmeans = KMeans(latents.shape[1], self.codebook_size).to(self.device)
            reports.append(kmeans.fit(left, seed=seed + level))
            left = left - kmeans.centroids[kmeans(left)]
            codebooks.append(kmeans.centroids)
            if clustering is not None:
                clustering(level + 1, self.num_quantizers)
        self.codebooks.copy_(torch.stack(codebooks))
        judged = kept if len(kept) else fitted
        told = torch.stack([book[ids] for book, ids in zip(self.codebooks, self._nearest(judged).T, strict=True)])
        sizes = {"inertia": _size(judged - told.sum(dim=0)), "variance": _size(judged - fitted.mean(dim=0))}
        return CodesReport(**{**vars(reports[0]), **sizes, "num_kept": len(kept)})

    def codes(
        self,
        wavs: Float[Tensor, "b ..."] | None = None,
        texts: Sequence[str] | None = None,
        lengths: Lengths | None = None,
        input_sample_hz: int | None = None,
    ) -> Int[Tensor, "b q"]:
        """Of sounds `[b, n]` (or `[b, c, n]`) at `input_sample_hz` (by default `sample_hz`), of which the first `lengths` samples
        count; or of texts. The coarsest first."""
        if not self.is_fitted:
            raise ValueError(
                "the codebooks are not fitted yet: make the quantizer with `helicon fit-kmeans --model RUN`, or call fit"
            )
        return self._nearest(self.latents(wavs, texts, lengths, input_sample_hz))

    def forward(
        self,
        wavs: Float[Tensor, "b ..."] | None = None,
        texts: Sequence[str] | None = None,
        namespace: str | None = None,
        lengths: Lengths | None = None,
        input_sample_hz: int | None = None,
    ) -> Float[Tensor, "b q e"]:
        """The embeddings of the codes in a namespace, as they were before a stage learned its own."""
        table = self.embeddings[self._known(namespace)]
        ids = self.codes(wavs, texts, lengths, input_sample_hz)
        return table[torch.arange(self.num_quantizers, device=ids.device), ids]

    def initial_embeddings(self, namespace: str) -> Float[Tensor, "n e"] | None:
        """Of all codes, one quantizer after the other; None where there is no such namespace."""
        return self.embeddings[namespace].flatten(0, 1) if namespace in self.namespaces else None

    def set_default_namespace(self, namespace: str) -> None:
        """Where `forward` is asked for none."""
        self.default_namespace = self._known(namespace)

    @torch.no_grad()
    def latents(
        self,
        wavs: Float[Tensor, "b ..."] | None = None,
        texts: Sequence[str] | None = None,
        lengths: Lengths | None = None,
        input_sample_hz: int | None = None,
    ) -> Float[Tensor, "b d"]:
        """What the codes are of: MuLaN's unit vectors.

        A sound that is longer than what MuLaN has learned from is heard in clips as long as that, as in a search, and its vector is
        that of their mean, as in the paper: heard as a whole, it would be confused with others.
        """
        if (wavs is None) == (texts is None):
            raise ValueError("give wavs or texts, and not both")
        with torch.autocast(self.device.type, enabled=False):  # in MuLaN's own precision
            if wavs is None:
                assert texts is not None
                return self.mulan.get_text_latents(raw_texts=texts)
            mono = wavs.mean(dim=1) if wavs.ndim == 3 else wavs
            lengths = None if lengths is None else lengths.to(self.device)
            return self._heard(mono.to(self.device), lengths, input_sample_hz or self.sample_hz)

    def _heard(self, waves: Float[Tensor, "b n"], lengths: Lengths | None, hz: int) -> Float[Tensor, "b d"]:
        seconds = self.mulan.longest_seconds
        if seconds is None or waves.shape[1] <= round(seconds * hz):
            return self.mulan.get_audio_latents(waves, lengths, hz)
        sizes = [waves.shape[1]] * len(waves) if lengths is None else lengths.tolist()
        pieces = [_clips(wave[:size], hz, seconds) for wave, size in zip(waves, sizes, strict=True)]
        clips = [clip for found in pieces for clip in found]
        own = torch.tensor([len(clip) for clip in clips], device=self.device)
        latents = self.mulan.get_audio_latents(pad_sequence(clips, batch_first=True), own, hz)
        means = [part.mean(dim=0) for part in latents.split([len(found) for found in pieces])]
        return F.normalize(torch.stack(means), dim=-1)

    def _read(
        self, waves: Iterable[tuple[Tensor, Tensor | None]], most: int | None, reading: Progress | None
    ) -> Float[Tensor, "b d"]:
        found, count = [torch.empty(0, self.mulan.dim_latent, device=self.device)], 0
        for wave, lengths in waves:
            found.append(self.latents(wave, lengths=lengths))
            count += len(wave)
            if most is not None:
                if reading is not None:
                    reading(min(count, most), most)
                if count >= most:
                    break
        return torch.cat(found)[:most]

    def _too_few(self, sounds: int, why: str) -> TooFewSounds:
        return TooFewSounds(
            f"{sounds} sounds are too few for {self.num_quantizers} quantizers of {self.codebook_size} codes ({why}): "
            "give more of them, or fewer codes (clusters) or quantizers"
        )

    def _nearest(self, latents: Float[Tensor, "b d"]) -> Int[Tensor, "b q"]:
        left, found = latents.float(), []
        with torch.autocast(left.device.type, enabled=False):
            for codebook in self.codebooks:
                ids = (codebook.square().sum(dim=1) - 2 * left @ codebook.T).argmin(dim=1)
                left = left - codebook[ids]
                found.append(ids)
        return torch.stack(found, dim=1)

    def _known(self, namespace: str | None) -> str:
        name = self.default_namespace if namespace is None else namespace
        if name is None:
            raise ValueError(
                f"each namespace has embeddings of its own: say which, namespace= one of {', '.join(self.namespaces)}"
            )
        if name not in self.namespaces:
            raise ValueError(f"there is no namespace {name!r}: give one of {', '.join(self.namespaces)}")
        return name


def _clips(wave: Float[Tensor, " n"], hz: int, seconds: float) -> list[Tensor]:
    """Of so many seconds each, as a search cuts them."""
    size = max(1, round(seconds * hz))
    return [wave[round(begin * hz) :][:size] for begin in begins_in(len(wave) / hz, seconds)]


def codes_for(sounds: int) -> int:
    """How many codes a quantizer may have that is fitted to so many sounds."""
    return max(2, (sounds - sounds // KEPT) // SOUNDS_A_CODE)


def _apart(latents: Float[Tensor, "b d"], codes: int) -> tuple[Float[Tensor, "n d"], Float[Tensor, "m d"]]:
    """Those that are fitted, and those that are kept from it; none, where too few would be left."""
    is_kept = torch.arange(len(latents), device=latents.device) % KEPT == KEPT - 1
    if int((~is_kept).sum()) < SOUNDS_A_CODE * codes:
        is_kept = torch.zeros_like(is_kept)
    return latents[~is_kept], latents[is_kept]


def _size(vectors: Float[Tensor, "b d"]) -> float:
    """The mean of their squares."""
    return float(vectors.square().sum(dim=1).mean())


def _dims(given: Dims, namespaces: Sequence[str]) -> dict[str, int]:
    """Of each namespace."""
    if not namespaces or len({*namespaces}) < len(namespaces):
        raise ValueError(f"namespaces={tuple(namespaces)}: give one or more different names")
    dims = [given] * len(namespaces) if isinstance(given, int) else [*given]
    if len(dims) != len(namespaces):
        raise ValueError(
            f"conditioning_dims={tuple(dims)} are {len(dims)} and the namespaces {', '.join(namespaces)} are {len(namespaces)}: "
            "give one number for all, or one for each"
        )
    return dict(zip(namespaces, dims, strict=True))
