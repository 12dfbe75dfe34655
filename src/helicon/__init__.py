"""Helicon: train generative media models, and make things with them.

Names are loaded when they are first used, so that `import helicon` stays light.
"""

import importlib
from typing import Any

__version__ = "0.1.0"

_home = {
    "load": "helicon.registry",
    "SoundStream": "helicon.models.soundstream.model",
    "AudioLMSoundStream": "helicon.models.soundstream.model",
    "MusicLMSoundStream": "helicon.models.soundstream.model",
    "SoundStreamTrainer": "helicon.models.soundstream.trainers",
    "EncodecWrapper": "helicon.models.soundstream.codecs",
    "DacCodec": "helicon.models.soundstream.codecs",
    "MimiCodec": "helicon.models.soundstream.codecs",
    "HubertWithKmeans": "helicon.models.semantic.tokenizer",
    "MelKmeans": "helicon.models.semantic.tokenizer",
    "Wav2Vec2Quantizer": "helicon.models.semantic.tokenizer",
    "FairseqVQWav2Vec": "helicon.models.semantic.tokenizer",
    "AudioLM": "helicon.models.audiolm.pipeline",
    "SemanticTransformer": "helicon.models.audiolm.transformers",
    "CoarseTransformer": "helicon.models.audiolm.transformers",
    "FineTransformer": "helicon.models.audiolm.transformers",
    "DelayedTransformer": "helicon.models.audiolm.transformers",
    "SemanticTransformerWrapper": "helicon.models.audiolm.wrappers",
    "CoarseTransformerWrapper": "helicon.models.audiolm.wrappers",
    "FineTransformerWrapper": "helicon.models.audiolm.wrappers",
    "DelayedTransformerWrapper": "helicon.models.audiolm.wrappers",
    "SemanticTransformerTrainer": "helicon.models.audiolm.trainers",
    "CoarseTransformerTrainer": "helicon.models.audiolm.trainers",
    "FineTransformerTrainer": "helicon.models.audiolm.trainers",
    "DelayedTransformerTrainer": "helicon.models.audiolm.trainers",
    "VQGanVAE": "helicon.models.muse.vqgan",
    "VQGanVAETrainer": "helicon.models.muse.trainers",
    "Transformer": "helicon.models.muse.transformer",
    "MaskGitTransformer": "helicon.models.muse.transformer",
    "TokenCritic": "helicon.models.muse.transformer",
    "SelfCritic": "helicon.models.muse.transformer",
    "MaskGit": "helicon.models.muse.maskgit",
    "MaskGitTrainer": "helicon.models.muse.trainers",
    "Muse": "helicon.models.muse.pipeline",
    "VoiceBox": "helicon.models.voicebox.model",
    "ConditionalFlowMatcherWrapper": "helicon.models.voicebox.flow",
    "DurationPredictor": "helicon.models.voicebox.durations",
    "MelVoco": "helicon.models.voicebox.features",
    "EncodecVoco": "helicon.models.voicebox.features",
    "CodecLatents": "helicon.models.voicebox.features",
    "Vocoder": "helicon.models.voicebox.vocoder",
    "CharacterTokenizer": "helicon.models.voicebox.text",
    "PhonemeTokenizer": "helicon.models.voicebox.text",
    "PhonemeInventory": "helicon.models.voicebox.text",
    "VoiceBoxTrainer": "helicon.models.voicebox.trainers",
    "DurationPredictorTrainer": "helicon.models.voicebox.duration_task",
    "VocoderTrainer": "helicon.models.voicebox.vocoder_task",
    "AudioSpectrogramTransformer": "helicon.models.musiclm.towers",
    "TextTransformer": "helicon.models.musiclm.towers",
    "MuLaN": "helicon.models.musiclm.mulan",
    "MuLaNTrainer": "helicon.models.musiclm.trainers",
    "MuLaNEmbedQuantizer": "helicon.models.musiclm.conditioning",
    "MusicLM": "helicon.models.musiclm.generate",
    "SoundIndex": "helicon.models.musiclm.search",
    "MeshAutoencoder": "helicon.models.meshgpt.autoencoder",
    "CompactMeshTokenizer": "helicon.models.meshgpt.compact",
    "MeshTransformer": "helicon.models.meshgpt.transformer",
    "MeshAutoencoderTrainer": "helicon.models.meshgpt.trainers",
    "MeshTransformerTrainer": "helicon.models.meshgpt.trainers",
    "write_mesh": "helicon.models.meshgpt.assemble",
    "DatasetFromTransforms": "helicon.data.mesh_data",
    "custom_collate": "helicon.data.mesh_data",
    "derive_face_edges_from_faces": "helicon.data.mesh",
    "ImageDataset": "helicon.data.image",
    "SoundDataset": "helicon.data.audio",
    "AudioDataset": "helicon.data.audio",
    "get_dataloader": "helicon.data.audio",
    "TokenCache": "helicon.data.tokens",
    "Network": "helicon.nn.network",
    "Task": "helicon.engine.task",
    "Trainer": "helicon.engine.trainer",
    "TrainerOptions": "helicon.engine.options",
}

__all__ = [*_home, "__version__"]

# Names of other packages that have no counterpart here, and what takes their place.
_optimizer = "the optimizer and its schedule are options of every trainer: optimizer, lr, wd, betas, warmup_steps, scheduler, max_grad_norm"
_tokenize = "helicon tokenize keeps the codes of meshes with their texts in one cache"
_instead = {
    "cache_face_edges_for_dataset": "leave the decorator out: edges are found where they are needed",
    "cache_text_embeds_for_dataset": f"leave the decorator out: {_tokenize}",
    "OptimizerWithWarmupSchedule": _optimizer,
    "get_optimizer": _optimizer,
    "AudioConditionerBase": "an audio_conditioner is a MuLaNEmbedQuantizer, or any torch module that is called with wavs= or texts= and namespace=",
    "TextToSemantic": "text_to_semantic is a SemanticTransformerWrapper with its wav2vec and unique_consecutive=False",
}


def __getattr__(name: str) -> Any:
    if name in _instead:  # (Of an AttributeError, `from helicon import ...` would not show the sentence.)
        raise ImportError(f"helicon has no {name}: {_instead[name]}")
    if name not in _home:
        raise AttributeError(f"module 'helicon' has no attribute {name!r}")
    return getattr(importlib.import_module(_home[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
