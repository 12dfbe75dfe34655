"""What pretrained models that are only used have in common. (Codecs and tokenizers test the rest on real models.)"""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from helicon.nn.frozen import Frozen, by_length, cut_by_length, joined


class Drops(nn.Module):
    """Draws random numbers even in evaluation mode, as some models of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + 0 * torch.rand(())


def frozen(seed: int = 0, **identity: Any) -> Frozen:
    torch.manual_seed(seed)
    return Frozen(Drops().train(), "a model", identity)


def test_a_fingerprint_tells_weights_and_settings_apart() -> None:
    prints = [frozen(0, layer=1), frozen(0, layer=2), frozen(1, layer=1)]
    assert len({bytes(one.fingerprint.tolist()) for one in prints}) == 3
    assert torch.equal(frozen(0, layer=1).fingerprint, prints[0].fingerprint)
    prints[0].check(prints[0].fingerprint)
    for other in (None, prints[1].fingerprint):
        with pytest.raises(
            ValueError, match="the model at a model is not the one this was saved with: put the old one back"
        ):
            prints[0].check(other)


def test_nothing_reaches_the_model() -> None:
    holder = frozen()
    parent = nn.Sequential(holder).train().requires_grad_(True).to(torch.bfloat16)
    assert not list(parent.parameters()) and not holder.model.training
    assert {parameter.dtype for parameter in holder.model.parameters()} == {torch.float32}
    x = torch.ones(1, 3, requires_grad=True)
    state = torch.get_rng_state()
    with torch.autocast("cpu", dtype=torch.bfloat16), holder.undisturbed() as model:
        y = model(x)
    assert y.dtype == torch.float32 and not y.requires_grad
    assert torch.equal(torch.get_rng_state(), state)


def test_rows_of_one_length_go_together_without_padding() -> None:
    inputs = torch.arange(24.0).reshape(4, 2, 3)
    lengths = torch.tensor([3, 1, 0, 3])
    seen: list[tuple[int, ...]] = []

    def doubled(cut: Tensor) -> Tensor:
        seen.append(tuple(cut.shape))
        return cut.repeat_interleave(2, dim=-1)

    found = by_length(inputs, lengths, doubled, size=6, fill=-1)
    assert seen == [(1, 2, 1), (2, 2, 3)]
    assert found[1, 0].tolist() == [6, 6, -1, -1, -1, -1] and (found[2] == -1).all()
    assert torch.equal(found[[0, 3]], inputs[[0, 3]].repeat_interleave(2, dim=-1))
    assert torch.equal(by_length(inputs, None, doubled, size=6, fill=-1), inputs.repeat_interleave(2, dim=-1))
    short = by_length(inputs, torch.full((4,), 2), doubled, size=6, fill=-1)  # shapes do not depend on lengths
    assert torch.equal(short[..., :4], inputs[..., :2].repeat_interleave(2, dim=-1)) and (short[..., 4:] == -1).all()


def test_lengths_that_cannot_be() -> None:
    inputs = torch.ones(2, 5)
    for length in (-1, 6):
        with pytest.raises(ValueError, match=f"row 1 cannot have a length of {length}: the rows have 5"):
            cut_by_length(inputs, torch.tensor([5, length]))
    for given, least in ((torch.tensor([3, 2]), 4), (None, 6)):
        with pytest.raises(ValueError, match=f"and nothing can be made of less than {least}"):
            cut_by_length(inputs, given, least)
    for lengths in ([5], [5, 4, 3]):
        with pytest.raises(
            ValueError, match=rf"lengths of shape \[{len(lengths)}\] do not fit 2 rows: give one for each"
        ):
            cut_by_length(inputs, torch.tensor(lengths))


def test_joined_keeps_the_order() -> None:
    parts = [([2, 0], torch.tensor([[1, 1], [2, 2]])), ([1], torch.tensor([[3]]))]
    assert joined(3, parts, 3, 0).tolist() == [[2, 2, 0], [3, 0, 0], [1, 1, 0]]
