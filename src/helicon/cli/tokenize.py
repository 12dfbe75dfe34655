"""`helicon tokenize RUN [--semantic RUN] [--conditioner RUN] --data FOLDER -o CACHE [key=value ...]`

The tokenizer is the family's own (it stands in the registry), the cache `helicon.data.tokens`. Here are the arguments and the progress.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from helicon.cli.progress import progress_line
from helicon.config import ConfigError, apply_override, check, signature_without

if TYPE_CHECKING:
    from helicon.data.tokens import Tokenizer

# Arguments of the data section that are not given here, and why.
ELSEWHERE = {
    "augment": "items are encoded as they are",
    "classes": "a cache knows the folders its files are in",
    "end_prob": "recordings are encoded from end to end",
    "source": "--data names it",
}


def tokenize(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The tokenizer: a run, a checkpoint or a saved network.")],
    data: Annotated[str, typer.Option("--data", help="A folder, a manifest, or synthetic.")],
    out: Annotated[
        Path, typer.Option("-o", "--out", help="The cache's folder; one that is there is brought up to date.")
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY=VALUE", help="The data section of a recipe: image_size=64 captions=beside."),
    ] = None,
    semantic: Annotated[
        Path | None,
        typer.Option(metavar="RUN", help="A second tokenizer, for the semantic tokens that go with a codec's codes."),
    ] = None,
    conditioner: Annotated[
        Path | None,
        typer.Option(
            metavar="RUN", help="The conditioner of MusicLM's stages, which `helicon fit-kmeans` makes from a MuLaN."
        ),
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="How many items are encoded at once.")] = 32,
    workers: Annotated[int | None, typer.Option(min=0, help="Processes that read; by default up to 8.")] = None,
) -> None:
    """Encode data once, so that training reads tokens: `helicon train ... data.source=CACHE`."""
    import torch

    from helicon import registry
    from helicon.data.tokenize import tokenize as make_cache
    from helicon.data.tokens import TokenCache
    from helicon.engine.checkpoint import resolve

    folder = resolve(run)
    build, factory = registry.tokenizer_of(folder)
    given = parsed(overrides or (), factory)
    further = {"semantic": semantic, "conditioner": conditioner}
    tokenizer = built(build, folder, further, "cuda" if torch.cuda.is_available() else "cpu")
    keywords = check(factory, {**tokenizer.arguments, **given, "source": data}, "data")
    found = factory(**keywords)
    if isinstance(found, TokenCache):
        raise ConfigError(f"--data {data} is a token cache itself: name the files it was made from")
    with progress_line("tokenize") as progress:
        try:
            done = make_cache(
                tokenizer.items(found),
                tokenizer,
                out,
                source=data,
                arguments=differing(keywords, factory),
                batch_size=batch_size,
                num_workers=default_workers() if workers is None else workers,
                progress=progress,
            )
        except KeyboardInterrupt:
            typer.echo("tokenize: stopped; what is encoded is kept, and the same command goes on from there", err=True)
            raise typer.Exit(130) from None
    bad = f", {done.bad} could not be read (see {out / 'bad_files.txt'})" if done.bad else ""
    gone = f", {done.gone} gone" if done.gone else ""
    typer.echo(
        f"{out}: {done.encoded} items encoded, {done.kept} kept{gone}{bad}; learn from them with data.source={out}"
    )


def built(
    build: Callable[..., "Tokenizer"], folder: Path, further: Mapping[str, Path | None], device: str
) -> "Tokenizer":
    """The tokenizer of the network in a folder, and of further ones where they are given, by their options."""
    from helicon import registry

    runs = {name: path for name, path in further.items() if path is not None}
    for name in runs:
        if name not in signature_without(build).parameters:
            raise ConfigError(f"the network in {folder} goes with no second one: leave --{name} out")
    others = {name: registry.load(path).to(device) for name, path in runs.items()}
    tokenizer = build(registry.load(folder).to(device), **others)
    if not tokenizer.networks:
        raise ValueError(f"the network in {folder} stands on no tokenizer: give the run of one")
    return tokenizer


def parsed(overrides: Sequence[str], factory: Callable[..., Any]) -> dict[str, Any]:
    """`key=value` words of the data section."""
    body: dict[str, Any] = {"data": {}}
    for override in overrides:
        apply_override(override, body, {"data": factory})
        if body.keys() != {"data"}:
            raise ConfigError(f"{override} is no argument of the data: leave it for training")
    for name, reason in ELSEWHERE.items():
        if body["data"].get(name):
            raise ConfigError(f"{name}={body['data'][name]} has no place here, as {reason}: leave it out")
    return body["data"]


def differing(keywords: Mapping[str, Any], factory: Callable[..., Any]) -> dict[str, Any]:
    """The arguments that samples depend on, where they are not the default: a later version may have more of these."""
    defaults = {name: entry.default for name, entry in signature_without(factory, *ELSEWHERE).parameters.items()}
    return {name: value for name, value in keywords.items() if name in defaults and value != defaults[name]}


def default_workers() -> int:
    return min(8, (os.cpu_count() or 1) - 1)
