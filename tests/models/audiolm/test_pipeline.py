"""AudioLM from end to end: sound from nothing, from texts, from the beginning of a sound; saved, loaded, put together."""

import inspect
from pathlib import Path
from typing import Any

import pytest
import soundfile
import torch
from torch import Tensor, nn

from helicon.models.audiolm.pipeline import AudioLM
from helicon.models.audiolm.sounds import SoundMaker
from helicon.nn.decode import Decoder, Prompt
from helicon.nn.network import load_network
from models.audiolm.tiny import (
    BYTES,
    CONDITIONS,
    KINDS,
    SEMANTIC,
    TEXTS,
    chirps,
    codec,
    stage_with_codec,
    wav2vec,
)
from models.soundstream.tiny import HZ

FRAME = 40  # samples
CODEC = {"codebook_size": 16}
SIZES: dict[str, dict[str, Any]] = {
    "semantic": {},
    "coarse": {**CODEC, "num_coarse_quantizers": 2},
    "fine": {**CODEC, "num_coarse_quantizers": 2, "num_fine_quantizers": 1},
    "delayed": {**CODEC, "num_quantizers": 3},
}


def transformer(name: str, **options: Any) -> Any:
    """One that does not end a sound, so that its length is known."""
    network = KINDS[name].build(**{**SIZES[name], **options})
    with torch.no_grad():
        if name == "coarse":
            network.coarse.logit_weights[:, -1] = 0
            network.coarse.logit_weights[:, 0] *= 3
        if name == "delayed":
            network.logit_weights[:, -1] = 0
    return network.eval()


def audiolm(options: dict[str, Any] | None = None, is_delayed: bool = False, **more: Any) -> AudioLM:
    names = ["semantic", "delayed"] if is_delayed else ["semantic", "coarse", "fine"]
    built = [transformer(name, **(options or {})) for name in names]
    keywords = dict(zip(("semantic_transformer", "coarse_transformer", "fine_transformer"), built, strict=False))
    return AudioLM(**{**keywords, "wav2vec": wav2vec(), "codec": codec(), **more})


SHORT = {"seconds": 12 * FRAME / HZ, "temperature": 0.0}  # 12 frames, and nothing drawn at random


@pytest.mark.parametrize("is_delayed", [False, True])
def test_sound_from_nothing(is_delayed: bool) -> None:
    sound = audiolm(is_delayed=is_delayed)(batch_size=3, **SHORT)
    assert isinstance(sound, Tensor) and sound.shape == (3, 12 * FRAME) and torch.isfinite(sound).all()
    assert sound.abs().max() > 0 and not sound.requires_grad


@pytest.mark.parametrize("is_delayed", [False, True])
def test_the_stages_hand_their_tokens_on(is_delayed: bool) -> None:
    """The sound is that of the stages run one after the other."""
    model = audiolm(is_delayed=is_delayed)
    ids = model.semantic.generate(max_length=4, batch_size=2, temperature=0.0)  # 3 tokens of 20 ms, and one
    codes = model.coarse.generate(semantic_token_ids=ids, max_time_steps=12, temperature=0.0)
    if model.fine is not None:
        coarse = model.codec.decode(codes)[:, 0]
        torch.testing.assert_close(model(batch_size=2, **SHORT, return_coarse_generated_wave=True), coarse)
        codes = torch.cat((codes, model.fine.generate(coarse_token_ids=codes, temperature=0.0)), dim=-1)
    torch.testing.assert_close(model(batch_size=2, **SHORT), model.codec.decode(codes)[:, 0])


@pytest.mark.parametrize("options", [CONDITIONS["text"], CONDITIONS["prefix"]], ids=["text", "prefix"])
def test_texts_are_heard(options: dict[str, Any]) -> None:
    model = audiolm(options)
    few = {**SHORT, "seconds": 5 * FRAME / HZ}
    sound, other = (model(text=text, **few) for text in (TEXTS, ["a drum", "silence"]))
    assert sound.shape == (2, 5 * FRAME) and not torch.equal(sound, other)
    assert not torch.equal(model(text=TEXTS, **few, cond_scale=9.0), sound)
    embedded = model.semantic.embed_text(TEXTS)
    assert model(text_embeds=embedded, **few).shape == (2, 5 * FRAME)
    assert model(text=TEXTS[:1], batch_size=3, **few).shape[0] == 3
    assert model(batch_size=2, **few).shape[0] == 2  # whatever it likes


