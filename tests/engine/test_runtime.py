"""Random states go and come back, precision is the one asked for, and a user's keywords stay as they are."""

import json
import random
from collections.abc import Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator, DistributedDataParallelKwargs
from accelerate.state import AcceleratorState, GradientState
from accelerate.tracking import GeneralTracker
from torch import nn

from helicon.engine.options import TrainerOptions
from helicon.engine.runtime import (
    Runtime,
    _precision,
    fixed_randomness,
    random_state,
    seed_everything,
    set_random_state,
)


@pytest.fixture(autouse=True)
def _own_accelerate_state() -> Iterator[None]:
    """Accelerate keeps one state per process; what a test asks of it must not reach the next."""
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def options(**chosen: Any) -> TrainerOptions:
    return TrainerOptions(num_train_steps=1, batch_size=1, **chosen)


def draw() -> list[float]:
    """Something of every generator, twice over, with the normal numbers that are made in pairs."""
    numbers = [random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn(), torch.rand(()).item()]
    return [*numbers, torch.randn(3)[0].item(), random.gauss(0, 1), np.random.randn()]


# ---------------------------------------------------------------------- random states


def test_the_state_of_every_generator_survives_json() -> None:
    seed_everything(3)
    draw()
    random.gauss(0, 1)  # leaves the second number of a pair waiting, here
    np.random.randn()  # and here
    state = json.loads(json.dumps(random_state()))
    expected = [draw(), draw()]
    seed_everything(99)
    set_random_state(state)
    assert [draw(), draw()] == expected


def test_a_seed_decides_every_generator() -> None:
    def drawn(seed: int) -> list[float]:
        seed_everything(seed)
        return draw()

    assert drawn(5) == drawn(5)
    assert all(a != b for a, b in zip(drawn(5), drawn(6), strict=True))
    seed_everything(2**40 + 1)  # numpy takes 32 bits


@pytest.mark.parametrize("seed", [0, -3, 1_800_000_000_000_000_000 * 1_000_003, 2**64])
def test_a_seed_may_be_as_large_as_one_likes(seed: int) -> None:
    seed_everything(seed)
    first = draw()
    seed_everything(seed + 1)
    other = draw()
    seed_everything(seed)
    assert draw() == first != other


def test_fixed_randomness_leaves_the_training_noise_untouched() -> None:
    seed_everything(1)
    before, after = draw(), draw()
    seed_everything(1)
    first = draw()
    with fixed_randomness(8):
        inside = draw()
    assert (first, draw()) == (before, after)
    with fixed_randomness(8):
        assert draw() == inside
    with fixed_randomness(9):
        assert draw() != inside


def test_the_training_noise_comes_back_when_the_block_raises() -> None:
    seed_everything(1)
    expected = draw()
    seed_everything(1)
    with pytest.raises(ZeroDivisionError), fixed_randomness(8):
        draw()
        raise ZeroDivisionError
    assert draw() == expected


# ---------------------------------------------------------------------- precision


def test_a_cpu_computes_in_full_precision_unless_asked() -> None:
    runtime = Runtime(options())
    assert runtime.precision == "no"
    with runtime.autocast():
        assert nn.Linear(2, 2)(torch.ones(1, 2)).dtype == torch.float32


def test_bf16_is_an_autocast() -> None:
    runtime = Runtime(options(mixed_precision="bf16"))
    layer = nn.Linear(2, 2)
    with runtime.autocast():
        assert layer(torch.ones(1, 2)).dtype == torch.bfloat16
    assert layer.weight.dtype == torch.float32


@pytest.mark.parametrize("how", [{"mixed_precision": "fp16"}, {"accelerate_kwargs": {"mixed_precision": "fp16"}}])
def test_fp16_on_a_cpu_is_refused(how: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="mixed_precision='fp16' needs a GPU: use 'bf16' or 'no' on a CPU"):
        Runtime(options(**how))


