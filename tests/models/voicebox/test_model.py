import math
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

from helicon.models.voicebox.model import (
    ConvolvedPositions,
    Prepared,
    SpokenTokens,
    VoiceBox,
    masked_error,
    repeated,
    span_mask,
    stretched,
)
from off_host import OffHost

TOKENS, FEATURES = 11, 5
SIZES: dict[str, Any] = {"dim": 20, "depth": 3, "heads": 3, "dim_head": 6, "num_register_tokens": 2, "dim_cond_emb": 12}
SIZES |= {"time_hidden_dim": 14, "conv_pos_embed_kernel_size": 5, "text_depth": 2}
KINDS: dict[str, dict[str, Any]] = {
    "free": {},
    "frames": {"alignment": "frames"},
    "no text": {"condition_on_text": False},
    "plain": {"use_unet_skip_connection": False, "attn_qk_norm": False, "num_register_tokens": 0, "text_depth": 0},
    "grouped": {"conv_pos_embed_groups": 4, "checkpoint_activations": True},
}
each_kind = pytest.mark.parametrize("options", KINDS.values(), ids=KINDS.keys())


def build(**options: Any) -> VoiceBox:
    """Every weight random: what starts at zero would hide mistakes."""
    torch.manual_seed(0)
    tokens = {} if options.get("condition_on_text") is False else {"num_cond_tokens": TOKENS}
    network = VoiceBox(dim_in=FEATURES, **tokens, **SIZES | options).eval()
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.copy_(torch.randn_like(parameter) * (0.3 if parameter.ndim > 1 else 1))
    return network


def inputs(network: VoiceBox, rows: int = 2, n: int = 9, m: int = 4, seed: int = 1) -> dict[str, Any]:
    torch.manual_seed(seed)
    given = {"x": torch.randn(rows, n, FEATURES), "times": torch.rand(rows), "cond": torch.randn(rows, n, FEATURES)}
    given["cond_mask"] = torch.rand(rows, n) < 0.6
    if network.condition_on_text:
        given["cond_token_ids"] = torch.randint(TOKENS, (rows, m))
    return given


def close(actual: Tensor, expected: Tensor, atol: float = 1e-5) -> None:
    torch.testing.assert_close(actual, expected, atol=atol, rtol=1e-5)


@each_kind
def test_a_batch_of_unequal_lengths_is_each_row_alone(options: dict[str, Any]) -> None:
    """Whatever stands in the padding, NaN too: in the velocity, the loss and its gradient."""
    network, lengths, said = build(**options), (9, 4), (3, 2)
    given = inputs(network)
    target = torch.randn(2, 9, FEATURES)
    mask = torch.arange(9) < torch.tensor(lengths)[:, None]
    padded = {**given, **{name: given[name].masked_fill(~mask[..., None], float("nan")) for name in ("x", "cond")}}
    if "cond_token_ids" in given:
        ids = padded["cond_token_ids"] = given["cond_token_ids"].clone()
        ids[0, said[0] :], ids[1, said[1] :] = -1, -1

    def alone(row: int, **more: Tensor) -> Tensor:
        cut = {name: value[row : row + 1, : lengths[row]] for name, value in given.items() if value.ndim > 1}
        cut["times"] = given["times"][row : row + 1]
        if "cond_token_ids" in given:
            cut["cond_token_ids"] = given["cond_token_ids"][row : row + 1, : said[row]]
        return network(**cut, **{name: value[row : row + 1, : lengths[row]] for name, value in more.items()})

    found = network(**padded, self_attn_mask=mask)
    for row, length in enumerate(lengths):
        close(found[row : row + 1, :length], alone(row))
    assert (found[1, 4:] == 0).all()
    loss = network(**padded, self_attn_mask=mask, target=target.masked_fill(~mask[..., None], float("nan")))
    counts = [int(given["cond_mask"][row, :length].sum()) for row, length in enumerate(lengths)]
    expected = sum(count * alone(row, target=target) for row, count in enumerate(counts)) / sum(counts)
    close(loss, expected)
    names, weights = zip(*network.named_parameters(), strict=True)
    gradients = zip(torch.autograd.grad(loss, weights), torch.autograd.grad(expected, weights), strict=True)
    for name, (mine, theirs) in zip(names, gradients, strict=True):
        assert torch.allclose(mine, theirs, atol=1e-5, rtol=1e-4), name


