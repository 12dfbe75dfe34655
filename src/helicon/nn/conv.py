"""Causal convolutions over time, whole signals at once or chunk by chunk.

Signals are `[b, n, c]`, channels last: folding s samples into one frame of s * c channels is then a view. So a strided
convolution is a plain one over frames, and a transposed one is a plain one that makes s samples for each frame.

A causal convolution sees the past alone: the signal is extended on the left, by zeros ("constant") or by its own
beginning mirrored ("reflect"). Zeros are what a stream has before its first chunk, so such a convolution gives the same
in one piece and in chunks. Mirroring needs samples from after the start: it cannot be streamed.

Letters: b batch, n samples, m samples after a change of rate, c and e channels, k taps.
"""

from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

PadMode = Literal["constant", "reflect"]

# What each module of a network remembers from chunk to chunk; empty before the first. A module puts in and takes out
# its own entry, in whatever form it likes.
StreamState = dict[nn.Module, Any]


class CausalConv1d(nn.Module):
    """A convolution whose output at t sees `x[t], x[t - dilation], ...`, `kernel_size` samples in all.

    stride: one output for every `stride` samples, a frame. It sees its own frame to the end, and frames before it.
        `kernel_size` must be a multiple of it, and the signal a whole number of frames long.
    gain: the initial weights keep the variance of their input, times gain^2.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int,
        *,
        stride: int = 1,
        dilation: int = 1,
        pad_mode: PadMode = "constant",
        gain: float = 1.0,
    ):
        super().__init__()
        if pad_mode not in ("constant", "reflect"):
            raise ValueError(f'pad_mode={pad_mode!r} is neither "constant" nor "reflect"')
        if kernel_size % stride or (stride > 1 and dilation > 1):
            raise ValueError(
                f"{kernel_size=} must be a multiple of {stride=}, and a convolution has a stride or a dilation, not both"
            )
        taps = kernel_size // stride
        self.in_channels, self.out_channels = in_channels, out_channels
        self.stride, self.dilation, self.pad_mode = stride, dilation, pad_mode
        self.context = (taps - 1) * dilation * stride  # how many samples before its own frame an output sees
        # Frames in the order of memory: [out, tap, sample of the frame and channel].
        self.weight = nn.Parameter(torch.randn(out_channels, taps, stride * in_channels))
        self.bias = nn.Parameter(torch.zeros(out_channels))
        with torch.no_grad():
            self.weight.mul_(gain * (kernel_size * in_channels) ** -0.5)

    def forward(self, x: Float[Tensor, "b n c"], state: StreamState | None = None) -> Float[Tensor, "b m e"]:
        """With a state: `x` follows what the state remembers."""
        num_zeros = 0
        if state is not None:
            x = self._continued(x, state)
        elif self.pad_mode == "reflect":
            x = self._mirrored(x)
        else:
            num_zeros = self.context // self.stride
        frames = x.unflatten(1, (-1, self.stride)).flatten(2)
        return convolve(frames, self.weight, self._bias(), self.dilation, num_zeros)

    def _mirrored(self, x: Tensor) -> Tensor:
        """x after its own beginning, mirrored as far as there is something to mirror, and zeros before that."""
        mirrored = x[:, 1 : self.context + 1].flip(1)
        zeros = x.new_zeros(len(x), self.context - mirrored.shape[1], x.shape[2])
        return torch.cat((zeros, mirrored, x), dim=1)

    def _continued(self, x: Tensor, state: StreamState) -> Tensor:
        """x after the `context` samples before it, which are silence at the start; and the state for the next chunk."""
        past = state[self] if self in state else x.new_zeros(len(x), self.context, x.shape[2])
        extended = torch.cat((past, x), dim=1)
        state[self] = extended[:, extended.shape[1] - self.context :].clone()  # a view would keep the whole chunk
        return extended

    def _bias(self) -> Tensor:
        return self.bias


class CausalUpsample1d(CausalConv1d):
    """A transposed convolution of kernel 2 * stride, cut on the right: every frame becomes `stride` samples.

    Sample r of frame t is `weight_r x[t] + weight_(stride + r) x[t - 1]`. So this is a convolution of two taps that
    makes all the samples of a frame at once.
    """

    def __init__(
        self, in_channels: int, out_channels: int, stride: int, *, pad_mode: PadMode = "constant", gain: float = 1.0
    ):
        super().__init__(in_channels, stride * out_channels, 2, pad_mode=pad_mode, gain=gain)
        self.factor = stride
        self.bias = nn.Parameter(torch.zeros(out_channels))

    def forward(self, x: Float[Tensor, "b n c"], state: StreamState | None = None) -> Float[Tensor, "b m e"]:
        return super().forward(x, state).unflatten(2, (self.factor, -1)).flatten(1, 2)

    def _bias(self) -> Tensor:
        return self.bias.repeat(self.factor)


def convolve(
    x: Float[Tensor, "b n c"],
    weight: Float[Tensor, "e k c"],
    bias: Float[Tensor, " e"],
    dilation: int = 1,
    num_zeros: int = 0,
) -> Float[Tensor, "b m e"]:
    """Outputs for every position that has all its taps, where `num_zeros` zeros stand before x.

    As a 2-d convolution of height one: tensors of four dimensions keep their channels last on every backend. On a GPU a
    number of channels that is no multiple of eight (audio has one or two) is filled up, or no matrix unit takes it.
    """
    if x.is_cuda:
        return convolve_folded(*in_eights(x, weight, bias), dilation, num_zeros)[..., : len(weight)]
    x = F.pad(x, (0, 0, num_zeros, 0)) if num_zeros else x
    image, kernel = x.transpose(1, 2).unsqueeze(2), weight.transpose(1, 2).unsqueeze(2)
    return F.conv2d(image, kernel, bias, dilation=(1, dilation)).squeeze(2).transpose(1, 2)


def convolve_folded(
    x: Float[Tensor, "b n c"],
    weight: Float[Tensor, "e k c"],
    bias: Float[Tensor, " e"],
    dilation: int = 1,
    num_zeros: int = 0,
) -> Float[Tensor, "b m e"]:
    """The same, for a GPU: without dilation, for which cuDNN may choose a kernel that is hundreds of times slower, and with
    hardly a copy, as each is a pass over memory that takes as long as an activation.

    The signal is a picture of `dilation` columns: below each sample is the one `dilation` later. With channels last that
    is how it lies in memory already, in and out. The zeros (a multiple of the dilation) are put there by the convolution
    itself, at both ends alike; what it makes of those at the end is left out.
    """
    num_outputs = num_zeros + x.shape[1] - (weight.shape[1] - 1) * dilation
    if x.shape[1] % dilation:
        x = F.pad(x, (0, 0, 0, -x.shape[1] % dilation))
    # (Of one column the picture is laid on its side: that is how one dimension is usually written as two.)
    picture, kernel, padding = x.unflatten(1, (-1, dilation)), weight.unsqueeze(2), (num_zeros // dilation, 0)
    if dilation == 1:
        picture, kernel, padding = x.unsqueeze(1), weight.unsqueeze(1), padding[::-1]
    out = F.conv2d(picture.permute(0, 3, 1, 2), kernel.permute(0, 3, 1, 2), bias, padding=padding)
    return out.permute(0, 2, 3, 1).flatten(1, 2)[:, :num_outputs]


def in_eights(
    x: Float[Tensor, "b n c"], weight: Float[Tensor, "e k c"], bias: Float[Tensor, " e"]
) -> tuple[Float[Tensor, "b n c8"], Float[Tensor, "e8 k c8"], Float[Tensor, " e8"]]:
    """The same convolution with zero channels added, in and out, up to multiples of eight."""
    missing_out, missing_in = -weight.shape[0] % 8, -weight.shape[2] % 8
    if missing_in:
        x = F.pad(x, (0, missing_in))
    if missing_in or missing_out:
        weight, bias = F.pad(weight, (0, missing_in, 0, 0, 0, missing_out)), F.pad(bias, (0, missing_out))
    return x, weight, bias
