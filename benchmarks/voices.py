"""How good is the speech? A VoiceBox, and a vocoder to hear it with, learned from three hours of speech in minutes.

    python benchmarks/data/transcribed.py unpacked speech                             # the data, see there
    python benchmarks/voices.py --data speech --stage vocoder --out report            # three minutes of training
    python benchmarks/voices.py --data speech --stage voicebox --budget-seconds 580 --out report
    python benchmarks/voices.py --only-judge report                                   # hears the sounds, on a machine that can
    python benchmarks/voices.py --data synthetic --tiny --out report                  # anywhere, a minute; means nothing

A twentieth of the utterances (chosen by a hash of their names) is held out. The others are also joined, with utterances of the same voice,
to longer ones: a text in the voice of a prompt is such a pair. The log-mel frames of all of them are made beforehand and wait on the
device, in groups of like length, so that nothing but the network takes time. Each stage measures its speed, fits the number of steps, and
with it the cosine schedule, to the time it has, trains through the trainer, and is judged with the averaged weights on held-out utterances.

Of the vocoder: the log-mel distance of what it makes of their frames, beside that of Griffin-Lim. Of the VoiceBox: how far the middle
30 % of an utterance, filled in (a sample, and the mean of all samples, which is one step from noise), is from what was there, beside
copies of the nearest frames and a straight line between them, as mean absolute differences of log-mel frames. Then held-out texts are
spoken, half of them English, after a prompt of another utterance of the voice (held out, too), as long as the recording is. `--out` gets
"spoken" sounds, beside the "recording", the "prompt", what the vocoder makes of the recording's own frames ("vocoded"), and noise; and
what `--only-judge` needs to say how many words are heard wrong, and whose voice is heard (see `listening.py`). The stages leave their
networks in `--run`; without a vocoder there, Griffin-Lim makes frames audible. `model.KEY=VALUE` and `trainer.KEY=VALUE` change a stage.
"""

import argparse
import json
import random
import shutil
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

import listening
import report
from budget import Deadline, curves, train_for
from helicon import (
    CharacterTokenizer,
    ConditionalFlowMatcherWrapper,
    MelVoco,
    Vocoder,
    VocoderTrainer,
    VoiceBox,
    VoiceBoxTrainer,
)
from helicon.config import apply_override
from helicon.data.files import read_manifest
from helicon.data.split import split_indices
from helicon.data.synthetic_speech import SyntheticSpeech
from helicon.engine.trainer import Trainer
from helicon.metrics.audio import log_mel_distance
from helicon.models.soundstream.task import spectrogram_grid, write_wave
from helicon.models.voicebox.infilling import copied, frame_error, interpolated, middle_span
from helicon.models.voicebox.model import stretched
from helicon.nn.network import load_network
from speech import Crops

HELD_OUT = 0.05
HZ = listening.HZ
MEL = {"sampling_rate": HZ, "n_mels": 80, "n_fft": 1024, "hop_length": 256}
PROMPT, SPOKEN = (1.5, 6.0), (1.0, 8.0)  # seconds of a prompt, and of a recording whose text is spoken
SHOWN, NOISES = 4, 8  # sounds in the picture, and noises that are written
MINUTES = {"vocoder": 3.0, "voicebox": 7.0}
RESERVE = {"vocoder": 40, "voicebox": 75}  # seconds for judging and saving
CURVES = {
    "vocoder": ("loss", "valid_log_mel_distance", "valid_stft_distance"),
    "voicebox": ("loss", "valid_loss", "valid_infilling", "valid_copying"),
}


@dataclass(frozen=True)
class Size:
    models: Mapping[str, Mapping[str, Any]]  # keywords of the networks, by stage
    trainers: Mapping[str, Mapping[str, Any]]
    batch_frames: int  # of a batch, padding among them
    groups: int  # of utterances of like length
    copies: int  # of each utterance, joined with others
    longest: float  # seconds of an utterance that the VoiceBox learns from
    crop: float  # seconds that the vocoder hears at a time
    synthetic: int  # utterances, where they are made up
    judged: int  # utterances that are filled in, and that the vocoder is judged by
    spoken: int
    at_once: int  # sounds that are made together
    steps: int  # of the solver
    probe: int  # training steps that are timed


