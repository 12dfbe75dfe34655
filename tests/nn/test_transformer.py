import subprocess
import sys

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from helicon.nn.attention import additive
from helicon.nn.transformer import FeedForward, Transformer

DIM, DEPTH = 12, 3

OPTIONS = {
    "plain": {},
    "grouped keys": {"kv_heads": 2},
    "one key head": {"kv_heads": 1},
    "qk_norm": {"qk_norm": True},
    "learned positions": {"positions": "learned", "max_seq_len": 16},
    "no positions": {"positions": "none"},
    "swiglu": {"glu": "swiglu"},
    "no gate": {"glu": None},
    "adaptive": {"norm": "adaptive", "dim_cond": 5},
    "cross": {"cross_attend": True, "dim_context": 7},
    "registers": {"registers": 3},
    "skips": {"skips": True},
    "window": {"window_size": 3},
    "window and grouped keys": {"window_size": 4, "kv_heads": 2, "qk_norm": True},
    "all": {
        "kv_heads": 2,
        "qk_norm": True,
        "norm": "adaptive",
        "dim_cond": 5,
        "cross_attend": True,
        "dim_context": 7,
        "registers": 2,
        "skips": True,
        "positions": "learned",
        "max_seq_len": 16,
    },
}
each_option = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())


def build(causal: bool = True, **options) -> Transformer:
    """Every weight random: what starts at zero would hide mistakes."""
    torch.manual_seed(0)
    network = Transformer(DIM, DEPTH, heads=4, dim_head=6, causal=causal, **options).eval()
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.copy_(torch.randn_like(parameter) * (0.3 if parameter.ndim > 1 else 1))
    return network


def conditions(options: dict, batch: int) -> dict:
    given = {}
    if "dim_cond" in options:
        given["cond"] = torch.randn(batch, options["dim_cond"])
    if "dim_context" in options:
        given["context"] = torch.randn(batch, 4, options["dim_context"])
        given["context_mask"] = torch.rand(batch, 4) < 0.5
        given["context_mask"][-1] = False
    return given


def row(given: dict, index: int) -> dict:
    return {name: value[index : index + 1] for name, value in given.items()}


def close(actual, expected):
    torch.testing.assert_close(actual, expected, atol=2e-5, rtol=2e-5)


@each_option
@torch.no_grad()
def test_cached_is_uncached(options):
    network, x = build(**options), torch.randn(2, 9, DIM)
    given = conditions(options, 2)
    later = {"cond": given["cond"]} if "cond" in given else {}
    expected = network(x, **given)
    cache = network.new_cache(2, 11, context_len=6 if "context" in given else None)
    for _ in range(2):  # the second time over the leavings of the first
        cache.reset()
        parts = [network(x[:, :4], **given, cache=cache)]
        parts += [network(x[:, i : i + 1], **later, cache=cache) for i in (4, 5)]
        cache.window = 9 + network.num_registers  # a window that holds what is filled changes nothing
        parts += [network(x[:, 6:8], **later, cache=cache), network(x[:, 8:], **later, cache=cache)]
        cache.window = cache.max_len
        close(torch.cat(parts, dim=1), expected)
    assert cache.length == 9 + network.num_registers


@each_option
@torch.no_grad()
def test_cache_from_the_first_token(options):
    network, x = build(**options), torch.randn(1, 3, DIM)
    given = conditions(options, 1)
    later = {"cond": given["cond"]} if "cond" in given else {}
    cache = network.new_cache(1, 3, context_len=4 if "context" in given else None)
    steps = [network(x[:, i : i + 1], **(later if i else given), cache=cache) for i in range(3)]
    close(torch.cat(steps, dim=1), network(x, **given))


