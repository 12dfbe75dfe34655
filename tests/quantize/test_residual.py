"""Stacks: parity with vector-quantize-pytorch, one gradient for the whole stack, quantize dropout, groups."""

from itertools import pairwise

import pytest
import torch
from vector_quantize_pytorch import ResidualFSQ as TheirResidualFSQ
from vector_quantize_pytorch import ResidualLFQ as TheirResidualLFQ
from vector_quantize_pytorch import ResidualVQ as TheirResidualVQ

from helicon.quantize import (
    FiniteScalarQuantizer,
    GroupedResidualFSQ,
    GroupedResidualVQ,
    LookupFreeQuantizer,
    ResidualFSQ,
    ResidualLFQ,
    ResidualQuantizer,
    ResidualVQ,
    VectorQuantizer,
)


@pytest.mark.parametrize("codebook_dim", [5, 3])
def test_vector_parity_over_several_steps(codebook_dim: int) -> None:
    torch.manual_seed(0)
    ours = ResidualVQ(5, 3, 11, codebook_dim=codebook_dim, decay=0.7)
    theirs = TheirResidualVQ(
        dim=5, num_quantizers=3, codebook_size=11, codebook_dim=codebook_dim, decay=0.7, rotation_trick=False
    )
    theirs.load_state_dict(ours.state_dict(), strict=False)
    for layer, their_layer in zip(ours.layers, theirs.layers, strict=True):
        their_layer._codebook.embed.copy_(layer.codebook[None])
        their_layer._codebook.embed_avg.copy_(layer.codebook[None])
    for _ in range(4):
        features = torch.randn(2, 17, 5)
        result = ours(features)
        values, codes, losses = theirs(features)
        assert torch.equal(result.codes, codes)
        torch.testing.assert_close(result.values, values)
        torch.testing.assert_close(result.loss, losses.sum())
        torch.testing.assert_close(ours.layers[2].codebook, theirs.layers[2]._codebook.embed[0])
    torch.testing.assert_close(ours.decode(result.codes), theirs.get_output_from_indices(codes))


@pytest.mark.parametrize("dim", [6, 4])
def test_lookup_free_parity(dim: int) -> None:
    torch.manual_seed(0)
    ours = ResidualLFQ(dim, 3, 2**6, diversity_gamma=0.5)
    theirs = TheirResidualLFQ(dim=dim, num_quantizers=3, codebook_size=2**6, diversity_gamma=0.5)
    theirs.load_state_dict(ours.state_dict(), strict=False)
    features = torch.randn(2, 41, dim)
    result = ours(features)
    values, codes, losses = theirs(features)
    assert torch.equal(result.codes, codes.long())
    torch.testing.assert_close(result.values, values)
    torch.testing.assert_close(result.loss, losses.sum(), rtol=0, atol=1e-3)
    torch.testing.assert_close(ours.decode(result.codes), theirs.get_output_from_indices(codes))


def test_dropout_that_leaves_every_level_is_none() -> None:
    """It would draw a number for each batch, of which nothing depends."""
    options = {"quantize_dropout": True, "quantize_dropout_cutoff_index": 1}
    assert ResidualLFQ(6, 2, 2**6, **options).draw_kept_levels(torch.device("cpu")) is None
    assert ResidualLFQ(6, 3, 2**6, **options).draw_kept_levels(torch.device("cpu")) is not None


def test_a_lookup_free_stack_clamps_what_enters_it_and_nothing_after() -> None:
    torch.manual_seed(0)
    features = 5 * torch.randn(2, 41, 6)
    clamped, plain = ResidualLFQ(6, 3, 2**6, soft_clamp_input_value=2.0), ResidualLFQ(6, 3, 2**6)
    result, expected = clamped(features), plain(2 * (features / 2).tanh())
    assert torch.equal(result.codes, expected.codes) and not torch.equal(result.codes, plain(features).codes)
    torch.testing.assert_close(result.values, expected.values)
    torch.testing.assert_close(result.loss, expected.loss)
    assert torch.equal(clamped.encode(features), expected.codes)
    with pytest.raises(ValueError, match=r"soft_clamp_input_value=0.5 must be at least 1"):
        ResidualLFQ(6, 3, 2**6, soft_clamp_input_value=0.5)


