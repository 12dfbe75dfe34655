"""`helicon pipeline audiolm|musiclm --data FOLDER -o OUT [key=value ...]`: every stage of a model, from sounds to samples.

Adding a kind: a file in `pipelines`, with the steps (helicon.cli.steps) that follow from what was asked for, and two lines below.
"""

import os
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from helicon.cli.generate import check_writable
from helicon.cli.pipelines import audiolm, musiclm
from helicon.cli.pipelines.outline import Request
from helicon.cli.steps import RECORD, Work
from helicon.config import ConfigError


class Kind(StrEnum):
    audiolm = "audiolm"
    musiclm = "musiclm"


PIPELINES = {Kind.audiolm: audiolm.PIPELINE, Kind.musiclm: musiclm.PIPELINE}


class Captions(StrEnum):
    column = "column"
    beside = "beside"
    folder = "folder"


def pipeline(
    kind: Annotated[Kind, typer.Argument(help="What to train.")],
    data: Annotated[str, typer.Option("--data", help="A folder or a manifest of sounds, or synthetic.")],
    out: Annotated[Path, typer.Option("-o", "--out", help="The folder of all stages.")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="KEY=VALUE",
            help="Changes to the recipes: of all stages, as in num_train_steps=100, or of one, as in coarse.batch_size=8; and "
            "options of the other steps, as in kmeans.clusters=100 and tokens.workers=4.",
        ),
    ] = None,
    captions: Annotated[
        Captions | None,
        typer.Option(help="Where the texts of the sounds are; without it, an AudioLM is trained without texts."),
    ] = None,
    seconds: Annotated[
        float | None,
        typer.Option(help="How much of a sound is used, and made, at a time; by default as the recipes say."),
    ] = None,
    size: Annotated[
        str | None,
        typer.Option(
            help="debug or demo: debug takes the recipes soundstream/debug, audiolm/coarse-debug and so on; full size by default."
        ),
    ] = None,
    delayed: Annotated[
        bool, typer.Option("--delayed", help="One transformer in place of the coarse and the fine one.")
    ] = False,
    codec: Annotated[
        Path | None,
        typer.Option(
            help="A trained codec to use instead of training one: a run, a checkpoint or a saved network (SoundStream, EnCodec, "
            "DAC, Mimi)."
        ),
    ] = None,
    mulan: Annotated[
        Path | None,
        typer.Option(help="For a MusicLM: a trained MuLaN to use, in the same way."),
    ] = None,
) -> None:
    """Train every stage of a model on your data, one after the other. The same command continues where it was stopped."""
    if os.environ.get("WORLD_SIZE", "1") != "1":
        raise ConfigError(
            "a pipeline is one process: for several, train its stages with `accelerate launch -m helicon train`"
        )
    if seconds is not None and not 0 < seconds < float("inf"):
        raise ConfigError(f"--seconds {seconds:g} must be more than 0")
    request = Request(data, captions, seconds, size, delayed, codec, mulan)
    request.check_size()
    work = Work.plan(f"helicon pipeline {kind}", out, PIPELINES[kind].steps(request), overrides or ())
    claim(work, kind)
    work.carry_out()
    typer.echo(f"{out} is complete. Make more of it:\n  {PIPELINES[kind].next_command(work)}")


def claim(work: Work, kind: Kind) -> None:
    """The folder, if it is a new one or was begun by the same kind of pipeline."""
    folder = work.folder
    if folder.exists() and not folder.is_dir():
        raise NotADirectoryError(f"{folder} is a file, not a folder: choose another place with -o")
    if work.recorded.get("kind", kind) != kind:
        raise FileExistsError(f"{folder} holds a pipeline of another kind: choose another folder with -o")
    if not (folder / RECORD).is_file() and folder.is_dir() and any(folder.iterdir()):
        raise FileExistsError(f"{folder} already holds something: choose another folder with -o")
    if not work.recorded:
        check_writable(folder)
        work.record("kind", kind)
