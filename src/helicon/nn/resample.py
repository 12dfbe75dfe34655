"""Audio from one sample rate to another, on the device, with gradients.

Band-limited interpolation (Smith, "Digital Audio Resampling Home Page"): with t the place of an output sample among the
input samples,

    y(t) = sum_i x[i] h(t - i),    h(u) = f sinc(f u) kaiser(f u / zeros),    f = rolloff * min(1, to_hz / from_hz)

The places repeat: of every to_hz / gcd output samples each has its own weights (a phase), which are the same again
from_hz / gcd input samples later. So each run of phases is one matrix product over windows of the input.
"""

import functools
import math

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

ZEROS = 64  # zero crossings of the sinc on each side
ROLLOFF = 0.95  # of the lower of the two Nyquist frequencies: the middle of the filter's slope
BETA = 9.0  # of the Kaiser window: what is folded back stays 90 dB below
PHASES = 64  # in one product; few keep its windows short, many keep products few


@torch.compiler.disable
def resample(audio: Float[Tensor, "*b n"], from_hz: int, to_hz: int) -> Float[Tensor, "*b m"]:
    """The same sound at `to_hz`; what lies outside of the clip counts as silence. `resampled_length` says how long it is."""
    for rate in (from_hz, to_hz):
        if rate < 1 or rate % 1:
            raise ValueError(f"a sample rate is a positive whole number of Hz, not {rate}")
    if from_hz == to_hz:
        return audio
    from_hz, to_hz = int(from_hz), int(to_hz)  # (other readers of files have rates as 44100.0, or as numpy's numbers)
    step, phases = from_hz // math.gcd(from_hz, to_hz), to_hz // math.gcd(from_hz, to_hz)
    length = resampled_length(audio.shape[-1], from_hz, to_hz)
    if length == 0:
        return audio
    repeats, reach = -(-length // phases), _reach(step, phases)
    padded = F.pad(audio.float(), (reach, repeats * step - audio.shape[-1] + reach + 1))
    outputs = []
    with torch.autocast(audio.device.type, enabled=False):
        for first in range(0, phases, PHASES):
            weights = _weights(step, phases, first, audio.device)
            start, size = first * step // phases, len(weights)
            windows = padded[..., start : start + (repeats - 1) * step + size].unfold(-1, size, step)
            outputs.append(windows @ weights)
    return torch.cat(outputs, dim=-1).flatten(-2)[..., :length].to(audio.dtype)


def resampled_length(length: int, from_hz: int, to_hz: int) -> int:
    """How many samples `resample` makes of `length`."""
    return -(-length * to_hz // from_hz)


def _reach(step: int, phases: int) -> int:
    """Input samples on each side that an output sample is made of."""
    return math.ceil(ZEROS / (ROLLOFF * min(1.0, phases / step)))


@functools.lru_cache(maxsize=512)
@torch.inference_mode(False)  # an inference tensor in the cache could never take part in training
def _weights(step: int, phases: int, first: int, device: torch.device) -> Float[Tensor, "window phase"]:
    """What each input sample of a window contributes to each of a run of phases."""
    cutoff, reach = ROLLOFF * min(1.0, phases / step), _reach(step, phases)
    count = min(PHASES, phases - first)
    start = first * step // phases
    window = (first + count - 1) * step // phases - start + 2 * reach + 1
    places = (np.arange(first, first + count) * step / phases)[None, :]
    distance = cutoff * (places - (start - reach + np.arange(window))[:, None])
    inside = np.clip(1 - (distance / ZEROS) ** 2, 0, None)
    weights = cutoff * np.sinc(distance) * np.i0(BETA * np.sqrt(inside)) / np.i0(BETA) * (inside > 0)
    return torch.from_numpy(weights).to(device, torch.float32)
