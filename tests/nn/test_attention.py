import pytest
import torch

from helicon.nn.attention import (
    MASKED,
    AttentionOptions,
    CrossAttention,
    KVCache,
    Pattern,
    SelfAttention,
    additive,
    attend,
    attend_in_window,
    attend_to_kept,
    causal_mask,
    window_mask,
)
from helicon.nn.positions import Rotation


def naive(queries, keys, values, allowed=None, bias=None):
    """Attention by its definition, one einsum a line; key heads are repeated."""
    repeats = queries.shape[1] // keys.shape[1]
    keys, values = keys.repeat_interleave(repeats, dim=1), values.repeat_interleave(repeats, dim=1)
    logits = torch.einsum("bhid,bhjd->bhij", queries, keys) * queries.shape[-1] ** -0.5
    logits = logits if bias is None else logits + bias
    logits = logits if allowed is None else logits.masked_fill(~allowed, -torch.inf)
    return torch.einsum("bhij,bhjd->bhid", logits.softmax(dim=-1), values)


@pytest.mark.parametrize("kv_heads", [1, 2, 6])
@pytest.mark.parametrize("queries_count", [1, 5])
def test_attend_is_its_definition(kv_heads, queries_count):
    queries = torch.randn(2, 6, queries_count, 8)
    keys, values = torch.randn(2, kv_heads, 7, 8), torch.randn(2, kv_heads, 7, 8)
    allowed = torch.rand(2, 1, queries_count, 7) < 0.6
    allowed[..., 0] = True
    torch.testing.assert_close(attend(queries, keys, values), naive(queries, keys, values))
    biased = attend(queries, keys, values, additive(allowed, torch.float32))
    torch.testing.assert_close(biased, naive(queries, keys, values, allowed))
    per_head = torch.randn(1, 6, queries_count, 7)
    torch.testing.assert_close(attend(queries, keys, values, per_head), naive(queries, keys, values, bias=per_head))


