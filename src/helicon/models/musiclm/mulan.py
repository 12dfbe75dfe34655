"""MuLaN (Huang et al. 2022, arXiv:2208.12415): sounds and texts in one space, where those that belong together lie close.

Letters: b batch, n samples, t tokens, d features of a latent, l layers.
"""

import hashlib
from collections.abc import Callable, Sequence
from typing import ClassVar, NamedTuple

import torch
from jaxtyping import Bool, Float, Int, Real, Shaped
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from helicon.models.musiclm.contrastive import ContrastiveLoss
from helicon.models.musiclm.pretrained import AudioTower, TextTower
from helicon.models.musiclm.towers import TextTransformer, one_of
from helicon.models.soundstream.codecs import check_floats
from helicon.nn.capture import evaluating
from helicon.nn.lengths import before
from helicon.nn.network import Network
from helicon.nn.norms import RMSNorm
from helicon.nn.resample import resample

Lengths = Int[Tensor, " b"]
LEAST_NEW = 0.05  # of a clip: what is left of a recording after its clips has one of its own if it is more than this
MIXERS = (0x1E3779B97F4A7C15, 0x3F58476D1CE4E5B9, 0x14D049BB133111EB, 0x2545F4914F6CDD1D)  # odd, with bits in no order


class Latents(NamedTuple):
    """What the loss compares, of sounds or of texts; all of unit length."""

    last: Tensor  # [b, d]
    layers: Tensor  # [l, b, d], of the chosen layers below; none where the loss is not hierarchical


