"""`helicon generate RUN --text "a red circle" -o out.png [key=value ...]`

What is made, and from what, is the family's own affair: its `Maker` stands in the registry. Here are the batches, the seeds and the files.
"""

import inspect
import json
import logging
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from helicon.cli.progress import progress
from helicon.cli.recipes import say
from helicon.config import ConfigError, argument_texts, check, parse_yaml, setting_of, signature_without

if TYPE_CHECKING:
    from helicon.nn.network import Network
    from helicon.registry import Made, Maker

MANIFEST = "manifest.jsonl"
SHEET = "sheet.png"
SHEET_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp")  # a sheet is a picture
MOST_ON_A_SHEET = 256

Thing = tuple[str, "Made"]  # with the words it was made from
Tell = Callable[[str], object]


def generate(
    run: Annotated[
        Path,
        typer.Argument(
            metavar="RUN",
            help="A run (RUN/best: its checkpoint of lowest validation loss), a checkpoint or a saved network.",
        ),
    ],
    settings: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="KEY=VALUE", help="The network's own options, as in cond_scale=5; --options lists them."
        ),
    ] = None,
    text: Annotated[list[str] | None, typer.Option("--text", help="What to make; give it once for each text.")] = None,
    texts_file: Annotated[Path | None, typer.Option(help="More texts, one a line.")] = None,
    samples: Annotated[int, typer.Option(min=1, help="How many of each.")] = 1,
    seed: Annotated[int, typer.Option(min=0, help="The same seed (and batch size) gives the same result.")] = 0,
    batch_size: Annotated[int, typer.Option(min=1, help="How many are made at once.")] = 16,
    out: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--out",
            help="A file, which holds one thing as it is, or several as one sheet. A name without an ending is a folder: numbered files, "
            f"{MANIFEST} and the sheet; 'folder/*.obj' says of which kind they are. A sound has its spectrogram beside it, and a mesh "
            "its picture.",
        ),
    ] = None,
    image: Annotated[
        Path | None, typer.Option(help="A picture to enlarge, or to change (with --repaint, or extend=...).")
    ] = None,
    repaint: Annotated[Path | None, typer.Option(help="A mask: white where --image is to be repainted.")] = None,
    superres: Annotated[
        Path | None, typer.Option(metavar="RUN", help="A second run, which enlarges the pictures.")
    ] = None,
    prompt: Annotated[
        Path | None,
        typer.Option(
            help="A sound or a mesh to continue; a recording whose voice to speak in, or which to change (with --span); for a codec, the "
            "sound to code and decode."
        ),
    ] = None,
    prompt_text: Annotated[str | None, typer.Option(help="What is said in the recording given as --prompt.")] = None,
    span: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SECONDS:SECONDS",
            help="A part of the recording to regenerate, as in 0.8:1.4; give it once for each span.",
        ),
    ] = None,
    coarse: Annotated[
        Path | None, typer.Option(metavar="RUN", help="The coarse (or delayed) stage that goes with a semantic one.")
    ] = None,
    fine: Annotated[Path | None, typer.Option(metavar="RUN", help="The fine stage that goes with --coarse.")] = None,
    durations: Annotated[
        Path | None, typer.Option(metavar="RUN", help="A duration predictor, which says how long speech lasts.")
    ] = None,
    vocoder: Annotated[
        Path | None, typer.Option(metavar="RUN", help="A vocoder, which turns the frames of speech into sound.")
    ] = None,
    online: Annotated[
        bool, typer.Option("--online", help="Use the weights of the last step, not their average.")
    ] = False,
    options: Annotated[bool, typer.Option("--options", help="List the network's own options and stop.")] = False,
) -> None:
    """Make things with a trained network."""
    from helicon import registry
    from helicon.engine.checkpoint import resolve

    folder = resolve(run)
    build = registry.maker_of(folder)
    # Options of the command that are keywords of some makers: files to read and what to know of them, and further networks.
    all_inputs = {
        "image": image,
        "repaint": repaint,
        "prompt": prompt,
        "prompt_text": prompt_text,
        "span": span or None,
    }
    all_runs = {"superres": superres, "coarse": coarse, "fine": fine, "durations": durations, "vocoder": vocoder}
    inputs, runs = given(all_inputs), given(all_runs)
    own = signature_without(build, "network", "texts", *all_inputs, *all_runs)
    if options:
        texts_of = argument_texts(build)
        for name, parameter in own.parameters.items():
            typer.echo(setting_of(parameter))
            if name in texts_of:
                say(texts_of[name], indent=4)
        return
    chosen = check(own, parsed(settings or ()), "generate")
    for name in {**inputs, **runs}.keys() - inspect.signature(build).parameters.keys():
        raise ConfigError(f"--{name.replace('_', '-')} is nothing for the network in {folder}: leave it out")
    texts = [*(text or ()), *(lines_of(texts_file) if texts_file else ())]
    folders = {"network": folder, **{name: resolve(path) for name, path in runs.items()}}
    networks = {name: loaded(path, not online) for name, path in folders.items()}
    maker = build(texts=texts, **networks, **inputs, **chosen)
    count = samples * len(maker.prompts)
    target = Target.of(out, maker, count)
    for name, network in networks.items():
        typer.echo(
            f"{type(network).__name__} of {folders[name]}, {weights_of(folders[name], not online)}, on {device()}"
        )
    things = progress(produce(maker, samples, seed, batch_size), count)
    typer.echo(f"wrote {target.write(things, maker, seed, typer.echo)}")