@pytest.mark.parametrize("kv_heads", [1, 4])
@pytest.mark.parametrize(("n", "window_size"), [(1, 1), (7, 1), (7, 3), (12, 4), (13, 4), (3, 5)])
def test_attention_in_a_window_is_its_definition(n, window_size, kv_heads):
    queries = torch.randn(2, 4, n, 8, requires_grad=True)
    keys, values = torch.randn(2, kv_heads, n, 8), torch.randn(2, kv_heads, n, 8)
    distance = torch.arange(n)[:, None] - torch.arange(n)
    allowed = (distance >= 0) & (distance < window_size)
    positions = torch.arange(n)[None]
    assert (causal_mask(n, queries.device) & window_mask(positions, positions, window_size))[0, 0].equal(allowed)
    out, expected = attend_in_window(queries, keys, values, window_size), naive(queries, keys, values, allowed)
    torch.testing.assert_close(out, expected)
    given = torch.randn_like(out)
    actual_gradient, expected_gradient = (torch.autograd.grad(x, queries, given)[0] for x in (out, expected))
    torch.testing.assert_close(actual_gradient, expected_gradient)


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("dim_head", [6, 8, 17])
def test_causal_attention_to_kept_keys_is_biased_attention(dim_head, kv_heads):
    queries, keys, values = (
        torch.randn(3, heads, 9, dim_head, requires_grad=True) for heads in (4, kv_heads, kv_heads)
    )
    keep = torch.rand(3, 9) < 0.6
    keep[:, 0] = True
    bias = additive(keep[:, None, None] & causal_mask(9, queries.device), torch.float32)
    out, expected = attend_to_kept(queries, keys, values, keep), attend(queries, keys, values, bias)
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)
    given = torch.randn_like(out)
    gradients = (torch.autograd.grad(x, (queries, keys, values), given) for x in (out, expected))
    for actual, wanted in zip(*gradients, strict=True):
        torch.testing.assert_close(actual, wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_with_all_its_keys_hidden_a_query_attends_to_its_past(dtype):
    queries, keys, values = (torch.randn(2, 2, 5, 8, dtype=dtype, requires_grad=True) for _ in range(3))
    keep = torch.tensor([[False, False, True, False, True], [False] * 5])
    out = attend_to_kept(queries, keys, values, keep)
    out.float().square().sum().backward()
    assert out.isfinite().all() and all(x.grad.isfinite().all() for x in (queries, keys, values))
    past = naive(queries, keys, values, causal_mask(5, queries.device))
    torch.testing.assert_close(out[0, :, :2], past[0, :, :2], atol=0.02, rtol=0.02)
    torch.testing.assert_close(out[1], past[1], atol=0.02, rtol=0.02)


def test_a_cache_gives_up_its_oldest_slots():
    shape = dict(depth=2, batch=2, kv_heads=1, dim_head=3)
    cache = KVCache(**shape, max_len=6, window_size=3, device=torch.device("cpu"), dtype=torch.float32)
    written = torch.arange(5.0)
    for buffer in (*cache.keys, *cache.values):
        buffer[:, :, :5] = written[:, None]
    mask = torch.tensor([[False, True, True, True, True], [True, True, False, True, True]])
    cache.mark(cache.next_slots(5), mask, torch.tensor([[0, 0, 1, 2, 3], [0, 1, 1, 2, 3]]))
    cache.advance(5)
    cache.keep_last(3)
    assert all(buffer[1, 0, :3, 0].tolist() == [2.0, 3.0, 4.0] for buffer in (*cache.keys, *cache.values))
    assert cache.valid.tolist() == [[True, True, True, False, False, False], [False, True, True, False, False, False]]
    assert cache.next_slots(2).tolist() == [3, 4]
    seen = cache.mark(cache.next_slots(1), torch.ones(2, 1, dtype=torch.bool), torch.tensor([[4], [4]]))
    assert seen[:, 0, 0].tolist() == [[False, True, True, True, False, False]] * 2  # position 1 is out of the window


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_nothing_to_attend_to_is_finite(dtype):
    bias = additive(torch.zeros(2, 1, 1, 4, dtype=torch.bool), dtype)
    assert bias.isfinite().all() and bias.dtype == dtype
    x = torch.randn(2, 3, 4, 8, dtype=dtype, requires_grad=True)
    out = attend(x, x, x, bias)
    out.float().sum().backward()
    assert out.isfinite().all() and x.grad.isfinite().all()


def test_masked_weight_is_exactly_zero():
    assert torch.tensor([0.0, MASKED]).softmax(dim=0)[1] == 0


def test_self_attention_against_naive():
    torch.manual_seed(0)
    attention = SelfAttention(AttentionOptions(dim=10, heads=4, dim_head=6, kv_heads=2, qk_norm=True, dropout=0.0))
    torch.nn.init.normal_(attention.norm.weight)
    x, positions = torch.randn(2, 5, 10), torch.arange(5)[None]
    rotation = Rotation(positions, 6)
    out = attention(x, Pattern(rotation, None, is_causal=True))

    def heads(weight, scale):
        projected = (x @ weight.T).unflatten(-1, (-1, 6)).transpose(1, 2)
        if scale is not None:
            projected = projected / (projected.square().mean(-1, keepdim=True) + 1e-6).sqrt() * scale
        return projected

    weights, scales = attention.to_qkv.weight.split((24, 12, 12)), attention.norm.weight.split((4, 2))
    queries, keys = (rotation(heads(weight, scale)) for weight, scale in zip(weights[:2], scales, strict=True))
    expected = naive(queries, keys, heads(weights[2], None), causal_mask(5, x.device)[None, None])
    torch.testing.assert_close(out, expected.transpose(1, 2).flatten(2) @ attention.to_out.weight.T)


@pytest.mark.parametrize("qk_norm", [False, True])
def test_fully_masked_context_gives_the_null_value(qk_norm):
    cross = CrossAttention(AttentionOptions(10, 4, 6, 2, qk_norm, 0.0), dim_context=7)
    x, context = torch.randn(3, 5, 10), torch.randn(3, 4, 7)
    keys, values = cross.keys_values(context)
    allowed = torch.tensor([True, False, False, False, False]).expand(3, 1, 1, 5)
    out = cross(x, keys, values, additive(allowed, torch.float32))
    null_value = cross.null[1, :, 0].repeat_interleave(2, dim=0).flatten()  # each key head serves two heads
    torch.testing.assert_close(out, (cross.to_out.weight @ null_value).expand_as(out))
