import json
import logging
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import Subset

from data.sounds import seeded, write
from helicon.data.audio import SoundDataset
from helicon.data.dataset import BadFile
from helicon.data.loader import Loader
from helicon.data.synthetic_speech import PHONEMES, SyntheticSpeech
from helicon.data.tokenize import tokenize
from helicon.data.tokens import TokenCache
from helicon.models.voicebox.data import (
    SpeechSource,
    SpeechTokenizer,
    collate_speech,
    training_speech,
)
from helicon.models.voicebox.features import MelVoco
from helicon.models.voicebox.flow import ConditionalFlowMatcherWrapper
from helicon.models.voicebox.model import VoiceBox
from helicon.models.voicebox.text import CharacterTokenizer, PhonemeInventory
from helicon.models.voicebox.vocoder import Vocoder

HZ = 8000
MEL = {"n_mels": 20, "sampling_rate": HZ, "n_fft": 256, "hop_length": 80}
INVENTORY = PhonemeInventory(list(PHONEMES))
BOTH = ("phonemes", "durations")


@pytest.fixture(scope="module")
def space():
    return MelVoco(**MEL)


@pytest.fixture
def manifest(tmp_path, monkeypatch):
    """Five utterances: one without phonemes, one without durations, one of 4 s."""
    monkeypatch.chdir(tmp_path)
    data = SyntheticSpeech(5, HZ, seed=2)
    rows = []
    for index in range(5):
        sample = data[index]
        wave = sample["audio"].numpy()
        if index == 4:
            wave = np.resize(wave, 4 * HZ)
        write(Path(f"speech/{index}.flac"), wave, HZ)
        row = {"path": f"{index}.flac", "text": sample["texts"]}
        if index != 1:
            row["phonemes"] = sample["phonemes"] if index % 2 else sample["phonemes"].split()
        if index not in (1, 3):
            row["durations"] = sample["durations"].tolist()
        rows.append(row)
    path = Path("speech/manifest.jsonl")
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def same(one, other):
    is_same = lambda a, b: torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b
    return one.keys() == other.keys() and all(is_same(one[name], other[name]) for name in one)


# ---------------------------------------------------------------------- sounds


def test_made_up_speech(space):
    data = training_speech("synthetic", num_samples=7, seed=3, speech={"voices": ["alto"]}).at(space, INVENTORY, BOTH)
    plain = SyntheticSpeech(7, HZ, seed=3, voices=["alto"])
    assert len(data) == 7
    for index in range(7):
        sample, known = data[index], plain[index]
        assert sample.keys() == {"audio", "audio_lengths", "texts", "phonemes", "durations"}
        assert torch.equal(sample["audio"], known["audio"]) and sample["audio_lengths"] == len(known["audio"])
        assert torch.equal(sample["durations"], known["durations"]) and sample["texts"] == known["texts"]
        assert [PHONEMES[one] for one in sample["phonemes"]] == known["phonemes"].split()
    without = training_speech("synthetic", num_samples=7, seed=3).at(space)
    assert without[0].keys() == {"audio", "audio_lengths", "texts"}


def test_a_dataset_of_another_rate_is_resampled(space):
    data = SpeechSource(SyntheticSpeech(2, 16000, seed=1)).at(space)
    assert data[0]["audio_lengths"] == pytest.approx(len(SyntheticSpeech(2, HZ, seed=1)[0]["audio"]), abs=1)


def test_a_part_of_a_dataset_is_resampled_as_the_whole_is(tmp_path, space):
    made_up = SyntheticSpeech(4, 16000, seed=1)
    for index in range(4):
        write(tmp_path / f"{index}.wav", made_up[index]["audio"].numpy(), 16000)
        (tmp_path / f"{index}.txt").write_text(made_up[index]["texts"])
    for whole in (made_up, SoundDataset(tmp_path, 16000)):
        part = SpeechSource(Subset(Subset(whole, [3, 1, 0]), [2, 0]), captions="beside").at(space)
        all_of_it = SpeechSource(whole, captions="beside").at(space)
        assert len(part) == 2 and all(same(part[place], all_of_it[index]) for place, index in enumerate((0, 3)))
        assert part[1]["audio_lengths"] == pytest.approx(len(made_up[3]["audio"]) / 2, abs=1)