def given(options: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}


def parsed(settings: Iterable[str]) -> dict[str, Any]:
    """`key=value` words; the value is YAML."""
    found = {}
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not equals or not key.isidentifier():
            raise ConfigError(f"{setting!r} is no key=value, as in cond_scale=5; a text goes behind --text")
        found[key] = parse_yaml(value, setting)
    return found


def lines_of(file: Path) -> list[str]:
    try:
        texts = [line.strip() for line in file.read_text(encoding="utf-8-sig").splitlines() if line.strip()]
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file} is not a text file in UTF-8") from error
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror or error}") from error
    if not texts:
        raise ConfigError(f"{file} is empty: write one text a line")
    return texts


def loaded(folder: Path, use_ema: bool = True) -> "Network":
    """The network of a checkpoint, where it is to run."""
    from helicon.nn.network import load_network

    with _quiet("helicon.nn.network"):  # it speaks of every stage below as well
        network = load_network(folder, use_ema=use_ema)
    return network.to(device())


def device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def weights_of(folder: Path, use_ema: bool) -> str:
    """Which weights of a checkpoint are used, in words."""
    from helicon.nn.network import EMA_FILE

    if not (folder / EMA_FILE).exists():
        return "its only weights"
    return "its averaged (EMA) weights" if use_ema else "its online weights"


@contextmanager
def _quiet(name: str) -> Iterator[None]:
    logger = logging.getLogger(name)
    before = logger.level
    logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        logger.setLevel(before)


def produce(maker: "Maker", samples: int, seed: int, batch_size: int) -> Iterator[Thing]:
    """One thing for each prompt, and all of them again for each further sample."""
    import torch

    from helicon.data.seeds import mix

    prompts = maker.prompts
    wanted = [*range(len(prompts))] * samples
    for number, start in enumerate(range(0, len(wanted), batch_size)):
        which = wanted[start : start + batch_size]
        batch_seed = mix(seed, number) if number else seed  # so that one batch is what `generate(..., seed=seed)` gives
        try:
            made = maker.make(which, batch_seed)
        except torch.OutOfMemoryError as error:
            raise ValueError(
                f"{len(which)} at once do not fit into the GPU's memory: give a smaller --batch-size"
            ) from error
        yield from zip((prompts[index] for index in which), made, strict=True)


