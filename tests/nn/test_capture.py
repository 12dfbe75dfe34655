import pytest
import torch
from torch import nn

from helicon.nn.capture import Weights, evaluating


def test_weights_are_there_in_another_type_for_a_while():
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))
    weights, before = Weights(model, torch.bfloat16), [p.clone() for p in model.parameters()]
    for factor in (1, 2):  # those of the day, at the same addresses
        with torch.no_grad():
            model[0].weight.copy_(before[0] * factor)
        with pytest.raises(RuntimeError, match="stop"), weights.in_place():
            assert all(p.dtype == torch.bfloat16 for p in model.parameters())
            assert model[0].weight.data_ptr() == weights.copies[0].data_ptr()
            torch.testing.assert_close(model[0].weight.float(), before[0] * factor, atol=0.02, rtol=0.01)
            raise RuntimeError("stop")
        assert torch.equal(model[0].weight, before[0] * factor) and torch.equal(model[1].bias, before[3])


def test_who_listens_to_a_gradient_still_hears_of_it():
    """Distributed training listens where gradients are accumulated."""
    model, heard = nn.Linear(3, 5), []
    accumulator = model.weight.expand_as(model.weight).grad_fn.next_functions[0][0]
    accumulator.register_hook(lambda *_: heard.append("weight"))
    parameter = model.weight
    with Weights(model, torch.bfloat16).in_place():
        model(torch.zeros(1, 3, dtype=torch.bfloat16))
    assert model.weight is parameter
    model(torch.zeros(1, 3)).sum().backward()
    assert heard == ["weight"]


def test_tied_weights_stay_tied():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    with Weights(model, torch.bfloat16).in_place():
        assert model[1].weight is model[0].weight and model[1].weight.dtype == torch.bfloat16
    assert model[1].weight is model[0].weight and model[1].weight.dtype == torch.float32


def test_a_model_in_its_own_type_keeps_its_weights():
    model = nn.Linear(3, 5)
    weights, place = Weights(model, None), model.weight.data_ptr()
    with weights.in_place():
        assert model.weight.data_ptr() == place and not weights.copies


def test_weights_know_whose_they_are():
    model = nn.Linear(3, 5)
    weights = Weights(model, None)
    assert weights.are_of(model) and not weights.are_of(nn.Linear(3, 5))
    model.weight = nn.Parameter(torch.zeros(5, 3))
    assert not weights.are_of(model) and not weights.are_of(nn.Sequential())
    weights = Weights(model, None)
    assert not weights.are_of(model.double())


def test_modes_are_put_back_one_by_one():
    model = nn.Sequential(nn.Dropout(), nn.Dropout())
    model[1].eval()
    with pytest.raises(RuntimeError, match="stop"), evaluating(model):
        assert not any(module.training for module in model.modules())
        raise RuntimeError("stop")
    assert [module.training for module in model.modules()] == [True, True, False]
