"""Vector quantization: parity with vector-quantize-pytorch, k-means, revival, sampling, the gradient codebook."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from vector_quantize_pytorch import VectorQuantize

from helicon.quantize import VectorQuantizer


def clusters(count: int, rows: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Rows `[1, rows, 4]` close around `count` centres far from each other, and the centres."""
    generator = torch.Generator().manual_seed(seed)
    centres = 10 * torch.randn(count, 4, generator=generator)
    chosen = torch.arange(rows) % count
    return (centres[chosen] + 0.01 * torch.randn(rows, 4, generator=generator))[None], centres


@pytest.mark.parametrize("use_cosine_sim", [False, True])
@pytest.mark.parametrize("rotation_trick", [False, True])
def test_parity_over_several_steps(use_cosine_sim: bool, rotation_trick: bool) -> None:
    torch.manual_seed(0)
    ours = VectorQuantizer(5, 13, decay=0.7, use_cosine_sim=use_cosine_sim, rotation_trick=rotation_trick)
    theirs = VectorQuantize(5, 13, decay=0.7, use_cosine_sim=use_cosine_sim, rotation_trick=rotation_trick)
    theirs._codebook.embed.copy_(ours.codebook[None])
    theirs._codebook.embed_avg.copy_(ours.codebook[None])
    for _ in range(5):
        features, weights = torch.randn(2, 17, 5, requires_grad=True), torch.randn(2, 17, 5)
        result = ours(features)
        values, codes, loss = theirs(features)
        assert torch.equal(result.codes, codes)
        torch.testing.assert_close(result.values, values)
        torch.testing.assert_close(result.loss, loss.reshape(()))
        (gradient,) = torch.autograd.grad((result.values * weights).sum() + result.loss, features)
        (expected,) = torch.autograd.grad((values * weights).sum() + loss.sum(), features)
        torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(ours.codebook, theirs._codebook.embed[0])
        torch.testing.assert_close(ours.cluster_size, theirs._codebook.cluster_size[0])
        torch.testing.assert_close(ours.cluster_sum, theirs._codebook.embed_avg[0])
    theirs.eval()
    ours.eval()
    torch.testing.assert_close(ours(features).values, theirs(features)[0])


@pytest.mark.parametrize("use_cosine_sim", [False, True])
def test_kmeans_start_finds_the_clusters(use_cosine_sim: bool) -> None:
    features, _ = clusters(count=6, rows=60)
    quantizer = VectorQuantizer(4, 6, kmeans_init=True, use_cosine_sim=use_cosine_sim)
    result = quantizer(features)
    rows = F.normalize(features, dim=-1) if use_cosine_sim else features
    spread = rows.std()
    # Lloyd's iterations from distinct rows may leave two clusters to one code, never less than most of them apart.
    assert result.parts["commitment"] < 0.3 * spread**2
    assert result.parts["codebook_use"] >= 4 / 6
    assert quantizer.initialised


def test_kmeans_step_is_lloyds() -> None:
    """With one iteration: the means of the rows nearest to each drawn row, distinct rows being drawn."""
    torch.manual_seed(0)
    features = torch.randn(1, 40, 3)
    quantizer = VectorQuantizer(3, 7, kmeans_init=True, kmeans_iters=1)
    drawn, num_rows = quantizer._draw_rows(features[0], torch.ones(40, dtype=torch.bool), torch.arange(7))
    assert num_rows == 40 and len(drawn.unique(dim=0)) == 7
    assert all((row == features[0]).all(-1).any() for row in drawn)
    nearest = torch.cdist(features[0], drawn).argmin(-1)
    expected = torch.stack([features[0, nearest == code].mean(0) for code in range(7)])
    quantizer._start(features[0], torch.ones(40, dtype=torch.bool))
    torch.testing.assert_close(quantizer.codebook, expected)
    torch.testing.assert_close(quantizer.cluster_size, nearest.bincount(minlength=7).float())


def test_kmeans_with_fewer_rows_than_codes() -> None:
    quantizer = VectorQuantizer(3, 50, kmeans_init=True)
    features = torch.randn(1, 8, 3)
    result = quantizer(features)
    assert torch.equal(result.values, features)
    result = quantizer(features)
    torch.testing.assert_close(result.values, features, rtol=1e-3, atol=1e-3)