@dataclass(frozen=True)
class Target:
    """Where things go: one file, or numbered files in a folder."""

    path: Path
    pattern: str | None = None  # of the names in the folder, with a * for the number

    @classmethod
    def of(cls, out: Path | None, maker: "Maker", count: int) -> "Target":
        """What the user asked for, checked before the work begins; by default a name that is still free."""
        usual = maker.suffixes[0]
        has_sheet = maker.sheet is not None and count <= MOST_ON_A_SHEET
        if out is None:
            fits_one_file = count == 1 or (has_sheet and usual in SHEET_SUFFIXES)
            out = _free(_file_name(maker.prompts[0]), usual if fits_one_file else "", maker)
        if "*" in out.name:
            target = cls(out.parent, out.name if out.suffix else out.name + usual)
        else:
            target = cls(out, f"*{usual}" if out.is_dir() or not out.suffix else None)
        suffix = Path(target.pattern or out).suffix.lower()
        if suffix not in maker.suffixes:
            raise ConfigError(
                f"{out} would be a {out.suffix} file, and what is made here is {' or '.join(maker.suffixes)}; "
                "a name without an ending is a folder"
            )
        if target.pattern is None and count > 1 and not (has_sheet and suffix in SHEET_SUFFIXES):
            raise ConfigError(f"{count} things do not fit into {out}: give a folder, {out.with_suffix('')}")
        target.claim(maker)
        return target

    def claim(self, maker: "Maker") -> None:
        """Makes the folder, and sees that it can be written into."""
        folder = self.path.parent if self.pattern is None else self.path
        if folder.is_file():
            raise NotADirectoryError(f"{folder} is a file, not a folder: choose another place with -o")
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise OSError(f"{self.path} cannot be written: {error.strerror or error}") from error
        if self.pattern is not None and any(folder.iterdir()):
            raise FileExistsError(f"{folder} already holds something: choose another folder with -o")
        check_writable(self.path)
        picture = None if self.pattern is not None or self.path.exists() else maker.beside(self.path)
        if picture is not None and picture.exists():  # beside no file that was made before: it is of something else
            raise FileExistsError(
                f"{picture} is there already, and would be the picture of {self.path}: choose another name with -o"
            )

    def write(self, things: Iterable[Thing], maker: "Maker", seed: int, tell: Tell) -> str:
        """Writes everything; returns what was written, in words."""
        if self.pattern is not None:
            return write_folder(things, maker, self.path, seed, self.pattern, tell)
        made = [thing for _, thing in things]
        if len(made) == 1:
            write_file(made[0], self.path, tell)
            return str(self.path)
        assert maker.sheet is not None
        maker.sheet(made).write(self.path)
        return f"{self.path}, a sheet of {len(made)}"


def check_writable(path: Path) -> None:
    """Raises where nothing can be written at `path`. Permissions alone do not tell: it is tried."""
    place = next(place for place in (path, *path.absolute().parents) if place.exists())
    try:
        if place == path and path.is_file():
            path.open("a").close()
        else:
            tempfile.TemporaryDirectory(dir=place).cleanup()
    except OSError as error:
        raise OSError(f"{path} cannot be written: {error.strerror or error}; choose another place with -o") from error


def write_folder(
    things: Iterable[Thing],
    maker: "Maker",
    folder: Path,
    seed: int,
    pattern: str | None = None,
    tell: Tell = lambda words: None,
) -> str:
    """Numbered files, the manifest (which is a dataset's, too) and the sheet; a file is listed as soon as it is there.

    What cannot be written, a mesh without faces say, is told and left out, as long as there is something else.
    """
    pattern = pattern or f"*{maker.suffixes[0]}"
    shown, num_files, problem = [], 0, None
    with (folder / MANIFEST).open("w", encoding="utf-8") as manifest:
        for number, (text, made) in enumerate(things):
            path = folder / pattern.replace("*", f"{number:05d}")
            if number < MOST_ON_A_SHEET:
                shown.append(made)
            try:
                write_file(made, path, tell)
            except ValueError as error:
                problem = error
                tell(str(error))
                continue
            manifest.write(json.dumps({"path": path.name, "text": text, "seed": seed}, ensure_ascii=False) + "\n")
            manifest.flush()
            num_files += 1
    if problem is not None and not num_files:
        raise problem
    listed = f"{folder}: {num_files} files, {MANIFEST}"
    if maker.sheet is None:
        return listed
    across = len(maker.prompts)
    maker.sheet(shown[: len(shown) // across * across] or shown).write(folder / SHEET)
    return f"{listed}, and {SHEET} to look at"


def write_file(made: "Made", path: Path, tell: Tell) -> None:
    """One thing; what it has to say of itself is told."""
    words = made.write(path)
    if isinstance(words, str):
        tell(f"{path}: {words}")


def _file_name(text: str) -> str:
    """A text as the name of a file."""
    words = re.sub(r"\W+", "-", text.lower()).strip("-_")
    return words[:60].rstrip("-") or "generated"


def _free(name: str, suffix: str, maker: "Maker") -> Path:
    """A file (or a folder, without a suffix) that is not there, nor is its picture."""
    path, number = Path(name + suffix), 1
    while path.exists() or (suffix and (picture := maker.beside(path)) is not None and picture.exists()):
        number += 1
        path = Path(f"{name}-{number}{suffix}")
    return path