@pytest.mark.parametrize("dim", [3, 7])
def test_finite_scalar_parity(dim: int) -> None:
    torch.manual_seed(0)
    ours = ResidualFSQ(dim, 3, (5, 4, 3))
    theirs = TheirResidualFSQ(dim=dim, num_quantizers=3, levels=[5, 4, 3])
    theirs.load_state_dict(ours.state_dict(), strict=False)
    features = torch.randn(2, 41, dim)
    result = ours(features)
    values, codes = theirs(features)
    assert torch.equal(result.codes, codes.long())
    torch.testing.assert_close(result.values, values)
    torch.testing.assert_close(ours.decode(result.codes), theirs.get_output_from_indices(codes))


@pytest.mark.parametrize("num_quantizers", [1, 2, 5])
def test_the_gradient_is_not_multiplied_by_the_number_of_levels(num_quantizers: int) -> None:
    features, weights = torch.randn(2, 9, 6, requires_grad=True), torch.randn(2, 9, 6)
    for stack in (ResidualVQ(6, num_quantizers, 7), ResidualLFQ(6, num_quantizers, 2**6)):
        (gradient,) = torch.autograd.grad((stack(features).values * weights).sum(), features)
        assert torch.equal(gradient, weights)
    theirs = TheirResidualVQ(dim=6, num_quantizers=num_quantizers, codebook_size=7, rotation_trick=False)
    (gradient,) = torch.autograd.grad((theirs(features)[0] * weights).sum(), features)
    torch.testing.assert_close(gradient, num_quantizers * weights)


def test_rotation_is_from_the_input_to_the_sum() -> None:
    features = torch.randn(1, 5, 6, requires_grad=True)
    stack = ResidualVQ(6, 3, 7, rotation_trick=True, kmeans_init=True)
    values = stack(features).values
    jacobian = torch.stack(
        [torch.autograd.grad(values[0, 2, i], features, retain_graph=True)[0][0, 2] for i in range(6)]
    )
    torch.testing.assert_close(jacobian @ features[0, 2].detach(), values[0, 2].detach())


def test_more_levels_leave_less() -> None:
    torch.manual_seed(0)
    features = torch.rand(1, 400, 2) * 2 - 1
    for stack in (ResidualLFQ(2, 5, 4), ResidualFSQ(2, 4, (3, 3)), ResidualVQ(2, 4, 9, kmeans_init=True)):
        stack(features)
        stack.eval()
        codes = stack.encode(features)
        target = features if stack.soft_clamp is None else stack.soft_clamp * (features / stack.soft_clamp).tanh()
        errors = [
            (stack.decode(codes[..., :level]) - target).square().mean().item()
            for level in range(1, stack.num_quantizers + 1)
        ]
        assert all(later < 0.5 * earlier for earlier, later in pairwise(errors))


def test_prefix_and_dropped_codes_decode_alike() -> None:
    stack = ResidualVQ(5, 4, 7, codebook_dim=3).eval()
    codes = stack.encode(torch.randn(2, 9, 5))
    dropped = codes.clone()
    dropped[..., 2:] = -1
    assert torch.equal(stack.decode(codes[..., :2]), stack.decode(dropped))
    with pytest.raises(ValueError, match="5 levels"):
        stack.decode(torch.zeros(1, 1, 5, dtype=torch.long))


@pytest.mark.parametrize(("cutoff", "multiple", "possible"), [(0, 1, {1, 2, 3, 4}), (2, 1, {3, 4}), (1, 2, {2, 4})])
def test_quantize_dropout_cuts_values_codes_and_loss(cutoff: int, multiple: int, possible: set[int]) -> None:
    torch.manual_seed(0)
    stack = ResidualVQ(
        5,
        4,
        7,
        quantize_dropout=True,
        quantize_dropout_cutoff_index=cutoff,
        quantize_dropout_multiple_of=multiple,
    )
    features, counts = torch.randn(2, 9, 5), set()
    for _ in range(30):
        before = ResidualVQ(5, 4, 7)
        before.load_state_dict(stack.state_dict())
        result, whole = stack(features), before(features)
        kept = int((result.codes[0, 0] >= 0).sum())
        counts.add(kept)
        assert torch.equal(result.codes[..., :kept], whole.codes[..., :kept]) and (result.codes[..., kept:] == -1).all()
        torch.testing.assert_close(result.loss, sum(whole.parts[f"commitment_{level}"] for level in range(kept)))
        torch.testing.assert_close(stack.state_dict(), before.state_dict())
    assert counts == possible
    stack.eval()
    assert (stack(features).codes >= 0).all()
    assert (stack(features, None, torch.tensor(2)).codes >= 0).sum(-1).unique().tolist() == [2]


