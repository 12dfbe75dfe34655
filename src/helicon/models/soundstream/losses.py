"""What a codec's reconstruction is judged by: the wave, its mel spectra, and the discriminators.

The terms are of very different strength, and their strengths change while a network learns. `Balancer` makes weights mean what
they say (EnCodec, Defossez et al. 2022, arXiv:2210.13438, section 3.4): each term's gradient with respect to the reconstructed
audio is divided by its own running mean length, so that a weight is the share of its term in what the network is told.

Everything here is float32, whatever the networks compute in.

Letters: b batch, c audio channels, n samples, m mel bands, t frames.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
import torch.distributed as dist
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from helicon.metrics.audio import LOG_FLOOR, mel_spectrogram
from helicon.models.soundstream.discriminators import Judgement

Judgements = Mapping[str, Judgement]
Judge = Callable[..., Judgements]  # audio [b, c, n] to what is said of it (`Discriminators`)
Terms = dict[str, Tensor]  # 0-d each

PENALTY = "gradient_penalty"
JUDGED = ("adversarial", "feature")  # the terms that the discriminators have a part in
# Gradients of means over many logits are tiny, and float16 would lose them on their way through the discriminators. They are
# scaled up for it, and down again: by a power of two, which changes nothing else.
GRADIENT_SCALE = 2.0**12
AdversarialKind = Literal["hinge", "least_squares"]


def without_padding(audio: Float[Tensor, "b c n"], lengths: Int[Tensor, " b"] | None) -> Float[Tensor, "b c n"]:
    """Silence after the first `lengths` samples, whatever stands there."""
    if lengths is None:
        return audio
    return torch.where(torch.arange(audio.shape[-1], device=audio.device) < lengths[:, None, None], audio, 0.0)


def wave_loss(
    audio: Float[Tensor, "b c n"], target: Float[Tensor, "b c n"], lengths: Int[Tensor, " b"] | None = None
) -> Float[Tensor, ""]:
    """The mean squared difference of all samples that are not padding: what keeps the wave in step with the original.

    (Absolute differences, at the same share of the gradient, take several times as long to do so: see docs/log.md.)
    """
    error = without_padding(audio.float() - target.float(), lengths).square()
    if lengths is None:
        return error.mean()
    return error.sum() / (lengths.sum() * audio.shape[1]).clamp(min=1)


@dataclass(frozen=True)
class MelLoss:
    """The distance of mel spectra, seen through windows of several lengths, each a quarter of itself after the last.

    With `log_only` it is the mean difference of log-magnitudes, averaged over windows (Kumar et al. 2023, section 3.5). Otherwise
    it is SoundStream's own (Zeghidour et al. 2021, section 3.5): for each frame the sum of the differences of magnitudes, plus
    sqrt(window / 2) times the length of the vector of differences of logarithms, summed over windows.
    """

    sample_hz: int
    windows: Sequence[int]
    n_mels: Sequence[int]  # of each window
    n_ffts: Sequence[int]  # length of its transform
    log_only: bool = True

    def __call__(
        self, audio: Float[Tensor, "b c n"], target: Float[Tensor, "b c n"], lengths: Int[Tensor, " b"] | None = None
    ) -> Float[Tensor, ""]:
        audio, target = (without_padding(x, lengths) for x in (audio, target))
        terms = []
        for window, n_mels, n_fft in zip(self.windows, self.n_mels, self.n_ffts, strict=True):
            hop = window // 4
            # (Added, and no lower bound: below a bound there is no gradient, and a silent network would stay silent.)
            fake, real = (
                mel_spectrogram(x, self.sample_hz, n_fft, hop, n_mels, win_length=window) + LOG_FLOOR
                for x in (audio, target)
            )
            terms.append(_mean_of_frames(self._of_frames(fake, real, window), hop, lengths))
        total = torch.stack(terms).sum()
        return total / len(terms) if self.log_only else total

    def _of_frames(
        self, fake: Float[Tensor, "b c m t"], real: Float[Tensor, "b c m t"], window: int
    ) -> Float[Tensor, "b c t"]:
        logarithms = fake.log() - real.log()
        if self.log_only:
            return logarithms.abs().mean(dim=2)
        # (The root of 0 has an infinite slope, which equal spectra would meet.)
        length = (logarithms.square().sum(dim=2) + 1e-12).sqrt()
        return (fake - real).abs().sum(dim=2) + math.sqrt(window / 2) * length


def _mean_of_frames(values: Float[Tensor, "b c t"], hop: int, lengths: Int[Tensor, " b"] | None) -> Float[Tensor, ""]:
    """Over those frames that the sounds would have without their padding."""
    if lengths is None:
        return values.mean()
    is_sound = torch.arange(values.shape[-1], device=values.device) <= lengths[:, None] // hop
    return (values.mean(dim=1) * is_sound).sum() / is_sound.sum()


def discriminator_losses(judgements: Judgements, kind: AdversarialKind) -> Terms:
    """Each discriminator's loss; the first half of what it judged is real, the second fake."""
    losses = {}
    for name, judgement in judgements.items():
        real, fake = judgement.logits.chunk(2)
        if kind == "hinge":
            losses[name] = F.relu(1 - real).mean() + F.relu(1 + fake).mean()
        else:
            losses[name] = (1 - real).square().mean() + fake.square().mean()
    return losses


