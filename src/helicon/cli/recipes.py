"""`helicon recipes`"""

from rich.console import Console
from rich.table import Table

from helicon.config import load_recipe, recipe_names


def recipes() -> None:
    """List the shipped recipes."""
    table = Table("recipe", "family", "trains", "time", "what it is", box=None, pad_edge=False)
    for name in recipe_names():
        recipe = load_recipe(name)
        table.add_row(name, name.partition("/")[0], recipe.trains, recipe.note("time") or "?", recipe.summary)
    Console().print(table)