def test_values_of_a_cut_stack_are_those_of_its_first_levels() -> None:
    stack = ResidualVQ(5, 4, 7).eval()
    features = torch.randn(2, 9, 5)
    result = stack(features, None, torch.tensor(3))
    torch.testing.assert_close(result.values, stack.decode(stack.encode(features)[..., :3]))


def test_a_shared_codebook_is_one_and_learns_from_all_levels_at_once() -> None:
    torch.manual_seed(0)
    stack = ResidualVQ(5, 3, 7, shared_codebook=True, decay=0.6)
    single = VectorQuantizer(5, 7, decay=0.6)
    single.load_state_dict({name.removeprefix("layers.0."): value for name, value in stack.state_dict().items()})
    assert len(stack.state_dict()) == len(single.state_dict())
    features = torch.randn(1, 20, 5)
    residuals, rows = [], features
    for _ in range(3):
        residuals.append(rows)
        rows = rows - single.decode(single.encode(rows))
    stack(features)
    single(torch.cat(residuals, dim=1))
    torch.testing.assert_close(stack.layers[0].codebook, single.codebook)
    torch.testing.assert_close(stack.layers[0].cluster_size, single.cluster_size)


def test_groups_are_stacks_side_by_side() -> None:
    torch.manual_seed(0)
    grouped = GroupedResidualVQ(6, groups=2, num_quantizers=3, codebook_size=7)
    features = torch.randn(2, 9, 6)
    grouped.eval()
    result = grouped(features)
    for group, stack in enumerate(grouped.stacks):
        alone = stack(features[..., 3 * group : 3 * group + 3])
        assert torch.equal(result.values[..., 3 * group : 3 * group + 3], alone.values)
        assert torch.equal(result.codes[..., 3 * group : 3 * group + 3], alone.codes)
    losses = [stack(part).loss for stack, part in zip(grouped.stacks, features.chunk(2, -1), strict=True)]
    torch.testing.assert_close(result.loss, losses[0] + losses[1])
    prefix = torch.cat([result.codes[..., :1], result.codes[..., 3:4]], dim=-1)
    expected = torch.cat([stack.decode(prefix[..., i, None]) for i, stack in enumerate(grouped.stacks)], dim=-1)
    assert torch.equal(grouped.decode(prefix), expected)


def test_groups_drop_the_same_levels() -> None:
    torch.manual_seed(0)
    grouped = GroupedResidualFSQ(6, groups=3, num_quantizers=4, levels=(3, 3), quantize_dropout=True)
    seen = set()
    for _ in range(20):
        codes = grouped(torch.randn(1, 2, 6)).codes
        kept = (codes[0, 0].reshape(3, 4) >= 0).sum(-1)
        assert (kept == kept[0]).all()
        seen.add(int(kept[0]))
    assert seen == {1, 2, 3, 4}


def test_stacks_of_any_quantizer() -> None:
    stack = ResidualQuantizer(4, [VectorQuantizer(4, 2**4), LookupFreeQuantizer(4, codebook_scale=0.5)])
    features = torch.randn(2, 9, 4)
    stack.eval()
    torch.testing.assert_close(stack.decode(stack.encode(features)), stack(features).values)


def test_refusals() -> None:
    with pytest.raises(ValueError, match="no projection"):
        ResidualQuantizer(4, [FiniteScalarQuantizer(4, (3, 3))])
    with pytest.raises(ValueError, match="one code"):
        ResidualQuantizer(4, [LookupFreeQuantizer(4, 4, num_codebooks=2)])
    with pytest.raises(ValueError, match="one each, not 2"):
        ResidualQuantizer(4, [VectorQuantizer(4, 3), VectorQuantizer(4, 3)], num_quantizers=3)
    with pytest.raises(ValueError, match="cutoff_index=3"):
        ResidualVQ(4, 3, 5, quantize_dropout=True, quantize_dropout_cutoff_index=3)
    with pytest.raises(ValueError, match="groups=4"):
        GroupedResidualVQ(6, groups=4, num_quantizers=2, codebook_size=5)
    with pytest.raises(ValueError, match="shared out to 2 groups"):
        GroupedResidualVQ(6, groups=2, num_quantizers=2, codebook_size=5).decode(torch.zeros(1, 1, 3, dtype=torch.long))
