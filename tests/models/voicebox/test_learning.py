"""One small VoiceBox, trained once on made-up speech, really learns: what it fills in, and what it says.

What it is judged on are utterances that it has never heard, of texts that it has never read.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from helicon.data.synthetic_speech import SyntheticSpeech
from helicon.engine.task import Batch
from helicon.metrics.speech import CHANCE, contour_accuracy
from helicon.models.voicebox.data import collate_speech, training_speech
from helicon.models.voicebox.infilling import copied, frame_error, interpolated, middle_span
from helicon.models.voicebox.task import VoiceBoxTask
from helicon.models.voicebox.trainers import VoiceBoxTrainer, build_voicebox

SPEECH: dict[str, Any] = {"voices": ["soprano"], "syllables": [2, 3]}
NUM_HEARD, NUM_JUDGED = 1200, 24
HOW: dict[str, Any] = {"seed": 1, "steps": 8}

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> VoiceBoxTrainer:
    """360 steps of 16 utterances, from features that are made beforehand."""
    torch.manual_seed(0)
    model = build_voicebox(
        {
            "alignment": "frames",
            "dim": 128,
            "depth": 4,
            "heads": 4,
            "dim_head": 32,
            "ff_mult": 2,
            "dim_cond_emb": 64,
            "text_depth": 2,
            "time_hidden_dim": 128,
            "num_register_tokens": 4,
            "conv_pos_embed_kernel_size": 15,
        },
        audio_enc_dec={"sampling_rate": 8000, "n_mels": 48, "n_fft": 512, "hop_length": 160},
        tokenizer={"characters": " aefikosu"},
    )
    data = training_speech("synthetic", num_samples=NUM_HEARD, speech=SPEECH).at(model.audio_enc_dec)
    samples = [data[index] for index in range(NUM_HEARD)]
    features = [{"features": model.features(one["audio"][None])[0][0], "texts": one["texts"]} for one in samples]
    trainer = VoiceBoxTrainer(
        model,
        dataset=features,
        num_train_steps=360,
        batch_size=16,
        optimizer="muon",
        optimizer_kwargs={"ns_steps": 3},
        lr=4e-3,
        warmup_steps=30,
        max_grad_norm=1.0,
        ema_beta=0.98,
        valid_frac=0.02,
        val_every=360,
        log_every=50,
        save_model_every=1000,
        save_results_every=1000,
        sample_steps=1,
        tensorboard=False,
        results_folder=Path(tmp_path_factory.mktemp("learning")) / "run",
    )
    trainer.train()
    return trainer


@pytest.fixture(scope="module")
def unseen(trainer: VoiceBoxTrainer) -> Batch:
    known = SyntheticSpeech(NUM_HEARD, 8000, **SPEECH)
    texts = {known.utterance(index).text for index in range(NUM_HEARD)}
    source = training_speech("synthetic", num_samples=200, seed=9, speech=SPEECH)
    data = source.at(trainer.unwrapped_cfm.audio_enc_dec)
    others = [sample for sample in map(data.__getitem__, range(60)) if sample["texts"] not in texts]
    return collate_speech(others[:NUM_JUDGED])


def test_what_is_filled_in_is_nearer_than_what_the_neighbours_tell(trainer: VoiceBoxTrainer, unseen: Batch) -> None:
    """Of 0.3 of each utterance, in its middle. In natural logarithms of mel magnitudes."""
    model, task = trainer.unwrapped_cfm, trainer.task
    assert isinstance(task, VoiceBoxTask)
    framed = task.framed(unseen)
    span = middle_span(framed.lengths, framed.features.shape[1])
    with trainer.inference():
        made = model.draw(
            cond=framed.features, cond_lengths=framed.lengths, cond_mask=span, texts=unseen["texts"], **HOW
        )
    ways = {
        "made": made.features,
        "copied": copied(framed.features, span, framed.is_frame),
        "interpolated": interpolated(framed.features, span, framed.is_frame),
    }
    error = {name: frame_error(found, framed.features, span).item() for name, found in ways.items()}
    assert torch.equal(made.features[~span], framed.features[~span]), "what was given stays"
    assert error["made"] < 0.7 * error["copied"] and error["made"] < 0.7 * error["interpolated"], error


def test_what_is_said_has_the_melody_that_its_text_spells(trainer: VoiceBoxTrainer, unseen: Batch) -> None:
    """The part of vowels that are heard, by their pitch alone: someone who guesses gets 0.2, and one who says something else no more."""
    model = trainer.unwrapped_cfm
    texts, hz = unseen["texts"], model.audio_enc_dec.sample_hz
    frames = model.audio_enc_dec.frame_lengths(unseen["audio_lengths"])
    waves = trainer.generate(texts=texts, lengths=frames, cond_scale=2.0, **HOW)
    sounds = [wave[:length] for wave, length in zip(waves, (frames * 160).tolist(), strict=True)]

    def accuracy(spelled: list[str]) -> float:
        heard = [contour_accuracy(wave, hz, text) for wave, text in zip(sounds, spelled, strict=True)]
        return sum(heard) / len(heard)

    right, wrong = accuracy(texts), accuracy([*texts[1:], *texts[:1]])
    assert right > 0.45 > 2 * CHANCE and wrong < 0.35, (right, wrong)