def test_a_manifest(manifest, space):
    data = training_speech(manifest, captions="column").at(space)
    assert len(data) == 5 and data[0].keys() == {"audio", "audio_lengths", "texts"}
    known = SyntheticSpeech(5, HZ, seed=2)
    assert torch.equal(data[0]["audio"], known[0]["audio"]) and data[1]["texts"] == known[1]["texts"]
    assert data.keys == [f"{index}.flac" for index in range(5)]


def test_utterances_without_phonemes_are_left_out_where_they_are_needed(manifest, space, caplog):
    with caplog.at_level(logging.WARNING):
        data, timed = (training_speech(manifest).at(space, INVENTORY, names) for names in (None, BOTH))
    assert "1 of 5 utterances have no phonemes, and are left out" in caplog.text
    assert "2 of 5 utterances have no phonemes or no durations, and are left out" in caplog.text
    assert data.keys == ["0.flac", "2.flac", "3.flac", "4.flac"]
    known = SyntheticSpeech(5, HZ, seed=2)
    for place, index in enumerate((0, 2, 3)):
        assert torch.equal(data[place]["phonemes"], INVENTORY([known[index]["phonemes"]])[0])
        assert "durations" not in data[place]
    assert timed.keys == ["0.flac", "2.flac", "4.flac"]
    torch.testing.assert_close(timed[1]["durations"], known[2]["durations"], rtol=0, atol=1e-7)
    with pytest.raises(
        ValueError, match="nothing to learn from: name a manifest with the columns phonemes and durations"
    ):
        training_speech(Path(manifest).parent).durations(INVENTORY)


def test_long_utterances_are_left_out_and_counted_once(manifest, space, caplog):
    with caplog.at_level(logging.WARNING):
        data = training_speech(manifest, captions="column", max_length_seconds=3.5).at(space)
        assert len([data[index] for index in range(len(data))]) == 4
    assert caplog.text.count("1 of 5 utterances are longer than 3.5 s (max_length_seconds), and are left out") == 1
    assert data.keys == [f"{index}.flac" for index in range(4)]
    with pytest.raises(ValueError, match=r"all of the 5 utterances are longer than 0.1 s .*nothing to learn"):
        training_speech(manifest, max_length_seconds=0.1).at(space)
    with pytest.raises(ValueError, match="more than 0"):
        training_speech(manifest, max_length_seconds=0)


def test_a_long_utterance_of_a_dataset_is_a_bad_one(space):
    data = training_speech("synthetic", num_samples=2, max_length_seconds=0.2).at(space)
    with pytest.raises(BadFile, match=r"utterance 0: it lasts .* longer than max_length_seconds=0.2"):
        data[0]


def test_a_file_that_cannot_be_read_stays_to_be_noted_down(manifest, space):
    Path("speech/2.flac").write_bytes(b"no sound")
    data = training_speech(manifest).at(space)
    assert len(data) == 5
    with pytest.raises(BadFile):
        data[2]


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"phonemes": "a b", "durations": "0.1"}, "row 1 of the manifest has 2 phonemes and 1 durations"),
        ({"durations": [0.1]}, "has 0 phonemes and 1 durations"),
        ({"phonemes": 3}, "phonemes=3: it must be a list"),
        ({"phonemes": "a", "durations": "x"}, "durations='x': each must be a number of seconds"),
        ({"phonemes": "a", "durations": [-1.0]}, "each must be a number of seconds"),
    ],
)
def test_rows_that_make_no_sense_are_told(tmp_path, space, row, problem):
    write(tmp_path / "x.wav", np.zeros(HZ), HZ)
    (tmp_path / "m.jsonl").write_text(json.dumps({"path": "x.wav", **row}))
    with pytest.raises(ValueError, match=problem):
        training_speech(tmp_path / "m.jsonl").at(space)


def test_durations_longer_than_the_sound_are_bad(tmp_path, space):
    write(tmp_path / "x.wav", np.full(HZ, 0.1), HZ)
    (tmp_path / "m.csv").write_text("path,phonemes,durations\nx.wav,a b,0.5 0.7\nx.wav,a b,0.5 0.55\nx.wav,,\n")
    data = training_speech(tmp_path / "m.csv").at(space, PhonemeInventory(["a", "b"]), BOTH)
    with pytest.raises(BadFile, match=r"durations sum to 1.20 s, and it lasts 1.00 s"):
        data[0]
    assert len(data) == 2 and data[1]["durations"].tolist() == pytest.approx([0.5, 0.55])
    assert training_speech(tmp_path / "m.csv").at(space, names=())[0]["audio_lengths"] == HZ, (
        "where nobody asks for them"
    )


