import torch

from helicon.nn.positions import Rotation, positions_from_mask


def test_positions_count_real_tokens():
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 0, 0], [1, 0, 1, 0, 1]]).bool()
    assert positions_from_mask(mask)[mask].tolist() == [0, 1, 2, 0, 1, 2, 0, 1, 2]
    assert positions_from_mask(mask).min() == 0


def test_rotation_is_multiplication_by_complex_numbers():
    positions = torch.tensor([[0, 3, 7], [-2, 100, 5000]])
    x = torch.randn(2, 4, 3, 6)
    pairs = torch.complex(x[..., :3].double(), x[..., 3:].double())
    frequencies = 10_000.0 ** (-torch.arange(3).double() / 3)
    turned = pairs * torch.exp(1j * positions[:, None, :, None] * frequencies)
    expected = torch.cat((turned.real, turned.imag), dim=-1).float()
    torch.testing.assert_close(Rotation(positions, 6)(x), expected, atol=2e-3, rtol=0)  # fp32 angles up to 5000
    torch.testing.assert_close(Rotation(positions, 6)(x)[:1], expected[:1])


def test_products_depend_on_distance_alone():
    query, key = torch.randn(1, 1, 1, 8), torch.randn(1, 1, 1, 8)

    def product(i: int, j: int) -> torch.Tensor:
        return (Rotation(torch.tensor([[i]]), 8)(query) * Rotation(torch.tensor([[j]]), 8)(key)).sum()

    torch.testing.assert_close(product(3, 1), product(42, 40), atol=1e-4, rtol=1e-4)
    assert (product(3, 1) - product(3, 2)).abs() > 1e-3


def test_half_precision_positions_stay_apart():
    x = torch.ones(1, 1, 1, 4, dtype=torch.bfloat16)
    one, next_one = Rotation(torch.tensor([[1000]]), 4)(x), Rotation(torch.tensor([[1001]]), 4)(x)
    assert one.dtype == torch.bfloat16
    assert (one - next_one).abs().max() > 0.1
