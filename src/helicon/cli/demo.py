"""`helicon demo image|audio|music|speech|mesh`: stage after stage, and a page that shows what came of it.

Adding a kind: a file in `demos`, with its steps and a function that writes its page, and two lines below.
"""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from helicon.cli.demos import meshes, music, pictures, sounds, speech
from helicon.cli.demos.outline import PAGE
from helicon.cli.generate import check_writable
from helicon.cli.steps import Work


class Kind(StrEnum):
    image = "image"
    audio = "audio"
    music = "music"
    speech = "speech"
    mesh = "mesh"


DEMOS = {
    Kind.image: pictures.DEMO,
    Kind.audio: sounds.DEMO,
    Kind.music: music.DEMO,
    Kind.speech: speech.DEMO,
    Kind.mesh: meshes.DEMO,
}


def demo(
    kind: Annotated[Kind, typer.Argument(help="What to make.")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="KEY=VALUE",
            help="Changes to the recipes: of all stages, as in num_train_steps=100, or of one, as in maskgit.batch_size=8.",
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("-o", "--out", help="The folder of the demo; runs/demo-KIND by default.")
    ] = None,
) -> None:
    """Train a small model on made-up data in a few minutes, and show what it makes on a page."""
    for override in overrides or ():
        key = override.partition("=")[0]
        if key.rpartition(".")[2] == "source":  # the page says what the made-up data shows
            raise ValueError(
                f"a demo learns from made-up data: leave {key} out, and train on your own with helicon train"
            )
    chosen, folder = DEMOS[kind], out or Path("runs") / f"demo-{kind}"
    work = Work.plan(f"helicon demo {kind}", folder, chosen.steps, overrides or ())
    work.carry_out()
    if not is_shown(work):
        check_writable(folder)
        chosen.show(work)
    typer.echo(f"Open {folder / PAGE} in a browser: what was made, the curves, and how to go on.")


def is_shown(work: Work) -> bool:
    """Whether there is a page, and nothing was trained after it was written."""
    from helicon.engine.checkpoint import checkpoints

    shown = work.folder / PAGE
    newest = max(found.stat().st_mtime_ns for name in work.recipes for found in checkpoints(work.home(name)))
    return shown.exists() and shown.stat().st_mtime_ns >= newest
