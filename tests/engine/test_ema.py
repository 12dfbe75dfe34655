"""Averaged weights: the decay asked for, equal to a naive average, and swapped in without a trace."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from helicon.engine.ema import EMA
from toys import Line, LineTask, ToyTrainer, line_task


class Counted(nn.Module):
    """Parameters, a tied one, a float and an integer buffer, and one that is not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 2)
        self.tied = nn.Linear(3, 2, bias=False)
        self.tied.weight = self.first.weight
        self.running: Tensor
        self.count: Tensor
        self.table: Tensor
        self.register_buffer("running", torch.zeros(2))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("table", torch.arange(3.0), persistent=False)


def network(seed: int = 0) -> Counted:
    torch.manual_seed(seed)
    return Counted()


def move(module: Counted) -> None:
    """One step of "training"."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter += torch.randn(parameter.shape)
        module.running += 1.5
        module.count += 1


def state(module: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in module.state_dict().items()}


def averaged(ema: EMA, module: nn.Module) -> dict[str, Tensor]:
    with ema.swapped_in():
        return state(module)


def assert_equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name in one:
        assert torch.equal(one[name], other[name]), name


def test_the_decay_grows_to_the_one_asked_for_and_stays() -> None:
    """D-R3: the reference was asked for 0.995 and used 0.9999."""
    ema = EMA({"a": network()}, beta=0.995)
    assert ema.decay(0) == 0.0
    assert ema.decay(1) == pytest.approx(1 - 2 ** (-2 / 3))
    assert ema.decay(7) == pytest.approx(0.75)
    assert ema.decay(2000) < 0.995
    assert [ema.decay(step) for step in (3000, 10**6, 10**9)] == [0.995] * 3
    assert EMA({"a": network()}, beta=0.5).decay(10) == 0.5


def test_the_options_of_a_trainer_reach_its_average() -> None:
    options = {"ema_beta": 0.75, "ema_update_after_step": 4, "ema_update_every": 3}
    ema = ToyTrainer(line_task(), **options).ema
    assert ema is not None
    assert (ema.beta, ema.update_after_step, ema.update_every) == (0.75, 4, 3)
    assert ToyTrainer(line_task(), use_ema=False, results_folder="other").ema is None


def test_the_average_follows_where_a_trainer_puts_the_network() -> None:
    """D-T4: the reference copies before it moves. (Another precision stands for another device here.)"""

    class Moving(LineTask):
        def move_to(self, device: torch.device) -> None:
            super().move_to(device)
            self.model.double()

    ema = ToyTrainer(Moving(Line())).ema
    assert ema is not None
    assert {t.dtype for t in ema.average} == {t.dtype for t in ema.online} == {torch.float64}


def test_the_average_equals_a_naive_one() -> None:
    module = network()
    ema = EMA({"a": module}, beta=0.6)
    expected = {name: p.detach().clone() for name, p in module.named_parameters()}
    for step in range(1, 9):
        move(module)
        ema.update(step)
        decay = min(0.6, 1 - (1 + step) ** (-2 / 3))
        expected = {n: decay * expected[n] + (1 - decay) * p.detach() for n, p in module.named_parameters()}
    found = averaged(ema, module)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value)
        assert not torch.equal(value, module.state_dict()[name])


def test_buffers_are_copied_not_averaged() -> None:
    module = network()
    ema = EMA({"a": module}, beta=0.99)
    for step in range(1, 6):
        move(module)
        ema.update(step)
    found = averaged(ema, module)
    assert torch.equal(found["running"], torch.full((2,), 7.5))
    assert found["count"] == 5 and found["count"].dtype == torch.int64


def test_until_update_after_step_the_average_is_the_weights() -> None:
    module = network()
    ema = EMA({"a": module}, beta=0.99, update_after_step=3, update_every=5)
    for step in range(1, 4):
        move(module)
        ema.update(step)
        assert_equal(averaged(ema, module), state(module))
    assert ema.decay(3) == 0.0 and ema.decay(4) == pytest.approx(1 - 2 ** (-2 / 3))


def test_update_every_leaves_out_the_steps_between() -> None:
    module = network()
    ema = EMA({"a": module}, beta=0.99, update_after_step=2, update_every=3)
    changed = []
    for step in range(1, 13):
        move(module)
        before = averaged(ema, module)["first.weight"]
        ema.update(step)
        if not torch.equal(averaged(ema, module)["first.weight"], before):
            changed.append(step)
    assert changed == [1, 2, 3, 6, 9, 12]


def drifted() -> tuple[Counted, EMA]:
    module = network()
    ema = EMA({"a": module}, beta=0.9)
    for step in range(1, 4):
        move(module)
        ema.update(step)
    return module, ema


def test_a_swap_changes_contents_and_no_storage() -> None:
    """Optimizers, gradient buckets and compiled code hold on to the storage."""
    module, ema = drifted()
    before, places = state(module), [p.data_ptr() for p in module.parameters()]
    with ema.swapped_in():
        inside = state(module)
        assert [p.data_ptr() for p in module.parameters()] == places
        assert all(p.requires_grad for p in module.parameters())
    assert not torch.equal(inside["first.weight"], before["first.weight"])
    assert_equal(state(module), before)
    assert_equal(averaged(ema, module), inside)


def test_a_tied_weight_is_swapped_once() -> None:
    module, ema = drifted()
    average = next(a for o, a in zip(ema.online, ema.average, strict=True) if o is module.first.weight).clone()
    with ema.swapped_in():
        assert torch.equal(module.tied.weight, average)
    assert len(ema.online) == len({id(t) for t in ema.online}) == 4


def test_a_weight_shared_by_two_networks_is_swapped_once() -> None:
    one, other = nn.Linear(3, 2), nn.Linear(3, 2)
    other.weight = one.weight
    ema = EMA({"one": one, "other": other}, beta=0.9)
    with torch.no_grad():
        one.weight += 1
    before = one.weight.detach().clone()
    with ema.swapped_in():
        torch.testing.assert_close(one.weight, before - 1)
    assert torch.equal(one.weight, before)


def test_the_weights_come_back_exactly_when_the_block_raises() -> None:
    module, ema = drifted()
    before, average = state(module), averaged(ema, module)
    with pytest.raises(ZeroDivisionError), ema.swapped_in():
        raise ZeroDivisionError
    assert_equal(state(module), before)
    assert_equal(averaged(ema, module), average)


def test_a_block_inside_a_block_still_has_the_averaged_weights() -> None:
    module, ema = drifted()
    before = state(module)
    with ema.swapped_in():
        outer = state(module)
        with ema.swapped_in():
            assert_equal(state(module), outer)
        assert_equal(state(module), outer)
    assert_equal(state(module), before)


def test_a_generator_left_unfinished_gives_the_weights_back() -> None:
    module, ema = drifted()
    before = state(module)

    def stream() -> Iterator[int]:
        with ema.swapped_in():
            yield from range(3)

    items: Any = stream()
    assert next(items) == 0
    items.close()
    assert_equal(state(module), before)


def test_copy_to_online_makes_the_weights_the_averaged_ones() -> None:
    module, ema = drifted()
    average = averaged(ema, module)
    assert not torch.equal(state(module)["first.weight"], average["first.weight"])
    ema.copy_to_online()
    assert_equal(state(module), average)
    assert_equal(averaged(ema, module), average)


def test_the_average_does_not_follow_gradients() -> None:
    module, ema = drifted()
    module.first(torch.ones(1, 3)).sum().backward()
    ema.update(4)
    assert not any(t.requires_grad for t in ema.average)
    assert all(p.grad is not None for p in module.first.parameters())


def test_each_online_tensor_knows_its_average() -> None:
    module, ema = drifted()
    found = ema.by_identity()
    names = {name: found[id(value)] for name, value in module.state_dict(keep_vars=True).items()}
    assert_equal(names, averaged(ema, module))
