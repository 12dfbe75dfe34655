"""Tiny tasks whose every number can be checked by hand."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from helicon.engine.task import Batch, Loss, Task, Update
from helicon.engine.trainer import Trainer
from helicon.nn.network import Network


class Line(Network):
    """A small regressor with dropout, so that randomness matters."""

    def __init__(self, dim: int = 3, width: int = 5, dropout: float = 0.0):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(dim, width), nn.Linear(width, 1)])
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.layers
        return second(self.dropout(torch.tanh(first(x)))).squeeze(-1)


class LineTask(Task):
    def forward(self, batch: Batch) -> tuple[Tensor, Batch]:
        return self.networks["model"](batch["x"]), batch

    def updates(self, step: int) -> Sequence[Update]:
        return [Update("model", self.loss)]

    def loss(self, outputs: tuple[Tensor, Batch]) -> Loss:
        guess, batch = outputs
        error = (guess - batch["y"]).square().mean()
        return Loss(error, {"mse": error.detach()})

    def validate(self, batch: Batch) -> Loss:
        return self.loss(self.forward(batch))

    def sample(self, batch: Batch, seed: int) -> Tensor:
        return self.networks["model"](batch["x"]) + torch.randn(())

    def present(self, batch: Batch, samples: Any) -> dict[str, Any]:
        text = "\n".join(f"{name} {value.tolist()}" for name, value in samples.items())
        return {"guesses.txt": lambda path: path.write_text(text)}


class GuessingTask(LineTask):
    """Its validation loss is random; and it counts on which side of zero what it sees lies, in each dimension."""

    def validate(self, batch: Batch) -> Loss:
        sides = torch.stack([(batch["x"] < 0).sum(dim=0), (batch["x"] >= 0).sum(dim=0)]).float()
        return Loss(torch.rand(len(batch["x"])).mean(), counts={"sides": sides})

    def summary(self, counts: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        sides = counts["sides"]
        return {"items": sides.sum(dim=0)[0], "rarest": sides.min(dim=0).values[0]}


class MaskedTask(LineTask):
    """The loss is a mean over masked items, whose number differs between batches."""

    def weight(self, batch: Batch) -> Tensor:
        return batch["mask"].sum()

    def loss(self, outputs: tuple[Tensor, Batch]) -> Loss:
        guess, batch = outputs
        mask = batch["mask"]
        return Loss(((guess - batch["y"]).square() * mask).sum() / mask.sum())


class Pair(Network):
    """A generator and its adversary."""

    def __init__(self, dim: int = 3):
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(dim, 4), nn.Tanh(), nn.Linear(4, dim))
        self.discriminator = nn.Sequential(nn.Linear(dim, 4), nn.Tanh(), nn.Linear(4, 1))


class PairTask(Task):
    def __init__(self, model: Pair):
        networks = {"generator": model.generator, "discriminator": model.discriminator}
        super().__init__(model, networks, averaged=["generator"])

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        return self.networks["generator"](batch["x"]), batch["x"]

    def updates(self, step: int) -> Sequence[Update]:
        return [Update("discriminator", self.adversary_loss), Update("generator", self.loss)]

    def adversary_loss(self, outputs: tuple[Tensor, Tensor]) -> Loss:
        fake, real = outputs
        scores = self.networks["discriminator"](torch.cat([fake.detach(), real]))
        fake_score, real_score = scores.chunk(2)
        return Loss((1 + fake_score).square().mean() + (1 - real_score).square().mean())

    def loss(self, outputs: tuple[Tensor, Tensor]) -> Loss:
        fake, real = outputs
        return Loss((fake - real).square().mean() - 0.1 * self.networks["discriminator"](fake).mean())

    def validate(self, batch: Batch) -> Loss:
        fake, real = self.forward(batch)
        return Loss((fake - real).square().mean())


class Points(torch.utils.data.Dataset):
    """Seeded points with a target and a mask of varying weight."""

    def __init__(self, count: int = 64, dim: int = 3):
        generator = torch.Generator().manual_seed(count)
        self.x = torch.randn(count, dim, generator=generator)
        self.y = self.x.sum(-1).sin()
        self.mask = torch.randint(1, 9, (count,), generator=generator).float()

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": self.x[index], "y": self.y[index], "mask": self.mask[index]}


class ToyTrainer(Trainer):
    name = "toy"
    defaults: ClassVar = {"num_train_steps": 6, "batch_size": 4, "tensorboard": False, "valid_frac": 0.0, "lr": 1e-2}

    def __init__(self, task: Task, **keywords: Any):
        keywords.setdefault("dataset", Points())
        super().__init__(task, **keywords)


def line_task(dropout: float = 0.0, kind: type[LineTask] = LineTask) -> LineTask:
    torch.manual_seed(3)
    return kind(Line(dropout=dropout))


def pair_task() -> PairTask:
    torch.manual_seed(3)
    return PairTask(Pair())


def weights(task: Task) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in task.model.own_state().items()}
