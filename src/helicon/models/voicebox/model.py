"""VoiceBox: the velocity of a flow from noise to speech (Le et al. 2023, arXiv:2306.15687).

A transformer over frames of features. Each frame is seen as it is now, on its way from noise, beside what is known of the
sound: the clean frames of the context (zeros where they are hidden) and what is said there. What is said are tokens,
characters or phonemes or semantic units, that are brought to the frames in one of two ways (`alignment`):

    free    the tokens stand in the first places and filler in the others, and the network finds out by itself when each is
            said (E2 TTS, Eskimez et al. 2024; F5-TTS, Chen et al. 2024): no aligner is needed
    frames  the tokens of a row are stretched over its frames, each as long as the others; tokens that come at a rate, or
            phonemes repeated for their durations, then stand where they are said

Both are then refined by convolutions, at the frames: so a text with durations is read as one without. The time of the flow scales,
shifts and gates every block of the transformer, through one projection that all layers share.

Letters: b batch, n frames, m tokens, d features of a frame, c features of a token, e features of the network.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from helicon.nn.convnext import ConvNeXtBlock
from helicon.nn.devices import drawn_by
from helicon.nn.network import Network
from helicon.nn.sampling import guide
from helicon.nn.transformer import Transformer

Alignment = Literal["free", "frames"]

ALIGNMENTS = ("free", "frames")
TIME_SCALE = 1000.0  # times from 0 to 1 are told apart by waves made for places from 0 to this
TEXT_MULT = 2  # of the convolutions' inner features

Times = Float[Tensor, " b"] | Float[Tensor, ""]


def waves(places: Float[Tensor, "*b"], dim: int) -> Float[Tensor, "*b d"]:
    """Cosines and sines of falling frequency, always in single precision (half has no odd numbers beyond 2,048)."""
    half = -(-dim // 2)
    frequencies = 10_000 ** (-torch.arange(half, device=places.device, dtype=torch.float32) / half)
    angles = places.float()[..., None] * frequencies
    return torch.cat((angles.cos(), angles.sin()), dim=-1)[..., :dim]


def stretched(num_tokens: Int[Tensor, " b"], num_frames: Int[Tensor, " b"], n: int) -> Int[Tensor, "b n"]:
    """Which token each of n frames has, where a row's tokens last equally long and end with its frames.

    A frame has the token that its middle falls into. In whole numbers, so that it is right for any pair of rates.
    """
    middle = 2 * torch.arange(n, device=num_tokens.device) + 1
    token = middle * num_tokens[:, None] // (2 * num_frames[:, None]).clamp(min=1)
    return torch.minimum(token, (num_tokens[:, None] - 1).clamp(min=0))


def repeated(ids: Int[Tensor, "b m"], durations: Int[Tensor, "b m"], n: int) -> Int[Tensor, "b n"]:
    """Each id for as many of n frames as it lasts, then -1. Padding (-1) lasts for none."""
    ends = torch.where(ids < 0, 0, durations).cumsum(dim=1)
    place = torch.arange(n, device=ids.device).expand(len(ids), -1).contiguous()
    token = torch.searchsorted(ends, place, right=True)
    frames = ids.gather(1, token.clamp(max=ids.shape[1] - 1))
    return frames.masked_fill(token >= ids.shape[1], -1)


def span_mask(
    num_frames: Int[Tensor, " b"], n: int, fractions: tuple[float, float], generator: torch.Generator | None = None
) -> Bool[Tensor, "b n"]:
    """One run of frames in each row, whose share of the row's frames is uniform between the fractions."""
    low, high = fractions
    share, start = torch.rand(2, len(num_frames), device=num_frames.device, **drawn_by(generator))
    length = ((low + (high - low) * share) * num_frames).round().clamp(min=1)
    first = (start * (num_frames - length + 1)).floor()
    place = torch.arange(n, device=num_frames.device)
    return (place >= first[:, None]) & (place < (first + length)[:, None])


def hidden_mask(
    is_real: Bool[Tensor, "b n"],
    p_drop_prob: float,
    fractions: tuple[float, float],
    generator: torch.Generator | None = None,
) -> Bool[Tensor, "b n"]:
    """What of each row is hidden while it is learned from: all of it in `p_drop_prob` of the rows, and one run in the others."""
    spans = span_mask(is_real.sum(dim=1), is_real.shape[1], fractions, generator)
    dropped = torch.rand(len(is_real), 1, device=is_real.device, **drawn_by(generator)) < p_drop_prob
    return (spans | dropped) & is_real