class MuLaN(Network):
    """Two towers, a projection of each to unit vectors, and the loss between them.

    Usage: `MuLaN(AudioSpectrogramTransformer(...), TextTransformer(...))(waves, raw_texts=["a slow waltz", ...])` is the loss.
    """

    parts: ClassVar[tuple[str, ...]] = ("audio_transformer", "text_transformer")

    def __init__(
        self,
        audio_transformer: AudioTower,
        text_transformer: TextTower,
        dim_latent: int = 128,
        decoupled_contrastive_learning: bool = True,
        hierarchical_contrastive_loss: bool = False,
        hierarchical_contrastive_loss_layers: int | None = None,
        sigmoid_contrastive_loss: bool = False,
        clip_seconds: float | None = None,
    ):
        """
        Args:
            decoupled_contrastive_learning: see `softmax_loss`; of no account to the sigmoid loss.
            hierarchical_contrastive_loss: also compares what layers below the last make of sounds and texts, each with a loss of its
                own; their mean is added.
            hierarchical_contrastive_loss_layers: how many of them, evenly spread over each tower; as many as the shallower tower
                has below its last where nothing is said.
            sigmoid_contrastive_loss: `sigmoid_loss` instead of `softmax_loss`.
            clip_seconds: how much of a sound it has learned from at a time, as its trainer notes. A search listens to as much.
        """
        super().__init__()
        self.audio, self.text = audio_transformer, text_transformer
        self.dim_latent, self.sample_hz, self.clip_seconds = dim_latent, audio_transformer.sample_hz, clip_seconds
        self.audio_to_latents = nn.Linear(self.audio.dim, dim_latent, bias=False)
        self.text_to_latents = nn.Linear(self.text.dim, dim_latent, bias=False)
        self.loss = ContrastiveLoss(decoupled_contrastive_learning, sigmoid_contrastive_loss)
        self.hierarchical = hierarchical_contrastive_loss
        depths = (self.audio.depth, self.text.depth)
        count = _num_layers(hierarchical_contrastive_loss, hierarchical_contrastive_loss_layers, *depths)
        self.audio_layers, self.text_layers = (
            LayerLatents(tower.dim, dim_latent, _spread(count, tower.depth - 1)) for tower in (self.audio, self.text)
        )
        self.layer_losses = nn.ModuleList(
            ContrastiveLoss(decoupled_contrastive_learning, sigmoid_contrastive_loss) for _ in range(count)
        )

    @property
    def device(self) -> torch.device:
        return self.audio_to_latents.weight.device

    @property
    def longest_seconds(self) -> float | None:
        """How much of a sound it hears well at a time: as much as it has learned from, and as its tower takes; None: nobody knows."""
        most = getattr(self.audio, "max_samples", None)
        known = [self.clip_seconds, None if most is None else most / self.sample_hz]
        return min((seconds for seconds in known if seconds is not None), default=None)

    def learns_from(self, clip_seconds: float) -> None:
        """Notes how much of a sound it learns from at a time: what is saved knows it from now on."""
        self.clip_seconds = self.arguments["clip_seconds"] = clip_seconds

    def read_texts(self, texts: Sequence[str], multiple_of: int = 1) -> dict[str, Tensor]:
        """Texts as the tensors `forward` takes, for a compiled network, which must not see strings."""
        read = self.text.read_texts(texts, multiple_of)
        return {"texts": read["x"], "text_mask": read["mask"]}

    def embed_audio(
        self,
        wavs: Float[Tensor, "b ..."],
        lengths: Lengths | None = None,
        generator: torch.Generator | None = None,
    ) -> Latents:
        """What the loss compares of sounds; `wavs` and `lengths` as the audio tower takes them."""
        check_floats(wavs)
        out = self.audio(wavs, lengths=lengths, return_all_layers=self.hierarchical, generator=generator)
        return _latents(out, self.audio_to_latents, self.audio_layers)

    def embed_text(
        self,
        texts: Shaped[Tensor, "b t ..."] | None = None,
        raw_texts: Sequence[str] | None = None,
        text_mask: Bool[Tensor, "b t"] | None = None,
    ) -> Latents:
        """What the loss compares of texts, given as strings or as `read_texts` reads them."""
        out = self.text(texts, raw_texts, mask=text_mask, return_all_layers=self.hierarchical)
        return _latents(out, self.text_to_latents, self.text_layers)

    def contrast(
        self, audio: Latents, text: Latents, *, caption_ids: Int[Tensor, " n"] | None = None
    ) -> Float[Tensor, ""]:
        """The loss of pairs, row by row; latents may come from several passes, put together.

        `caption_ids` are equal where captions are, and pairs of equal captions are not told apart; without them all captions differ.
        """
        if caption_ids is not None and len(caption_ids) != len(audio.last):
            raise ValueError(f"{len(caption_ids)} caption_ids for {len(audio.last)} pairs: give one for each")
        loss = self.loss(audio.last, text.last, caption_ids)
        if not self.hierarchical:
            return loss
        pairs = zip(self.layer_losses, audio.layers, text.layers, strict=True)
        return loss + torch.stack([compare(*latents, caption_ids) for compare, *latents in pairs]).mean()

    def get_audio_latents(
        self, wavs: Real[Tensor, "b ..."], lengths: Lengths | None = None, input_sample_hz: int | None = None
    ) -> Float[Tensor, "b d"]:
        """Unit vectors of sounds, of which the first `lengths` samples count; at `sample_hz`, or resampled to it.

        Those of evaluation, in whatever mode the network is; `embed_audio` gives what a loss compares in training.
        """
        check_floats(wavs)
        if input_sample_hz is not None and input_sample_hz != self.sample_hz:
            if lengths is not None:
                wavs = torch.where(before(lengths, wavs.shape[1]), wavs, 0.0)
                lengths = -(-lengths.long() * self.sample_hz // input_sample_hz)  # as `resample` makes them
            wavs = resample(wavs, input_sample_hz, self.sample_hz)
        with evaluating(self):
            return self.embed_audio(wavs, lengths).last

    def get_text_latents(
        self,
        texts: Shaped[Tensor, "b t ..."] | Sequence[str] | None = None,
        raw_texts: Sequence[str] | None = None,
        text_mask: Bool[Tensor, "b t"] | None = None,
    ) -> Float[Tensor, "b d"]:
        """Unit vectors of texts, as those of sounds: in evaluation mode."""
        texts, text_mask = one_of(self.text, texts, raw_texts, text_mask)
        with evaluating(self):
            return self.embed_text(texts, text_mask=text_mask).last

    def forward(
        self,
        wavs: Float[Tensor, "b ..."],
        texts: Shaped[Tensor, "c t ..."] | Sequence[str] | None = None,
        raw_texts: Sequence[str] | None = None,
        return_latents: bool = False,
        return_similarities: bool = False,
        return_pairwise_similarities: bool = False,
        *,
        lengths: Lengths | None = None,
        text_mask: Bool[Tensor, "c t"] | None = None,
        caption_ids: Int[Tensor, " n"] | None = None,
        generator: torch.Generator | None = None,
        chunk_size: int | None = None,
        return_all_latents: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor] | tuple[Latents, Latents]:
        """The loss of sounds and their texts.

        Or, in its place, the latents of both `[b, d]` (or all that `contrast` takes); the similarities (cosines) of pairs `[b]`; or those
        of every sound with every text `[b, c]`.

        Pairs whose captions are equal are not told apart. Which are is told by `caption_ids`, equal numbers for equal captions; without
        them by the tokens that are read, or by the strings for a pretrained tower. The embeddings that this takes in their place do
        not tell: they all differ.

        With a `chunk_size` so many sounds, or texts, pass a tower at a time, and again in the backward pass, with the same randomness
        (GradCache, Gao et al. 2021): the loss is that of the whole batch, the memory that of a chunk, and every step passes the towers
        forward twice.
        """
        if return_latents + return_similarities + return_pairwise_similarities + return_all_latents > 1:
            raise ValueError(
                "return_latents, return_similarities, return_pairwise_similarities, return_all_latents: ask for one of them"
            )
        texts, text_mask = one_of(self.text, texts, raw_texts, text_mask)
        if chunk_size is None:
            audio = self.embed_audio(wavs, lengths, generator)
            text = self.embed_text(texts, text_mask=text_mask)
        elif generator is not None:
            raise ValueError("with chunk_size what is random comes from torch's own generator: leave generator out")
        else:
            audio = _in_chunks(self.embed_audio, chunk_size, wavs, lengths)
            text = _in_chunks(lambda texts, mask: self.embed_text(texts, text_mask=mask), chunk_size, texts, text_mask)
        if return_all_latents:
            return audio, text
        if return_latents:
            return audio.last, text.last
        if return_pairwise_similarities:
            return audio.last @ text.last.T
        if len(audio.last) != len(text.last):
            raise ValueError(
                f"{len(audio.last)} sounds cannot be paired with {len(text.last)} texts: give one for each"
            )
        if return_similarities:
            return (audio.last * text.last).sum(dim=-1)
        if caption_ids is None:
            caption_ids = self.caption_ids(texts, raw_texts, text_mask)
        return self.contrast(audio, text, caption_ids=caption_ids)

    def caption_ids(
        self, texts: Tensor, raw_texts: Sequence[str] | None = None, text_mask: Tensor | None = None
    ) -> Int[Tensor, " b"] | None:
        """Equal numbers for texts of equal tokens; for equal strings, where they were read as embeddings."""
        if isinstance(self.text, TextTransformer):
            return ids_of_tokens(texts, self.text.are_tokens(texts) if text_mask is None else text_mask)
        return None if raw_texts is None else ids_of_texts(raw_texts).to(self.device)


def begins_in(duration: float, seconds: float) -> list[float]:
    """Where the clips of a recording begin, end to end; the last ends with it, and so may begin within the one before."""
    count = max(1, int(duration // seconds))
    begins = [number * seconds for number in range(count)]
    if duration - count * seconds > LEAST_NEW * seconds:
        begins.append(duration - seconds)
    return begins


def ids_of_texts(texts: Sequence[str]) -> Int[Tensor, " b"]:
    """A number of 63 bits for each text: equal where texts are, in every process."""
    digests = (hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest() for text in texts)
    return torch.tensor([int.from_bytes(digest) >> 1 for digest in digests])


def ids_of_tokens(tokens: Int[Tensor, "b t"], mask: Bool[Tensor, "b t"] | None = None) -> Int[Tensor, " b"]:
    """The same of rows of tokens, however they are padded; worked out where they are, so that the host need not wait for them."""
    places = torch.arange(tokens.shape[1], device=tokens.device)
    mixed = (tokens.long() + 1) * MIXERS[0] + places * MIXERS[1]
    for mixer in MIXERS[2:]:
        mixed = (mixed ^ (mixed >> 31)) * mixer  # what is beyond 64 bits is dropped
    if mask is not None:
        mixed = mixed * mask
    return mixed.sum(dim=1) & (2**63 - 1)


class LayerLatents(nn.Module):
    """Unit vectors from some of a tower's layers, each by its own norm and projection."""

    def __init__(self, dim: int, dim_latent: int, indices: Sequence[int]):
        super().__init__()
        self.indices = list(indices)
        self.norms = nn.ModuleList(RMSNorm(dim) for _ in indices)
        self.projections = nn.ModuleList(nn.Linear(dim, dim_latent, bias=False) for _ in indices)

    def forward(self, layers: Float[Tensor, "n b c"]) -> Float[Tensor, "l b d"]:
        modules = zip(self.indices, self.norms, self.projections, strict=True)
        return torch.stack([_unit(project(norm(layers[index]))) for index, norm, project in modules])


def _latents(out: Tensor | tuple[Tensor, Tensor], project: nn.Module, project_layers: nn.Module) -> Latents:
    """Of what a tower made of sounds or texts, with its layers or without."""
    if isinstance(out, Tensor):
        last = _unit(project(out))
        return Latents(last, last.new_empty(0, *last.shape))
    return Latents(_unit(project(out[0])), project_layers(out[1]))


def _in_chunks(embed: Callable[..., Latents], size: int, *inputs: Tensor | None) -> Latents:
    """What `embed` makes of the inputs, so many rows at a time; where gradients are wanted it is asked again for each chunk in the
    backward pass, the last chunk first, and of one alone all that its gradient needs is kept."""
    check_chunk_size(size)
    assert inputs[0] is not None
    chunks = [
        checkpoint(embed, *(None if x is None else x[first : first + size] for x in inputs), use_reentrant=False)
        for first in range(0, len(inputs[0]), size)
    ]
    return Latents(*(torch.cat(parts, dim=-2) for parts in zip(*chunks, strict=True)))


def check_chunk_size(size: int | None) -> None:
    if size is not None and size < 1:
        raise ValueError(f"chunk_size={size} must be at least 1, or None for the whole batch at once")


def _unit(x: Float[Tensor, "b d"]) -> Float[Tensor, "b d"]:
    with torch.autocast(x.device.type, enabled=False):
        return F.normalize(x.float(), dim=-1)


def _num_layers(is_hierarchical: bool, asked: int | None, audio_depth: int, text_depth: int) -> int:
    if not is_hierarchical:
        if asked is not None:
            raise ValueError(
                f"hierarchical_contrastive_loss_layers={asked} belongs to hierarchical_contrastive_loss=True"
            )
        return 0
    most = min(audio_depth, text_depth) - 1
    count = most if asked is None else asked
    if not 1 <= count <= most:
        raise ValueError(
            f"hierarchical_contrastive_loss_layers={asked}: the towers have {audio_depth} and {text_depth} layers, so there are {most} below "
            f"the last of the shallower one; give 1 to {most}, or deeper towers"
            if most
            else f"a hierarchical loss compares layers below the last, and towers of {audio_depth} and {text_depth} layers have none: "
            f"make both 2 or more deep"
        )
    return count


def _spread(count: int, available: int) -> list[int]:
    """`count` of the numbers below `available`, evenly spread, the last among them."""
    return [(index + 1) * available // count - 1 for index in range(count)]
