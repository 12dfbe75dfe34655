"""Does music find its words? A MuLaN, learned from four hours of captioned music in minutes.

    python benchmarks/data/grooves.py unpacked music                              # the data, see there
    python benchmarks/music.py --data music --minutes 5 --out report
    python benchmarks/music.py --data synthetic --tiny --out report               # anywhere, half a minute; means nothing

Held out, by a hash of their names, are a twentieth of the styles with all of their clips, and of the other styles a tenth of the clips:
styles never heard, and arrangements never heard of styles that were. Of the rest a tenth is validated on, and the others are learned
from. A clip's caption is what its author wrote, or that and its instruments; of both, one is drawn each time. Everything waits on the
device, and of each clip a few seconds are heard, from another moment each time. The number of steps, and with it the cosine schedule, is
fitted to the time.

Judged with those averaged weights that validated best, each held-out part among itself and with both kinds of
captions: recall at 1, 5 and 10 of the clip that a text is of, and of the text of a clip, beside chance; and how often what is found first
is of the same style. (A clip's vector is the mean of two: of its first seconds and of its last.) `--out` gets report.json, report.md (the
table, and what some held-out texts find) and a picture of the similarities, in which clips of one style stand beside each other.
`model.KEY=VALUE` and `trainer.KEY=VALUE` change it.
"""

import argparse
import copy
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

import report
from budget import Deadline, curves, train_for
from helicon.config import apply_override
from helicon.data.files import read_manifest
from helicon.data.split import split_indices
from helicon.data.synthetic_sounds import SyntheticSounds
from helicon.engine.trainer import Trainer
from helicon.metrics.retrieval import Retrieval, chance_at, ranks, recall_at
from helicon.models.musiclm.mulan import MuLaN
from helicon.models.musiclm.task import similarity_picture
from helicon.models.musiclm.trainers import MuLaNTrainer, build_mulan
from voices import Uncompiled

HZ = 16000
STYLES_HELD_OUT, CLIPS_HELD_OUT, VALIDATED = 0.05, 0.1, 0.1
RESERVE = 30  # seconds for judging
SHOWN, TEXTS_SHOWN, FOUND_SHOWN = 48, 12, 3
CURVES = ("loss", "valid_loss", "valid_text_to_audio_recall_at_10", "temperature")


@dataclass(frozen=True)
class Size:
    model: Mapping[str, Any]  # keywords of `build_mulan`
    trainer: Mapping[str, Any]
    seconds: float  # of a clip that are heard at a time
    synthetic: int  # clips, where they are made up
    probe: int  # training steps that are timed


FULL = Size(
    model={
        "audio": {"dim": 384, "depth": 6, "heads": 6, "patch_dropout_prob": 0.5, "ff_dropout": 0.1},
        "text": {"dim": 256, "depth": 4, "heads": 4, "ff_dropout": 0.1, "max_seq_len": 192},
        "dim_latent": 128,
    },
    trainer={"batch_size": 256, "optimizer": "muon", "lr": 1e-3, "wd": 0.1, "compile": "graphs"},
    seconds=5.0, synthetic=2000, probe=40,
)  # fmt: skip
TINY = Size(
    model={
        "audio": {
            "dim": 16, "depth": 1, "heads": 2, "dim_head": 8, "patch_size": 8, "n_mels": 32, "spec_aug_freq_mask": 2,
            "spec_aug_time_mask": 4,
        },
        "text": {"dim": 16, "depth": 1, "heads": 2, "dim_head": 8, "max_seq_len": 64},
        "dim_latent": 8,
    },
    trainer={"batch_size": 8, "lr": 3e-3},
    seconds=0.4, synthetic=60, probe=2,
)  # fmt: skip


# ---------------------------------------------------------------------------------------------------- data


@dataclass(frozen=True)
class Clip:
    name: str
    text: str
    instruments: Sequence[str]
    style: str
    wave: Tensor  # [n], int16

    @property
    def captions(self) -> tuple[str, str]:
        """The author's words, and those with the instruments."""
        return self.text, f"{self.text}; {', '.join(self.instruments)}" if self.instruments else self.text