def total_of_discriminators(terms: Terms) -> Float[Tensor, ""]:
    """The mean of the discriminators' losses, plus the penalty, if there is one."""
    own = [term for name, term in terms.items() if name != PENALTY]
    return torch.stack(own).mean() + terms.get(PENALTY, 0.0)


def adversarial_loss(fake: Judgements, kind: AdversarialKind) -> Float[Tensor, ""]:
    """How far the fakes are from being taken for real, averaged over discriminators."""
    logits = [judgement.logits for judgement in fake.values()]
    errors = [-x.mean() if kind == "hinge" else (1 - x).square().mean() for x in logits]
    return torch.stack(errors).mean()


def feature_loss(fake: Judgements, real: Judgements, relative: bool = True) -> Float[Tensor, ""]:
    """The mean difference of what the layers of the discriminators see, averaged over layers and discriminators.

    `relative` divides each layer's by the mean magnitude it has for the real sound (EnCodec's), so that a discriminator
    cannot make the loss grow by growing its features.
    """
    # (There are a hundred layers: one by one they would keep the host busier than the device.)
    seen = [x.float() for judgement in fake.values() for x in judgement.features]
    wanted = [x.detach().float() for name in fake for x in real[name].features]
    errors = _mean_sizes(torch._foreach_sub(seen, wanted))
    if relative:
        errors = errors / _mean_sizes(wanted).clamp(min=1e-8)
    return errors.mean()


def _mean_sizes(tensors: Sequence[Tensor]) -> Float[Tensor, " k"]:
    """The mean absolute value of each."""
    sums = torch._foreach_norm(list(tensors), 1)
    return torch.stack(torch._foreach_div(sums, [float(tensor.numel()) for tensor in tensors]))


def gradient_penalty(judge: Judge, audio: Float[Tensor, "b c n"], weight: float = 10.0) -> Float[Tensor, ""]:
    """weight * ||d logit / d audio||^2, averaged over logits, discriminators and sounds; the audio given is left as it is.

    A sound has many logits, and no gradient can be had of each. The gradient of their sum with random signs is had at
    once, and the square of its length is, on average over signs, the sum of the squares wanted.
    """
    audio = audio.detach().float().requires_grad_()
    with torch.enable_grad():
        logits = [judgement.logits.flatten(1) for judgement in judge(audio).values()]
        signs = [torch.randint_like(x, 2) * 2 - 1 for x in logits]
        sums = [(x * sign).sum() / math.sqrt(x.shape[1]) for x, sign in zip(logits, signs, strict=True)]
        (gradients,) = torch.autograd.grad(torch.stack(sums).sum(), audio, create_graph=True)
    return weight / len(logits) * gradients.square().sum(dim=(1, 2)).mean()