def test_a_dataset_of_ones_own(space):
    wave = torch.full((HZ,), 0.1)
    dicts = [
        {"audio": wave, "texts": "hi", "phonemes": ["a", "b"], "durations": torch.tensor([0.5, 0.5])},
        {"audio": wave, "texts": "ho", "phonemes": torch.tensor([1, 0]), "durations": torch.tensor([0.2, 0.8])},
    ]
    inventory = PhonemeInventory(["a", "b"])
    data = SpeechSource(dicts).at(space, inventory, BOTH)
    assert data[0]["phonemes"].tolist() == [0, 1] and data[1]["phonemes"].tolist() == [1, 0]
    assert same(SpeechSource(dicts[1:]).at(space, names=BOTH)[0], data[1])  # ids need no inventory
    listed = SpeechSource([{**dicts[0], "durations": [0.5, 0.5]}])
    assert same(listed.at(space, inventory, BOTH)[0], data[0])
    assert same(listed.spoken(HZ)[0], SpeechSource(dicts).spoken(HZ)[0])  # what caches are made of
    tuples = SpeechSource([(wave, "hi")]).at(space)
    assert tuples[0].keys() == {"audio", "audio_lengths", "texts"}
    tokens = SpeechSource([{"audio": wave, "semantic_token_ids": torch.tensor([4, 4, 2])}]).at(space)
    assert tokens[0]["semantic_token_ids"].tolist() == [4, 4, 2]
    with pytest.raises(BadFile, match="it has no phonemes"):
        SpeechSource([{"audio": wave}]).at(space, inventory)[0]
    with pytest.raises(BadFile, match="2 phonemes and 1 durations"):
        SpeechSource([{**dicts[0], "durations": torch.tensor([1.0])}]).at(space, inventory, BOTH)[0]


def test_a_hugging_face_dataset(manifest, space):
    datasets = pytest.importorskip("datasets")
    known = SyntheticSpeech(3, HZ, seed=2)
    columns = {
        "audio": [{"array": known[i]["audio"].numpy(), "sampling_rate": HZ} for i in range(3)],
        "text": [known[i]["texts"] for i in range(3)],
        "phonemes": [known[0]["phonemes"], known[1]["phonemes"], None],
    }
    data = SpeechSource(datasets.Dataset.from_dict(columns), captions="column").at(space, INVENTORY)
    assert len(data) == 2 and data[1]["texts"] == known[1]["texts"]
    torch.testing.assert_close(data[0]["audio"], known[0]["audio"])
    assert torch.equal(data[1]["phonemes"], INVENTORY([known[1]["phonemes"]])[0])


def test_inventories_are_fitted_to_a_source(manifest):
    assert set(PhonemeInventory.fitted(training_speech(manifest).phonemes()).arguments["symbols"]) <= set(PHONEMES)
    made_up = training_speech("synthetic", num_samples=50)
    assert set(PhonemeInventory.fitted(made_up.phonemes()).arguments["symbols"]) == set(PHONEMES)
    assert SpeechSource([{"phonemes": ["s", "a"]}, {"phonemes": "k e"}, {"texts": "fo"}]).phonemes() == ["s a", "k e"]
    with pytest.raises(ValueError, match="this list has no phonemes"):
        SpeechSource([{"texts": "fo"}]).phonemes()


def test_a_cache_without_phonemes_is_none_to_fit_an_inventory_to(tmp_path, monkeypatch, space):
    monkeypatch.chdir(tmp_path)
    write(Path("speech/x.wav"), np.full(HZ, 0.1), HZ)
    make(space, "speech")
    with pytest.raises(ValueError, match=r"^cache has no phonemes"):
        training_speech("cache").phonemes()


