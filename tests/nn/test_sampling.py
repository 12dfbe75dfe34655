import math

import pytest
import torch

from helicon.nn.sampling import Sampling, guide, keep_top_k, keep_top_p, num_kept, sample_gumbel


def kept(logits: torch.Tensor) -> list[list[int]]:
    return [row.isfinite().nonzero().flatten().tolist() for row in logits]


def test_top_k_against_sorting():
    logits = torch.randn(4, 11)
    for k in (1, 3, 11, 50):
        expected = [sorted(row.argsort(descending=True)[:k].tolist()) for row in logits]
        assert kept(keep_top_k(logits, k)) == expected


def naive_top_p(row: torch.Tensor, p: float) -> list[int]:
    chosen, total = [], 0.0
    for token in row.argsort(descending=True).tolist():
        chosen.append(token)
        total += row.softmax(dim=-1)[token].item()
        if total >= p:
            break
    return sorted(chosen)


@pytest.mark.parametrize("p", [1e-6, 0.3, 0.9, 1.0])
def test_top_p_against_the_definition(p):
    torch.manual_seed(0)
    logits = 3 * torch.randn(5, 13)
    assert kept(keep_top_p(logits, p)) == [naive_top_p(row, p) for row in logits]


def test_top_p_edges():
    assert kept(keep_top_p(torch.tensor([[9.0, 0.0, -math.inf]]), 0.5)) == [[0]]
    assert kept(keep_top_p(torch.tensor([[0.0, -math.inf, -math.inf]]), 1.0)) == [[0]]
    assert kept(keep_top_p(torch.zeros(1, 4), 0.5)) == [[0, 1, 2, 3]]  # ties with the last one kept stay


@pytest.mark.parametrize(
    ("thres", "vocabulary", "expected"),
    [(0.9, 500, 50), (0.9, 11, 2), (0.7, 10, 3), (0.0, 7, 7), (1.0, 7, 1), (0.99, 7, 1)],
)
def test_filter_thres_keeps_a_fraction(thres, vocabulary, expected):
    assert num_kept(thres, vocabulary) == expected
    logits = torch.randperm(vocabulary)[None].float()
    assert len(kept(Sampling(filter_thres=thres).filter(logits))[0]) == expected


def test_gumbel_samples_follow_the_softmax():
    logits = torch.tensor([1.0, 0.0, -1.0, 2.0, -math.inf])
    uniform = torch.rand(20_000, 5, generator=torch.Generator().manual_seed(0))
    tokens = sample_gumbel(logits.expand(20_000, 5), uniform)
    frequencies = tokens.bincount(minlength=5) / 20_000
    torch.testing.assert_close(frequencies, logits.softmax(dim=-1), atol=0.012, rtol=0)  # three standard deviations
    assert frequencies[4] == 0


def test_extreme_uniform_numbers_choose_a_possible_token():
    logits = torch.tensor([[0.0, 1.0, -math.inf]])
    for value in (0.0, 1 - 2**-24):
        assert sample_gumbel(logits, torch.full((1, 3), value)).item() in (0, 1)


def test_temperature():
    logits, uniform = torch.randn(300, 8), torch.rand(300, 8, generator=torch.Generator().manual_seed(1))
    assert torch.equal(Sampling(temperature=0.0).token(logits, uniform), logits.argmax(dim=-1))
    expected = sample_gumbel(logits / 0.5, uniform)
    assert torch.equal(Sampling(temperature=0.5).token(logits, uniform), expected)
    assert not torch.equal(Sampling(temperature=2.0).token(logits, uniform), expected)


def test_filters_apply_to_the_tempered_distribution():
    logits = torch.tensor([[3.0, 2.0, 1.0, 0.0]]).expand(500, 4)
    uniform = torch.rand(500, 4, generator=torch.Generator().manual_seed(2))
    assert set(Sampling(temperature=10.0, top_k=3, top_p=0.5).token(logits, uniform).tolist()) == {0, 1}


def test_guidance():
    cond, null = torch.randn(3, 9), torch.randn(3, 9)
    torch.testing.assert_close(guide(cond, null, 3.0), null + 3 * (cond - null))
    torch.testing.assert_close(guide(cond, null, 1.0, remove_parallel_component=True), cond)
    moved = guide(cond, null, 3.0, remove_parallel_component=True) - cond
    torch.testing.assert_close((moved * cond).sum(dim=-1), torch.zeros(3), atol=1e-4, rtol=0)
    torch.testing.assert_close(guide(cond, null, 5.0, rescale_phi=1.0).std(dim=-1), cond.std(dim=-1))
    half = guide(cond, null, 5.0, rescale_phi=0.5)
    torch.testing.assert_close(half, (guide(cond, null, 5.0) + guide(cond, null, 5.0, rescale_phi=1.0)) / 2)


def test_what_is_allowed_may_differ_by_row_and_stream():
    torch.manual_seed(0)
    logits, uniform, allowed = torch.randn(6, 2, 5), torch.rand(3, 2, 5), torch.rand(3, 2, 5) > 0.5
    allowed[..., 0] = True
    sampling = Sampling(cond_scale=2.0)
    tokens = sampling.token(logits, uniform, allowed)
    for row in range(3):
        for stream in range(2):
            both = logits[[row, row + 3], stream]
            expected = sampling.token(both, uniform[row : row + 1, stream], allowed[row, stream])
            assert tokens[row, stream] == expected and allowed[row, stream, tokens[row, stream]]


def test_what_is_not_allowed_survives_no_guidance():
    """The mask comes after guidance: minus infinity less minus infinity is no number."""
    sampling = Sampling(temperature=0.0, cond_scale=3.0)
    logits, allowed = torch.randn(6, 4), torch.tensor([False, True, False, True])
    cond, null = logits.chunk(2)
    expected = guide(cond, null, 3.0)[:, [1, 3]].argmax(dim=-1) * 2 + 1
    assert torch.equal(sampling.token(logits, torch.rand(3, 4), allowed), expected)


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({}, 0.9),
        ({"filter_thres": 0.5}, 0.5),
        ({"top_k": 3}, None),
        ({"top_p": 0.7}, None),
        ({"top_k": 3, "filter_thres": 0.2}, 0.2),
    ],
)
def test_the_usual_filter_holds_where_no_other_is_asked_for(asked, expected):
    nothing = {"temperature": 1.0, "top_k": None, "top_p": None, "filter_thres": None, "cond_scale": 2.0}
    sampling = Sampling.asked(**{**nothing, **asked})
    assert (sampling.top_k, sampling.top_p) == (asked.get("top_k"), asked.get("top_p"))
    assert sampling.filter_thres == expected


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": -1.0},
        {"temperature": math.nan},
        {"temperature": math.inf},
        {"cond_scale": math.nan},
        {"cond_scale": math.inf},
        {"rescale_phi": math.nan},
        {"top_k": 0},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"top_p": math.nan},
        {"filter_thres": 2.0},
    ],
)
def test_senseless_settings_are_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Sampling(**wrong)
