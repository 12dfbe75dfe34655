"""How far a command is, on stderr."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import typer

T = TypeVar("T")
NUM_LINES = 20  # where there is no terminal to draw a bar on


def progress(things: Iterator[T], count: int) -> Iterable[T]:
    """A bar while things are made, on a terminal."""
    from rich.console import Console
    from rich.progress import track

    console = Console(stderr=True)
    return track(things, "generate", count, console=console, transient=True, disable=not console.is_terminal)


@contextmanager
def progress_line(what: str) -> Iterator[Callable[[int, int], None]]:
    """A bar on a terminal, elsewhere a line now and then."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(what, total=None)
        told = 0

        def show(done: int, total: int) -> None:
            nonlocal told
            bar.update(task, completed=done, total=total)
            if not console.is_terminal and done * NUM_LINES // total > told:
                told = done * NUM_LINES // total
                typer.echo(f"{what} {done}/{total}", err=True)

        yield show


def percent(what: str, step: int = 10) -> Callable[[int, int], None]:
    """Tells on stderr how far something is, now and then."""
    told = 0

    def tell(done: int, total: int) -> None:
        nonlocal told
        if 100 * done // total >= told + step:
            told = 100 * done // total // step * step
            typer.echo(f"{what} {told} %", err=True)

    return tell
