"""Frames of features that sound alike where audio means alike: a layer of a pretrained speech or music model, or log-mel.

Both kinds have a rate (`sample_hz`), samples a frame (`downsample_factor`), samples that give a frame (`least`), and `dim`
features. They are computed for clips of one length `[g, n]`, at their own rate, so that no clip sees padding: the first
group norm of HuBERT, say, averages over the whole of what it is given.

Letters: g clips of one length, n samples, t frames, d features, m mel bands.
"""

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from helicon.metrics.audio import mel_spectrogram
from helicon.nn.frozen import Frozen, pretrained_name, read_model, read_pretrained

logger = logging.getLogger(__name__)

Count = TypeVar("Count", int, Tensor)

SETTINGS_FILES = ("preprocessor_config.json", "processor_config.json")
NEEDLESS = ("masked_spec_embed",)  # takes the place of masked frames, in training


class MelFeatures(nn.Module):
    """Log-mel spectra of 16 kHz audio, 50 frames a second: needs no download.

    Three spectra (windows of 25 ms, 10 ms apart) make a frame, in the middle of the 320 samples it stands for. They are
    relative to the loudest of the clip and end 60 dB below it, so a clip's level does not matter; digital silence is the end.
    """

    sample_hz = 16000
    downsample_factor = 320
    least = 1
    num_mels = 80
    dim = 3 * num_mels

    def num_frames(self, length: Count) -> Count:
        return -(-length // self.downsample_factor)

    @torch.no_grad()
    def forward(self, clips: Float[Tensor, "g n"]) -> Float[Tensor, "g t d"]:
        whole = F.pad(clips.float(), (0, -clips.shape[-1] % self.downsample_factor))
        power = mel_spectrogram(whole, self.sample_hz, 1024, 160, self.num_mels, win_length=400, power=2.0)
        loudest = power.amax(dim=(1, 2), keepdim=True).clamp(min=1e-6)  # what stays below is silence
        levels = (power / loudest).clamp(min=1e-6).log10() / 3 + 1  # from -1 to 1
        return rearrange(levels.unfold(-1, 3, 2), "g m t three -> g t (three m)")


@dataclass(frozen=True)
class Preprocessing:
    """What a model's feature extractor does to a waveform."""

    sample_hz: int
    normalizes: bool  # to zero mean and unit variance

    @classmethod
    def of(cls, name: str) -> "Preprocessing":
        from transformers import FeatureExtractionMixin

        if Path(name).is_dir() and not any((Path(name) / file).exists() for file in SETTINGS_FILES):
            logger.warning("%s has no %s: audio is taken to be of 16000 Hz, and normalized", name, SETTINGS_FILES[0])
            return cls(16000, True)
        reader = FeatureExtractionMixin.get_feature_extractor_dict
        settings, _ = read_pretrained(reader, name, "preprocessor")
        return cls(settings.get("sampling_rate", 16000), settings.get("do_normalize", True))

    def __call__(self, clips: Float[Tensor, "g n"]) -> Float[Tensor, "g n"]:
        if not self.normalizes:
            return clips
        variance, mean = torch.var_mean(clips, dim=-1, keepdim=True, correction=0)
        return (clips - mean) / (variance + 1e-7).sqrt()


class PretrainedFeatures(nn.Module):
    """The hidden states of a frozen model of `transformers` (HuBERT, WavLM, wav2vec 2.0, w2v-BERT, MERT and their kin).

    `layer` counts as transformers does: 0 is what enters the first layer, 9 what leaves the ninth, -1 the last.
    """

    def __init__(self, name_or_folder: str | Path, layer: int):
        super().__init__()
        name = pretrained_name(name_or_folder)
        model: Any = _read(name)
        self.layer = _checked_layer(layer, model.config.num_hidden_layers)
        # What comes after the layer is not needed. (One more is kept: after its last layer a model may still normalize.)
        model.encoder.layers = model.encoder.layers[: self.layer + 1]
        takes_waves = model.main_input_name == "input_values"
        self.input = WaveInput(Preprocessing.of(name), model.config) if takes_waves else SpectrumInput(name)
        self.dim: int = model.config.hidden_size
        self.sample_hz, self.downsample_factor = self.input.sample_hz, self.input.downsample_factor
        self.least = self.input.least
        self.backbone = Frozen(model, name, {"layer": self.layer, **self.input.identity})

    def num_frames(self, length: Count) -> Count:
        return self.input.num_frames(length)

    def forward(self, clips: Float[Tensor, "g n"]) -> Float[Tensor, "g t d"]:
        with self.backbone.undisturbed() as model:
            states = model(self.input(clips.float()), output_hidden_states=True).hidden_states[self.layer]
        expected = self.num_frames(clips.shape[-1])
        if states.shape[1] != expected:
            raise ValueError(
                f"layer {self.layer} of {self.backbone.name} has {states.shape[1]} frames where its input has {expected}: "
                f"choose another layer or model"
            )
        return states


class WaveInput:
    """Waveforms, for models that begin with convolutions."""

    def __init__(self, preprocessing: Preprocessing, config: Any):
        self.preprocessing = preprocessing
        self.sample_hz = preprocessing.sample_hz
        self.convolutions = list(zip(config.conv_kernel, config.conv_stride, strict=True))
        self.downsample_factor = math.prod(config.conv_stride)
        self.least = 1
        for kernel, stride in reversed(self.convolutions):
            self.least = (self.least - 1) * stride + kernel
        self.identity = {"sample_hz": self.sample_hz, "normalizes": preprocessing.normalizes}

    def num_frames(self, length: Count) -> Count:
        count = length
        for kernel, stride in self.convolutions:
            count = (count - kernel) // stride + 1
        return count * (length >= self.least)

    def __call__(self, clips: Float[Tensor, "g n"]) -> Float[Tensor, "g n"]:
        return self.preprocessing(clips)


class SpectrumInput:
    """The filter banks w2v-BERT begins with, as `SeamlessM4TFeatureExtractor` computes them (which is Kaldi's way):
    log-mel spectra every 10 ms, each band of zero mean and unit variance, `stride` of them to a frame."""

    def __init__(self, name: str):
        from transformers import AutoFeatureExtractor, SeamlessM4TFeatureExtractor

        extractor = read_pretrained(AutoFeatureExtractor.from_pretrained, name, "preprocessor", trust_remote_code=False)
        if not isinstance(extractor, SeamlessM4TFeatureExtractor):
            raise ValueError(f"{name} takes the features of a {type(extractor).__name__}, which are not known here")
        self.sample_hz, self.stride = extractor.sampling_rate, extractor.stride
        self.width, self.hop, self.n_fft = 400, 160, 512
        self.downsample_factor = self.hop * self.stride
        self.least = self.width + (self.stride - 1) * self.hop
        self.window = torch.from_numpy(extractor.window).float()
        self.filters = torch.from_numpy(extractor.mel_filters).float()
        self.identity = {"sample_hz": self.sample_hz, "stride": self.stride, "num_mels": extractor.num_mel_bins}

    def num_frames(self, length: Count) -> Count:
        return ((length - self.width) // self.hop + 1) // self.stride * (length >= self.least)

    def __call__(self, clips: Float[Tensor, "g n"]) -> Float[Tensor, "g t d"]:
        window, filters = self.window.to(clips.device), self.filters.to(clips.device)
        pieces = (clips * 2**15).unfold(-1, self.width, self.hop)
        pieces = pieces - pieces.mean(dim=-1, keepdim=True)
        before = torch.cat([pieces[..., :1], pieces[..., :-1]], dim=-1)
        spectra = torch.fft.rfft((pieces - 0.97 * before) * window, self.n_fft).abs().square()
        levels = (spectra @ filters).clamp(min=torch.finfo(torch.float32).eps).log()
        variance, mean = torch.var_mean(levels, dim=1, keepdim=True)
        levels = (levels - mean) / (variance + 1e-7).sqrt()
        count = self.num_frames(clips.shape[-1])
        return rearrange(levels[:, : count * self.stride], "g (t s) m -> g t (s m)", s=self.stride)


Features = MelFeatures | PretrainedFeatures


def _read(name: str) -> nn.Module:
    from transformers import CONFIG_MAPPING, AutoModel, HubertConfig, HubertModel, PreTrainedConfig

    settings, _ = read_pretrained(PreTrainedConfig.get_config_dict, name, "model")
    if settings.get("model_type") == "mert_model":
        return read_model(
            HubertModel, name, "model", needless=NEEDLESS, config=HubertConfig(**_mert_as_hubert(settings))
        )
    if "auto_map" in settings and settings.get("model_type") not in CONFIG_MAPPING:
        raise ValueError(
            f"{name} brings its own code, which is never run: give a model whose class is in transformers (for music, "
            f"m-a-p/MERT-v1-95M), or convert it to one"
        )
    model = read_model(AutoModel, name, "model", needless=NEEDLESS, trust_remote_code=False)
    if not hasattr(getattr(model, "encoder", None), "layers") or model.main_input_name not in (
        "input_values",
        "input_features",
    ):
        raise ValueError(f"{name} is a {type(model).__name__}, which does not turn audio into hidden states")
    return model


def _mert_as_hubert(settings: Mapping[str, Any]) -> dict[str, Any]:
    """MERT (Li et al. 2023, arXiv:2306.00107) is HuBERT for music; its own code differs in what these two switch on."""
    for switch in ("feature_extractor_cqt", "deepnorm"):
        if settings.get(switch):
            raise ValueError(
                f"this MERT model has {switch}=true, which only its own code can do, and that is never run: "
                f"use m-a-p/MERT-v1-95M or MERT-v1-330M"
            )
    return {key: value for key, value in settings.items() if key not in ("model_type", "auto_map", "architectures")}


def _checked_layer(layer: int, num_layers: int) -> int:
    if not -num_layers - 1 <= layer <= num_layers:
        raise ValueError(
            f"layer {layer} must lie between {-num_layers - 1} and {num_layers}: the model has {num_layers} layers"
        )
    return layer % (num_layers + 1)