KINDS = ("the author's words", "and the instruments")  # of captions


@dataclass(frozen=True)
class Parts:
    learned: list[Clip]
    validated: list[Clip]  # which weights are judged is decided by these
    arrangements: list[Clip]  # held out, of styles that are learned from
    styles: list[Clip]  # held out


def load_music(source: str, size: Size) -> Parts:
    clips = made_up(size.synthetic) if source == "synthetic" else from_files(Path(source))
    long = [clip for clip in clips if len(clip.wave) >= size.seconds * HZ]
    names = sorted({clip.style for clip in long})
    if len(names) < 2:
        raise SystemExit(f"{source}: of {len(clips)} clips {len(long)} last {size.seconds:g} s, of {len(names)} styles")
    new = {names[index] for index in split_indices(names, STYLES_HELD_OUT, seed=0)[1]}
    known = [clip for clip in long if clip.style not in new]
    rest, held_out = split(known, CLIPS_HELD_OUT, seed=0)
    learned, validated = split(rest, VALIDATED, seed=1)
    by_style = lambda clips: sorted(clips, key=lambda clip: (clip.style, clip.name))
    parts = Parts(learned, validated, by_style(held_out), by_style(clip for clip in long if clip.style in new))
    print(
        f"{len(parts.learned)} clips to learn from and {len(parts.validated)} to validate on; held out {len(parts.arrangements)} of their styles and "
        f"{len(parts.styles)} of {len(new)} styles never heard; {len(clips) - len(long)} are too short",
        flush=True,
    )
    return parts


def split(clips: Sequence[Clip], part: float, seed: int) -> tuple[list[Clip], list[Clip]]:
    """The clips, less a part of them, and that."""
    kept, taken = split_indices([clip.name for clip in clips], part, seed=seed)
    return [clips[index] for index in kept], [clips[index] for index in taken]


def made_up(count: int) -> list[Clip]:
    """A style is the kind of a sound, at some pitch."""
    sounds, clips = SyntheticSounds(count, HZ, 0.5), []
    for index in range(count):
        text, wave = sounds[index]["texts"], (sounds[index]["audio"] * 2**15).round().short()
        clips.append(Clip(f"{index:05d}", text, (), " ".join(text.split()[2:]), wave))
    return clips


def from_files(folder: Path) -> list[Clip]:
    files = read_manifest(folder / "manifest.jsonl", ("path", "text", "instruments", "style"))
    with ThreadPoolExecutor() as pool:
        waves = list(pool.map(_read, files.paths))
    rows = zip(files.keys, files.rows, waves, strict=True)
    return [Clip(key, row["text"], row["instruments"], row["style"], wave) for key, row, wave in rows]


def _read(path: Path) -> Tensor:
    samples, hz = soundfile.read(path, dtype="int16", always_2d=True)
    if hz != HZ:
        raise SystemExit(f"{path} has {hz} samples a second, and this experiment {HZ}")
    return torch.from_numpy(np.ascontiguousarray(samples[:, 0]))


class Shelf:
    """Clips on the device, and their captions as the network reads them."""

    def __init__(self, clips: Sequence[Clip], model: MuLaN, seconds: float):
        self.clips, self.samples, device = clips, round(seconds * HZ), model.device
        self.waves = pad_sequence([clip.wave for clip in clips], batch_first=True).to(device)
        self.lengths = torch.tensor([len(clip.wave) for clip in clips], device=device)
        captions = [caption for kind in range(len(KINDS)) for caption in self.captions(kind)]
        read = model.read_texts(captions)
        ids = torch.where(read["text_mask"], read["texts"], -1)
        room = model.text.max_seq_len - ids.shape[1]  # (All batches have one shape.)
        self.ids = F.pad(ids, (0, room), value=-1).unflatten(0, (len(KINDS), len(clips)))

    def captions(self, kind: int) -> list[str]:
        return [clip.captions[kind] for clip in self.clips]

    def batch(self, rows: Tensor, part: Tensor, kinds: Tensor) -> dict[str, Tensor]:
        """Some clips, each from where `part` of it that is left out would come before, with captions of these kinds."""
        starts = (part * (self.lengths[rows] - self.samples + 1)).long()
        places = starts[:, None] + torch.arange(self.samples, device=rows.device)
        return {"audio": self.waves[rows[:, None], places].float() / 2**15, "text_token_ids": self.ids[kinds, rows]}

    def whole(self, part: float, kind: int) -> dict[str, Tensor]:
        rows = torch.arange(len(self.clips), device=self.waves.device)
        return self.batch(rows, torch.full_like(rows, part, dtype=torch.float), torch.full_like(rows, kind))


