"""Passing gradients through a rounding: straight, or by rotation."""

import torch

from helicon.quantize.rows import entropy, rotate_onto, straight_through


def test_straight_through_is_exact_forward_and_the_identity_backward() -> None:
    rows, quantized = torch.randn(5, 3, requires_grad=True) * 1e4, torch.randn(5, 3) * 1e-4
    rows.retain_grad()
    values = straight_through(rows, quantized)
    assert torch.equal(values, quantized)
    weights = torch.randn(5, 3)
    (values * weights).sum().backward()
    assert rows.grad is not None and torch.equal(rows.grad, weights)


def test_rotation_carries_the_gradient_as_it_carries_the_row_onto_its_code() -> None:
    rows, quantized = torch.randn(5, 4, dtype=torch.float64, requires_grad=True), torch.randn(5, 4, dtype=torch.float64)
    values = rotate_onto(rows, quantized)
    assert torch.equal(values, quantized)
    for index in range(5):
        jacobian = torch.stack(
            [torch.autograd.grad(values[index, i], rows, retain_graph=True)[0][index] for i in range(4)]
        )
        torch.testing.assert_close(jacobian @ rows[index].detach(), quantized[index])
        scale = quantized[index].norm() / rows[index].detach().norm()
        rotation = jacobian / scale
        torch.testing.assert_close(rotation @ rotation.T, torch.eye(4, dtype=torch.float64))
        torch.testing.assert_close(torch.linalg.det(rotation), torch.tensor(1.0, dtype=torch.float64))


def test_rotation_of_rows_without_direction_has_a_finite_gradient() -> None:
    rows = torch.zeros(3, 4)
    rows[1] = 1e-20
    rows.requires_grad_()
    quantized = torch.randn(3, 4)
    quantized[2] = 0
    rotate_onto(rows, quantized).sum().backward()
    assert rows.grad is not None and torch.equal(rows.grad, torch.ones(3, 4))


def test_entropy_of_probabilities_that_underflowed() -> None:
    probabilities = torch.tensor([0.5, 0.5, 0.0, 1e-42], requires_grad=True)
    value = entropy(probabilities)
    torch.testing.assert_close(value, torch.tensor(0.5).log().neg())
    value.backward()
    assert probabilities.grad is not None and probabilities.grad.isfinite().all()
