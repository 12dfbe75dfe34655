"""Semantic tokens: batches equal single clips, tokenizers survive saving, and stay as they are whatever happens around them."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor, nn

from helicon.data.tokens import network_hash
from helicon.models.semantic.kmeans import KMeansReport
from helicon.models.semantic.tokenizer import (
    FairseqVQWav2Vec,
    HubertWithKmeans,
    KmeansTokenizer,
    MelKmeans,
    SemanticTokenizer,
    Wav2Vec2Quantizer,
    WaveTokenizer,
)
from helicon.nn.network import Network, load_network
from helicon.nn.resample import resample
from models.semantic.builders import noise, padded, write

LENGTHS = torch.tensor([3000, 1111, 3000, 25, 2048, 0])


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    names = ("hubert", "wavlm", "wav2vec2", "w2v_bert")
    return {name: write(name, tmp_path_factory.mktemp("tokenizer") / name) for name in names}


def fitted(tokenizer: KmeansTokenizer, **options: Any) -> KMeansReport:
    waves = [(noise(4, 4000, seed=seed) * torch.linspace(0.1, 3, 4000), None) for seed in range(4)]
    return tokenizer.fit(waves, **{"num_frames": 300, **options})


def built(name: str, saved: dict[str, Path]) -> WaveTokenizer:
    if name == "quantizer":
        return Wav2Vec2Quantizer(saved["wav2vec2"])
    tokenizer = MelKmeans(13) if name == "mel" else HubertWithKmeans(saved[name], output_layer=2, codebook_size=13)
    fitted(tokenizer, num_frames=100)
    return tokenizer


NAMES = ("mel", "hubert", "wavlm", "wav2vec2", "w2v_bert", "quantizer")


@pytest.fixture(scope="module")
def tokenizers(saved: dict[str, Path]) -> dict[str, WaveTokenizer]:
    return {name: built(name, saved) for name in NAMES}


@pytest.fixture(params=NAMES)
def tokenizer(request: pytest.FixtureRequest, tokenizers: dict[str, WaveTokenizer]) -> WaveTokenizer:
    return tokenizers[request.param]


def test_a_padded_batch_equals_its_clips(tokenizer: WaveTokenizer) -> None:
    audio = padded(LENGTHS)
    ids, lengths = tokenizer(audio, lengths=LENGTHS), tokenizer.code_lengths(LENGTHS)
    assert isinstance(tokenizer, SemanticTokenizer)
    assert ids.dtype == torch.int64 and ids.shape == (6, int(lengths.max()))
    for row, (length, count) in enumerate(zip(LENGTHS.tolist(), lengths.tolist(), strict=True)):
        assert (ids[row, count:] == -1).all()
        if count:
            assert torch.equal(ids[row, :count], tokenizer(audio[row : row + 1, :length])[0])
    assert torch.equal(tokenizer(audio[1:2], lengths=LENGTHS[1:2]), ids[1:2])  # the same shape, whatever the lengths
    assert lengths[-1] == 0 and int(ids.max()) < tokenizer.codebook_size
    assert len(ids[0].unique()) > 2  # else equality would say little


def test_audio_of_another_rate_is_resampled(tokenizer: WaveTokenizer) -> None:
    lengths = LENGTHS[:3]
    audio = padded(lengths)
    ids = tokenizer(audio, input_sample_hz=11025, lengths=lengths)
    for row, length in enumerate(lengths.tolist()):
        alone = tokenizer(resample(audio[row : row + 1, :length], 11025, tokenizer.sample_hz))[0]
        assert torch.equal(ids[row, : len(alone)], alone) and (ids[row, len(alone) :] == -1).all()


def test_the_shortest_clip(tokenizer: WaveTokenizer) -> None:
    least = tokenizer.least
    for rate in (tokenizer.sample_hz, 44100, 6000):
        shortest = tokenizer._least(rate)
        assert tokenizer(noise(1, shortest), input_sample_hz=rate).shape == (1, tokenizer.groups)
        with pytest.raises(
            ValueError, match=f"the longest row has a length of {shortest - 1}, and nothing can be made of less"
        ):
            tokenizer(noise(1, shortest - 1), input_sample_hz=rate)
    assert tokenizer.code_lengths(torch.tensor([least - 1, least])).tolist() == [0, tokenizer.groups]


@pytest.mark.parametrize("name", ["mel", "hubert"])
def test_samples_beyond_a_multiple_are_left_out(name: str, saved: dict[str, Path]) -> None:
    make = (
        MelKmeans if name == "mel" else lambda **options: HubertWithKmeans(saved["hubert"], output_layer=1, **options)
    )
    tokenizer, plain = make(codebook_size=9, seq_len_multiple_of=700), make(codebook_size=9)
    fitted(tokenizer)
    plain.kmeans.load_state_dict(tokenizer.kmeans.state_dict())
    audio = noise(2, 1500)
    assert torch.equal(tokenizer(audio), plain(audio[:, :1400]))
    assert tokenizer.code_lengths(torch.tensor([1500, 699])).tolist() == [tokenizer(audio).shape[1], 0]
    assert tokenizer._least(None) == 700


class Speaker(Network):
    def __init__(self, wav2vec: WaveTokenizer, dim: int = 3):
        super().__init__()
        self.wav2vec = wav2vec
        self.embedding = nn.Embedding(wav2vec.codebook_size, dim)

    def forward(self, audio: Tensor) -> Tensor:
        return self.embedding(self.wav2vec(audio))


def test_it_stays_as_it_is_whatever_its_parent_does(tokenizer: WaveTokenizer) -> None:
    speaker, audio = Speaker(copy.deepcopy(tokenizer)), noise(2, 3000)
    before = speaker.wav2vec(audio)
    speaker.train().requires_grad_(True)
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    speaker(audio).sum().backward()
    assert torch.equal(torch.rand(3), expected)  # (transformers draws, in evaluation mode too, which layers to drop)
    assert {name for name, _ in speaker.named_parameters()} == {"embedding.weight"}
    assert torch.equal(speaker.wav2vec(audio), before)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(speaker.wav2vec(audio), before)
    speaker.to(torch.bfloat16)
    assert torch.equal(speaker.wav2vec(audio), before)
    with torch.inference_mode():
        assert torch.equal(speaker.wav2vec(audio), before)


def test_a_saved_tokenizer_is_the_same(tokenizer: WaveTokenizer, tmp_path: Path) -> None:
    speaker, audio = Speaker(tokenizer), noise(2, 3000)
    speaker.save_pretrained(tmp_path / "saved")
    assert (
        sum(file.stat().st_size for file in (tmp_path / "saved/stages").rglob("*.safetensors")) < 20_000
    )  # no backbone
    loaded = load_network(tmp_path / "saved")
    assert torch.equal(loaded(audio), speaker(audio))
    assert network_hash(loaded.wav2vec) == network_hash(tokenizer)


def test_hashes_tell_tokenizers_apart(saved: dict[str, Path]) -> None:
    hashes = set()
    for layer, seed in ((1, 0), (2, 0), (2, 1)):
        tokenizer = HubertWithKmeans(saved["hubert"], output_layer=layer, codebook_size=9)
        fitted(tokenizer, seed=seed)
        hashes.add(network_hash(tokenizer))
    assert len(hashes) == 3


@pytest.mark.parametrize("kind", [HubertWithKmeans, Wav2Vec2Quantizer])
def test_another_model_in_the_place_of_the_saved_one_is_refused(kind: type, tmp_path: Path) -> None:
    options = {"output_layer": 1, "codebook_size": 5} if kind is HubertWithKmeans else {}
    kind(write("wav2vec2", tmp_path / "model"), **options).save_pretrained(tmp_path / "saved")
    load_network(tmp_path / "saved")
    write("wav2vec2", tmp_path / "model", seed=1)
    with pytest.raises(ValueError, match="is not the one this was saved with: put the old one back"):
        load_network(tmp_path / "saved")


def test_clusters_by_path(saved: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = HubertWithKmeans(saved["hubert"], output_layer=2, codebook_size=11)
    fitted(made)
    made.save(tmp_path / "clusters")
    save_file({"centroids": made.kmeans.centroids}, tmp_path / "centroids.safetensors")
    audio = noise(2, 2000)
    monkeypatch.chdir(tmp_path)
    for path in ("clusters", tmp_path / "clusters/model.safetensors", "centroids.safetensors"):
        found = HubertWithKmeans(
            checkpoint_path=saved["hubert"], kmeans_path=path, target_sample_hz=16000, output_layer=2
        )
        assert found.codebook_size == 11 and torch.equal(found(audio), made(audio))
    found.save("again")
    (tmp_path / "centroids.safetensors").unlink()  # the saved tokenizer has clusters of its own
    assert torch.equal(load_network(tmp_path / "again")(audio), made(audio))
    with pytest.raises(
        ValueError, match=r"are of another model or layer than layer 1 of .*hubert: give those they were fitted to"
    ):
        HubertWithKmeans(saved["hubert"], "clusters", output_layer=1)
    save_file({"centroids": torch.zeros(4, 5)}, tmp_path / "narrow.safetensors")
    with pytest.raises(ValueError, match=r"the clusters at narrow.safetensors have 5 features, and .*hubert has 16"):
        HubertWithKmeans(saved["hubert"], "narrow.safetensors", output_layer=1)


def test_fitting_is_decided_by_the_seed_and_sees_no_padding(saved: dict[str, Path]) -> None:
    lengths = torch.tensor([4000, 900, 25, 2500])
    audio = padded(lengths)
    fits = []
    for seed in (0, 0, 1):
        tokenizer = HubertWithKmeans(saved["hubert"], output_layer=2, codebook_size=9)
        done: list[tuple[int, int]] = []
        report = tokenizer.fit(
            [(audio, lengths), (audio[2:3, :25], None)],
            num_frames=1000,
            seed=seed,
            reading=lambda count, total, done=done: done.append((count, total)),  # type: ignore[misc]
        )
        assert report.num_frames == int(tokenizer.code_lengths(lengths).sum()) and done == [(report.num_frames, 1000)]
        assert tokenizer.kmeans.centroids.isfinite().all()
        fits.append(tokenizer.kmeans.centroids)
    assert torch.equal(fits[0], fits[1]) and not torch.equal(fits[0], fits[2])
    assert fitted(tokenizer, num_frames=77).num_frames == 77


def test_more_frames_may_be_asked_for_than_memory_holds() -> None:
    asked, there = MelKmeans(13), MelKmeans(13)
    report = fitted(asked, num_frames=10**14)
    assert report.num_frames == fitted(there, num_frames=report.num_frames).num_frames > 100
    assert torch.equal(asked.kmeans.centroids, there.kmeans.centroids)


@pytest.mark.gpu
def test_on_a_gpu(tokenizer: WaveTokenizer) -> None:
    audio = padded(LENGTHS)
    expected = tokenizer(audio, lengths=LENGTHS)
    moved = Speaker(copy.deepcopy(tokenizer)).cuda().wav2vec
    found = moved(audio.cuda(), lengths=LENGTHS.cuda())
    assert found.is_cuda and (found.cpu() == expected).float().mean() > 0.9  # near a border rounding decides
    if isinstance(moved, KmeansTokenizer):
        fits = []
        for _ in range(2):
            fitted(moved)
            fits.append(moved.kmeans.centroids.clone())
        assert fits[0].is_cuda and torch.equal(fits[0], fits[1])


def test_mel_clusters_hear_what_is_played() -> None:
    """Three notes at any level and place get tokens of their own."""
    time = torch.arange(8000) / 16000
    notes = [torch.sin(2 * torch.pi * hz * time) for hz in (220, 550, 1800)]
    tokenizer = MelKmeans(6)
    tokenizer.fit([(torch.stack(notes) * level, None) for level in (0.02, 0.5)], num_frames=150)
    heard = [set(tokenizer(0.2 * note[None, 1000:6000])[0, 1:-1].tolist()) for note in notes]
    assert not heard[0] & heard[1] and not heard[1] & heard[2] and not heard[0] & heard[2]


def test_the_quantizer_is_the_models_own(saved: dict[str, Path]) -> None:
    tokenizer = Wav2Vec2Quantizer(saved["wav2vec2"])
    assert (tokenizer.groups, tokenizer.codebook_size, tokenizer.downsample_factor) == (2, 24, 20)
    model = transformers.Wav2Vec2ForPreTraining.from_pretrained(saved["wav2vec2"]).eval()
    chosen: list[Tensor] = []
    model.quantizer.weight_proj.register_forward_hook(lambda module, args, output: chosen.append(output))
    clip = noise(1, 1500) + 0.02
    ready = transformers.Wav2Vec2FeatureExtractor.from_pretrained(saved["wav2vec2"])
    with torch.no_grad():
        model(ready(clip[0].numpy(), sampling_rate=16000, return_tensors="pt").input_values)
    expected = chosen[0].reshape(-1, 2, 12).argmax(dim=-1)
    assert torch.equal(tokenizer(clip, flatten=False)[0], expected) and len(expected.unique()) > 3
    flat = tokenizer(clip)[0].reshape(-1, 2)
    assert torch.equal(flat, expected + torch.tensor([0, 12]))  # groups do not share ids
    lengths = torch.tensor([1500, 300])
    both = tokenizer(padded(lengths), flatten=False, lengths=lengths)
    assert (both[1] == -1).all(dim=1).sum() == both.shape[1] - tokenizer.code_lengths(lengths)[1] // 2


def test_the_rate_is_the_models_own(tokenizer: WaveTokenizer) -> None:
    """A second of sound at any rate has as many tokens as a second of the model's own."""
    assert tokenizer.sample_hz == 16000
    length = tokenizer(noise(1, 16000)).shape[1]
    assert length == tokenizer.code_lengths(torch.tensor([16000])).item()
    assert all(tokenizer(noise(1, hz), input_sample_hz=hz).shape[1] == length for hz in (8000, 24000))