def test_batches_are_padded():
    samples = [
        {
            "audio": torch.ones(3),
            "audio_lengths": 3,
            "texts": "a",
            "phonemes": torch.tensor([1, 2]),
            "durations": torch.ones(2),
        },
        {
            "audio": torch.ones(5),
            "audio_lengths": 5,
            "texts": "b",
            "phonemes": torch.tensor([0]),
            "durations": torch.ones(1),
        },
    ]
    batch = collate_speech(samples)
    assert batch.keys() == {"audio", "audio_lengths", "texts", "phonemes", "durations"}
    assert batch["phonemes"].tolist() == [[1, 2], [0, -1]] and batch["durations"].tolist() == [[1, 1], [1, 0]]
    assert batch["audio"][0].tolist() == [1, 1, 1, 0, 0] and batch["audio_lengths"].tolist() == [3, 5]


# ---------------------------------------------------------------------- durations alone


def test_durations_are_read_without_the_sounds(manifest, caplog):
    for path in Path("speech").glob("*.flac"):
        path.write_bytes(b"no sound")
    with caplog.at_level(logging.WARNING):
        data = training_speech(manifest).durations(INVENTORY)
    assert "2 of 5 utterances have no phonemes or no durations" in caplog.text
    known = SyntheticSpeech(5, HZ, seed=2)
    assert data.keys == ["0.flac", "2.flac", "4.flac"] and data[0].keys() == {"phonemes", "durations"}
    assert torch.equal(data[1]["phonemes"], INVENTORY([known[2]["phonemes"]])[0])
    torch.testing.assert_close(data[1]["durations"], known[2]["durations"], rtol=0, atol=1e-7)


def test_durations_of_made_up_speech_and_of_datasets():
    known = SyntheticSpeech(4, 16000, seed=1)
    for source in (training_speech("synthetic", num_samples=4, seed=1), SpeechSource(known)):
        data = source.durations(INVENTORY)
        assert len(data) == 4
        torch.testing.assert_close(data[3]["durations"], known[3]["durations"], rtol=0, atol=1e-6)
    own = [{"phonemes": torch.tensor([3, 1]), "durations": torch.tensor([0.1, 0.2])}]
    assert same(SpeechSource(own).durations(None)[0], own[0])
    listed = [{"phonemes": torch.tensor([3, 1]), "durations": [0.1, 0.2]}]
    assert same(SpeechSource(listed).durations(None)[0], own[0])
    named = [{"phonemes": "a b", "durations": torch.tensor([0.1, 0.2])}]
    with pytest.raises(ValueError, match="build it with tokenizer=PhonemeInventory"):
        SpeechSource(named).durations(None)[0]


# ---------------------------------------------------------------------- caches


def make(space, source="speech/manifest.jsonl", out="cache", **arguments):
    tokenizer = SpeechTokenizer(space)
    data = training_speech(source, **arguments)
    done = tokenize(tokenizer.items(data), tokenizer, out, source=source, arguments=arguments, batch_size=2)
    return done, TokenCache(out)


def test_a_cache_holds_what_the_feature_space_makes(manifest, space):
    done, _ = make(space, captions="column")
    assert done.encoded == 5
    live = training_speech(manifest, captions="column").at(space, INVENTORY, BOTH)
    cached = training_speech("cache").at(space, INVENTORY, BOTH)
    assert list(cached.keys) == [f"{index}.flac" for index in range(5)]
    for index in (1, 3):  # of which the one has neither phonemes nor durations, the other no durations
        with pytest.raises(BadFile, match=r"it has no .*durations"):
            cached[index]
    batches = [collate_speech([live[0], live[1], live[2]]), collate_speech([cached[0], cached[2], cached[4]])]
    assert batches[1].keys() == {"features", "feature_lengths", "texts", "phonemes", "durations"}
    lengths = batches[0]["audio_lengths"]
    expected, counts = space.encode(batches[0]["audio"], lengths), space.frame_lengths(lengths)
    assert torch.equal(batches[1]["feature_lengths"], counts)
    torch.testing.assert_close(batches[1]["features"], expected[:, : counts.max()], rtol=1e-5, atol=1e-5)
    for name in ("texts", "phonemes", "durations"):
        assert same({name: batches[0][name]}, {name: batches[1][name]})
    durations = training_speech("cache").durations(INVENTORY)
    assert same(durations[0], {name: live[0][name] for name in ("phonemes", "durations")})
    assert training_speech("cache").at(space)[0].keys() == {"features", "feature_lengths", "texts"}


