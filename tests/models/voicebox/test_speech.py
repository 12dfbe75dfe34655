"""Speech files of tiny networks, as `helicon generate` makes them."""

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch
from torch import Tensor
from typer.testing import CliRunner, Result

import helicon
from data.sounds import noise, write
from helicon import registry
from helicon.cli import app
from helicon.data.sound import spectrogram_beside
from helicon.models.voicebox.durations import DurationPredictor, frames_of
from helicon.models.voicebox.features import MelVoco
from helicon.models.voicebox.flow import ConditionalFlowMatcherWrapper
from helicon.models.voicebox.model import VoiceBox
from helicon.models.voicebox.speech import SpeechMaker, _faded, _reach
from helicon.models.voicebox.text import CharacterTokenizer, PhonemeInventory
from helicon.models.voicebox.vocoder import Vocoder
from helicon.nn.resample import resample
from models.audiolm.tiny import CONDITIONS, stage_with_codec, wav2vec
from models.voicebox.test_model import SIZES

HZ, HOP = 8000, 80
FRAME = HOP / HZ
FAST = ["steps=2", "method=euler"]
A = ["--text", "so be it"]
VOICE = ["--prompt", "voice.wav"]


def space() -> MelVoco:
    return MelVoco(n_mels=12, sampling_rate=HZ, n_fft=160, hop_length=HOP)


def flow(tokenizer: Any = None, **options: Any) -> ConditionalFlowMatcherWrapper:
    """Every weight random, and features of the size that sounds have."""
    torch.manual_seed(0)
    stages = {name: options.pop(name) for name in ("duration_predictor", "text_to_semantic") if name in options}
    if "text_to_semantic" not in stages:
        tokenizer = tokenizer or CharacterTokenizer()
    count = {"num_cond_tokens": tokenizer.num_tokens} if tokenizer is not None else {}
    network = VoiceBox(**{"audio_enc_dec": space(), **count, **SIZES, **options})
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.1)
    wrapper = ConditionalFlowMatcherWrapper(network, tokenizer=tokenizer, **stages)
    wrapper.feature_mean.fill_(-4.0)
    return wrapper


def vocoder(hop: int) -> Vocoder:
    torch.manual_seed(2)
    mel = {"n_mels": 12, "sampling_rate": HZ, "n_fft": 160, "hop_length": hop}
    return Vocoder(**mel, dim=8, depth=1, discr_periods=[2], discr_windows=[64])


