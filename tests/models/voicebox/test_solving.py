import copy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from helicon.models.voicebox import solving
from helicon.models.voicebox.flow import ConditionalFlowMatcherWrapper
from helicon.models.voicebox.model import Prepared
from helicon.models.voicebox.solving import MAX_SESSIONS, Drawn, Evaluator
from helicon.nn.capture import Weights
from models.voicebox.test_flow import N, features, ids, wrapped
from models.voicebox.test_model import FEATURES, KINDS, build, inputs

# What there may be to say, after which prompt, and how the velocity is followed.
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "guided": {"cond_scale": 2.5},
    "guided for a time": {"cond_scale": 2.5, "guidance_interval": (0.2, 0.6)},
    "of unequal lengths": {"lengths": [N, N - 2], "cond_scale": 2.0},
    "four velocities at once": {"method": "rk4", "cond_scale": 2.0, "cond": None},
    "adaptive": {"method": "adaptive", "atol": 1e-2, "rtol": 1e-2},
}


def asked(seed: int = 0) -> dict[str, Any]:
    return {
        "cond": features(2, 3, seed), "text_token_ids": ids(3, 2, seed=seed), "lengths": [N, N], "steps": 3, "seed": seed
    }  # fmt: skip


def drawn(flow: ConditionalFlowMatcherWrapper, evaluator: Evaluator, **options: Any) -> Drawn:
    flow.evaluator = evaluator
    return flow.draw(**{**asked(), **options})


# ------------------------------------------------------------------ evaluations that are kept, without a device


class Again:
    """In the place of a CUDA graph: what was captured is done again, with the buffers it was captured with."""

    def __init__(self, step: Callable[[], object], pool: Any):
        step()
        self.replay = step


class Capturing(Evaluator):
    def _captures(self, device: torch.device) -> bool:
        return True


@pytest.fixture
def without_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(solving, "captured", Again)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: "pool")


@pytest.mark.usefixtures("without_graphs")
@pytest.mark.parametrize("options", CASES.values(), ids=CASES.keys())
def test_kept_evaluations_are_those_of_the_day(options: dict[str, Any]) -> None:
    """Other texts, prompts and noise, and other weights."""
    flow, kept = wrapped(build()), Capturing()
    for seed in range(3):
        given = {**asked(seed), **options}
        assert torch.equal(
            drawn(flow, kept, **given).features, drawn(flow, Evaluator(capture=False), **given).features
        ), seed
        with torch.no_grad():
            flow.voicebox.to_velocity.weight.mul_(1.1)
    assert len(kept._sessions) == 1


@pytest.mark.usefixtures("without_graphs")
def test_buffers_stay_where_they_are_and_results_are_not_among_them() -> None:
    flow, kept = wrapped(build()), Capturing()
    first = drawn(flow, kept, lengths=[N, 5])
    before = [tensor.clone() for tensor in (first.features, first.mask, first.hidden)]
    (session,) = kept._sessions.values()
    places = [tensor.data_ptr() for tensor in buffers(session)]
    drawn(flow, kept, **asked(1) | {"lengths": [6, N]})
    assert kept._sessions == {next(iter(kept._sessions)): session}
    assert [tensor.data_ptr() for tensor in buffers(session)] == places
    for tensor, was in zip((first.features, first.mask, first.hidden), before, strict=True):
        assert torch.equal(tensor, was)


def buffers(session: Any) -> list[Tensor]:
    return [session.x, session.time, session.found, session.prepared.embedding, session.prepared.mask]


@pytest.mark.usefixtures("without_graphs")
def test_few_shapes_are_kept_and_none_of_another_network() -> None:
    flow, kept = wrapped(build()), Capturing()
    for length in range(4, 4 + MAX_SESSIONS + 2):
        drawn(flow, kept, lengths=length)
    drawn(flow, kept, lengths=6)  # which is used again, and so the last to be given up
    lengths = [key[0][1] for key in kept._sessions]
    assert lengths == [7, 8, 9, 6] and len(lengths) == MAX_SESSIONS
    other = wrapped(build(alignment="frames"))
    drawn(other, kept, lengths=6)
    assert len(kept._sessions) == 1


