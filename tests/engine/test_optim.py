"""Updates against their formulas, steps that are skipped whole, and state that finds its parameter."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from helicon.engine import optimizers
from helicon.engine.optim import LossScale, NetworkOptimizer, OptimizerSettings
from helicon.engine.optimizers import Muon, orthogonalise

OPTIMIZERS = ["adamw", "adam", "lion", "muon"]


class Small(nn.Module):
    """One parameter of each kind an optimizer may treat differently."""

    def __init__(self, backwards: bool = False):
        super().__init__()
        parts: dict[str, Callable[[], nn.Module]] = {
            "embedding": lambda: nn.Embedding(6, 3),
            "convolution": lambda: nn.Conv1d(3, 4, 2),
            "linear": lambda: nn.Linear(4, 5),
            "norm": lambda: nn.LayerNorm(5),
        }
        for name in reversed(parts) if backwards else parts:
            self.add_module(name, parts[name]())


def small(seed: int = 0, backwards: bool = False) -> Small:
    network = Small(backwards)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for _, parameter in sorted(network.named_parameters()):
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return network


def give_gradients(network: nn.Module, seed: int, scale: float = 1.0) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _, parameter in sorted(network.named_parameters()):
        parameter.grad = scale * torch.randn(parameter.shape, generator=generator)


def good() -> Tensor:
    return torch.tensor(False)


def take_step(optimizer: NetworkOptimizer, bad: Tensor, scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """As the loop does it."""
    optimizer.set_rate()
    found = optimizer.apply(bad, scale)
    optimizer.schedule.advance()
    return found


def copies(values: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in values.items()}


def weights(network: nn.Module) -> dict[str, Tensor]:
    return copies(dict(network.named_parameters()))


def assert_equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name in one:
        assert torch.equal(one[name], other[name]), name


# ---------------------------------------------------------------------- updates by value


def stepped(network: nn.Module, steps: int = 6, **settings: Any) -> NetworkOptimizer:
    optimizer = NetworkOptimizer(network, OptimizerSettings(**settings), 100)
    for step in range(steps):
        give_gradients(network, seed=step)
        take_step(optimizer, good())
    return optimizer


@pytest.mark.parametrize("wd", [0.0, 0.1])
@pytest.mark.parametrize("name", ["adamw", "adam"])
def test_adam_and_adamw_equal_torchs_own_with_decay_on_matrices_alone(name: str, wd: float) -> None:
    mine, plain = small(), small()
    stepped(mine, optimizer=name, lr=0.02, wd=wd, betas=(0.8, 0.95), optimizer_kwargs={"eps": 1e-6})
    kind = torch.optim.AdamW if name == "adamw" else torch.optim.Adam
    decayed = [p for p in plain.parameters() if p.ndim >= 2]
    others = [p for p in plain.parameters() if p.ndim < 2]
    groups = [{"params": decayed, "weight_decay": wd}, {"params": others, "weight_decay": 0.0}]
    optimizer = kind(groups, lr=0.02, betas=(0.8, 0.95), eps=1e-6, foreach=False, fused=False)
    for step in range(6):
        give_gradients(plain, seed=step)
        optimizer.step()
    for key, value in weights(plain).items():
        torch.testing.assert_close(weights(mine)[key], value, atol=1e-6, rtol=1e-6)


def test_lion_equals_its_formula() -> None:
    mine, plain = small(), small()
    stepped(mine, optimizer="lion", lr=0.02, wd=0.1, betas=(0.7, 0.9))
    momenta = {name: torch.zeros_like(p) for name, p in plain.named_parameters()}
    for step in range(6):
        give_gradients(plain, seed=step)
        for name, p in plain.named_parameters():
            assert p.grad is not None
            momentum, gradient, decay = momenta[name], p.grad, 0.1 if p.ndim >= 2 else 0.0
            update = torch.sign(0.7 * momentum + (1 - 0.7) * gradient)
            p.data = p.data - 0.02 * (update + decay * p.data)
            momenta[name] = 0.9 * momentum + (1 - 0.9) * gradient
    for key, value in weights(plain).items():
        torch.testing.assert_close(weights(mine)[key], value, atol=1e-6, rtol=0)


def test_muon_moves_matrices_and_convolutions_by_their_orthogonal_momentum() -> None:
    mine, start = small(), small()
    momenta = {"linear.weight": torch.zeros(5, 4), "convolution.weight": torch.zeros(4, 6)}
    optimizer = NetworkOptimizer(
        mine, OptimizerSettings(optimizer="muon", lr=0.02, wd=0.1, optimizer_kwargs={"momentum": 0.9}), 100
    )
    expected = {name: start.get_parameter(name).detach().flatten(1) for name in momenta}
    for step in range(4):
        give_gradients(mine, seed=step)
        for name in momenta:
            gradient = mine.get_parameter(name).grad
            assert gradient is not None
            momenta[name] = 0.9 * momenta[name] + 0.1 * gradient.flatten(1)
            nesterov = 0.9 * momenta[name] + 0.1 * gradient.flatten(1)
            size = 0.2 * math.sqrt(max(nesterov.shape))
            expected[name] = expected[name] * (1 - 0.02 * 0.1) - 0.02 * size * orthogonalise(nesterov[None], 5)[0]
        take_step(optimizer, good())
    for name, value in expected.items():
        torch.testing.assert_close(mine.get_parameter(name).detach().flatten(1), value, atol=1e-6, rtol=0)


@pytest.mark.parametrize("name", ["muon", "lion"])
def test_parameters_of_one_shape_are_stepped_together_as_they_would_be_alone(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for at_once in (1, 30, 2**20):  # one by one, two at a time, all five
        monkeypatch.setattr(optimizers, "MOST_AT_ONCE", at_once)
        torch.manual_seed(0)
        network = nn.Sequential(*(nn.Linear(3, 4, bias=False) if i != 2 else nn.Linear(4, 3) for i in range(6)))
        optimizer = NetworkOptimizer(network, OptimizerSettings(optimizer=name, lr=0.02, wd=0.1), 10)
        for step in range(3):
            give_gradients(network, seed=step)
            network[1].weight.grad = None if step == 1 else network[1].weight.grad
            take_step(optimizer, good())
        found.append([p.detach().clone() for p in network.parameters()])
    for others in found[1:]:
        torch.testing.assert_close(others, found[0], atol=1e-7, rtol=0)


def test_muon_leaves_embeddings_and_vectors_to_adamw() -> None:
    mine, plain = small(), small()
    optimizer = stepped(mine, optimizer="muon", lr=0.02, wd=0.1)
    held = {name for name, p in optimizer.named.items() if p in optimizer.optimizers[0].state}
    assert isinstance(optimizer.optimizers[0], Muon)
    assert held == {"convolution.weight", "linear.weight"}
    stepped(plain, optimizer="adamw", lr=0.02, wd=0.1)
    for name, value in weights(plain).items():
        assert torch.equal(weights(mine)[name], value) == (name not in held), name


def test_a_tied_embedding_stays_with_adamw_under_its_other_name() -> None:
    network = nn.ModuleDict({"head": nn.Linear(3, 6, bias=False), "embedding": nn.Embedding(6, 3)})
    network["head"].weight = network["embedding"].weight
    optimizer = NetworkOptimizer(network, OptimizerSettings(optimizer="muon"), 1)
    assert not any(isinstance(each, Muon) for each in optimizer.optimizers)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_weight_decay_touches_matrices_alone(name: str) -> None:
    """With gradients of zero, decay is all that moves a weight."""
    network = small()
    before = weights(network)
    optimizer = NetworkOptimizer(network, OptimizerSettings(optimizer=name, lr=0.1, wd=0.5), 10)
    give_gradients(network, seed=0, scale=0.0)
    take_step(optimizer, good())
    moved = {key for key, value in weights(network).items() if not torch.equal(value, before[key])}
    assert moved == {key for key, value in before.items() if value.ndim >= 2}
    if name != "adam":  # whose decay is a gradient like any other
        for key in moved:
            torch.testing.assert_close(weights(network)[key], before[key] * (1 - 0.1 * 0.5))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_really_minimises(name: str) -> None:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    x = torch.randn(64, 4)
    y = torch.stack([x.sum(-1).sin(), x[:, 0] * x[:, 1]], -1)
    settings = OptimizerSettings(optimizer=name, lr=0.02, scheduler="cosine", max_grad_norm=1.0)
    optimizer = NetworkOptimizer(network, settings, 400)
    losses = []
    for _ in range(400):
        loss = (network(x) - y).square().mean()
        loss.backward()
        take_step(optimizer, good())
        losses.append(loss.item())
    assert losses[-1] < 0.15 * losses[0]


def test_keywords_an_optimizer_lacks_are_not_swallowed() -> None:
    with pytest.raises(ValueError, match=r"optimizer_kwargs=\{'epsilon': 0.001\} will not do: .*epsilon"):
        NetworkOptimizer(small(), OptimizerSettings(optimizer_kwargs={"epsilon": 1e-3}), 1)


def test_an_unknown_optimizer_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="optimizer='sgd' is not one of adamw, adam, lion, muon"):
        NetworkOptimizer(small(), OptimizerSettings(optimizer="sgd"), 1)


def test_a_network_with_nothing_to_train_is_refused() -> None:
    with pytest.raises(ValueError, match="Small has no trainable parameter"):
        NetworkOptimizer(small().requires_grad_(False), OptimizerSettings(), 1)


def test_a_frozen_parameter_stays_and_has_no_state() -> None:
    network = small()
    network.linear.weight.requires_grad_(False)
    before = network.linear.weight.detach().clone()
    optimizer = stepped(network, wd=0.5, lr=0.1)
    assert torch.equal(network.linear.weight, before)
    assert not any(key.startswith("linear.weight/") for key in optimizer.state())


# ---------------------------------------------------------------------- clipping


@pytest.mark.parametrize("largest", [0.5, 1e6])
def test_one_norm_is_taken_over_the_whole_network(largest: float) -> None:
    """D-T10: the reference clipped each parameter group by its own norm, and weight decay makes two groups."""
    network = small()
    optimizer = NetworkOptimizer(network, OptimizerSettings(wd=0.1, max_grad_norm=largest), 10)
    assert len(optimizer.optimizers[0].param_groups) == 2
    give_gradients(network, seed=1)
    gradients = {name: p.grad.clone() for name, p in network.named_parameters() if p.grad is not None}
    norm = torch.cat([g.flatten() for g in gradients.values()]).norm()
    found, bad = take_step(optimizer, good())
    torch.testing.assert_close(found, norm)
    assert not bad
    scale = min(1.0, largest / float(norm))
    for name, gradient in gradients.items():  # the first moment after one step is (1 - beta1) times what came through
        moment = optimizer.state()[f"{name}/exp_avg"] / (1 - 0.9)
        torch.testing.assert_close(moment, gradient * scale, rtol=1e-4, atol=1e-6)


def test_without_a_limit_gradients_come_through_whole() -> None:
    network = small()
    optimizer = NetworkOptimizer(network, OptimizerSettings(max_grad_norm=None), 10)
    give_gradients(network, seed=1, scale=1e3)
    gradient = network.linear.weight.grad.clone()  # type: ignore[union-attr]
    take_step(optimizer, good())
    torch.testing.assert_close(optimizer.state()["linear.weight/exp_avg"], 0.1 * gradient, rtol=1e-4, atol=0)


def test_a_scaled_loss_gives_the_step_and_the_norm_of_the_unscaled_one() -> None:
    scaled, plain = small(), small()
    settings = OptimizerSettings(max_grad_norm=0.5)
    one, other = NetworkOptimizer(scaled, settings, 10), NetworkOptimizer(plain, settings, 10)
    give_gradients(scaled, seed=1, scale=1024.0)
    give_gradients(plain, seed=1)
    norms = [take_step(one, good(), scale=torch.tensor(1024.0))[0], take_step(other, good())[0]]
    torch.testing.assert_close(*norms)
    for key, value in weights(plain).items():
        torch.testing.assert_close(weights(scaled)[key], value)


# ---------------------------------------------------------------------- steps that are skipped


def spoil(network: nn.Module, how: str) -> Tensor:
    """A step to be skipped: by its flag, or by one number of one gradient."""
    give_gradients(network, seed=77)
    if how != "flag":
        network.get_parameter("linear.bias").grad[2] = float(how)  # type: ignore[index]
    return torch.tensor(how == "flag")


@pytest.mark.parametrize("how", ["flag", "nan", "inf", "-inf"])
@pytest.mark.parametrize("good_steps", [0, 2])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_bad_step_changes_nothing_at_all(name: str, good_steps: int, how: str) -> None:
    settings = {"optimizer": name, "lr": 0.02, "wd": 0.1, "max_grad_norm": 0.5}
    network, untouched = small(), small()
    optimizer = stepped(network, steps=good_steps, **settings)
    never_bad = stepped(untouched, steps=good_steps, **settings)
    before, state = weights(network), copies(optimizer.state())
    flag = spoil(network, how)
    _, bad = take_step(optimizer, flag)
    assert bad
    assert all(p.grad is None for p in network.parameters()), "a bad gradient is not added to the next"
    assert_equal(weights(network), before)
    if good_steps:
        assert_equal(optimizer.state(), state)
    else:
        assert all(not value.any() for value in optimizer.state().values()), "moments and step counts are still zero"
    for each in (network, untouched):
        give_gradients(each, seed=5)
    take_step(optimizer, good())
    take_step(never_bad, good())
    assert_equal(weights(network), weights(untouched))
    assert_equal(optimizer.state(), never_bad.state())


def test_the_skip_flag_of_one_step_does_not_stay_for_the_next() -> None:
    network = small()
    optimizer = NetworkOptimizer(network, OptimizerSettings(lr=0.1), 10)
    for flag in (True, False, True):
        before = weights(network)
        give_gradients(network, seed=2)
        take_step(optimizer, torch.tensor(flag))
        assert torch.equal(weights(network)["linear.weight"], before["linear.weight"]) == flag


# ---------------------------------------------------------------------- state


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_state_finds_its_parameter_in_a_network_of_another_order(name: str) -> None:
    """D-R4: stored by position, moments land on other parameters when the order of construction differs."""
    first = small()
    settings = {"optimizer": name, "lr": 0.02, "wd": 0.1}
    optimizer = stepped(first, steps=4, **settings)
    second = small(backwards=True)
    assert list(dict(second.named_parameters())) != list(dict(first.named_parameters()))
    second.load_state_dict(first.state_dict())
    other = NetworkOptimizer(second, OptimizerSettings(**settings), 100)
    other.load_state(copies(optimizer.state()), updates=4)
    assert_equal({k: other.state()[k] for k in optimizer.state()}, optimizer.state())
    for network, each in ((first, optimizer), (second, other)):
        give_gradients(network, seed=50)
        take_step(each, good())
    assert_equal(weights(second), {k: weights(first)[k] for k in weights(second)})


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_run_resumed_in_the_middle_equals_the_unbroken_one(name: str) -> None:
    settings = OptimizerSettings(optimizer=name, lr=0.02, warmup_steps=6, scheduler="cosine", max_grad_norm=1.0)

    def go(optimizer: NetworkOptimizer, network: nn.Module, start: int, end: int) -> list[float]:
        found = []
        for step in range(start, end):
            found.append(optimizer.schedule.lr)
            give_gradients(network, seed=step)
            take_step(optimizer, good())
        return found

    whole, half = small(), small()
    unbroken = go(NetworkOptimizer(whole, settings, 12), whole, 0, 12)
    first = NetworkOptimizer(half, settings, 12)
    broken = go(first, half, 0, 5)
    second = NetworkOptimizer(half, settings, 12)
    second.load_state(copies(first.state()), updates=5)
    broken += go(second, half, 5, 12)
    assert broken == unbroken
    assert_equal(weights(half), weights(whole))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_state_from_a_file_fits_a_network_of_another_layout_in_memory(name: str) -> None:
    """Files hold tensors row by row; a convolution in channels_last is not, and fused optimizers do not look."""

    def build() -> nn.Module:
        torch.manual_seed(0)
        return nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last)

    settings, whole, half = OptimizerSettings(optimizer=name, lr=0.02), build(), build()
    unbroken = NetworkOptimizer(whole, settings, 9)
    first, second = NetworkOptimizer(half, settings, 9), NetworkOptimizer(half, settings, 9)
    for step in range(4):
        if step == 2:
            second.load_state({k: v.clone(memory_format=torch.contiguous_format) for k, v in first.state().items()}, 2)
        for network, optimizer in ((whole, unbroken), (half, first if step < 2 else second)):
            give_gradients(network, seed=step)
            network.weight.grad = network.weight.grad.contiguous(memory_format=torch.channels_last)
            take_step(optimizer, good())
    assert_equal(weights(half), weights(whole))


def test_state_is_taken_over_not_shared() -> None:
    network = small()
    optimizer = stepped(network, steps=2)
    saved = optimizer.state()
    other = NetworkOptimizer(small(), OptimizerSettings(), 100)
    other.load_state(saved, updates=2)
    kept = copies(saved)
    give_gradients(small_of(other), seed=9)
    take_step(other, good())
    assert_equal(saved, kept)


def small_of(optimizer: NetworkOptimizer) -> nn.Module:
    """The optimizer's parameters as a module, for `give_gradients`."""
    holder = nn.Module()
    for name, parameter in optimizer.named.items():
        holder.register_parameter(name.replace(".", "_"), parameter)
    return holder


