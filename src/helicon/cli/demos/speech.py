"""Speech: what is missing in a recording filled in, and texts in the voice of a recording."""

import json
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from helicon.cli import page
from helicon.cli.demos.outline import PAGE, CaptionedSounds, Demo, both, files_of, steps_of
from helicon.cli.generate import MANIFEST, loaded
from helicon.cli.page import Page
from helicon.cli.steps import Stage, Work, replaced

if TYPE_CHECKING:
    from torch import Tensor

    from helicon.data.synthetic_speech import SyntheticSpeech, Utterance
    from helicon.metrics.speech import Contour
    from helicon.nn.network import Network

INFILLED, SPOKEN = "infilled", "spoken"
SPOKEN_FILES = ("voice", "spoken")
NUM_CLIPS, NUM_SHOWN = 16, 6  # that are made, and of these on the page
STEPS = 16  # of the solver, unless the recipe says otherwise


@dataclass(frozen=True)
class Speaker(Stage):
    """A run that is to say what it has not learned from."""

    def check(self, work: Work) -> None:
        recipe = work.recipes[self.name]
        if recipe.model["voicebox"].get("condition_on_text") is False:
            raise ValueError("the demo speaks texts: leave out condition_on_text=false")
        unlearned(recipe.data, NUM_CLIPS)


VOICEBOX = Speaker("voicebox", "voicebox/voicebox-demo")


@dataclass(frozen=True)
class Clip:
    """An utterance that was not learned from, and nobody's text that was; `span` are the seconds of it to hide."""

    said: "Utterance"
    audio: "Tensor"
    span: tuple[float, float]
    hidden: str  # the vowels in it

    @property
    def text(self) -> str:
        return self.said.text

    @property
    def span_words(self) -> str:
        return f"{self.span[0]:.3f}:{self.span[1]:.3f}"


def show_speech(work: Work) -> None:
    """Fills in clips, speaks texts in the voices of clips, and writes the page."""
    from helicon.engine.checkpoint import resolve

    network: Any = loaded(resolve(work.home(VOICEBOX.name)))
    clips, options = clips_of(work, network.audio_enc_dec.sample_hz, NUM_CLIPS), options_of(work)
    infill(network, clips, work.home(INFILLED), options)
    speak(network, clips, work.home(SPOKEN), options)
    speech_page(work, clips, options).write(work.folder / PAGE)


def options_of(work: Work) -> dict[str, Any]:
    """How the flow is followed: as the samples of the run were made."""
    trainer = work.recipes[VOICEBOX.name].trainer
    return {"steps": trainer.get("sample_steps", STEPS), "cond_scale": trainer.get("sample_cond_scale", 1.0)}


# ---------------------------------------------------------------------- what it was kept from


def clips_of(work: Work, sample_hz: int, most: int) -> list[Clip]:
    """Made-up utterances like those of the recipe, of other texts; no two of the same text, and the voices in turn."""
    speech, places = unlearned(work.recipes[VOICEBOX.name].data, most, sample_hz)
    said = {place: speech.utterance(place) for place in places}
    return [Clip(said[place], speech.fetch(place)["audio"], *hidden_in(said[place])) for place in places]


def unlearned(data: Mapping[str, Any], most: int, sample_hz: int = 16000) -> tuple["SyntheticSpeech", list[int]]:
    """Speech like that of a recipe, and at most so many places in it where another text is said; two at least, for one needs the voice
    of another."""
    from helicon.data.synthetic_speech import SyntheticSpeech

    choices, seed = dict(data.get("speech") or {}), data.get("seed", 0)
    known = SyntheticSpeech(data.get("num_samples", 10_000), sample_hz, seed, **choices)
    texts = {known.utterance(index).text for index in range(len(known))}
    others = SyntheticSpeech(1000, sample_hz, seed + 1, **choices)
    found: list[int] = []
    for index in range(len(others)):
        said = others.utterance(index)
        wanted = others.voices[len(found) % len(others.voices)]
        if said.text not in texts and said.voice == wanted and len(found) < most:
            texts.add(said.text)
            found.append(index)
    if len(found) < 2:
        raise ValueError(
            f"texts of {' to '.join(map(str, others.syllables))} syllables were learned from, all or nearly all: allow for more syllables "
            "in data.speech, or for fewer data.num_samples"
        )
    return others, found