@pytest.mark.parametrize("side", ["left", "right"])
@each_option
@torch.no_grad()
def test_unequal_prompts_in_a_cache(options, side):
    """Rows of 2 and 5 tokens, then three steps, against each row alone and uncached."""
    network, lengths = build(**options), (2, 5)
    given = conditions(options, 2)
    later = {"cond": given["cond"]} if "cond" in given else {}
    rows = [torch.randn(1, length + 3, DIM) for length in lengths]
    prompt, mask = torch.randn(2, 5, DIM), torch.zeros(2, 5, dtype=torch.bool)
    for i, length in enumerate(lengths):
        where = slice(5 - length, 5) if side == "left" else slice(0, length)
        prompt[i, where], mask[i, where] = rows[i][0, :length], True
    cache = network.new_cache(2, 8, context_len=4 if "context" in given else None)
    prefilled = network(prompt, mask, **given, cache=cache)
    steps = [
        network(torch.cat([r[:, length + k : length + k + 1] for r, length in zip(rows, lengths, strict=True)]), **later, cache=cache)
        for k in range(3)
    ]  # fmt: skip
    for i in range(2):
        expected = network(rows[i], **row(given, i))
        close(torch.cat([prefilled[i][mask[i]], *(step[i] for step in steps)]), expected[0])


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("side", ["left", "right"])
@each_option
@torch.no_grad()
def test_padded_is_single(options, side, causal):
    network, given = build(causal or "window_size" in options, **options), conditions(options, 3)
    x, mask = torch.randn(3, 6, DIM), torch.zeros(3, 6, dtype=torch.bool)
    for i, length in enumerate((6, 1, 4)):
        mask[i, 6 - length :] = side == "left"
        mask[i, :length] |= side == "right"
    out = network(x, mask, **given)
    assert out.isfinite().all()
    for i in range(3):
        close(out[i][mask[i]], network(x[i : i + 1, mask[i]], **row(given, i))[0])


@torch.no_grad()
def test_padding_on_the_right_needs_no_mask_in_a_causal_model():
    network, x = build(), torch.randn(2, 6, DIM)
    mask = torch.tensor([[True] * 6, [True] * 3 + [False] * 3])
    close(network(x)[mask], network(x, mask)[mask])


@each_option
@torch.no_grad()
def test_nothing_leaks_from_the_future(options):
    network, x, given = build(**options), torch.randn(2, 7, DIM), conditions(options, 2)
    changed = x.clone()
    changed[:, 4] += 1
    out, other = network(x, **given), network(changed, **given)
    assert torch.equal(out[:, :4], other[:, :4])
    assert ((out - other)[:, 4:].abs().amax(dim=-1) > 1e-4).all()


@torch.no_grad()
def test_a_window_ends_what_a_token_sees():
    """Through `DEPTH` layers a token sees DEPTH * (window - 1) back, in one pass, with a bias and with a cache."""
    network, x = build(window_size=3), torch.randn(2, 12, DIM)
    changed = x.clone()
    changed[:, 2] += 1
    difference = (network(x) - network(changed)).abs().amax(dim=(0, 2))
    assert (difference > 1e-5).tolist() == [2 <= i <= 2 + 2 * DEPTH for i in range(12)]
    close(network(x, bias=torch.zeros(1, 1, 12, 12)), network(x))


@torch.no_grad()
def test_a_cache_of_a_window_goes_on_for_ever():
    """Slots for a window and a chunk are enough for a sequence of any length."""
    network, x = build(window_size=4), torch.randn(2, 23, DIM)
    cache, parts, start, filled = network.new_cache(2, 7), [], 0, 0
    for count in (2, 1, 4, 3, 1, 1, 4, 4, 3):
        parts.append(network(x[:, start : start + count], cache=cache))
        start, filled = start + count, min(filled + count, 3)
        cache.keep_last(filled)
    close(torch.cat(parts, dim=1), network(x))


@torch.no_grad()
def test_a_bidirectional_model_looks_both_ways():
    network, x = build(causal=False), torch.randn(1, 5, DIM)
    changed = x.clone()
    changed[:, 4] += 1
    assert ((network(x) - network(changed)).abs().amax(dim=-1) > 1e-4).all()


