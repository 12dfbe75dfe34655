import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import children
from helicon.models.musiclm.contrastive import ContrastiveLoss, at_most, sigmoid_loss, softmax_loss
from models.musiclm import two_processes


def latents(count: int = 5, dim: int = 4) -> tuple[Tensor, Tensor]:
    return tuple(F.normalize(torch.randn(count, dim), dim=-1).requires_grad_() for _ in range(2))  # type: ignore[return-value]


def temperature(value: float) -> Tensor:
    return torch.tensor(value)


def test_softmax_loss_is_the_mean_cross_entropy_of_both_ways():
    audio, text = latents()
    logits = audio @ text.T * 7
    target = torch.arange(5)
    expected = (F.cross_entropy(logits, target) + F.cross_entropy(logits.T, target)) / 2
    torch.testing.assert_close(softmax_loss(audio, text, temperature(7.0), decoupled=False), expected)


def test_decoupled_loss_leaves_the_pair_out_of_the_sum():
    audio, text = latents()
    logits = (audio @ text.T * 7).tolist()
    total = 0.0
    for i in range(5):
        others = [j for j in range(5) if j != i]
        total += math.log(sum(math.exp(logits[i][j]) for j in others)) - logits[i][i]
        total += math.log(sum(math.exp(logits[j][i]) for j in others)) - logits[i][i]
    assert softmax_loss(audio, text, temperature(7.0)).item() == pytest.approx(total / 10, rel=1e-5)


def test_sigmoid_loss_asks_of_every_two_alone():
    audio, text = latents()
    logits = (audio @ text.T * 7 - 2).tolist()
    total = sum(math.log(1 + math.exp(-logits[i][j] if i == j else logits[i][j])) for i in range(5) for j in range(5))
    actual = sigmoid_loss(audio, text, temperature(7.0), torch.tensor(-2.0)).item()
    assert actual == pytest.approx(total / 5, rel=1e-5)


EQUALS = [3, 1, 3, 2, 3, 1]


def plain_loss(kind: str, logits: list[list[float]], captions: list[int]) -> float:
    """Pair by pair; at a bias of zero."""
    count, total = len(captions), 0.0
    for i in range(count):
        others = [j for j in range(count) if captions[j] != captions[i]]
        if kind == "sigmoid":
            total += math.log(1 + math.exp(-logits[i][i])) + sum(math.log(1 + math.exp(logits[i][j])) for j in others)
            continue
        compared = others if kind == "decoupled" else [i, *others]
        if compared:
            total += math.log(sum(math.exp(logits[i][j]) for j in compared)) / 2 - logits[i][i] / 2
            total += math.log(sum(math.exp(logits[j][i]) for j in compared)) / 2 - logits[i][i] / 2
    return total / count


def loss_of(kind: str, audio: Tensor, text: Tensor, captions: list[int] | None) -> Tensor:
    told = None if captions is None else torch.tensor(captions)
    if kind == "sigmoid":
        return sigmoid_loss(audio, text, temperature(7.0), torch.tensor(0.0), captions=told)
    return softmax_loss(audio, text, temperature(7.0), kind == "decoupled", captions=told)


