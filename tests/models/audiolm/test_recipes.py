"""The recipes of AudioLM: what they build, and that the stages of one size belong together."""

import re
from typing import Any

import pytest
import torch

from helicon import registry
from helicon.config import Recipe, load_recipe
from helicon.models.audiolm.transformers import (
    CoarseTransformer,
    DelayedTransformer,
    FineTransformer,
    SemanticTransformer,
)

CODES: dict[str, Any] = {"codebook_size": 1024}  # of soundstream/soundstream, which has 8 quantizers
MEANINGS: dict[str, Any] = {"num_semantic_tokens": 500}  # of `helicon fit-kmeans`
FULL = {
    "semantic": (SemanticTransformer, MEANINGS),
    "coarse": (CoarseTransformer, {**MEANINGS, **CODES}),
    "fine": (FineTransformer, {**CODES, "num_fine_quantizers": 5}),
    "delayed": (DelayedTransformer, {**MEANINGS, **CODES, "num_quantizers": 8}),
}


def read(name: str) -> Recipe:
    return load_recipe(name, sections=lambda trains: registry.entries[trains].recipe_sections())


@pytest.mark.parametrize("name", FULL)
def test_a_full_size_is_what_its_recipe_says(name: str) -> None:
    recipe = read(f"audiolm/{name}")
    kind, sizes = FULL[name]
    with torch.device("meta"):  # which allocates nothing
        transformer = kind(**recipe.model["transformer"], **sizes)  # type: ignore[arg-type]
    assert (transformer.dim, len(transformer.layers.layers)) == (1024, 12) and transformer.has_condition
    (millions,) = re.findall(r"\((\d+) M parameters\)", recipe.summary)
    assert round(sum(p.numel() for p in transformer.parameters()) / 1e6) == int(millions)


def test_the_full_sizes_belong_together() -> None:
    recipes = {name: read(f"audiolm/{name}") for name in FULL}
    codec = read("soundstream/soundstream").model
    assert codec["codebook_size"] == CODES["codebook_size"]
    coarse, fine = (recipes[name].model["transformer"]["num_coarse_quantizers"] for name in ("coarse", "fine"))
    assert coarse == fine == codec["rq_num_quantizers"] - FULL["fine"][1]["num_fine_quantizers"]
    assert all(recipe.data == recipes["semantic"].data for recipe in recipes.values()), "one token cache is for all"
    assert all(recipes[name].model["unique_consecutive"] is False for name in ("semantic", "coarse", "delayed"))
    for stage, place in {"codec": "runs/soundstream-soundstream", "wav2vec": "runs/kmeans"}.items():
        assert {recipe.model.get(stage, place) for recipe in recipes.values()} == {place}