def with_known_gradient(
    audio: Float[Tensor, "b c n"], value: Float[Tensor, ""], gradient: Float[Tensor, "b c n"]
) -> Float[Tensor, ""]:
    """`value`, as a loss whose gradient with respect to `audio` is already known to be `gradient`."""
    linear = (audio * gradient.detach()).sum()
    return value.detach() + (linear - linear.detach())


def _gradient_of(loss: Float[Tensor, ""], leaf: Tensor) -> Tensor:
    (gradient,) = torch.autograd.grad(loss * GRADIENT_SCALE, leaf)
    return gradient / GRADIENT_SCALE


class Balancer(nn.Module):
    """Adds up the gradients of several terms so that each has the share its weight says:

        sum_i  weight_i / (sum of weights)  *  gradient_i / (running mean of |gradient_i| of a sound)  /  b

    The running means are buffers, saved with the network; terms that are not given keep theirs.
    """

    sums: Tensor
    counts: Tensor

    def __init__(self, names: Sequence[str], decay: float = 0.99):
        super().__init__()
        self.names, self.decay = tuple(names), decay
        self.register_buffer("sums", torch.zeros(len(names)))
        self.register_buffer("counts", torch.zeros(len(names)))

    def forward(
        self, gradients: Mapping[str, Tensor], weights: Mapping[str, float], across_ranks: bool = False
    ) -> Float[Tensor, "b c n"]:
        """`across_ranks` averages the lengths over the processes, all of which must then call this together."""
        lengths = torch.stack([gradient.flatten(1).norm(dim=1).mean() for gradient in gradients.values()])
        if across_ranks and dist.is_available() and dist.is_initialized():
            dist.all_reduce(lengths)
            lengths = lengths / dist.get_world_size()
        total_weight = sum(weights[name] for name in gradients)
        total = torch.zeros_like(next(iter(gradients.values())))
        for (name, gradient), length in zip(gradients.items(), lengths, strict=True):
            share = weights[name] / total_weight / len(gradient)
            total = total + share / self._running_mean(name, length) * gradient
        return total

    def _running_mean(self, name: str, length: Float[Tensor, ""]) -> Float[Tensor, ""]:
        place = self.names.index(name)
        is_finite = length.isfinite()  # a step that is not is skipped, and must leave no trace here either
        for buffer, new in ((self.sums, length), (self.counts, torch.ones_like(length))):
            buffer[place].copy_(torch.where(is_finite, self.decay * buffer[place] + new, buffer[place]))
        return (self.sums[place] / self.counts[place]).clamp(min=1e-12)