@pytest.mark.parametrize("is_delayed", [False, True])
def test_guidance_is_3_by_texts_and_none_by_codes(is_delayed: bool) -> None:
    codes = {"audio_text_condition": True, "cond_codes": [2, 5]}
    ids = torch.tensor([[1, 4], [0, 2]])
    for options, said, usual in ((CONDITIONS["text"], {"text": TEXTS}, 3.0), (codes, {"condition_ids": ids}, 1.0)):
        model = audiolm(options, is_delayed)
        sounds = {scale: model(**said, **SHORT, cond_scale=scale) for scale in (None, 1.0, 3.0)}
        assert torch.equal(sounds[None], sounds[usual]) and not torch.equal(sounds[1.0], sounds[3.0])
        maker = SoundMaker(model)
        assert torch.equal(model(**said, **{**maker.options, **SHORT}), sounds[usual])


def test_stages_that_read_no_texts_need_none() -> None:
    model = AudioLM(
        semantic_transformer=transformer("semantic", **CONDITIONS["text"]),
        coarse_transformer=transformer("coarse"),
        fine_transformer=transformer("fine"),
        wav2vec=wav2vec(),
        codec=codec(),
    )
    assert model.reads_texts
    assert model(text=TEXTS, **SHORT).shape == (2, 12 * FRAME)


@pytest.mark.parametrize("is_delayed", [False, True])
def test_a_sound_goes_on_from_its_beginning(is_delayed: bool) -> None:
    """The codes of the prompt are the first of the whole, for rows of unequal length."""
    model = audiolm(is_delayed=is_delayed)
    wave, lengths = chirps((330, 200)), torch.tensor([330, 200])  # 8 whole frames, and 5
    sound = model(prime_wave=wave, prime_lengths=lengths, **SHORT)
    assert sound.shape == (2, 12 * FRAME)
    codes = model.codec.encode(wave)
    for row, frames in enumerate((8, 5)):
        beginning = model.codec.decode(codes[row : row + 1, :frames])[0, 0]
        # (What is heard of the last frame depends on the next, through the decoder.)
        torch.testing.assert_close(
            sound[row, : (frames - 1) * FRAME], beginning[: (frames - 1) * FRAME], atol=1e-5, rtol=1e-4
        )
    alone = [model(prime_wave=wave[row : row + 1, :length], **SHORT)[0] for row, length in enumerate(lengths.tolist())]
    torch.testing.assert_close(sound, torch.stack(alone), atol=1e-5, rtol=1e-4)
    assert torch.equal(model(prime_wave=wave[0, :330], **SHORT), alone[0][None])
    assert not torch.equal(sound, model(batch_size=2, **SHORT))


def test_prompts_may_be_arrays_and_their_lengths_a_list() -> None:
    model, wave = audiolm(), chirps((330, 200))
    expected = model(prime_wave=wave, prime_lengths=torch.tensor([330, 200]), **SHORT)
    assert torch.equal(model(prime_wave=wave.double().numpy(), prime_lengths=[330, 200], **SHORT), expected)
    assert torch.equal(model(prime_wave=wave[0].numpy(), **SHORT), model(prime_wave=wave[0], **SHORT))
    with pytest.raises(ValueError, match="prime_wave holds whole numbers, and sound is from -1 to 1"):
        model(prime_wave=(wave * 32767).short().numpy(), **SHORT)


def test_a_prompt_of_another_rate_and_one_for_many() -> None:
    model = audiolm()
    wave = chirps((320,), 16000)
    sound = model(prime_wave=wave, prime_wave_input_sample_hz=16000, batch_size=2, **SHORT)
    assert sound.shape == (2, 12 * FRAME)
    codes = model.codec.encode(wave, None, 16000)
    torch.testing.assert_close(
        sound[0, : 7 * FRAME], model.codec.decode(codes)[0, 0, : 7 * FRAME], atol=1e-5, rtol=1e-4
    )


def test_a_prompt_from_a_file(tmp_path: Path) -> None:
    model = audiolm()
    wave = chirps((320,))
    soundfile.write(tmp_path / "mono.wav", wave[0].numpy(), HZ, subtype="FLOAT")
    soundfile.write(
        tmp_path / "stereo.wav", torch.stack((wave[0] * 1.5, wave[0] * 0.5), dim=1).numpy(), HZ, subtype="FLOAT"
    )
    expected = model(prime_wave=wave, **SHORT)
    assert torch.equal(model(prime_wave_path=tmp_path / "mono.wav", **SHORT), expected)
    torch.testing.assert_close(model(prime_wave_path=str(tmp_path / "stereo.wav"), **SHORT), expected)


