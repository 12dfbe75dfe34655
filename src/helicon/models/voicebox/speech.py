"""From what stands on the command line to speech files: Voicebox's side of `helicon generate`.

    --text                                    the text, in whatever voice
    --text --prompt voice.wav --prompt-text   the text in the voice of the prompt, in which the prompt's text is said
    --text --prompt x.wav --span 0.8:1.4      these seconds of x.wav made anew, where --text is what is said in all of it
      ... span_seconds=1.0                    the same, in a span of another length: another text may be said there
    (no --text)                               whatever the network likes, after a prompt, in a span or from nothing

Outside of its spans a prompt keeps its own samples. The file that is written holds what is new: not the prompt that lends its voice.

Letters: n samples, p frames of a prompt, t frames, d features, m tokens, k phonemes.
"""

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from helicon.data.sound import SUFFIXES, Sound, read_prompt, spectrogram_beside
from helicon.models.voicebox.durations import DurationPredictor, frames_of
from helicon.models.voicebox.features import MelVoco
from helicon.models.voicebox.flow import ConditionalFlowMatcherWrapper
from helicon.models.voicebox.model import stretched
from helicon.models.voicebox.solving import Grid
from helicon.models.voicebox.text import PADDING
from helicon.models.voicebox.vocoder import Vocoder
from helicon.nn.capture import evaluating
from helicon.nn.network import Network
from helicon.nn.resample import resample

logger = logging.getLogger(__name__)

PACE = 15.0  # tokens a second, of a network that does not know its own: English, written in characters, is read about so fast
USUAL_SECONDS = 3.0  # of a sound of which nothing tells how long it is
MOST_SECONDS = 3600.0  # that can be asked for
FADE = 0.0025  # seconds, half of the way from a recording to what was made, and back


@dataclass(frozen=True)
class Speech:
    """A sound, and how it came to be."""

    sound: Sound
    length: str  # what it is as long as, in words
    evaluations: int  # of the network

    def write(self, path: Path) -> str:
        """The sound and its spectrogram beside it; returns what there is to say of it."""
        self.sound.write(path)
        seconds = self.sound.wave.shape[1] / self.sound.sample_hz
        return f"{seconds:.2f} s ({self.length}), {self.evaluations} evaluations"


@dataclass(frozen=True)
class Prompt:
    """A recording, and which of its frames are to be made anew."""

    wave: Float[Tensor, " n"]
    features: Float[Tensor, "1 p d"]
    hidden: Bool[Tensor, " p"] | None = None  # None: all are kept, and others follow

    @property
    def frames(self) -> int:
        return self.features.shape[1]


@dataclass(frozen=True)
class Spoken:
    """A text as tokens, and (where there is a duration predictor) how many seconds each of its phonemes lasts."""

    ids: Int[Tensor, " m"]
    seconds: Float[Tensor, " k"] | None = None


@dataclass(frozen=True)
class Plan:
    """What is said in one sound, and in how many frames."""

    frames: int | None  # with those of a prompt; None: as many as the semantic tokens take
    length: str  # the same in words
    ids: Int[Tensor, " m"] | None = None
    durations: Int[Tensor, " m"] | None = None  # frames of each token, where they do not all last equally long


