"""`helicon recipes [FAMILY]`"""

from typing import Annotated

import typer
from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from helicon import registry
from helicon.config import ConfigError, Recipe, load_recipe, nearest, recipe_names


def recipes(
    family: Annotated[
        str | None,
        typer.Argument(metavar="FAMILY", help="Describe one family (muse), or one recipe (muse/vqgan)."),
    ] = None,
) -> None:
    """List the shipped recipes."""
    shipped = [load_recipe(name) for name in recipe_names()]
    if family is not None:
        tell(chosen(shipped, family))
        return
    for name in dict.fromkeys(map(_family, shipped)):
        say(name, style="bold")
        for kind, entry in registry.entries.items():
            own = [recipe.name for recipe in shipped if (_family(recipe), recipe.trains) == (name, kind)]
            if own:
                say(entry.summary, indent=2)
                say("  ".join(own), indent=4)
    say("helicon recipes FAMILY says what each of them is, how long it takes and what to expect.")


def chosen(shipped: list[Recipe], family: str) -> list[Recipe]:
    found = [recipe for recipe in shipped if family in (recipe.name, _family(recipe))]
    if not found:
        known = dict.fromkeys([*map(_family, shipped), *(recipe.name for recipe in shipped)])
        raise ConfigError(f"there is no family and no recipe {family!r}: {nearest(family, known)}")
    return found


def tell(found: list[Recipe]) -> None:
    for recipe in found:
        say(recipe.name, style="bold")
        for line in recipe.description:
            say(line, indent=2)


def say(text: str, indent: int = 0, style: str = "") -> None:
    Console(highlight=False).print(Padding(Text(text, style), (0, 0, 0, indent), expand=False))


def _family(recipe: Recipe) -> str:
    return recipe.name.partition("/")[0]