@each_kind
@torch.no_grad()
def test_prepared_once_and_evaluated_twice_is_forward(options: dict[str, Any]) -> None:
    network = build(**options)
    given = inputs(network)
    x, times = given.pop("x"), given.pop("times")
    mask = torch.arange(9) < torch.tensor([9, 7])[:, None]
    prepared = network.prepare(given.pop("cond_mask"), **given, self_attn_mask=mask)
    for later in (x, -x):
        at = {"times": times, "self_attn_mask": mask, "cond_mask": prepared.hidden, **given}
        close(network.velocity(prepared, later, times), network(later, **at))
    one = torch.tensor(0.25)
    close(network.velocity(prepared, x, one), network.velocity(prepared, x, torch.full((2,), 0.25)))


@each_kind
@torch.no_grad()
def test_guidance_in_one_batch_is_two_calls(options: dict[str, Any]) -> None:
    network = build(**options)
    given = inputs(network)
    cond, null = network(**given), network(**given, cond_drop_prob=1.0)
    assert (cond - null).abs().max() > 0.1
    close(network.forward_with_cond_scale(**given, cond_scale=2.5), null + 2.5 * (cond - null))
    close(network.forward_with_cond_scale(**given), cond)
    nothing = network(given["x"], times=given["times"])  # a dropped condition is one that was never given
    close(null, nothing)


@torch.no_grad()
def test_only_what_is_not_hidden_is_context() -> None:
    network = build()
    given = inputs(network)
    expected, hidden = network(**given), given["cond_mask"]
    other = torch.randn_like(given["cond"])
    assert torch.equal(network(**given | {"cond": torch.where(hidden[..., None], other, given["cond"])}), expected)
    for row in range(2):
        changed = given["cond"].clone()
        changed[row, (~hidden[row]).nonzero()[0]] += 1
        found = network(**given | {"cond": changed})
        assert (found[row] - expected[row]).abs().amin() > 1e-5  # every frame hears of it
        assert torch.equal(found[1 - row], expected[1 - row])


@pytest.mark.parametrize("alignment", ["free", "frames"])
@torch.no_grad()
def test_nothing_said_and_nothing_given(alignment: str) -> None:
    network = build(alignment=alignment)
    given, target = inputs(network), torch.randn(2, 9, FEATURES)
    x, times = given["x"], given["times"]
    expected = network(x, times=times)
    for silence in (torch.full((2, 3), -1), torch.zeros(2, 0, dtype=torch.long)):
        close(network(x, times=times, cond_token_ids=silence), expected)
    loss = network(x, times=times, target=target)  # without a context all frames are hidden
    close(loss, masked_error(expected, target, torch.ones(2, 9, dtype=torch.bool)))


@torch.no_grad()
def test_silence_is_no_hidden_frame() -> None:
    network = build()
    given = inputs(network) | {"cond": torch.zeros(2, 9, FEATURES)}
    seen = network(**given | {"cond_mask": torch.zeros(2, 9, dtype=torch.bool)})
    assert (seen - network(**given | {"cond_mask": torch.ones(2, 9, dtype=torch.bool)})).abs().max() > 0.1


@pytest.mark.parametrize("alignment", ["free", "frames"])
@torch.no_grad()
def test_every_token_reaches_every_frame_and_their_order_matters(alignment: str) -> None:
    network = build(alignment=alignment)
    given = inputs(network, rows=1)
    given["cond_token_ids"] = torch.tensor([[3, 1, 4, 5]])
    expected = network(**given)
    for ids in ([2, 1, 4, 5], [3, 1, 4, 2], [1, 3, 4, 5], [3, 1, 4, 5, 5], [3, 1, 4]):
        found = network(**given | {"cond_token_ids": torch.tensor([ids])})
        assert (found - expected).abs().amax(dim=-1).min() > 1e-5, ids


