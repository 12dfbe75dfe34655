"""Tiny random models of transformers, written to disk."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

SHAPE: dict[str, Any] = {
    "hidden_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "intermediate_size": 20,
}
# Convolutions that make a frame of every 20 samples, and the first one of 30.
WAVES: dict[str, Any] = {
    **SHAPE,
    "conv_dim": (8, 8, 8),
    "conv_kernel": (10, 3, 2),
    "conv_stride": (5, 2, 2),
    "num_feat_extract_layers": 3,
    "num_conv_pos_embeddings": 6,
    "num_conv_pos_embedding_groups": 2,
}


def hubert() -> nn.Module:
    return transformers.HubertModel(transformers.HubertConfig(**WAVES))


def wav2vec2() -> nn.Module:
    config = transformers.Wav2Vec2Config(
        **WAVES,
        feat_extract_norm="layer",
        do_stable_layer_norm=True,
        num_codevectors_per_group=12,
        codevector_dim=8,
        proj_codevector_dim=8,
    )
    model = transformers.Wav2Vec2ForPreTraining(config)
    model.quantizer.weight_proj.weight.data.normal_()
    return model


def wavlm() -> nn.Module:
    return transformers.WavLMModel(
        transformers.WavLMConfig(**WAVES, num_buckets=8, max_bucket_distance=16, do_stable_layer_norm=True)
    )


def data2vec() -> nn.Module:
    return transformers.Data2VecAudioModel(transformers.Data2VecAudioConfig(**WAVES, conv_pos_kernel_size=3))


def w2v_bert() -> nn.Module:
    config = transformers.Wav2Vec2BertConfig(
        **SHAPE, feature_projection_input_dim=40, conv_depthwise_kernel_size=3, left_max_position_embeddings=8
    )
    return transformers.Wav2Vec2BertModel(config)


BUILDERS: dict[str, Callable[[], nn.Module]] = {
    "hubert": hubert,
    "wav2vec2": wav2vec2,
    "wavlm": wavlm,
    "data2vec": data2vec,
    "w2v_bert": w2v_bert,
}


def extractor(name: str) -> Any:
    if name == "w2v_bert":
        return transformers.SeamlessM4TFeatureExtractor(feature_size=20, num_mel_bins=20)
    return transformers.Wav2Vec2FeatureExtractor(do_normalize=name != "wavlm")


def write(name: str, folder: Path, seed: int = 0) -> Path:
    torch.manual_seed(seed)
    model = BUILDERS[name]()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(3)  # fresh weights are so small that every frame looks the same
    model.save_pretrained(folder)
    extractor(name).save_pretrained(folder)
    return folder


def write_mert(folder: Path, **settings: Any) -> Path:
    """A HuBERT model as MERT's files describe themselves."""
    write("hubert", folder)
    transformers.Wav2Vec2FeatureExtractor(sampling_rate=24000).save_pretrained(folder)
    path = folder / "config.json"
    own = {
        "model_type": "mert_model",
        "auto_map": {"AutoModel": "modeling_MERT.MERTModel"},
        "feature_extractor_cqt": False,
    }
    path.write_text(json.dumps({**json.loads(path.read_text()), **own, "deepnorm": False, **settings}))
    return folder


def noise(*shape: int, seed: int = 7) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 0.1


def padded(lengths: Tensor, seed: int = 7) -> Tensor:
    """Clips of these lengths, with NaN where nobody may look."""
    audio = noise(len(lengths), int(lengths.max()), seed=seed)
    for row, length in enumerate(lengths.tolist()):
        audio[row, length:] = torch.nan
    return audio
