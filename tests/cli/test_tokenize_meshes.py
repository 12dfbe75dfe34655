"""`helicon tokenize` of meshes, and training on what it makes, from the command line alone."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from data.meshes import box, write
from helicon.cli import app
from helicon.data.tokens import TokenCache
from models.meshgpt.tiny import autoencoder, compact

SMALL = [
    "batch_size=2",
    "valid_frac=0.3",
    "num_train_steps=3",
    "log_every=1",
    "save_results_every=100",
    "save_model_every=100",
]
NETWORK = ["model.transformer.dim=16", "model.transformer.attn_depth=1"]


def helicon(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, list(arguments))
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exc_info
    return done.exit_code, " ".join((done.output or "").split())


@pytest.fixture
def folder() -> str:
    for number in range(7):
        write(Path("meshes"), f"{number}.glb", mesh=box(1 + number / 3))
        Path(f"meshes/{number}.txt").write_text(f"box {number}")
    Path("meshes/bad.glb").write_bytes(b"no mesh")
    Path("meshes/bad.txt").write_text("none")
    return "meshes"


def trained_losses(run: str, source: str, *more: str) -> list[dict[str, Any]]:
    code, said = helicon(
        "train",
        "meshgpt/transformer-debug",
        *SMALL,
        *NETWORK,
        "model.autoencoder=stage",
        f"results_folder={run}",
        f"data.source={source}",
        "data.captions=beside",
        "data.meshes=null",
        *more,
    )
    assert code == 0, said
    lines = map(json.loads, Path(run, "metrics.jsonl").read_text().splitlines())
    return [{name: value for name, value in line.items() if "loss" in name} for line in lines]


@pytest.mark.parametrize("kind", [autoencoder, compact])
def test_a_recipe_learns_from_a_cache_what_it_learns_from_meshes(folder: str, kind: Any) -> None:
    kind().save("stage")
    code, said = helicon("tokenize", "stage", "--data", folder, "-o", "cache", "--workers", "0", "captions=beside")
    assert code == 0 and "cache: 7 items encoded, 0 kept, 1 could not be read" in said, said
    first = TokenCache("cache")[0]
    assert first["texts"] == "box 0" and first["num_faces"] == 12
    assert first["codes"].shape == ((36, 2) if kind is autoencoder else first["codes"].flatten().shape)
    on_cache = trained_losses("on-cache", "cache")
    assert on_cache == trained_losses("on-meshes", folder, "data.augment=false") and len(on_cache) >= 3
    code, said = helicon("tokenize", "on-cache", "--data", folder, "-o", "again", "--workers", "0", "captions=beside")
    assert code == 0 and "7 items encoded" in said, said
    code, said = helicon("tokenize", "stage", "--data", folder, "-o", "cache", "--workers", "0", "captions=beside")
    assert code == 0 and "0 items encoded, 7 kept" in said, said


def test_a_cache_of_a_cache_is_refused(folder: str) -> None:
    compact().save("stage")
    assert helicon("tokenize", "stage", "--data", folder, "-o", "cache", "--workers", "0")[0] == 0
    code, said = helicon("tokenize", "stage", "--data", "cache", "-o", "again", "--workers", "0")
    assert code != 0 and "is a token cache itself: name the meshes it was made from" in said
