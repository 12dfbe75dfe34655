"""Flows with a feature space or a velocity that is known, for the tests of learning and of speaking."""

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from helicon.models.voicebox.flow import ConditionalFlowMatcherWrapper
from helicon.models.voicebox.model import Prepared, VoiceBox
from helicon.nn.network import Network
from models.voicebox.test_model import FEATURES, SIZES, TOKENS, build

HOP, HZ = 4, 200
N = 7


class Blocks(Network):
    """A feature space without loss: a frame is `HOP` samples, and their sum."""

    downsample_factor, latent_dim = HOP, FEATURES

    def __init__(self, sample_hz: int = HZ):
        super().__init__()
        self.sample_hz = sample_hz

    def frame_lengths(self, lengths: Int[Tensor, " b"]) -> Int[Tensor, " b"]:
        return -(-lengths // HOP)

    def encode(
        self, audio: Float[Tensor, "b n"], lengths: Tensor | None = None, input_sample_hz: int | None = None
    ) -> Float[Tensor, "b t d"]:
        if lengths is not None:
            audio = audio * (torch.arange(audio.shape[1]) < lengths[:, None])
        frames = torch.nn.functional.pad(audio, (0, -audio.shape[1] % HOP)).unflatten(1, (-1, HOP))
        return torch.cat((frames, frames.sum(dim=-1, keepdim=True)), dim=-1)

    def decode(self, features: Float[Tensor, "b t d"], lengths: Tensor | None = None) -> Float[Tensor, "b n"]:
        return features[..., :HOP].flatten(1)


class Linear(VoiceBox):
    """A known velocity in the place of the network's: `slope(t) x`."""

    def slope(self, times: Tensor) -> Tensor:
        raise NotImplementedError

    def velocity(self, prepared: Prepared, x: Tensor, times: Tensor) -> Tensor:
        return self.slope(times.expand(len(x)))[:, None, None] * x


class Still(Linear):
    def slope(self, times: Tensor) -> Tensor:
        return 0 * times


class Best(Linear):
    """The mean of x1 - x0 for a given w, where x1 is normal with a standard deviation of `STD`."""

    def slope(self, times: Tensor) -> Tensor:
        return (times * STD**2 - (1 - times)) / ((1 - times) ** 2 + (times * STD) ** 2)


class Turning(Linear):
    def slope(self, times: Tensor) -> Tensor:
        return torch.sin(3 * times) - 0.4


class Letters(Network):
    """As many tokens as the networks of these tests know."""

    num_tokens = TOKENS

    def forward(self, texts: list[str]) -> Tensor:
        return torch.tensor(
            [[ord(text[place]) % TOKENS if place < len(text) else -1 for place in range(9)] for text in texts]
        )


STD = 0.7
MEAN = 0.3


def wrapped(voicebox: VoiceBox | None = None, **options: Any) -> ConditionalFlowMatcherWrapper:
    return ConditionalFlowMatcherWrapper(build() if voicebox is None else voicebox, **options)


def sounding(**options: Any) -> ConditionalFlowMatcherWrapper:
    """With a feature space, and tokens of semantic units at 20 a second where there are 50 frames."""
    return wrapped(build(audio_enc_dec=Blocks(), alignment="frames"), semantic_hz=20.0, **options)


def known(kind: type[Linear], **options: Any) -> ConditionalFlowMatcherWrapper:
    return wrapped(kind(dim_in=FEATURES, condition_on_text=False, **SIZES), **options)


def ids(*lengths: int, seed: int = 2) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    found = torch.randint(TOKENS, (len(lengths), max(lengths)), generator=generator)
    return torch.where(torch.arange(max(lengths)) < torch.tensor(lengths)[:, None], found, -1)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def features(rows: int = 2, n: int = N, seed: int = 3) -> Tensor:
    return torch.randn(rows, n, FEATURES, generator=seeded(seed))
