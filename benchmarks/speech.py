"""How good is the codec? A SoundStream, learned from an hour of speech in minutes.

    python benchmarks/data/speech.py unpacked speech                              # the data, see there
    python benchmarks/speech.py --data speech --minutes 5 --out report            # the default recipe, soundstream/soundstream
    python benchmarks/speech.py --data speech --recipe reference --out report     # the reference's architecture and losses
    python benchmarks/speech.py --data synthetic --tiny --out report              # anywhere, a minute; means nothing

A tenth of the recordings (chosen by a hash of their names) is held out. The number of steps, and with it the cosine schedule, is
fitted to the time, and the discriminators take part from `--adversary-from` of them on. Judged with the averaged weights on whole held-out
recordings (at most `--judged`, of at most 8 s): SI-SDR and log-mel distance of all of it and second by second (a codec that has heard crops
may lose its way behind their length), use of the codebooks, and PESQ where the package is installed
(`pip install pesq`; `--only-pesq` hears what an earlier call has written to `--out`, on a machine that has it). The curves are of the run's
own validation. `model.KEY=VALUE` and `trainer.KEY=VALUE` change the recipe.
"""

import argparse
import random
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
import torch
from torch import Tensor

import report
from budget import Deadline, curves, train_for
from helicon import SoundStream, SoundStreamTrainer, registry
from helicon.config import load_recipe
from helicon.data.files import read_manifest
from helicon.data.split import split_indices
from helicon.data.synthetic_sounds import SyntheticSounds
from helicon.engine.trainer import Trainer
from helicon.metrics.audio import is_silent, log_mel_distance, si_sdr
from helicon.metrics.codes import code_counts, usage
from helicon.models.soundstream.task import spectrogram_grid, write_wave

HELD_OUT, LONGEST, RESERVE = 0.1, 8.0, 45  # of the recordings; seconds of one that is judged; seconds for judging
SHOWN = 4  # in the picture
CURVES = ("loss", "valid_si_sdr", "valid_log_mel_distance", "valid_codebook_use")


@dataclass(frozen=True)
class Crops:
    """Batches of crops straight from the device: from anywhere, or (for validation) the same ones each time."""

    waves: Sequence[Tensor]  # [n], int16
    batch_size: int
    length: int
    count: int  # of batches
    shuffled: bool = True

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        draw = random.Random(None if self.shuffled else 0)
        lengths = [len(wave) for wave in self.waves]
        for _ in range(self.count):
            chosen = draw.choices(range(len(self.waves)), weights=lengths, k=self.batch_size)
            yield {"audio": torch.stack([self._crop(self.waves[index], draw) for index in chosen]).float() / 2**15}

    def _crop(self, wave: Tensor, draw: random.Random) -> Tensor:
        start = draw.randrange(max(1, len(wave) - self.length + 1))
        cut = wave[start : start + self.length]
        return torch.nn.functional.pad(cut, (0, self.length - len(cut)))


def load_speech(source: str, hz: int, is_tiny: bool) -> tuple[list[Tensor], list[Tensor]]:
    """The recordings to learn from, and those held out, as 16 bits."""
    keys: Sequence[str | int]
    if source == "synthetic":
        sounds = SyntheticSounds(40 if is_tiny else 2000, hz, 1.0)
        waves = [(sounds[index]["audio"] * 2**15).round().short() for index in range(len(sounds))]
        keys = range(len(waves))
    else:
        files = read_manifest(Path(source) / "manifest.jsonl", ("path", "text"))
        waves, keys = [_read(path, hz) for path in files.paths], files.keys
    learned, held_out = split_indices(keys, HELD_OUT, seed=0)
    minutes = [sum(len(waves[index]) for index in part) / hz / 60 for part in (learned, held_out)]
    print(f"{minutes[0]:.1f} minutes to learn from, {minutes[1]:.1f} held out")
    return [waves[index] for index in learned], [waves[index] for index in held_out]