@torch.no_grad()
def test_order_matters_with_positions_and_only_then():
    x, last = torch.randn(1, 6, DIM), torch.tensor([2, 0, 1, 4, 3, 5])
    for positions, matters in (
        ({"positions": "rotary"}, True),
        (OPTIONS["learned positions"], True),
        (OPTIONS["no positions"], False),
    ):
        network = build(causal=False, **positions)
        difference = (network(x)[:, 5] - network(x[:, last])[:, 5]).abs().max()
        assert (difference > 1e-4) == matters  # fmt: skip


@torch.no_grad()
def test_hidden_keys_keep_their_positions_when_ids_are_given():
    """A token without influence (a hidden key) may be cut out, if the ids of the others stay."""
    network, x = build(), torch.randn(1, 5, DIM)
    mask, ids = torch.tensor([[True, True, False, True, True]]), torch.arange(5)[None]
    close(network(x, mask, positions=ids)[mask], network(x[mask][None], positions=ids[:, mask[0]])[0])
    assert (network(x, mask, positions=ids)[:, 4] - network(x, mask)[:, 4]).abs().max() > 1e-4


def hidden_keys(batch: int, n: int) -> torch.Tensor:
    mask = torch.rand(batch, n, generator=torch.Generator().manual_seed(0)) < 0.7
    mask[:, 0] = True
    return mask


@pytest.mark.parametrize("name", ["plain", "grouped keys", "one key head", "qk_norm", "learned positions", "cross"])
def test_hidden_keys_are_a_bias(name):
    """As features of the keys or as numbers added to the logits: the same outputs and the same gradients."""
    options = OPTIONS[name]
    network, given = build(**options), {**conditions(options, 3), "positions": torch.arange(9)[None]}
    x, mask = torch.randn(3, 9, DIM, requires_grad=True), hidden_keys(3, 9)
    bias = additive(mask, torch.float32)[:, None, None].expand(-1, -1, 9, -1)
    out, expected = network(x, mask, **given), network(x, bias=bias, **given)
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)
    inputs, weights = [x, *network.parameters()], torch.randn_like(out)
    gradients = [torch.autograd.grad(result, inputs, weights) for result in (out, expected)]
    for actual, wanted in zip(*gradients, strict=True):
        size = wanted.abs().max()
        torch.testing.assert_close(actual / size, wanted / size, atol=1e-5, rtol=0)
    with torch.autocast("cpu", torch.bfloat16):
        low, low_expected = network(x, mask, **given), network(x, bias=bias, **given)
    torch.testing.assert_close(low, low_expected, atol=0.2, rtol=0.1)


@torch.no_grad()
def test_nothing_leaks_from_the_future_where_all_before_is_hidden():
    network, x, ids = build(), torch.randn(2, 7, DIM), torch.arange(7)[None]
    mask = torch.tensor([[False, False, True, False, True, True, True]] * 2)
    changed = x.clone()
    changed[:, 4] += 1
    out, other = network(x, mask, positions=ids), network(changed, mask, positions=ids)
    assert out.isfinite().all() and torch.equal(out[:, :4], other[:, :4])


class Shapes(TorchDispatchMode):
    """Notes the shapes of all results."""

    def __init__(self):
        super().__init__()
        self.seen = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        results = function(*args, **(kwargs or {}))
        several = results if isinstance(results, tuple | list) else (results,)
        self.seen |= {tuple(x.shape) for x in several if isinstance(x, torch.Tensor)}
        return results


@pytest.mark.parametrize("is_hidden", [False, True])
def test_a_causal_pass_writes_nothing_of_n_by_n(is_hidden):
    network, x = build(), torch.randn(2, 37, DIM)
    mask = hidden_keys(2, 37) if is_hidden else None
    with Shapes() as shapes:
        network(x, mask, positions=torch.arange(37)[None]).sum().backward()
    assert shapes.seen and not any(shape[-2:] == (37, 37) for shape in shapes.seen)
    with Shapes() as shapes:
        network(x, mask, bias=torch.zeros(1, 1, 37, 37))
    assert (2 if is_hidden else 1, 1, 37, 37) in shapes.seen  # the test would see it