def masked_error(
    velocity: Float[Tensor, "b n d"], target: Float[Tensor, "b n d"], counted: Bool[Tensor, "b n"]
) -> Float[Tensor, ""]:
    """The mean of the squared error over the features of the frames that count, in single precision."""
    # Before the square: what stands in the padding may be no number at all, and has no gradient.
    error = (velocity.float() - target.float()).masked_fill(~counted[..., None], 0.0)
    return error.square().mean(dim=-1).sum() / counted.sum().clamp(min=1)


class SpokenTokens(nn.Module):
    """What is said at each frame. One token more than there are stands for nothing: filler, or a text that is not there."""

    def __init__(self, num_tokens: int, dim: int, depth: int, alignment: Alignment):
        super().__init__()
        self.alignment, self.nothing = alignment, num_tokens
        self.embedding = nn.Embedding(num_tokens + 1, dim)
        self.refine = nn.ModuleList(ConvNeXtBlock(dim, mult=TEXT_MULT) for _ in range(depth))

    def forward(self, ids: Int[Tensor, "b m"], is_frame: Bool[Tensor, "b n"]) -> Float[Tensor, "b n c"]:
        """Tokens of each row first, then -1; real frames first, then padding."""
        n = is_frame.shape[1]
        if self.alignment == "free":
            return self._refined(F.pad(ids[:, :n], (0, max(0, n - ids.shape[1])), value=-1), is_frame)
        place = stretched((ids >= 0).sum(dim=1), is_frame.sum(dim=1), n)
        return self._refined(ids.gather(1, place), is_frame)

    def _refined(self, ids: Int[Tensor, "b n"], mask: Bool[Tensor, "b n"]) -> Float[Tensor, "b n c"]:
        x = self.embedding(torch.where(ids < 0, self.nothing, ids))
        if self.alignment == "free":  # how far in the text, which has no other relation to the frames
            x = x + waves(torch.arange(x.shape[1], device=x.device).float(), x.shape[-1]).to(x.dtype)
        for block in self.refine:
            x = block(x, mask)
        return x


