"""Attention over `scaled_dot_product_attention`: masks, grouped keys, sliding windows, a null key, the static KV cache.

A mask (True = keep) becomes an additive bias once a forward pass; under causal attention, features of the keys. Masked
keys get a large finite number, not minus infinity, so a query with nothing to attend to (padding, an empty context) gets
a finite average instead of NaN.

Letters: b batch, h heads, g key heads (h is a multiple of g), n queries, m keys, d features of a head,
c and e features of tokens.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from einops import rearrange, repeat
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn.attention.flex_attention import flex_attention

from helicon.nn.norms import HeadNorm
from helicon.nn.positions import Rotation

MASKED = -30_000.0  # finite in half precision too; its exponential is zero


def additive(allowed: Bool[Tensor, "..."], dtype: torch.dtype) -> Float[Tensor, "..."]:
    """0 where attention is allowed, MASKED elsewhere."""
    return torch.zeros_like(allowed, dtype=dtype).masked_fill(~allowed, MASKED)


def causal_mask(n: int, device: torch.device) -> Bool[Tensor, "n n"]:
    return torch.ones(n, n, dtype=torch.bool, device=device).tril()


def window_mask(queries: Int[Tensor, "b n"], keys: Int[Tensor, "b m"], window_size: int) -> Bool[Tensor, "b 1 n m"]:
    """By position ids: keys less than `window_size` behind the query."""
    return (queries[:, None, :, None] - keys[:, None, None, :]) < window_size


def attend(
    queries: Float[Tensor, "b h n d"],
    keys: Float[Tensor, "b g m d"],
    values: Float[Tensor, "b g m d"],
    bias: Float[Tensor, "#b #h #n m"] | None = None,
    is_causal: bool = False,
    dropout: float = 0.0,
) -> Float[Tensor, "b h n d"]:
    """Softmax attention; each group of h/g query heads shares a key head."""
    heads, key_heads = queries.shape[1], keys.shape[1]
    if queries.shape[2] == 1 and (bias is None or bias.shape[1] == 1):
        # One query: the heads of a group stand as queries of their key head, and no key is copied.
        grouped = rearrange(queries, "b (g r) 1 d -> b g r d", g=key_heads)
        if torch.compiler.is_compiling() and not dropout:
            out = _attend_compiled(grouped, keys, values, bias)
        else:
            out = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=bias, dropout_p=dropout)
        return rearrange(out, "b g r d -> b (g r) 1 d")
    keys, values = (_for_each_head(x, heads) for x in (keys, values))
    return F.scaled_dot_product_attention(queries, keys, values, attn_mask=bias, dropout_p=dropout, is_causal=is_causal)


def attend_to_kept(
    queries: Float[Tensor, "b h n d"],
    keys: Float[Tensor, "b g n d"],
    values: Float[Tensor, "b g n d"],
    keep: Bool[Tensor, "b n"],
    dropout: float = 0.0,
) -> Float[Tensor, "b h n d"]:
    """Causal attention to the keys of `keep`, by the kernel's own causal path: no n x n bias is written.

    Heads get more features, up to the next multiple of eight: 1 in queries, and in one of them MASKED in hidden keys.
    A query that sees only hidden keys attends to those, never to the future.
    """
    heads, dim_head = queries.shape[1], queries.shape[-1]
    more = 8 - dim_head % 8
    hiding = F.pad(additive(keep, keys.dtype)[:, None, :, None], (0, more - 1))
    queries, values = F.pad(queries, (0, more), value=1.0), F.pad(values, (0, more))
    keys = torch.cat((keys, hiding.expand(-1, keys.shape[1], -1, -1)), dim=-1)
    keys, values = (_for_each_head(x, heads) for x in (keys, values))
    out = F.scaled_dot_product_attention(queries, keys, values, dropout_p=dropout, is_causal=True, scale=dim_head**-0.5)
    return out[..., :dim_head]


def attend_in_window(
    queries: Float[Tensor, "b h n d"],
    keys: Float[Tensor, "b g n d"],
    values: Float[Tensor, "b g n d"],
    window_size: int,
    dropout: float = 0.0,
) -> Float[Tensor, "b h n d"]:
    """Attention of each token to the last `window_size`, itself among them, with memory in proportion to n.

    In k blocks of w = `window_size` queries, each of which attends to its own block and the one before.
    """
    batch, n, w = queries.shape[0], queries.shape[2], window_size
    missing = -n % w
    blocks = rearrange(F.pad(queries, (0, 0, 0, missing)), "b h (k w) d -> (b k) h w d", w=w)
    near_keys, near_values = (
        rearrange(F.pad(x, (0, 0, w, missing)).unfold(2, 2 * w, w), "b g k d m -> (b k) g m d") for x in (keys, values)
    )
    key = torch.arange(2 * w, device=queries.device)
    age = key[w:, None] - key  # how far a key is behind a query of the second half
    block = torch.arange(len(blocks) // batch, device=queries.device)[:, None, None]
    allowed = (age >= 0) & (age < w) & ((block > 0) | (key >= w))  # before the first block there is nothing
    bias = repeat(additive(allowed, queries.dtype), "k w m -> (b k) 1 w m", b=batch)
    out = attend(blocks, near_keys, near_values, bias, dropout=dropout)
    return rearrange(out, "(b k) h w d -> b h (k w) d", b=batch)[:, :, :n]


class OffsetBias(NamedTuple):
    """A bias that depends on how far apart query and key are: `table[head, place of query - place of key + middle]`.

    Each token has a place, and the table one column for every difference from -middle to middle. On a grid of w columns the places
    are row (2 w - 1) + column: then a difference tells how many rows and how many columns lie between.
    """

    table: Tensor  # [h, 2 middle + 1]
    places: Tensor  # [b or 1, n]

    def gathered(self) -> Float[Tensor, "b h n n"]:
        """The bias written out. Where the rows of a batch have different places, that is b times as much."""
        middle = self.table.shape[1] // 2
        offsets = self.places[:, :, None] - self.places[:, None, :] + middle
        return rearrange(self.table[:, offsets], "h b n m -> b h n m")


def attend_by_offset(
    queries: Float[Tensor, "b h n d"],
    keys: Float[Tensor, "b g n d"],
    values: Float[Tensor, "b g n d"],
    bias: OffsetBias,
    keep: Bool[Tensor, "b n"] | None = None,
) -> Float[Tensor, "b h n d"]:
    """Attention with an `OffsetBias` to the keys of `keep`, looked up where it is added: on a GPU no n x n is written."""
    heads = queries.shape[1]
    keys, values = (_for_each_head(x, heads) for x in (keys, values))
    table, middle = bias.table.float(), bias.table.shape[1] // 2
    places = bias.places.expand(len(queries), -1)

    def biased(score: Tensor, row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        score = score + table[head, places[row, query] - places[row, key] + middle]
        return score if keep is None else torch.where(keep[row, key], score, MASKED)

    if queries.is_cuda and not torch.compiler.is_compiling():  # uncompiled it would write n x n after all
        return _compiled_flex_attention()(queries, keys, values, score_mod=biased)
    return flex_attention(queries, keys, values, score_mod=biased)


@functools.cache
def _compiled_flex_attention() -> Callable[..., Any]:
    return torch.compile(flex_attention, dynamic=False)


def _for_each_head(x: Float[Tensor, "b g m d"], heads: int) -> Float[Tensor, "b h m d"]:
    """Keys or values, repeated for the query heads that share them."""
    return x if x.shape[1] == heads else repeat(x, "b g m d -> b (g r) m d", r=heads // x.shape[1])


def _attend_compiled(
    queries: Float[Tensor, "b g r d"],
    keys: Float[Tensor, "b g m d"],
    values: Float[Tensor, "b g m d"],
    bias: Float[Tensor, "b 1 1 m"] | None,
) -> Float[Tensor, "b g r d"]:
    """Attention of few queries, for the compiler to fuse.

    SDPA's kernels are made for many queries. With its memory-efficient one a 12-layer step took twice as long at
    batch 1 over 2,000 tokens (1.46 and 0.70 ms on an H200).
    """
    logits = (queries[:, :, :, None].float() * keys[:, :, None].float()).sum(dim=-1) * queries.shape[-1] ** -0.5
    weights = (logits if bias is None else logits + bias).softmax(dim=-1)
    return weights.to(values.dtype) @ values


@dataclass(frozen=True)
class AttentionOptions:
    """What self-attention and cross-attention have in common."""

    dim: int
    heads: int
    dim_head: int
    kv_heads: int
    qk_norm: bool
    dropout: float

    def __post_init__(self) -> None:
        if self.kv_heads < 1 or self.heads % self.kv_heads:
            raise ValueError(f"kv_heads={self.kv_heads} must divide heads={self.heads}")


class KVCache:
    """Preallocated keys and values of all layers, with every index on the device: a one-token step has static shapes.

    Slots are filled in order; `valid` says which hold a real token, `positions` which position id each row's next token
    has. Keys and values of the context are computed in the first pass and kept. A pass attends to the first `window`
    slots: a caller that knows how many are filled may lower it, which changes the cost and nothing else. With a
    `window_size` a token attends to that many positions up to its own; older slots can be given up by `keep_last`.
    """

    def __init__(
        self,
        *,
        depth: int,
        batch: int,
        kv_heads: int,
        dim_head: int,
        max_len: int,
        context_len: int | None = None,
        window_size: int | None = None,
        device: torch.device,
        dtype: torch.dtype,
    ):
        # A tensor for each layer: writing into a view of a greater one would make a compiled layer copy the whole.
        def buffers(length: int) -> list[Tensor]:
            shape = (batch, kv_heads, length, dim_head)
            return [torch.zeros(shape, device=device, dtype=dtype) for _ in range(depth)]

        self.batch, self.max_len, self.context_len, self.window = batch, max_len, context_len, max_len
        self.window_size = window_size
        self.keys, self.values = buffers(max_len), buffers(max_len)
        self.valid = torch.zeros(batch, max_len, dtype=torch.bool, device=device)
        self.slot_positions = torch.zeros(batch, max_len, dtype=torch.long, device=device)
        self.positions = torch.zeros(batch, dtype=torch.long, device=device)
        self.length = torch.zeros(1, dtype=torch.long, device=device)
        # One slot more than the context is long: the null key.
        self.context_keys = None if context_len is None else buffers(context_len + 1)
        self.context_values = None if context_len is None else buffers(context_len + 1)
        self.context_valid = None if context_len is None else self.valid.new_zeros(batch, context_len + 1)
        self.is_fresh = True

    def reset(self) -> None:
        """Forgets everything; the buffers stay where they are, so captured graphs stay good."""
        self.valid.zero_()
        self.positions.zero_()
        self.length.zero_()
        self.is_fresh = True

    def next_slots(self, n: int) -> Int[Tensor, "n"]:
        return self.length + torch.arange(n, device=self.length.device)

    def mark(
        self, slots: Int[Tensor, "n"], mask: Bool[Tensor, "b n"], positions: Int[Tensor, "#b n"]
    ) -> Bool[Tensor, "b 1 n m"]:
        """Takes the slots for tokens of which `mask` are real, and returns which slots each of them may attend to."""
        self.valid.index_copy_(1, slots, mask)
        allowed = self.valid[:, None, None, : self.window]
        if len(slots) > 1:
            allowed = allowed & (torch.arange(self.window, device=slots.device) <= slots[:, None])
        if self.window_size is not None:
            positions = positions.expand(self.batch, -1)
            self.slot_positions.index_copy_(1, slots, positions)
            allowed = allowed & window_mask(positions, self.slot_positions[:, : self.window], self.window_size)
        return allowed

    def advance(self, n: int) -> None:
        """Says that the next n slots are filled."""
        self.length.add_(n)
        self.is_fresh = False

    def keep_last(self, count: int) -> None:
        """Moves the last `count` of the filled slots (there must be so many) to the front, and forgets the others."""
        kept = self.length - count + torch.arange(count, device=self.length.device)
        for buffer in (*self.keys, *self.values):
            buffer[:, :, :count] = buffer.index_select(2, kept)
        for buffer in (self.valid, self.slot_positions):
            buffer[:, :count] = buffer.index_select(1, kept)
        self.valid[:, count:] = False
        self.length.fill_(count)

    def layer(self, index: int) -> "LayerCache":
        if self.context_keys is None or self.context_values is None:
            return LayerCache(self.keys[index], self.values[index])
        return LayerCache(self.keys[index], self.values[index], self.context_keys[index], self.context_values[index])

    def mark_context(self, mask: Bool[Tensor, "b m"]) -> None:
        assert self.context_valid is not None
        self.context_valid.zero_()
        self.context_valid[:, : mask.shape[1]] = mask


class LayerCache(NamedTuple):
    """One layer's part of the cache, to be written into."""

    keys: Tensor | None  # [b, g, m, d]; None where only a context is kept
    values: Tensor | None
    context_keys: Tensor | None = None  # [b, g, 1 + m, d], of the null key and the context
    context_values: Tensor | None = None