FULL = Size(
    models={
        "vocoder": {},
        "voicebox": {"dim": 768, "depth": 12, "heads": 12, "dim_cond_emb": 512, "ff_dropout": 0.1, "alignment": "free"},
    },
    trainers={
        "vocoder": {"batch_size": 32, "lr": 5e-4, "betas": (0.8, 0.9)},
        "voicebox": {"optimizer": "muon", "lr": 1e-3, "wd": 0.02, "compile": "graphs"},
    },
    batch_frames=24 * 1024, groups=4, copies=4, longest=14.0, crop=1.0, synthetic=2000, judged=96, spoken=40, at_once=32,
    steps=32, probe=40,
)  # fmt: skip
TINY = Size(
    models={
        "vocoder": {
            "dim": 32, "depth": 1, "mult": 2, "discr_periods": (2,), "discr_windows": (128,), "discr_channels": 2,
            "multi_spectral_window_powers_of_two": (6, 8), "multi_spectral_n_mels": (10, 40),
        },
        "voicebox": {
            "dim": 32, "depth": 2, "heads": 2, "dim_head": 16, "dim_cond_emb": 16, "text_depth": 1, "time_hidden_dim": 32,
            "num_register_tokens": 2, "alignment": "frames",
        },
    },
    trainers={"vocoder": {"batch_size": 2, "lr": 1e-3}, "voicebox": {"lr": 3e-3}},
    batch_frames=512, groups=2, copies=1, longest=4.0, crop=0.1, synthetic=60, judged=3, spoken=3, at_once=2, steps=2, probe=2,
)  # fmt: skip


# ---------------------------------------------------------------------------------------------------- data


@dataclass(frozen=True)
class Utterance:
    name: str
    text: str
    voice: str
    wave: Tensor  # [n], int16
    frames: Tensor  # [t, d], log-mel, on the device
    joined: tuple["Utterance", ...] = ()  # what it is put together from

    @property
    def parts(self) -> tuple["Utterance", ...]:
        return self.joined or (self,)

    @property
    def seconds(self) -> float:
        return len(self.frames) * MEL["hop_length"] / HZ

    def audio(self) -> Tensor:
        """In whole frames, from -1 to 1."""
        samples = self.wave.new_zeros(len(self.frames) * MEL["hop_length"])
        samples[: len(self.wave)] = self.wave
        return samples.float() / 2**15


def load_speech(source: str, size: Size, device: torch.device) -> tuple[list[Utterance], list[Utterance]]:
    """The utterances to learn from, and those held out, in an order of chance."""
    found = made_up(size.synthetic) if source == "synthetic" else from_files(Path(source))
    learned, held_out = split_indices([one.name for one in found], HELD_OUT, seed=0)
    space = MelVoco(**MEL).to(device)
    encoded = lambda one: replace(one, frames=space.encode(one.wave.to(device).float()[None] / 2**15)[0])
    parts = [[encoded(found[index]) for index in part] for part in (learned, held_out)]
    random.Random(0).shuffle(parts[1])
    minutes = [sum(one.seconds for one in part) / 60 for part in parts]
    voices = len({one.voice for one in found})
    print(f"{voices} voices: {minutes[0]:.1f} minutes to learn from, {minutes[1]:.1f} held out", flush=True)
    return parts[0], parts[1]


def made_up(count: int) -> list[Utterance]:
    data = SyntheticSpeech(count, HZ)
    found = []
    for index in range(count):
        said, wave = data.utterance(index), (data[index]["audio"] * 2**15).round().short()
        found.append(Utterance(f"{index:05d}", said.text, said.voice, wave, torch.empty(0)))
    return found