def test_tokens_are_stretched_exactly_for_any_pair_of_rates() -> None:
    place = stretched(torch.tensor([100]), torch.tensor([150]), 150)[0]  # 50 tokens and 75 frames a second
    assert place.tolist() == [math.floor((frame + 0.5) / 1.5) for frame in range(150)]
    for m in (1, 2, 3, 7, 50):
        for n in (1, 2, 5, 7, 64):
            place = stretched(torch.tensor([m]), torch.tensor([n]), n)[0]
            counts = place.bincount(minlength=m)
            assert place.tolist() == sorted(place.tolist()) and len(place) == n and counts.numel() == m
            assert counts.min() >= n // m and counts.max() <= -(-n // m)
    mixed = stretched(torch.tensor([3, 2]), torch.tensor([6, 4]), 6)  # by their own lengths, not those of the batch
    assert mixed[0].tolist() == [0, 0, 1, 1, 2, 2] and mixed[1, :4].tolist() == [0, 0, 1, 1]


@torch.no_grad()
def test_frames_have_the_embedding_of_their_token_and_filler_follows_free_text() -> None:
    tokens = SpokenTokens(TOKENS, 6, 0, "frames")
    ids = torch.tensor([[3, 7, -1], [5, -1, -1], [-1, -1, -1]])
    frames = torch.arange(4) < torch.tensor([4, 3, 2])[:, None]
    table = tokens.embedding.weight
    found = tokens(ids, frames)
    close(found[0], table[[3, 3, 7, 7]])
    close(found[1, :3], table[[5, 5, 5]])
    close(found[2, :2], table[[TOKENS, TOKENS]])
    free = SpokenTokens(TOKENS, 6, 0, "free")
    table, found = free.embedding.weight, free(ids, frames)
    places = found[0] - table[[3, 7, TOKENS, TOKENS]]
    close(found[1] - table[[5, TOKENS, TOKENS, TOKENS]], places)
    assert places.unique(dim=0).shape[0] == 4
    close(free(ids, frames[:, :2]), found[:, :2])  # a text longer than its frames is cut


def test_durations_repeat_tokens() -> None:
    ids = torch.tensor([[4, 2, 9], [7, 1, -1]])
    durations = torch.tensor([[2, 0, 3], [1, 2, 5]])
    assert repeated(ids, durations, 6).tolist() == [[4, 4, 9, 9, 9, -1], [7, 1, 1, -1, -1, -1]]


def test_spans_are_single_runs_of_the_asked_share_anywhere_in_the_row() -> None:
    low, high = 0.7, 0.9
    lengths = torch.tensor([40, 25, 7]).repeat(2000)
    spans = span_mask(lengths, 40, (low, high), torch.Generator().manual_seed(0))
    starts = (spans & ~torch.nn.functional.pad(spans, (1, 0))[:, :-1]).sum(dim=1)
    assert (starts == 1).all()
    counts = spans.sum(dim=1)
    assert ((counts >= low * lengths - 0.5) & (counts <= high * lengths + 0.5)).all()
    assert not (spans & (torch.arange(40) >= lengths[:, None])).any()
    share = (counts / lengths)[::3]
    assert share.mean().item() == pytest.approx((low + high) / 2, abs=0.01) and share.std() > 0.05
    first, last = spans[::3, 0].float().mean(), spans[::3, -1].float().mean()
    assert first.item() == pytest.approx(last.item(), abs=0.03) and 0.05 < first < 0.3


def test_whole_contexts_are_dropped_at_their_rate() -> None:
    network = build(p_drop_prob=0.3, frac_lengths_mask=(0.5, 0.6))
    mask = torch.arange(20) < torch.tensor([20, 11])[:, None].repeat(3000, 1)
    hidden = network.draw_hidden(mask, torch.Generator().manual_seed(0))
    whole = (hidden == mask).all(dim=1)
    assert whole.float().mean().item() == pytest.approx(0.3, abs=0.02)
    assert not (hidden & ~mask).any()
    never = build(p_drop_prob=0.0, frac_lengths_mask=(0.5, 0.6)).draw_hidden(mask)
    assert not (never == mask).all(dim=1).any()
    again = network.draw_hidden(mask, torch.Generator().manual_seed(0))
    assert torch.equal(hidden, again)


def test_rows_are_dropped_at_their_rate() -> None:
    keep = build().draw_keep(5000, 0.2, torch.Generator().manual_seed(0))
    assert (~keep).float().mean().item() == pytest.approx(0.2, abs=0.02)


