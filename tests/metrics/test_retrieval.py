import pytest
import torch
from torch.nn import functional as F

from helicon.metrics import retrieval
from helicon.metrics.retrieval import Retrieval, chance_at, ranks, recall_at


def test_recall_by_hand() -> None:
    similarities = torch.tensor([[0.9, 0.1, 0.3], [0.8, 0.5, 0.6], [0.2, 0.4, 0.3]])
    assert ranks(similarities).tolist() == [1, 3, 2]
    assert [recall_at(similarities, k) for k in (1, 2, 3)] == pytest.approx([1 / 3, 2 / 3, 1.0])


def test_any_right_candidate_will_do() -> None:
    similarities = torch.tensor([[0.9, 0.1, 0.3, 0.5]])
    is_right = torch.tensor([[False, True, True, False]])
    assert ranks(similarities, is_right).tolist() == [3]
    with pytest.raises(ValueError, match="a query has no right candidate"):
        ranks(similarities, torch.zeros_like(is_right))


@pytest.mark.parametrize("value", [0.5, torch.nan, torch.inf])
def test_latents_that_are_all_alike_find_nothing(value: float) -> None:
    assert recall_at(torch.full((12, 12), value), 10) == 0.0
    assert recall_at(torch.full((12, 12), value), 12) == 1.0


@pytest.mark.parametrize(("num_right", "k"), [([1], 1), ([1, 3], 2), ([2], 5), ([1], 9)])
def test_chance_is_what_drawing_finds(num_right: list[int], k: int) -> None:
    generator, draws = torch.Generator().manual_seed(0), 4000
    is_right = torch.arange(6) < torch.tensor(num_right)[:, None]
    found = [recall_at(torch.rand(is_right.shape, generator=generator), k, is_right) for _ in range(draws)]
    assert chance_at(num_right, 6, k) == pytest.approx(sum(found) / draws, abs=0.03)
    assert chance_at([1], 50, 5) == pytest.approx(5 / 50)


def pairs(count: int, noise: float) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    audio = torch.randn(count, 8, generator=generator)
    text = audio + noise * torch.randn(count, 8, generator=generator)
    return F.normalize(audio, dim=-1), F.normalize(text, dim=-1)


def test_both_ways_are_those_of_the_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retrieval, "ROWS", 7)  # so that queries are ranked in several parts
    audio, text = pairs(30, 1.0)
    found, similarities = Retrieval.of(audio, text), audio @ text.T
    assert 0.1 < found.audio_to_text.at[1] < 0.9
    for k in (1, 5, 10):
        assert found.audio_to_text.at[k] == recall_at(similarities, k)
        assert found.text_to_audio.at[k] == recall_at(similarities.T, k)
        assert found.text_to_audio.chance_at[k] == pytest.approx(k / 30)
    assert found.numbers().keys() == {
        f"{way}_{name}"
        for way in ("audio_to_text", "text_to_audio")
        for name in ("candidates", *(f"{what}_at_{k}" for what in ("recall", "chance") for k in (1, 5, 10)))
    }


def test_sounds_with_the_same_caption_are_all_right_for_it() -> None:
    """Three sounds, of which two share a caption: it asks once, and is a candidate once."""
    audio = F.normalize(torch.tensor([[1.0, 0.1], [1.0, -0.1], [0.0, 1.0]]), dim=-1)
    text = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
    found = Retrieval.of(audio, text, ["a tone", "a tone", "a chirp"])
    assert (found.text_to_audio.num_candidates, found.audio_to_text.num_candidates) == (3, 2)
    assert found.text_to_audio.at[1] == found.audio_to_text.at[1] == 1.0
    assert found.text_to_audio.chance_at[1] == pytest.approx((2 / 3 + 1 / 3) / 2)
    assert found.audio_to_text.chance_at[1] == pytest.approx(1 / 2)
    apart = Retrieval.of(audio, text)
    assert apart.audio_to_text.at[1] == pytest.approx(1 / 3), "equal texts hide each other otherwise"


def test_each_sound_has_one_text() -> None:
    audio, text = pairs(4, 0.0)
    with pytest.raises(ValueError, match="4 sounds, 4 texts and 3 captions"):
        Retrieval.of(audio, text, ["a", "b", "c"])