@pytest.mark.usefixtures("without_graphs")
def test_a_copied_network_keeps_nothing_of_the_other() -> None:
    flow = wrapped(build())
    drawn(flow, Capturing(), lengths=5)
    flow.evaluator.capture, flow.evaluator.compile = False, True
    copied = copy.deepcopy(flow).evaluator
    assert (copied.capture, copied.compile) == (False, True) and not copied._sessions and copied._weights is None


def test_without_a_device_nothing_is_captured_or_kept() -> None:
    flow, evaluator = wrapped(build()), Evaluator()
    drawn(flow, evaluator)
    assert not evaluator._sessions
    with pytest.raises(ValueError, match="capture=True needs a CUDA device, and the network is on cpu"):
        drawn(flow, Evaluator(capture=True))


# ------------------------------------------------------------------ precision


def test_half_weights_add_up_in_single_precision() -> None:
    """As in training: sums of many layers would lose what each of them adds."""
    network = build()
    given = inputs(network)
    prepared = network.prepare(given["cond_mask"], cond=given["cond"], cond_token_ids=given["cond_token_ids"])
    exact = network.velocity(prepared, given["x"], given["times"])
    types: list[torch.dtype] = []
    network.transformer.layers[1].register_forward_pre_hook(lambda _, inputs: types.append(inputs[0].dtype))
    with Weights(network, torch.bfloat16).in_place(), torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        half = Prepared(prepared.embedding.bfloat16(), prepared.hidden, prepared.mask)
        found = network.velocity(half, given["x"], given["times"])
    assert types == [torch.float32]
    assert (found - exact).norm() < 0.05 * exact.norm()


@pytest.mark.slow
def test_compiled_evaluations_are_eager_ones() -> None:
    """In a process of its own: the compiler cannot see through the type checks of this one."""
    script = Path(__file__).with_name("compile_voicebox.py")
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["speaks"]


# ------------------------------------------------------------------ on a device


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS.keys())
@pytest.mark.parametrize("options", CASES.values(), ids=CASES.keys())
def test_captured_evaluations_are_eager_ones(kind: dict[str, Any], options: dict[str, Any]) -> None:
    flow, captured, eager = wrapped(build(**kind)).cuda(), Evaluator(), Evaluator(capture=False)
    for seed in range(3):
        given = {**asked(seed), **options}
        if not flow.voicebox.condition_on_text:
            del given["text_token_ids"]
        made = [drawn_with(flow, evaluator, given) for evaluator in (captured, eager)]
        assert torch.equal(*made), seed
        with torch.no_grad():
            flow.voicebox.to_velocity.weight.mul_(1.1)  # a captured graph reads the weights of the day
    assert len(captured._sessions) == 1 and not eager._sessions


def drawn_with(flow: ConditionalFlowMatcherWrapper, evaluator: Evaluator, given: dict[str, Any]) -> Tensor:
    flow.evaluator = evaluator
    return flow.draw(**given).features


@pytest.mark.gpu
def test_on_a_device_it_speaks_as_without_one() -> None:
    """But for the precision of half weights."""
    flow = wrapped(build())
    noise = torch.randn(2, N, FEATURES)
    hidden = torch.ones(2, N, dtype=torch.bool)
    condition = {"cond_token_ids": ids(3, 2)}
    how = solving.Solving(steps=4, cond_scale=1.5)
    with torch.no_grad(), flow.evaluator.running(flow.voicebox):
        exact = how.solve(flow.voicebox, noise, hidden, condition, evaluator=flow.evaluator).value
    flow.cuda()
    with torch.no_grad(), flow.evaluator.running(flow.voicebox):
        there = {name: value.cuda() for name, value in condition.items()}
        found = how.solve(flow.voicebox, noise.cuda(), hidden.cuda(), there, evaluator=flow.evaluator).value
    assert (found.cpu() - exact).norm() < 0.1 * exact.norm()


@pytest.mark.gpu
@pytest.mark.parametrize("capture", [True, False])
def test_the_solver_never_waits_for_the_device(capture: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    flow, evaluator = wrapped(build()).cuda(), Evaluator(capture=capture)
    drawn(flow, evaluator, cond_scale=2.0)  # captures
    integrate = solving.integrate

    def watched(*arguments: Any, **options: Any) -> Any:
        torch.cuda.set_sync_debug_mode("error")
        try:
            return integrate(*arguments, **options)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    monkeypatch.setattr(solving, "integrate", watched)
    drawn(flow, evaluator, cond_scale=2.0)