@dataclass(frozen=True)
class ContextKeys:
    """Keys and values of one context in every layer, for passes that attend to the same context again and again."""

    keys: list[Tensor]  # [b, g, 1 + m, d] a layer, of the null key and the context
    values: list[Tensor]
    bias: Tensor | None  # [b, 1, 1, 1 + m]

    def layer(self, index: int) -> LayerCache:
        return LayerCache(None, None, self.keys[index], self.values[index])


class Pattern(NamedTuple):
    """Who attends to whom in one forward pass; the same for all layers."""

    rotation: Rotation | None
    bias: Tensor | None  # [b or 1, h or 1, n, m], added to the logits
    is_causal: bool  # only where there is no bias: the kernel's own causal path
    slots: Tensor | None = None  # [n], where a cache keeps these tokens
    attend_cached: bool = False  # False in the first pass, which has all its keys at hand
    window_size: int | None = None  # only where there is no bias: attention in blocks
    keep: Tensor | None = None  # [b, n], only where is_causal or with offsets: the keys that are not hidden
    offsets: OffsetBias | None = None  # only where there is no bias: one that is looked up


class SelfAttention(nn.Module):
    def __init__(self, options: AttentionOptions):
        super().__init__()
        self.options = options
        heads, key_heads, dim_head = options.heads, options.kv_heads, options.dim_head
        self.to_qkv = nn.Linear(options.dim, (heads + 2 * key_heads) * dim_head, bias=False)
        self.norm = HeadNorm(heads + key_heads, dim_head) if options.qk_norm else None
        self.to_out = nn.Linear(heads * dim_head, options.dim, bias=False)

    def forward(
        self, x: Float[Tensor, "b n c"], pattern: Pattern, cache: LayerCache | None = None
    ) -> Float[Tensor, "b n c"]:
        heads, key_heads = self.options.heads, self.options.kv_heads
        projected = rearrange(self.to_qkv(x), "b n (h d) -> b h n d", d=self.options.dim_head)
        turned, values = projected.split((heads + key_heads, key_heads), dim=1)
        if self.norm is not None:
            turned = self.norm(turned)
        if pattern.rotation is not None:
            turned = pattern.rotation(turned)
        queries, keys = turned.split((heads, key_heads), dim=1)
        if cache is not None and pattern.slots is not None:
            assert cache.keys is not None and cache.values is not None
            cache.keys.index_copy_(2, pattern.slots, keys)
            cache.values.index_copy_(2, pattern.slots, values)
            if pattern.attend_cached and pattern.bias is not None:
                window = pattern.bias.shape[-1]
                keys, values = cache.keys[:, :, :window], cache.values[:, :, :window]
        dropout = self.options.dropout if self.training else 0.0
        if pattern.window_size is not None:
            out = attend_in_window(queries, keys, values, pattern.window_size, dropout)
        elif pattern.offsets is not None:
            out = attend_by_offset(queries, keys, values, pattern.offsets, pattern.keep)
        elif pattern.keep is not None:
            out = attend_to_kept(queries, keys, values, pattern.keep, dropout)
        else:
            out = attend(queries, keys, values, pattern.bias, pattern.is_causal, dropout)
        return self.to_out(rearrange(out, "b h n d -> b n (h d)"))