class SpeechMaker:
    """Speaks with a trained flow: texts, in the voice of a prompt or in any; or makes spans of a recording anew."""

    suffixes: ClassVar[tuple[str, ...]] = SUFFIXES
    sheet = None  # no file holds several sounds
    beside = staticmethod(spectrogram_beside)

    def __init__(
        self,
        network: Network,
        *,
        texts: Sequence[str] = (),
        prompt: Path | None = None,
        prompt_text: str | None = None,
        span: Sequence[str] = (),
        durations: Network | None = None,
        vocoder: Network | None = None,
        span_seconds: float | None = None,
        seconds: float | None = None,
        keep_prompt: bool = False,
        steps: int = 16,
        method: str | None = None,
        grid: Grid = "sway",
        cond_scale: float = 1.0,
        guidance_interval: tuple[float, float] = (0.0, 1.0),
    ):
        """
        Args:
            texts: what is said; with a span, in the whole recording as it is to be.
            prompt: a recording, of any rate: the voice to speak in, or (with `span`) what to change.
            prompt_text: what is said in it, where its voice is lent.
            span: seconds of the prompt to make anew, as in 0.8:1.4; an end that is left out is that of the prompt.
            durations: a `DurationPredictor`, where the network has none of its own.
            vocoder: a `Vocoder`, in the place of what the network was trained with.
            span_seconds: how long the new span is; as long as the old one by default.
            seconds: how long the new speech is. By default as long as the duration predictor says, else as fast as the prompt, else as
                fast as what the network learned from.
            keep_prompt: begin the file with the prompt whose voice is lent.
            steps: of the solver; more is slower and closer to what was learned.
            method: the solver: euler, midpoint (two evaluations a step), rk4 (four) or adaptive; by default the network's own.
            grid: where the steps are: uniform, sway (shorter at first) or pruned (of 5, 6, 7, 10, 12 or 16 steps).
            cond_scale: how closely text and voice are followed; 1 is no guidance.
            guidance_interval: the times, from 0 to 1, at which there is guidance.
        """
        assert isinstance(network, ConditionalFlowMatcherWrapper)
        if network.audio_enc_dec is None:
            raise ValueError("this VoiceBox learned from features, without an audio_enc_dec: it makes no sounds")
        how: dict[str, Any] = {"steps": steps, "grid": grid, "cond_scale": cond_scale}
        how |= {"guidance_interval": guidance_interval, "method": method or network.solving.method}
        replace(network.solving, **how)  # which refuses what cannot be
        self.network, self.space, self.how = network, _audible(network.audio_enc_dec, vocoder), how
        self.predictor = _predictor(network, durations)
        self.texts, self.prompt_text, self.keep_prompt = _readable(network, texts), prompt_text, keep_prompt
        self.seconds, self.span_seconds = seconds, span_seconds
        self._check_options(prompt, span)
        self.prompt = None if prompt is None else self._heard(prompt, span)
        self.times_tokens = self._times_tokens()
        reads = bool(self.texts) and network.tokenizer is not None
        self.prompt_said = self._spoken(prompt_text) if reads and prompt_text is not None else None
        self.plans = [self._plan(text) for text in self.texts] or [self._unsaid()]

    def _check_options(self, prompt: Path | None, span: Sequence[str]) -> None:
        for name, seconds in {"seconds": self.seconds, "span_seconds": self.span_seconds}.items():
            frame = 1 / self.network.frame_hz
            if seconds is not None and not frame <= seconds <= MOST_SECONDS:
                raise ValueError(
                    f"{name}={seconds:g} must be at least a frame, {frame:g}, and at most {MOST_SECONDS:g}"
                )
        lends = {"--prompt-text": self.prompt_text is not None, "keep_prompt": self.keep_prompt}
        changes = {"--span": bool(span), "span_seconds": self.span_seconds is not None}
        for name in (name for name, is_given in {**lends, **changes}.items() if is_given and prompt is None):
            raise ValueError(f"{name} is about a recording: give that with --prompt")
        for name in (
            name for name, is_given in {**lends, "seconds": self.seconds is not None}.items() if is_given and span
        ):
            raise ValueError(f"{name} does not go with --span: the rest of the recording stays as it is")
        if self.span_seconds is not None and len(span) != 1:
            raise ValueError("span_seconds is the new length of a span: name one, with --span")
        if self.prompt_text is not None and not self.texts:
            raise ValueError("--prompt-text goes with --text: give both, or neither")
        if prompt is not None and self.texts and not span and self.prompt_text is None:
            if self.network.tokenizer is not None and not len(self._gap()):
                raise ValueError(
                    f"this network has no token for silence, which could stand for what is said in {prompt}: give that with --prompt-text"
                )
            logger.warning("--prompt-text: what is said in %s would help to follow its voice", prompt)
        if span and not self.texts and self.network.voicebox.condition_on_text:
            logger.warning(
                "--text: this network learned with texts, and what is said in all of %s would help it", prompt
            )
        if span and self.texts and self.network.text_to_semantic is not None:
            raise ValueError(
                "this network makes semantic tokens of texts, and has none for the middle of a recording: leave --text out"
            )

    @property
    def prompts(self) -> list[str]:
        return self.texts or [""]

    @property
    def has_spans(self) -> bool:
        return self.prompt is not None and self.prompt.hidden is not None

    # ------------------------------------------------------------------ the recording

    def _heard(self, path: Path, span: Sequence[str]) -> Prompt:
        """The prompt at the rate of the feature space, in frames."""
        wave, hz = read_prompt(path, 1)
        wave, hop = resample(wave.float(), hz, self.space.sample_hz), self.space.downsample_factor
        if len(wave) < hop:
            lasts, least = len(wave) / self.space.sample_hz, hop / self.space.sample_hz
            raise ValueError(f"{path} lasts {lasts:.3f} s, and the model needs {least:.3f} s to hear anything")
        if not span:  # the last frame of a sound that is cut off is filled up with silence, from which nothing goes on
            wave = wave[: len(wave) // hop * hop]
        prompt = Prompt(wave, self.network.features(wave[None].to(self.network.device))[0])
        if not span:
            return prompt
        hidden = torch.zeros(prompt.frames, dtype=torch.bool)
        for words in span:
            first, last = self._frames(words, len(wave), path)
            hidden[first:last] = True
        prompt = replace(prompt, hidden=hidden)
        return prompt if self.span_seconds is None else _with_room(prompt, self._in_frames(self.span_seconds), hop)

    def _frames(self, span: str, num_samples: int, path: Path) -> tuple[int, int]:
        """The first frame that a span touches, and the one after the last."""
        whole = num_samples / self.space.sample_hz
        begin, colon, end = span.partition(":")
        try:
            first, last = float(begin or 0), float(end or whole)
        except ValueError:
            colon = ""
        if not colon:
            raise ValueError(f"--span {span} must be two numbers of seconds, as in 0.8:1.4")
        if not 0 <= first < min(last, whole) <= last <= whole + 0.005:  # which is told in hundredths
            raise ValueError(
                f"--span {span} is not in {path}, which lasts {whole:.2f} s: give two times in it, the later last"
            )
        first_frame = math.floor(first * self.network.frame_hz + 1e-6)
        return first_frame, max(math.ceil(last * self.network.frame_hz - 1e-6), first_frame + 1)

    # ------------------------------------------------------------------ what is said, and in how many frames

    def _in_frames(self, seconds: float) -> int:
        return max(1, round(seconds * self.network.frame_hz))

    def _unsaid(self) -> Plan:
        """A sound without a text."""
        if self.prompt is not None and self.has_spans:
            return Plan(self.prompt.frames, self._as_recorded())
        if self.seconds is not None:
            return Plan(self._after_prompt(self.seconds), self._told("as asked for"))
        return Plan(self._after_prompt(USUAL_SECONDS), self._told("as nothing tells; seconds=... does"))

    def _as_recorded(self) -> str:
        return "as the recording" + ("" if self.span_seconds is None else f", with {self.span_seconds:g} s in the span")

    def _told(self, length: str) -> str:
        """Of what; a prompt that is kept is written, too."""
        return f"the prompt, and new speech {length}" if self.keep_prompt and self.prompt is not None else length

    def _after_prompt(self, seconds: float) -> int:
        """Frames of so much new speech, and of the prompt before it."""
        return self._in_frames(seconds) + (0 if self.prompt is None else self.prompt.frames)

    def _plan(self, text: str) -> Plan:
        if self.network.text_to_semantic is not None:
            asked = None if self.seconds is None else self._after_prompt(self.seconds)
            return Plan(asked, "as its semantic tokens" if asked is None else "as asked for")
        own = self._spoken(text)
        if self.prompt is not None and self.has_spans:
            return self._planned(text, [(own, self.prompt.frames)], self._as_recorded())
        seconds, length = self._length(own)
        parts = [(own, self._in_frames(seconds))]
        if self.prompt is not None:
            parts.insert(0, (self._before(self.prompt, len(own.ids), seconds), self.prompt.frames))
        return self._planned(text, parts, self._told(length))

    def _planned(self, text: str, parts: Sequence[tuple[Spoken, int]], length: str) -> Plan:
        """What is said in so many frames, and then in so many more."""
        ids, frames = torch.cat([spoken.ids for spoken, _ in parts]), sum(count for _, count in parts)
        is_free = self.network.voicebox.alignment == "free"
        num_tokens, room = (len(ids), frames) if is_free else (len(parts[-1][0].ids), parts[-1][1])
        if num_tokens > room:
            raise ValueError(
                f"{text!r} cannot be said in {room} frames, as {num_tokens} tokens need one each: give it more time"
            )
        if is_free or not (self.times_tokens or len(parts) > 1):
            return Plan(frames, length, ids)
        return Plan(frames, length, ids, torch.cat([self._placed(spoken, count) for spoken, count in parts]))

    def _placed(self, spoken: Spoken, frames: int) -> Int[Tensor, " m"]:
        """Frames of each token: as predicted, or all alike."""
        total, size = torch.tensor([frames]), len(spoken.ids)
        if not self.times_tokens or spoken.seconds is None:
            return stretched(torch.tensor([size]), total, frames)[0].bincount(minlength=size)
        seconds = _scaled(spoken.seconds, frames / self.network.frame_hz)
        return frames_of(seconds[None], self.network.frame_hz, total)[0]

    def _times_tokens(self) -> bool:
        """Whether the durations that are predicted are those of the network's tokens, which then stand at their frames."""
        own = self.network.tokenizer
        if self.predictor is None or own is None or self.network.voicebox.alignment == "free":
            return False
        reader, said = self.predictor.tokenizer, [*self.texts, self.prompt_text or ""]
        return reader is None or reader.symbols_of(said) == own.symbols_of(said)

    def _spoken(self, text: str) -> Spoken:
        (ids,) = self.network.tokenize([text]).cpu()
        if not len(ids):
            raise ValueError(f"the text {text!r} says nothing: give one with words in it, or none")
        if num_unknown := _num_unknown(ids, text, self.network.tokenizer, "this network", "write it in its symbols"):
            logger.warning("%d of %d symbols of %r are not known to this network", num_unknown, len(ids), text)
        is_timed = self.seconds is not None or self.has_spans
        if self.predictor is None or (is_timed and self.network.voicebox.alignment == "free"):
            return Spoken(ids)
        phonemes, reader = ids, self.predictor.tokenizer
        if reader is not None:  # which may read texts in a way of its own
            (phonemes,) = reader([text])
            is_own = self.predictor is self.network.duration_predictor
            remedy = "give seconds=..." if is_own else "leave --durations out"
            if num_unknown := _num_unknown(phonemes, text, reader, "the duration predictor", remedy):
                logger.warning(
                    "%d of %d symbols of %r are not known to the duration predictor: if it is too short or too long, %s",
                    *(num_unknown, len(phonemes), text, remedy),
                )
        return Spoken(ids, self.predictor.predict_seconds(phonemes[None])[0].cpu())

    def _length(self, own: Spoken) -> tuple[float, str]:
        """How many seconds a text takes, and who says so."""
        if self.seconds is not None:
            return self.seconds, "as asked for"
        prompt, lasts = self.prompt_said, 0.0 if self.prompt is None else self.prompt.frames / self.network.frame_hz
        if own.seconds is not None:
            total, length = own.seconds.sum().item(), "as the duration predictor says"
            if self.network.voicebox.alignment == "frames" and not self.times_tokens:
                length += " in all, as it reads other symbols"
            if prompt is None or prompt.seconds is None:
                return total, length
            return total * lasts / prompt.seconds.sum().item(), f"{length}, at the prompt's pace"
        if prompt is not None:  # with the space after it, so that stretched tokens of both stand where they are said
            return lasts * len(own.ids) / (len(prompt.ids) + len(self._gap())), "as fast as the prompt"
        if (learned := self.network.feature_pace.item() * self.network.frame_hz) > 0:
            return len(own.ids) / learned, f"at {learned:.3g} tokens a second, the pace it learned"
        return len(own.ids) / PACE, f"at {PACE:g} tokens a second, as nothing else tells"

    def _before(self, prompt: Prompt, num_own: int, seconds: float) -> Spoken:
        """What is said in the prompt, up to where the text begins. Of a prompt without its text nobody knows: it has as many spaces as
        it would have tokens, so that the text begins after it."""
        gap = self._gap()
        if (said := self.prompt_said) is not None:
            each = None if said.seconds is None else torch.cat((said.seconds, torch.zeros(len(gap))))
            return Spoken(torch.cat((said.ids, gap)), each)
        count = max(1, round(num_own * prompt.frames / self._in_frames(seconds)))
        return Spoken(gap.repeat(count), torch.ones(count))

    def _gap(self) -> Int[Tensor, " g"]:
        """What stands between two texts: a space, where the tokenizer has one."""
        space = self.network.tokenizer.ids.get(" ")
        return torch.tensor([] if space is None else [space], dtype=torch.long)

    # ------------------------------------------------------------------ speaking

    def make(self, which: Sequence[int], seed: int) -> list[Speech]:
        """A sound for each of these prompts, as one batch."""
        plans = [self.plans[index] for index in which]
        drawn = self.network.draw(**self._given(which, plans), **self.how, batch_size=len(which), seed=seed)
        with torch.no_grad(), evaluating(self.space):
            waves = self.space.decode(drawn.features, drawn.lengths).float().cpu()
        hop, rows = self.space.downsample_factor, zip(which, plans, waves, drawn.lengths.tolist(), strict=True)
        return [
            Speech(
                Sound(self._finished(wave[: frames * hop])[None], self.space.sample_hz, self.prompts[index]),
                plan.length,
                drawn.evaluations,
            )
            for index, plan, wave, frames in rows
        ]

    def _given(self, which: Sequence[int], plans: Sequence[Plan]) -> dict[str, Any]:
        """What `draw` is to be given for these plans."""
        given: dict[str, Any] = {}
        if all(plan.frames is not None for plan in plans):
            given["lengths"] = [plan.frames for plan in plans]
        if self.texts and self.network.text_to_semantic is not None:
            before = "" if self.prompt_text is None else f"{self.prompt_text} "
            given["texts"] = [before + self.texts[index] for index in which]
            if self.prompt is not None:
                given["cond"] = self.prompt.wave[None]  # whose semantic tokens it goes on from
            return given
        for name, rows, fill in (
            ("phoneme_ids", [plan.ids for plan in plans if plan.ids is not None], PADDING),
            ("phoneme_durations", [plan.durations for plan in plans if plan.durations is not None], 0),
        ):
            if rows:
                given[name] = pad_sequence(rows, batch_first=True, padding_value=fill)
        if self.prompt is not None:
            given["cond"] = self.prompt.features
            if self.prompt.hidden is not None:
                given["cond_mask"] = _widened(self.prompt.hidden, _reach(self.space))[None]
        return given

    def _finished(self, made: Float[Tensor, " n"]) -> Float[Tensor, " _"]:
        """The sound to write: what was made, and around it the recording's own samples."""
        prompt, hop = self.prompt, self.space.downsample_factor
        if prompt is None:
            return made
        if prompt.hidden is None and not self.keep_prompt:
            return made[prompt.frames * hop :]
        length = len(made) if prompt.hidden is None else len(prompt.wave)
        if prompt.hidden is None:
            is_given = torch.arange(length) < prompt.frames * hop
        else:
            is_given = ~prompt.hidden.repeat_interleave(hop)[:length]
            is_given = F.pad(is_given, (0, length - len(is_given)), value=True)
        share = _faded(is_given, min(round(FADE * self.space.sample_hz), hop // 4))
        kept, new = (F.pad(wave[:length], (0, max(0, length - len(wave)))) for wave in (prompt.wave, made))
        return share * kept + (1 - share) * new


def _readable(network: ConditionalFlowMatcherWrapper, texts: Sequence[str]) -> list[str]:
    """The texts, once it is seen that someone reads them."""
    if texts and not network.voicebox.condition_on_text:
        raise ValueError("this VoiceBox was trained without texts: leave --text out")
    if texts and network.tokenizer is None and network.text_to_semantic is None:
        raise ValueError("this VoiceBox reads token ids, and has no tokenizer for texts: call its sample, in Python")
    return list(texts)


def _num_unknown(ids: Int[Tensor, " m"], text: str, tokenizer: Any, reader: str, remedy: str) -> int:
    """How many symbols of a text its reader does not know; all of them would say nothing."""
    count = int((ids == tokenizer.unknown).sum())
    if count == len(ids):
        some = ", ".join(sorted(tokenizer.ids, key=str.isalpha, reverse=True)[:8])
        raise ValueError(f"{reader} reads none of {text!r}: it knows {some} ...; {remedy}")
    return count


def _audible(space: Any, vocoder: Network | None) -> Any:
    """The feature space, with a vocoder that makes its frames audible where one was given."""
    if vocoder is None:
        return space
    if not isinstance(vocoder, Vocoder):
        raise ValueError(f"--vocoder holds a {type(vocoder).__name__}: give the run of a vocoder")
    if not isinstance(space, MelVoco) or not space.log:
        raise ValueError(
            f"this network makes frames of a {type(space).__name__}, and a vocoder hears log-mel ones: leave --vocoder out"
        )
    if vocoder.mel != space.mel:
        settings = " ".join(f"model.{name}={value}" for name, value in vars(space.mel).items())
        raise ValueError(
            f"--vocoder was made for frames of {vocoder.mel.unlike(space.mel)}, and this network's have "
            f"{space.mel.unlike(vocoder.mel)}: leave it out, or train one: helicon train voicebox/vocoder {settings}"
        )
    return MelVoco.of(vocoder)


def _predictor(network: ConditionalFlowMatcherWrapper, given: Network | None) -> Any:
    own = network.duration_predictor
    if given is None:
        return own
    if not isinstance(given, DurationPredictor):
        raise ValueError(f"--durations holds a {type(given).__name__}: give the run of a duration predictor")
    if own is not None:
        raise ValueError("this network has the duration predictor that it was trained with: leave --durations out")
    if given.tokenizer is None and given.num_phoneme_tokens != network.voicebox.num_cond_tokens:
        raise ValueError("--durations reads other tokens than this network, and has no tokenizer for texts")
    return given


def _with_room(prompt: Prompt, frames: int, hop: int) -> Prompt:
    """The recording with so many hidden frames in the place of its span."""
    assert prompt.hidden is not None
    places = prompt.hidden.nonzero()[:, 0]
    first, last = int(places[0]), int(places[-1]) + 1
    room = prompt.features.new_zeros(1, frames, prompt.features.shape[2])
    features = torch.cat((prompt.features[:, :first], room, prompt.features[:, last:]), dim=1)
    wave = torch.cat((prompt.wave[: first * hop], torch.zeros(frames * hop), prompt.wave[last * hop :]))
    place = torch.arange(features.shape[1])
    return Prompt(wave, features, (place >= first) & (place < first + frames))


def _reach(space: Any) -> int:
    """How many frames on each side of a span hear something of it, where that is known: of mel frames, by their windows."""
    if not isinstance(space, MelVoco):
        return 0
    return max(0, math.ceil((space.mel.win_length - space.mel.hop_length) / (2 * space.mel.hop_length)))


def _widened(hidden: Bool[Tensor, " t"], reach: int) -> Bool[Tensor, " t"]:
    return F.max_pool1d(hidden[None].float(), 2 * reach + 1, stride=1, padding=reach)[0] > 0


def _scaled(seconds: Float[Tensor, " k"], total: float) -> Float[Tensor, " k"]:
    return seconds * (total / seconds.sum())


def _faded(is_given: Bool[Tensor, " n"], reach: int) -> Float[Tensor, " n"]:
    """1 in what is given, 0 in what is not, but for slopes of 2 * reach samples just inside of the latter."""
    ends = F.pad(is_given[None].float(), (2 * reach, 2 * reach), mode="replicate")
    widened = F.max_pool1d(ends, 2 * reach + 1, stride=1)
    return F.avg_pool1d(widened, 2 * reach + 1, stride=1)[0]
