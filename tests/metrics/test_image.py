import math

import numpy as np
import pytest
import scipy.linalg
import torch

from helicon.metrics.image import frechet_distance, image_grid, psnr, ssim


def pictures(seed: int, *shape: int) -> torch.Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed))


def test_psnr_is_that_of_each_image():
    images, targets = pictures(0, 2, 3, 5, 7), pictures(1, 2, 3, 5, 7)
    expected = [-10 * math.log10(((a - b) ** 2).mean()) for a, b in zip(images.numpy(), targets.numpy(), strict=True)]
    assert psnr(images, targets).tolist() == pytest.approx(expected, rel=1e-5)
    assert psnr(images * 255, targets * 255, value_range=255.0).tolist() == pytest.approx(expected, rel=1e-5)


def test_psnr_of_an_image_with_itself_is_finite():
    images = pictures(0, 1, 3, 4, 4)
    assert psnr(images, images).item() == pytest.approx(100.0)


def naive_ssim(a: np.ndarray, b: np.ndarray) -> float:
    """Window by window, for one image [c, h, w]."""
    taps = np.exp(-((np.arange(11) - 5.0) ** 2) / (2 * 1.5**2))
    window = np.outer(taps, taps) / np.outer(taps, taps).sum()
    values = []
    for channel_a, channel_b in zip(a, b, strict=True):
        for top in range(a.shape[1] - 10):
            for left in range(a.shape[2] - 10):
                x = channel_a[top : top + 11, left : left + 11]
                y = channel_b[top : top + 11, left : left + 11]
                mean_x, mean_y = (window * x).sum(), (window * y).sum()
                variance_x, variance_y = (window * (x - mean_x) ** 2).sum(), (window * (y - mean_y) ** 2).sum()
                covariance = (window * (x - mean_x) * (y - mean_y)).sum()
                values.append(
                    (2 * mean_x * mean_y + 0.01**2)
                    * (2 * covariance + 0.03**2)
                    / ((mean_x**2 + mean_y**2 + 0.01**2) * (variance_x + variance_y + 0.03**2))
                )
    return float(np.mean(values))


def test_ssim_equals_the_formula_window_by_window():
    images = pictures(0, 2, 3, 13, 17)
    targets = (images + 0.3 * pictures(1, 2, 3, 13, 17)).clamp(0, 1)
    expected = [
        naive_ssim(a.astype(np.float64), b.astype(np.float64))
        for a, b in zip(images.numpy(), targets.numpy(), strict=True)
    ]
    assert ssim(images, targets).tolist() == pytest.approx(expected, abs=1e-5)
    assert ssim(images, images).tolist() == pytest.approx([1.0, 1.0])


def test_ssim_refuses_images_smaller_than_its_window():
    with pytest.raises(ValueError, match="windows of 11"):
        ssim(pictures(0, 1, 3, 8, 16), pictures(1, 1, 3, 8, 16))


def test_frechet_distance_equals_the_formula_with_a_matrix_root():
    a, b = pictures(0, 50, 6), pictures(1, 40, 6) * 2 + 0.5
    mean_a, mean_b = a.double().mean(0).numpy(), b.double().mean(0).numpy()
    cov_a, cov_b = np.cov(a.double().numpy().T), np.cov(b.double().numpy().T)
    root = scipy.linalg.sqrtm(cov_a @ cov_b).real
    expected = ((mean_a - mean_b) ** 2).sum() + np.trace(cov_a + cov_b - 2 * root)
    assert frechet_distance(a, b).item() == pytest.approx(expected, rel=1e-8)


def test_frechet_distance_with_fewer_samples_than_features():
    a = pictures(0, 5, 40)
    assert frechet_distance(a, a).item() == pytest.approx(0.0, abs=1e-8)
    assert frechet_distance(a, a + 1).item() == pytest.approx(40.0, rel=1e-8)
    assert frechet_distance(a, pictures(1, 7, 40)).item() == pytest.approx(
        frechet_distance(pictures(1, 7, 40), a).item()
    )
    with pytest.raises(ValueError, match="two samples"):
        frechet_distance(a[:1], a)


def test_frechet_distance_of_one_kind_shrinks_with_more_samples():
    generator = torch.Generator().manual_seed(0)
    pairs = [torch.randn(2, count, 30, generator=generator) for count in (10, 100, 1000)]
    few, more, many = (frechet_distance(*pair).item() for pair in pairs)
    assert few > 3 * more > 9 * many > 0
    other = torch.randn(1000, 30, generator=generator) * 1.5
    assert frechet_distance(pairs[-1][0], other).item() > 5 * many


def test_frechet_distance_is_that_of_the_gaussians_the_features_have():
    """Of N(0, 1) and N(3, 4): 3^2 + (1 - 2)^2."""
    base = torch.randn(4000, 1, generator=torch.Generator().manual_seed(0)).double()
    base = (base - base.mean()) / base.std()
    assert frechet_distance(base, 2 * base + 3).item() == pytest.approx(10.0, rel=1e-9)


@pytest.mark.parametrize(("channels", "mode"), [(1, "L"), (3, "RGB"), (4, "RGBA")])
def test_a_grid_has_a_row_for_each_batch_and_clamps_its_values(channels: int, mode: str):
    low, high = torch.full((3, channels, 4, 5), -0.02), torch.full((3, channels, 4, 5), 1.02)
    grid = image_grid([low, high], gap=1)
    assert (grid.mode, grid.size) == (mode, (3 * 5 + 2, 2 * 4 + 1))
    pixels = np.asarray(grid)
    assert (pixels[:4, :5] == 0).all() and (pixels[5:, :5] == 255).all()  # 1.02 does not wrap round to 4
    assert (pixels[4] == 255).all()


def test_a_grid_refuses_rows_of_different_shapes():
    with pytest.raises(ValueError, match="one shape"):
        image_grid([pictures(0, 1, 3, 4, 4), pictures(0, 1, 3, 4, 5)])