@pytest.mark.parametrize(
    ("chosen", "expected"),
    [
        ({}, "bf16"),
        ({"mixed_precision": "no"}, "no"),
        ({"mixed_precision": "fp16"}, "fp16"),
        ({"accelerate_kwargs": {"mixed_precision": "no"}}, "no"),
        ({"accelerate_kwargs": {"mixed_precision": "fp16"}}, "fp16"),
        ({"mixed_precision": "no", "accelerate_kwargs": {"mixed_precision": "fp16"}}, "no"),
    ],
)
def test_on_a_gpu_the_option_comes_first_then_accelerates_then_bf16(
    chosen: dict[str, Any], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: True)
    assert _precision(options(**chosen), torch.device("cuda")) == expected


@pytest.mark.parametrize(("launched", "expected"), [("bf16", "bf16"), ("no", "no")])
def test_the_precision_that_accelerate_launch_names_is_used(
    launched: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", launched)
    assert Runtime(options()).precision == expected
    assert Runtime(options(mixed_precision="no")).precision == "no"


def test_what_another_loop_would_do_is_refused_instead_of_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    own = Accelerator(cpu=True, gradient_accumulation_steps=3)
    for given in ({"accelerate_kwargs": {"gradient_accumulation_steps": 4}}, {"accelerator": own}):
        with pytest.raises(ValueError, match=r"gradient_accumulation_steps=[34]: write it as grad_accum_every"):
            Runtime(options(**given))
    assert Runtime(options(accelerate_kwargs={"gradient_accumulation_steps": 1})).precision == "no"
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "2")
    with pytest.raises(ValueError, match="gradient_accumulation_steps=2: write it as grad_accum_every"):
        Runtime(options())
    monkeypatch.delenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS")
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(ValueError, match=r"configured for FSDP.*torchrun.*trainer.shard=true"):
        Runtime(options())


def test_an_old_gpu_computes_in_full_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: False)
    assert _precision(options(), torch.device("cuda")) == "no"


def test_a_precision_accelerate_knows_and_the_loop_does_not_is_refused() -> None:
    with pytest.raises(ValueError, match="mixed_precision='fp8' in accelerate_kwargs must be one of"):
        Runtime(options(accelerate_kwargs={"mixed_precision": "fp8"}))


def test_the_precision_of_a_users_own_accelerator_is_used() -> None:
    own = Accelerator(cpu=True, mixed_precision="bf16")
    runtime = Runtime(options(accelerator=own))
    assert runtime.accelerator is own and runtime.precision == "bf16"
    assert Runtime(options(accelerator=own, mixed_precision="no")).precision == "no"


# ---------------------------------------------------------------------- accelerate


class Silent(GeneralTracker):
    name = "silent"
    requires_logging_directory = False
    tracker = None


def test_the_users_keywords_are_not_changed_and_do_not_leak_into_the_next_run() -> None:
    """D-T9: the reference wrote log_with into a mutable default that all later trainers shared."""
    handler = DistributedDataParallelKwargs(find_unused_parameters=True)
    kwargs: dict[str, Any] = {"kwargs_handlers": [handler], "mixed_precision": "bf16", "project_dir": "logs"}
    before = {**kwargs, "kwargs_handlers": [handler]}
    runtime = Runtime(options(accelerate_kwargs=kwargs, trackers=[Silent()]))
    assert [tracker.name for tracker in runtime.accelerator.log_with] == ["silent"]
    assert kwargs == before
    assert Runtime(options()).accelerator.log_with == []


def test_handlers_of_the_user_stand_beside_the_timeout() -> None:
    handler = DistributedDataParallelKwargs(find_unused_parameters=True)
    kwargs = {"kwargs_handlers": [handler]}
    runtime = Runtime(options(accelerate_kwargs=kwargs, init_process_group_timeout_seconds=77))
    assert runtime.accelerator.ddp_handler is handler
    assert runtime.accelerator.init_handler.timeout == timedelta(seconds=77)


def test_splitting_batches_is_an_option_of_the_trainer() -> None:
    with pytest.raises(ValueError, match="write split_batches=True as an option of the trainer"):
        Runtime(options(accelerate_kwargs={"split_batches": True}))


