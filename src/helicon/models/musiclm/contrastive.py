"""Losses that bring the latents of a sound and its caption together, and keep those of different pairs apart.

Every sound is compared with the captions of all processes, and every caption with all sounds. The gradient goes through the
gathering: a process has the loss of its own rows, and in the backward pass receives what the other processes' losses say about its
latents. The mean over processes, which is what distributed training takes of gradients, is then the gradient of the one loss over
the whole batch. All processes must have equally many pairs.

Captions are often equal (names of folders, made-up sounds). A sound is as right for the caption of another pair as for its own where
the two are equal, so such pairs are not told apart: `captions` are numbers that are equal where captions are.

Always in float32 and in log space: nothing overflows at a temperature of 100.

Letters: b pairs of this process, k pairs of all processes, d features of a latent.
"""

import math
from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor, nn
from torch.nn import functional as F

from helicon.quantize.rows import num_ranks

HIGHEST_TEMPERATURE = 100.0  # as in CLIP (Radford et al. 2021): logits of cosines stay within -100 and 100
FIRST_TEMPERATURE = 10.0
FIRST_BIAS = -10.0  # of the sigmoid loss: almost all pairs do not belong together (Zhai et al. 2023, section 3.2)

Latents = Float[Tensor, "b d"]
Captions = Int[Tensor, " b"]


def softmax_loss(
    audio: Latents,
    text: Latents,
    temperature: Float[Tensor, ""],
    decoupled: bool = True,
    across_ranks: bool = True,
    captions: Captions | None = None,
) -> Float[Tensor, ""]:
    """Which of all captions belongs to a sound, and which of all sounds to a caption: the mean of both cross-entropies.

    With l the products times `temperature`: -l_ii + log sum_j exp(l_ij), over the pairs j whose caption is not that of i, and i itself.
    `decoupled` leaves j = i out of the sum (Yeh et al. 2021), where it makes the gradient vanish for pairs that are easily told, in
    small batches most of all. A row for which no j is left then counts as zero: there is nothing to tell it from.
    """
    with torch.autocast(audio.device.type, enabled=False):
        audio, text = audio.float(), text.float()
        every_audio, every_text = _gathered_pair(audio, text, across_ranks)
        own = _own_pairs(len(audio), len(every_audio), across_ranks, audio.device)
        left_out = _of_equal_captions(own, captions, across_ranks)
        if not decoupled:
            left_out = left_out & ~own
        has_others = ~left_out.all(dim=-1)
        left_out = left_out & has_others[:, None]  # (a sum over nothing would have a gradient of NaN)
        paired = (audio * text).sum(dim=-1) * temperature
        total = paired.new_zeros(())
        for rows, columns in ((audio, every_text), (text, every_audio)):
            others = (rows @ columns.T * temperature).masked_fill(left_out, -torch.inf)
            total = total + ((others.logsumexp(dim=-1) - paired) * has_others).mean()
        return total / 2


def sigmoid_loss(
    audio: Latents,
    text: Latents,
    temperature: Float[Tensor, ""],
    bias: Float[Tensor, ""],
    across_ranks: bool = True,
    captions: Captions | None = None,
) -> Float[Tensor, ""]:
    """Whether a sound and a caption belong together, asked of every two alone (SigLIP, Zhai et al. 2023); a sum for each sound.

    Of a sound and an equal caption of another pair it is not asked.
    """
    with torch.autocast(audio.device.type, enabled=False):
        audio, text = audio.float(), text.float()
        _, every_text = _gathered_pair(audio, text, across_ranks)
        own = _own_pairs(len(audio), len(every_text), across_ranks, audio.device)
        logits = audio @ every_text.T * temperature + bias
        is_left_out = _of_equal_captions(own, captions, across_ranks) & ~own
        each = -F.logsigmoid(torch.where(own, logits, -logits))
        return each.masked_fill(is_left_out, 0.0).sum(dim=-1).mean()


class ContrastiveLoss(nn.Module):
    """One of the losses with its learned temperature (and bias).

    In training the pairs of all processes are compared; in evaluation those at hand, as the last batches of processes need not be
    equally many or equally long.
    """

    def __init__(self, decoupled: bool = True, sigmoid: bool = False):
        super().__init__()
        self.decoupled = decoupled
        # (Of one dimension: numbers without any cannot be sharded.)
        self.log_temperature = nn.Parameter(torch.tensor([math.log(FIRST_TEMPERATURE)]))
        self.bias = nn.Parameter(torch.tensor([FIRST_BIAS])) if sigmoid else None

    @property
    def temperature(self) -> Float[Tensor, ""]:
        return at_most(self.log_temperature.float()[0], math.log(HIGHEST_TEMPERATURE)).exp()

    def forward(self, audio: Latents, text: Latents, captions: Captions | None = None) -> Float[Tensor, ""]:
        if self.bias is None:
            return softmax_loss(audio, text, self.temperature, self.decoupled, self.training, captions)
        return sigmoid_loss(audio, text, self.temperature, self.bias.float()[0], self.training, captions)


class _AtMost(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, highest: float) -> Tensor:
        ctx.save_for_backward(value > highest)
        return value.clamp(max=highest)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (is_beyond,) = ctx.saved_tensors
        return torch.where(is_beyond & (gradients[0] < 0), 0.0, gradients[0]), None


def at_most(value: Float[Tensor, ""], highest: float) -> Float[Tensor, ""]:
    """The value, or `highest` where that is less. (A value beyond it can still descend; through `clamp` it would stay there forever.)"""
    return _AtMost.apply(value, highest)


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, latents: Tensor) -> Tensor:
        parts = [torch.empty_like(latents) for _ in range(num_ranks())]
        dist.all_gather(parts, latents.contiguous())
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        # Every process's loss depends on these latents, so the gradients of all the losses add up.
        total = gradients[0].contiguous().clone()
        dist.all_reduce(total)
        return total.chunk(num_ranks())[dist.get_rank()]


@torch.compiler.disable  # which takes no part in what processes say to each other
def gathered(rows: Shaped[Tensor, "b ..."]) -> Shaped[Tensor, "k ..."]:
    """The rows of all processes, in their order; backward, the sum of all processes' gradients (all must call backward)."""
    return rows if num_ranks() == 1 else _Gathered.apply(rows)


def _gathered_pair(
    audio: Tensor, text: Tensor, across_ranks: bool
) -> tuple[Float[Tensor, "k d"], Float[Tensor, "k d"]]:
    if across_ranks and num_ranks() > 1:
        every_audio, every_text = gathered(torch.cat((audio, text), dim=-1)).chunk(2, dim=-1)
    else:
        every_audio, every_text = audio, text
    if len(every_audio) < 2:
        raise ValueError(
            f"{len(every_audio)} pair has no other to be told from: a contrastive loss needs a batch of 2 or more (the last of a "
            "DataLoader is left out with drop_last=True)"
        )
    return every_audio, every_text


def _own_pairs(rows: int, columns: int, across_ranks: bool, device: torch.device) -> Bool[Tensor, "b k"]:
    """Where in the rows of this process, among the columns of all, the pairs stand that belong together."""
    first = dist.get_rank() * rows if across_ranks and num_ranks() > 1 else 0
    return torch.arange(rows, device=device)[:, None] + first == torch.arange(columns, device=device)


def _of_equal_captions(own: Bool[Tensor, "b k"], captions: Captions | None, across_ranks: bool) -> Bool[Tensor, "b k"]:
    """Where the caption of the column is that of the row, as in each pair's own."""
    if captions is None:
        return own
    every = gathered(captions) if across_ranks else captions
    return own | (captions[:, None] == every)