def test_going_back_to_an_earlier_state_takes_the_schedule_and_the_moments_back() -> None:
    """A trainer may load a checkpoint of a step before the one it has reached."""
    settings = OptimizerSettings(lr=1.0, scheduler="StepLR", scheduler_kwargs={"step_size": 3, "gamma": 0.1})
    network = small()
    optimizer = NetworkOptimizer(network, settings, 100)
    fresh = copies(optimizer.state())
    rates = []
    for step in range(8):
        rates.append(optimizer.schedule.lr)
        give_gradients(network, seed=step)
        take_step(optimizer, good())
        if step == 3:
            middle = copies(optimizer.state())
    optimizer.load_state(middle, updates=4)
    assert (optimizer.schedule.step, optimizer.schedule.lr) == (4, rates[4])
    assert_equal(optimizer.state(), middle)
    optimizer.load_state(fresh, updates=0)
    assert (optimizer.schedule.step, optimizer.schedule.lr) == (0, rates[0])
    assert optimizer.state() == {}, "saved before the first update"


def test_state_of_an_unknown_parameter_is_refused() -> None:
    optimizer = NetworkOptimizer(small(), OptimizerSettings(), 10)
    with pytest.raises(ValueError, match=r"optimizer state for nowhere\.weight, which this network lacks"):
        optimizer.load_state({"nowhere.weight/exp_avg": torch.zeros(2)}, updates=1)


