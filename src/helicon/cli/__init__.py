"""The command line: one file a verb.

Nothing heavy is imported before a command runs, so that `helicon --help` answers at once. What a user can put right is
told in one sentence on stderr, with exit status 1 (2 for a wrong command line); `--debug` shows the traceback as well.
"""

import errno
import logging
import os
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

import helicon
from helicon.cli import demo, fit_kmeans, generate, pipeline, recipes, resume, search, tokenize, train


class Commands(TyperGroup):
    """Turns the errors meant for users into their sentence."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except (ValueError, OSError) as error:
            if ctx.params["debug"]:
                raise
            typer.echo("error: " + sentence(error), err=True)
            raise typer.Exit(1) from error


def sentence(error: ValueError | OSError) -> str:
    """An error in one line; those of the operating system without its number, and a full disk with the remedy."""
    text = str(error)
    if isinstance(error, OSError) and error.strerror is not None:
        text = error.strerror if error.filename is None else f"{error.filename}: {error.strerror}"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            text += "; free some space and give the same command again"
    return " ".join(text.split()) or type(error).__name__


app = typer.Typer(cls=Commands, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


def show_version(is_asked: bool) -> bool:
    if is_asked:
        typer.echo(f"helicon {helicon.__version__}")
        raise typer.Exit
    return is_asked


@app.callback(help="Train generative media models, and make things with them.")
def options(
    debug: Annotated[
        bool, typer.Option("--debug", envvar="HELICON_DEBUG", help="Show the traceback of errors.")
    ] = False,
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=show_version, help="Show the version and exit.")
    ] = False,
) -> None: ...


for verb in (
    train.train,
    resume.resume,
    generate.generate,
    tokenize.tokenize,
    fit_kmeans.fit_kmeans,
    pipeline.pipeline,
    search.search,
    recipes.recipes,
    demo.demo,
):
    app.command()(verb)


def main() -> None:
    # Of several processes one speaks; all warn.
    logging.basicConfig(format="%(levelname)s: %(message)s", level=logging.WARNING)
    logging.getLogger("helicon").setLevel(logging.INFO if os.environ.get("RANK", "0") == "0" else logging.WARNING)
    app(prog_name="helicon")