def from_files(folder: Path) -> list[Utterance]:
    files = read_manifest(folder / "manifest.jsonl", ("path", "text", "voice"))
    with ThreadPoolExecutor() as pool:
        waves = list(pool.map(_read, files.paths))
    rows = zip(files.keys, files.rows, waves, strict=True)
    return [Utterance(Path(key).stem, row["text"], row["voice"], wave, torch.empty(0)) for key, row, wave in rows]


def _read(path: Path) -> Tensor:
    samples, hz = soundfile.read(path, dtype="int16", always_2d=True)
    if hz != HZ:
        raise SystemExit(f"{path} has {hz} samples a second, and this experiment {HZ}")
    return torch.from_numpy(np.ascontiguousarray(samples[:, 0]))


def joined(utterances: Sequence[Utterance], copies: int, longest: float) -> list[Utterance]:
    """Each utterance followed by others of its voice, up to a length of chance, a few times over."""
    draw, voices = random.Random(0), defaultdict(list)
    for one in utterances:
        voices[one.voice].append(one)
    found = []
    for one in utterances:
        for _ in range(copies):
            limit, parts = draw.uniform(0, longest), [one, draw.choice(voices[one.voice])]
            while sum(part.seconds for part in parts) < limit:
                parts.append(draw.choice(voices[one.voice]))
            if sum(part.seconds for part in parts) <= longest:
                frames = torch.cat([part.frames for part in parts])
                text = " ".join(part.text for part in parts)
                found.append(replace(one, text=text, frames=frames, joined=tuple(parts)))
    return found


def batch_of(utterances: Sequence[Utterance], reader: CharacterTokenizer | None = None) -> dict[str, Any]:
    """What is said as texts; or, with a reader, as tokens that know when they are said."""
    frames = [one.frames for one in utterances]
    device = frames[0].device
    lengths = torch.tensor([len(each) for each in frames], device=device)
    found = {"features": pad_sequence(frames, batch_first=True), "feature_lengths": lengths}
    if reader is None:
        return {**found, "texts": [one.text for one in utterances]}
    read = [timed(one.parts, reader) for one in utterances]
    phonemes, durations = ([row[place] for row in read] for place in (0, 1))
    found["phonemes"] = pad_sequence(phonemes, batch_first=True, padding_value=-1).to(device)
    found["durations"] = pad_sequence(durations, batch_first=True).to(device)
    return found


def timed(parts: Sequence[Utterance], reader: CharacterTokenizer) -> tuple[Tensor, Tensor]:
    """The tokens of utterances one after the other, and how many seconds each lasts: all tokens of an utterance equally long, as
    nothing is known of them, but none of them in the frames of another utterance, which may be spoken at another pace."""
    ids, *own = reader([" ".join(part.text for part in parts), *(part.text for part in parts)])
    counts = [int((row >= 0).sum()) for row in own]
    counts[:-1] = [count + 1 for count in counts[:-1]]  # the space after it
    ids = ids[ids >= 0]
    assert sum(counts) == len(ids)
    seconds = [torch.full((count,), part.seconds / max(1, count)) for count, part in zip(counts, parts, strict=True)]
    return ids, torch.cat(seconds)


