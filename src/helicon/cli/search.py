"""`helicon search RUN --text "a slow waltz" --data FOLDER [--like sound.wav] [-o results.jsonl]`

The index, and what fits, are `helicon.models.musiclm.search`. Here are the arguments and the table.
"""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from helicon.cli.generate import check_writable, device, loaded
from helicon.cli.progress import percent
from helicon.config import ConfigError

if TYPE_CHECKING:
    from helicon.data.synthetic_sounds import SyntheticSounds
    from helicon.models.musiclm.search import Found, SoundIndex

NUM_MADE_UP = 500  # sounds, where there are no others
MADE_UP_SECONDS = 2.0


def search(
    run: Annotated[
        Path, typer.Argument(metavar="RUN", help="A MuLaN, or a network that contains one: a run or a saved network.")
    ],
    data: Annotated[str, typer.Option("--data", help="A folder or a manifest of sounds, or synthetic.")],
    text: Annotated[list[str] | None, typer.Option("--text", help="What to find; give it once for each text.")] = None,
    like: Annotated[
        list[Path] | None, typer.Option("--like", help="A sound, to find others like it; give it once for each sound.")
    ] = None,
    top: Annotated[int, typer.Option(min=1, help="How many recordings to show.")] = 10,
    out: Annotated[
        Path | None,
        typer.Option("-o", "--out", help="A file for what was found: .jsonl, which is also a manifest of the clips."),
    ] = None,
    seconds: Annotated[
        float | None,
        typer.Option(
            help="How long the clips are that recordings are cut into: by default as in the MuLaN's training, or 10 if that is not known."
        ),
    ] = None,
    index: Annotated[
        Path | None,
        typer.Option(
            help="The folder in which the network's vectors of the sounds are kept; by default in ~/.cache/helicon."
        ),
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Clips that go through the network at once.")] = 32,
    workers: Annotated[int, typer.Option(min=0, help="Processes that read.")] = 0,
) -> None:
    """Find the sounds that match a text, or that are like another sound. Nothing is read twice."""
    from helicon.engine.checkpoint import resolve
    from helicon.models.musiclm.search import SoundIndex

    texts, sounds = text or [], like or []
    check(texts, sounds, out)
    network = loaded(resolve(run))
    found = SoundIndex(network, None, seconds)
    if data == "synthetic":
        source: Any = made_up(found)
    else:
        source = Path(data).expanduser()
        found = SoundIndex(network, index or usual_index(run, source, found.seconds), seconds)
    # Before the collection: one that cannot be read is told at once.
    heard = [found.embed_sound(path) for path in sounds]
    try:
        done = found.update(source, batch_size=batch_size, num_workers=workers, progress=percent("reading"))
    except KeyboardInterrupt:
        kept = "" if found.folder is None else "; what was read is kept, and the same command goes on from there"
        typer.echo(f"search: stopped{kept}", err=True)
        raise typer.Exit(130) from None
    bad = f", {len(done.bad)} cannot be read" if done.bad else ""
    typer.echo(f"{done.read} recordings read, {done.kept} known{bad}; clips of {found.seconds:g} s, on {device()}")
    results: list[tuple[str | Path, list[Found]]] = []
    if texts:
        results += zip(texts, found.search(texts, top), strict=True)
    results += ((path, found.like(path, top, latent)) for path, latent in zip(sounds, heard, strict=True))
    for query, rows in results:
        show(query, rows)
    if out is not None:
        lines = "".join(
            json.dumps(line, ensure_ascii=False) + "\n" for query, rows in results for line in listed(query, rows)
        )
        out.write_text(lines, encoding="utf-8")
        typer.echo(f"wrote {out}")


def check(texts: Sequence[str], sounds: Sequence[Path], out: Path | None) -> None:
    """What can be told before anything is read."""
    if not texts and not sounds:
        raise ConfigError("there is nothing to look for: say what with --text, or give a sound with --like")
    if not all(text.strip() for text in texts):
        raise ConfigError("a --text is empty: write what to look for")
    for path in sounds:
        if not path.is_file():
            raise FileNotFoundError(
                f"--like {path} is {'a folder' if path.is_dir() else 'not there'}: name a sound file"
            )
    if out is not None and (out.is_dir() or out.suffix != ".jsonl"):
        raise ConfigError(f"-o {out}: what was found goes into a file that ends in .jsonl")
    if out is not None and not out.parent.is_dir():
        raise FileNotFoundError(f"-o {out}: there is no folder {out.parent}")
    if out is not None:
        check_writable(out)


def usual_index(run: Path, source: Path, seconds: float) -> Path:
    """The place for what a run makes of a collection of sounds, in clips so long, among what can be made anew."""
    from helicon.data.tokens import short_hash

    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return home / "helicon" / "search" / short_hash(str(run.resolve()), str(source.resolve()), f"{seconds:g}").hex()


def made_up(index: "SoundIndex") -> "SyntheticSounds":
    """Sounds that no recipe learns from, unless it is told to."""
    from helicon.data.synthetic_sounds import SHORTEST, SyntheticSounds

    lasting = min(max(index.seconds, SHORTEST), MADE_UP_SECONDS)
    return SyntheticSounds(NUM_MADE_UP, index.mulan.sample_hz, lasting, seed=1)


def show(query: str | Path, rows: Sequence["Found"]) -> None:
    """A table: the rank, the similarity, the file, and where the clip begins that fits best."""
    typer.echo(f"\n{query}" if isinstance(query, str) else f"\nlike {query}")
    names = [shown(row.name) for row in rows]
    width = max(map(len, names), default=0)
    for rank, (row, name) in enumerate(zip(rows, names, strict=True), start=1):
        typer.echo(f"{rank:4d}  {row.similarity:6.3f}  {name:{width}}  from {row.begin:.1f} s")


def shown(name: str) -> str:
    """A path as one would write it here."""
    here = f"{Path.cwd()}{os.sep}"
    return name.removeprefix(here)


def listed(query: str | Path, rows: Sequence["Found"]) -> list[dict[str, Any]]:
    """Lines of a manifest, of the clips that were found."""
    asked = {"text": query} if isinstance(query, str) else {"like": str(query)}
    return [
        {
            "path": row.name,
            "start": row.begin,
            "duration": row.seconds,
            **asked,
            "rank": rank,
            "similarity": row.similarity,
        }
        for rank, row in enumerate(rows, start=1)
    ]
