"""The two towers of MuLaN (Huang et al. 2022, arXiv:2208.12415): a clip, or a text, to one vector.

    AudioSpectrogramTransformer  patches of a log-mel spectrum (AST, Gong et al. 2021, arXiv:2104.01778)
    TextTransformer              tokens, by default the bytes of the text

Those on top of frozen models of `transformers` are in pretrained.py. A tower has `dim`, and an audio tower its `sample_hz`. With
`return_all_layers` it also gives what each layer but the last makes of the clip or text, `[l, b, d]`.

Letters: b batch, n samples or tokens, t frames, f bands, r rows and c columns of patches, p numbers in a patch, k patches that are
kept, d features, e features of a frozen model, h heads, o offsets, l layers.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from einops import rearrange
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from helicon.models.musiclm.spectrogram import SILENCE, Augmentation, LogMel, patched, silent_after
from helicon.models.text.base import TruncationNotice, readable
from helicon.models.text.byte import BEGIN, END, VOCABULARY, bytes_of
from helicon.nn.attention import OffsetBias
from helicon.nn.devices import drawn_by, sent
from helicon.nn.lengths import before
from helicon.nn.network import Network
from helicon.nn.transformer import Layer, Transformer, run_layer

Lengths = Int[Tensor, " b"]
Pooled = Float[Tensor, "b d"]
PooledLayers = tuple[Float[Tensor, "b d"], Float[Tensor, "l b d"]]

WINDOW, HOP = 0.025, 0.010  # seconds, as in AST and MuLaN


class Tower(Network):
    """What all towers share: the transformer, and one vector from its tokens."""

    dim: int
    transformer: Transformer

    @property
    def depth(self) -> int:
        return self.transformer.depth

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    def _summary(
        self,
        x: Float[Tensor, "b n d"],
        mask: Bool[Tensor, "b n"] | None,
        pool: Callable[[Tensor], Tensor],
        return_all_layers: bool,
        **options: Any,
    ) -> Pooled | PooledLayers:
        """What `pool` makes of the tokens that leave the transformer, and of those that leave its layers where they are asked for."""
        if not return_all_layers:
            return pool(self.transformer(x, mask, **options))
        layers: list[Tensor] = []

        def run_and_pool(layer: Layer, *inputs: object) -> Tensor:
            tokens = run_layer(layer, *inputs)
            layers.append(pool(tokens))
            return tokens

        out = pool(self.transformer(x, mask, run_layer=run_and_pool, **options))
        return out, torch.stack(layers[:-1]) if layers[1:] else out.new_empty(0, *out.shape)


def mean_of(tokens: Float[Tensor, "b n d"], mask: Bool[Tensor, "b n"] | None) -> Float[Tensor, "b d"]:
    """The mean over the real tokens, in float32."""
    if mask is None:
        return tokens.float().mean(dim=1)
    weights = mask.float() / mask.sum(dim=1, keepdim=True).clamp(min=1)
    return (tokens.float() * weights[..., None]).sum(dim=1)


class AudioSpectrogramTransformer(Tower):
    """Waves `[b, n]`, or spectra, to `[b, dim]`: the mean over the patches.

    Patches do not overlap: ten seconds at 16 kHz are 8 x 63 of 16 bands x 16 frames. Positions are relative, but for a learned
    embedding of a patch's frequency: the same shape means something else an octave higher, but not a second later. Levels are not normalised
    patch by patch, which would make loud and soft alike.
    """

    def __init__(
        self,
        dim: int,
        depth: int,
        patch_size: int | Sequence[int] = 16,
        dim_head: int = 64,
        heads: int = 8,
        attn_dropout: float = 0.0,
        ff_mult: float = 4,
        ff_dropout: float = 0.0,
        accept_spec: bool = False,
        accept_spec_time_first: bool = True,
        spec_n_fft: int | None = None,
        spec_power: float = 2,
        spec_win_length: int | None = None,
        spec_hop_length: int | None = None,
        spec_pad: int = 0,
        spec_center: bool = True,
        spec_pad_mode: str = "constant",
        spec_aug_stretch_factor: float = 0.8,
        spec_aug_freq_mask: int | None = None,
        spec_aug_time_mask: int = 80,
        patch_dropout_prob: float = 0.25,
        *,
        spec_aug_noise: float = 0.0,
        sample_hz: int = 16000,
        n_mels: int = 128,
        f_min: float = 0.0,
        f_max: float | None = None,
        positions: Literal["rotary", "bias"] = "rotary",
        checkpoint_activations: bool = False,
    ):
        """
        Args:
            patch_size: of bands and frames, or a pair of both.
            accept_spec: spectra are given instead of waves: n_mels bands, taken as they are, so about 0 with a spread of about 1.
            accept_spec_time_first: they are `[b, t, f]`, not `[b, f, t]`.
            spec_win_length, spec_hop_length: in samples; 25 and 10 ms where nothing is said, and half of a window that is given.
            spec_n_fft: the power of two at twice the window or more, where nothing is said: fewer would leave low bands empty.
            spec_pad, spec_center, spec_pad_mode: have one value each: a frame stands in the middle of its hop, with silence beyond both
                ends of the clip. (A reflection there would make what a clip means depend on how it was padded.)
            spec_aug_stretch_factor, spec_aug_freq_mask, spec_aug_time_mask: see `Augmentation`; 1, 0 and 0 for none. A quarter of the
                bands where nothing is said.
            patch_dropout_prob: the part of each clip's patches that is left out in training.
            spec_aug_noise: see `Augmentation`. With it, what a codec makes of a sound is heard more like the sound.
            sample_hz: of the waves.
            n_mels, f_min, f_max: bands, and where they begin and end in Hz; at half of sample_hz where nothing is said.
            positions: "rotary", on both axes; or "bias", a learned function of how many bands and frames lie between two patches, added
                to the logits. It costs more: where it cannot be looked up (on a CPU, or with attn_dropout), memory for every two patches.
            checkpoint_activations: recomputes each layer in the backward pass: less memory, a third more time.
        """
        super().__init__()
        _check_framing(spec_pad, spec_center, spec_pad_mode)
        self.dim, self.sample_hz = dim, sample_hz
        self.accept_spec, self.time_first = accept_spec, accept_spec_time_first
        self.patch_height, self.patch_width = _pair(patch_size)
        if n_mels % self.patch_height:
            raise ValueError(f"n_mels={n_mels} must be a multiple of the patches' {self.patch_height} bands")
        if not 0 <= patch_dropout_prob < 1:
            raise ValueError(f"patch_dropout_prob={patch_dropout_prob} must be at least 0 and less than 1")
        self.patch_dropout_prob = patch_dropout_prob
        self.n_mels, self.rows = n_mels, n_mels // self.patch_height
        window = round(WINDOW * sample_hz) if spec_win_length is None else spec_win_length
        self.log_mel = LogMel(
            sample_hz,
            n_mels,
            2 ** math.ceil(math.log2(2 * window)) if spec_n_fft is None else spec_n_fft,
            window,
            _hop(spec_hop_length, spec_win_length, sample_hz),
            float(f_min),
            sample_hz / 2 if f_max is None else float(f_max),
            float(spec_power),
        )
        freq_mask = n_mels // 4 if spec_aug_freq_mask is None else spec_aug_freq_mask
        if accept_spec and spec_aug_noise:
            raise ValueError(
                f"spec_aug_noise={spec_aug_noise} is added to waves, and this network takes spectra (accept_spec=True): leave it out"
            )
        self.augmentation = Augmentation(spec_aug_stretch_factor, freq_mask, spec_aug_time_mask, n_mels, spec_aug_noise)
        self.to_token = nn.Linear(self.patch_height * self.patch_width, dim)
        self.frequency = nn.Embedding(self.rows, dim)
        nn.init.normal_(self.frequency.weight, std=0.5)  # about as large as what the patches say
        if positions not in ("rotary", "bias"):
            raise ValueError(f'positions={positions!r} is neither "rotary" nor "bias"')
        if positions == "rotary" and dim_head % 4:
            raise ValueError(f"dim_head={dim_head} must be a multiple of 4, for rotary positions on two axes")
        self.offset_bias = OffsetNetwork(heads) if positions == "bias" else None
        self.transformer = Transformer(
            dim,
            depth,
            heads=heads,
            dim_head=dim_head,
            positions="rotary" if positions == "rotary" else "none",
            ff_mult=ff_mult,
            dropout=ff_dropout,
            attn_dropout=attn_dropout,
            checkpoint_activations=checkpoint_activations,
        )

    def num_patches(self, length: int) -> int:
        """How many patches a clip of so many samples has (of so many frames, where spectra are given)."""
        frames = length if self.accept_spec else self.log_mel.num_frames(length)
        return self.rows * -(-frames // self.patch_width)

    def forward(
        self,
        x: Float[Tensor, "b n"] | Float[Tensor, "b t f"],
        force_no_patch_dropout: bool = False,
        return_all_layers: bool = False,
        *,
        lengths: Lengths | None = None,
        generator: torch.Generator | None = None,
    ) -> Pooled | PooledLayers:
        """Of each clip the first `lengths` samples (frames of a spectrum) count, and what comes after changes nothing; a clip of none
        is a patch of silence. What is random in training comes from the generator, or from torch's own."""
        levels, frames = self._levels(x, lengths, generator)
        if self.training:
            levels = self.augmentation(levels, frames, generator)
        patches = patched(levels, self.patch_height, self.patch_width)
        columns = patches.shape[2]
        is_real = None
        if frames is not None:
            is_real = before(-(-frames // self.patch_width), columns).repeat(1, self.rows)
        patches = rearrange(patches, "b r c p -> b (r c) p")
        places = torch.arange(patches.shape[1], device=patches.device)[None]
        if self.training and self.patch_dropout_prob and not force_no_patch_dropout:
            places, is_real = self._kept(len(patches), places, is_real, generator)
            patches = patches.gather(1, places[..., None].expand(-1, -1, patches.shape[-1]))
        grid = torch.stack((places // columns, places % columns), dim=-1)
        tokens = self.to_token(patches) + self.frequency(grid[..., 0])
        if self.offset_bias is None:
            where: dict[str, Any] = {"positions": grid}
        else:
            where = {"bias": self.offset_bias(grid, self.rows, columns)}
        return self._summary(tokens, is_real, lambda tokens: mean_of(tokens, is_real), return_all_layers, **where)

    def _levels(
        self, x: Tensor, lengths: Tensor | None, generator: torch.Generator | None
    ) -> tuple[Float[Tensor, "b t f"], Lengths | None]:
        if x.ndim != (3 if self.accept_spec else 2):
            raise ValueError(
                f"x has {x.ndim} dimensions: this network takes {'spectra' if self.accept_spec else 'waves [b, n]'}, "
                f"as it was built with accept_spec={self.accept_spec}"
            )
        if self.accept_spec:
            levels = self._checked_spectra(x)
            levels = levels if lengths is None else silent_after(levels, lengths)
        else:
            waves = self.augmentation.noisy(x, lengths, generator) if self.training else x
            levels = self.log_mel(waves, lengths)
            lengths = None if lengths is None else self.log_mel.num_frames(lengths)
        if levels.shape[1] == 0:
            levels = levels.new_full((len(levels), 1, self.n_mels), SILENCE)
        return levels, None if lengths is None else lengths.clamp(min=1)

    def _checked_spectra(self, x: Tensor) -> Float[Tensor, "b t f"]:
        levels = x if self.time_first else rearrange(x, "b f t -> b t f")
        if levels.shape[-1] != self.n_mels:
            raise ValueError(
                f"these spectra have {levels.shape[-1]} bands and this network takes n_mels={self.n_mels}: they are "
                f"{'[b, t, f]' if self.time_first else '[b, f, t]'}, as accept_spec_time_first={self.time_first} says"
            )
        return levels

    def _kept(
        self,
        batch: int,
        places: Int[Tensor, "1 n"],
        is_real: Bool[Tensor, "b n"] | None,
        generator: torch.Generator | None,
    ) -> tuple[Int[Tensor, "b k"], Bool[Tensor, "b k"] | None]:
        """Which patches stay, as many in every row; and which of those are real: the same part of every clip, and one at least."""
        total = places.shape[1]
        count = math.ceil(total * (1 - self.patch_dropout_prob))
        order = torch.rand(batch, total, device=places.device, **drawn_by(generator))
        if is_real is None:
            return order.argsort(dim=1)[:, :count], None
        kept = order.masked_fill(~is_real, 2.0).argsort(dim=1)[:, :count]
        own = (is_real.sum(dim=1) * (1 - self.patch_dropout_prob)).ceil()
        return kept, before(own.long(), count)


class OffsetNetwork(nn.Module):
    """The bias of each head as a function of the offset between two patches, worked out once for every offset there is.

    Offsets are on a logarithmic scale (Swin v2, Liu et al. 2021), so it holds for longer clips than it was trained on.
    """

    def __init__(self, heads: int, hidden: int = 64):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(2, hidden), nn.SiLU(), nn.Linear(hidden, heads))

    def forward(self, grid: Int[Tensor, "b n 2"], rows: int, columns: int) -> OffsetBias:
        steps = [torch.arange(1 - size, size, device=grid.device, dtype=torch.float32) for size in (rows, columns)]
        offsets = torch.cartesian_prod(*steps)
        table = self.layers(offsets.sign() * offsets.abs().log1p())
        return OffsetBias(rearrange(table, "o h -> h o"), grid[..., 0] * (2 * columns - 1) + grid[..., 1])


class TextTransformer(Tower):
    """Token ids `[b, n]`, or texts, to `[b, dim]`: what a learned token in front of them gathers.

    Texts are read as in `ByteTextEncoder`: begin, their bytes, end. A network with a `num_tokens` of its own takes ids alone.
    """

    def __init__(
        self,
        dim: int,
        depth: int,
        num_tokens: int = VOCABULARY,
        max_seq_len: int = 256,
        dim_head: int = 64,
        heads: int = 8,
        attn_dropout: float = 0.0,
        ff_dropout: float = 0.0,
        ff_mult: float = 4,
        pad_id: int = 0,
        *,
        checkpoint_activations: bool = False,
    ):
        """
        Args:
            max_seq_len: tokens of the longest text; longer ones are cut, longer rows of ids refused.
            pad_id: the id of padding. (Of bytes it is the one that texts do not have.)
        """
        super().__init__()
        if not 0 <= pad_id < num_tokens:
            raise ValueError(f"pad_id={pad_id} must be one of the num_tokens={num_tokens} ids")
        if max_seq_len < 2:
            raise ValueError(f"max_seq_len={max_seq_len} must be at least 2")
        self.dim, self.num_tokens, self.max_seq_len, self.pad_id = dim, num_tokens, max_seq_len, pad_id
        self.embed = nn.Embedding(num_tokens, dim)
        self.summary_token = nn.Parameter(torch.randn(dim))
        self.transformer = Transformer(
            dim,
            depth,
            heads=heads,
            dim_head=dim_head,
            ff_mult=ff_mult,
            dropout=ff_dropout,
            attn_dropout=attn_dropout,
            checkpoint_activations=checkpoint_activations,
        )
        self.truncation = TruncationNotice(max_seq_len, "byte tokens")

    def read_texts(self, texts: Sequence[str], multiple_of: int = 1) -> dict[str, Tensor]:
        """Texts as the tensors `forward` takes, padded to the longest, and that to a multiple (so that shapes are few)."""
        if self.num_tokens != VOCABULARY:
            raise ValueError(
                f"texts are read as bytes, of which there are {VOCABULARY} ids, and this network has num_tokens={self.num_tokens}: "
                f"give ids"
            )
        rows = [
            torch.tensor([BEGIN, *bytes_of(text.replace("\0", ""), self.truncation), END]) for text in readable(texts)
        ]
        if not rows:
            raise ValueError("there are no texts to read: give one or more")
        ids = pad_sequence(rows, batch_first=True, padding_value=self.pad_id)
        ids = F.pad(ids, (0, min(-ids.shape[1] % multiple_of, self.max_seq_len - ids.shape[1])), value=self.pad_id)
        mask = before(torch.tensor([len(row) for row in rows]), ids.shape[1])
        return {"x": sent(ids, self.device), "mask": sent(mask, self.device)}

    def are_tokens(self, ids: Int[Tensor, "b n"]) -> Bool[Tensor, "b n"]:
        """Which ids are those of tokens: not `pad_id`, and not the -1 that stands past the end of a row in a batch."""
        return (ids >= 0) & (ids != self.pad_id)

    def check_ids(self, ids: Int[Tensor, "b n"]) -> None:
        """Raises where there are ids that this network does not know; for ids on the host, as a device would have to be waited for."""
        if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < self.num_tokens:
            raise ValueError(
                f"token ids from {int(ids.min())} to {int(ids.max())}, and this TextTransformer knows 0 to {self.num_tokens - 1}: "
                f"build it with num_tokens={max(self.num_tokens, int(ids.max()) + 1)}"
            )

    def forward(
        self,
        x: Int[Tensor, "b n"] | None = None,
        raw_texts: Sequence[str] | None = None,
        mask: Bool[Tensor, "b n"] | None = None,
        return_all_layers: bool = False,
    ) -> Pooled | PooledLayers:
        """`mask` is True for real tokens: those that are not `pad_id`, where nothing is said."""
        x, mask = one_of(self, x, raw_texts, mask)
        if x.shape[1] > self.max_seq_len:
            raise ValueError(f"{x.shape[1]} tokens are more than max_seq_len={self.max_seq_len}: give shorter texts")
        if x.device.type == "cpu" and not torch.compiler.is_compiling():
            self.check_ids(x)
        mask = self.are_tokens(x) if mask is None else mask
        front = self.summary_token.expand(len(x), 1, -1)
        tokens = torch.cat((front, self.embed(x)), dim=1)
        mask = F.pad(mask, (1, 0), value=True)
        return self._summary(tokens, mask, lambda tokens: tokens[:, 0].float(), return_all_layers)


def one_of(
    tower: Any, x: Tensor | Sequence[str] | None, raw_texts: Sequence[str] | None, mask: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """What was read before, or what is read now."""
    if not (x is None or isinstance(x, Tensor)):
        raise ValueError(f"texts are a {type(x).__name__}, and not what was read of them: give strings as raw_texts=")
    if (x is None) == (raw_texts is None):
        raise ValueError("give the texts as tensors (x) or as a list of strings (raw_texts): one of the two")
    if raw_texts is None:
        assert x is not None
        reads_ids = isinstance(tower, TextTransformer)
        if x.is_floating_point() == reads_ids:
            kinds = ("ids of tokens", "embeddings") if reads_ids else ("embeddings", "ids of tokens")
            raise ValueError(f"a {type(tower).__name__} takes {kinds[0]}, not {kinds[1]}: give strings as raw_texts=")
        return x, mask
    if mask is not None:
        raise ValueError("a mask belongs to texts given as tensors (x): raw_texts have their own")
    read = tower.read_texts(raw_texts)
    return read["x"], read["mask"]


def _hop(asked: int | None, window: int | None, sample_hz: int) -> int:
    if asked is not None:
        return asked
    return round(HOP * sample_hz) if window is None else max(1, window // 2)


def _pair(patch_size: int | Sequence[int]) -> tuple[int, int]:
    height, width = (patch_size, patch_size) if isinstance(patch_size, int) else patch_size
    if height < 1 or width < 1:
        raise ValueError(f"patch_size={patch_size} must be positive: of bands and frames, or a pair of both")
    return height, width


def _check_framing(pad: int, center: bool, pad_mode: str) -> None:
    if pad or not center or pad_mode != "constant":
        raise ValueError(
            f"spec_pad={pad}, spec_center={center}, spec_pad_mode={pad_mode!r}: frames stand in the middle of their hops, with silence "
            f'beyond the ends of a clip; leave these out (they are 0, True and "constant")'
        )
