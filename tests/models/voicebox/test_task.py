"""What a batch of speech becomes: features and tokens, the loss and what it weighs, validation that is always the same, samples."""

from pathlib import Path
from typing import Any

import pytest
import soundfile
import torch
from torch import Tensor

from helicon.data.synthetic_speech import PHONEMES
from helicon.engine.task import Batch
from helicon.models.voicebox.data import SpeechSource, collate_speech, training_speech
from helicon.models.voicebox.durations import DurationPredictor
from helicon.models.voicebox.features import MelVoco
from helicon.models.voicebox.flow import ConditionalFlowMatcherWrapper
from helicon.models.voicebox.infilling import copied, middle_span
from helicon.models.voicebox.model import VoiceBox
from helicon.models.voicebox.task import MAX_SHOWN, VoiceBoxTask, rounded_up
from helicon.models.voicebox.text import CharacterTokenizer, PhonemeInventory
from helicon.models.voicebox.vocoder import Vocoder
from models.audiolm.tiny import CONDITIONS, stage_with_codec

HZ = 8000
MEL: dict[str, Any] = {"n_mels": 12, "sampling_rate": HZ, "n_fft": 256, "hop_length": 128}
SIZES: dict[str, Any] = {
    "dim": 16,
    "depth": 2,
    "heads": 2,
    "dim_head": 8,
    "dim_cond_emb": 8,
    "text_depth": 1,
    "num_register_tokens": 1,
    "conv_pos_embed_kernel_size": 5,
}
SHORT = {"syllables": [1, 2]}


def network(tokenizer: Any = "characters", space: Any = None, seed: int = 0, **options: Any) -> Any:
    """Every weight random: what starts at zero would hide mistakes. `tokenizer` is "characters", "phonemes" or None."""
    torch.manual_seed(seed)
    reader = {"characters": CharacterTokenizer(), "phonemes": PhonemeInventory(list(PHONEMES))}.get(tokenizer)
    if reader is not None:
        options["num_cond_tokens"] = reader.num_tokens
    voicebox = VoiceBox(audio_enc_dec=MelVoco(**MEL) if space is None else space, **SIZES | options)
    with torch.no_grad():
        for parameter in voicebox.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.2)
    return ConditionalFlowMatcherWrapper(voicebox, tokenizer=reader)


def batch_of(model: Any, count: int = 3, **options: Any) -> Batch:
    source = training_speech("synthetic", num_samples=8, speech=SHORT)
    data = source.at(model.audio_enc_dec, **options)
    return collate_speech([data[index] for index in range(count)])


def spoken(**changes: Any) -> tuple[VoiceBoxTask, Batch]:
    model = network(**changes)
    return VoiceBoxTask(model), batch_of(model)


def with_durations() -> tuple[VoiceBoxTask, Batch]:
    model = network("phonemes", alignment="frames")
    return VoiceBoxTask(model), batch_of(model, inventory=model.tokenizer, names=("phonemes", "durations"))


def from_features() -> tuple[VoiceBoxTask, Batch]:
    task, batch = spoken()
    features, lengths = task.features(batch)
    return task, {"features": features, "feature_lengths": lengths, "texts": batch["texts"]}


def from_ids() -> tuple[VoiceBoxTask, Batch]:
    model = network(None, num_cond_tokens=5, alignment="frames")
    batch = batch_of(model)
    return VoiceBoxTask(model), {**batch, "semantic_token_ids": torch.tensor([[0, 1, 2], [4, 3, -1], [2, -1, -1]])}


def wordless() -> tuple[VoiceBoxTask, Batch]:
    return spoken(tokenizer=None, condition_on_text=False)


EACH = {"texts": spoken, "durations": with_durations, "features": from_features, "ids": from_ids, "wordless": wordless}
each = pytest.mark.parametrize("build", EACH.values(), ids=EACH.keys())


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"sample_steps": 0}, "^sample_steps=0 must be at least 1"),
        ({"sample_cond_scale": float("nan")}, "^sample_cond_scale=nan must be a finite number"),
    ],
)
def test_samples_that_cannot_be_made_are_refused_before_anything_is_learned(
    options: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ValueError, match=sentence):
        VoiceBoxTask(network(), **options)