def test_a_stereo_codec_keeps_both_channels(tmp_path: Path) -> None:
    model = audiolm(codec=codec(input_channels=2))
    wave = torch.stack((chirps((320,)), chirps((320,)) * 0.5), dim=1)
    soundfile.write(tmp_path / "stereo.wav", wave[0].T.numpy(), HZ, subtype="FLOAT")
    soundfile.write(tmp_path / "mono.wav", wave[0, 0].numpy(), HZ, subtype="FLOAT")
    sound = model(prime_wave=wave, **SHORT)
    assert sound.shape == (1, 2, 12 * FRAME)
    assert torch.equal(model(prime_wave_path=tmp_path / "stereo.wav", **SHORT), sound)
    assert model(prime_wave_path=tmp_path / "mono.wav", **SHORT).shape == (1, 2, 12 * FRAME)


def same(first: Any, second: Any) -> bool:
    return [wave.tolist() for wave in first] == [wave.tolist() for wave in second]


def test_a_seed_decides() -> None:
    model = audiolm()
    options = {"batch_size": 2, "seconds": SHORT["seconds"], "filter_thres": 0.0}
    sounds = {seed: [*model(**options, seed=seed)] for seed in (1, 2)}
    assert same(sounds[1], model(**options, seed=1)) and not same(sounds[1], sounds[2])
    assert not same(sounds[1][:1], sounds[1][1:])
    torch.manual_seed(0)
    assert not same(model(**options), model(**options))


def test_a_filter_that_is_asked_for_is_the_only_one() -> None:
    model, options = audiolm(), {"seconds": SHORT["seconds"], "temperature": 3.0, "seed": 0}
    asked = model(**options, top_k=5)
    assert same(asked, model(**options, top_k=5, filter_thres=0.0)) and not same(asked, model(**options))


def test_sounds_that_end_at_different_times_come_as_a_list() -> None:
    ending = KINDS["coarse"].build(**SIZES["coarse"])
    with torch.no_grad():
        ending.coarse.logit_weights[0, -1] *= 2
    model = audiolm(coarse_transformer=ending)
    sounds = model(batch_size=5, seconds=20 * FRAME / HZ, filter_thres=0.0, seed=3)
    assert isinstance(sounds, list) and len(sounds) == 5
    lengths = [len(sound) for sound in sounds]
    assert len(set(lengths)) > 1 and all(length % FRAME == 0 and length <= 20 * FRAME for length in lengths)
    assert torch.isfinite(torch.cat(sounds)).all()


def test_a_sound_that_ends_at_once_has_a_frame() -> None:
    ending = KINDS["coarse"].build(**SIZES["coarse"])
    with torch.no_grad():
        ending.layers.final_norm.register_forward_hook(lambda module, args, out: torch.ones_like(out))
        ending.coarse.logit_weights[0] = 0
        ending.coarse.logit_weights[0, -1] = 1
    assert audiolm(coarse_transformer=ending)(**SHORT).shape == (1, FRAME)