def predictor(tokenizer: Any) -> DurationPredictor:
    torch.manual_seed(1)
    network = DurationPredictor(tokenizer=tokenizer, dim=12, dim_phoneme_emb=10, depth=1, heads=2, dim_head=6)
    with torch.no_grad():
        network.to_duration.weight.normal_()
    return network


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("networks")
    characters, phonemes = CharacterTokenizer(), PhonemeInventory(["s", "o", "b", "e"])
    networks: dict[str, Any] = {
        "free": flow(),
        "frames": flow(alignment="frames"),
        "timed": flow(characters, duration_predictor=predictor(characters)),
        "timed-frames": flow(phonemes, alignment="frames", duration_predictor=predictor(phonemes)),
        "mute": flow(condition_on_text=False),
        "features": flow(audio_enc_dec=None, dim_in=7),
    }
    networks["ids"] = ConditionalFlowMatcherWrapper(flow().voicebox)
    for name, symbols in (("durations", phonemes), ("letters", characters)):
        networks[name] = predictor(symbols)
    networks["few-durations"] = DurationPredictor(num_phoneme_tokens=3, dim=12, depth=1)
    networks["vocoder"] = vocoder(HOP)
    networks["other-vocoder"] = vocoder(HOP // 2)
    for name, network in networks.items():
        network.save_pretrained(folder / name)
    return folder


@pytest.fixture(autouse=True)
def voice() -> Path:
    """Half a second and a bit, of another rate."""
    return write(Path("voice.wav"), noise(0.503, 2 * HZ), 2 * HZ)


def call(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["generate", *map(str, arguments)])


def said(*arguments: str | Path) -> str:
    result = call(*arguments)
    assert result.exit_code == 0, result.output
    return result.stdout


def samples(path: str | Path) -> np.ndarray:
    wave, hz = soundfile.read(path, dtype="int16")
    assert hz == HZ
    return wave.astype(int)


def in_16_bits(wave: Tensor) -> np.ndarray:
    return (wave.clamp(-1, 1).numpy() * 2**15).round().clip(-(2**15), 2**15 - 1).astype(int)


def is_same(path: str | Path, wave: Tensor) -> bool:
    found = samples(path)
    return len(found) == len(wave) and bool((np.abs(found - in_16_bits(wave)) <= 1).all())


def recording() -> Tensor:
    wave, hz = soundfile.read("voice.wav", dtype="float32")
    return resample(torch.from_numpy(wave), hz, HZ)


def network_of(folder: Path) -> Any:
    return helicon.load(folder)


def maker_of(folder: Path, *texts: str, **options: Any) -> SpeechMaker:
    return SpeechMaker(helicon.load(folder), texts=texts, steps=2, method="euler", **options)


# ---------------------------------------------------------------------- texts


def test_a_text_is_spoken_and_its_file_described(made: Path) -> None:
    words = said(made / "free", *A, "--seed", "3", "-o", "new/out.wav", "seconds=0.3", "steps=3", "grid=uniform")
    assert words.endswith("new/out.wav: 0.30 s (as asked for), 6 evaluations\nwrote new/out.wav\n")
    options = {"texts": ["so be it"], "lengths": 30, "seed": 3, "steps": 3, "grid": "uniform"}
    assert is_same("new/out.wav", network_of(made / "free").sample(**options)[0])
    assert sorted(path.name for path in Path("new").iterdir()) == ["out-spectrogram.png", "out.wav"]


def test_several_texts_are_a_folder_that_is_a_dataset(made: Path) -> None:
    arguments = [*A, "--text", "oh", "--samples", "2", "--batch-size", "4", "-o", "out", *FAST]
    assert "wrote out: 4 files, manifest.jsonl\n" in said(made / "frames", *arguments)
    lines = [json.loads(line) for line in Path("out/manifest.jsonl").read_text().splitlines()]
    assert [line["text"] for line in lines] == ["so be it", "oh"] * 2
    lengths = [len(samples(Path("out", line["path"]))) for line in lines]
    assert lengths == [HOP * round(count / 15 / FRAME) for count in (8, 2)] * 2, "15 characters a second"
    assert all(spectrogram_beside(Path("out", line["path"])).exists() for line in lines)
    assert samples("out/00000.wav").tolist() != samples("out/00002.wav").tolist()
    maker = maker_of(made / "frames", "so be it", "oh")
    assert maker.make([1], seed=0)[0].length == "at 15 tokens a second, as nothing else tells"


def test_the_duration_predictor_says_how_long(made: Path) -> None:
    for name, text in (("timed", "so be it"), ("timed-frames", "s o b e")):
        network = network_of(made / name)
        (each,) = network.duration_predictor.predict_seconds(texts=[text])
        said(made / name, "--text", text, "-o", f"{name}.wav", *FAST)
        frames = round(each.sum().item() / FRAME)
        options = {"texts": [text], "lengths": frames, "seed": 0, "steps": 2, "method": "euler"}
        assert is_same(f"{name}.wav", network.sample(**options)[0])
        assert maker_of(made / name, text).plans[0].length == "as the duration predictor says"


@pytest.mark.parametrize("name", ["free", "frames"])
def test_another_run_may_say_how_long(made: Path, name: str, caplog: pytest.LogCaptureFixture) -> None:
    """Also one that reads texts in a way of its own: here as phonemes, of which the first is unknown."""
    text = "so o b e"
    for other in ("letters", "durations"):
        words = said(made / name, "--text", text, "--durations", made / other, "-o", f"{other}.wav", *FAST)
        is_each = name == "frames" and other == "letters"
        in_all = " in all, as it reads other symbols" if name == "frames" and not is_each else ""
        assert f"DurationPredictor of {made / other}" in words and f"(as the duration predictor says{in_all})" in words
        (each,) = network_of(made / other).predict_seconds(texts=[text])
        frames = round(each.sum().item() / FRAME)
        options = {"texts": [text]}
        if is_each:  # then each token lasts as long as the predictor says
            options = {"phoneme_ids": CharacterTokenizer()([text])}
            options["phoneme_durations"] = frames_of(each[None], 1 / FRAME, torch.tensor([frames]))
        wave = network_of(made / name).sample(**options, lengths=frames, seed=0, steps=2, method="euler")[0]
        assert is_same(f"{other}.wav", wave)
    assert "1 of 4 symbols of 'so o b e' are not known to the duration predictor: " in caplog.text


def test_durations_of_another_run_are_those_of_the_tokens(made: Path) -> None:
    """Whichever ids its phonemes have."""
    phonemes = PhonemeInventory(["s", "o", "b", "e"])
    network = flow(phonemes, alignment="frames")
    own = SpeechMaker(network_of(made / "timed-frames"), texts=["s o b e"]).plans[0].durations
    given = SpeechMaker(network, texts=["s o b e"], durations=predictor(phonemes)).plans[0].durations
    assert own is not None and given is not None and given.tolist() == own.tolist() and len(set(own.tolist())) > 1
    other = predictor(PhonemeInventory(["e", "b", "o", "s", "k"]))
    (each,) = other.predict_seconds(texts=["s o b e"])
    found = SpeechMaker(network, texts=["s o b e"], durations=other).plans[0].durations
    assert found is not None and found[0] == round((each[0] / FRAME).item())


def test_symbols_that_are_not_known_are_told_once(made: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        maker_of(made / "free", "so be it")
        assert not caplog.records
        maker_of(made / "free", "so 世界")
    assert [record.getMessage() for record in caplog.records] == [
        "2 of 5 symbols of 'so 世界' are not known to this network"
    ]


def test_a_predictor_that_cannot_read_a_text_is_not_asked_where_the_length_is_known(made: Path) -> None:
    reader = helicon.load(made / "durations")
    network = flow(duration_predictor=reader)
    with pytest.raises(ValueError, match=r"reads none of 'so be': it knows s, o, b, e \.\.\.; give seconds="):
        SpeechMaker(network, texts=["so be"])
    assert SpeechMaker(network, texts=["so be"], seconds=0.3).plans[0].frames == 30
    assert SpeechMaker(network, texts=["so be"], prompt=Path("voice.wav"), span=["0.1:0.2"]).plans[0].frames == 51


def test_another_run_may_make_it_audible(made: Path) -> None:
    said(made / "free", *A, "--vocoder", made / "vocoder", "-o", "out.wav", "seconds=0.2", *FAST)
    options = {"texts": ["so be it"], "lengths": 20, "seed": 0, "steps": 2, "method": "euler"}
    drawn = network_of(made / "free").draw(**options)
    assert is_same("out.wav", network_of(made / "vocoder")(drawn.features)[0].detach())
    assert not is_same("out.wav", network_of(made / "free").sample(**options)[0])


def test_durations_of_prompt_and_text_each_fill_their_part(made: Path) -> None:
    maker = maker_of(made / "timed-frames", "o b e", prompt=Path("voice.wav"), prompt_text="s o", seconds=0.4)
    (plan,), prompt = maker.plans, maker.prompt
    assert prompt is not None and prompt.frames == 50 and plan.frames == 90
    assert plan.ids is not None and plan.ids.tolist() == [0, 1, 1, 2, 3]
    assert plan.durations is not None and plan.durations[:2].sum() == 50 and plan.durations[2:].sum() == 40
    each = maker.network.duration_predictor.predict_seconds(texts=["s o"])[0]
    assert plan.durations[0] == round(50 * (each[0] / each.sum()).item())
    unhurried = maker_of(made / "timed-frames", "o b e", prompt=Path("voice.wav"), prompt_text="s o").plans[0]
    own = maker.network.duration_predictor.predict_seconds(texts=["o b e"])[0]
    assert unhurried.frames == 50 + round(50 * (own.sum() / each.sum()).item()), "as slow as the prompt was"


@torch.no_grad()
def test_prompt_and_text_stand_in_their_own_frames_without_a_predictor_too(made: Path) -> None:
    """The tokens of both were stretched over both: where their paces differ, the text stood in the frames of the prompt, or began late."""
    options: dict[str, Any] = {"prompt": Path("voice.wav"), "prompt_text": "well oh"}
    maker = maker_of(made / "frames", "so be it", **options, seconds=0.24)
    (plan,) = maker.plans
    assert plan.frames == 74 and plan.ids is not None and len(plan.ids) == 16
    assert plan.durations is not None and plan.durations[:8].sum() == 50 and plan.durations[8:].tolist() == [3] * 8
    (found,) = maker.make([0], seed=0)
    given = {
        "cond": recording()[None, : 50 * HOP],
        "phoneme_ids": plan.ids[None],
        "phoneme_durations": plan.durations[None],
    }
    expected = maker.network.sample(**given, lengths=74, seed=0, steps=2, method="euler")[0, 50 * HOP :]
    assert torch.equal(found.sound.wave[0], expected)
    assert maker_of(made / "free", "so be it", **options, seconds=0.24).plans[0].durations is None
    with pytest.raises(ValueError, match="cannot be said in 7 frames, as 8 tokens"):
        maker_of(made / "frames", "so be it", **options, seconds=0.07)


# ---------------------------------------------------------------------- in the voice of a prompt


@pytest.mark.parametrize("name", ["free", "frames"])
def test_a_prompt_lends_its_voice(made: Path, name: str) -> None:
    words = said(made / name, *A, *VOICE, "--prompt-text", "well oh", "-o", "out.wav", *FAST)
    assert "out.wav: 0.50 s (as fast as the prompt), 2 evaluations" in words, (
        "eight characters each, with the space between them"
    )
    network, wave = network_of(made / name), recording()[: 50 * HOP]
    options = {"texts": ["well oh so be it"], "lengths": 100, "seed": 0, "steps": 2, "method": "euler"}
    whole = network.sample(cond=wave[None], **options)[0]
    assert is_same("out.wav", whole[50 * HOP :])
    said(made / name, *A, *VOICE, "--prompt-text", "well oh", "-o", "both.wav", "keep_prompt=true", *FAST)
    both = samples("both.wav")
    assert (np.abs(both[: 50 * HOP] - in_16_bits(wave)) <= 1).all(), "the prompt is itself"
    assert (np.abs(both[-48 * HOP :] - samples("out.wav")[-48 * HOP :]) <= 1).all()
    other = said(made / name, *A, "-o", "alone.wav", "seconds=0.5", *FAST)
    assert "as asked for" in other and samples("alone.wav").tolist() != samples("out.wav").tolist()


def test_the_text_begins_after_a_prompt_of_which_nobody_says_what_is_said(
    made: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        maker = maker_of(made / "frames", "so be it", prompt=Path("voice.wav"), seconds=0.25)
    assert caplog.text.count("--prompt-text: what is said in voice.wav would help") == 1
    (plan,), space_id = maker.plans, CharacterTokenizer().ids[" "]
    assert plan.ids is not None and plan.ids[:16].tolist() == [space_id] * 16, "0.5 s at the pace of 8 in 0.25 s"
    assert plan.ids[16:].tolist() == CharacterTokenizer()(["so be it"])[0].tolist() and plan.frames == 75
    (speech,) = maker.make([0], seed=0)
    assert speech.sound.wave.shape == (1, 25 * HOP)


def test_nothing_said_goes_on_from_a_prompt_or_from_nothing(made: Path) -> None:
    words = said(made / "mute", *VOICE, "-o", "more.wav", "seconds=0.2", *FAST)
    assert "more.wav: 0.20 s (as asked for)" in words
    kept = said(made / "mute", *VOICE, "-o", "kept.wav", "seconds=0.2", "keep_prompt=true", *FAST)
    assert "kept.wav: 0.70 s (the prompt, and new speech as asked for)" in kept
    options = {"seed": 0, "steps": 2, "method": "euler"}
    whole = network_of(made / "mute").sample(cond=recording()[None, : 50 * HOP], lengths=70, **options)[0]
    assert is_same("more.wav", whole[50 * HOP :])
    assert "3.00 s (as nothing tells; seconds=... does)" in said(made / "free", "-o", "any.wav", *FAST)
    assert is_same("any.wav", network_of(made / "free").sample(lengths=300, **options)[0])


def test_semantic_tokens_say_how_long_and_go_on_from_those_of_the_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    semantic: Any = stage_with_codec("semantic", None, CONDITIONS["text"], wav2vec=wav2vec(), unique_consecutive=False)
    network = flow(text_to_semantic=semantic, alignment="frames", num_cond_tokens=semantic.wav2vec.codebook_size)
    given: dict[str, Any] = {}
    draw = network.draw
    monkeypatch.setattr(network, "draw", lambda **options: given.update(options) or draw(**options))
    maker = SpeechMaker(
        network, texts=["oh"], prompt=Path("voice.wav"), prompt_text="so", steps=1, method="euler", seconds=0.3
    )
    (speech,) = maker.make([0], seed=0)
    assert given["texts"] == ["so oh"] and given["cond"].shape == (1, 50 * HOP) and given["lengths"] == [80]
    assert speech.sound.wave.shape == (1, 30 * HOP)
    alone = SpeechMaker(network, texts=["oh"], steps=1, method="euler")
    given.clear()
    alone.make([0], seed=0)
    assert "lengths" not in given and alone.plans[0].length == "as its semantic tokens"
    with pytest.raises(ValueError, match="has none for the middle of a recording: leave --text out"):
        SpeechMaker(network, texts=["oh"], prompt=Path("voice.wav"), span=["0.1:0.2"])


# ---------------------------------------------------------------------- spans of a recording


@pytest.mark.parametrize("name", ["free", "timed"])
def test_a_span_is_made_anew_and_the_rest_stays_to_the_sample(made: Path, name: str) -> None:
    words = said(made / name, *A, *VOICE, "--span", "0.2:0.3", "--span", "0.395:", "-o", "out.wav", *FAST)
    assert "out.wav: 0.50 s (as the recording)" in words
    wave, found = recording(), samples("out.wav")
    hidden = torch.zeros(51, dtype=torch.bool)
    hidden[20:30] = hidden[39:] = True
    is_new = hidden.repeat_interleave(HOP)[: len(wave)].numpy()
    assert len(found) == len(wave) and (np.abs(found - in_16_bits(wave)) <= 1)[~is_new].all()
    assert (np.abs(found - in_16_bits(wave)) > 1)[is_new].mean() > 0.9
    network = network_of(made / name)
    heard = hidden.clone()
    heard[[19, 30, 38]] = True  # whose windows reach into the spans
    options = {"texts": ["so be it"], "seed": 0, "steps": 2, "method": "euler", "cond_mask": heard[None]}
    whole = network.sample(cond=wave[None], **options)[0]
    inner = slice(21 * HOP, 29 * HOP)
    assert (np.abs(found[inner] - in_16_bits(whole)[inner]) <= 1).all()


def test_what_was_in_a_span_is_not_heard(made: Path) -> None:
    """Not even in the frames beside it, whose windows reach into it."""
    wave, changed = (noise(0.5, HZ) for _ in range(2))
    changed[20 * HOP : 30 * HOP] = 0.9
    found = []
    for number, samples_ in enumerate((wave, changed)):
        path = write(Path(f"{number}.wav"), samples_, HZ)
        (speech,) = maker_of(made / "free", "so be it", prompt=path, span=["0.2:0.3"]).make([0], seed=0)
        found.append(speech.sound.wave[0])
    inner = slice(21 * HOP, 29 * HOP)  # without the slopes
    torch.testing.assert_close(*(wave[inner] for wave in found), rtol=0, atol=1e-6)
    assert _reach(MelVoco()) == 2 and _reach(space()) == 1


def test_a_span_of_another_length_is_an_edit(made: Path) -> None:
    said(made / "free", *A, *VOICE, "--span", "0.2:0.3", "span_seconds=0.25", "-o", "out.wav", *FAST)
    wave, found = in_16_bits(recording()), samples("out.wav")
    assert len(found) == len(wave) + 15 * HOP
    assert (np.abs(found[: 20 * HOP] - wave[: 20 * HOP]) <= 1).all()
    assert (np.abs(found[45 * HOP :] - wave[30 * HOP :]) <= 1).all()
    assert np.abs(found[21 * HOP : 44 * HOP]).mean() > 1, "and something is there"


def test_a_span_without_a_text(made: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert "(as the recording)" in said(made / "mute", *VOICE, "--span", ":0.1", "-o", "out.wav", *FAST)
    assert not caplog.records
    maker_of(made / "free", prompt=Path("voice.wav"), span=["0.1:0.2"])
    assert "--text: this network learned with texts, and what is said in all of voice.wav would help it" in caplog.text
    wave, found = in_16_bits(recording()), samples("out.wav")
    assert (np.abs(found - wave) <= 1)[10 * HOP :].all() and not (np.abs(found - wave) <= 1)[: 9 * HOP].all()


def test_the_slopes_between_recording_and_speech_lie_in_the_speech() -> None:
    is_given = torch.tensor([0, 0, 0, 0, 0, 1, 1, 0, 0, 0, 0, 0, 0, 1]).bool()
    found = _faded(is_given, 1)
    third = [1 / 3, 2 / 3]
    torch.testing.assert_close(
        found, torch.tensor([0, 0, 0, *third, 1, 1, *third[::-1], 0, 0, *third, 1], dtype=torch.float32)
    )
    assert torch.equal(_faded(is_given, 0), is_given.float())


# ---------------------------------------------------------------------- options and mistakes


def test_options_reach_the_network(made: Path) -> None:
    chosen = ["seconds=0.2", "steps=5", "method=midpoint", "grid=pruned", "cond_scale=2", "guidance_interval=[0.1,0.8]"]
    assert "10 evaluations" in said(made / "frames", *A, "-o", "out.wav", *chosen)
    options = {"steps": 5, "method": "midpoint", "grid": "pruned", "cond_scale": 2.0, "guidance_interval": (0.1, 0.8)}
    wave = network_of(made / "frames").sample(texts=["so be it"], lengths=20, seed=0, **options)[0]
    assert is_same("out.wav", wave)
    listed = said(made / "frames", "--options")
    assert "seconds: float or null = null\n    " in listed and "prompt_text" not in listed and "span:" not in listed


@pytest.mark.parametrize(
    ("name", "arguments", "sentence"),
    [
        ("mute", A, "this VoiceBox was trained without texts: leave --text out"),
        ("ids", A, "this VoiceBox reads token ids, and has no tokenizer for texts: call its sample, in Python"),
        ("features", A, "this VoiceBox learned from features, without an audio_enc_dec: it makes no sounds"),
        ("free", ["--text", " "], "the text ' ' says nothing: give one with words in it, or none"),
        ("free", ["--text", "世界"], "this network reads none of '世界': it knows a, b, c, d, e, f, g, h ...; write it in its symbols"),
        ("free", [*A, *VOICE, "--prompt-text", "世"], "this network reads none of '世': "),
        ("timed-frames", ["--text", "so be"], "this network reads none of 'so be': it knows s, o, b, e ...; write it in its symbols"),
        ("free", [*A, "--durations", "@durations"], "the duration predictor reads none of 'so be it': it knows s, o, b, e ...; leave --durations"),
        ("free", [*VOICE, "--prompt-text", "so"], "--prompt-text goes with --text: give both, or neither"),
        ("timed-frames", ["--text", "s o", *VOICE], "this network has no token for silence, which could stand for what is said in voice.wav: "),
        ("free", [*A, "seconds=0"], "seconds=0 must be at least a frame, 0.01"),
        ("free", [*A, "seconds=.inf"], "seconds=inf must be at least a frame, 0.01"),
        ("free", [*A, "seconds=100000000"], "seconds=1e+08 must be at least a frame, 0.01, and at most 3600"),
        ("free", [*A, "cond_scale=.nan"], "cond_scale=nan must be a finite number"),
        ("frames", [*A, "seconds=0.07"], "'so be it' cannot be said in 7 frames, as 8 tokens need one each: give it more time"),
        ("free", [*A, "seconds=0.07"], "'so be it' cannot be said in 7 frames, as 8 tokens need one each: give it more time"),
        ("free", [*A, "second=1"], "generate has no argument 'second': did you mean seconds?"),
        ("free", [*A, "steps=0"], "steps=0"),
        ("free", [*A, "grid=swung"], "generate.grid wants"),
        ("free", [*A, "method=best"], "method='best' is none of euler, midpoint"),
        ("free", [*A, "guidance_interval=[0.9,0.1]"], "guidance_interval=(0.9, 0.1) must be two times from 0 to 1"),
        ("free", [*A, "--prompt-text", "b"], "--prompt-text is about a recording: give that with --prompt"),
        ("free", [*A, "--span", "0:1"], "--span is about a recording: give that with --prompt"),
        ("free", [*A, "keep_prompt=true"], "keep_prompt is about a recording: give that with --prompt"),
        ("free", [*A, *VOICE, "span_seconds=1"], "span_seconds is the new length of a span: name one, with --span"),
        ("free", [*A, *VOICE, "--span", "0.1:0.2", "--span", "0.3:0.4", "span_seconds=1"], "span_seconds is the new length of a span: "),
        ("free", [*A, *VOICE, "--span", "0.1:0.2", "seconds=1"], "seconds does not go with --span: the rest of the recording stays"),
        ("free", [*A, *VOICE, "--span", "0.1:0.2", "--prompt-text", "b"], "--prompt-text does not go with --span: "),
        ("free", [*A, *VOICE, "--span", "0.4"], "--span 0.4 must be two numbers of seconds, as in 0.8:1.4"),
        ("free", [*A, *VOICE, "--span", "a:b"], "--span a:b must be two numbers of seconds, as in 0.8:1.4"),
        ("free", [*A, *VOICE, "--span", "0.4:0.9"], "--span 0.4:0.9 is not in voice.wav, which lasts 0.50 s: give two times in it"),
        ("free", [*A, *VOICE, "--span", "0.3:0.2"], "--span 0.3:0.2 is not in voice.wav, which lasts 0.50 s: give two times in it"),
        ("free", [*A, *VOICE, "--span", "0.504:0.507"], "--span 0.504:0.507 is not in voice.wav, which lasts 0.50 s"),
        ("free", [*A, *VOICE, "--span", "nan:0.2"], "--span nan:0.2 is not in voice.wav"),
        ("free", [*A, *VOICE, "--prompt-text", ""], "the text '' says nothing"),
        ("free", [*A, "--prompt", "nowhere.wav"], "--prompt nowhere.wav is not there: name a sound file"),
        ("free", [*A, "--prompt", "words.wav"], "words.wav: not a readable sound"),
        ("free", [*A, "--prompt", "click.wav"], "click.wav lasts 0.005 s, and the model needs 0.010 s to hear anything"),
        ("free", [*A, "--durations", "@vocoder"], "--durations holds a Vocoder: give the run of a duration predictor"),
        ("free", [*A, "--durations", "@few-durations"], "--durations reads other tokens than this network, and has no tokenizer for texts"),
        ("timed", [*A, "--durations", "@letters"], "this network has the duration predictor that it was trained with: leave --durations out"),
        ("free", [*A, "--vocoder", "@letters"], "--vocoder holds a DurationPredictor: give the run of a vocoder"),
        ("free", [*A, "--vocoder", "@other-vocoder"], "--vocoder was made for frames of hop_length=40, and this network's have hop_length=80: leave"),
        ("free", [*A, "--image", "voice.wav"], "--image is nothing for the network in {}: leave it out"),
        ("free", [*A, "-o", "out.png"], "out.png would be a .png file, and what is made here is .wav or .flac or .ogg; "),
    ],
)  # fmt: skip
def test_mistakes_are_one_sentence(made: Path, name: str, arguments: list[str], sentence: str) -> None:
    write(Path("click.wav"), noise(0.005, HZ), HZ)
    Path("words.wav").write_text("no sound")
    before = sorted(Path.cwd().rglob("*"))
    result = call(made / name, *(str(made / word[1:]) if word.startswith("@") else word for word in arguments))
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith(f"error: {sentence.format(made / name)}") and result.stderr.count("\n") == 1
    assert sorted(Path.cwd().rglob("*")) == before


def test_what_is_no_finite_sound_is_no_file(made: Path) -> None:
    result = call(made / "free", *A, "-o", "out.wav", "seconds=0.2", "cond_scale=1e38", *FAST)
    assert result.exit_code == 1 and not Path("out.wav").exists()
    assert "out.wav has samples that are no finite numbers, and is not written" in result.stderr


def test_the_registry_knows_who_speaks(made: Path) -> None:
    assert registry.maker_of(made / "free") is SpeechMaker