def _read(path: Path, hz: int) -> Tensor:
    samples, own = soundfile.read(path, dtype="int16", always_2d=True)
    if own != hz:
        raise SystemExit(f"{path} has {own} samples a second, and the codec {hz}")
    return torch.from_numpy(np.ascontiguousarray(samples[:, 0]))


def judge(
    codec: SoundStream, held_out: Sequence[Tensor], device: torch.device, written: int
) -> tuple[dict[str, Any], list[Any]]:
    """The quality of whole recordings, and the first of them with their reconstructions."""
    found: dict[str, list[float | None]] = {"SI-SDR, dB": [], "log-mel distance": [], "PESQ": []}
    rows, codes = [], []
    seconds: list[list[tuple[float | None, float]]] = [[] for _ in range(int(LONGEST))]
    for wave in held_out:
        audio = wave[: round(LONGEST * codec.sample_hz)].to(device).float()[None, None] / 2**15
        coded = codec.encode(audio)
        rebuilt = codec.decode(coded)[..., : audio.shape[-1]]
        codes.append(coded[0].cpu())
        found["SI-SDR, dB"].append(_decibels(rebuilt, audio))
        found["log-mel distance"].append(log_mel_distance(rebuilt, audio, codec.sample_hz).item())
        parts = zip(rebuilt.split(codec.sample_hz, dim=-1), audio.split(codec.sample_hz, dim=-1), strict=True)
        for second, (made, real) in zip(seconds, parts, strict=False):
            if real.shape[-1] == codec.sample_hz:
                second.append((_decibels(made, real), log_mel_distance(made, real, codec.sample_hz).item()))
        found["PESQ"] += _pesq(audio[0, 0], rebuilt[0, 0], codec.sample_hz)
        if len(rows) < written:
            rows.append({"original": audio[0].cpu(), "rebuilt": rebuilt[0].cpu()})
    numbers: dict[str, Any] = {name: _mean(values) for name, values in found.items()}
    used = usage(code_counts(torch.cat(codes), codec.codebook_size))
    numbers |= {"codebook use": used["codebook_use"].item(), "perplexity": used["perplexity"].item()}
    for place, name in enumerate(("SI-SDR", "log-mel distance")):
        means = [_mean([pair[place] for pair in second]) for second in seconds if second]
        numbers[f"{name} of each second"] = ", ".join("silent" if mean is None else f"{mean:.2f}" for mean in means)
    return numbers, rows


def _decibels(made: Tensor, real: Tensor) -> float | None:
    """SI-SDR; there is none of silence."""
    return None if is_silent(real).item() else si_sdr(made, real).item()


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _pesq(real: Tensor, made: Tensor, hz: int) -> list[float]:
    try:
        from pesq import PesqError, pesq
    except ImportError:
        return []
    try:
        return [pesq(hz, real.cpu().numpy(), made.clamp(-1, 1).cpu().numpy(), "wb" if hz == 16000 else "nb")]
    except PesqError:
        return []  # of a recording in which it finds no words