def test_sharding_on_one_process_is_refused() -> None:
    with pytest.raises(ValueError, match="shard=True needs several processes: start the run with torchrun"):
        Runtime(options(shard=True))


# ---------------------------------------------------------------------- one process


def test_one_process_is_all_of_them() -> None:
    runtime = Runtime(options())
    assert (runtime.rank, runtime.world_size) == (0, 1)
    assert runtime.is_main and runtime.is_local_main and not runtime.is_distributed
    assert runtime.gather({"a": 1}) == [{"a": 1}]
    assert runtime.sum(torch.tensor(3.0)) == 3.0
    assert runtime.any(torch.tensor(True)) and not runtime.any(torch.tensor(False))
    assert runtime.peak_flops() is None
    runtime.wait()


def test_a_network_of_one_process_is_wrapped_in_nothing() -> None:
    runtime, network = Runtime(options()), nn.Linear(2, 2)
    assert runtime.wrap(network, [network]) is network
    assert network._compiled_call_impl is None, "a CPU run does not compile unless asked"
    with runtime.without_sync({"a": network}):
        network(torch.ones(1, 2)).sum().backward()
    assert network.weight.grad is not None


@pytest.mark.parametrize(("chosen", "compiles"), [("auto", False), (False, False), (True, True), ("graphs", False)])
def test_compilation_is_as_asked_and_auto_leaves_a_cpu_alone(chosen: Any, compiles: bool) -> None:
    assert Runtime(options(compile=chosen)).compiles is compiles


@pytest.mark.slow  # loads the compiler
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")  # torch's own import
def test_compilation_takes_only_the_networks_a_task_allows() -> None:
    runtime, yes, no = Runtime(options(compile=True)), nn.Linear(2, 2), nn.Linear(2, 2)
    whole = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    runtime.wrap(yes, [yes])
    runtime.wrap(no)
    runtime.wrap(whole, [whole[1]])
    is_compiled = [module._compiled_call_impl is not None for module in (yes, no, whole, *whole)]
    assert is_compiled == [True, False, False, False, True]


def test_graphs_are_of_one_process_and_several_say_so(caplog: pytest.LogCaptureFixture) -> None:
    several = SimpleNamespace(device=torch.device("cuda"), process_index=0, num_processes=2, mixed_precision="no")
    runtime = Runtime(options(compile="graphs", mixed_precision="no", accelerator=several))
    assert runtime.compiles and not runtime.records
    assert "records the steps of a single process: this run is only compiled" in caplog.text


def test_graphs_on_a_cpu_are_told_to_be_without_effect(caplog: pytest.LogCaptureFixture) -> None:
    assert not Runtime(options(compile="graphs")).records
    assert 'compile="graphs" is for CUDA: this run, on cpu, is not compiled' in caplog.text


class Starting(nn.Module):
    """Takes its beginning from the first batch, as a codebook does that begins with k-means."""

    starts_from_data = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.was_compiled = torch.compiler.is_compiling()
        self.starts_from_data = False
        return x + 1


@pytest.mark.slow  # loads the compiler
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")
def test_a_step_that_is_the_only_one_of_its_kind_is_not_compiled() -> None:
    runtime, network, seen = Runtime(options(compile=True)), Starting(), []
    network.compile(backend="eager")
    for _ in range(3):
        with runtime.step([network]):
            assert network(torch.ones(1)) == 2
        seen.append(network.was_compiled)
    assert seen == [False, True, True]


def test_tensors_of_a_batch_move_and_the_rest_stays() -> None:
    runtime = Runtime(options())
    runtime.device = torch.device("meta")  # any device that is not the one they are on
    batch = {"x": torch.ones(2), "many": [torch.ones(1), torch.ones(2)], "text": ["a", "b"], "none": []}
    moved = runtime.to_device(batch)
    assert moved["x"].is_meta and all(item.is_meta for item in moved["many"])
    assert moved["text"] == ["a", "b"] and moved["none"] == []
    assert not batch["x"].is_meta, "the batch given is not changed"
