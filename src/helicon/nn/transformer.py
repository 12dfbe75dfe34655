"""The one transformer: embeddings in, embeddings out, for every family.

Pre-norm residual blocks of self-attention, optional cross-attention and a (gated) feed-forward. Token embeddings and
heads belong to the families; a conditioning prefix is simply tokens in front, with a mask.

Letters: b batch, n tokens, m context tokens, d features, c size of the condition, e context features, h heads,
a axes of positions.
"""

import math
from collections.abc import Callable, Sequence
from typing import Literal, cast

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from helicon.nn.attention import (
    AttentionOptions,
    ContextKeys,
    CrossAttention,
    KVCache,
    LayerCache,
    OffsetBias,
    Pattern,
    SelfAttention,
    additive,
    causal_mask,
    window_mask,
)
from helicon.nn.norms import Modulation, RMSNorm
from helicon.nn.positions import Rotation, positions_from_mask

Glu = Literal["geglu", "swiglu"]


class FeedForward(nn.Module):
    """`W2 (act(W1 x) * W1' x)` (Shazeer, 2020), or `W2 gelu(W1 x)` without a gate.

    A gated one is a third narrower, which keeps the number of weights, rounded up to a width that matrix units like.
    """

    def __init__(self, dim: int, mult: float = 4, glu: Glu | None = "geglu", dropout: float = 0.0):
        super().__init__()
        if glu not in ("geglu", "swiglu", None):
            raise ValueError(f'glu={glu!r} is none of "geglu", "swiglu", None')
        self.glu = glu
        inner = 64 * math.ceil(dim * mult * 2 / 3 / 64) if glu else int(dim * mult)
        self.to_hidden = nn.Linear(dim, 2 * inner if glu else inner, bias=False)
        self.dropout = nn.Dropout(dropout)
        self.to_out = nn.Linear(inner, dim, bias=False)

    def forward(self, x: Float[Tensor, "b n d"]) -> Float[Tensor, "b n d"]:
        if self.glu is None:
            return self.to_out(self.dropout(F.gelu(self.to_hidden(x))))
        gate, value = self._gate_value(x)
        hidden = (F.gelu(gate) if self.glu == "geglu" else F.silu(gate)) * value
        return self.to_out(self.dropout(hidden))

    def _gate_value(self, x: Tensor) -> tuple[Tensor, Tensor]:
        if torch.is_grad_enabled():
            # Two products, so that the backward pass need not join the gradients of gate and value into one tensor.
            gate, value = self.to_hidden.weight.chunk(2)
            return F.linear(x, gate), F.linear(x, value)
        gate, value = self.to_hidden(x).chunk(2, dim=-1)
        return gate, value


class Residual(nn.Module):
    """`x + block(norm(x))`, or with a modulation `x + gate * block(norm(x) * (1 + scale) + shift)`."""

    def __init__(self, block: nn.Module, dim: int, adaptive: bool, dropout: float):
        super().__init__()
        self.norm = RMSNorm(dim, learned=not adaptive)
        self.block = block
        self.dropout = nn.Dropout(dropout)

    def forward(
        self, x: Float[Tensor, "b n d"], modulation: Float[Tensor, "3 b 1 d"] | None, *inputs: object
    ) -> Float[Tensor, "b n d"]:
        normed = self.norm(x)
        if modulation is None:
            return x + self.dropout(self.block(normed, *inputs))
        scale, shift, gate = modulation.unbind(0)
        return x + gate * self.dropout(self.block(normed * (1 + scale) + shift, *inputs))


