"""The command line: one file a verb.

Nothing heavy is imported before a command runs, so that `helicon --help` answers at once. What a user can put right is
told in one sentence on stderr, with exit status 1 (2 for a wrong command line); `--debug` shows the traceback as well.
"""

import logging
import os
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from helicon.cli import demo, fit_kmeans, generate, pipeline, recipes, resume, search, tokenize, train


class Commands(TyperGroup):
    """Turns the errors meant for users into their sentence."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except (ValueError, OSError) as error:
            if ctx.params["debug"]:
                raise
            typer.echo("error: " + (" ".join(str(error).split()) or type(error).__name__), err=True)
            raise typer.Exit(1) from error


app = typer.Typer(cls=Commands, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


@app.callback(help="Train generative media models, and make things with them.")
def options(
    debug: Annotated[
        bool, typer.Option("--debug", envvar="HELICON_DEBUG", help="Show the traceback of errors.")
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
