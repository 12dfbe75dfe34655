"""The README's Python runs as it stands, but for the sizes and the number of steps."""

import re
from pathlib import Path

import torch
from PIL import Image

README = Path(__file__).parents[1] / "README.md"


def test_the_python_of_the_readme_runs() -> None:
    (snippet,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    for written, smaller in {
        "dim=64": "dim=16",
        "num_train_steps=10_000": "num_train_steps=2",
        "image_size=128": "image_size=16",
    }.items():
        assert written in snippet
        snippet = snippet.replace(written, smaller)
    Path("pictures").mkdir()
    for number in range(20):
        Image.new("RGB", (20, 24), (number * 12, 80, 200)).save(f"pictures/{number}.png")
    names = {"images": torch.rand(2, 3, 16, 16)}
    exec(compile(snippet, str(README), "exec"), names)
    assert names["codes"].shape == (2, 2, 2) and names["pictures"].shape == (2, 3, 16, 16)


def test_the_commands_of_the_readme_exist() -> None:
    text = README.read_text()
    assert "make demo" in text and "make test" in text
    for path in re.findall(r"\]\(([^)#:]+)[^)]*\)", text):
        assert (README.parent / path).exists(), path
    for script in re.findall(r"`(benchmarks/\w+\.py)`", text):
        assert (README.parent / script).exists(), script
