"""K-means on the device: against scipy's, and what it promises."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from scipy.cluster.vq import kmeans2
from torch import Tensor

from helicon.models.semantic.kmeans import KMeans, read_centroids


def blobs(clusters: int, count: int, dim: int, spread: float) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    centres = 8 * torch.randn(clusters, dim, generator=generator)
    labels = torch.randint(clusters, (count,), generator=generator)
    return centres[labels] + spread * torch.randn(count, dim, generator=generator), labels


def test_clusters_that_are_there_are_found() -> None:
    frames, labels = blobs(7, 900, 5, 0.1)
    kmeans = KMeans(5, 7)
    report = kmeans.fit(frames, seed=3, batch_size=100)
    ids = kmeans(frames)
    pairs = {(int(a), int(b)) for a, b in zip(ids, labels, strict=True)}
    assert len(pairs) == len({a for a, _ in pairs}) == 7
    assert report.num_frames == 900 and report.num_used == 7
    assert report.inertia == pytest.approx(5 * 0.1**2, rel=0.05) and report.variance > 100
    assert 6 < report.perplexity <= 7


def test_frames_that_are_not_finite_are_told() -> None:
    frames = torch.randn(50, 3)
    frames[7, 1], frames[9, 0] = torch.nan, torch.inf
    with pytest.raises(ValueError, match="2 of 50 frames are not finite"):
        KMeans(3, 4).fit(frames)


def test_it_is_as_good_as_scipys() -> None:
    frames = torch.randn(4000, 6, generator=torch.Generator().manual_seed(2))
    report = KMeans(6, 30).fit(frames, seed=0, batch_size=512)
    theirs, ids = kmeans2(frames.numpy(), 30, iter=100, minit="++", rng=np.random.default_rng(0))
    inertia = np.square(frames.numpy() - theirs[ids]).sum(axis=1).mean()
    assert report.inertia < 1.01 * inertia


def test_nearest_is_nearest() -> None:
    frames = torch.randn(3, 50, 4, generator=torch.Generator().manual_seed(4))
    kmeans = KMeans(4, 9)
    kmeans.fit(frames.reshape(-1, 4), passes=2)
    expected = (frames[..., None, :] - kmeans.centroids).square().sum(dim=-1).argmin(dim=-1)
    assert torch.equal(kmeans(frames), expected)
    assert torch.equal(kmeans(frames.half()), kmeans(frames.half().float()))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(kmeans(frames), expected)


def test_the_seed_decides() -> None:
    frames, _ = blobs(20, 500, 4, 2.0)
    fits = []
    for seed, draws in ((1, 0), (1, 3), (2, 0)):
        torch.rand(draws)  # the global state has no say
        kmeans = KMeans(4, 15)
        kmeans.fit(frames, seed=seed, batch_size=64)
        fits.append(kmeans.centroids)
    assert torch.equal(fits[0], fits[1]) and not torch.equal(fits[0], fits[2])


def test_no_cluster_stays_unused_where_there_is_something_for_it() -> None:
    frames, _ = blobs(12, 2000, 3, 0.5)
    kmeans = KMeans(3, 12)
    kmeans._scatter(frames, torch.Generator().manual_seed(0))
    kmeans.centroids[4:] = 1e4  # as if most of them had been drawn where nothing is
    scattered = kmeans.centroids.clone()
    kmeans._scatter = lambda *_: kmeans.centroids.copy_(scattered)  # type: ignore[method-assign]
    report = kmeans.fit(frames, seed=0, batch_size=500)
    assert report.num_used == 12 and report.inertia < 0.1 * report.variance
    torch.testing.assert_close(kmeans(kmeans.centroids), torch.arange(12))


def test_equal_frames_leave_clusters_unused() -> None:
    frames = torch.tensor([[1.0, 2.0], [3.0, 4.0]]).repeat(30, 1)
    kmeans = KMeans(2, 5)
    report = kmeans.fit(frames)
    assert report.num_used == 2 and report.inertia == pytest.approx(0, abs=1e-5)
    assert kmeans.centroids.isfinite().all()


def test_mistakes_are_told_in_one_sentence() -> None:
    with pytest.raises(ValueError, match="not fitted yet: run `helicon fit-kmeans`"):
        KMeans(3, 4)(torch.zeros(2, 3))
    with pytest.raises(ValueError, match="4 clusters cannot be found in 3 frames: give more audio, or fewer clusters"):
        KMeans(3, 4).fit(torch.zeros(3, 3))
    with pytest.raises(ValueError, match="codebook_size=1: it must be at least 2"):
        KMeans(3, 1)


def test_centroids_stay_in_single_precision() -> None:
    kmeans = KMeans(3, 4)
    kmeans.fit(torch.randn(50, 3, generator=torch.Generator().manual_seed(0)))
    before = kmeans.centroids.clone()
    assert torch.equal(kmeans.to(torch.bfloat16).centroids, before)
    assert kmeans.to("meta").centroids.device.type == "meta"


def test_reading_centroids(tmp_path: Path) -> None:
    table = torch.randn(4, 3)
    save_file({"cluster_centers": table}, tmp_path / "other.safetensors")
    centroids, fingerprint = read_centroids(tmp_path / "other.safetensors")
    assert torch.equal(centroids, table) and fingerprint is None
    save_file({"a": table, "b": table.clone()}, tmp_path / "two.safetensors")
    with pytest.raises(ValueError, match="holds 2 tables of numbers, and not the one of centroids"):
        read_centroids(tmp_path / "two.safetensors")
    for name in ("km500.bin", "kmeans.pt", "kmeans.joblib"):
        (tmp_path / name).touch()
        with pytest.raises(
            ValueError, match="may be a pickle, which is never read: make clusters with `helicon fit-kmeans`"
        ):
            read_centroids(tmp_path / name)
    with pytest.raises(ValueError, match=r"there are no clusters at .*absent: make them with `helicon fit-kmeans`"):
        read_centroids(tmp_path / "absent")