def test_long_sounds_are_refined_in_pieces() -> None:
    model, pieces = audiolm(), audiolm(fine_max_frames=5)
    codes: list[int] = []
    original = pieces.fine.transformer.coarse.part  # type: ignore[union-attr]
    pieces.fine.transformer.coarse.part = lambda ids: codes.append(ids.shape[1] // 2) or original(ids)  # type: ignore[union-attr,method-assign]
    assert pieces(**SHORT).shape == model(**SHORT).shape
    assert codes == [5, 5, 5] and pieces.arguments["fine_max_frames"] == 5


@pytest.mark.parametrize("is_delayed", [False, True])
def test_longer_sounds_than_learned_are_made_in_pieces(is_delayed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """No stage is asked for more than it learned from, and all of the sound is there; a prompt is a part of it."""
    model = audiolm(is_delayed=is_delayed, unique_consecutive=False, learned_seconds=0.1)  # 20 frames, 5 tokens
    with torch.no_grad():
        model.semantic.transformer.to_logits.weight[-1] = 0
    asked: list[tuple[str, int]] = []
    prepare = Decoder._prepare

    def noting(decoder: Decoder, prompt: Prompt, max_new_tokens: int, *rest: Any) -> Any:
        asked.append((type(decoder.model).__name__, prompt.embeddings.shape[1] + max_new_tokens))
        return prepare(decoder, prompt, max_new_tokens, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(Decoder, "_prepare", noting)
        sound = model(seconds=0.43, temperature=0.0, batch_size=2)
    assert sound.shape == (2, 86 * FRAME) and torch.isfinite(sound).all()
    most = {name: max(length for other, length in asked if other == name) for name, _ in asked}
    learned = (
        {"_Delayed": 2 + 5 + 20 + 2} if is_delayed else {"_Flat": 2 + 3 * 20 + 20}
    )  # (the fine one's own are there twice)
    assert most == {"_Semantic": 1 + 5, **learned}

    wave = chirps((1100, 200))
    sound = model(prime_wave=wave, prime_lengths=torch.tensor([1100, 200]), seconds=0.43, temperature=0.0)
    assert sound.shape == (2, 86 * FRAME)
    codes = model.codec.encode(wave)
    for row, frames in enumerate((27, 5)):
        beginning = model.codec.decode(codes[row : row + 1, :frames])[0, 0, : (frames - 1) * FRAME]
        torch.testing.assert_close(sound[row, : len(beginning)], beginning, atol=1e-5, rtol=1e-4)
    assert torch.equal(model(seconds=0.43, seed=3), model(seconds=0.43, seed=3))


def test_a_sound_of_the_learned_length_is_one_piece() -> None:
    whole, pieces = audiolm(unique_consecutive=False), audiolm(unique_consecutive=False, learned_seconds=0.06)
    assert torch.equal(whole(seconds=0.06, seed=2), pieces(seed=2))


@pytest.mark.parametrize("more", [{"unique_consecutive": True}, {"unique_consecutive": False, "wav2vec": None}])
def test_it_says_so_where_longer_sounds_cannot_be_made_in_pieces(more: Any, caplog: pytest.LogCaptureFixture) -> None:
    model = audiolm(learned_seconds=0.05, **more)
    model(seed=0)
    assert not caplog.text
    model(seconds=0.06, seed=0)
    assert "learned from 0.05 s of sound at a time, and what comes after them may be poor" in caplog.text


def test_sounds_are_as_long_as_those_it_learned_from(tmp_path: Path) -> None:
    model = audiolm(learned_seconds=0.05)
    model.save_pretrained(tmp_path)
    loaded = AudioLM.from_pretrained(tmp_path)
    assert loaded.learned_seconds == 0.05 and loaded.usual_frames == 10
    for asked, seconds in (({}, 0.05), ({"seconds": 0.1}, 0.1)):
        most = max(loaded(seed=seed, **asked).shape[-1] for seed in range(4))
        assert 0 < most <= seconds * HZ
    with pytest.raises(ValueError, match=r"lasts 0\.06 s, and the whole sound 0\.05 s"):
        loaded(prime_wave=chirps((480,)))
    with pytest.raises(ValueError, match="seconds=-1 must be a number of seconds"):
        audiolm(learned_seconds=-1)


# ------------------------------------------------------------------ put together, saved, loaded


@pytest.mark.parametrize("is_delayed", [False, True])
def test_saved_and_loaded_it_sounds_the_same(is_delayed: bool, tmp_path: Path) -> None:
    model = audiolm(CONDITIONS["text"], is_delayed, **({} if is_delayed else {"fine_max_frames": 7}))
    model.save_pretrained(tmp_path)
    loaded = AudioLM.from_pretrained(tmp_path)
    assert {path.name for path in (tmp_path / "stages").iterdir()} == {
        "codec",
        "wav2vec",
        "semantic_transformer",
        "coarse_transformer",
    } | (set() if is_delayed else {"fine_transformer"})
    assert torch.equal(model(text=TEXTS, **SHORT), loaded(text=TEXTS, **SHORT))
    assert loaded.fine_max_frames == model.fine_max_frames and loaded.sample_hz == HZ


def test_stages_bring_what_they_were_trained_on(tmp_path: Path) -> None:
    network = codec()
    for name in ("semantic", "coarse", "fine"):
        stage = stage_with_codec(name, network, **({} if name == "fine" else {"unique_consecutive": False}))
        stage.save_pretrained(tmp_path / name)
    stages = {f"{name}_transformer": load_network(tmp_path / name) for name in ("semantic", "coarse", "fine")}
    model = AudioLM(**stages)
    assert not model.semantic.unique_consecutive and not model.coarse.unique_consecutive
    assert type(model.codec) is type(network) and model.semantic.wav2vec is not None
    assert model.coarse.codec is model.fine.codec  # type: ignore[union-attr]
    sound = model(prime_wave=chirps((200,)), **SHORT)
    sounds = sound if isinstance(sound, list) else [*sound]
    assert 5 * FRAME <= len(sounds[0]) <= 12 * FRAME
    model.save_pretrained(tmp_path / "whole")
    again = AudioLM.from_pretrained(tmp_path / "whole")(prime_wave=chirps((200,)), **SHORT)
    torch.testing.assert_close([*again], sounds)


def test_another_codec_is_refused_by_name(tmp_path: Path) -> None:
    coarse, fine = stage_with_codec("coarse"), stage_with_codec("fine")
    other = codec()
    with torch.no_grad():
        next(other.autoencoder.parameters()).add_(1)
    other.save_pretrained(tmp_path / "other")
    fine = stage_with_codec("fine", load_network(tmp_path / "other"))
    with pytest.raises(
        ValueError,
        match=r"the fine_transformer was trained on another codec \(SoundStream of .*other\) than the one of the "
        r"coarse_transformer \(SoundStream.*\): give stages that were trained on the same",
    ):
        AudioLM(semantic_transformer=stage_with_codec("semantic"), coarse_transformer=coarse, fine_transformer=fine)
    with pytest.raises(ValueError, match=r"trained on another codec .* than the one given here"):
        audiolm(coarse_transformer=coarse, codec=other)


def test_another_tokenizer_is_refused() -> None:
    from helicon.models.semantic.tokenizer import MelKmeans

    other = MelKmeans(codebook_size=SEMANTIC)
    other.fit([(chirps((3000, 2000), 16000), None)], num_frames=60, seed=1)
    with pytest.raises(
        ValueError, match=r"the coarse_transformer was trained on another wav2vec .* than the one given here"
    ):
        audiolm(coarse_transformer=stage_with_codec("coarse"), wav2vec=other, codec=None)


class Conditioner(nn.Module):
    """How long a text is, and who asks."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[str] = []

    def forward(self, *, namespace: str, texts: list[str]) -> Tensor:
        self.asked.append(namespace)
        assert not self.training
        return torch.stack([torch.full((2, 16), float(len(text))).cumsum(dim=1).sin() for text in texts])


def test_a_conditioner_reads_the_texts_of_all_stages() -> None:
    conditioner = Conditioner().train()
    model = audiolm({"audio_text_condition": True}, audio_conditioner=conditioner)
    sound, other = (model(text=text, **SHORT) for text in (["a bell", "rain"], ["drums", "a"]))
    assert conditioner.asked == ["semantic", "coarse", "fine"] * 2 and conditioner.training
    assert not torch.equal(sound, other)
    stages = {
        f"{name}_transformer": stage_with_codec(
            name, model.codec, {"audio_text_condition": True}, audio_conditioner=conditioner
        )
        for name in ("semantic", "coarse", "fine")
    }
    assert AudioLM(**stages).semantic.audio_conditioner is conditioner  # of the stages' own


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"codec": None}, "there is nothing to turn codes into sound: give the codec"),
        ({"fine_transformer": None}, "got CoarseTransformer and NoneType"),
        (
            {"semantic_transformer": ("semantic", {"num_semantic_tokens": 5}), "wav2vec": None},
            "num_semantic_tokens=5 and the next one 11",
        ),
        ({"fine_transformer": ("fine", {"num_coarse_quantizers": 1})}, "num_coarse_quantizers=2 and the fine one 1"),
        ({"coarse_transformer": ("delayed", {})}, "a delayed one stands in the place of both"),
        ({"fine_max_frames": 1}, "fine_max_frames=1 must be at least 2"),
        (
            {"coarse_transformer": ("delayed", {}), "fine_transformer": None, "fine_max_frames": 4},
            "fine_max_frames=4 must be at least 2, and belongs to a fine_transformer",
        ),
    ],
)
def test_stages_that_do_not_belong_together_are_refused(changes: dict[str, Any], sentence: str) -> None:
    built = {
        key: transformer(value[0], **value[1]) if isinstance(value, tuple) else value for key, value in changes.items()
    }
    with pytest.raises(ValueError, match=sentence) as error:
        audiolm(**built)
    assert "\n" not in str(error.value)


def test_stages_that_disagree_about_repeated_tokens_are_refused() -> None:
    network = codec()
    with pytest.raises(ValueError, match="trained with different unique_consecutive"):
        AudioLM(
            semantic_transformer=stage_with_codec("semantic", unique_consecutive=True),
            coarse_transformer=stage_with_codec("coarse", network, unique_consecutive=False),
            fine_transformer=stage_with_codec("fine", network),
        )


def test_mistakes_get_one_sentence(tmp_path: Path) -> None:
    model, reading = audiolm(), audiolm(CONDITIONS["text"])
    (tmp_path / "no.wav").write_text("this is no sound")
    soundfile.write(tmp_path / "empty.wav", torch.zeros(0).numpy(), HZ)
    without = audiolm(wav2vec=None)
    cases: list[tuple[AudioLM, dict[str, Any], type[Exception], str]] = [
        (model, {"seconds": float("nan")}, ValueError, "seconds=nan must be a number of seconds"),
        (model, {"seconds": float("inf")}, ValueError, "seconds=inf must be a number of seconds"),
        (reading, {"text": []}, ValueError, "an empty list of prompts or texts asks for nothing"),
        (model, {"prime_wave_path": "nowhere.wav"}, FileNotFoundError, "prime_wave_path='nowhere.wav' is not there"),
        (model, {"prime_wave_path": tmp_path / "no.wav"}, ValueError, "no.wav cannot be read as sound"),
        (model, {"prime_wave_path": tmp_path / "empty.wav"}, ValueError, "empty.wav is empty"),
        (model, {"prime_wave_path": "a.wav", "prime_wave": chirps((200,))}, ValueError, "not both"),
        (
            model,
            {"text": TEXTS},
            ValueError,
            "none of the transformers reads texts: train them with has_condition=True",
        ),
        (reading, {"text": "a bell"}, ValueError, r"text takes a list of texts, not one: write \['a bell'\]"),
        (reading, {"text": TEXTS, "prime_wave": chirps((200, 200, 200))}, ValueError, r"different numbers, \[2, 3\]"),
        (reading, {"text": TEXTS, "text_embeds": torch.zeros(2, 3, BYTES["dim"])}, ValueError, "not both"),
        (model, {"seconds": 0.001}, ValueError, "seconds=0.001 is less than a frame of the codec"),
        (
            model,
            {"prime_wave": chirps((800,)), "seconds": 0.05},
            ValueError,
            "lasts 0.10 s, and the whole sound 0.05 s",
        ),
        (model, {"prime_wave": chirps((30,)), "seconds": 0.05}, ValueError, "is shorter than a frame"),
        (model, {"temperature": -1.0, "seconds": 0.05}, ValueError, "temperature=-1.0"),
        (model, {"cond_scale": float("nan"), "seconds": 0.05}, ValueError, "cond_scale=nan must be a finite number"),
        (
            model,
            {"prime_wave": chirps((200,)) + torch.nan, "seconds": 0.05},
            ValueError,
            "holds values that are infinite or not numbers",
        ),
        (without, {"prime_wave": chirps((200,)), "seconds": 0.05}, ValueError, "was built without wav2vec"),
    ]
    for built, options, kind, sentence in cases:
        with pytest.raises(kind, match=sentence) as error:
            built(**options)
        assert "\n" not in str(error.value)


def test_without_a_tokenizer_sound_comes_from_nothing() -> None:
    assert audiolm(wav2vec=None)(max_length=5, **SHORT).shape == (1, 12 * FRAME)


def test_keywords_that_users_know_are_there() -> None:
    """Those of audiolm-pytorch's AudioLM."""
    constructor = (
        "wav2vec codec semantic_transformer coarse_transformer fine_transformer audio_conditioner unique_consecutive"
    )
    call = (
        "batch_size text text_embeds prime_wave prime_wave_input_sample_hz prime_wave_path max_length "
        "return_coarse_generated_wave mask_out_generated_fine_tokens"
    )
    assert set(constructor.split()) <= set(inspect.signature(AudioLM).parameters)
    assert set(call.split()) <= set(inspect.signature(AudioLM.forward).parameters)
    assert audiolm().device == torch.device("cpu")
