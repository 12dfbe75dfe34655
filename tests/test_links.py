"""Links between the pages of the project lead somewhere: to a file that is there, and to a heading that is in it."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = sorted(
    path for path in (*ROOT.glob("*.md"), *ROOT.glob("[bdrt]*/**/*.md")) if "site-packages" not in path.parts
)
FENCED = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


def anchors(page: Path) -> set[str]:
    """As GitHub makes them of headings: lower case, without punctuation, a hyphen for each space."""
    headings = re.findall(r"^#+ (.*)$", FENCED.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", FENCED.sub("", page.read_text())):
        if re.match(r"\w+:", target):
            continue  # on another site
        path, _, anchor = target.partition("#")
        there = (page.parent / path).resolve() if path else page
        assert there.exists(), f"{target}: there is no such file"
        assert not anchor or anchor in anchors(there), f"{target}: there is no such heading"


def test_the_page_of_the_benchmarks_names_every_script() -> None:
    text = (ROOT / "benchmarks" / "README.md").read_text()
    scripts = {path.name for path in (ROOT / "benchmarks").glob("*.py")}
    assert {name for name in scripts if f"`{name}`" in text} == scripts
