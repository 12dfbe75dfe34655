"""G.722 (ITU-T, 64 kbit/s) to 16 bit sound at 16 kHz, without a program to do it: many recordings at a time.

A byte is two samples: six bits of the band below 4 kHz and two of the band above, each the quantized error of a prediction that adapts to
what was decoded before. So nothing but the recordings themselves can be decoded side by side: arrays here are [2, k], bands and recordings.
"""

from collections.abc import Sequence

import numpy as np

# The tables of the recommendation: inverse quantizers of six, four and two bits, and the logarithmic steps of their scales.
QM6 = [
    -136,
    -136,
    -136,
    -136,
    -24808,
    -21904,
    -19008,
    -16704,
    -14984,
    -13512,
    -12280,
    -11192,
    -10232,
    -9360,
    -8576,
    -7856,
]
QM6 += [-7192, -6576, -6000, -5456, -4944, -4464, -4008, -3576, -3168, -2776, -2400, -2032, -1688, -1360, -1040, -728]
QM6 += [24808, 21904, 19008, 16704, 14984, 13512, 12280, 11192, 10232, 9360, 8576, 7856, 7192, 6576, 6000, 5456, 4944]
QM6 += [4464, 4008, 3576, 3168, 2776, 2400, 2032, 1688, 1360, 1040, 728, 432, 136, -432, -136]
QM4 = [0, -20456, -12896, -8968, -6288, -4240, -2584, -1200, 20456, 12896, 8968, 6288, 4240, 2584, 1200, 0]
QM2 = [-7408, -1616, 7408, 1616]
WL = [-60, 3042, 1198, 538, 334, 172, 58, -30, 3042, 1198, 538, 334, 172, 58, -30, -60]  # by the four bits
WH = [798, -214, 798, -214]  # by the two bits
ILB = [2048, 2093, 2139, 2186, 2233, 2282, 2332, 2383, 2435, 2489, 2543, 2599, 2656, 2714, 2774, 2834]
ILB += [2896, 2960, 3025, 3091, 3158, 3228, 3298, 3371, 3444, 3520, 3597, 3676, 3756, 3838, 3922, 4008]
QMF = np.array([3, -11, 12, 32, -210, 951, 3876, -805, 362, -156, 53, -11])  # joins the bands

LARGEST = np.array([[18432], [22528]], np.int32)  # logarithm of a scale, of each band
SHIFT = np.array([[9], [11]], np.int32)
MOST_BYTES = 2**25  # decoded at a time

BYTES = np.arange(256)
SCALE6 = np.stack([np.take(QM6, BYTES & 63), np.take(QM2, BYTES >> 6)]).astype(np.int32)  # what is heard
SCALE4 = np.stack([np.take(QM4, (BYTES & 63) >> 2), np.take(QM2, BYTES >> 6)]).astype(
    np.int32
)  # what the predictor sees
STEPS = np.stack([np.take(WL, (BYTES & 63) >> 2), np.take(WH, BYTES >> 6)]).astype(np.int32)
INVERSE_LOG = np.array(ILB, np.int32)