def test_kmeans_starts_once_also_when_an_unstarted_state_is_loaded() -> None:
    quantizer = VectorQuantizer(4, 6, kmeans_init=True)
    unstarted = {name: value.clone() for name, value in quantizer.state_dict().items()}
    first, _ = clusters(6, 30, seed=1)
    second, _ = clusters(6, 30, seed=2)
    quantizer(first)
    far = quantizer(second).parts["commitment"]
    quantizer.load_state_dict(unstarted)
    assert not quantizer.initialised
    near = quantizer(second).parts["commitment"]
    assert near < 0.1 * far


def test_every_place_of_the_shuffle_is_another_row() -> None:
    for rows in (1, 2, 37, 64, 1000):
        quantizer = VectorQuantizer(1, 8)
        seen = []
        for _ in range(3):
            everything = torch.arange(rows).float()[:, None]
            drawn, _ = quantizer._draw_rows(everything, torch.ones(rows, dtype=torch.bool), torch.arange(rows))
            assert len(drawn.unique()) == rows
            seen.append(drawn)
            quantizer.draws += 1
        if rows > 10:
            assert not torch.equal(seen[0], seen[1]) and not torch.equal(seen[1], seen[2])


def test_masked_rows_are_never_drawn() -> None:
    quantizer = VectorQuantizer(1, 8)
    rows, keep = torch.arange(20).float()[:, None], torch.rand(20) > 0.5
    drawn, num_rows = quantizer._draw_rows(rows, keep, torch.arange(int(keep.sum())))
    assert num_rows == keep.sum()
    assert torch.equal(drawn.sort(dim=0).values, rows[keep])


def test_dead_codes_move_onto_rows_of_the_batch() -> None:
    features, _ = clusters(count=4, rows=40)
    torch.manual_seed(0)
    quantizer = VectorQuantizer(4, 8, threshold_ema_dead_code=1, decay=0.5)
    quantizer.codebook.fill_(100.0)  # all far away: one code takes every row, the others die
    quantizer.cluster_sum.fill_(100.0)
    for _ in range(6):
        result = quantizer(features)
    assert result.parts["codebook_use"] > 0.5
    assert result.parts["commitment"] < 0.01
    still = VectorQuantizer(4, 8, decay=0.5)
    still.codebook.fill_(100.0)
    still.cluster_sum.fill_(100.0)
    for _ in range(6):
        result = still(features)
    assert result.parts["codebook_use"] == 1 / 8


def test_revived_codes_and_their_statistics() -> None:
    """As vector-quantize-pytorch: the row, an average count at the threshold, and the sum that belongs to both."""
    torch.manual_seed(0)
    quantizer = VectorQuantizer(3, 9, threshold_ema_dead_code=2, decay=0.9)
    features = torch.randn(1, 6, 3)
    quantizer.cluster_size.copy_(torch.tensor([0.0, 9, 9, 0, 0, 9, 9, 9, 9]))
    quantizer._revive(features[0], torch.ones(6, dtype=torch.bool))
    moved = quantizer.codebook[[0, 3, 4]]
    assert len(moved.unique(dim=0)) == 3 and all((row == features[0]).all(-1).any() for row in moved)
    assert quantizer.cluster_size.tolist() == [2, 9, 9, 2, 2, 9, 9, 9, 9]
    torch.testing.assert_close(quantizer.cluster_sum[[0, 3, 4]], 2 * moved)


def test_more_dead_codes_than_rows_makes_no_twins() -> None:
    quantizer = VectorQuantizer(3, 9, threshold_ema_dead_code=2)
    quantizer.cluster_size.zero_()
    before = quantizer.codebook.clone()
    quantizer._revive(torch.randn(4, 3), torch.tensor([True, True, False, True]))
    assert (quantizer.codebook != before).any(-1).sum() == 3
    assert len(quantizer.codebook.unique(dim=0)) == 9


@pytest.mark.parametrize(("mean", "decay"), [(0.05, 0.95), (0.3, 0.95), (0.3, 0.8), (1.0, 0.9)])
def test_codes_of_an_even_share_are_rarely_taken_for_dead(mean: float, decay: float) -> None:
    """By trial, with averages of numbers of rows at random: once in a thousand times, or a few."""
    torch.manual_seed(0)
    quantizer = VectorQuantizer(1, 10_000, decay=decay, threshold_ema_dead_code=2)
    found = []
    for step in range(round(16 / (1 - decay))):
        quantizer.cluster_size.lerp_(torch.poisson(torch.full((10_000,), mean)), 1 - decay)
        if step >= 8 / (1 - decay):
            found.append((quantizer.cluster_size < quantizer._dead_below()[0]).float().mean())
    assert 3e-4 < torch.stack(found).mean() < 3e-3


