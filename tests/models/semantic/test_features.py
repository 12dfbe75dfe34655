"""Frames of features, against transformers' own models and feature extractors."""

import json
import logging
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest
import torch
import transformers
from torch import Tensor

from helicon.models.semantic.features import MelFeatures, PretrainedFeatures
from models.semantic.builders import BUILDERS, WAVES, extractor, noise, write, write_mert


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: write(name, tmp_path_factory.mktemp("features") / name) for name in BUILDERS}


def own_states(name: str, folder: Path, clip: Tensor) -> tuple[Tensor, ...]:
    """All hidden states of the whole model, for one clip `[n]` through its own feature extractor."""
    model = transformers.AutoModel.from_pretrained(folder).eval()
    ready = extractor(name)(clip.numpy(), sampling_rate=16000, return_tensors="pt")
    with torch.no_grad():
        states = model(**ready, output_hidden_states=True).hidden_states
    return tuple(state[0] for state in states)


@pytest.mark.parametrize("name", BUILDERS)
@pytest.mark.parametrize("length", [777, 1201])
def test_every_layer_equals_the_models_own(name: str, saved: dict[str, Path], length: int) -> None:
    clips = noise(2, length) + 0.05
    expected = [own_states(name, saved[name], clip) for clip in clips]
    for layer in range(4):
        features = PretrainedFeatures(saved[name], layer)
        frames = features(clips)
        assert frames.shape == (2, features.num_frames(length), features.dim)
        for row in range(2):
            own = expected[row][layer][: frames.shape[1]]  # w2v-BERT's extractor adds half a frame of padding
            torch.testing.assert_close(frames[row], own, atol=2e-4, rtol=2e-4)
            assert len(expected[row][layer]) - frames.shape[1] in ((0, 1) if name == "w2v_bert" else (0,))
    last = PretrainedFeatures(saved[name], -1)
    assert last.layer == 3 and torch.equal(last(clips), PretrainedFeatures(saved[name], 3)(clips))


@pytest.mark.parametrize("name", BUILDERS)
def test_layers_that_are_not_needed_are_left_out(name: str, saved: dict[str, Path]) -> None:
    assert len(PretrainedFeatures(saved[name], 1).backbone.model.encoder.layers) == 2


@pytest.mark.parametrize("name", BUILDERS)
def test_lengths(name: str, saved: dict[str, Path]) -> None:
    features = PretrainedFeatures(saved[name], 1)
    if name == "w2v_bert":
        assert (features.downsample_factor, features.least) == (320, 560)
    else:
        assert (features.downsample_factor, features.least) == (20, 30)
    lengths = torch.tensor([0, features.least - 1, features.least, 1000])
    counts = [features.num_frames(length) for length in lengths.tolist()]
    assert features.num_frames(lengths).tolist() == counts and counts[:3] == [0, 0, 1]
    assert features(noise(1, features.least)).shape[1] == 1


def test_mert_is_read_without_its_code(tmp_path: Path) -> None:
    mert = PretrainedFeatures(write_mert(tmp_path / "mert"), 2)
    hubert = PretrainedFeatures(write("hubert", tmp_path / "hubert"), 2)
    clips = noise(2, 500)
    assert mert.sample_hz == 24000 and torch.equal(mert(clips), hubert(clips))
    for switch in ("feature_extractor_cqt", "deepnorm"):
        with pytest.raises(ValueError, match=f"this MERT model has {switch}=true, which only its own code can do"):
            PretrainedFeatures(write_mert(tmp_path / switch, **{switch: True}), 2)


def test_code_that_comes_with_a_model_is_never_run(tmp_path: Path) -> None:
    settings: dict[str, Any] = {
        "model_type": "music_model",
        "auto_map": {"AutoConfig": "evil.Config", "AutoModel": "evil.Model"},
    }
    (tmp_path / "config.json").write_text(json.dumps(settings))
    (tmp_path / "evil.py").write_text("raise SystemExit('this was run')")
    with pytest.raises(
        ValueError, match="brings its own code, which is never run: give a model whose class is in transformers"
    ):
        PretrainedFeatures(tmp_path, 1)


def test_a_folder_without_preprocessor_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write("hubert", tmp_path)
    expected = PretrainedFeatures(tmp_path, 1)(noise(1, 300))
    (tmp_path / "preprocessor_config.json").unlink()
    with caplog.at_level(logging.WARNING, "helicon"):
        assert torch.equal(PretrainedFeatures(tmp_path, 1)(noise(1, 300)), expected)
    assert "has no preprocessor_config.json: audio is taken to be of 16000 Hz, and normalized" in caplog.text


def test_other_models_are_refused(saved: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match="layer 4 must lie between -4 and 3: the model has 3 layers"):
        PretrainedFeatures(saved["hubert"], 4)
    with pytest.raises(ValueError, match=r"could not be read .* give the folder or the hub name") as error:
        PretrainedFeatures("nobody/no-such-model", 1)
    assert "\n" not in str(error.value)
    (tmp_path / "hubert_base_ls960.pt").touch()
    with pytest.raises(
        ValueError,
        match=r"hubert_base_ls960.pt is a file, and checkpoints of other packages \(pickles\) are never read",
    ):
        PretrainedFeatures(tmp_path / "hubert_base_ls960.pt", 9)
    bert = {"vocab_size": 9, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}
    transformers.BertModel(transformers.BertConfig(**bert)).save_pretrained(tmp_path / "bert")
    with pytest.raises(ValueError, match="is a BertModel, which does not turn audio into hidden states"):
        PretrainedFeatures(tmp_path / "bert", 1)
    sew = transformers.SEWConfig(**WAVES, squeeze_factor=2)
    transformers.SEWModel(sew).save_pretrained(tmp_path / "sew")
    with pytest.raises(
        ValueError, match=r"layer 1 of .* has 24 frames where its input has 49: choose another layer or model"
    ):
        PretrainedFeatures(tmp_path / "sew", 1)(noise(1, 1000))


def tone(hz: float, count: int = 1600) -> Tensor:
    return 0.3 * torch.sin(2 * torch.pi * hz * torch.arange(count) / 16000)[None]


def test_mel_frames_tell_sounds_apart_and_not_their_level() -> None:
    features = MelFeatures()
    quiet, loud, other = features(0.01 * tone(440)), features(tone(440)), features(tone(880))
    assert loud.shape == (1, 5, 240) and (features.sample_hz, features.downsample_factor) == (16000, 320)
    assert loud.min() >= -1 and loud.max() == 1
    torch.testing.assert_close(quiet, loud, atol=1e-4, rtol=1e-4)
    assert (other - loud).square().mean() > 0.1
    assert (features(torch.zeros(1, 640)) == -1).all()  # silence is silent, not as loud as can be
    assert (features(torch.cat([tone(440, 3200), torch.zeros(1, 3200)], dim=1))[:, 12:] == -1).all()


def test_mel_frames_stand_for_the_samples_they_cover() -> None:
    features = MelFeatures()
    click = torch.zeros(1, 3200)
    click[0, 1000] = 1.0  # within samples 960 to 1280, the fourth frame
    assert features(click)[0].mean(dim=-1).argmax() == 3
    assert [features.num_frames(length) for length in (0, 1, 320, 321)] == [0, 1, 1, 2]
    assert features(noise(1, 321)).shape[1] == 2