def decode(recordings: Sequence[bytes]) -> list[np.ndarray]:
    """The samples (int16) of each recording, two for each of its bytes."""
    decoded = [np.zeros(0, np.int16)] * len(recordings)
    order = [place for place, one in enumerate(recordings) if one]
    order.sort(key=lambda place: -len(recordings[place]))
    while order:
        count = max(1, MOST_BYTES // len(recordings[order[0]]))
        group, order = order[:count], order[count:]
        for place, bands in zip(group, _bands([recordings[place] for place in group]), strict=True):
            decoded[place] = _joined(bands)
    return decoded


def _bands(recordings: Sequence[bytes]) -> list[np.ndarray]:
    """The two bands [n, 2] of each, longest first."""
    lengths = np.array([len(one) for one in recordings])
    codes = np.zeros((lengths[0], len(recordings)), np.uint8)
    for place, one in enumerate(recordings):
        codes[: len(one), place] = np.frombuffer(one, np.uint8)
    heard = np.zeros((*codes.shape, 2), np.int16)
    state = _Predictors(len(recordings))
    active = len(recordings)
    for time, row in enumerate(codes):
        while lengths[active - 1] <= time:
            active -= 1
        if active < state.count:
            state.keep(active)
        heard[time, :active] = state.step(row[:active]).T
    return [heard[:length, place] for place, length in enumerate(lengths)]


class _Predictors:
    """The predictors of both bands of each recording: two poles, six zeros, and the scale of the quantizer."""

    def __init__(self, count: int):
        self.count = count
        zeros = lambda *shape: np.zeros((*shape, 2, count), np.int32)
        self.poles, self.zeros, self.differences = zeros(2), zeros(6), zeros(6)
        self.decoded, self.partial = zeros(2), zeros(2)  # the last two, the newest first
        self.prediction, self.from_zeros, self.log_scale = zeros(), zeros(), zeros()
        self.scale = np.repeat(np.array([[32], [8]], np.int32), count, axis=1)

    def keep(self, count: int) -> None:
        for name, value in vars(self).items():
            if name != "count":
                setattr(self, name, np.ascontiguousarray(value[..., :count]))
        self.count = count

    def step(self, codes: np.ndarray) -> np.ndarray:
        """What the codes say, [2, k], of which the predictors learn."""
        heard = _limited(self.prediction + (self.scale * SCALE6[:, codes] >> 15), 16384)
        difference = self.scale * SCALE4[:, codes] >> 15
        log_scale = np.maximum((self.log_scale * 127 >> 7) + STEPS[:, codes], 0)
        self.log_scale = np.minimum(log_scale, LARGEST, out=log_scale)
        self.scale = (INVERSE_LOG[self.log_scale >> 6 & 31] << 1 >> SHIFT - (self.log_scale >> 11)) << 2
        self._adapt(difference)
        return heard

    def _adapt(self, difference: np.ndarray) -> None:
        partial = _limited(self.from_zeros + difference)
        first, second = self.poles
        same, same_before = (self.partial ^ partial) >= 0
        gain = _limited(first << 2)
        second = (second * 32512 >> 15) + (np.minimum(np.where(same, -gain, gain), 32767) >> 7)
        second = np.minimum(np.maximum(second + np.where(same_before, 128, -128), -12288), 12288)
        first = (first * 32640 >> 15) + np.where(same, 192, -192)
        room = 15360 - second
        self.poles[0], self.poles[1] = np.minimum(np.maximum(first, -room), room), second
        push = np.where(difference == 0, 0, 128)
        self.zeros = (self.zeros * 32640 >> 15) + np.where((self.differences ^ difference) >= 0, push, -push)
        self.differences[1:] = self.differences[:-1].copy()
        self.differences[0] = difference
        self.decoded[1], self.partial[1] = self.decoded[0], self.partial[0]
        self.decoded[0], self.partial[0] = _limited(self.prediction + difference), partial
        from_poles = self.poles * _limited(2 * self.decoded) >> 15
        from_zeros = self.zeros * _limited(2 * self.differences) >> 15
        self.from_zeros = _limited(np.add.reduce(from_zeros))
        self.prediction = _limited(_limited(from_poles[0] + from_poles[1]) + self.from_zeros)


def _limited(values: np.ndarray, bound: int = 32768) -> np.ndarray:
    """Between -bound and bound - 1, in place. (np.clip takes several times longer.)"""
    np.maximum(values, -bound, out=values)
    return np.minimum(values, bound - 1, out=values)


def _joined(bands: np.ndarray) -> np.ndarray:
    """The wave whose lower and upper half these are."""
    low, high = bands.astype(np.int64).T
    first, second = np.convolve(low - high, QMF)[: len(low)], np.convolve(low + high, QMF[::-1])[: len(low)]
    return _limited(np.stack([first, second], axis=1).reshape(-1) >> 11).astype(np.int16)