@pytest.mark.parametrize("entry", ["exp_avg", "step"])
def test_state_of_another_shape_is_refused(entry: str) -> None:
    """A fused optimizer would go through it side by side with its parameter, past its end."""
    optimizer = stepped(small(), steps=1)
    state = copies(optimizer.state())
    state[f"linear.weight/{entry}"] = torch.zeros(2)
    with pytest.raises(ValueError, match=rf"has {entry} of shape \(2,\) for linear.weight, which has shape \(5, 4\)"):
        optimizer.load_state(state, updates=1)


def test_state_of_another_optimizer_is_refused() -> None:
    lion = stepped(small(), steps=2, optimizer="lion")
    adamw = NetworkOptimizer(small(), OptimizerSettings(), 10)
    with pytest.raises(ValueError, match="another optimizer than adamw"):
        adamw.load_state(lion.state(), updates=2)


# ---------------------------------------------------------------------- loss scale


def test_the_loss_scale_halves_on_a_bad_step_and_doubles_after_a_run_of_good_ones() -> None:
    scale = LossScale(torch.device("cpu"), initial=1024.0, interval=3)
    seen = []
    for bad in (0, 0, 0, 0, 1, 1, 0, 0, 1, 0, 0, 0, 0):
        scale.update(torch.tensor(bool(bad)))
        seen.append(float(scale.value))
    assert seen == [1024, 1024, 2048, 2048, 1024, 512, 512, 512, 256, 256, 256, 512, 512]


def test_the_loss_scale_goes_on_where_it_was_saved() -> None:
    def run(scale: LossScale, steps: int) -> None:
        for _ in range(steps):
            scale.update(torch.tensor(False))

    unbroken, first, second = (LossScale(torch.device("cpu"), interval=4) for _ in range(3))
    run(unbroken, 6)
    run(first, 3)
    second.load_state(first.state())
    run(second, 3)
    assert_equal(second.state(), unbroken.state())
