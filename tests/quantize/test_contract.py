"""What all quantizers promise, on each of them."""

import subprocess
import sys
from collections.abc import Iterator
from copy import deepcopy
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from helicon.quantize import Quantizer
from quantize.builders import BUILD, RANDOM

every = pytest.mark.parametrize("name", BUILD)
every_also_random = pytest.mark.parametrize("name", BUILD | RANDOM)


def build(name: str, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return (BUILD | RANDOM)[name]()


def batches(count: int, positions: int = 13) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(1)
    for _ in range(count):
        yield torch.randn(3, positions, 6, generator=generator)


def state(quantizer: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in quantizer.state_dict().items()}


def assert_same_state(left: nn.Module, right: nn.Module, **tolerance: float) -> None:
    torch.testing.assert_close(state(left), state(right), equal_nan=False, **tolerance)


@every_also_random
def test_shapes_ranges_and_dtypes(name: str) -> None:
    quantizer = build(name)
    assert isinstance(quantizer, Quantizer)
    (features,) = batches(1)
    result = quantizer(features)
    assert result.values.shape == features.shape and result.values.dtype == torch.float32
    assert result.codes.shape[:2] == (3, 13) and result.codes.dtype == torch.int64
    assert result.codes.min() >= -1 and result.codes.max() < quantizer.codebook_size
    assert result.loss.shape == () and result.loss.isfinite()
    assert result.parts and all(part.shape == () and not part.requires_grad for part in result.parts.values())


@every
def test_more_position_dimensions_are_only_a_shape(name: str) -> None:
    quantizer, flat = build(name), build(name)
    (features,) = batches(1, positions=12)
    mask = torch.rand(3, 12) > 0.2
    torch.manual_seed(2)
    result = quantizer(features.reshape(3, 4, 3, 6), mask.reshape(3, 4, 3))
    torch.manual_seed(2)
    expected = flat(features, mask)
    assert torch.equal(result.values.reshape(3, 12, 6), expected.values)
    assert torch.equal(result.codes.reshape(expected.codes.shape), expected.codes)
    quantizer.eval()
    codes = quantizer.encode(features.reshape(3, 4, 3, 6))
    assert codes.shape == result.codes.shape
    assert quantizer.decode(codes).shape == (3, 4, 3, 6)


@every
def test_masked_is_cropped(name: str) -> None:
    masked, cropped = build(name), build(name)
    mask = torch.arange(13).expand(3, 13) < 9
    for step, features in enumerate(batches(3)):
        features[:, 9:] = torch.nan  # padding may hold anything
        padded = features.clone().requires_grad_()
        short = features[:, :9].clone().requires_grad_()
        torch.manual_seed(step)
        left = masked(padded, mask)
        torch.manual_seed(step)
        right = cropped(short)
        torch.testing.assert_close(left.values[:, :9], right.values)
        assert (left.values[:, 9:] == 0).all()
        assert torch.equal(left.codes[:, :9], right.codes)
        assert (left.codes[:, 9:] == -1).all()
        torch.testing.assert_close(left.loss, right.loss)
        torch.testing.assert_close(left.parts, right.parts)
        (left.loss + left.values.square().sum()).backward()
        (right.loss + right.values.square().sum()).backward()
        assert padded.grad is not None and short.grad is not None
        torch.testing.assert_close(padded.grad[:, :9], short.grad)
        assert (padded.grad[:, 9:] == 0).all()
        assert_same_state(masked, cropped)


@every
def test_encode_and_decode_agree_with_forward(name: str) -> None:
    quantizer = build(name)
    for features in batches(2):
        quantizer(features)
    quantizer.eval()
    (features,) = batches(1)
    result, codes = quantizer(features), quantizer.encode(features)
    assert torch.equal(codes, result.codes)
    torch.testing.assert_close(quantizer.decode(codes), result.values, rtol=0, atol=1e-6)
    assert (codes >= 0).all()


@every
def test_decoding_minus_one_is_zero(name: str) -> None:
    quantizer = build(name).eval()
    (features,) = batches(1)
    mask = torch.rand(3, 13) > 0.3
    result = quantizer(features, mask)
    torch.testing.assert_close(quantizer.decode(result.codes), result.values, rtol=0, atol=1e-6)
    assert (quantizer.decode(torch.full_like(result.codes, -1)) == 0).all()


@every_also_random
def test_gradients_reach_the_input(name: str) -> None:
    quantizer = build(name)
    (features,) = batches(1)
    features.requires_grad_()
    quantizer(features).values.square().sum().backward()
    assert features.grad is not None and features.grad.isfinite().all()
    assert (features.grad != 0).any(-1).float().mean() > 0.9


@every
def test_bfloat16_features(name: str) -> None:
    quantizer, exact = build(name), build(name)
    for step, features in enumerate(batches(2)):
        torch.manual_seed(step)
        result = quantizer(features.bfloat16())
        torch.manual_seed(step)
        expected = exact(features.bfloat16().float())
        assert result.values.dtype == torch.bfloat16 and result.values.isfinite().all()
        assert result.loss.dtype == torch.float32
        assert torch.equal(result.codes, expected.codes)
        assert torch.equal(result.values, expected.values.bfloat16())
        assert_same_state(quantizer, exact)


@every
def test_autocast_changes_nothing(name: str) -> None:
    quantizer, plain = build(name), build(name)
    for step, features in enumerate(batches(2)):
        torch.manual_seed(step)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            result = quantizer(features)
            codes = quantizer.encode(features)
            decoded = quantizer.decode(codes)
        torch.manual_seed(step)
        expected = plain(features)
        assert torch.equal(result.values, expected.values) and torch.equal(result.codes, expected.codes)
        assert torch.equal(result.loss, expected.loss)
        assert torch.equal(codes, plain.encode(features)) and torch.equal(decoded, plain.decode(codes))
        assert_same_state(quantizer, plain)


@every_also_random
@pytest.mark.parametrize("steps_before", [0, 2])
def test_saved_and_loaded_continues_identically(name: str, steps_before: int) -> None:
    quantizer = build(name)
    *before, last, after = batches(steps_before + 2)
    for features in before:
        quantizer(features)
    loaded = build(name, seed=9)
    loaded.load_state_dict(state(quantizer))
    copied = build(name, seed=9)
    for into, value in zip(copied.state_dict().values(), state(quantizer).values(), strict=True):
        into.copy_(value)  # as a checkpoint is read: in place, without load_state_dict and its hooks
    for features in (last, after):
        results = []
        for module in (quantizer, loaded, copied):
            torch.manual_seed(7)
            results.append(module(features))
        for left, right in pairwise(results):
            assert torch.equal(left.values, right.values) and torch.equal(left.loss, right.loss)
        assert_same_state(quantizer, loaded, rtol=0, atol=0)
        assert_same_state(quantizer, copied, rtol=0, atol=0)


@every_also_random
def test_evaluation_and_encoding_change_no_state(name: str) -> None:
    quantizer = build(name)
    for features in batches(2):
        quantizer(features)
    before = deepcopy(quantizer)
    quantizer.encode(features)
    quantizer.eval()
    quantizer(features * 3)
    quantizer.decode(quantizer.encode(features))
    assert_same_state(quantizer, before, rtol=0, atol=0)


@every
@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf])
def test_rows_that_are_not_finite_are_left_out(name: str, poison: float) -> None:
    poisoned, masked = build(name), build(name)
    for step, features in enumerate(batches(2)):
        mask = torch.ones(3, 13, dtype=torch.bool)
        mask[1, 4] = mask[2, :3] = False
        bad = features.clone()
        bad[1, 4, 2] = bad[2, :3] = poison
        torch.manual_seed(step)
        result = poisoned(bad)
        torch.manual_seed(step)
        expected = masked(features, mask)
        assert_same_state(poisoned, masked, rtol=0, atol=0)
        assert all(value.isfinite().all() for value in state(poisoned).values())
        assert result.values[1, 4].isnan().any() and result.values[2, :3].isnan().any(-1).all()
        assert torch.equal(result.values[mask], expected.values[mask])
        assert torch.equal(result.codes, expected.codes)
    assert (poisoned.encode(bad)[1, 4] == -1).all()


@every
def test_nothing_to_learn_from_changes_no_state(name: str) -> None:
    quantizer = build(name)
    for features in batches(2):
        quantizer(features)
    before = deepcopy(quantizer)
    result = quantizer(features, torch.zeros(3, 13, dtype=torch.bool))
    assert result.loss.isfinite() and (result.codes == -1).all() and (result.values == 0).all()
    assert_same_state(quantizer, before, rtol=0, atol=0)


@every_also_random
def test_wrong_feature_size_is_named(name: str) -> None:
    with pytest.raises(ValueError, match="last dimension"):
        build(name)(torch.zeros(2, 3, 8))


@pytest.mark.slow
def test_compiles_without_graph_breaks() -> None:
    """In a process of its own: the annotation checks that pytest installs are nothing a compiler can follow."""
    script = Path(__file__).with_name("compile_all.py")
    finished = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout.split("\n")[:-1] == list(BUILD | RANDOM)