def hidden_in(said: "Utterance") -> tuple[tuple[float, float], str]:
    """The middle half of the syllables: the seconds from the first consonant to the end of the last vowel, and the vowels."""
    from helicon.metrics.speech import MELODIES

    vowels = [place for place, phoneme in enumerate(said.phonemes) if phoneme in MELODIES]
    count = max(1, len(vowels) // 2)
    chosen = vowels[(len(vowels) - count) // 2 :][:count]
    begin, end = sum(said.milliseconds[: chosen[0] - 1]), sum(said.milliseconds[: chosen[-1] + 1])
    return (begin / 1000, end / 1000), "".join(said.phonemes[place] for place in chosen)


# ---------------------------------------------------------------------- what it makes


def infill(network: "Network", clips: Sequence[Clip], folder: Path, options: Mapping[str, Any]) -> None:
    """Of each clip: as it was, with silence in its span, and with its span made anew."""
    from helicon.data.sound import Sound
    from helicon.models.voicebox.speech import SpeechMaker

    hz = _rate(network)
    with replaced(folder) as partial:
        partial.mkdir()
        files: list[tuple[Path, str]] = []
        for number, clip in enumerate(clips):
            original, masked, infilled = _paths(partial, number, "original", "masked", "infilled")
            Sound(clip.audio[None], hz, "as it was").write(original)
            silenced = clip.audio.clone()
            silenced[round(clip.span[0] * hz) : round(clip.span[1] * hz)] = 0
            Sound(silenced[None], hz, "what it was given, with the text").write(masked)
            maker = SpeechMaker(network, texts=[clip.text], prompt=masked, span=[clip.span_words], **options)
            _write(maker.make([0], seed=0)[0], infilled, "filled in")
            files += [(path, clip.text) for path in (original, masked, infilled)]
        _list(files, partial)


def speak(network: "Network", clips: Sequence[Clip], folder: Path, options: Mapping[str, Any]) -> None:
    """The text of each clip in the voice of the next one; and that one, before it."""
    from helicon.data.sound import Sound
    from helicon.models.voicebox.speech import SpeechMaker

    with replaced(folder) as partial:
        partial.mkdir()
        files: list[tuple[Path, str]] = []
        for number, (clip, voice) in enumerate(in_voices(clips)):
            prompt, spoken = _paths(partial, number, *SPOKEN_FILES)
            Sound(voice.audio[None], _rate(network), f"the voice, saying {voice.text}").write(prompt)
            maker = SpeechMaker(network, texts=[clip.text], prompt=prompt, prompt_text=voice.text, **options)
            _write(maker.make([0], seed=0)[0], spoken, f"the same voice, saying {clip.text}")
            files += [(prompt, voice.text), (spoken, clip.text)]
        _list(files, partial)


def in_voices(clips: Sequence[Clip]) -> list[tuple[Clip, Clip]]:
    """Texts, each with a clip of another text whose voice it is to be said in."""
    return list(zip(clips, [*clips[1:], clips[0]], strict=True))


def voices_in(pairs: Sequence[tuple[Clip, Clip]]) -> str:
    """In whose voices the texts are said, in words."""
    if len({voice.said.voice for _, voice in pairs}) == 1:
        return "going on from a clip of another text, in the only voice it learned"
    return "in the voice of a clip of another text, which it goes on from; all voices are among those it learned"


def _rate(network: Any) -> int:
    return network.audio_enc_dec.sample_hz


def _paths(folder: Path, number: int, *names: str) -> list[Path]:
    return [folder / f"{number:05d}-{name}.wav" for name in names]


def _write(speech: Any, path: Path, title: str) -> None:
    from dataclasses import replace

    replace(speech, sound=replace(speech.sound, title=title)).write(path)


def _list(files: Iterable[tuple[Path, str]], folder: Path) -> None:
    lines = "".join(json.dumps({"path": path.name, "text": text}) + "\n" for path, text in files)
    (folder / MANIFEST).write_text(lines, encoding="utf-8")


# ---------------------------------------------------------------------- what is to be heard in it


def heard_in(path: Path) -> "Contour":
    import soundfile
    import torch

    from helicon.metrics.speech import read_contour

    wave, hz = soundfile.read(path, dtype="float32")
    return read_contour(torch.from_numpy(wave), hz)


def vowels_between(contour: "Contour", span: tuple[float, float]) -> str:
    """The vowels whose middle is in these seconds."""
    ends = zip(contour.symbols, contour.begins, contour.ends, strict=True)
    return "".join(symbol for symbol, begin, end in ends if span[0] <= (begin + end) / 2 <= span[1])


def num_right(expected: str, heard: str) -> int:
    """Of the expected vowels; what is too much, or missing, or wrong is subtracted."""
    from helicon.metrics.speech import edit_distance

    return max(0, len(expected) - edit_distance(expected, heard))


def nearest_voice(hz: float) -> str:
    from helicon.data.synthetic_speech import VOICES

    return min(VOICES, key=lambda voice: abs(VOICES[voice][0] - hz))


class Filled(CaptionedSounds):
    """Of each text the clip as it was, with its span left out, and filled in."""

    def verdict(self, clips: Sequence[Clip]) -> str:
        from helicon.metrics.speech import CHANCE

        count = sum(len(clip.hidden) for clip in clips)
        was, made = (
            sum(
                num_right(clip.hidden, vowels_between(heard_in(self.files[clip.text][place]), clip.span))
                for clip in clips
            )
            for place in (0, 2)
        )
        return (
            f"The melody of a vowel tells which one it is, and a simple rule hears {made} of the {count} hidden vowels right, where "
            f"guessing gives {CHANCE * count:.0f}; in the clips as they were it hears {was}."
        )


class Said(CaptionedSounds):
    """Of each text the clip whose voice it is said in, and what was said."""

    @classmethod
    def of(cls, folder: Path, pairs: Sequence[tuple[Clip, Clip]]) -> Self:
        """(The manifest says what is said in each file: in the voices other texts.)"""
        return cls({clip.text: _paths(folder, number, *SPOKEN_FILES) for number, (clip, _) in enumerate(pairs)})

    def verdict(self, pairs: Sequence[tuple[Clip, Clip]]) -> str:
        from helicon.metrics.speech import CHANCE, vowels_of

        heard = [heard_in(self.files[clip.text][1]) for clip, _ in pairs]
        expected = [vowels_of(clip.text) for clip, _ in pairs]
        count = sum(map(len, expected))
        right = sum(num_right(vowels, contour.symbols) for vowels, contour in zip(expected, heard, strict=True))
        vowels = f"The same rule hears {right} of {count} vowels right, where guessing gives {CHANCE * count:.0f}"
        num_voices = len({voice.said.voice for _, voice in pairs})
        if num_voices == 1:
            return f"{vowels}."
        same = sum(
            nearest_voice(contour.hz) == voice.said.voice for contour, (_, voice) in zip(heard, pairs, strict=True)
        )
        return f"{vowels}, and {same} of {len(pairs)} have the pitch of the voice that was asked for, of {num_voices} there are."


# ---------------------------------------------------------------------- the page


def speech_page(work: Work, clips: Sequence[Clip], options: Mapping[str, Any]) -> Page:
    numbers = page.metrics(work.home(VOICEBOX.name))
    pairs = in_voices(clips)
    filled, spoken = Filled.read(work.home(INFILLED)), Said.of(work.home(SPOKEN), pairs)
    shown = Page(
        "Speech from text, and from what is around it",
        "One network, trained on made-up speech: it learned to lead noise to the frames of a sound, by a text and by whatever else of the "
        "sound is known.",
    )
    remark = (
        "Clips and texts it has not learned from. The middle syllables were taken out and made anew, with seed 0 and not chosen; the rest "
        f"is the clip itself. {filled.verdict(clips)}"
    )
    some = [clip.text for clip in clips[:NUM_SHOWN]]
    shown.section("What it fills in", page.paragraph(remark), filled.gallery(some))
    remark = f"Texts it has not learned from, each {voices_in(pairs)}. {spoken.verdict(pairs)}"
    shown.section("What it says", page.paragraph(remark), spoken.gallery(some))
    shown.section("How far it came", page.tiles(_speech_numbers(numbers)), _speech_curves(numbers))
    made = {
        INFILLED: "The clips above and more: as they were, with a span left out, and filled in.",
        SPOKEN: "The texts above and more, and the clips whose voices they are said in.",
    }
    files = files_of(work, made)
    shown.section("Go on from here", page.commands(_speech_commands(work, pairs[0], options)), files)
    return shown


def _speech_numbers(numbers: Mapping[str, page.Points]) -> list[tuple[str, str]]:
    return [
        (page.last(numbers, "valid_loss", "{:.2f}"), "squared error of the velocity, of held-out speech"),
        (
            page.last(numbers, "valid_infilling", "{:.2f}"),
            "squared error of hidden frames, guessed from what is around",
        ),
        (page.last(numbers, "valid_copying", "{:.2f}"), "the same where the nearest known frame is copied"),
    ]


def _speech_curves(numbers: Mapping[str, page.Points]) -> str:
    errors = {"guessed": "valid_infilling", "copied": "valid_copying"}
    return page.charts(
        page.chart("Velocity: squared error", both(numbers, "loss")),
        page.chart(
            "Hidden frames: squared error",
            [page.Curve(name, numbers.get(key, []), is_measured=True) for name, key in errors.items()],
        ),
    )


def _speech_commands(work: Work, pair: tuple[Clip, Clip], options: Mapping[str, Any]) -> list[tuple[str, str]]:
    clip, voice = pair
    chosen = "".join(f" {name}={value:g}" for name, value in options.items())
    run, original, prompt = (
        shlex.quote(str(path))
        for path in (
            work.home(VOICEBOX.name),
            work.home(INFILLED) / "00000-original.wav",
            work.home(SPOKEN) / "00000-voice.wav",
        )
    )
    generate = f'helicon generate {run} --text "{clip.text}"'
    return [
        ("a text in the voice of a clip", f'{generate} --prompt {prompt} --prompt-text "{voice.text}"{chosen}'),
        ("a span of a clip made anew", f"{generate} --prompt {original} --span {clip.span_words}{chosen}"),
        (
            "train on for longer; the demo's command then renews this page",
            f"helicon resume {run} num_train_steps={4 * steps_of(work.home(VOICEBOX.name))}",
        ),
        ("your own speech with its texts, on a GPU", "helicon train voicebox/voicebox data.source=my/manifest.jsonl"),
        ("everything that can be trained", "helicon recipes"),
    ]


DEMO = Demo((VOICEBOX,), show_speech)
