"""MusicLM really learns: what it makes has the pitch and the direction its caption names, though its stages never read a text."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import helicon
from helicon import registry
from helicon.config import load_recipe
from helicon.data.synthetic_sounds import SyntheticSounds
from helicon.data.tokenize import tokenize
from helicon.metrics.audio import describe_sound
from helicon.models.audiolm.data import AudioTokenizer, training_audio
from helicon.models.audiolm.pipeline import AudioLM
from helicon.models.musiclm.conditioning import MuLaNEmbedQuantizer
from helicon.models.musiclm.generate import MusicLM
from helicon.models.musiclm.mulan import MuLaN
from helicon.models.musiclm.trainers import MuLaNTrainer
from helicon.models.semantic.tokenizer import MelKmeans
from models.musiclm.tiny import HZ, PLAIN, audio_tower, text_tower

SECONDS, COUNT = 0.5, 1200
NOISE = 0.15  # while MuLaN learns: what a small codec makes is not as clean as what it learned from
WORDS: dict[str, Any] = {"kinds": ["tone", "chirp"], "loudnesses": ["loud"], "held_out": [["chirp", "high"]]}
DATA = {"data_max_length_seconds": SECONDS, "num_samples": COUNT, "sounds": WORDS}
HOW_DRAWN: dict[str, Any] = {"top_p": 0.7, "filter_thres": None, "seed": 1}


def made_up(count: int, seed: int = 0) -> SyntheticSounds:
    words = {**WORDS, "held_out": [tuple(pair) for pair in WORDS["held_out"]]}
    return SyntheticSounds(count, HZ, SECONDS, seed, **words)


def train(recipe: str, folder: Path, *overrides: str) -> None:
    """A recipe of the demo, on these sounds and for fewer steps."""
    rarely = ("save_results_every=10000", "save_model_every=10000", "val_every=10000", "trainer.ema_beta=0.97")
    read = load_recipe(recipe, [*overrides, *rarely], sections=lambda name: registry.entries[name].recipe_sections())
    registry.build_trainer(read, results_folder=folder).train()


def learn_mulan(folder: Path, seed: int = 0) -> MuLaN:
    """One that tells the seven captions apart. (Decoupled, the loss of so few different ones leaves some of them in one place.)"""
    torch.manual_seed(seed)
    sizes = {"depth": 2, "dim_head": 16}
    towers = audio_tower(**sizes, **PLAIN, spec_aug_noise=NOISE), text_tower(**sizes)
    network = MuLaN(*towers, dim_latent=16, decoupled_contrastive_learning=False)
    MuLaNTrainer(
        network, [made_up(640)[index] for index in range(640)], num_train_steps=300, batch_size=32, lr=4e-3, scheduler="cosine",
        use_ema=False, valid_frac=0, seed=seed, results_folder=folder, tensorboard=False, save_results_every=10000,
    ).train()  # fmt: skip
    return network.eval()


def learned(home: Path) -> MusicLM:
    words = f"data.sounds={json.dumps(WORDS)}"
    train("soundstream/demo", home / "codec", words, "num_train_steps=400")
    waves = torch.stack([made_up(256)[index]["audio"] for index in range(256)])
    quantizer = MuLaNEmbedQuantizer(learn_mulan(home / "mulan"), 96, rq_num_quantizers=3, codebook_size=12)
    quantizer.fit([(waves, None)])
    quantizer.save_pretrained(home / "conditioner")
    clusters = MelKmeans(48)
    made_at_16k = SyntheticSounds(256, 16000, SECONDS, **{**WORDS, "held_out": [("chirp", "high")]})
    clusters.fit([(torch.stack([made_at_16k[index]["audio"] for index in range(256)]), None)], num_frames=6400)
    clusters.save_pretrained(home / "kmeans")
    networks = [helicon.load(home / name) for name in ("codec", "kmeans", "conditioner")]
    tokenizer = AudioTokenizer(networks[0], networks[1], conditioner=networks[2])
    tokenize(
        tokenizer.items(training_audio("synthetic", **DATA)),
        tokenizer,
        home / "tokens",
        source="synthetic",
        arguments=DATA,
    )
    for name, steps in {"semantic": 150, "delayed": 250}.items():
        below = [f"model.wav2vec={home / 'kmeans'}", f"model.audio_conditioner={home / 'conditioner'}"]
        below += [f"model.codec={home / 'codec'}"] if name == "delayed" else ["model.transformer.t5_name=null"]
        condition = ["model.transformer.has_condition=true", "model.transformer.cond_drop_prob=0.1"]
        train(
            f"audiolm/{name}-demo", home / name, *below, *condition, f"data.source={home / 'tokens'}", words,
            f"data.num_samples={COUNT}", f"num_train_steps={steps}",
        )  # fmt: skip
    stages = {
        f"{role}_transformer": helicon.load(home / name)
        for role, name in (("semantic", "semantic"), ("coarse", "delayed"))
    }
    return MusicLM(AudioLM(**stages))


def share_right(waves: list[Tensor], asked: SyntheticSounds) -> float:
    """Of sounds that have both the pitch and the direction of what was asked for."""
    pairs = [(describe_sound(wave, HZ), asked.attributes(index)) for index, wave in enumerate(waves)]
    return sum(heard.pitch == it.pitch and heard.direction == it.direction for heard, it in pairs) / len(pairs)


@pytest.mark.slow
def test_music_follows_its_caption(tmp_path: Path) -> None:
    """There are seven pairs of a pitch and a direction: chance is one in seven.

    Measured with the networks of this seed: MuLaN finds the caption of all 60 sounds and of 95 % of what the codec makes of them; of what
    is made of captions 85 to 95 % are right in three draws, of what is made without 2 to 7 %. (With another codec, which makes no
    high tones, it was 55 % of captions.)
    """
    music = learned(tmp_path)
    asked = made_up(60, seed=9)
    captions = [asked.attributes(index).caption for index in range(len(asked))]
    different = sorted({*captions})
    assert len(different) == 7
    waves = torch.stack([asked[index]["audio"] for index in range(len(asked))])
    with torch.no_grad():
        remade = music.audio_lm.codec.decode(music.audio_lm.codec.encode(waves)).flatten(1)
    for sounds in (waves, remade):
        heard = music.quantizer.latents(sounds)
        closest = (heard @ music.quantizer.latents(texts=different).T).argmax(dim=1).tolist()
        found = [different[place] == caption for place, caption in zip(closest, captions, strict=True)]
        assert sum(found) / len(found) >= 0.8
    assert share_right(music(captions, seconds=SECONDS, **HOW_DRAWN), asked) >= 0.6
    assert share_right(list(music.audio_lm(batch_size=60, seconds=SECONDS, **HOW_DRAWN)), asked) <= 0.3
    # MuLaN ranks sounds as they are heard: of six that were made of one caption and six of another, those of the caption come first.
    low, high = (next(caption for caption in captions if f"tone, {pitch}" in caption) for pitch in ("low", "high"))
    made = [*music([low] * 6 + [high] * 6, seconds=SECONDS, **HOW_DRAWN)]
    closeness = music.similarities(made, [low] * 12)
    assert closeness[:6].mean() > closeness[6:].mean() + 0.3
