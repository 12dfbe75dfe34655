import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from helicon.metrics.audio import mel_spectrogram
from helicon.models.soundstream.discriminators import BandDiscriminator, Discriminators, Judgement, PeriodDiscriminator
from helicon.models.soundstream.losses import (
    PENALTY,
    Balancer,
    CodecLoss,
    MelLoss,
    adversarial_loss,
    discriminator_losses,
    feature_loss,
    gradient_penalty,
    total_of_discriminators,
    wave_loss,
    with_known_gradient,
)

HZ = 8000
MEL = MelLoss(HZ, (32, 64), (4, 8), (32, 64))
PAPER = MelLoss(HZ, (32, 64), (6, 6), (64, 64), log_only=False)
WEIGHTS = {"wave": 1.0, "mel": 2.0, "adversarial": 0.5, "feature": 3.0}


def waves(count: int = 2, batch: int = 2, channels: int = 1, length: int = 205) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(batch, channels, length, generator=generator) * 0.3 for _ in range(count)]


def discriminators() -> Discriminators:
    torch.manual_seed(0)
    return Discriminators({"period": PeriodDiscriminator(2, channels=2), "window": BandDiscriminator(32, channels=2)})


# ---------------------------------------------------------------------------------------------- distances


def test_the_squared_error_of_samples():
    a, b = torch.tensor([[[1.0, 2.0, 3.0]]]), torch.tensor([[[0.0, 2.0, 1.0]]])
    assert wave_loss(a, b).item() == pytest.approx(5 / 3)


@pytest.mark.parametrize("measure", [wave_loss, lambda a, b, lengths: MEL(a, b, lengths), PAPER])
def test_padding_counts_for_nothing_whatever_it_holds(measure: Any):
    a, b = waves(channels=2)
    cut, lengths = 120, torch.tensor([120, 120])
    cropped = measure(a[..., :cut], b[..., :cut], lengths=None)
    a[..., cut:] = float("inf")
    assert measure(a, b, lengths=lengths).item() == pytest.approx(cropped.item(), rel=1e-5)


@pytest.mark.parametrize("measure", [wave_loss, lambda a, b, lengths: MEL(a, b, lengths)])
def test_sounds_count_by_their_length(measure: Any):
    a, b = waves(length=256)
    lengths = torch.tensor([256, 64])
    alone = [measure(a[i : i + 1, :, :n], b[i : i + 1, :, :n], lengths=None) for i, n in enumerate(lengths.tolist())]
    shares = [0.8, 0.2]
    whole = sum(share * one.item() for share, one in zip(shares, alone, strict=True))
    assert measure(a, b, lengths=lengths).item() == pytest.approx(whole, rel=2e-2)  # (frames overlap the ends)