@dataclass(frozen=True)
class Batches:
    """All clips in an order drawn anew each time, each from another moment and with one of its captions."""

    shelf: Shelf
    size: int

    def __len__(self) -> int:
        return len(self.shelf.clips) // self.size

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        device = self.shelf.waves.device
        order = torch.randperm(len(self.shelf.clips)).to(device)
        for rows in order[: len(self) * self.size].split(self.size):
            kinds = torch.randint(len(KINDS), rows.shape, device=device)
            yield self.shelf.batch(rows, torch.rand(rows.shape, device=device), kinds)


# ---------------------------------------------------------------------------------------------------- judging


def embedded(model: MuLaN, shelf: Shelf, kind: int) -> tuple[Tensor, Tensor]:
    """Unit vectors of the clips and of their captions."""
    first, last = (shelf.whole(part, kind) for part in (0.0, 0.999))
    audio = sum(
        torch.cat([model.get_audio_latents(some) for some in batch["audio"].split(64)]) for batch in (first, last)
    )
    ids = first["text_token_ids"]
    return F.normalize(torch.as_tensor(audio), dim=-1).cpu(), model.get_text_latents(
        ids.clamp(min=0), text_mask=ids >= 0
    ).cpu()


def judged(model: MuLaN, shelf: Shelf, name: str) -> list[dict[str, Any]]:
    rows = []
    styles = [clip.style for clip in shelf.clips]
    is_same = torch.tensor([[one == other for other in styles] for one in styles])
    for kind, words in enumerate(KINDS):
        audio, text = embedded(model, shelf, kind)
        found = Retrieval.of(audio, text, shelf.captions(kind))
        for way, recall, similarities in (
            ("text to music", found.text_to_audio, text @ audio.T),
            ("music to text", found.audio_to_text, audio @ text.T),
        ):
            row: dict[str, Any] = {"case": f"{name}, {way}, {words}", "candidates": recall.num_candidates}
            row |= {f"recall at {k}": value for k, value in recall.at.items()}
            row |= {f"chance at {k}": value for k, value in recall.chance_at.items()}
            row["style at 1"] = recall_at(similarities, 1, is_same)
            row["chance of style"] = chance_at(is_same.sum(dim=1).tolist(), len(styles), 1)
            rows.append(report.measured(row))
    return rows