@pytest.mark.parametrize(("threshold", "decay", "mean"), [(0.2, 0.95, 0.51), (2, 0.95, 3.2), (2, 0.8, 4)])
def test_the_threshold_is_as_given_where_batches_are_large(threshold: float, decay: float, mean: float) -> None:
    quantizer = VectorQuantizer(1, 8, decay=decay, threshold_ema_dead_code=threshold)
    quantizer.cluster_size.copy_(torch.linspace(0, 2 * mean, 8))
    assert [size.item() for size in quantizer._dead_below()] == pytest.approx([threshold] * 2)


def test_small_batches_leave_codes_in_use_where_they_are() -> None:
    """Six rows a step for 64 codes are 0.09 for each: all codes of an even share are below the threshold, and move in turn."""
    torch.manual_seed(0)
    centres = 10 * torch.randn(64, 8)
    quantizer = VectorQuantizer(8, 64, decay=0.95, threshold_ema_dead_code=0.2)
    quantizer.codebook.copy_(centres)
    quantizer.codebook[0] = 1000.0  # but this one is in no use
    quantizer.cluster_sum.copy_(quantizer.codebook)
    for _ in range(300):
        quantizer(centres[torch.randint(1, 64, (6,))][None])
    kept = (quantizer.codebook - centres).norm(dim=-1)[1:] < 1
    assert kept.float().mean() > 0.95
    assert torch.cdist(quantizer.codebook[:1], centres[1:]).min() < 1


def test_sampled_codes_follow_the_softmax_of_distances() -> None:
    torch.manual_seed(0)
    quantizer = VectorQuantizer(2, 4, stochastic_sample_codes=True, sample_codebook_temp=0.7)
    quantizer.codebook.copy_(torch.tensor([[0.0, 0], [1, 0], [0, 2], [3, 3]]))
    row = torch.tensor([0.4, 0.3])
    codes = quantizer._choose(row.expand(20000, 2), quantizer.codebook, is_sampled=True)
    expected = (-(row - quantizer.codebook).norm(dim=-1) / 0.7).softmax(-1)
    torch.testing.assert_close(codes.bincount(minlength=4) / 20000, expected, rtol=0, atol=0.015)
    quantizer.eval()
    assert (quantizer(row.expand(1, 50, 2)).codes == 0).all()


def test_gradient_codebook_learns_by_its_own_loss() -> None:
    torch.manual_seed(0)
    features, centres = clusters(count=3, rows=30)
    quantizer = VectorQuantizer(4, 3, ema_update=False, kmeans_init=True, commitment_weight=0.25)
    quantizer(features)
    optimizer = torch.optim.SGD(quantizer.parameters(), lr=2.0)
    moved = (features + 1).requires_grad_()
    first = quantizer(moved)
    chosen = F.embedding(first.codes, quantizer.codebook)
    expected = 0.25 * F.mse_loss(moved, chosen.detach()) + F.mse_loss(moved.detach(), chosen)
    torch.testing.assert_close(first.loss, expected)
    (gradient,) = torch.autograd.grad(first.loss, moved, retain_graph=True)
    torch.testing.assert_close(gradient, 0.25 * 2 * (moved - chosen).detach() / moved.numel())
    (straight,) = torch.autograd.grad(first.values.sum(), moved, retain_graph=True)
    assert (straight == 1).all()
    for _ in range(20):
        optimizer.zero_grad()
        quantizer(moved.detach()).loss.backward()
        optimizer.step()
    distance = torch.cdist(centres + 1, quantizer.codebook.detach()).amin(-1)
    assert distance.max() < 0.1


def test_commitment_alone_moves_features_when_the_codebook_is_averaged() -> None:
    quantizer = VectorQuantizer(4, 7, codebook_dim=3)
    assert {name for name, _ in quantizer.named_parameters()} == {
        f"project_{way}.{kind}" for way in ("in", "out") for kind in ("weight", "bias")
    }


def test_options_that_exclude_each_other() -> None:
    with pytest.raises(ValueError, match="ema_update=True"):
        VectorQuantizer(4, 7, use_cosine_sim=True, ema_update=False)
    with pytest.raises(ValueError, match=r"decay=1\.0"):
        VectorQuantizer(4, 7, decay=1.0)
    with pytest.raises(ValueError, match="sample_codebook_temp"):
        VectorQuantizer(4, 7, stochastic_sample_codes=True, sample_codebook_temp=0.0)
