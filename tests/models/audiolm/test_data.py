"""Sounds and tokens for AudioLM's stages, with a tiny SoundStream at 8 kHz and mel clusters at 16 kHz."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import soxr
import torch
import transformers
from torch import Tensor

from data.sounds import noise, ramp, write
from helicon.data import tokens as tokens_module
from helicon.data.audio import SoundDataset, audio_data
from helicon.data.collate import collate
from helicon.data.dataset import unaugmented
from helicon.data.loader import Loader
from helicon.data.recording import SoundFile
from helicon.data.synthetic_sounds import SyntheticSounds
from helicon.data.tokenize import Tokenized, tokenize
from helicon.data.tokens import TokenCache
from helicon.models.audiolm.data import AudioSource, AudioTokenizer, cached_audio, sounds_for, training_audio
from helicon.models.audiolm.stage import FOR_CONDITIONER
from helicon.models.muse.vqgan import VQGanVAE
from helicon.models.semantic.tokenizer import HubertWithKmeans, MelKmeans, Wav2Vec2Quantizer
from helicon.models.soundstream.codecs import DacCodec
from helicon.models.soundstream.model import SoundStream
from helicon.nn.network import Network, load_network
from models.semantic.builders import write as write_model
from models.soundstream.tiny import tiny

RATES = {"raw_wave": 16000, "raw_wave_for_codec": 8000}
SECONDS = 0.1
ARGUMENTS = {"data_max_length_seconds": SECONDS, "captions": "beside"}


def mel(seed: int = 0) -> MelKmeans:
    network = MelKmeans(12)
    network.fit([(torch.from_numpy(noise(1.0, 16000, seed=seed)).float()[None], None)], num_frames=50)
    return network


def codec(**changes: Any) -> SoundStream:
    network = tiny(**changes)
    with torch.no_grad():  # codes of a fresh one hardly differ
        network(torch.from_numpy(noise(2.0, 8000)).float().reshape(4, -1))
    return network


@pytest.fixture
def folder() -> Path:
    """Sounds of 0.25, 0.1 and 0.07 s: three segments, one, and less than one."""
    for name, seconds in (("a/long", 0.25), ("b", 0.1), ("c", 0.07)):
        path = write(Path(f"sounds/{name}.wav"), noise(seconds, 24000, seed=len(name)), 24000)
        path.with_suffix(".txt").write_text(f"the sound {name}")
    return Path("sounds")


def source(**changes: Any) -> AudioSource:
    return AudioSource("sounds", **{**ARGUMENTS, **changes})


def make(tokenizer: AudioTokenizer, out: str = "cache", **changes: Any) -> Tokenized:
    data = source(**changes)
    return tokenize(
        tokenizer.items(data), tokenizer, out, source="sounds", arguments={**ARGUMENTS, **changes}, batch_size=3
    )


def same(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    is_same = lambda a, b: torch.equal(a, b) if isinstance(a, Tensor) else a == b and type(a) is type(b)
    return one.keys() == other.keys() and all(is_same(one[name], other[name]) for name in one)


# ---------------------------------------------------------------------- sounds


def test_all_rates_come_from_one_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(Path("ramp/x.wav"), ramp(1.0, 8000), 8000)
    reads = []
    read = SoundFile.read
    monkeypatch.setattr(SoundFile, "read", lambda self, *part: reads.append(part) or read(self, *part))
    data = sounds_for("ramp", RATES, data_max_length_seconds=SECONDS)
    for seed in range(5):
        sample = data.fetch(0, torch.Generator().manual_seed(seed))
        assert len(reads) == seed + 1
        wave, for_codec = sample["raw_wave"], sample["raw_wave_for_codec"]
        assert wave.shape == (1600,) and for_codec.shape == (800,)
        assert (sample["raw_wave_lengths"], sample["raw_wave_for_codec_lengths"]) == (1600, 800)
        inner = slice(40, -40)  # at the end of the ramp there is a step, around which the other rate rings
        torch.testing.assert_close(wave[::2][inner], for_codec[inner], atol=2e-3, rtol=0)  # the same moment


@pytest.mark.parametrize("rates", [RATES, {"raw_wave": 8000, "raw_wave_for_codec": 12000}])
def test_made_up_sounds_are_the_same_sound_at_every_rate(rates: dict[str, int]) -> None:
    data = training_audio("synthetic", data_max_length_seconds=0.5, num_samples=7, seed=3)
    assert isinstance(data, AudioSource)
    highest, lowest = sorted(rates, key=rates.__getitem__, reverse=True)
    plain = SyntheticSounds(7, rates[highest], 0.5, 3)
    sounds = data.at(rates)
    assert len(sounds) == 7
    for index in range(7):
        sample, known = sounds[index], plain[index]
        assert torch.equal(sample[highest], known["audio"])
        expected = soxr.resample(known["audio"].numpy(), rates[highest], rates[lowest])
        np.testing.assert_allclose(sample[lowest].numpy(), expected, atol=1e-6)
        assert sample["texts"] == known["texts"] and sample["is_end"] is True
        assert "sample_hz" not in sample
    chosen = training_audio("synthetic", num_samples=7, sounds={"kinds": ["pluck"]}).at(rates)
    assert all(" pluck, " in chosen[index]["texts"] for index in range(7))
    in_samples = training_audio("synthetic", data_max_length=9000, num_samples=7, seed=3).at(RATES)
    assert in_samples[0]["raw_wave"].shape == (9000,)


class Items(torch.utils.data.Dataset[Any]):
    def __init__(self, *items: Any):
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Any:
        return self.items[index]


def wave(seconds: float, hz: int) -> Tensor:
    return torch.from_numpy(noise(seconds, hz)).float()


def table() -> Any:
    found = {"audio": [str(path) for path in sorted(Path("sounds").rglob("*.wav"))], "text": ["one", "two", "three"]}
    return datasets.Dataset.from_dict(found).cast_column("audio", datasets.Audio(decode=False))


def manifest() -> str:
    rows = [{"path": "sounds/a/long.wav", "text": "x", "start": 0.1}, {"path": "sounds/b.wav", "text": "y"}]
    Path("list.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return "list.jsonl"


SOURCES: dict[str, tuple[Callable[[], Any], dict[str, Any], int]] = {
    "folder": (lambda: "sounds", {"captions": "beside"}, 3),
    "manifest": (manifest, {"captions": "column"}, 2),
    "columns": (table, {"captions": "column"}, 3),
    "described": (source, {}, 3),
    "recordings": (lambda: audio_data("sounds", 500, max_length_seconds=SECONDS, captions="beside"), {}, 3),
    "cut already": (lambda: audio_data(Items((wave(0.1, 16000), "x")), RATES), {}, 1),
    "tuples": (lambda: Items((wave(0.2, 16000), "x", True)), {}, 1),
    "named": (lambda: Items(("x", 3, wave(0.2, 16000))), {"ds_fields": ("text", "_", "raw_wave")}, 1),
    "dicts": (lambda: Items({"audio": wave(0.2, 9000), "sample_hz": 9000, "text": "x"}), {}, 1),
    "two waves": (
        lambda: Items((wave(0.2, 16000), wave(0.2, 8000), "x")),
        {"ds_fields": ("raw_wave", "raw_wave_for_codec", "text")},
        1,
    ),
    "two waves without names": (lambda: Items((wave(0.2, 16000), wave(0.2, 8000), "x")), {}, 1),
}


@pytest.mark.parametrize("kind", SOURCES)
def test_whatever_holds_sounds(folder: Path, kind: str) -> None:
    build, options, count = SOURCES[kind]
    data = sounds_for(build(), RATES, data_max_length_seconds=SECONDS, **options)
    assert len(data) == count
    for index in range(count):
        sample = data[index]
        assert sample.keys() == {*RATES, *(f"{name}_lengths" for name in RATES), "texts", "is_end"}
        assert sample["raw_wave"].shape == (1600,) and sample["raw_wave_for_codec"].shape == (800,)
        assert isinstance(sample["texts"], str) and isinstance(sample["is_end"], bool)
    batch = next(Loader(data, batch_size=count).steps())[0]
    assert batch["raw_wave"].shape == (count, 1600) and batch["is_end"].dtype == torch.bool


@pytest.mark.parametrize("rates", [RATES, {**RATES, FOR_CONDITIONER: 4000}])
def test_of_two_waves_the_first_is_the_raw_wave_and_the_other_the_codecs(rates: dict[str, int]) -> None:
    """Each is at the rate of its network, as in the reference."""
    waves = wave(0.1, 16000), wave(0.1, 8000)
    sample = sounds_for(Items((*waves, "x")), rates)[0]
    assert all(torch.equal(sample[name], heard) for name, heard in zip(RATES, waves, strict=True))


def test_a_sound_dataset_keeps_its_length(folder: Path) -> None:
    own = SoundDataset(folder, target_sample_hz=(4000, 2000), max_length=400)
    sample = sounds_for(own, RATES)[0]
    assert sample["raw_wave"].shape == (1600,) and sample["raw_wave_for_codec"].shape == (800,)
    assert sounds_for(None, RATES) is None


def test_a_stage_with_one_network_hears_one_wave() -> None:
    data = sounds_for(Items({"raw_wave": wave(0.2, 8000)}), {"raw_wave_for_codec": 8000})
    assert data[0].keys() == {"raw_wave_for_codec", "raw_wave_for_codec_lengths", "is_end"}
    assert torch.equal(data[0]["raw_wave_for_codec"], wave(0.2, 8000))


def test_crops_are_random_while_training_and_sometimes_the_end(folder: Path) -> None:
    write(Path("ramp/x.wav"), ramp(3.0, 16000), 16000)
    crops = sounds_for("ramp", {"raw_wave": 16000}, data_max_length_seconds=SECONDS, end_prob=0.5)
    drawn = [crops.fetch(0, torch.Generator().manual_seed(seed)) for seed in range(40)]
    assert 10 < sum(sample["is_end"] for sample in drawn) < 30
    assert len({sample["raw_wave"][0].item() for sample in drawn}) > 10
    middle = unaugmented(crops)
    assert torch.equal(middle[0]["raw_wave"], middle[0]["raw_wave"]) and not middle[0]["is_end"]
    never = sounds_for("ramp", {"raw_wave": 16000}, data_max_length_seconds=SECONDS, end_prob=0.0)
    assert not any(never.fetch(0, torch.Generator().manual_seed(seed))["is_end"] for seed in range(40))


def test_the_codec_hears_stereo_and_the_semantic_tokenizer_mono() -> None:
    both = noise(0.1, 16000, channels=2)
    write(Path("stereo/x.wav"), both, 16000, "FLOAT")
    sample = sounds_for("stereo", {"raw_wave": 16000, "raw_wave_for_codec": 16000}, channels=2, data_max_length=1600)[0]
    np.testing.assert_allclose(sample["raw_wave_for_codec"].numpy(), both.T, atol=1e-6)
    np.testing.assert_allclose(sample["raw_wave"].numpy(), both.mean(axis=1), atol=1e-6)


def test_a_sound_too_short_for_a_token_is_followed_by_silence(tmp_path: Path) -> None:
    hubert = HubertWithKmeans(write_model("hubert", tmp_path / "hubert"), codebook_size=5, output_layer=2)
    hubert.fit([(wave(0.1, 16000)[None], None)], num_frames=50)
    tokenizer = AudioTokenizer(hubert)
    assert tokenizer.least == 30  # see builders.WAVES
    for length, width in ((7, 400), (31, 400)):
        write(Path("short/x.wav"), noise(1.0, 16000)[:length], 16000)
        sample = sounds_for("short", tokenizer.rates, least=tokenizer.least, data_max_length=400)[0]
        assert sample["raw_wave"].shape == (width,) and sample["raw_wave_lengths"] == max(30, length)
        assert not sample["raw_wave"][length:].any()
        (ids,) = tokenizer(collate([sample]))["semantic_token_ids"]
        assert ids.shape == (1,)
    whole = sounds_for(Items(wave(7 / 16000, 16000)), tokenizer.rates, least=tokenizer.least)[0]
    assert whole["raw_wave"].shape == (30,) and whole["raw_wave_lengths"] == 30


# ---------------------------------------------------------------------- tokens of a user's own


@pytest.mark.parametrize("seconds", [None, 0.1, 0.05])
def test_crops_of_a_dataset_of_ones_own_teach_no_end(seconds: float | None, caplog: pytest.LogCaptureFixture) -> None:
    """Sounds that are all equally long are crops, however much of them is heard; others are whole, unless they say so."""
    crops = [torch.from_numpy(noise(0.1, 16000, seed=number)).float() for number in range(5)]
    others = [*crops[:1], crops[1][:1500], *crops[2:]]

    def ends(sounds: list[Any]) -> set[bool]:
        caplog.clear()
        data = sounds_for(sounds, RATES, data_max_length_seconds=seconds, end_prob=1.0)
        return {data.fetch(number, torch.Generator().manual_seed(number))["is_end"] for number in range(len(sounds))}

    before = torch.get_rng_state()
    assert ends(crops) == {False} and "are all 1600 samples long, and are taken for crops" in caplog.text
    assert torch.equal(torch.get_rng_state(), before)
    assert ends(others) == {True} and not caplog.text
    assert ends([{"raw_wave": wave, "is_end": True} for wave in crops]) == {True} and not caplog.text
    assert ends([{"raw_wave": wave, "is_end": False} for wave in others]) == {False}
    assert ends(crops[:1]) == {True}


def test_tokens_in_place_of_sounds() -> None:
    semantic, codes = torch.arange(5), torch.arange(6).reshape(3, 2)
    for own in (
        Items({"semantic_token_ids": semantic, "token_ids": codes, "text": "x", "is_end": True}),
        Items((codes, "x", semantic, True)),
    ):
        for rates in (RATES, {}):
            sample = sounds_for(own, rates)[0]
            assert same(sample, {"semantic_token_ids": semantic, "token_ids": codes, "texts": "x", "is_end": True})
    batch = collate([sounds_for(Items(torch.arange(n)), {})[0] for n in (3, 5)])
    assert batch["semantic_token_ids"].tolist() == [[0, 1, 2, 0, 0], [0, 1, 2, 3, 4]]
    assert batch["semantic_token_ids_lengths"].tolist() == [3, 5]
    embedded = Items((wave(0.1, 16000), torch.zeros(3, 4)))
    assert sounds_for(embedded, {"raw_wave": 16000})[0]["text_embeds"].shape == (3, 4)


MISTAKES: dict[str, tuple[Callable[[], Any], Mapping[str, int], str]] = {
    "no length": (lambda: "sounds", RATES, "data_max_length or data_max_length_seconds is needed"),
    "no network": (lambda: "sounds", {}, "neither a codec nor a semantic tokenizer to hear sounds with: give tokens"),
    "nothing made up": (lambda: AudioSource("synthetic"), {}, "neither a codec nor a semantic tokenizer"),
    "both": (
        lambda: Items({"raw_wave": wave(0.1, 16000), "token_ids": torch.zeros(3, 2).long()}),
        RATES,
        "item 0 has raw_wave and token_ids, and a crop of one would be none of the other",
    ),
    "neither": (lambda: Items({"text": "x"}), RATES, "item 0 has none of raw_wave, raw_wave_for_codec, semantic_token"),
    "unnamed": (lambda: Items((wave(0.1, 16000),) * 3), RATES, "a sample fit no fields: found float32"),
    "captions": (lambda: AudioSource(Items(), captions="beside"), RATES, "captions='beside' is for files and columns"),
    "other rates": (lambda: audio_data(Items(wave(0.1, 500)), 500), RATES, r"the sounds are {'audio': 500} and the"),
    "no sounds": (lambda: 3, RATES, "a int is no source of sounds: give a folder, a manifest or a dataset"),
}


@pytest.mark.parametrize("kind", MISTAKES)
def test_mistakes_are_told_in_one_sentence(folder: Path, kind: str) -> None:
    build, rates, sentence = MISTAKES[kind]
    with pytest.raises(ValueError, match=sentence):
        sounds_for(build(), rates)[0]


# ---------------------------------------------------------------------- caches


def test_a_cache_holds_what_is_made_on_the_fly(folder: Path) -> None:
    networks = codec(), mel()
    tokenizer = AudioTokenizer(*networks)
    assert make(tokenizer) == Tokenized(encoded=5, kept=0, bad=0, gone=0)
    cache = cached_audio("cache", AudioTokenizer(*networks))
    data = unaugmented(tokenizer.items(source()))
    assert list(cache.keys) == ["a/long.wav"] * 3 + ["b.wav", "c.wav"]
    assert len(cache) == len(data) == 5
    for index in range(5):
        sample = data[index]
        heard = [sample[name][None, : sample[f"{name}_lengths"]] for name in RATES]
        expected = {"semantic_token_ids": networks[1](heard[0])[0], "token_ids": networks[0].eval().encode(heard[1])[0]}
        assert same(cache[index], {**expected, "texts": sample["texts"], "is_end": sample["is_end"]})
    assert [cache[index]["is_end"] for index in range(5)] == [False, False, True, True, True]
    assert [cache[index]["texts"] for index in (2, 3)] == ["the sound a/long", "the sound b"]
    # From end to end: 0.25 s are 2000 samples of the codec, and 4000 of the other.
    assert sum(len(cache[index]["token_ids"]) for index in range(3)) == 2000 // 8
    assert sum(len(cache[index]["semantic_token_ids"]) for index in range(3)) == -(-4000 // 320)
    assert len(torch.cat([cache[index]["token_ids"][:, 0] for index in range(5)]).unique()) > 3
    assert len(torch.cat([cache[index]["semantic_token_ids"] for index in range(5)]).unique()) > 3


def test_nothing_of_a_sound_is_left_out(folder: Path) -> None:
    tokenizer = AudioTokenizer(mel())
    for cropped in (
        AudioSource(Items(wave(0.3, 16000)), data_max_length_seconds=SECONDS),
        AudioSource(audio_data("sounds", 16000, max_length_seconds=SECONDS)),
    ):
        with pytest.raises(
            ValueError, match="crops of a dataset would leave out the rest of its sounds: give a folder"
        ):
            tokenizer.items(cropped)
    assert tokenizer.items(AudioSource(Items(wave(0.3, 16000))))[0]["raw_wave"].shape == (4800,)
    cut = audio_data("sounds", 16000, max_length_seconds=SECONDS, segments=True)
    assert len(tokenizer.items(AudioSource(cut))) == len(tokenizer.items(source())) == 5


def test_a_batch_of_unequal_lengths(folder: Path) -> None:
    make(AudioTokenizer(codec(), mel()))
    cache = TokenCache("cache")
    batch = next(Loader(cache, batch_size=5, shuffle=False).steps())[0]
    lengths = [100, 100, 50, 100, 70]
    assert batch["token_ids"].shape == (5, 100, 3) and batch["token_ids_lengths"].tolist() == lengths
    assert batch["semantic_token_ids_lengths"].tolist() == [5, 5, 3, 5, 4]
    assert batch["is_end"].tolist() == [False, False, True, True, True]
    for row, length in enumerate(lengths):
        assert torch.equal(batch["token_ids"][row, :length], cache[row]["token_ids"])
        assert not batch["token_ids"][row, length:].any()


def test_stages_read_what_they_need_of_one_cache(folder: Path) -> None:
    both = codec(), mel()
    make(AudioTokenizer(*both))
    for networks, fields in (
        (both, {"token_ids", "semantic_token_ids"}),
        (both[:1], {"token_ids"}),
        (both[1:], {"semantic_token_ids"}),
    ):
        chosen = cached_audio(TokenCache("cache"), AudioTokenizer(*networks))
        assert chosen[0].keys() == {*fields, "texts", "is_end"}
    alone = AudioTokenizer(None, both[1], sizes={"token_ids": 16})  # its codec is not at hand
    assert cached_audio("cache", alone)[0].keys() == {"token_ids", "semantic_token_ids", "texts", "is_end"}
    assert alone.rates == {"raw_wave": 16000}
    with pytest.raises(ValueError, match="cache was made with token_ids=16, not 32"):
        cached_audio("cache", AudioTokenizer(sizes={"token_ids": 32}))
    assert isinstance(sounds_for("cache", RATES, data_max_length_seconds=SECONDS), TokenCache)
    assert isinstance(training_audio("cache", captions="beside"), TokenCache)


def saved(network: Network, name: str) -> Any:
    network.save(name)
    return load_network(Path(name))


def test_other_networks_are_refused(folder: Path) -> None:
    first, clusters = saved(codec(), "codec"), saved(mel(), "mel")
    make(AudioTokenizer(first, clusters))
    other = saved(mel(seed=1), "other")
    with pytest.raises(
        ValueError,
        match=r"the semantic tokenizer of this model is .*/other \(\w{12}\), and cache was made with .*/mel \(\w{12}\): make a new one "
        r"with `helicon tokenize \S*/codec --semantic \S*/other --data \S*/sounds -o cache-new data_max_length_seconds=0.1 captions=beside`",
    ):
        cached_audio("cache", AudioTokenizer(first, other))
    with pytest.raises(ValueError, match=r"the codec of this model is .*, and cache was made with .*/codec \("):
        cached_audio("cache", AudioTokenizer(codec(rq_num_quantizers=2)))
    make(AudioTokenizer(clusters), "semantic")
    with pytest.raises(
        ValueError,
        match=r"semantic holds semantic_token_ids and no token_ids, which this model learns from: make a new one with "
        r"`helicon tokenize \S*/codec --semantic \S*/mel --data \S*/sounds -o semantic-new ",
    ):
        cached_audio("semantic", AudioTokenizer(first, clusters))
    with pytest.raises(
        ValueError,
        match=r"was made with data_max_length_seconds=0\.1, not 0\.2: write data\.data_max_length_seconds=0\.1, or run `helicon tok",
    ):
        training_audio("cache", data_max_length_seconds=0.2)
    with pytest.raises(ValueError, match="cache was made with captions=beside, not folder"):
        sounds_for("cache", RATES, captions="folder")


def test_a_share_of_ends_is_one() -> None:
    for end_prob in (2.0, -0.1, float("nan")):
        with pytest.raises(ValueError, match=f"end_prob={end_prob} is a probability: it must be between 0 and 1"):
            training_audio("synthetic", end_prob=end_prob)


def test_a_stage_that_reads_one_field_leaves_the_others_of_a_cache_to_the_rest(folder: Path) -> None:
    """The command that is told names all networks of the cache, and its folder is never overwritten with less."""
    first, clusters, other = saved(codec(), "codec"), saved(mel(), "mel"), saved(mel(seed=1), "other")
    make(AudioTokenizer(first, clusters))
    both = r"`helicon tokenize \S*/codec --semantic \S*/other --data \S*/sounds -o cache-new "
    with pytest.raises(ValueError, match=both):
        cached_audio("cache", AudioTokenizer(other))
    make(AudioTokenizer(first), "codes")
    with pytest.raises(ValueError, match=rf"no semantic_token_ids, .*{both.replace('cache-new', 'codes-new')}"):
        cached_audio("codes", AudioTokenizer(other))
    for network, lost in ((other, "token_ids"), (first, "semantic_token_ids")):
        with pytest.raises(FileExistsError, match=f"cache also holds {lost}, which the networks given here do not"):
            make(AudioTokenizer(network))
    assert {"token_ids", "semantic_token_ids"} <= set(TokenCache("cache").fields)


def test_an_edited_sound_is_noticed_and_encoded_again(folder: Path) -> None:
    tokenizer = AudioTokenizer(codec(), mel())
    make(tokenizer)
    write(folder / "a/long.wav", noise(0.15, 24000, seed=9), 24000)
    with pytest.raises(
        ValueError, match=r"cache is stale, as .*/sounds/a/long.wav is not what it was and 2 more: bring"
    ):
        cached_audio("cache", tokenizer)
    assert make(tokenizer) == Tokenized(encoded=2, kept=2, bad=0, gone=1)
    cache = cached_audio("cache", tokenizer)
    assert [cache[index]["is_end"] for index in range(4)] == [False, True, True, True]
    assert len(cache[1]["token_ids"]) == 50


def test_a_long_recording_is_hashed_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[Path] = []
    plain = tokens_module.sha256
    monkeypatch.setattr(tokens_module, "sha256", lambda path: hashed.append(path) or plain(path))
    make(AudioTokenizer(mel()))
    assert sorted(path.name for path in hashed if path.suffix == ".wav") == ["b.wav", "c.wav", "long.wav"]


def test_a_codec_is_known_whoever_holds_it(folder: Path) -> None:
    """Its discriminators and its mode are no matter."""
    network = codec()
    make(AudioTokenizer(network))
    network.train().save("codec")
    with torch.no_grad():
        for parameter in network.discriminators.parameters():
            parameter.add_(1)
    network.discriminators.requires_grad_(True)
    for held in (network, load_network(Path("codec")).train(), AudioTokenizer(network).networks["codec"]):
        cached_audio("cache", AudioTokenizer(held))
    assert network.discriminators is not None and network.training and next(network.parameters()).requires_grad
    with torch.no_grad():
        next(network.non_discr_parameters()).add_(1)
    with pytest.raises(ValueError, match="the codec of this model is"):
        cached_audio("cache", AudioTokenizer(network))


def test_pretrained_networks_make_tokens_too(folder: Path, tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = transformers.DacConfig(
        encoder_hidden_size=4,
        downsampling_ratios=[2, 3],
        decoder_hidden_size=16,
        n_codebooks=3,
        codebook_size=16,
        codebook_dim=4,
        sampling_rate=700,
    )
    transformers.DacModel(config).save_pretrained(tmp_path / "dac")
    dac, quantizer = DacCodec(tmp_path / "dac"), Wav2Vec2Quantizer(write_model("wav2vec2", tmp_path / "wav2vec2"))
    tokenizer = AudioTokenizer(dac, quantizer)
    assert tokenizer.rates == {"raw_wave": 16000, "raw_wave_for_codec": 700}
    assert tokenizer.sizes == {"semantic_token_ids": quantizer.codebook_size, "token_ids": 16}
    make(tokenizer)
    cache = cached_audio("cache", AudioTokenizer(saved(dac, "codec"), saved(quantizer, "semantic")))
    lengths = quantizer.code_lengths(torch.tensor([1600, 1120])).tolist()
    assert [len(cache[index]["semantic_token_ids"]) for index in (3, 4)] == lengths
    assert cache[3]["token_ids"].shape == (-(-70 // 6), 3)
    assert cache[3]["semantic_token_ids"].max() >= quantizer.codebook_size // 2, "groups have ids of their own"


def test_what_makes_no_tokens_is_refused() -> None:
    picture = VQGanVAE(dim=8, layers=2, encdec_resnet_groups=4, codebook_size=16)
    with pytest.raises(ValueError, match="a VQGanVAE makes no codes of sounds: give a codec, or a semantic tokenizer"):
        AudioTokenizer(picture)
    with pytest.raises(ValueError, match="a VQGanVAE makes no semantic tokens: give what `helicon fit-kmeans` made"):
        AudioTokenizer(codec(), picture)
    with pytest.raises(ValueError, match="a MelKmeans makes no codes of sounds"):
        AudioTokenizer(MelKmeans(3), MelKmeans(3))