@torch.no_grad()
def test_masked_context_is_no_context():
    options = OPTIONS["cross"]
    network, x, context = build(**options), torch.randn(2, 5, DIM), torch.randn(2, 4, 7)
    nothing = torch.zeros(2, 4, dtype=torch.bool)
    empty = network(x, context=context, context_mask=nothing)
    assert empty.isfinite().all()
    close(empty, network(x, context=torch.randn(2, 9, 7), context_mask=torch.zeros(2, 9, dtype=torch.bool)))
    assert (empty - network(x, context=context)).abs().max() > 1e-3
    half = torch.tensor([[True, True, False, False]] * 2)
    close(network(x, context=context, context_mask=half), network(x, context=context[:, :2]))


@pytest.mark.parametrize("options", [OPTIONS["cross"], OPTIONS["all"]], ids=["cross", "all"])
@pytest.mark.parametrize("causal", [True, False])
@torch.no_grad()
def test_a_context_read_once_serves_many_passes(causal, options):
    network, given = build(causal, **options), conditions(options, 2)
    keys = network.read_context(given["context"], given["context_mask"])
    rest = {name: value for name, value in given.items() if not name.startswith("context")}
    for x in (torch.randn(2, 5, DIM), torch.randn(2, 3, DIM)):
        close(network(x, context_keys=keys, **rest), network(x, **given))
    unmasked = network.read_context(given["context"])
    close(network(x, context_keys=unmasked, **rest), network(x, context=given["context"], **rest))


@pytest.mark.parametrize("causal", [True, False])
@torch.no_grad()
def test_bias_is_added_to_the_logits(causal):
    network, x = build(causal), torch.randn(2, 4, DIM)
    hide = torch.zeros(1, 1, 4, 4)
    hide[..., 1] = -1e4
    mask = torch.tensor([[True, False, True, True]] * 2)
    close(network(x, bias=hide)[mask], network(x, mask, positions=torch.arange(4)[None])[mask])
    per_head = torch.randn(1, 4, 4, 4)
    assert (network(x, bias=per_head) - network(x)).abs().max() > 1e-3


def test_adaptive_starts_as_the_identity_and_learns():
    network = Transformer(DIM, 2, heads=2, dim_head=6, norm="adaptive", dim_cond=5)
    x, cond = torch.randn(2, 4, DIM), torch.randn(2, 5)
    out = network(x, cond=cond)
    close(out, network.final_norm(x))
    out.square().mul(torch.randn_like(out)).sum().backward()
    assert network.modulation.shared.weight.grad.abs().max() > 0
    assert all(layer.abs().max() > 0 for layer in network.modulation.offsets.grad)


def test_skips_start_as_the_plain_network():
    torch.manual_seed(0)
    network, x = Transformer(DIM, 5, heads=2, dim_head=6, skips=True), torch.randn(1, 4, DIM)
    assert [layer.skip is not None for layer in network.layers] == [False, False, False, True, True]
    before = network(x)
    with torch.no_grad():
        network.layers[3].skip.weight.normal_()
    assert (network(x) - before).abs().max() > 1e-3
    torch.manual_seed(0)
    plain = Transformer(DIM, 5, heads=2, dim_head=6)
    plain.load_state_dict({k: v for k, v in network.state_dict().items() if "skip" not in k})
    close(plain(x), before)


def test_depth_does_not_change_the_scale_at_the_start():
    torch.manual_seed(0)
    for depth in (2, 24):
        network, x = Transformer(64, depth, heads=4, dim_head=16), torch.randn(2, 16, 64)
        seen = []
        network.final_norm.register_forward_pre_hook(lambda _, inputs, seen=seen: seen.append(inputs[0]))
        network(x)
        assert 1.0 < seen[0].std() < 2.0