@pytest.mark.parametrize("captions", [EQUALS, [1] * 6, list(range(6))], ids=["some", "all", "none"])
@pytest.mark.parametrize("kind", ["decoupled", "softmax", "sigmoid"])
def test_pairs_of_equal_captions_are_not_told_apart(kind, captions):
    """Where all are equal nothing is left to be told from, which is no infinity."""
    audio, text = latents(6)
    loss = loss_of(kind, audio, text, captions)
    assert loss.item() == pytest.approx(plain_loss(kind, (audio @ text.T * 7).tolist(), captions), rel=1e-5, abs=1e-6)
    loss.backward()
    assert all(value.grad is not None and value.grad.isfinite().all() for value in (audio, text))
    assert loss_of(kind, audio, text, None).allclose(loss) == (len(set(captions)) == 6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize("sign", [1.0, -1.0])  # the best there can be, and the worst
def test_nothing_overflows_at_the_highest_temperature(dtype, decoupled, sign):
    """(In the package that it replaces this is minus infinity, and NaN in half precision.)"""
    audio = torch.eye(6, dtype=dtype, requires_grad=True)
    heat = torch.tensor(100.0, requires_grad=True)
    loss = softmax_loss(audio, sign * torch.eye(6, dtype=dtype), heat, decoupled)
    loss.backward()
    assert loss.dtype == torch.float32 and loss.isfinite()
    expected = math.log(5) - sign * 100 if decoupled else (0.0 if sign > 0 else 100 + math.log(5))
    assert loss.item() == pytest.approx(expected, abs=1e-3)
    assert audio.grad is not None and audio.grad.isfinite().all() and heat.grad is not None and heat.grad.isfinite()


def test_a_collapsed_network_has_the_loss_of_chance():
    same = F.normalize(torch.ones(9, 3), dim=-1)
    assert softmax_loss(same, same, temperature(50.0)).item() == pytest.approx(math.log(8), abs=1e-4)
    assert softmax_loss(same, same, temperature(50.0), decoupled=False).item() == pytest.approx(math.log(9), abs=1e-4)


def test_autocast_changes_nothing():
    audio, text = latents(8, 16)
    losses = [ContrastiveLoss(), ContrastiveLoss(decoupled=False), ContrastiveLoss(sigmoid=True)]
    plain = [loss(audio, text).item() for loss in losses]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert [loss(audio, text).item() for loss in losses] == plain


def test_temperature_ends_at_a_hundred_and_can_come_back():
    """(In the package that it replaces it grows until the loss is NaN.)"""
    loss = ContrastiveLoss()
    assert loss.temperature.item() == pytest.approx(10)
    with torch.no_grad():
        loss.log_temperature.fill_(9.0)
    assert loss.temperature.item() == pytest.approx(100)
    for sign, moves in ((1.0, True), (-1.0, False)):  # descending a positive gradient lowers it
        loss.log_temperature.grad = None
        (sign * loss.temperature).backward()
        assert (loss.log_temperature.grad != 0) == moves
    below = torch.tensor(1.5, requires_grad=True)
    at_most(below, 2.0).mul(-3).backward()
    assert below.grad == -3


def test_a_pair_alone_is_refused():
    audio, text = latents(1)
    for loss in (ContrastiveLoss(), ContrastiveLoss(sigmoid=True)):
        with pytest.raises(ValueError, match=r"1 pair has no other.*2 or more"):
            loss(audio, text)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, dict[str, Tensor]]]:
    """Of one process on the whole batch, and of both of two."""
    folder: Path = tmp_path_factory.mktemp("ranks")
    ranks = [(0, 1), (0, 2), (1, 2)]
    started = [
        children.start(
            lambda rank=rank, world=world: two_processes.main(rank, world, folder), str(folder / f"{world}{rank}")
        )
        for rank, world in ranks
    ]
    assert [children.finish(child) for child in started] == [0, 0, 0]
    return [torch.load(folder / f"{rank}-of-{world}.pt") for rank, world in ranks]


@pytest.mark.parametrize("name", list(two_processes.LOSSES))
def test_two_processes_descend_the_loss_of_one(outcomes, name):
    alone, first, second = (outcome[name] for outcome in outcomes)
    gradients = [key for key in alone if key.startswith("gradient.")]
    assert len(gradients) >= 3 and all(alone[key].abs().max() > 1e-4 for key in gradients)
    for key in gradients:  # of parameters, which distributed training averages
        torch.testing.assert_close(first[key], alone[key], atol=1e-6, rtol=1e-5)
        torch.testing.assert_close(second[key], first[key], atol=0, rtol=0)
    for key in ("audio", "text"):  # of latents: each process has twice its share, of which the mean is taken later
        both = torch.cat((first[key], second[key])) / 2
        torch.testing.assert_close(both, alone[key], atol=1e-6, rtol=1e-5)
    torch.testing.assert_close((first["loss"] + second["loss"]) / 2, alone["loss"], atol=1e-5, rtol=1e-6)
    assert (first["loss"] - second["loss"]).abs() > 1e-3


@pytest.mark.parametrize("name", list(two_processes.LOSSES))
def test_in_evaluation_a_process_compares_its_own_pairs(outcomes, name):
    """Validation need not give every process as many batches."""
    _, first, second = (outcome[name] for outcome in outcomes)
    for rank, outcome in enumerate((first, second)):
        expected = two_processes.evaluated_alone(name, rank)
        torch.testing.assert_close(outcome["evaluated"], expected, atol=1e-6, rtol=1e-6)
