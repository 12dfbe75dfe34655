"""Audio to semantic tokens: what is said or played, with little of how it sounds. Features of a frozen model, and k-means.

Clips of a padded batch are cut to their lengths and those of one length tokenized together, so that a batch gives what
single clips give. Ids are -1 past the end of a clip, and their number is what the whole width of the batch gives.

Letters: b clips, g clips of one length, n samples, t tokens, k groups.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor, nn

from helicon.models.semantic.features import (
    NEEDLESS,
    Features,
    MelFeatures,
    Preprocessing,
    PretrainedFeatures,
    WaveInput,
)
from helicon.models.semantic.kmeans import KMeans, KMeansReport, Progress, read_centroids
from helicon.nn.frozen import Frozen, by_length, cut_by_length, pretrained_name, read_model, read_pretrained
from helicon.nn.network import Network
from helicon.nn.resample import resample, resampled_length

Lengths = Int[Tensor, " b"]


@runtime_checkable
class SemanticTokenizer(Protocol):
    """What a model asks of whatever gives it semantic tokens."""

    sample_hz: int
    downsample_factor: int  # samples a frame, which is `groups` tokens
    codebook_size: int  # different tokens
    groups: int

    def code_lengths(self, lengths: Lengths) -> Lengths:
        """Tokens of clips of so many samples (at `sample_hz`)."""
        ...

    def __call__(
        self,
        wav_input: Float[Tensor, "b n"],
        flatten: bool = True,
        input_sample_hz: int | None = None,
        lengths: Lengths | None = None,
    ) -> Int[Tensor, "b t"] | Int[Tensor, "b t k"]: ...


class WaveTokenizer(Network):
    """What tokenizers share: rates, lengths, groups."""

    sample_hz: int
    downsample_factor: int
    codebook_size: int
    groups: int = 1
    least: int  # samples that give a token
    seq_len_multiple_of: int

    def code_lengths(self, lengths: Lengths) -> Lengths:
        return self._num_frames(self._whole(lengths)) * self.groups

    @torch.compiler.disable
    def forward(
        self,
        wav_input: Float[Tensor, "b n"],
        flatten: bool = True,
        input_sample_hz: int | None = None,
        lengths: Lengths | None = None,
    ) -> Int[Tensor, "b t"] | Int[Tensor, "b t k"]:
        """Ids of audio at `input_sample_hz` (the tokenizer's own rate by default), in whose samples `lengths` count.

        With `flatten` the groups of a frame follow one another, each with ids of its own, up to `codebook_size` in all;
        without, they are a dimension, and count from 0 each.
        """
        width = resampled_length(wav_input.shape[-1], input_sample_hz or self.sample_hz, self.sample_hz)
        ids = by_length(
            wav_input,
            lengths,
            lambda cut: self._ids(self._prepared(cut, input_sample_hz)),
            size=self._num_frames(self._whole(width)),
            fill=-1,
            least=self._least(input_sample_hz),
        )
        frames = rearrange(ids, "b k t -> b t k")
        if not flatten:
            return frames
        offsets = torch.arange(self.groups, device=ids.device) * (self.codebook_size // self.groups)
        return rearrange(torch.where(frames < 0, frames, frames + offsets), "b t k -> b (t k)")

    def _least(self, input_sample_hz: int | None) -> int:
        """The shortest clip that gives a token, in samples of its own rate."""
        least = -(-self.least // self.seq_len_multiple_of) * self.seq_len_multiple_of
        return 1 + (least - 1) * (input_sample_hz or self.sample_hz) // self.sample_hz

    def _prepared(self, clips: Float[Tensor, "g n"], input_sample_hz: int | None) -> Float[Tensor, "g m"]:
        clips = resample(clips.float(), input_sample_hz or self.sample_hz, self.sample_hz)
        return clips[:, : self._whole(clips.shape[-1])]

    def _whole(self, length: Any) -> Any:
        """Samples that are used: a multiple of `seq_len_multiple_of`."""
        return length // self.seq_len_multiple_of * self.seq_len_multiple_of

    def _num_frames(self, length: Any) -> Any:
        """Of a clip of so many samples: a number, or a tensor of them."""
        raise NotImplementedError

    def _ids(self, clips: Float[Tensor, "g n"]) -> Int[Tensor, "g k t"]:
        raise NotImplementedError


class KmeansTokenizer(WaveTokenizer):
    """The nearest cluster of each frame of features. Derived classes say which features, and what is saved of them."""

    features: Features
    kmeans: KMeans

    def _hold(self, features: Features, codebook_size: int, seq_len_multiple_of: int | None) -> None:
        self.features = features
        self.kmeans = KMeans(features.dim, codebook_size)
        self.codebook_size, self.seq_len_multiple_of = codebook_size, _checked_multiple(seq_len_multiple_of)
        self.sample_hz, self.downsample_factor = features.sample_hz, features.downsample_factor
        self.least = features.least

    def fit(
        self,
        waves: Iterable[tuple[Tensor, Tensor | None]],
        *,
        num_frames: int,
        seed: int = 0,
        reading: Progress | None = None,
        clustering: Progress | None = None,
    ) -> KMeansReport:
        """Fits the clusters to the first `num_frames` frames of features of batches `[b, n]` and their lengths."""
        frames = torch.empty(0, self.features.dim)  # grows: there may be far less audio than is asked for
        count = 0
        for wave, lengths in waves:
            if (wave.shape[-1] if lengths is None else int(lengths.max())) < self._least(None):
                continue
            for _, cut in cut_by_length(wave.to(self.kmeans.centroids.device), lengths, self._least(None)):
                found = self.features(self._prepared(cut, None)).flatten(0, 1)[: num_frames - count]
                if count + len(found) > len(frames):
                    room = min(num_frames, 2 * (count + len(found))) - count
                    frames = torch.cat((frames[:count], torch.empty(room, self.features.dim)))
                frames[count : count + len(found)] = found.cpu()
                count += len(found)
            if reading is not None:
                reading(count, num_frames)
            if count == num_frames:
                break
        self.source = self.source_sha256 = None  # it is not what it was loaded from any more
        return self.kmeans.fit(frames[:count], seed=seed, progress=clustering)

    def _num_frames(self, length: Any) -> Any:
        return self.features.num_frames(length)

    def _ids(self, clips: Float[Tensor, "g n"]) -> Int[Tensor, "g 1 t"]:
        return self.kmeans(self.features(clips))[:, None]


class MelKmeans(KmeansTokenizer):
    """Clusters of log-mel frames, 50 a second: the default, which needs no pretrained model. Fit it before use.

    Made by `helicon fit-kmeans`, read by `helicon.load`.
    """

    def __init__(self, codebook_size: int = 500, seq_len_multiple_of: int | None = None):
        super().__init__()
        self._hold(MelFeatures(), codebook_size, seq_len_multiple_of)


class HubertWithKmeans(KmeansTokenizer):
    """Clusters of the hidden states of HuBERT, or of any model `PretrainedFeatures` can read.

    Arguments:
        checkpoint_path       folder or hub name of the model, which stays where it is: saved are its name and fingerprint
        kmeans_path           the clusters: a folder of `helicon fit-kmeans`, or a safetensors file of centroids
        target_sample_hz      checked against the model's rate where it is given (audio of another is resampled)
        seq_len_multiple_of   samples beyond a multiple of this are left out
        output_layer          whose hidden states, as transformers counts them: 9 is what leaves the ninth layer
        codebook_size         instead of `kmeans_path`: so many clusters, yet to be fitted
    """

    features: PretrainedFeatures

    def __init__(
        self,
        checkpoint_path: str | Path,
        kmeans_path: str | Path | None = None,
        target_sample_hz: int | None = None,
        seq_len_multiple_of: int | None = None,
        output_layer: int = 9,
        codebook_size: int | None = None,
    ):
        super().__init__()
        if (kmeans_path is None) == (codebook_size is None):
            raise ValueError(
                "give kmeans_path, the clusters that `helicon fit-kmeans` made, or codebook_size, to fit so many"
            )
        clusters = None if kmeans_path is None else read_centroids(kmeans_path)
        features = PretrainedFeatures(checkpoint_path, output_layer)
        _check_rate(target_sample_hz, features.sample_hz, features.backbone.name)
        size = codebook_size if clusters is None else len(clusters[0])
        assert size is not None
        self._hold(features, size, seq_len_multiple_of)
        if clusters is not None:
            self._take(*clusters, str(kmeans_path))
        # What a saved tokenizer needs to be built again: its own weights hold the clusters.
        self.arguments |= {
            "checkpoint_path": features.backbone.name,
            "kmeans_path": None,
            "codebook_size": size,
        }

    def _take(self, centroids: Float[Tensor, "c d"], fitted_on: Tensor | None, path: str) -> None:
        own = self.features
        if centroids.shape[1] != own.dim:
            raise ValueError(
                f"the clusters at {path} have {centroids.shape[1]} features, and {own.backbone.name} has {own.dim}"
            )
        if fitted_on is not None and not torch.equal(fitted_on, own.backbone.fingerprint):
            raise ValueError(
                f"the clusters at {path} are of another model or layer than layer {own.layer} of {own.backbone.name}: "
                f"give those they were fitted to, or fit new ones with `helicon fit-kmeans`"
            )
        self.kmeans.centroids.copy_(centroids)

    def load_own_state(self, state: Mapping[str, Tensor]) -> None:
        self.features.backbone.check(state.get("features.backbone.fingerprint"))
        super().load_own_state(state)


class Wav2Vec2Quantizer(WaveTokenizer):
    """The codes that wav2vec 2.0 was trained to predict: its own quantizer, two groups of 320 a frame, 50 frames a second.

    `checkpoint_path` is the folder or hub name of a `Wav2Vec2ForPreTraining` model (facebook/wav2vec2-base). The other
    arguments are those of `HubertWithKmeans`.
    """

    def __init__(
        self,
        checkpoint_path: str | Path,
        target_sample_hz: int | None = None,
        seq_len_multiple_of: int | None = None,
    ):
        super().__init__()
        from transformers import AutoConfig, Wav2Vec2ForPreTraining

        name = pretrained_name(checkpoint_path)
        found = read_pretrained(
            AutoConfig.from_pretrained, name, "wav2vec 2.0 model", trust_remote_code=False
        ).model_type
        if found != "wav2vec2":
            raise ValueError(f"{name} is a model of type {found!r}, which has no quantizer: use HubertWithKmeans")
        model: Any = read_model(Wav2Vec2ForPreTraining, name, "wav2vec 2.0 model with its quantizer", needless=NEEDLESS)
        self.input = WaveInput(Preprocessing.of(name), model.config)
        _check_rate(target_sample_hz, self.input.sample_hz, name)
        self.sample_hz, self.downsample_factor = self.input.sample_hz, self.input.downsample_factor
        self.least, self.seq_len_multiple_of = self.input.least, _checked_multiple(seq_len_multiple_of)
        self.groups = model.config.num_codevector_groups
        self.codebook_size = self.groups * model.config.num_codevectors_per_group
        # The quantizer reads what the convolutions make of audio: the transformer above them is not needed.
        used = {
            "convolutions": model.wav2vec2.feature_extractor,
            "projection": model.wav2vec2.feature_projection,
            "quantizer": model.quantizer,
        }
        self.backbone = Frozen(nn.ModuleDict(used), name, self.input.identity)
        self.arguments["checkpoint_path"] = name

    def load_own_state(self, state: Mapping[str, Tensor]) -> None:
        self.backbone.check(state.get("backbone.fingerprint"))

    def _num_frames(self, length: Any) -> Any:
        return self.input.num_frames(length)

    def _ids(self, clips: Float[Tensor, "g n"]) -> Int[Tensor, "g k t"]:
        with self.backbone.undisturbed() as parts:
            frames = rearrange(parts["convolutions"](self.input(clips)), "g d t -> g t d")
            _, normalized = parts["projection"](frames)
            logits = parts["quantizer"].weight_proj(normalized)
            return rearrange(logits, "g t (k v) -> g k t v", k=self.groups).argmax(dim=-1)


FairseqVQWav2Vec = Wav2Vec2Quantizer  # where other packages read a fairseq model, whose file (a pickle) is refused


def _checked_multiple(multiple: int | None) -> int:
    if multiple is not None and multiple < 1:
        raise ValueError(f"seq_len_multiple_of={multiple}: it must be at least 1")
    return multiple or 1


def _check_rate(given: int | None, own: int, name: str) -> None:
    if given not in (None, own):
        raise ValueError(
            f"target_sample_hz={given} is not the rate of {name}, {own}: leave it out (audio of any rate is resampled, "
            f"with input_sample_hz=...)"
        )