def test_qk_norm_does_not_sharpen_attention_at_the_start():
    """A scale on top of the norm made attention one-hot from the first step (entropy .06 of 5.3 nats)."""
    torch.manual_seed(0)
    network = Transformer(64, 1, heads=4, dim_head=16, qk_norm=True, positions="none")
    attention, x = network.layers[0].attention.block, 10 * torch.randn(2, 200, 64)
    heads = attention.to_qkv(x).unflatten(-1, (12, 16)).transpose(1, 2)
    queries, keys = attention.norm(heads[:, :8]).chunk(2, dim=1)
    weights = (queries @ keys.transpose(-1, -2) * 16**-0.5).softmax(dim=-1)
    assert -(weights * weights.log()).sum(dim=-1).mean() > 4.5  # of 5.3 nats


@each_option
def test_checkpointed_activations_give_the_same_gradients(options):
    given, gradients = conditions(options, 2), []
    for recompute in (False, True):
        network = build(dropout=0.2, attn_dropout=0.2, checkpoint_activations=recompute, **options).train()
        torch.manual_seed(1)
        network(torch.ones(2, 5, DIM), **given).square().sum().backward()
        gradients.append([parameter.grad for parameter in network.parameters()])
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other)


@each_option
def test_every_weight_is_used(options):
    network = build(**options)
    network(torch.randn(2, 5, DIM), **conditions(options, 2)).square().sum().backward()
    unused = {name for name, parameter in network.named_parameters() if parameter.grad is None}
    assert not unused


@pytest.mark.parametrize("glu", ["geglu", "swiglu"])
def test_the_gate_is_the_same_with_and_without_gradients(glu):
    network, x = build(glu=glu), torch.randn(1, 3, DIM)
    with torch.no_grad():
        expected = network(x)
    close(network(x), expected)


def test_dropout_acts_in_training_alone():
    for options in ({"dropout": 0.5}, {"attn_dropout": 0.5}):
        network, x = build(**options), torch.randn(1, 8, DIM)
        assert torch.equal(network(x), network(x))
        network.train()
        assert not torch.equal(network(x), network(x))


def test_autocast():
    options = OPTIONS["all"]
    network, x, given = build(**options), torch.randn(2, 5, DIM), conditions(options, 2)
    mask = torch.tensor([[True] * 5, [False, False, True, True, True]])
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        out = network(x, mask, **given)
        cache = network.new_cache(2, 5, context_len=4)
        assert cache.keys[0].dtype == torch.bfloat16
        cached = network(x, mask, **given, cache=cache)
    assert out.dtype == torch.float32  # the residual stream has the type of the input
    torch.testing.assert_close(out[mask], network(x, mask, **given)[mask], atol=0.2, rtol=0.1)
    torch.testing.assert_close(cached[mask], out[mask], atol=0.2, rtol=0.1)


def test_same_seed_same_weights_and_no_biases():
    first, second = build(**OPTIONS["all"]), build(**OPTIONS["all"])
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    assert not any(name.endswith("bias") for name, _ in first.named_parameters())


def construct_unchecked(cls: type, *args, **kwargs):
    """As for a user without a type checker; under test the annotations would refuse an unknown name first."""
    constructor = getattr(cls.__init__, "__wrapped__", cls.__init__)
    return constructor(cls.__new__(cls), *args, **kwargs)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"kv_heads": 3}, "kv_heads=3"),
        ({"positions": "sinus"}, "sinus"),
        ({"positions": "learned"}, "max_seq_len"),
        ({"max_seq_len": 4}, "max_seq_len=4"),
        ({"norm": "adaptive"}, "dim_cond"),
        ({"dim_cond": 4}, "dim_cond=4"),
        ({"norm": "layer"}, "layer"),
        ({"dim_context": 4}, "dim_context=4"),
        ({"window_size": 4}, "window_size=4"),
        ({"window_size": 0, "causal": True}, "window_size=0"),
        ({"window_size": 4, "causal": True, "registers": 2}, "registers=2"),
    ],
)
def test_senseless_options_are_refused(options, said):
    with pytest.raises(ValueError, match=said):
        construct_unchecked(Transformer, DIM, DEPTH, heads=4, dim_head=6, **options)