class ConvolvedPositions(nn.Module):
    """`x + gelu(convolution(x))`: a wide convolution tells the frames how they lie to one another (wav2vec 2.0)."""

    def __init__(self, dim: int, kernel_size: int, groups: int | None):
        super().__init__()
        groups = dim if groups is None else groups
        if kernel_size < 1 or kernel_size % 2 == 0:
            raise ValueError(f"conv_pos_embed_kernel_size={kernel_size} must be odd: as many frames before as after")
        if groups < 1 or dim % groups:
            raise ValueError(f"conv_pos_embed_groups={groups} must divide dim={dim}")
        self.convolution = nn.Conv1d(dim, dim, kernel_size, padding=kernel_size // 2, groups=groups)

    def forward(self, x: Float[Tensor, "b n e"]) -> Float[Tensor, "b n e"]:
        """Padding must be zero, as it is past the ends."""
        return x + F.gelu(self.convolution(x.transpose(1, 2)).transpose(1, 2)).to(x.dtype)


@dataclass(frozen=True)
class Prepared:
    """What stays the same from one evaluation of the velocity to the next."""

    embedding: Tensor  # [b, n, e], the part of the input that text and context make up
    hidden: Tensor  # [b, n], the frames that are to be made
    mask: Tensor | None  # [b, n], the frames that are real; None: all

    def first(self, rows: int) -> "Prepared":
        """The first rows; of `prepare_guided` half of them are those with text and context."""
        return Prepared(self.embedding[:rows], self.hidden[:rows], None if self.mask is None else self.mask[:rows])

    def copy(self) -> "Prepared":
        return Prepared(self.embedding.clone(), self.hidden.clone(), None if self.mask is None else self.mask.clone())

    def read(self, other: "Prepared") -> None:
        """Takes over what was prepared for others of the same shape."""
        for own, new in ((self.embedding, other.embedding), (self.hidden, other.hidden), (self.mask, other.mask)):
            if own is not None and new is not None:
                own.copy_(new)


class VoiceBox(Network):
    """Features at time t in, their velocity out. It knows nothing of waves but what `audio_enc_dec` says of its features."""

    audio_enc_dec: Any

    def __init__(
        self,
        *,
        num_cond_tokens: int | None = None,
        audio_enc_dec: Network | None = None,
        dim_in: int | None = None,
        dim_cond_emb: int = 1024,
        dim: int = 1024,
        depth: int = 24,
        dim_head: int = 64,
        heads: int = 16,
        ff_mult: float = 4,
        ff_dropout: float = 0.0,
        time_hidden_dim: int | None = None,
        conv_pos_embed_kernel_size: int = 31,
        conv_pos_embed_groups: int | None = None,
        attn_dropout: float = 0.0,
        attn_flash: bool = False,
        attn_qk_norm: bool = True,
        use_gateloop_layers: bool = False,
        num_register_tokens: int = 16,
        p_drop_prob: float = 0.3,
        frac_lengths_mask: tuple[float, float] | list[float] = (0.7, 1.0),
        condition_on_text: bool = True,
        alignment: Alignment = "free",
        text_depth: int = 4,
        use_unet_skip_connection: bool = True,
        checkpoint_activations: bool = False,
    ):
        """
        Args:
            num_cond_tokens: how many different tokens there are; needed with `condition_on_text`.
            audio_enc_dec: the space of the features, with whose help waves can be given and taken. It is used, never changed nor
                saved here. None learns from features alone, of `dim_in` numbers a frame (by default `dim`).
            dim_cond_emb: features of a token.
            time_hidden_dim: features of a time; four times `dim` by default.
            conv_pos_embed_groups: None for a convolution of each feature by itself.
            attn_flash: without effect: attention is always `scaled_dot_product_attention`, which chooses its kernel itself.
            attn_qk_norm: normalises queries and keys, so that attention is nearly even at first.
            use_gateloop_layers: there are none; True is refused.
            num_register_tokens: learned tokens that every frame attends to.
            p_drop_prob: how often a row learns without any context, all its frames hidden (0.3 in the paper).
            frac_lengths_mask: the least and the most of a row's frames that are hidden otherwise, in one run.
            condition_on_text: tokens say what is said; without, the context alone does.
            alignment: how tokens come to frames, "free" or "frames"; see above.
            text_depth: convolutional blocks that refine the tokens.
            use_unet_skip_connection: the first half of the layers is added to the second, in reverse.
            checkpoint_activations: recomputes each layer in the backward pass: less memory, a third more time.
        """
        super().__init__()
        if use_gateloop_layers:
            raise ValueError("use_gateloop_layers=True: there are no gateloop layers here, leave it out")
        if condition_on_text and num_cond_tokens is None:
            raise ValueError("condition_on_text=True needs num_cond_tokens, the number of different tokens")
        if alignment not in ALIGNMENTS:
            raise ValueError(f'alignment={alignment!r} is neither "free" nor "frames"')
        self.__dict__["audio_enc_dec"] = audio_enc_dec  # not a submodule: its weights and mode are not ours to change
        self.dim_in = _dim_in(audio_enc_dec, dim_in, dim)
        self.p_drop_prob, self.frac_lengths_mask = checked_masking(p_drop_prob, frac_lengths_mask)
        self.num_cond_tokens, self.condition_on_text, self.alignment = num_cond_tokens, condition_on_text, alignment
        self.dim = dim
        self.tokens: SpokenTokens | None = None
        if condition_on_text and num_cond_tokens is not None:
            self.tokens = SpokenTokens(num_cond_tokens, dim_cond_emb, text_depth, alignment)
        time_hidden_dim = 4 * dim if time_hidden_dim is None else time_hidden_dim
        self.to_time = nn.Linear(dim, time_hidden_dim)
        self.from_frames = nn.Linear(self.dim_in, dim, bias=False)
        # Beside the context stands whether a frame is hidden: silence looks like a hidden frame otherwise.
        self.from_context = nn.Linear(self.dim_in + 1 + (dim_cond_emb if self.tokens is not None else 0), dim)
        self.positions = ConvolvedPositions(dim, conv_pos_embed_kernel_size, conv_pos_embed_groups)
        self.transformer = Transformer(
            dim,
            depth,
            heads=heads,
            dim_head=dim_head,
            ff_mult=ff_mult,
            norm="adaptive",
            dim_cond=time_hidden_dim,
            qk_norm=attn_qk_norm,
            dropout=ff_dropout,
            attn_dropout=attn_dropout,
            registers=num_register_tokens,
            skips=use_unet_skip_connection,
            checkpoint_activations=checkpoint_activations,
        )
        self.to_velocity = nn.Linear(dim, self.dim_in, bias=False)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> "VoiceBox":
        """Takes the feature space along to another device; its precision stays."""
        super()._apply(fn, recurse)
        if self.audio_enc_dec is not None:
            self.audio_enc_dec.to(self.device)
        return self

    @property
    def device(self) -> torch.device:
        return self.to_velocity.weight.device

    # ------------------------------------------------------------------ what is random

    def draw_hidden(self, mask: Bool[Tensor, "b n"], generator: torch.Generator | None = None) -> Bool[Tensor, "b n"]:
        """Real frames to learn from: all of a row in `p_drop_prob` of the rows, and one run of them in the others."""
        return hidden_mask(mask, self.p_drop_prob, self.frac_lengths_mask, generator)

    def draw_keep(
        self, rows: int, cond_drop_prob: float, generator: torch.Generator | None = None
    ) -> Bool[Tensor, " b"]:
        """Which rows keep text and context; guidance leads away from what the others learn."""
        return torch.rand(rows, device=self.device, **drawn_by(generator)) >= cond_drop_prob

    # ------------------------------------------------------------------ the velocity

    def prepare(
        self,
        hidden: Bool[Tensor, "b n"],
        *,
        cond: Float[Tensor, "b n d"] | None = None,
        cond_token_ids: Int[Tensor, "b m"] | None = None,
        self_attn_mask: Bool[Tensor, "b n"] | None = None,
        keep: Bool[Tensor, " b"] | None = None,
    ) -> Prepared:
        """What an evaluation needs of text and context; where `cond` is `hidden` it may hold anything.

        Rows not in `keep` have neither.
        """
        self._check_condition(cond, cond_token_ids)
        rows, n = hidden.shape
        is_frame = torch.ones_like(hidden) if self_attn_mask is None else self_attn_mask
        if keep is not None:
            hidden = hidden | ~keep[:, None]
        weight = self.from_context.weight
        context = weight.new_zeros(rows, n, self.dim_in) if cond is None else cond.to(weight.dtype)
        # A product for each part, and not one of all of them side by side: rows of an odd number of values do not lie where
        # matrix units can take them.
        of_context, of_hidden, of_tokens = weight.split((self.dim_in, 1, weight.shape[1] - self.dim_in - 1), dim=1)
        shown = context.masked_fill((hidden | ~is_frame)[..., None], 0.0)
        found = F.linear(shown, of_context, self.from_context.bias)
        found = torch.where(hidden[..., None], found + of_hidden[:, 0].to(found.dtype), found)
        if self.tokens is not None:
            ids = cond_token_ids
            if ids is None or ids.shape[1] == 0:
                ids = hidden.new_full((rows, 1), -1, dtype=torch.long)
            ids = ids if keep is None else ids.masked_fill(~keep[:, None], -1)
            found = found + F.linear(self.tokens(ids, is_frame).to(weight.dtype), of_tokens)
        return Prepared(found, hidden, self_attn_mask)

    def prepare_guided(self, hidden: Bool[Tensor, "b n"], **condition: Tensor | None) -> Prepared:
        """The same for 2 b rows: with text and context, then without. `condition` as for `prepare`."""
        twice = {name: None if part is None else torch.cat((part, part)) for name, part in condition.items()}
        keep = torch.arange(2 * len(hidden), device=hidden.device) < len(hidden)
        return self.prepare(torch.cat((hidden, hidden)), **twice, keep=keep)

    def velocity(self, prepared: Prepared, x: Float[Tensor, "b n d"], times: Times) -> Float[Tensor, "b n d"]:
        """Of features at these times, and 0 past the end of a row."""
        mask = prepared.mask
        # Layers add up what they find: under autocast in the features' own type, single precision, whatever that of the weights is.
        dtype = x.dtype if torch.is_autocast_enabled(x.device.type) else self.from_frames.weight.dtype
        x = (self.from_frames(_silent(x.to(dtype), mask)) + prepared.embedding).to(dtype)
        cond = self.to_time(waves(TIME_SCALE * times.float().expand(len(x)), self.dim).to(dtype))
        x = self.transformer(self.positions(_silent(x, mask)), mask, cond=cond)
        return _silent(self.to_velocity(x), mask)

    def guided_velocity(
        self, prepared: Prepared, x: Float[Tensor, "b n d"], times: Times, cond_scale: float
    ) -> Float[Tensor, "b n d"]:
        """Guidance by text and context (of `prepare_guided`), in one batch of 2 b."""
        times = times.expand(len(x)).repeat(2)
        cond, null = self.velocity(prepared, torch.cat((x, x)), times).float().chunk(2)
        return guide(cond, null, cond_scale)

    def forward(
        self,
        x: Float[Tensor, "b n d"],
        *,
        times: Times,
        cond_token_ids: Int[Tensor, "b m"] | None = None,
        self_attn_mask: Bool[Tensor, "b n"] | None = None,
        cond_drop_prob: float = 0.0,
        target: Float[Tensor, "b n d"] | None = None,
        cond: Float[Tensor, "b n d"] | None = None,
        cond_mask: Bool[Tensor, "b n"] | None = None,
        keep: Bool[Tensor, " b"] | None = None,
        generator: torch.Generator | None = None,
    ) -> Float[Tensor, "b n d"] | Float[Tensor, ""]:
        """The velocity; or, of a `target`, the loss: its mean squared error over hidden real frames.

        Args:
            times: from 0, noise, to 1, features.
            cond_token_ids: what is said, -1 past the end of a row. Tokens beyond the frames of a row (`alignment="free"`) are not seen.
            self_attn_mask: True = a real frame; real frames come first.
            cond_drop_prob: how often a row is left without text and context, where `keep` does not say which are.
            cond: the clean features, of which frames outside of `cond_mask` are the context.
            cond_mask: True = hidden, to be made. By default all where there is no `cond`, and drawn (`draw_hidden`) where there is
                a target.
            generator: of what is drawn.
        """
        is_frame = x.new_ones(x.shape[:2], dtype=torch.bool) if self_attn_mask is None else self_attn_mask
        if cond_mask is None:
            cond_mask = self._unsaid_mask(is_frame, cond is not None, target is not None, generator)
        if keep is None and cond_drop_prob:
            keep = self.draw_keep(len(x), cond_drop_prob, generator)
        given = {"cond": cond, "cond_token_ids": cond_token_ids, "self_attn_mask": self_attn_mask, "keep": keep}
        prepared = self.prepare(cond_mask, **given)
        found = self.velocity(prepared, x, times)
        return found if target is None else masked_error(found, target, prepared.hidden & is_frame)

    def forward_with_cond_scale(
        self, x: Float[Tensor, "b n d"], *, times: Times, cond_scale: float = 1.0, **condition: Tensor | None
    ) -> Float[Tensor, "b n d"]:
        """The velocity, guided by text and context: `null + cond_scale (velocity - null)`. `condition` as for `forward`."""
        if cond_scale == 1.0:
            return self(x, times=times, **condition)
        hidden, is_frame = condition.pop("cond_mask", None), condition.get("self_attn_mask")
        if hidden is None:
            is_frame = x.new_ones(x.shape[:2], dtype=torch.bool) if is_frame is None else is_frame
            hidden = self._unsaid_mask(is_frame, condition.get("cond") is not None, False, None)
        return self.guided_velocity(self.prepare_guided(hidden, **condition), x, times, cond_scale)

    def _unsaid_mask(
        self, is_frame: Bool[Tensor, "b n"], has_context: bool, learns: bool, generator: torch.Generator | None
    ) -> Bool[Tensor, "b n"]:
        if not has_context:
            return torch.ones_like(is_frame)
        if not learns:
            raise ValueError(
                "which frames of cond are the context? Give cond_mask, True for those that are hidden and to be made"
            )
        return self.draw_hidden(is_frame, generator)

    def _check_condition(self, cond: Tensor | None, ids: Tensor | None) -> None:
        if ids is not None and self.tokens is None:
            raise ValueError("this VoiceBox reads no tokens: build it with condition_on_text=True and num_cond_tokens")
        if cond is not None and cond.shape[-1] != self.dim_in:
            raise ValueError(f"cond has {cond.shape[-1]} features a frame, and this VoiceBox takes {self.dim_in}")


def _silent(x: Float[Tensor, "b n d"], mask: Bool[Tensor, "b n"] | None) -> Float[Tensor, "b n d"]:
    """Zeros in the padding, whatever stands there."""
    return x if mask is None else x.masked_fill(~mask[..., None], 0.0)


def _dim_in(audio_enc_dec: Any, dim_in: int | None, dim: int) -> int:
    if audio_enc_dec is None:
        return dim if dim_in is None else dim_in
    found = audio_enc_dec.latent_dim
    if dim_in not in (None, found):
        raise ValueError(f"dim_in={dim_in} is not the {found} features of the audio_enc_dec: leave it out")
    return found


def checked_masking(
    p_drop_prob: float, frac_lengths_mask: tuple[float, float] | list[float]
) -> tuple[float, tuple[float, float]]:
    """The two, if `hidden_mask` can follow them."""
    if not 0 <= p_drop_prob <= 1:
        raise ValueError(f"p_drop_prob={p_drop_prob} must be from 0 to 1")
    if len(frac_lengths_mask) != 2 or not 0 < frac_lengths_mask[0] <= frac_lengths_mask[1] <= 1:
        raise ValueError(f"frac_lengths_mask={tuple(frac_lengths_mask)} must be two fractions above 0, the larger last")
    return p_drop_prob, (float(frac_lengths_mask[0]), float(frac_lengths_mask[1]))