def test_log_mel_distances_are_averaged_over_windows():
    a, b = waves()
    expected = [
        ((mel_spectrogram(a, HZ, n, n // 4, m) + 1e-5).log() - (mel_spectrogram(b, HZ, n, n // 4, m) + 1e-5).log())
        .abs()
        .mean()
        for n, m in ((32, 4), (64, 8))
    ]
    torch.testing.assert_close(MEL(a, b), torch.stack(expected).mean())


def test_the_paper_s_distance_is_its_formula():
    a, b = waves(batch=1)
    total = torch.zeros(())
    for window in (32, 64):
        s, t = (mel_spectrogram(x, HZ, 64, window // 4, 6, win_length=window)[0, 0] for x in (a, b))
        for frame in range(s.shape[1]):
            linear = (s[:, frame] - t[:, frame]).abs().sum()
            logarithm = ((s[:, frame] + 1e-5).log() - (t[:, frame] + 1e-5).log()).norm()
            total += (linear + math.sqrt(window / 2) * logarithm) / s.shape[1]
    torch.testing.assert_close(PAPER(a, b), total, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("measure", [MEL, PAPER])
@pytest.mark.parametrize("level", [0.0, 0.3])
def test_equal_sounds_and_silence_have_a_finite_gradient(measure: MelLoss, level: float):
    audio = (waves(1)[0] * level).requires_grad_()
    measure(audio, audio.detach()).backward()
    assert audio.grad.isfinite().all()


@pytest.mark.parametrize("measure", [MEL, PAPER])
def test_a_network_that_is_almost_silent_is_told_to_speak_up(measure: MelLoss):
    audio, target = waves()
    quiet = (audio * 1e-7).requires_grad_()
    measure(quiet, target).backward()
    assert (quiet.grad * quiet).sum() < 0, "louder would be better, though all of it is below the floor"


def test_distances_are_float32_under_autocast():
    """44: the reference leaves its mel losses to whatever autocast does."""
    a, b = waves()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(MEL(a, b), MEL(a, b))
        under = MEL(a, b), wave_loss(a, b.bfloat16()), wave_loss(a, b)
    assert (
        torch.equal(under[0], MEL(a, b)) and under[1].dtype == torch.float32 and torch.equal(under[2], wave_loss(a, b))
    )


# ---------------------------------------------------------------------------------------------- adversaries


def said(*logits: list[float]) -> dict[str, Judgement]:
    return {f"d{i}": Judgement(torch.tensor(x)[:, None], []) for i, x in enumerate(logits)}


def test_adversarial_losses_by_hand():
    judgements = said([2.0, 0.5, -3.0, 0.0], [0.0, 0.0, 0.0, 0.0])  # two real, two fake
    hinge = discriminator_losses(judgements, "hinge")
    assert hinge["d0"] == (0 + 0.5) / 2 + (0 + 1) / 2 and hinge["d1"] == 2.0
    squares = discriminator_losses(judgements, "least_squares")
    assert squares["d0"] == (1 + 0.25) / 2 + 9 / 2 and squares["d1"] == 1.0
    assert total_of_discriminators(hinge) == (1.0 * hinge["d0"] + hinge["d1"]) / 2
    assert total_of_discriminators({**hinge, PENALTY: torch.tensor(5.0)}) == total_of_discriminators(hinge) + 5
    fake = said([1.0, 3.0], [-1.0, -1.0])
    assert adversarial_loss(fake, "hinge") == (-2.0 + 1.0) / 2
    assert adversarial_loss(fake, "least_squares") == ((0 + 4) / 2 + 4) / 2


def test_features_are_matched_to_the_real_ones_and_not_the_other_way_round():
    real = {"d": Judgement(torch.zeros(1), [torch.tensor([[2.0, -2.0]], requires_grad=True), torch.full((1, 4), 10.0)])}
    fake = {"d": Judgement(torch.zeros(1), [torch.tensor([[1.0, -3.0]], requires_grad=True), torch.full((1, 4), 5.0)])}
    assert feature_loss(fake, real, relative=False) == (1.0 + 5.0) / 2
    loss = feature_loss(fake, real)
    assert loss == (0.5 + 0.5) / 2
    loss.backward()
    assert fake["d"].features[0].grad is not None and real["d"].features[0].grad is None


def test_a_discriminator_cannot_make_the_relative_feature_loss_grow_by_growing():
    a, b = waves(2, batch=3)
    small, large = ({"d": Judgement(a, [a * k])} for k in (1, 1000))
    small_real, large_real = ({"d": Judgement(b, [b * k])} for k in (1, 1000))
    torch.testing.assert_close(feature_loss(small, small_real), feature_loss(large, large_real))


class Linear(nn.Module):
    """Logits whose gradient is known: each is a weighted sum of samples of its own."""

    def __init__(self, *widths: int):
        super().__init__()
        torch.manual_seed(0)
        self.weights = nn.ParameterList(torch.randn(1, 1, width) for width in widths)
        self.offset = 0.0

    def forward(self, audio: Tensor, full_precision: bool = False) -> dict[str, Judgement]:
        return {
            f"d{i}": Judgement(nn.functional.conv1d(audio, w, stride=w.shape[-1]) + self.offset, [])
            for i, w in enumerate(self.weights)
        }


def test_the_penalty_is_the_mean_squared_gradient_of_a_logit():
    """40: the reference differentiates the batch's mean loss, which comes out a million times too small."""
    network = Linear(5)
    audio = torch.randn(3, 1, 200)
    expected = 10 * network.weights[0].square().sum()
    torch.testing.assert_close(gradient_penalty(network, audio), expected)
    assert not audio.requires_grad
    network.offset = 100.0  # where the hinge loss of real sound is flat, and its own gradient zero
    torch.testing.assert_close(gradient_penalty(network, audio), expected)


def test_the_penalty_of_several_discriminators_is_their_mean():
    torch.manual_seed(0)
    network = Linear(4, 5)
    penalties = torch.stack([gradient_penalty(network, torch.randn(8, 1, 400)) for _ in range(40)])
    expected = 10 * torch.stack([w.square().sum() for w in network.weights]).mean()
    assert penalties.mean().item() == pytest.approx(expected.item(), rel=0.03)


def test_the_penalty_trains_the_discriminators():
    network = discriminators()
    penalty = gradient_penalty(network, waves(1)[0])
    penalty.backward()
    assert penalty > 0 and sum(p.grad is not None and bool(p.grad.any()) for p in network.parameters()) > 10


# ---------------------------------------------------------------------------------------------- weighing


def test_a_known_gradient_is_the_gradient():
    audio, gradient = waves()
    audio.requires_grad_()
    loss = with_known_gradient(audio * 2, torch.tensor(3.5), gradient)
    assert loss == 3.5
    (loss * 10).backward()
    torch.testing.assert_close(audio.grad, gradient * 20)


def test_weights_are_shares_of_the_gradient_whatever_its_size():
    a, b = torch.zeros(3, 1, 4), torch.zeros(3, 1, 4)
    a[..., 0], b[..., 1] = 1000.0, 1e-4
    balanced = Balancer(["x", "y"])({"x": a, "y": b}, {"x": 3.0, "y": 1.0})
    torch.testing.assert_close(balanced[:, 0, :2], torch.tensor([[0.75 / 3, 0.25 / 3]]).expand(3, 2))


def test_sizes_are_averaged_over_steps_and_saved():
    balancer, one = Balancer(["x", "y"], decay=0.5), torch.ones(1, 1, 1)
    balancer({"x": one * 1}, {"x": 1.0, "y": 1.0})
    second = balancer({"x": one * 4}, {"x": 1.0, "y": 1.0})
    mean = (0.5 * 1 + 4) / 1.5
    torch.testing.assert_close(second, one * 4 / mean)
    again = Balancer(["x", "y"], decay=0.5)
    again.load_state_dict(balancer.state_dict())
    torch.testing.assert_close(
        again({"x": one * 4}, {"x": 1.0, "y": 1.0}), balancer({"x": one * 4}, {"x": 1.0, "y": 1.0})
    )
    torch.testing.assert_close(again({"y": one * 7}, {"x": 1.0, "y": 1.0}), one)  # y comes in later, with its own mean


def test_a_gradient_that_is_not_finite_leaves_no_trace():
    balancer, one = Balancer(["x"]), torch.ones(2, 1, 3)
    balancer({"x": one}, {"x": 1.0})
    before = {name: value.clone() for name, value in balancer.state_dict().items()}
    assert not balancer({"x": one * float("nan")}, {"x": 1.0}).isfinite().any()
    assert all(torch.equal(value, before[name]) for name, value in balancer.state_dict().items())


@pytest.mark.parametrize("balanced", [True, False])
def test_the_gradient_reaches_the_audio_alone(balanced: bool):
    """15: in the reference the discriminators' gradients enter the clipping of the autoencoder's."""
    network, (audio, target) = discriminators(), waves()
    audio.requires_grad_()
    loss, terms = CodecLoss(MEL, WEIGHTS, balanced=balanced).of_autoencoder(audio, target, judge=network)
    loss.backward()
    assert audio.grad.abs().sum() > 0 and all(p.grad is None for p in network.parameters())
    assert set(terms) == set(WEIGHTS) and not any(term.requires_grad for term in terms.values())
    torch.testing.assert_close(loss.detach(), sum(WEIGHTS[name] * term for name, term in terms.items()))


def test_without_balance_the_gradient_is_that_of_the_weighted_sum():
    network, (audio, target) = discriminators(), waves()
    lengths = torch.tensor([205, 150])
    loss = CodecLoss(MEL, WEIGHTS, balanced=False)
    audio.requires_grad_()
    loss.of_autoencoder(audio, target, lengths, judge=network)[0].backward()
    plain = audio.detach().clone().requires_grad_()
    keep = torch.arange(205) < lengths[:, None, None]
    fake, real = network(plain * keep), network(target * keep)
    total = WEIGHTS["wave"] * wave_loss(plain, target, lengths=lengths) + WEIGHTS["mel"] * MEL(plain, target, lengths)
    total = (
        total + WEIGHTS["adversarial"] * adversarial_loss(fake, "hinge") + WEIGHTS["feature"] * feature_loss(fake, real)
    )
    total.backward()
    torch.testing.assert_close(audio.grad, plain.grad, rtol=1e-4, atol=1e-7)
    assert not audio.grad[1, :, 150:].any()


def test_balanced_terms_have_their_shares_and_the_discriminators_one_for_both():
    network, (audio, target) = discriminators(), waves()
    audio.requires_grad_()
    CodecLoss(MEL, WEIGHTS).of_autoencoder(audio, target, judge=network)[0].backward()
    plain = audio.detach().clone().requires_grad_()
    fake = network(plain)
    judged = 0.5 * adversarial_loss(fake, "hinge") + 3.0 * feature_loss(fake, network(target))
    expected = torch.zeros_like(plain)
    for term, share in ((wave_loss(plain, target), 1.0), (MEL(plain, target), 2.0), (judged, 3.5)):
        (gradient,) = torch.autograd.grad(term, plain)
        expected += share / 6.5 / 2 * gradient / gradient.flatten(1).norm(dim=1).mean()
    torch.testing.assert_close(audio.grad, expected, rtol=1e-3, atol=1e-6)


class Counted(torch.autograd.Function):
    """Notes when a backward pass comes by."""

    @staticmethod
    def forward(ctx: Any, audio: Tensor, passes: list[int]) -> Tensor:
        ctx.passes = passes
        return audio.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.passes.append(1)
        return gradient, None


@pytest.mark.parametrize("balanced", [True, False])
def test_one_backward_pass_goes_through_the_discriminators(balanced: bool):
    """Compiled ones allow no second."""
    network, (audio, target), passes = discriminators(), waves(), []
    audio.requires_grad_()
    judge = lambda given: network(Counted.apply(given, passes))
    CodecLoss(MEL, WEIGHTS, balanced=balanced).of_autoencoder(audio, target, judge=judge)[0].backward()
    assert len(passes) == 1


def test_float16_does_not_lose_small_gradients():
    torch.manual_seed(0)
    network = Discriminators({"period": PeriodDiscriminator(2, channels=4)})
    network.members["period"].to_logits.parametrizations.weight.original0.data *= 1e-2  # one that is not sure yet
    target = waves(1, length=4000)[0]
    loss = CodecLoss(MEL, {"wave": 1e-9, "adversarial": 1.0}, balanced=False)
    gradients = []
    for is_half in (False, True):
        audio = waves(1, length=4000)[0].requires_grad_()
        with torch.autocast("cpu", dtype=torch.float16, enabled=is_half):
            loss.of_autoencoder(audio, target, judge=network)[0].backward()
        gradients.append(audio.grad)
    assert (gradients[1] - gradients[0]).norm() < 0.05 * gradients[0].norm()


def test_what_the_discriminators_said_of_the_target_is_used_again():
    """One forward less: the generator's turn finds the features of the real sound where the discriminators left them."""
    network, (audio, target) = discriminators(), waves()
    loss, calls = CodecLoss(MEL, WEIGHTS, balanced=False), []
    network.register_forward_hook(lambda module, inputs, outputs: calls.append(len(inputs[0])))
    _, real = loss.of_discriminators(audio, target, network)
    assert calls == [4] and not any(x.requires_grad for judgement in real.values() for x in judgement.features)
    known = loss.of_autoencoder(audio, target, judge=network, real=real)[0]
    assert calls == [4, 2]
    torch.testing.assert_close(known, loss.of_autoencoder(audio, target, judge=network)[0])


def test_discriminators_see_no_gradient_of_the_audio_and_pay_the_penalty_when_asked():
    network, (audio, target) = discriminators(), waves()
    audio.requires_grad_()
    loss = CodecLoss(MEL, WEIGHTS)
    without = loss.of_discriminators(audio, target, network)[0]
    terms = loss.of_discriminators(audio, target, network, with_penalty=True)[0]
    assert list(without) == ["period", "window"] and list(terms) == ["period", "window", PENALTY]
    total_of_discriminators(terms).backward()
    assert audio.grad is None and all(p.grad is not None for p in network.parameters())


@pytest.mark.parametrize(
    ("left_out", "calls"), [(("feature",), 1), (("adversarial",), 2), (("adversarial", "feature"), 0)]
)
def test_terms_of_no_weight_are_not_computed(left_out: tuple[str, ...], calls: int):
    network, (audio, target), seen = discriminators(), waves(), []
    network.register_forward_hook(lambda *_: seen.append(1))
    weights = {name: 0.0 if name in left_out else weight for name, weight in WEIGHTS.items()}
    _, terms = CodecLoss(MEL, weights).of_autoencoder(audio, target, judge=network)
    assert set(terms) == set(WEIGHTS) - set(left_out) and len(seen) == calls


@pytest.mark.parametrize("weights", [{"wave": -1.0, "mel": 1.0}, {"wave": 0.0, "mel": 0.0, "feature": 1.0}])
def test_weights_that_teach_nothing_are_refused(weights: dict[str, float]):
    with pytest.raises(ValueError, match="the weights of the loss are"):
        CodecLoss(MEL, weights)