class CrossAttention(nn.Module):
    """Attention to a context with a learned null key in front: what is attended to where the context is masked."""

    def __init__(self, options: AttentionOptions, dim_context: int):
        super().__init__()
        self.options = options
        heads, key_heads, dim_head = options.heads, options.kv_heads, options.dim_head
        self.to_q = nn.Linear(options.dim, heads * dim_head, bias=False)
        self.to_kv = nn.Linear(dim_context, 2 * key_heads * dim_head, bias=False)
        self.null = nn.Parameter(torch.randn(2, key_heads, 1, dim_head))
        self.query_norm = HeadNorm(heads, dim_head) if options.qk_norm else None
        self.key_norm = HeadNorm(key_heads, dim_head) if options.qk_norm else None
        self.to_out = nn.Linear(heads * dim_head, options.dim, bias=False)

    def keys_values(self, context: Float[Tensor, "b m c"]) -> tuple[Float[Tensor, "b g k d"], Float[Tensor, "b g k d"]]:
        """Keys and values of the null key and the context, k = 1 + m of each."""
        projected = rearrange(self.to_kv(context), "b m (two g d) -> two b g m d", two=2, g=self.options.kv_heads)
        null = repeat(self.null.to(projected.dtype), "two g 1 d -> two b g 1 d", b=context.shape[0])
        keys, values = torch.cat((null, projected), dim=3).unbind(0)
        return (keys if self.key_norm is None else self.key_norm(keys)), values

    def forward(
        self,
        x: Float[Tensor, "b n e"],
        keys: Float[Tensor, "b g k d"],
        values: Float[Tensor, "b g k d"],
        bias: Float[Tensor, "b 1 1 k"] | None,
    ) -> Float[Tensor, "b n e"]:
        queries = rearrange(self.to_q(x), "b n (h d) -> b h n d", d=self.options.dim_head)
        if self.query_norm is not None:
            queries = self.query_norm(queries)
        dropout = self.options.dropout if self.training else 0.0
        out = attend(queries, keys, values, bias, dropout=dropout)
        return self.to_out(rearrange(out, "b h n d -> b n (h d)"))
