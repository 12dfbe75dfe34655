"""Shared by the experiments that train for some minutes: how many steps fit into the time, and what the run looked like."""

import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

import report
from helicon.engine.trainer import Trainer

IMPORTS = 20  # seconds that a command has spent before it can look at the clock


class Deadline:
    """The seconds a stage may train: its minutes, or less where its budget is spent before."""

    def __init__(self, start: float, minutes: float, budget: float | None, reserve: float):
        self.training = 60 * minutes
        self.end = None if budget is None else start + budget - IMPORTS - reserve

    def seconds(self) -> float:
        left = self.training if self.end is None else min(self.training, self.end - time.monotonic())
        if left <= 0:
            raise SystemExit("nothing is left of the time to train: raise --budget-seconds or the minutes")
        return left


class Best:
    """The averaged weights of the lowest validation loss. Little data is known by heart long before minutes are over."""

    def __init__(self, trainer: Trainer):
        self.trainer, self.step, self.loss = trainer, 0, float("inf")
        self.weights: list[Tensor] = []

    def look(self) -> None:
        """After each step."""
        trainer = self.trainer
        if trainer.valid_step != trainer.step or trainer.valid_loss is None or trainer.valid_loss >= self.loss:
            return
        assert trainer.ema is not None
        self.step, self.loss = trainer.step, trainer.valid_loss
        self.weights = [tensor.clone() for tensor in trainer.ema.average]

    def put_back(self) -> dict[str, Any]:
        """The trainer's averaged weights are these again."""
        if not self.weights:
            return {}
        assert self.trainer.ema is not None
        for average, kept in zip(self.trainer.ema.average, self.weights, strict=True):
            average.copy_(kept)
        return {"judged at step": self.step}


def train_for(
    deadline: Deadline,
    num_probed: int,
    build: Callable[..., Trainer],
    adversary_from: float = 1.0,
    keep_best: bool = False,
) -> tuple[Trainer, dict[str, Any]]:
    """Trains as many steps as fit, and says how many those were; with `keep_best`, the averaged weights are then those that
    validated best.

    A trainer that is thrown away measures the steps, those with the adversary apart; the weights are then put back. It also
    compiles: the network is the same, so the second trainer finds everything compiled.
    """
    with tempfile.TemporaryDirectory() as folder:
        probe = build(10**6, 2 * num_probed, Path(folder) / "probe")
        model = probe.task.model
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        with probe.session():
            plain = _seconds_a_step(probe, num_probed)
            mean = plain
            if adversary_from < 1:
                mean = adversary_from * plain + (1 - adversary_from) * _seconds_a_step(probe, num_probed)
            probe.validate()
        model.load_state_dict(before)
    del probe, before
    seconds = deadline.seconds()
    steps = max(10, int(0.97 * seconds / mean))
    trainer = build(steps + 1, int(adversary_from * steps), None)  # a last step would save and sample
    best = Best(trainer)
    end, start = time.monotonic() + seconds, time.monotonic()
    with trainer.session():
        while trainer.step < steps and time.monotonic() < end:
            trainer.train_step()
            if keep_best:
                best.look()
        report.synchronize()
    took = time.monotonic() - start
    return trainer, {
        "steps": trainer.step,
        "of": steps,
        "minutes": took / 60,
        "ms per step": 1000 * took / trainer.step,
        **best.put_back(),
    }


def _seconds_a_step(trainer: Trainer, steps: int) -> float:
    """The median of groups of steps: compilers and recorders may still be at work in one of them."""
    for _ in range(steps):
        trainer.train_step()
    at_once, times = max(1, steps // 6), []
    for _ in range(max(1, steps // at_once)):
        report.synchronize()
        start = time.monotonic()
        for _ in range(at_once):
            trainer.train_step()
        report.synchronize()
        times.append((time.monotonic() - start) / at_once)
    return statistics.median(times)


def curves(run: Path, names: Sequence[str], width: int = 480, height: int = 240) -> Image.Image:
    """A panel for each of the numbers a run logged, over its steps; the last value is written beside its name."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    font, margin = ImageFont.load_default(12), 24
    sheet = Image.new("RGB", (width * len(names), height), "white")
    draw = ImageDraw.Draw(sheet)
    for panel, name in enumerate(names):
        points = [(line["step"], line[name]) for line in lines if isinstance(line.get(name), (int, float))]
        if not points:
            continue
        (left, right), values = (points[0][0], points[-1][0]), sorted(value for _, value in points)
        low, high = values[0], values[int(0.98 * (len(values) - 1))]  # the very first losses would flatten the rest
        place = lambda step, value, left=left, right=right, low=low, high=high, panel=panel: (
            panel * width + margin + (step - left) / max(1, right - left) * (width - 2 * margin),
            height - margin - (min(value, high) - low) / max(1e-9, high - low) * (height - 2 * margin),
        )
        draw.line([place(*point) for point in points], fill=(31, 119, 180), width=2)
        draw.text((panel * width + margin, 4), f"{name}: {points[-1][1]:.4g}", fill="black", font=font)
        draw.text(
            (panel * width + margin, height - margin + 4), f"{low:.3g} to {high:.3g}, {right} steps", "grey", font
        )
    return sheet