class CodecLoss(nn.Module):
    """The losses of an autoencoder and of the discriminators it is trained against, and how their terms are weighed.

    weights: of the terms "wave", "mel", "adversarial" and "feature"; one of weight 0 is not computed.
    adversarial: "hinge" or "least_squares".
    relative_features: see `feature_loss`.
    balanced: the weights are shares of the gradient (`Balancer`), not factors of the losses. The discriminators' two terms
        have one share, the sum of their weights, and between the two the weights are factors.
    """

    def __init__(
        self,
        mel: MelLoss,
        weights: Mapping[str, float],
        *,
        adversarial: AdversarialKind = "hinge",
        relative_features: bool = True,
        balanced: bool = True,
    ):
        super().__init__()
        self.mel, self.weights = mel, {name: weight for name, weight in weights.items() if weight}
        if min(self.weights.values(), default=-1) < 0 or not self.weights.keys() & {"wave", "mel"}:
            raise ValueError(
                f"the weights of the loss are {dict(weights)}: none may be negative, and that of the wave or of the mel spectra "
                "must be positive"
            )
        self.adversarial, self.relative_features = adversarial, relative_features
        self.balancer = Balancer(("wave", "mel", "judged")) if balanced else None

    def distances(
        self, audio: Float[Tensor, "b c n"], target: Float[Tensor, "b c n"], lengths: Int[Tensor, " b"] | None = None
    ) -> Terms:
        """The terms that need no discriminator."""
        terms = {}
        if "wave" in self.weights:
            terms["wave"] = wave_loss(audio, target, lengths)
        if "mel" in self.weights:
            terms["mel"] = self.mel(audio, target, lengths)
        return terms

    def total(self, terms: Terms) -> Float[Tensor, ""]:
        return torch.stack([self.weights[name] * term for name, term in terms.items()]).sum()

    def of_autoencoder(
        self,
        audio: Float[Tensor, "b c n"],
        target: Float[Tensor, "b c n"],
        lengths: Int[Tensor, " b"] | None = None,
        judge: Judge | None = None,
        real: Judgements | None = None,
        across_ranks: bool = False,
    ) -> tuple[Float[Tensor, ""], Terms]:
        """The loss of reconstructed audio, whose gradient reaches what made the audio and nothing else; and its terms.

        Without discriminators to `judge` there are no adversarial terms; `real` is what they say of the target, where that
        is known already. `across_ranks` balances by the gradients of all processes, which must then all call this together.
        """
        trains = audio.requires_grad and torch.is_grad_enabled()
        leaf = audio.detach().requires_grad_(trains)
        terms = self.distances(leaf, target, lengths)
        if judge is not None:
            terms |= self._judged(without_padding(leaf, lengths), without_padding(target, lengths), judge, real)
        total = self.total(terms)
        known = {name: term.detach() for name, term in terms.items()}
        if not trains:
            return total, known
        gradient = self._gradient(terms, leaf, across_ranks)
        return with_known_gradient(audio, total, gradient), known

    def _judged(self, audio: Tensor, target: Tensor, judge: Judge, real: Judgements | None) -> Terms:
        terms: Terms = {}
        if not self.weights.keys() & set(JUDGED):
            return terms
        fake = judge(audio)
        if "adversarial" in self.weights:
            terms["adversarial"] = adversarial_loss(fake, self.adversarial)
        if "feature" in self.weights:
            if real is None:
                with torch.no_grad():
                    real = judge(target)
            terms["feature"] = feature_loss(fake, real, self.relative_features)
        return terms

    def _gradient(self, terms: Terms, leaf: Tensor, across_ranks: bool) -> Tensor:
        if self.balancer is None:
            return _gradient_of(self.total(terms), leaf)
        losses: Terms = {}
        shares: dict[str, float] = {}
        for name, term in terms.items():
            # One backward pass for the two: a compiled graph allows no second, and it is half the work.
            group = "judged" if name in JUDGED else name
            losses[group] = losses.get(group, 0.0) + self.weights[name] * term
            shares[group] = shares.get(group, 0.0) + self.weights[name]
        return self.balancer({name: _gradient_of(loss, leaf) for name, loss in losses.items()}, shares, across_ranks)

    def of_discriminators(
        self,
        audio: Float[Tensor, "b c n"],
        target: Float[Tensor, "b c n"],
        judge: Judge,
        with_penalty: bool = False,
    ) -> tuple[Terms, Judgements]:
        """Each discriminator's loss, and what they say of the target. Padding must be silence.

        With the penalty, which is one for all of them, as the term PENALTY.
        """
        both = torch.cat([target.float(), audio.detach()])
        judgements = judge(both)
        terms = discriminator_losses(judgements, self.adversarial)
        if with_penalty:
            # Compiled graphs cannot be differentiated twice.
            with torch.compiler.set_stance("force_eager"):
                terms[PENALTY] = gradient_penalty(partial(judge, full_precision=True), both)
        half = len(target)
        real = {
            name: Judgement(logits[:half].detach(), [x[:half].detach() for x in features])
            for name, (logits, features) in judgements.items()
        }
        return terms, real
