"""Towers of MuLaN on pretrained models: layers that are trained on top of a frozen model of `transformers`.

Letters: b batch, n samples or tokens, t frames, f bands, r rows and c columns of patches, d features, e features of a frozen model,
l layers.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from einops import reduce
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn import functional as F

from helicon.models.musiclm.towers import (
    AudioSpectrogramTransformer,
    Lengths,
    Pooled,
    PooledLayers,
    TextTransformer,
    Tower,
    mean_of,
    one_of,
)
from helicon.models.text.pretrained import PretrainedTextEncoder
from helicon.nn.frozen import Frozen, pretrained_name, read_model, read_pretrained
from helicon.nn.lengths import before
from helicon.nn.network import Network
from helicon.nn.transformer import Transformer

KALDI_WINDOW, KALDI_HOP, KALDI_FLOOR = 400, 160, 1.1920929e-07  # of the spectra AST was trained on


class PretrainedSpectrogramEncoder(Network):
    """A frozen AST of `transformers` by hub name or folder: waves to a vector for each of its columns of patches.

    Its spectra are Kaldi's, as its feature extractor makes them. It has a fixed number of positions, so shorter clips are filled up
    and longer ones refused; columns that lie beyond the end of a clip count for nothing.
    """

    filters: Tensor
    window: Tensor

    def __init__(self, name_or_folder: str | Path):
        super().__init__()
        from transformers import ASTFeatureExtractor, ASTModel
        from transformers.audio_utils import mel_filter_bank

        name = pretrained_name(name_or_folder)
        self.arguments["name_or_folder"] = name
        model: Any = read_model(ASTModel, name, "audio spectrogram transformer")
        extractor = read_pretrained(ASTFeatureExtractor.from_pretrained, name, "preprocessor")
        config = model.config
        self.sample_hz, self.dim = extractor.sampling_rate, config.hidden_size
        self.max_frames, self.mean, self.spread = config.max_length, extractor.mean, 2 * extractor.std
        self.normalizes = extractor.do_normalize
        self.stride = config.time_stride
        self.columns = (config.max_length - config.patch_size) // config.time_stride + 1
        filters = mel_filter_bank(  # in transforms of 512 samples
            257,
            config.num_mel_bins,
            20,
            self.sample_hz // 2,
            self.sample_hz,
            None,
            "kaldi",
            triangularize_in_mel_space=True,
        )
        self.register_buffer("filters", torch.from_numpy(filters).float(), persistent=False)
        self.register_buffer("window", torch.hann_window(KALDI_WINDOW, periodic=False), persistent=False)
        settings = {"mean": self.mean, "spread": self.spread, "normalizes": self.normalizes, "hz": self.sample_hz}
        self.backbone = Frozen(model, name, settings)

    @property
    def max_samples(self) -> int:
        """Of the longest clip."""
        return self.max_frames * KALDI_HOP + KALDI_WINDOW - KALDI_HOP

    @torch.no_grad()
    def encode(
        self, waves: Float[Tensor, "b n"], lengths: Lengths | None = None
    ) -> tuple[Float[Tensor, "b c e"], Bool[Tensor, "b c"]]:
        """A vector for each column of patches, the mean over its rows; and which columns begin before the end of the clip."""
        if lengths is None:
            lengths = torch.full((len(waves),), waves.shape[1], device=waves.device)
        frames = ((lengths - KALDI_WINDOW) // KALDI_HOP + 1).clamp(min=0)
        with self.backbone.undisturbed() as model:
            states = model(self._spectra(waves.float(), frames)).last_hidden_state
        # (In front stand two tokens for classes.)
        columns = reduce(states[:, 2:], "b (r c) e -> b c e", "mean", c=self.columns)
        return columns, before(-(-frames.clamp(min=1) // self.stride), self.columns)

    forward = encode

    def _spectra(self, waves: Float[Tensor, "b n"], frames: Lengths) -> Float[Tensor, "b t f"]:
        missing = self.max_samples - waves.shape[1]
        if missing <= -KALDI_HOP:
            raise ValueError(
                f"a clip of {waves.shape[1]} samples is longer than the {self.max_frames} frames of {self.backbone.name}: "
                f"cut it to {waves.shape[1] + missing} samples"
            )
        pieces = F.pad(waves, (0, missing)).unfold(-1, KALDI_WINDOW, KALDI_HOP)
        pieces = pieces - pieces.mean(dim=-1, keepdim=True)
        earlier = torch.cat((pieces[..., :1], pieces[..., :-1]), dim=-1)
        power = torch.fft.rfft((pieces - 0.97 * earlier) * self.window.float(), 512).abs().square()
        levels = (power @ self.filters.float()).clamp(min=KALDI_FLOOR).log()
        levels = torch.where(before(frames, self.max_frames)[..., None], levels, 0.0)
        return (levels - self.mean) / self.spread if self.normalizes else levels

    def load_own_state(self, state: Mapping[str, Tensor]) -> None:
        self.backbone.check(state.get("backbone.fingerprint"))


class PretrainedTower(Tower):
    """Layers that are trained on top of a frozen encoder, which is a stage: saved by name, and never trained."""

    encoder_class: ClassVar[type[Network]]
    encoder: Any

    def __init__(
        self,
        encoder: Network,
        dim: int,
        depth: int = 2,
        dim_head: int = 64,
        heads: int = 8,
        attn_dropout: float = 0.0,
        ff_dropout: float = 0.0,
        ff_mult: float = 4,
    ):
        super().__init__()
        if not isinstance(encoder, self.encoder_class):
            raise ValueError(
                f"a {type(self).__name__} stands on a {self.encoder_class.__name__}, not on a {type(encoder).__name__}"
            )
        self.dim, self.encoder = dim, encoder
        self.project = nn.Linear(self.encoder.dim, dim)
        self.transformer = Transformer(
            dim, depth, heads=heads, dim_head=dim_head, ff_mult=ff_mult, dropout=ff_dropout, attn_dropout=attn_dropout
        )

    def _summary_of_states(
        self, states: Float[Tensor, "b n e"], mask: Bool[Tensor, "b n"] | None, return_all_layers: bool
    ) -> Pooled | PooledLayers:
        return self._summary(self.project(states), mask, lambda tokens: mean_of(tokens, mask), return_all_layers)


class PretrainedTextTransformer(PretrainedTower):
    """On top of a frozen text encoder (T5, BERT and their kin), and the mean over its tokens."""

    encoder_class = PretrainedTextEncoder

    def read_texts(self, texts: Sequence[str], multiple_of: int = 1) -> dict[str, Tensor]:
        """Texts as the tensors `forward` takes: the frozen encoder's embeddings."""
        read = self.encoder.encode(texts)
        missing = -read.mask.shape[1] % multiple_of
        return {
            "x": F.pad(read.embeddings, (0, 0, 0, missing)).to(self.device),
            "mask": F.pad(read.mask, (0, missing), value=False).to(self.device),
        }

    def forward(
        self,
        x: Float[Tensor, "b n e"] | None = None,
        raw_texts: Sequence[str] | None = None,
        mask: Bool[Tensor, "b n"] | None = None,
        return_all_layers: bool = False,
    ) -> Pooled | PooledLayers:
        """`x` are the encoder's embeddings, of which `mask` are real: all, where nothing is said."""
        x, mask = one_of(self, x, raw_texts, mask)
        return self._summary_of_states(x, mask, return_all_layers)


class PretrainedAudioTransformer(PretrainedTower):
    """On top of a frozen AST, and the mean over its columns."""

    encoder_class = PretrainedSpectrogramEncoder

    @property
    def sample_hz(self) -> int:
        return self.encoder.sample_hz

    @property
    def max_samples(self) -> int:
        return self.encoder.max_samples

    def forward(
        self,
        x: Float[Tensor, "b n"],
        force_no_patch_dropout: bool = False,
        return_all_layers: bool = False,
        *,
        lengths: Lengths | None = None,
        generator: torch.Generator | None = None,
    ) -> Pooled | PooledLayers:
        """As an `AudioSpectrogramTransformer` takes it, but that nothing is changed or left out in training."""
        columns, mask = self.encoder.encode(x, lengths)
        return self._summary_of_states(columns, mask, return_all_layers)


AudioTower = AudioSpectrogramTransformer | PretrainedAudioTransformer
TextTower = TextTransformer | PretrainedTextTransformer