@each
def test_a_step_reads_tensors_alone_and_has_a_gradient(build: Any) -> None:
    task, batch = build()
    read = task.read(batch)
    assert all(isinstance(value, Tensor) for value in read.values())
    loss = task.forward(read)
    loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in task.model.voicebox.parameters())
    assert task.units(read) == read["features"].shape[0] * read["features"].shape[1]


@each
def test_a_batch_weighs_its_hidden_frames(build: Any) -> None:
    """So that unequal micro-batches make the gradient of all their frames together."""
    task, batch = build()
    task.model.eval()
    read = task.read(batch)
    assert task.weight(read) == read["hidden"].sum() > 0
    assert not (read["hidden"] & ~read["mask"]).any(), "padding is not learned from"
    rows = [{name: value[row : row + 1] for name, value in read.items()} for row in range(3)]
    together = sum(task.weight(row) * task.forward(row) for row in rows) / task.weight(read)
    torch.testing.assert_close(task.forward(read), together, rtol=1e-4, atol=1e-5)


@each
def test_frames_added_to_have_few_shapes_change_nothing(build: Any) -> None:
    task, batch = build()
    task.model.eval()
    torch.manual_seed(1)
    plain = task.read(batch)
    task.has_few_shapes = True
    torch.manual_seed(1)
    read, n = task.read(batch), plain["features"].shape[1]
    assert read["features"].shape[1] == read["mask"].shape[1] == rounded_up(n) > n
    if "ids" in read:
        assert read["ids"].shape[1] == 64, "and of tokens there are few shapes, too"
    assert torch.equal(read["noise"][:, :n], plain["noise"]), "what is random is the same"
    torch.testing.assert_close(task.forward(read), task.forward(plain), rtol=1e-4, atol=1e-5)
    padded = task.validate(dict(batch))
    task.has_few_shapes = False
    again = task.validate(dict(batch))
    torch.testing.assert_close(padded.total, again.total, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(dict(padded.parts), dict(again.parts), rtol=1e-4, atol=1e-5)


def test_sizes_are_few_and_little_is_added() -> None:
    sizes = {rounded_up(count) for count in range(1, 2049)}
    assert all(count <= rounded_up(count) <= max(count + 63, 1.25 * count) for count in range(1, 5000))
    assert len(sizes) == 16 and rounded_up(1024) == 1024 and rounded_up(64) == 64


def test_frames_without_padding_need_no_mask() -> None:
    task, batch = from_features()
    del batch["feature_lengths"]
    assert "mask" not in task.read(batch)
    task.has_few_shapes = True
    read = task.read(batch)
    assert read["mask"].sum() == batch["features"].shape[0] * batch["features"].shape[1], "what was added is no frame"


def test_phonemes_stand_where_they_are_said() -> None:
    task, batch = with_durations()
    framed = task.framed(batch)
    assert framed.ids is not None and framed.ids.shape == framed.features.shape[:2]
    frame_hz = task.model.frame_hz
    for row, length in enumerate(framed.lengths.tolist()):
        ends = batch["durations"][row].cumsum(0) * frame_hz
        middles = torch.arange(length) + 0.5
        said = batch["phonemes"][row][
            torch.searchsorted(ends, middles).clamp(max=(batch["phonemes"][row] >= 0).sum() - 1)
        ]
        edges = (middles[:, None] - ends).abs().amin(dim=1) < 1  # a frame may begin in one and end in the other
        assert torch.equal(framed.ids[row, :length][~edges], said[~edges]) and (framed.ids[row, length:] == -1).all()


def test_semantic_tokens_are_heard_by_the_frozen_network() -> None:
    stage = stage_with_codec("semantic", options=CONDITIONS["text"])
    voicebox = VoiceBox(audio_enc_dec=MelVoco(**MEL), num_cond_tokens=stage.wav2vec.codebook_size, **SIZES)
    task = VoiceBoxTask(ConditionalFlowMatcherWrapper(voicebox, text_to_semantic=stage))
    assert set(task.frozen) == {"audio_enc_dec", "wav2vec"}
    batch = batch_of(task.model)
    ids = task.framed(batch).ids
    assert ids is not None and torch.equal(
        ids, stage.wav2vec(batch["audio"], lengths=batch["audio_lengths"], input_sample_hz=HZ)
    )


def test_samples_that_do_not_tell_what_is_said_are_refused() -> None:
    task, batch = spoken()
    del batch["texts"]
    with pytest.raises(
        ValueError, match="learns what is said, and the samples do not tell: say where their texts are with captions"
    ):
        task.read(batch)


# ---------------------------------------------------------------------- validation


@each
def test_validation_is_always_the_same(build: Any) -> None:
    losses = []
    for seed in (1, 2):
        task, batch = build()
        task.model.train()
        torch.manual_seed(seed)
        loss = task.validate(batch)
        losses.append([task.weight(batch), loss.total, *loss.parts.values()])
        assert task.model.training, "the mode is the loop's"
    assert torch.equal(*(torch.stack([value.float() for value in each]) for each in losses))


def test_batches_have_randomness_of_their_own_which_the_seed_chooses() -> None:
    model = network()
    data = training_speech("synthetic", num_samples=8, speech=SHORT).at(model.audio_enc_dec)
    one, other = (collate_speech([data[index] for index in rows]) for rows in ((0, 1), (2, 3)))
    noise = lambda task, batch: task.fixed(dict(batch))[1]["noise"].flatten()[:50]
    task = VoiceBoxTask(model)
    assert torch.equal(noise(task, one), noise(task, one))
    assert not torch.equal(noise(task, one), noise(task, other))
    assert not torch.equal(noise(task, one), noise(VoiceBoxTask(model, seed=1), one))


def test_what_is_validated_is_the_error_of_a_guess_beside_that_of_copying() -> None:
    """A network that says 0 guesses noise."""
    task, batch = spoken()
    torch.nn.init.zeros_(task.model.voicebox.to_velocity.weight)
    task.model.fit_normalisation(task.features(batch)[0])
    loss = task.validate(batch)
    framed, drawn = task.fixed(batch)
    clean, span = task.model.normalise(framed.features), middle_span(framed.lengths, framed.features.shape[1])
    torch.testing.assert_close(loss.parts["infilling"], (clean - drawn["noise"])[span].square().mean())
    torch.testing.assert_close(
        loss.parts["copying"], (copied(clean, span, framed.is_frame) - clean)[span].square().mean()
    )
    torch.testing.assert_close(loss.total, (clean - drawn["noise"])[drawn["hidden"]].square().mean())
    assert drawn["keep"].all(), "text and context are always there"


# ---------------------------------------------------------------------- who is trained, and what is shown


def test_a_stage_is_neither_trained_nor_saved() -> None:
    vocoder = Vocoder(**MEL, dim=8, depth=1, discr_periods=(), discr_windows=())
    task, batch = spoken(space=MelVoco(**MEL, vocoder=vocoder))
    foreign = {id(parameter) for parameter in vocoder.parameters()}
    assert not any(id(p) in foreign for one in task.networks.values() for p in one.parameters())
    assert not any("vocoder" in name for name in task.model.own_state())
    task.forward(task.read(batch)).backward()
    assert all(parameter.grad is None for parameter in vocoder.parameters())


@pytest.mark.parametrize("build", [with_durations, from_features])
def test_samples_are_spoken_and_infilled(build: Any, tmp_path: Path) -> None:
    task, batch = build()
    task.sample_steps = 1
    task.model.fit_normalisation(task.features(batch)[0])
    samples = task.sample(batch, seed=3)
    assert samples is not None
    files = task.present(batch, {"online": samples})
    names = [f"{n:02d}-{name}.wav" for n in range(3) for name in ("original", "online-spoken", "online-infilled")]
    assert {*names, "spectrograms.png"} <= files.keys() and ("texts.txt" in files) == ("texts" in batch)
    for name, write in files.items():
        write(tmp_path / name)
    lengths = task.framed(batch).lengths * MEL["hop_length"]
    for number, length in enumerate(lengths.tolist()):
        assert soundfile.info(tmp_path / f"{number:02d}-online-spoken.wav").frames == length
        assert abs(soundfile.info(tmp_path / f"{number:02d}-original.wav").frames - length) < MEL["hop_length"]


@pytest.mark.parametrize("has_predictor", [False, True])
def test_a_text_of_more_tokens_than_frames_is_cut_in_samples_as_in_learning(has_predictor: bool) -> None:
    sizes = {"dim": 8, "depth": 1, "heads": 1, "dim_head": 8, "dim_phoneme_emb": 8}
    predictor = DurationPredictor(tokenizer=PhonemeInventory(list(PHONEMES)), **sizes) if has_predictor else None
    model = ConditionalFlowMatcherWrapper(
        network().voicebox, tokenizer=CharacterTokenizer(), duration_predictor=predictor
    )
    task, batch = VoiceBoxTask(model, sample_steps=1), batch_of(model)
    batch["texts"][1] = "so be it " * 30
    framed = task.framed(batch)
    assert framed.ids is not None
    counts, lengths = (framed.ids >= 0).sum(dim=1), framed.lengths
    assert counts[1] == lengths[1] and counts[0] == len(batch["texts"][0]) < lengths[0]
    whole = {**task.fixed(batch)[1], "ids": model.tokenize(batch["texts"])}
    torch.testing.assert_close(task.forward(whole), task.forward(task.fixed(batch)[1]), rtol=1e-4, atol=1e-5)
    samples = task.sample(batch, seed=0)
    assert samples is not None and samples["spoken"].shape == samples["infilled"].shape


def test_waves_with_channels_are_no_features() -> None:
    task, _ = spoken()
    sentence = r"features of 2000 numbers a frame, and this VoiceBox takes 12 .dim_in.; waves are .b, n., one channel"
    with pytest.raises(ValueError, match=sentence):
        task.read({"features": torch.randn(2, 1, 2000), "texts": ["so", "be"]})


def test_a_few_sounds_are_shown() -> None:
    model = network()
    task = VoiceBoxTask(model, sample_steps=1)
    own = model.evaluator
    samples = task.sample(batch_of(model, 6), seed=0)
    assert model.evaluator is own
    assert samples is not None and len(samples["spoken"]) == MAX_SHOWN < 6


def test_features_alone_cannot_be_heard() -> None:
    torch.manual_seed(0)
    model = ConditionalFlowMatcherWrapper(VoiceBox(dim_in=3, condition_on_text=False, **SIZES))
    task, batch = VoiceBoxTask(model), {"features": torch.randn(2, 9, 3)}
    assert task.sample(batch, 0) is None and task.present(batch, {"online": None}) == {}
    assert task.validate(batch).total.isfinite()


def test_a_source_may_hold_features() -> None:
    data = [{"features": torch.randn(n, 3), "phonemes": torch.arange(n // 2)} for n in (5, 8)]
    read = SpeechSource(data).at(VoiceBox(dim_in=3, num_cond_tokens=9, **SIZES))
    batch = collate_speech([read[0], read[1]])
    assert batch["feature_lengths"].tolist() == [5, 8] and batch["phonemes"].tolist() == [[0, 1, -1, -1], [0, 1, 2, 3]]
    with pytest.raises(ValueError, match="has no audio_enc_dec to turn sounds into features"):
        training_speech("synthetic").at(VoiceBox(dim_in=3, num_cond_tokens=9, **SIZES))