def test_a_model_without_quantizer_is_refused(saved: dict[str, Path], tmp_path: Path) -> None:
    config = transformers.Wav2Vec2Config.from_pretrained(saved["wav2vec2"])
    transformers.Wav2Vec2Model(config).save_pretrained(tmp_path / "bare")
    with pytest.raises(
        ValueError, match=r"has no weights for project_hid.* it is not the wav2vec 2.0 model with its quantizer"
    ):
        Wav2Vec2Quantizer(tmp_path / "bare")
    with pytest.raises(ValueError, match="is a model of type 'hubert', which has no quantizer: use HubertWithKmeans"):
        Wav2Vec2Quantizer(saved["hubert"])
    (tmp_path / "vq-wav2vec.pt").touch()
    with pytest.raises(
        ValueError, match=r"vq-wav2vec.pt is a file, and checkpoints of other packages \(pickles\) are never read"
    ):
        FairseqVQWav2Vec(tmp_path / "vq-wav2vec.pt")
    with pytest.raises(ValueError, match=r"target_sample_hz=24000 is not the rate of .*wav2vec2, 16000: leave it out"):
        FairseqVQWav2Vec(saved["wav2vec2"], target_sample_hz=24000)


def test_mistakes_are_told_in_one_sentence(saved: dict[str, Path], tmp_path: Path) -> None:
    for options in ({}, {"kmeans_path": "x", "codebook_size": 4}):
        with pytest.raises(
            ValueError, match="give kmeans_path, the clusters that `helicon fit-kmeans` made, or codebook_size"
        ):
            HubertWithKmeans(saved["hubert"], **options)
    (tmp_path / "kmeans.bin").touch()
    with pytest.raises(
        ValueError, match="may be a pickle, which is never read: make clusters with `helicon fit-kmeans`"
    ):
        HubertWithKmeans(saved["hubert"], tmp_path / "kmeans.bin")
    with pytest.raises(ValueError, match="seq_len_multiple_of=0: it must be at least 1"):
        MelKmeans(5, seq_len_multiple_of=0)
    with pytest.raises(ValueError, match="layer 9 must lie between -4 and 3"):
        HubertWithKmeans(saved["hubert"], codebook_size=5)
    with pytest.raises(ValueError, match="not fitted yet: run `helicon fit-kmeans`, or call fit"):
        MelKmeans(5)(noise(1, 500))
    with pytest.raises(ValueError, match="13 clusters cannot be found in 9 frames: give more audio, or fewer clusters"):
        fitted(MelKmeans(13), num_frames=9)