def found_by_texts(model: MuLaN, shelf: Shelf) -> str:
    """In Markdown: some texts, and the captions of the clips that they find."""
    audio, text = embedded(model, shelf, 0)
    similarities, captions = text @ audio.T, shelf.captions(0)
    lines = ["| text | finds the clips of | its own place |\n|---|---|---|\n"]
    step = max(1, len(captions) // TEXTS_SHOWN)
    places = ranks(similarities).tolist()
    for query in range(0, len(captions), step):
        order = similarities[query].argsort(descending=True)[:FOUND_SHOWN].tolist()
        best = "<br>".join(f"{captions[place]} ({similarities[query, place]:.2f})" for place in order)
        lines.append(f"| {captions[query]} | {best} | {places[query]} |\n")
    return "".join(lines)


def markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    lines = ["| case | candidates | recall at 1, 5, 10 | chance | style at 1 | chance |\n|---|---|---|---|---|---|\n"]
    for row in rows:
        recall, chance = (
            ", ".join(f"{100 * row[f'{name} at {k}']:.1f}" for k in (1, 5, 10)) for name in ("recall", "chance")
        )
        style = f"{100 * row['style at 1']:.1f} % | {100 * row['chance of style']:.1f} %"
        lines.append(f"| {row['case']} | {row['candidates']} | {recall} % | {chance} % | {style} |\n")
    return "".join(lines)


# ---------------------------------------------------------------------------------------------------- all of it


def settings(size: Size, overrides: Sequence[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Keywords of the network and of the trainer."""
    body = copy.deepcopy({"model": dict(size.model), "trainer": dict(size.trainer)})
    for override in overrides:
        apply_override(override, body, {"model": build_mulan, "trainer": MuLaNTrainer})
    return body["model"], body["trainer"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--data", required=True, help='a folder with manifest.jsonl (path, text, instruments, style), or "synthetic"'
    )
    parser.add_argument("--minutes", type=float, default=5.0, help="to train for")
    parser.add_argument("--budget-seconds", type=float, help="for all of it: it trains less if it must")
    parser.add_argument("--tiny", action="store_true", help="tiny networks, to see that this script runs")
    parser.add_argument("--run", type=Path, default=Path("runs/music"), help="where the network is kept")
    parser.add_argument("--out", type=Path, required=True, help="a folder for report.json, report.md and pictures")
    parser.add_argument("overrides", nargs="*", help="model.KEY=VALUE or trainer.KEY=VALUE")
    arguments = parser.parse_args()
    start, size = time.monotonic(), TINY if arguments.tiny else FULL
    keywords, own = settings(size, arguments.overrides)
    parts = load_music(arguments.data, size)
    for folder in (arguments.run, arguments.out):
        folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    model = build_mulan(**keywords).to(report.device())
    learned, validated, arrangements, styles = (
        Shelf(clips, model, size.seconds)
        for clips in (parts.learned, parts.validated, parts.arrangements, parts.styles)
    )
    train = Batches(learned, min(own["batch_size"], len(parts.learned)))

    def build(steps: int, _: int, run: Path | None) -> Trainer:
        options = {
            "num_train_steps": steps, "scheduler": "cosine", "warmup_steps": min(100, steps // 10), "max_grad_norm": 1.0,
            "ema_beta": 0.999 if steps > 1000 else 0.9, "log_every": max(1, steps // 100), "val_every": max(1, steps // 20),
            "save_results_every": 10**9, "save_model_every": 10**9, "tensorboard": False, "force_clear_prev_results": True,
            "results_folder": run or arguments.run / "mulan-run", **own,
        }  # fmt: skip
        valid = Uncompiled([validated.whole(0.5, 1)])
        own_data = {"train_dataloader": train, "val_dataloader": valid, "data_max_length_seconds": size.seconds}
        return MuLaNTrainer(model, **own_data, **options)

    deadline = Deadline(start, arguments.minutes, arguments.budget_seconds, RESERVE)
    trainer, how = train_for(deadline, size.probe, build, keep_best=True)
    with trainer.inference(), torch.compiler.set_stance("force_eager"):
        rows = judged(model, arrangements, "arrangements never heard") + judged(model, styles, "styles never heard")
        examples = found_by_texts(model, arrangements)
        audio, text = embedded(model, arrangements, 1)
        model.save(arguments.run / "mulan")
    similarity_picture((audio @ text.T)[:SHOWN, :SHOWN]).save(arguments.out / "similarities.png")
    curves(arguments.run / "mulan-run", CURVES).save(arguments.out / "curves.png")
    shutil.copy(arguments.run / "mulan-run" / "metrics.jsonl", arguments.out / "metrics.jsonl")
    (arguments.out / "report.md").write_text(f"{markdown(rows)}\n{examples}", encoding="utf-8")
    millions = sum(parameter.numel() for parameter in model.parameters()) / 1e6
    trained = {"case": f"trained on {len(parts.learned)} clips", "parameters, M": millions, **how}
    report.show("music", [trained, *rows], arguments.out / "report.json")


if __name__ == "__main__":
    main()
