"""`helicon recipes`"""

from rich.console import Console
from rich.table import Table

from helicon.config import load_recipe, recipe_names


def recipes() -> None:
    """List the shipped recipes."""
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column()
    for name in recipe_names():
        recipe = load_recipe(name)
        table.add_row(name, f"{recipe.summary} [dim]({recipe.note('time') or '?'})[/dim]")
    Console().print(table)
