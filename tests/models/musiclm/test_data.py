"""Where sounds with texts come from, and what a batch of them is."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import StackDataset

from data.sounds import ramp, seeded, write
from helicon.config import ConfigError
from helicon.data.audio import SoundDataset, audio_data
from helicon.data.dataset import BadFile
from helicon.data.synthetic_sounds import SyntheticSounds
from helicon.models.musiclm.data import CaptionedSource, collate_captioned, training_captioned

HZ = 8000
SECOND: dict[str, Any] = {"data_max_length_seconds": 1.0}


@pytest.fixture
def folder() -> str:
    """Two sounds in folders, with texts beside them, and a manifest of both."""
    rows = []
    for name, seconds, text in (("slow/a", 3.0, "a slow waltz"), ("fast/b", 0.5, "a fast polka")):
        write(Path(f"music/{name}.wav"), ramp(seconds, HZ), HZ)
        Path(f"music/{name}.txt").write_text(text)
        rows.append({"path": f"{name}.wav", "text": text, "mood": text.upper()})
    Path("music/all.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return "music"


@pytest.mark.parametrize(
    ("file", "options", "texts"),
    [
        ("", {"captions": "beside"}, ["a fast polka", "a slow waltz"]),
        ("", {"captions": "folder"}, ["fast", "slow"]),
        ("/all.jsonl", {"captions": "column"}, ["a slow waltz", "a fast polka"]),
        ("/all.jsonl", {"captions": "column", "text_column": "mood"}, ["A SLOW WALTZ", "A FAST POLKA"]),
    ],
)
def test_files_and_where_their_texts_are(folder: str, file: str, options: Any, texts: list[str]) -> None:
    data = training_captioned(f"{folder}{file}", **options, **SECOND).at(HZ)
    assert [data[index]["texts"] for index in range(2)] == texts
    assert sorted(data[index]["audio_lengths"] for index in range(2)) == [HZ // 2, HZ]
    assert all(data[index]["audio"].shape == (HZ,) for index in range(2))
    assert data[0].keys() == {"audio", "audio_lengths", "texts"}


def test_a_crop_is_another_one_in_every_epoch(folder: str) -> None:
    """63: in the package that it replaces every clip begins at the start of its file."""
    data = training_captioned(folder, captions="beside", **SECOND).at(HZ)
    first = {float(data.fetch(1, seeded(seed))["audio"][0]) for seed in (0, 0, 1, 2)}
    assert len(first) == 3 and min(first) > 0.101
    middle = data.unaugmented()
    assert middle[1]["audio"].equal(middle.fetch(1, seeded(5))["audio"])


def test_a_hugging_face_dataset(folder: str) -> None:
    datasets = pytest.importorskip("datasets")
    rows = {"audio": [f"{folder}/slow/a.wav"], "caption": ["a waltz"]}
    source = datasets.Dataset.from_dict(rows).cast_column("audio", datasets.Audio())
    data = CaptionedSource(source, captions="column", text_column="caption", **SECOND).at(HZ)
    assert data[0]["texts"] == "a waltz" and data[0]["audio"].shape == (HZ,)
    with pytest.raises(ValueError, match="say where those of this Dataset are, with captions="):
        CaptionedSource(source, **SECOND).at(HZ)


def test_sounds_of_a_dataset_of_ones_own() -> None:
    waves, texts = [torch.randn(2 * HZ) * 0.1, torch.randn(2, HZ) * 0.1], ["a", "b"]
    ids = [torch.tensor([1, 2]), torch.tensor([3])]
    sources: list[tuple[Any, dict[str, Any]]] = [
        (StackDataset(waves, texts), {}),
        (StackDataset(texts, waves), {}),  # by type, in any order
        ([{"wavs": wave, "raw_texts": text} for wave, text in zip(waves, texts, strict=True)], {}),
        (StackDataset(waves, texts, texts), {"ds_fields": ("wavs", "raw_texts", "_")}),
        ([{"audio": wave, "text": text, "sample_hz": 2 * HZ} for wave, text in zip(waves, texts, strict=True)], {}),
    ]
    for source, options in sources:
        data = CaptionedSource(source, **SECOND, **options).at(HZ)
        assert [data[index]["texts"] for index in range(2)] == texts
        batch = collate_captioned([data[0], data[1]])
        assert batch["audio"].shape == (2, HZ) and ("audio_lengths" in batch) == (source is sources[-1][0])
    as_tokenizers_do = [ids[0].tolist(), ids[1].numpy()]
    named = [{"wavs": waves[n], "texts": ids[n]} for n in range(2)]
    listed = [{"wavs": waves[n], "texts": as_tokenizers_do[n]} for n in range(2)]
    for tokens in (StackDataset(waves, ids), StackDataset(waves, as_tokenizers_do), named, listed):
        data = CaptionedSource(tokens, **SECOND).at(HZ)
        assert collate_captioned([data[0], data[1]])["text_token_ids"].tolist() == [[1, 2], [3, -1]]


def test_sounds_of_ones_own_without_words_are_skipped_as_files_are() -> None:
    data = CaptionedSource([(torch.randn(9), text) for text in ("a", " ", "b")]).at(HZ)
    with pytest.raises(BadFile, match="item 1: its text is empty"):
        data[1]
    assert data[2]["texts"] == "b"


def test_what_is_shorter_is_padded_and_its_length_told() -> None:
    data = CaptionedSource([(torch.randn(n), "a") for n in (700, 900, 900)]).at(HZ)
    batch = collate_captioned([data[index] for index in range(3)])
    assert batch["audio"].shape == (3, 900) and batch["audio_lengths"].tolist() == [700, 900, 900]
    assert "audio_lengths" not in collate_captioned([data[1], data[2]]), "to mask costs time"


def test_made_up_sounds() -> None:
    words = {"kinds": ["tone"], "durations": ["short", "long"]}
    data = training_captioned("synthetic", num_samples=5, seed=3, sounds=words, data_max_length=4000).at(HZ)
    expected = SyntheticSounds(5, HZ, 0.5, 3, **words)
    assert len(data) == 5 and data[2]["audio"].equal(expected[2]["audio"]) and data[2]["texts"] == expected[2]["texts"]
    assert CaptionedSource(expected).at(HZ)[2]["audio"].equal(expected[2]["audio"])
    with pytest.raises(ValueError, match="8000 samples a second and the network 16000"):
        CaptionedSource(expected).at(16000)
    with pytest.raises(ConfigError, match="kind"):
        training_captioned("synthetic", sounds={"kind": ["tone"]})


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: training_captioned("music", **SECOND), r'where those of music are, with captions="column".*"beside"'),
        (
            lambda: training_captioned("music", captions="beside"),
            "data_max_length or data_max_length_seconds is needed",
        ),
        (lambda: training_captioned("synthetic", captions="beside"), "these sounds bring their own texts"),
        (lambda: training_captioned("music", captions="beside", sounds={}, **SECOND), "chooses among made-up sounds"),
        (lambda: training_captioned("music", captions="beside", data_max_length=0).at(HZ), "is too short"),
        (lambda: CaptionedSource(SoundDataset("music", HZ)).at(HZ), "a SoundDataset has no texts: give its folder"),
        (lambda: CaptionedSource(audio_data("music", HZ, max_length=99)).at(HZ)[0], "item 0 has no text"),
        (lambda: CaptionedSource(SyntheticSounds(3, HZ), **SECOND).at(HZ), "are cut already"),
        (lambda: CaptionedSource([torch.randn(9)]).at(HZ)[0], "item 0 has no text"),
        (lambda: CaptionedSource(5).at(HZ), "a int is no source of sounds"),
        (lambda: CaptionedSource([(torch.randn(9), ["a", "b"])]).at(HZ)[0], "item 0 has a list for its text: give one"),
        (lambda: CaptionedSource([{"audio": {}, "text": "a"}]).at(HZ)[0], "item 0 is no sound, but a dict: a wave is"),
    ],
)
def test_data_that_will_not_do(folder: str, make: Callable[[], Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        make()
