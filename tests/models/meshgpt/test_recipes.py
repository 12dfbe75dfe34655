"""The recipes of the mesh family: what they build, and that the stages of one size belong together."""

import re
from typing import Any

import pytest
import torch

from helicon import registry
from helicon.config import Recipe, load_recipe
from helicon.models.meshgpt.autoencoder import MeshAutoencoder
from helicon.models.meshgpt.compact import CompactMeshTokenizer
from helicon.models.meshgpt.transformer import MeshTransformer

ON_AUTOENCODERS = {"transformer-demo": "autoencoder-demo", "transformer": "autoencoder"}


def read(name: str) -> Recipe:
    return load_recipe(f"meshgpt/{name}", sections=lambda trains: registry.entries[trains].recipe_sections())


def built(name: str) -> MeshAutoencoder | MeshTransformer:
    """As large as the recipe says, without allocating it."""
    recipe = read(name)
    with torch.device("meta"):
        if recipe.trains == "mesh-autoencoder":
            return MeshAutoencoder(**recipe.model)
        tokenizer: Any = recipe.model.get("autoencoder")
        if name in ON_AUTOENCODERS:
            tokenizer = built(ON_AUTOENCODERS[name])
        elif "compact" in recipe.model:
            tokenizer = CompactMeshTokenizer(**recipe.model["compact"])
        else:
            tokenizer = MeshAutoencoder(**tokenizer)
        return MeshTransformer(tokenizer, **recipe.model["transformer"])


@pytest.mark.parametrize("name", ["autoencoder", "transformer", "compact"])
def test_a_full_size_is_what_its_recipe_says(name: str) -> None:
    said = re.search(r"\((\d+) M parameters\)", read(name).summary)
    assert said and round(sum(p.numel() for p in built(name).parameters()) / 1e6) == int(said[1])


@pytest.mark.parametrize("name", ["transformer", "compact"])
def test_the_meshes_of_a_full_size_fit(name: str) -> None:
    network, faces = built(name), read(name).data["max_faces"]
    assert isinstance(network, MeshTransformer)
    most = faces * network.tokens_per_face if not network.is_flat else faces * 3  # on real meshes it takes 2.4
    assert most <= network.max_seq_len


@pytest.mark.parametrize("name", ON_AUTOENCODERS)
def test_a_transformer_stands_on_the_run_of_its_autoencoder(name: str) -> None:
    assert read(name).model["autoencoder"] == f"runs/meshgpt-{ON_AUTOENCODERS[name]}"


def test_both_demos_learn_from_the_same_meshes() -> None:
    assert read("transformer-demo").data == read("compact-demo").data