@torch.no_grad()
def test_a_row_that_is_not_kept_is_learned_from_as_a_whole() -> None:
    network = build()
    given, target = inputs(network), torch.randn(2, 9, FEATURES)
    loss = network(**given, target=target, keep=torch.tensor([True, False]))
    kept = network(**given, target=target, keep=torch.tensor([True, True]))
    assert loss != kept
    nothing = network(given["x"], times=given["times"])
    counted = given["cond_mask"].clone()
    counted[1] = True
    close(loss, masked_error(torch.stack((network(**given)[0], nothing[1])), target, counted))


@torch.no_grad()
def test_attention_is_nearly_even_at_first() -> None:
    """A fixed scale of 8 or 10 on top of normalised queries and keys, a known mistake, leaves 1 % of this entropy."""
    torch.manual_seed(0)
    n = 200
    network = VoiceBox(
        num_cond_tokens=TOKENS, dim_in=80, dim=256, depth=2, heads=4, num_register_tokens=4, text_depth=0
    )
    for layer in network.transformer.layers:
        layer.attention.block.to_qkv.weight.mul_(10)  # however large queries and keys grow
    seen: list[tuple[Tensor, Tensor]] = []
    original = torch.nn.functional.scaled_dot_product_attention

    def watched(queries: Tensor, keys: Tensor, values: Tensor, **options: Any) -> Tensor:
        seen.append((queries, keys))
        return original(queries, keys, values, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.nn.functional, "scaled_dot_product_attention", watched)
        network(torch.randn(1, n, 80), times=torch.tensor(0.5), cond_token_ids=torch.randint(TOKENS, (1, 50)))
    assert len(seen) == 2
    for queries, keys in seen:
        weights = (queries @ keys.transpose(-1, -2) * queries.shape[-1] ** -0.5).softmax(dim=-1)
        entropy = torch.special.entr(weights).sum(dim=-1).mean()
        assert entropy > 0.8 * math.log(n + 4)
        assert weights.amax(dim=-1).mean() < 0.15


@torch.no_grad()
def test_times_are_told_apart() -> None:
    network = build()
    given = inputs(network, rows=1)
    found = [network(**given | {"times": torch.tensor([t])}) for t in (0.0, 0.01, 0.5, 0.51, 1.0)]
    for i in range(5):
        for j in range(i):
            assert (found[i] - found[j]).abs().max() > 1e-3


def test_most_weights_are_not_the_times() -> None:
    """The reference package spends 403 of 711 million on the modulation of its norms."""
    with torch.device("meta"):
        network = VoiceBox(num_cond_tokens=256, dim_in=80)
    total = sum(weight.numel() for weight in network.parameters())
    assert network.transformer.modulation is not None
    modules = (network.to_time, network.transformer.modulation)
    times = sum(weight.numel() for module in modules for weight in module.parameters())
    assert 0.05 * total < times < 0.15 * total
    assert 350e6 < total < 380e6
    assert network.transformer.num_registers == 16
    assert [layer.skip is not None for layer in network.transformer.layers] == [False] * 12 + [True] * 12


@pytest.mark.parametrize("skips", [False, True])
@torch.no_grad()
def test_what_a_layer_gives_lives_as_long_as_it_is_needed(skips: bool) -> None:
    """The reference package keeps the output of every layer for skips that it never makes."""
    network = build(depth=6, use_unet_skip_connection=skips)
    made: list[weakref.ref[Tensor]] = []
    alive: list[int] = []
    for layer in network.transformer.layers:
        layer.register_forward_pre_hook(lambda module, inputs: alive.append(sum(one() is not None for one in made)))
        layer.register_forward_hook(lambda module, inputs, output: made.append(weakref.ref(output)))
    network(**inputs(network))
    assert alive == ([0, 1, 2, 3, 3, 2] if skips else [0, 1, 1, 1, 1, 1])


@pytest.mark.parametrize("alignment", ["free", "frames"])
def test_nothing_is_read_on_the_host(alignment: str) -> None:
    network = build(alignment=alignment)
    given = inputs(network) | {"self_attn_mask": torch.arange(9) < torch.tensor([9, 4])[:, None]}
    del given["cond_mask"]
    with OffHost():
        network(**given, target=given["x"], cond_drop_prob=0.2).backward()