class Layer(nn.Module):
    def __init__(
        self,
        options: AttentionOptions,
        dim_context: int | None,
        feed_forward: FeedForward,
        adaptive: bool,
        dropout: float,
        skip: bool,
    ):
        super().__init__()
        dim = options.dim
        self.skip = nn.Linear(dim, dim, bias=False) if skip else None
        self.attention = Residual(SelfAttention(options), dim, adaptive, dropout)
        cross = None if dim_context is None else CrossAttention(options, dim_context)
        self.cross = None if cross is None else Residual(cross, dim, adaptive, dropout)
        self.feed_forward = Residual(feed_forward, dim, adaptive, dropout)

    def forward(
        self,
        x: Float[Tensor, "b n d"],
        skipped: Float[Tensor, "b n d"] | None,
        modulation: Float[Tensor, "s 3 b 1 d"] | None,
        pattern: Pattern,
        context: Float[Tensor, "b m e"] | None,
        context_bias: Float[Tensor, "b 1 1 k"] | None,
        cache: LayerCache | None,
    ) -> Float[Tensor, "b n d"]:
        first, *middle, last = (None, None, None) if modulation is None else modulation.unbind(0)
        if self.skip is not None and skipped is not None:
            x = x + self.skip(skipped)
        x = self.attention(x, first, pattern, cache)
        if self.cross is not None:
            x = self.cross(x, middle[0], *self.context_keys_values(context, cache), context_bias)
        return self.feed_forward(x, last)

    def context_keys_values(self, context: Tensor | None, cache: LayerCache | None) -> tuple[Tensor, Tensor]:
        assert self.cross is not None and isinstance(self.cross.block, CrossAttention)
        if context is not None:
            keys, values = self.cross.block.keys_values(context)
            if cache is None:
                return keys, values
        assert cache is not None and cache.context_keys is not None and cache.context_values is not None
        if context is not None:
            cache.context_keys[:, :, : keys.shape[2]] = keys
            cache.context_values[:, :, : keys.shape[2]] = values
        return cache.context_keys, cache.context_values


def run_layer(layer: Layer, *inputs: object) -> Tensor:
    """Calls the layer. Compiled, it is one small graph for all layers alike, where a compiled stack is as many times longer."""
    return layer(*inputs)