def written_pesq(folder: Path) -> float:
    """The mean of the pairs of sounds in the folder."""
    found = []
    for original in sorted(folder.glob("*-original.wav")):
        waves = [
            _read(path, 16000) for path in (original, original.with_name(original.name.replace("original", "rebuilt")))
        ]
        found += _pesq(*(wave.float() / 2**15 for wave in waves), hz=16000)
    if not found:
        raise SystemExit(f"{folder} holds no pair NN-original.wav and NN-rebuilt.wav, or the package pesq is missing")
    return sum(found) / len(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="synthetic", help='a folder with manifest.jsonl (path, text), or "synthetic"')
    parser.add_argument("--recipe", default="soundstream", help="of recipes/soundstream")
    parser.add_argument("--minutes", type=float, default=5.0, help="to train for")
    parser.add_argument("--budget-seconds", type=float, help="for all of it: it trains less if it must")
    parser.add_argument(
        "--adversary-from", type=float, default=0.6, help="part of the steps before the discriminators take part"
    )
    parser.add_argument("--judged", type=int, default=60, help="held-out recordings listened to")
    parser.add_argument("--written", type=int, default=4, help="of them written as sounds, beside their originals")
    parser.add_argument("--only-pesq", action="store_true", help="hear what is in --out")
    parser.add_argument("--tiny", action="store_true", help="the debug recipe, to see that this script runs")
    parser.add_argument("--run", type=Path, default=Path("runs/speech"), help="where the network is kept")
    parser.add_argument("--out", type=Path, required=True, help="a folder for report.json, sounds and pictures")
    parser.add_argument("overrides", nargs="*", help="model.KEY=VALUE or trainer.KEY=VALUE")
    arguments = parser.parse_args()
    if arguments.only_pesq:
        print(f"PESQ {written_pesq(arguments.out):.2f}")
        return
    start, device = time.monotonic(), report.device()
    name = "debug" if arguments.tiny else arguments.recipe
    recipe = load_recipe(
        f"soundstream/{name}",
        arguments.overrides,
        sections=lambda trains: registry.entries[trains].recipe_sections(),
    )
    torch.manual_seed(0)
    codec = SoundStream(**recipe.model)
    learned, held_out = load_speech(arguments.data, codec.sample_hz, arguments.tiny)
    random.Random(0).shuffle(held_out)
    for folder in (arguments.run, arguments.out):
        folder.mkdir(parents=True, exist_ok=True)
    options = {key: value for key, value in recipe.trainer.items() if key != "num_workers"}
    batch, length = options["batch_size"], round(recipe.data["data_max_length_seconds"] * codec.sample_hz)
    on_device = [[wave.to(device) for wave in part] for part in (learned, held_out)]
    train, valid = Crops(on_device[0], batch, length, 10**6), Crops(on_device[1], batch, length, 4, shuffled=False)

    def build(steps: int, adversary_at: int, run: Path | None) -> Trainer:
        own = {
            "num_train_steps": steps, "discr_start_step": adversary_at,
            "log_every": max(1, steps // 100), "val_every": max(1, steps // 20), "val_num_batches": None,
            "save_results_every": 10**9, "save_model_every": 10**9, "tensorboard": False, "force_clear_prev_results": True,
            "results_folder": run or arguments.run / "codec-run",
        }  # fmt: skip
        return SoundStreamTrainer(codec, train_dataloader=train, val_dataloader=valid, **{**options, **own})

    deadline = Deadline(start, arguments.minutes, arguments.budget_seconds, RESERVE)
    trainer, how = train_for(deadline, 2 if arguments.tiny else 30, build, arguments.adversary_from)
    with trainer.inference(), torch.autocast(device.type, enabled=False), torch.compiler.set_stance("force_eager"):
        numbers, rows = judge(codec, held_out[: arguments.judged], device, arguments.written)
        codec.save(arguments.run / "codec")
    for number, row in enumerate(rows):
        for kind, wave in row.items():
            write_wave(arguments.out / f"{number:02d}-{kind}.wav", wave, codec.sample_hz)
    spectrogram_grid(rows[:SHOWN], codec.sample_hz).save(arguments.out / "spectrograms.png")
    curves(arguments.run / "codec-run", CURVES).save(arguments.out / "curves.png")
    shutil.copy(arguments.run / "codec-run" / "metrics.jsonl", arguments.out / "metrics.jsonl")
    parts = [part for part in (codec.autoencoder, codec.discriminators) if part is not None]
    sizes = " + ".join(f"{sum(p.numel() for p in part.parameters()) / 1e6:.0f}" for part in parts)
    report.show(
        "speech", [{"case": recipe.name, "parameters, M": sizes, **how, **numbers}], arguments.out / "report.json"
    )


if __name__ == "__main__":
    main()
