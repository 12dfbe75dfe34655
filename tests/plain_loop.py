"""The loop written out by hand in plain torch, on the concatenated batch: what the engine must equal."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from helicon.data.loader import Loader, Position
from toys import Pair, Points


def whole_batches(count: int, size: int) -> list[dict[str, Tensor]]:
    """The first `count` steps' batches of `size` samples, as one process without accumulation sees them."""
    steps = Loader(Points(), batch_size=size).steps(Position())
    return [next(steps)[0] for _ in range(count)]


def train_one(
    network: nn.Module, loss: Callable[[dict[str, Tensor]], Tensor], batches: list[dict[str, Tensor]], clip: float
) -> None:
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-2, betas=(0.9, 0.99), weight_decay=0.0)
    for batch in batches:
        optimizer.zero_grad()
        loss(batch).backward()
        nn.utils.clip_grad_norm_(network.parameters(), clip)
        optimizer.step()


def train_pair(pair: Pair, batches: list[dict[str, Tensor]], clip: float) -> None:
    kwargs = dict(lr=1e-2, betas=(0.9, 0.99), weight_decay=0.0)
    of_generator = torch.optim.AdamW(pair.generator.parameters(), **kwargs)
    of_discriminator = torch.optim.AdamW(pair.discriminator.parameters(), **kwargs)
    for batch in batches:
        real = batch["x"]
        fake = pair.generator(real)
        adversary = (1 + pair.discriminator(fake.detach())).square().mean() + (
            1 - pair.discriminator(real)
        ).square().mean()
        own = (fake - real).square().mean() - 0.1 * pair.discriminator(fake).mean()
        discriminator_gradients = torch.autograd.grad(adversary, list(pair.discriminator.parameters()))
        generator_gradients = torch.autograd.grad(own, list(pair.generator.parameters()))
        for network, optimizer, gradients in (
            (pair.discriminator, of_discriminator, discriminator_gradients),
            (pair.generator, of_generator, generator_gradients),
        ):
            for parameter, gradient in zip(network.parameters(), gradients, strict=True):
                parameter.grad = gradient
            nn.utils.clip_grad_norm_(network.parameters(), clip)
            optimizer.step()
