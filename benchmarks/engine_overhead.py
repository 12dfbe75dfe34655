"""What does the loop cost? The same model, batch and optimizer in Helicon's trainer and in a bare torch loop, in one run.

    python benchmarks/engine_overhead.py            # on a GPU: a 12-layer transformer, compiled, bf16; on a CPU: a small one

The two take turns in blocks of steps, so that a change of clock or load falls on both; the overhead is that of the medians.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import report
from helicon.engine.task import Batch, Loss, Task, Update
from helicon.engine.trainer import Trainer
from helicon.nn.network import Network
from helicon.nn.transformer import Transformer

IS_CUDA = torch.cuda.is_available()
SIZE = dict(dim=1024, depth=12, batch=16, length=512) if IS_CUDA else dict(dim=128, depth=4, batch=4, length=128)
VOCABULARY, LR, CLIP = 512, 3e-4, 0.5


class LanguageModel(Network):
    def __init__(self, dim: int, depth: int):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, dim)
        self.transformer = Transformer(dim, depth, heads=dim // 64, causal=True)
        self.head = nn.Linear(dim, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        logits = self.head(self.transformer(self.embedding(tokens[:, :-1])))
        return F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())


class LanguageTask(Task):
    def forward(self, batch: Batch) -> Tensor:
        return self.networks["model"](batch["tokens"])

    def updates(self, step: int) -> list[Update]:
        return [Update("model", Loss)]


class Texts(torch.utils.data.Dataset):
    """Random tokens, in memory: reading data is not what is measured."""

    def __init__(self) -> None:
        self.tokens = torch.randint(VOCABULARY, (256, SIZE["length"] + 1), generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"tokens": self.tokens[index]}


class TextTrainer(Trainer):
    name = "overhead"


def bare_loop() -> object:
    model = LanguageModel(SIZE["dim"], SIZE["depth"]).to(report.device())
    if IS_CUDA:
        model.compile()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.99), weight_decay=0.0, fused=True)
    loader = torch.utils.data.DataLoader(
        Texts(), batch_size=SIZE["batch"], shuffle=True, drop_last=True, pin_memory=IS_CUDA
    )
    while True:
        for batch in loader:
            tokens = batch["tokens"].to(report.device(), non_blocking=True)
            with torch.autocast(report.device().type, torch.bfloat16, enabled=IS_CUDA):
                loss = model(tokens)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            optimizer.zero_grad()
            yield


def helicon_loop(folder: str) -> object:
    model = LanguageModel(SIZE["dim"], SIZE["depth"])
    trainer = TextTrainer(
        LanguageTask(model), dataset=Texts(), batch_size=SIZE["batch"], lr=LR, max_grad_norm=CLIP, valid_frac=0, use_ema=False,
        num_train_steps=10**6, save_results_every=10**6, save_model_every=10**6, log_every=10, tensorboard=False,
        results_folder=Path(folder) / "run",
    )  # fmt: skip
    with trainer.session():
        while True:
            trainer.train_step()
            yield


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=12)
    parser.add_argument("--steps", type=int, default=20, help="per block; a multiple of 10, the steps between two logs")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    times: dict[str, list[float]] = {"bare torch": [], "helicon": []}
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        loops = {"bare torch": bare_loop(), "helicon": helicon_loop(folder)}
        for block in range(arguments.blocks + 1):
            for name, loop in loops.items():
                report.synchronize()
                start = time.perf_counter()
                for _ in range(arguments.steps):
                    next(loop)
                report.synchronize()
                if block:  # the first warms up and compiles
                    times[name].append((time.perf_counter() - start) / arguments.steps)
        loops["helicon"].close()
    medians = {name: statistics.median(values) for name, values in times.items()}
    rows = [{"loop": name, "ms per step": 1000 * value} for name, value in medians.items()]
    rows.append({"loop": "overhead, %", "ms per step": 100 * (medians["helicon"] / medians["bare torch"] - 1)})
    report.show("engine_overhead", rows, arguments.out)


if __name__ == "__main__":
    main()