class Transformer(nn.Module):
    """A stack of layers and a final norm.

    Arguments beyond the usual:
        kv_heads        key heads, each shared by heads / kv_heads query heads; as many as `heads` by default
        positions       "rotary", "learned" (added to the input; needs `max_seq_len`) or "none" (the caller's affair)
        glu             gate of the feed-forward: "geglu", "swiglu" or None
        norm            "rms", or "adaptive": scale, shift and gate of every block from a condition `[b, dim_cond]`
        qk_norm         normalises queries and keys, with a learned scale per head
        cross_attend    attention to a context of `dim_context` features, with a learned null key
        registers       learned tokens in front of the sequence, dropped at the end (Darcet et al., 2023)
        window_size     a token attends to the last `window_size` tokens only, itself among them; needs `causal`
        skips           the outputs of the first half of the layers are added to the inputs of the second half (U-Net)
        checkpoint_activations  recomputes each layer in the backward pass: less memory, a third more time
    """

    def __init__(
        self,
        dim: int,
        depth: int,
        *,
        heads: int = 8,
        dim_head: int = 64,
        kv_heads: int | None = None,
        causal: bool = False,
        positions: Literal["rotary", "learned", "none"] = "rotary",
        max_seq_len: int | None = None,
        ff_mult: float = 4,
        glu: Glu | None = "geglu",
        norm: Literal["rms", "adaptive"] = "rms",
        dim_cond: int | None = None,
        qk_norm: bool = False,
        cross_attend: bool = False,
        dim_context: int | None = None,
        dropout: float = 0.0,
        attn_dropout: float = 0.0,
        registers: int = 0,
        window_size: int | None = None,
        skips: bool = False,
        checkpoint_activations: bool = False,
    ):
        super().__init__()
        kv_heads = heads if kv_heads is None else kv_heads
        _check(dim_head, positions, max_seq_len, norm, dim_cond, cross_attend, dim_context)
        if window_size is not None and (window_size < 1 or not causal or registers):
            raise ValueError(
                f"window_size={window_size} must be at least 1 and belongs to causal=True, without registers (the window "
                f"would leave them behind), not to {causal=} and {registers=}"
            )
        self.dim, self.depth, self.causal, self.max_seq_len = dim, depth, causal, max_seq_len
        self.window_size = window_size
        self.checkpoint_activations = checkpoint_activations
        self.attention_options = AttentionOptions(dim, heads, dim_head, kv_heads, qk_norm, attn_dropout)
        self.is_rotary, self.cross_attend = positions == "rotary", cross_attend
        self.positions = nn.Embedding(max_seq_len, dim) if positions == "learned" and max_seq_len else None
        self.registers = nn.Parameter(torch.empty(registers, dim)) if registers else None
        self.modulation = (
            Modulation(dim_cond, dim, depth, 2 + cross_attend) if norm == "adaptive" and dim_cond else None
        )
        self.skips = skips
        self.layers = nn.ModuleList(
            Layer(
                self.attention_options,
                (dim_context or dim) if cross_attend else None,
                FeedForward(dim, ff_mult, glu, dropout),
                adaptive=self.modulation is not None,
                dropout=dropout,
                skip=skips and index >= math.ceil(depth / 2),
            )
            for index in range(depth)
        )
        self.final_norm = RMSNorm(dim)
        self._initialise()

    def _initialise(self) -> None:
        """Projections keep the variance of their input; those that end a block are smaller, so that their sum does.

        A network with skips starts as the one without.
        """
        blocks = self.depth * (3 if self.cross_attend else 2)
        for name, module in self.layers.named_modules():
            if isinstance(module, nn.Linear):
                gain = {"to_out": blocks**-0.5, "skip": 0.0}.get(name.rpartition(".")[2], 1.0)
                nn.init.normal_(module.weight, std=gain * module.in_features**-0.5)
        if self.positions is not None:
            nn.init.normal_(self.positions.weight, std=0.02)
        if self.registers is not None:
            nn.init.normal_(self.registers)

    @property
    def num_registers(self) -> int:
        return 0 if self.registers is None else len(self.registers)

    @property
    def cache_dtype(self) -> torch.dtype:
        """What a cache of this moment has: under autocast it is another."""
        return _compute_dtype(next(self.parameters()))

    def new_cache(self, batch: int, max_len: int, context_len: int | None = None) -> KVCache:
        """An empty cache for up to `max_len` tokens (registers not counted) and a context of up to `context_len`."""
        if not self.causal:
            raise ValueError("a cache needs a causal transformer: build it with causal=True")
        if self.positions is not None and max_len > self.positions.num_embeddings:
            raise ValueError(
                f"max_len={max_len} is more than the {self.positions.num_embeddings} learned positions (max_seq_len)"
            )
        if self.cross_attend != (context_len is not None):
            raise ValueError(f"context_len={context_len} with cross_attend={self.cross_attend}: give both or neither")
        return KVCache(
            depth=self.depth,
            batch=batch,
            kv_heads=self.attention_options.kv_heads,
            dim_head=self.attention_options.dim_head,
            max_len=max_len + self.num_registers,
            context_len=context_len,
            window_size=self.window_size,
            device=next(self.parameters()).device,
            dtype=self.cache_dtype,
        )

    def read_context(
        self, context: Float[Tensor, "b m e"], context_mask: Bool[Tensor, "b m"] | None = None
    ) -> ContextKeys:
        """What all layers need of a context, to be given as `context_keys` to every pass that attends to it."""
        if not self.cross_attend:
            raise ValueError("a context belongs to cross_attend=True")
        pairs = [cast(Layer, layer).context_keys_values(context, None) for layer in self.layers]
        keys, values = (list(part) for part in zip(*pairs, strict=True))
        return ContextKeys(keys, values, self._context_bias(context, context, context_mask, None))

    def forward(
        self,
        x: Float[Tensor, "b n d"],
        mask: Bool[Tensor, "b n"] | None = None,
        *,
        positions: Int[Tensor, "#b n"] | Int[Tensor, "#b n a"] | None = None,
        context: Float[Tensor, "b m e"] | None = None,
        context_mask: Bool[Tensor, "b m"] | None = None,
        context_keys: ContextKeys | None = None,
        cond: Float[Tensor, "b c"] | None = None,
        bias: Float[Tensor, "#b #h n n"] | OffsetBias | None = None,
        cache: KVCache | None = None,
        run_layer: Callable[..., Tensor] = run_layer,
    ) -> Float[Tensor, "b n d"]:
        """
        mask          True = a real token. Padding may stand on either side; a causal model needs none for padding on
                      the right (nothing real attends to it), and is faster without.
        positions     position ids; counted over the real tokens by default. Give them where `mask` hides keys that
                      still take up a position, or where tokens stand on a grid (rotary: an id for each axis).
        context_mask  True = a real context token; where all are False only the null key is attended to.
        context_keys  a context that was read before (`read_context`), in place of `context` and its mask.
        bias          added to the attention logits; an `OffsetBias` is looked up instead of written out where that can be
                      done: on a GPU, without dropout of attention or a causal order.
        cache         the tokens follow those in the cache, which is extended; the context is given in the first pass.
        run_layer     how to call a layer: a compiled `run_layer`, for one.
        """
        self._check_inputs(x, context, context_keys, cond, bias, cache)
        starts = cache is None or cache.is_fresh
        if positions is None:
            positions = self._positions(x, mask, cache)
        elif positions.ndim == 3 and (not self.is_rotary or self.registers is not None):
            raise ValueError('positions on several axes belong to positions="rotary", without registers')
        elif self.window_size is not None:
            raise ValueError(f"positions are counted where there is a window_size ({self.window_size}): give none")
        if cache is not None:
            _advance_positions(cache, positions, mask)
        if self.positions is not None:
            x = x + self.positions(positions)
        if self.registers is not None and starts:
            x, mask, positions = self._prepend_registers(self.registers, x, mask, positions)
        pattern = self._pattern(x, mask, positions, bias, cache)
        context_bias = (
            self._context_bias(x, context, context_mask, cache) if context_keys is None else context_keys.bias
        )
        modulations = [None] * self.depth if self.modulation is None else self.modulation(cond)
        kept = context_keys if cache is None else cache
        x = self._run_layers(x, modulations, (pattern, context, context_bias), kept, run_layer)
        if cache is not None:
            cache.advance(x.shape[1])
        if self.registers is not None and starts:
            x = x[:, self.num_registers :]
        return self.final_norm(x)

    def _run_layers(
        self,
        x: Tensor,
        modulations: Sequence[Tensor | None],
        shared: tuple[Pattern, Tensor | None, Tensor | None],
        cache: KVCache | ContextKeys | None,
        run_layer: Callable[..., Tensor],
    ) -> Tensor:
        recompute = self.checkpoint_activations and torch.is_grad_enabled() and cache is None
        skipped: list[Tensor] = []
        for index, layer in enumerate(self.layers):
            skip = skipped.pop() if layer.skip is not None else None
            inputs = (layer, x, skip, modulations[index], *shared, None if cache is None else cache.layer(index))
            x = checkpoint(run_layer, *inputs, use_reentrant=False) if recompute else run_layer(*inputs)
            if self.skips and index < self.depth // 2:
                skipped.append(x)
        return x

    def _positions(self, x: Tensor, mask: Tensor | None, cache: KVCache | None) -> Int[Tensor, "#b n"]:
        n = x.shape[1]
        counted = torch.arange(n, device=x.device)[None] if mask is None else positions_from_mask(mask)
        return counted if cache is None else cache.positions[:, None] + counted

    def _prepend_registers(
        self, registers: Tensor, x: Tensor, mask: Tensor | None, positions: Tensor
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """Registers stand at negative positions, so that they move nothing."""
        batch, count = x.shape[0], len(registers)
        x = torch.cat((registers.to(x.dtype).expand(batch, -1, -1), x), dim=1)
        before = torch.arange(-count, 0, device=x.device).expand(len(positions), -1)
        if mask is not None:
            mask = torch.cat((mask.new_ones(batch, count), mask), dim=1)
        return x, mask, torch.cat((before, positions), dim=1)

    def _pattern(
        self,
        x: Tensor,
        mask: Tensor | None,
        positions: Tensor,
        bias: Tensor | OffsetBias | None,
        cache: KVCache | None,
    ) -> Pattern:
        batch, n, _ = x.shape
        dtype = _compute_dtype(x)
        rotation = Rotation(positions, self.attention_options.dim_head) if self.is_rotary else None
        if isinstance(bias, OffsetBias):
            has_dropout = self.training and self.attention_options.dropout > 0  # which FlexAttention has not
            if x.is_cuda and not self.causal and not has_dropout:
                return Pattern(rotation, None, False, keep=mask, offsets=bias)
            bias = bias.gathered()
        slots, attend_cached = None, False
        allowed = None if mask is None else mask[:, None, None, :]
        if cache is not None:
            slots = cache.next_slots(n)
            cached = cache.mark(slots, x.new_ones(batch, n, dtype=torch.bool) if mask is None else mask, positions)
            attend_cached = n == 1 or not cache.is_fresh
            allowed = cached if attend_cached else allowed
        window_size = self.window_size if self.window_size is not None and n > self.window_size else None
        is_causal = self.causal and not attend_cached
        if is_causal and bias is None and (mask is None or window_size is None):  # without an n x n bias
            return Pattern(rotation, None, window_size is None, slots, window_size=window_size, keep=mask)
        if is_causal:
            causal = causal_mask(n, x.device)[None, None]
            if window_size is not None:
                causal = causal & window_mask(positions, positions, window_size)
            allowed = causal if allowed is None else allowed & causal
        total = None if bias is None else bias.to(dtype)
        if allowed is not None:
            total = additive(allowed, dtype) if total is None else total + additive(allowed, dtype)
        return Pattern(rotation, total, False, slots, attend_cached)

    def _context_bias(
        self, x: Tensor, context: Tensor | None, context_mask: Tensor | None, cache: KVCache | None
    ) -> Float[Tensor, "b 1 1 k"] | None:
        """Of the null key, which is always there, and of the context."""
        allowed = None
        if context is not None and (context_mask is not None or cache is not None):
            real = x.new_ones(context.shape[:2], dtype=torch.bool) if context_mask is None else context_mask
            allowed = torch.cat((real.new_ones(len(real), 1), real), dim=1)
            if cache is not None:
                cache.mark_context(allowed)
        if cache is not None:
            allowed = cache.context_valid
        return None if allowed is None else additive(allowed[:, None, None, :], _compute_dtype(x))

    def _check_inputs(
        self,
        x: Tensor,
        context: Tensor | None,
        context_keys: ContextKeys | None,
        cond: Tensor | None,
        bias: Tensor | OffsetBias | None,
        cache: KVCache | None,
    ) -> None:
        n = x.shape[1]
        if context_keys is not None and (context is not None or cache is not None):
            raise ValueError(
                "context_keys stand in the place of a context, and a cache keeps its own: give one of them"
            )
        if (self.modulation is not None) != (cond is not None):
            raise ValueError('cond belongs to norm="adaptive": give both or neither')
        if self.cross_attend != (context is not None or context_keys is not None) and not (
            self.cross_attend and cache is not None and not cache.is_fresh
        ):
            raise ValueError(
                "context belongs to cross_attend=True (where there is none, give one whose context_mask is False), "
                "and with a cache to the first pass only"
            )
        if self.positions is not None and n > self.positions.num_embeddings:
            raise ValueError(
                f"{n} tokens are more than the {self.positions.num_embeddings} learned positions (max_seq_len)"
            )
        if bias is not None and (cache is not None or self.registers is not None):
            raise ValueError("bias is for a plain pass: it covers neither the slots of a cache nor registers")
        if cache is None:
            return
        room = cache.max_len - self.num_registers
        if len(x) != cache.batch or (cache.is_fresh and n > room):
            raise ValueError(f"{len(x)} rows of {n} tokens do not fit a cache of {cache.batch} rows of {room}")
        if context is not None and cache.context_len is not None and context.shape[1] > cache.context_len:
            raise ValueError(
                f"a context of {context.shape[1]} does not fit a cache made for context_len={cache.context_len}"
            )


def _check(
    dim_head: int,
    positions: str,
    max_seq_len: int | None,
    norm: str,
    dim_cond: int | None,
    cross_attend: bool,
    dim_context: int | None,
) -> None:
    if positions not in ("rotary", "learned", "none"):
        raise ValueError(f'positions={positions!r} is none of "rotary", "learned", "none"')
    if positions == "rotary" and dim_head % 2:
        raise ValueError(f"dim_head={dim_head} must be even for rotary positions")
    if (positions == "learned") != (max_seq_len is not None):
        raise ValueError(f'max_seq_len={max_seq_len} with positions={positions!r}: it belongs to positions="learned"')
    if norm not in ("rms", "adaptive"):
        raise ValueError(f'norm={norm!r} is neither "rms" nor "adaptive"')
    if (norm == "adaptive") != (dim_cond is not None):
        raise ValueError(f'dim_cond={dim_cond} with norm={norm!r}: it belongs to norm="adaptive"')
    if dim_context is not None and not cross_attend:
        raise ValueError(f"dim_context={dim_context} belongs to cross_attend=True")


def _compute_dtype(x: Tensor) -> torch.dtype:
    """The type attention will run in: SDPA wants its bias in the type of its queries."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


def _advance_positions(cache: KVCache, positions: Tensor, mask: Tensor | None) -> None:
    """The next position of each row follows its last real token; a row without one stays where it was."""
    last = positions if mask is None else torch.where(mask, positions, -1)
    following = last.amax(dim=1) + 1
    cache.positions.copy_(torch.maximum(cache.positions, following))
