"""The commands and the Python of the README and of the pages in docs/ name what there is.

(tests/test_readme.py runs the README's Python; the pages' need data and hours.)
"""

import ast
import importlib
import inspect
import re
import shlex
from pathlib import Path

import pytest
import typer

import helicon
from helicon.cli import app
from helicon.cli.train import sections
from helicon.config import load_recipe

ROOT = Path(__file__).parents[1]
PAGES = ["README.md", *(f"docs/{page.name}" for page in sorted((ROOT / "docs").glob("*.md")))]


def blocks(page: str, language: str) -> list[str]:
    """The fenced blocks of a page in a language ("" for those that name none)."""
    found = re.findall(r"^```(\w*)\n(.*?)^```", (ROOT / page).read_text(), re.DOTALL | re.MULTILINE)
    return [text for name, text in found if name == language]


def commands() -> list[str]:
    """Every line of helicon's in a block or in a table of the pages, without what comes before it (torchrun, say)."""
    lines = [
        line for page in PAGES for kind in ("", "bash") for block in blocks(page, kind) for line in block.splitlines()
    ]
    rows = re.findall(r"^\|.*", (ROOT / "docs/musiclm.md").read_text(), re.MULTILINE)  # the steps of its pipeline
    lines += [code for row in rows for code in re.findall(r"`(helicon [^`]+)`", row)]
    found = (re.search(r"(?:^|-m )(helicon (?!\.\.\.).*)", line) for line in lines)
    return sorted(
        {match[1].split("  #")[0].strip() for match in found if match and "..." not in match[1].replace('"..."', "")}
    )


@pytest.mark.parametrize("command", commands())
def test_the_commands_of_the_pages_can_be_parsed(command: str) -> None:
    verb, *arguments = shlex.split(command, comments=True)[1:]
    verbs = typer.main.get_command(app).commands
    assert verb in verbs or verb.startswith("-"), verb
    if verb not in verbs or not arguments:
        return
    given = verbs[verb].make_context(verb, arguments).params
    if verb == "train" and given["recipe"].islower():
        load_recipe(given["recipe"], given["overrides"] or [], sections=sections)


def test_there_are_commands() -> None:
    assert len(commands()) > 60


@pytest.mark.parametrize("page", PAGES)
def test_the_python_of_the_pages_names_what_there_is(page: str) -> None:
    nodes = [node for text in blocks(page, "python") for node in ast.walk(ast.parse(text))]
    for node in nodes:
        if isinstance(node, ast.ImportFrom):
            module = importlib.import_module(str(node.module))
            assert all(hasattr(module, name.name) for name in node.names), ast.unparse(node)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and hasattr(helicon, node.func.id):
            known = inspect.signature(getattr(helicon, node.func.id)).parameters
            if all(parameter.kind is not parameter.VAR_KEYWORD for parameter in known.values()):
                assert {keyword.arg for keyword in node.keywords} <= set(known), ast.unparse(node)
