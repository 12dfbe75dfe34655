"""How fast is the token loop, and the transformer under it?

A plain 12-layer transformer of dim 1024 (16 heads, vocabulary 500) makes 256 tokens at batch 1 and 32: with compiled and
captured steps, with captured steps alone, and with steps launched one by one. Then it trains on 32 x 1024 tokens, with
the residual stream in fp32 and in bf16.

    python benchmarks/decode.py --out decode.json        # on a GPU, about two minutes
    python benchmarks/decode.py --tiny                   # anywhere, a few seconds; the numbers mean nothing
"""

import argparse
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import report
from helicon.nn.decode import Decoder, Prompt, TokenModel
from helicon.nn.sampling import Sampling
from helicon.nn.transformer import Transformer


@dataclass(frozen=True)
class Size:
    dim: int = 1024
    depth: int = 12
    heads: int = 16
    vocabulary: int = 500
    tokens: int = 256
    batches: tuple[int, ...] = (1, 32)
    train_batch: int = 32
    train_length: int = 1024
    train_steps: int = 10
    repeats: int = 5


TINY = Size(
    dim=32,
    depth=2,
    heads=2,
    vocabulary=20,
    tokens=12,
    batches=(1, 2),
    train_batch=2,
    train_length=16,
    train_steps=3,
    repeats=2,
)


class LanguageModel(TokenModel):
    def __init__(self, size: Size):
        super().__init__()
        self.vocabulary = size.vocabulary
        self.transformer = Transformer(
            size.dim, size.depth, heads=size.heads, dim_head=size.dim // size.heads, causal=True
        )
        self.embedding = nn.Embedding(size.vocabulary, size.dim)
        self.head = nn.Linear(size.dim, size.vocabulary, bias=False)

    def embed_tokens(self, tokens: Tensor, index: Tensor) -> Tensor:
        return self.embedding(tokens)

    def token_logits(self, hidden: Tensor, index: Tensor) -> Tensor:
        return self.head(hidden)

    def forward(self, tokens: Tensor, residual: torch.dtype) -> Tensor:
        """The loss, with the residual stream (whose type is that of the transformer's input) in the type `residual`."""
        logits = self.head(self.transformer(self.embedding(tokens[:, :-1]).to(residual)))
        return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


def time_decoding(model: LanguageModel, size: Size, batch: int, device: torch.device) -> list[dict]:
    prompt = Prompt(torch.randn(batch, 1, size.dim, device=device))
    sampling = Sampling(filter_thres=0.9)
    rows = []
    is_cuda = device.type == "cuda"
    ways = {"compiled, captured": (is_cuda, is_cuda), "captured": (is_cuda, False), "step by step": (False, False)}
    for name, (capture, compile) in ways.items():
        decoder = Decoder(model, capture=capture, compile=compile)
        decode = lambda seed=0, decoder=decoder: decoder(
            prompt, max_new_tokens=size.tokens, seed=seed, sampling=sampling
        )
        first = report.seconds_of(decode, 1, warm_up=0)
        seconds = report.seconds_of(decode, size.repeats if capture else 1, warm_up=0)
        rows.append(
            {
                "case": f"decode, batch {batch}, {name}",
                "tokens per second": batch * size.tokens / seconds,
                "ms per step": 1000 * seconds / size.tokens,
                "first call, s": first,
            }
        )
    return rows


def same_tokens(model: LanguageModel, size: Size, device: torch.device) -> bool:
    """Whether captured steps choose the tokens that the same steps choose one by one, at their likeliest and sampled."""
    prompt = Prompt(torch.randn(size.batches[-1], 3, size.dim, device=device))
    is_cuda = device.type == "cuda"
    equal = True
    for compile in (False, is_cuda):
        for sampling in (Sampling(temperature=0.0), Sampling(top_p=0.9)):
            captured, stepped = (
                Decoder(model, capture=capture, compile=compile)(
                    prompt, max_new_tokens=size.tokens, seed=1, sampling=sampling
                )
                for capture in (is_cuda, False)
            )
            equal = equal and torch.equal(captured.tokens, stepped.tokens)
    return equal


def time_training(model: LanguageModel, size: Size, residual: torch.dtype, device: torch.device) -> dict:
    is_cuda = device.type == "cuda"
    if is_cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=is_cuda)
    loss_of = torch.compile(model, fullgraph=True) if is_cuda else model
    tokens = torch.randint(size.vocabulary, (size.train_batch, size.train_length + 1), device=device)

    def step() -> None:
        with torch.autocast(device.type, torch.bfloat16):
            loss = loss_of(tokens, residual)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    first = report.seconds_of(step, 1, warm_up=0)
    seconds = report.seconds_of(step, size.train_steps)
    return {
        "case": f"train, {size.train_batch} x {size.train_length}, {residual} residual".replace("torch.", ""),
        "tokens per second": size.train_batch * size.train_length / seconds,
        "ms per step": 1000 * seconds,
        "first call, s": first,
        "peak GiB": report.peak_gib(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="a tiny model, to see that this script runs")
    parser.add_argument("--out", type=Path, help="where to write the numbers as json")
    arguments = parser.parse_args()
    size = TINY if arguments.tiny else Size()
    device = report.device()
    torch.manual_seed(0)
    model = LanguageModel(size).to(device)
    rows = [row for batch in size.batches for row in time_decoding(model, size, batch, device)]
    equal = same_tokens(model, size, device)
    rows += [time_training(model, size, residual, device) for residual in (torch.float32, torch.bfloat16)]
    report.show("decode", rows, arguments.out)
    print(f"captured = step by step, token by token: {equal}")


if __name__ == "__main__":
    main()