def grouped(
    utterances: Sequence[Utterance], count: int, reader: CharacterTokenizer | None = None
) -> list[dict[str, Any]]:
    """By length, with as many frames in each group: each padded to its longest."""
    order = sorted(utterances, key=lambda one: len(one.frames))
    ends = np.cumsum([len(one.frames) for one in order])
    which = (count * (ends - 1) // ends[-1]).tolist()
    parts = [[one for one, group in zip(order, which, strict=True) if group == number] for number in range(count)]
    return [batch_of(part, reader) for part in parts if part]


@dataclass(frozen=True)
class Batches:
    """All groups in batches of as many frames, in an order drawn anew each time; what is left of a group is left out."""

    groups: Sequence[Mapping[str, Any]]
    frames: int

    def rows(self, group: Mapping[str, Any]) -> int:
        return min(len(group["features"]), max(1, self.frames // group["features"].shape[1]))

    def __len__(self) -> int:
        return sum(len(group["features"]) // self.rows(group) for group in self.groups)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        found = []
        for group in self.groups:
            rows = self.rows(group)
            order = torch.randperm(len(group["features"]))
            found += [(group, part) for part in order.split(rows) if len(part) == rows]
        random.shuffle(found)
        return (_some(group, part) for group, part in found)


def _some(group: Mapping[str, Any], chosen: Tensor) -> dict[str, Any]:
    places = chosen.to(group["features"].device)
    take = lambda value: value[places] if isinstance(value, Tensor) else [value[index] for index in chosen.tolist()]
    return {name: take(value) for name, value in group.items()}


@dataclass(frozen=True)
class Uncompiled:
    """Batches to validate on: of sizes of their own, for which it is not worth compiling anything."""

    batches: Sequence[Mapping[str, Any]]

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        with torch.compiler.set_stance("force_eager"):
            yield from (dict(batch) for batch in self.batches)


@dataclass(frozen=True)
class Experiment:
    """What both stages have in common."""

    size: Size
    learned: list[Utterance]
    held_out: list[Utterance]
    run: Path  # keeps networks
    out: Path  # gets sounds, pictures and the report
    device: torch.device
    guidance: float
    overrides: Sequence[str]

    def settings(self, stage: str, *constructors: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """Keywords of the network and of the trainer."""
        body = {"model": dict(self.size.models[stage]), "trainer": dict(self.size.trainers[stage])}
        for override in self.overrides:
            apply_override(override, body, dict(zip(("model", "trainer"), constructors, strict=True)))
        return body["model"], body["trainer"]

    def options(self, stage: str, steps: int, run: Path | None) -> dict[str, Any]:
        """What both trainings have in common."""
        return {
            "num_train_steps": steps, "scheduler": "cosine", "warmup_steps": min(200, steps // 10), "max_grad_norm": 1.0,
            "ema_beta": 0.999, "log_every": max(1, steps // 100), "val_every": max(1, steps // 20), "val_num_batches": None,
            "save_results_every": 10**9, "save_model_every": 10**9, "tensorboard": False,
            "results_folder": run or self.run / f"{stage}-run", "force_clear_prev_results": True,
        }  # fmt: skip

    def space(self) -> MelVoco:
        """Frames, made audible by the vocoder of an earlier stage, or by Griffin-Lim."""
        vocoder: Any = load_network(self.run / "vocoder") if (self.run / "vocoder").exists() else None
        return MelVoco(**MEL, vocoder=vocoder).to(self.device).eval()


# ---------------------------------------------------------------------------------------------------- the vocoder


def train_vocoder(experiment: Experiment, deadline: Deadline) -> list[dict[str, Any]]:
    size, device = experiment.size, experiment.device
    keywords, own = experiment.settings("vocoder", Vocoder, VocoderTrainer)
    torch.manual_seed(0)
    model = Vocoder(**MEL, **keywords)
    waves = [[one.wave.to(device) for one in part] for part in (experiment.learned, experiment.held_out)]
    length = round(size.crop * HZ)
    train = Crops(waves[0], own["batch_size"], length, 10**6)
    valid = Crops(waves[1], own["batch_size"], length, 4, shuffled=False)

    def build(steps: int, adversary_at: int, run: Path | None) -> Trainer:
        options = {**experiment.options("vocoder", steps, run), "discr_start_step": adversary_at, **own}
        return VocoderTrainer(model, train_dataloader=train, val_dataloader=valid, **options)

    trainer, how = train_for(deadline, size.probe, build, adversary_from=0.25)
    with trainer.inference(), torch.autocast(device.type, enabled=False), torch.compiler.set_stance("force_eager"):
        spaces = {"vocoder": MelVoco(**MEL, vocoder=model), "Griffin-Lim": MelVoco(**MEL)}
        judged = experiment.held_out[: size.judged]
        rows = [{"case": name, "log-mel distance": rebuilt_distance(space, judged)} for name, space in spaces.items()]
        model.save(experiment.run / "vocoder")
    return [rows[0] | {"parameters, M": millions(model.generator)} | how, rows[1]]


def rebuilt_distance(space: MelVoco, utterances: Sequence[Utterance]) -> float:
    """Between utterances and what is made of their frames."""
    found = []
    for one in utterances:
        audio = one.audio().to(one.frames.device)[None]
        found.append(log_mel_distance(space.decode(one.frames[None]), audio, HZ).item())
    return sum(found) / len(found)


# ---------------------------------------------------------------------------------------------------- the voicebox


def train_voicebox(experiment: Experiment, deadline: Deadline) -> list[dict[str, Any]]:
    size, device = experiment.size, experiment.device
    keywords, own = experiment.settings("voicebox", VoiceBox, VoiceBoxTrainer)
    short = [one for one in experiment.learned if one.seconds <= size.longest]
    learned = short + joined(short, size.copies, size.longest)
    tokenizer = CharacterTokenizer.fitted(one.text for one in experiment.learned)
    torch.manual_seed(1)
    voicebox = VoiceBox(num_cond_tokens=tokenizer.num_tokens, audio_enc_dec=MelVoco(**MEL), **keywords)
    model = ConditionalFlowMatcherWrapper(voicebox, tokenizer=tokenizer).to(device)
    # Tokens that are stretched over frames are given with the times between which each utterance is spoken.
    reader = tokenizer if voicebox.alignment == "frames" else None
    learner = model if reader is None else ConditionalFlowMatcherWrapper(voicebox).to(device)
    for each in {model, learner}:
        each.fit_normalisation(torch.cat([one.frames for one in experiment.learned])[None])
    train = Batches(grouped(learned, size.groups, reader), size.batch_frames)
    valid = Uncompiled(grouped(experiment.held_out, size.groups, reader))
    print(
        f"{len(short)} of {len(experiment.learned)} utterances last {size.longest:g} s at most, {len(learned)} with those that are "
        f"joined: {len(train)} batches",
        flush=True,
    )

    def build(steps: int, _: int, run: Path | None) -> Trainer:
        options = {"batch_size": 1, **experiment.options("voicebox", steps, run), **own}  # batches are made already
        return VoiceBoxTrainer(learner, train_dataloader=train, val_dataloader=valid, **options)

    trainer, how = train_for(deadline, size.probe, build)
    with trainer.inference(), torch.compiler.set_stance("force_eager"):
        model.save(experiment.run / "voicebox")
        errors = judge_infilling(model, experiment)
        speak(model, experiment)
    return [{"case": "voicebox", "parameters, M": millions(model), **how}, *errors]


def judge_infilling(model: ConditionalFlowMatcherWrapper, experiment: Experiment) -> list[dict[str, Any]]:
    """How far made frames are from the true ones, in ways to make them."""
    size, sums = experiment.size, defaultdict(float)
    utterances = sorted(experiment.held_out[: size.judged], key=lambda one: len(one.frames))
    ways: dict[str, dict[str, Any]] = {
        "infilled": {"steps": size.steps},
        f"infilled, guidance {experiment.guidance:g}": {"steps": size.steps, "cond_scale": experiment.guidance},
        "infilled, the mean": {"steps": 1, "method": "euler", "grid": "uniform"},
    }
    for start in range(0, len(utterances), size.at_once):
        batch = batch_of(utterances[start : start + size.at_once])
        true, lengths = batch["features"], batch["feature_lengths"]
        mask = torch.arange(true.shape[1], device=true.device) < lengths[:, None]
        span = middle_span(lengths, true.shape[1])
        given = {"cond": true, "cond_lengths": lengths, "cond_mask": span, "texts": batch["texts"], "seed": start}
        found = {name: model.draw(**{**given, **way}).features for name, way in ways.items()}
        found |= {
            "a straight line": interpolated(true, span, mask),
            "copies of the nearest frame": copied(true, span, mask),
        }
        for name, frames in found.items():
            sums[name] += frame_error(frames, true, span).item() * span.sum().item()
        sums["frames"] += span.sum().item()
    frames = sums.pop("frames")
    return [report.measured({"case": name, "log-mel difference": total / frames}) for name, total in sums.items()]


@dataclass(frozen=True)
class Request:
    """A held-out text, to be spoken in the voice of another utterance."""

    target: Utterance
    prompt: Utterance


def requests(held_out: Sequence[Utterance], learned: Sequence[Utterance], count: int) -> list[Request]:
    """Half of them English where there is some, and of the others of each voice as many. Prompts are held out, too, where a voice has
    another such utterance."""
    within = lambda one, limits: limits[0] <= one.seconds <= limits[1]
    voice_of = lambda some, one: [other for other in some if other.voice == one.voice and within(other, PROMPT)]
    found: dict[str, list[Request]] = defaultdict(list)
    for one in held_out:
        prompts = [other for other in voice_of(held_out, one) if other is not one] or voice_of(learned, one)
        if prompts and within(one, SPOKEN):
            found[one.voice].append(Request(one, prompts[len(found[one.voice]) % len(prompts)]))
    english = [request for voice in found if voice.endswith(listening.ENGLISH) for request in found[voice]]
    chosen = english[: count // 2]
    others = [found[voice] for voice in sorted(found) if not voice.endswith(listening.ENGLISH)]
    for turn in range(max(map(len, others), default=0)):
        chosen += [some[turn] for some in others if turn < len(some)]
    return chosen[:count]


def speak(model: ConditionalFlowMatcherWrapper, experiment: Experiment) -> None:
    """Writes what is made of held-out texts, and what it is to be compared with."""
    size, space, rows = experiment.size, experiment.space(), []
    asked = requests(experiment.held_out, experiment.learned, size.spoken)
    if not asked:
        low, high = PROMPT
        raise SystemExit(f"no held-out utterance has another of its voice, of {low:g} to {high:g} s, to prompt with")
    for start in range(0, len(asked), size.at_once):
        part = asked[start : start + size.at_once]
        for request, frames in zip(part, spoken(model, part, size.steps, experiment.guidance, start), strict=True):
            with torch.autocast(experiment.device.type, enabled=False):
                waves = {
                    "spoken": space.decode(frames[None])[0],
                    "vocoded": space.decode(request.target.frames[None])[0],
                }
            waves |= {"recording": request.target.audio(), "prompt": request.prompt.audio()}
            rows.append({name: wave[None].float().cpu() for name, wave in sorted(waves.items())})
    spectrogram_grid(rows[:SHOWN], HZ).save(experiment.out / "spectrograms.png")
    generator = torch.Generator().manual_seed(0)
    for row in rows[:NOISES]:
        wave = row["recording"]
        row["noise"] = torch.randn(wave.shape, generator=generator) * wave.square().mean().sqrt()
    lines = []
    for number, (request, row) in enumerate(zip(asked, rows, strict=True)):
        for kind, wave in row.items():
            write_wave(experiment.out / f"{number:02d}-{kind}.flac", wave, HZ)
        target, prompt = request.target, request.prompt
        said = {"name": f"{number:02d}", "text": target.text, "voice": target.voice, "prompt_text": prompt.text}
        lines.append(json.dumps(said, ensure_ascii=False) + "\n")
    (experiment.out / "sounds.jsonl").write_text("".join(lines), encoding="utf-8")


def spoken(
    model: ConditionalFlowMatcherWrapper, asked: Sequence[Request], steps: int, guidance: float, seed: int
) -> list[Tensor]:
    """The frames after the prompt's, as many as the recording has."""
    prompts = batch_of([request.prompt for request in asked])
    lengths = prompts["feature_lengths"]
    wanted = torch.tensor([len(request.target.frames) for request in asked], device=lengths.device)
    drawn = model.draw(
        cond=prompts["features"], cond_lengths=lengths, lengths=lengths + wanted, steps=steps, cond_scale=guidance, seed=seed,
        **in_own_frames(model, asked),
    )  # fmt: skip
    rows = zip(drawn.features, lengths.tolist(), wanted.tolist(), strict=True)
    return [frames[start : start + count] for frames, start, count in rows]


def in_own_frames(model: ConditionalFlowMatcherWrapper, asked: Sequence[Request]) -> dict[str, Any]:
    """What is said; with `alignment=frames` the prompt's text in the frames of the prompt, and the other in those that follow."""
    texts = [f"{request.prompt.text} {request.target.text}" for request in asked]
    if model.voicebox.alignment == "free":
        return {"texts": texts}
    ids, own = model.tokenize(texts).cpu(), model.tokenize([request.target.text for request in asked]).cpu()
    durations = torch.zeros_like(ids)
    for row, request in enumerate(asked):
        last, first = int((ids[row] >= 0).sum()), int((ids[row] >= 0).sum() - (own[row] >= 0).sum())
        for start, end, frames in ((0, first, request.prompt.frames), (first, last, request.target.frames)):
            place = stretched(torch.tensor([end - start]), torch.tensor([len(frames)]), len(frames))[0]
            durations[row, start:end] = place.bincount(minlength=end - start)
    return {"phoneme_ids": ids, "phoneme_durations": durations}


# ---------------------------------------------------------------------------------------------------- all of it


def millions(model: torch.nn.Module) -> float:
    return sum(parameter.numel() for parameter in model.parameters()) / 1e6


STAGES = {"vocoder": train_vocoder, "voicebox": train_voicebox}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help='a folder with manifest.jsonl (path, text, voice), or "synthetic"')
    parser.add_argument("--stage", choices=(*STAGES, "all"), default="all")
    parser.add_argument("--minutes", type=float, help=f"to train a stage for; usually {MINUTES}")
    parser.add_argument("--budget-seconds", type=float, help="for each stage as a whole: it trains less if it must")
    parser.add_argument("--guidance", type=float, default=2.0, help="of what is spoken")
    parser.add_argument("--only-judge", type=Path, metavar="FOLDER", help="hear what an earlier call has written there")
    parser.add_argument("--tiny", action="store_true", help="tiny networks, to see that this script runs")
    parser.add_argument("--run", type=Path, default=Path("runs/voices"), help="where networks are kept between stages")
    parser.add_argument("--out", type=Path, help="a folder for report.json, sounds and pictures")
    parser.add_argument("overrides", nargs="*", help="model.KEY=VALUE or trainer.KEY=VALUE, of one --stage")
    arguments = parser.parse_args()
    if arguments.only_judge is not None:
        report.show("voices, heard", listening.judged(arguments.only_judge), arguments.only_judge / "heard.json")
        return
    if arguments.data is None or arguments.out is None:
        parser.error("--data and --out are needed, or --only-judge")
    if arguments.overrides and arguments.stage == "all":
        parser.error("model.KEY=VALUE and trainer.KEY=VALUE are of one stage: name it with --stage")
    size = TINY if arguments.tiny else FULL
    for folder in (arguments.run, arguments.out):
        folder.mkdir(parents=True, exist_ok=True)
    start, device = time.monotonic(), report.device()
    parts = load_speech(arguments.data, size, device)
    experiment = Experiment(size, *parts, arguments.run, arguments.out, device, arguments.guidance, arguments.overrides)
    for stage in list(STAGES) if arguments.stage == "all" else [arguments.stage]:
        deadline = Deadline(start, arguments.minutes or MINUTES[stage], arguments.budget_seconds, RESERVE[stage])
        rows = STAGES[stage](experiment, deadline)
        (arguments.run / f"{stage}.json").write_text(json.dumps(rows))
        curves(arguments.run / f"{stage}-run", CURVES[stage]).save(arguments.out / f"{stage}-curves.png")
        shutil.copy(arguments.run / f"{stage}-run" / "metrics.jsonl", arguments.out / f"{stage}-metrics.jsonl")
        start = time.monotonic()
    kept = [arguments.run / f"{stage}.json" for stage in STAGES]
    rows = [row for path in kept if path.exists() for row in json.loads(path.read_text())]
    report.show("voices", rows, arguments.out / "report.json")


if __name__ == "__main__":
    main()