def test_half_precision_differs_little_and_the_loss_is_in_single() -> None:
    network = build()
    given, target = inputs(network, n=16), torch.randn(2, 16, FEATURES)
    exact = network(**given, target=target)
    stream: list[torch.dtype] = []
    network.transformer.register_forward_pre_hook(lambda module, inputs: stream.append(inputs[0].dtype))
    with torch.autocast("cpu", torch.bfloat16):
        loss = network(**given, target=target)
    assert loss.dtype == torch.float32 and stream == [torch.float32]  # what layers add to is not rounded
    assert loss.item() == pytest.approx(exact.item(), rel=0.03) and loss != exact
    loss.backward()
    assert all(weight.grad is not None and weight.grad.isfinite().all() for weight in network.parameters())


def test_every_weight_learns_from_a_batch_without_text() -> None:
    """Distributed training waits for the gradient of every weight."""
    network = build()
    given = inputs(network)
    del given["cond_token_ids"]
    network(**given, target=torch.randn(2, 9, FEATURES)).backward()
    assert all(weight.grad is not None for weight in network.parameters())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"use_gateloop_layers": True}, "no gateloop"),
        ({"num_cond_tokens": None}, "needs num_cond_tokens"),
        ({"p_drop_prob": 1.5}, "p_drop_prob=1.5"),
        ({"frac_lengths_mask": (0.9, 0.7)}, "frac_lengths_mask"),
        ({"conv_pos_embed_kernel_size": 4}, "must be odd"),
        ({"conv_pos_embed_groups": 7}, "must divide dim=20"),
    ],
)
def test_wrong_arguments_are_named(options: dict[str, Any], message: str) -> None:
    arguments = {"num_cond_tokens": TOKENS, "dim_in": FEATURES, **SIZES} | options
    with pytest.raises(ValueError, match=message):
        VoiceBox(**arguments)


def test_wrong_inputs_are_named() -> None:
    network, x = build(), torch.randn(2, 9, FEATURES)
    with pytest.raises(ValueError, match="Give cond_mask"):
        network(x, times=torch.rand(2), cond=x)
    with pytest.raises(ValueError, match="4 features a frame"):
        network.prepare(torch.ones(2, 9, dtype=torch.bool), cond=x[..., :4])
    with pytest.raises(ValueError, match="reads no tokens"):
        build(condition_on_text=False)(x, times=torch.rand(2), cond_token_ids=torch.zeros(2, 3, dtype=torch.long))


def test_positions_are_a_convolution_over_neighbours() -> None:
    torch.manual_seed(0)
    positions, x = ConvolvedPositions(6, 3, None), torch.randn(1, 8, 6)
    moved = x.clone()
    moved[0, 4] += 1
    changed = (positions(moved) - positions(x)).abs().amax(dim=-1)[0] > 1e-6
    assert changed.tolist() == [False] * 3 + [True] * 3 + [False] * 2


def test_the_first_rows_of_what_is_prepared() -> None:
    network = build()
    prepared = network.prepare(torch.ones(4, 3, dtype=torch.bool))
    first = prepared.first(2)
    assert isinstance(first, Prepared) and first.embedding.shape == (2, 3, 20) and first.mask is None


def test_text_and_context_enter_as_one_product_of_both_side_by_side():
    torch.manual_seed(0)
    voicebox = VoiceBox(num_cond_tokens=7, dim_in=5, dim=16, depth=1, heads=2, dim_head=8, dim_cond_emb=6, text_depth=1)
    cond, hidden = torch.randn(2, 9, 5), torch.rand(2, 9) < 0.5
    ids, mask = torch.randint(7, (2, 4)), torch.arange(9) < torch.tensor([[9], [6]])
    found = voicebox.prepare(hidden, cond=cond, cond_token_ids=ids, self_attn_mask=mask).embedding
    shown = cond.masked_fill((hidden | ~mask)[..., None], 0.0)
    parts = (shown, hidden[..., None].float(), voicebox.tokens(ids, mask))
    torch.testing.assert_close(found, voicebox.from_context(torch.cat(parts, dim=-1)))