def test_an_unknown_gate_is_refused():
    with pytest.raises(ValueError, match="reglu"):
        construct_unchecked(FeedForward, DIM, 4, "reglu")


def test_senseless_inputs_are_refused():
    x, cond, context = torch.randn(2, 5, DIM), torch.randn(2, 5), torch.randn(2, 4, 7)
    with pytest.raises(ValueError, match="causal=True"):
        build(causal=False).new_cache(2, 8)
    with pytest.raises(ValueError, match="cond belongs"):
        build()(x, cond=cond)
    with pytest.raises(ValueError, match="cond belongs"):
        build(**OPTIONS["adaptive"])(x)
    with pytest.raises(ValueError, match="context belongs"):
        build(**OPTIONS["cross"])(x)
    with pytest.raises(ValueError, match="context belongs"):
        build()(x, context=context)
    cross = build(**OPTIONS["cross"])
    with pytest.raises(ValueError, match="context_keys stand in the place"):
        cross(x, context=context, context_keys=cross.read_context(context))
    with pytest.raises(ValueError, match="cross_attend=True"):
        build().read_context(context)
    with pytest.raises(ValueError, match="learned positions"):
        build(**OPTIONS["learned positions"])(torch.randn(1, 17, DIM))
    with pytest.raises(ValueError, match="learned positions"):
        build(**OPTIONS["learned positions"]).new_cache(1, 17)
    with pytest.raises(ValueError, match="do not fit"):
        build()(x, cache=build().new_cache(2, 4))
    with pytest.raises(ValueError, match="context_len"):
        build(**OPTIONS["cross"]).new_cache(2, 4)
    with pytest.raises(ValueError, match="positions are counted"):
        build(window_size=2)(x, positions=torch.arange(5)[None])
    with pytest.raises(ValueError, match="bias is for"):
        build(registers=1)(x, bias=torch.zeros(1, 1, 5, 5))


SETUP = """
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from helicon.nn.transformer import Transformer, run_layer

options = dict(heads=4, dim_head=6, kv_heads=2, causal=True, qk_norm=True, cross_attend=True)
given = dict(context=torch.randn(2, 4, 12), context_mask=torch.rand(2, 4) < 0.5)
x, mask = torch.randn(2, 6, 12), torch.tensor([[True] * 6, [False] * 2 + [True] * 4])
"""

WHOLE = """
network = Transformer(12, 2, **options, norm="adaptive", dim_cond=5, registers=2, skips=True)
given["cond"] = torch.randn(2, 5)
compiled = torch.compile(network, backend="aot_eager", fullgraph=True)
for inputs in ((x,), (x, mask)):
    expected, out = network(*inputs, **given), compiled(*inputs, **given)
    torch.testing.assert_close(out, expected)
    out.sum().backward()
"""

LAYER_BY_LAYER = """
network = Transformer(12, 3, **options).eval()
counter = CompileCounterWithBackend("aot_eager")
layer = torch.compile(run_layer, backend=counter, fullgraph=True)
with torch.no_grad():
    cache = network.new_cache(2, 64, context_len=4)
    parts = [network(x[:, :3], **given, cache=cache)]
    for i, window in zip(range(3, 6), (8, 16, 32)):
        cache.window = window
        parts.append(network(x[:, i : i + 1].contiguous(), cache=cache, run_layer=layer))
    torch.testing.assert_close(torch.cat(parts, dim=1), network(x, **given))
assert counter.frame_count == 2, counter.frame_count  # all layers share one graph, and all further windows a second
"""


@pytest.mark.slow
@pytest.mark.parametrize("script", [WHOLE, LAYER_BY_LAYER], ids=["whole", "layer by layer"])
def test_compiles_without_a_break(script):
    """In a process of its own, where no type checker wraps every function."""
    subprocess.run([sys.executable, "-W", "error::UserWarning", "-c", SETUP + script], check=True, timeout=300)