def test_the_loss_on_a_cache_is_the_loss_on_the_sounds(manifest, space):
    make(space, captions="column")
    torch.manual_seed(0)
    tokenizer = CharacterTokenizer()
    sizes = {"dim_cond_emb": 8, "dim": 16, "depth": 2, "dim_head": 8, "heads": 2, "num_register_tokens": 1}
    voicebox = VoiceBox(num_cond_tokens=tokenizer.num_tokens, audio_enc_dec=space, text_depth=1, **sizes)
    torch.nn.init.normal_(voicebox.to_velocity.weight)
    flow = ConditionalFlowMatcherWrapper(voicebox, tokenizer=tokenizer).eval()
    live, cached = (
        collate_speech([data[index] for index in range(3)])
        for data in (training_speech(manifest, captions="column").at(space), training_speech("cache").at(space))
    )
    losses = [
        flow(live["audio"], lengths=live["audio_lengths"], texts=live["texts"], generator=seeded(0)),
        flow(cached["features"], lengths=cached["feature_lengths"], texts=cached["texts"], generator=seeded(0)),
    ]
    torch.testing.assert_close(*losses, rtol=1e-5, atol=1e-6)


def test_a_cache_of_made_up_speech_in_batches(tmp_path, monkeypatch, space):
    monkeypatch.chdir(tmp_path)
    make(space, "synthetic", num_samples=5, seed=1, speech={"voices": ["bass", "alto"]})
    data = training_speech("cache", speech={"voices": ["bass", "alto"]}).at(space, INVENTORY, BOTH)
    batch = next(Loader(data, batch_size=4, collate=collate_speech).steps())[0]
    assert batch["features"].shape == (4, int(batch["feature_lengths"].max()), 20)
    assert batch["phonemes"].shape == batch["durations"].shape
    with pytest.raises(ValueError, match="was made with speech="):
        training_speech("cache", speech={"voices": ["tenor"]}).at(space)
    with pytest.raises(ValueError, match=r"the source is sounds: leave it out, or write data\.speech=null"):
        training_speech("sounds", speech={"voices": ["tenor"]})


def test_a_cache_outlives_the_vocoder_but_no_other_change(manifest, space):
    make(space)
    vocoder = Vocoder(**MEL, dim=8, depth=1, discr_periods=(), discr_windows=())
    spoken = MelVoco(**MEL, vocoder=vocoder)
    assert same(training_speech("cache").at(spoken)[0], training_speech("cache").at(space)[0])
    sentence = (
        "the frames in cache have n_mels=20 and f_max=4000.0, and those of this model n_mels=16 and f_max=3000.0: "
    )
    with pytest.raises(ValueError, match=rf"{sentence}.* where RUN is a vocoder or a VoiceBox with n_mels=16") as error:
        training_speech("cache").at(MelVoco(**{**MEL, "n_mels": 16, "f_max": 3000}))
    assert "helicon tokenize RUN --data" in str(error.value)
    with pytest.raises(ValueError, match="keeps phonemes by their names, and these are ids"):
        SpeechTokenizer(space)({"audio": torch.zeros(2, 9), "phonemes": torch.zeros(2, 3, dtype=torch.long)})
    with pytest.raises(ValueError, match="is a cache itself"):
        SpeechTokenizer(space).items(training_speech("cache"))
    with pytest.raises(
        ValueError, match=r"with max_length_seconds=20\.0, not 3: write data\.max_length_seconds=20\.0, or"
    ):
        training_speech("cache", max_length_seconds=3).at(space)
    with pytest.raises(ValueError, match=r"was made with speech=null, not .*: write data\.speech=null, or"):
        training_speech("cache", speech={"voices": ["tenor"]}).at(space)
    with pytest.raises(ValueError, match=r"was made with text_column=text, not plain"):
        training_speech("cache", captions=None, text_column="plain").at(space)


def test_a_network_without_a_feature_space_makes_no_features():
    voicebox = VoiceBox(dim_in=3, condition_on_text=False, dim=16, depth=2, dim_head=8, heads=1)
    with pytest.raises(ValueError, match="this VoiceBox has no audio_enc_dec to make features with"):
        SpeechTokenizer(voicebox).items(training_speech("synthetic"))
