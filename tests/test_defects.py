"""The list of known defects cannot rot: what it changes is there, what it names exists, and the page says the same."""

import ast
from pathlib import Path

import pytest

import helicon
from defects import DEFECTS, PAGE, ROOT, put_back, table

TESTS = ROOT / "tests"


@pytest.mark.parametrize("number", range(len(DEFECTS)))
def test_every_defect_can_be_put_back(number: int, tmp_path: Path) -> None:
    """Each text to change occurs once, and what comes of the change is Python."""
    for edit in DEFECTS[number].edits:
        source = Path(helicon.__file__).parent / edit.file
        (tmp_path / edit.file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / edit.file).write_text(source.read_text())
    put_back(DEFECTS[number], tmp_path)


def test_every_test_that_is_named_exists() -> None:
    named = {test for defect in DEFECTS for test in defect.tests}
    there = set()
    for path in {test.partition("::")[0] for test in named}:
        tree = ast.parse((TESTS / path).read_text())
        there |= {f"{path}::{node.name}" for node in tree.body if isinstance(node, ast.FunctionDef)}
    assert named - there == set()


def test_every_defect_names_a_test_and_no_two_are_the_same() -> None:
    assert all(defect.tests and defect.edits for defect in DEFECTS)
    assert (
        len({(defect.id, defect.what) for defect in DEFECTS})
        == len({defect.edits for defect in DEFECTS})
        == len(DEFECTS)
    )


def test_the_page_has_exactly_the_defects_of_the_list() -> None:
    assert PAGE.read_text().endswith(table()), "renew it with: python tests/defects.py --write"
