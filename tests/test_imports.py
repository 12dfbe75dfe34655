"""Imports stay light: a name costs its own family, and the package itself nothing."""

import json
import subprocess
import sys
from typing import Any

import pytest

HEAVY = {"transformers", "datasets", "tensorboard", "wandb"}
SCRIPT = """
import json, logging, sys, warnings
top = lambda: sorted({name.partition(".")[0] for name in sys.modules})
logs = lambda: [logging.root.level, list(map(str, logging.root.handlers))]
before = warnings.warn, warnings.showwarning, logs()
found = {}
import helicon
found["package"] = top()
from helicon import VQGanVAETrainer
found["trainer"] = top()
from helicon import AudioLM, EncodecWrapper, HubertWithKmeans, MeshTransformerTrainer, SoundStreamTrainer
found["all"] = top()
found["alone"] = before == (warnings.warn, warnings.showwarning, logs())
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    """What is loaded after which import, in one Python of its own."""
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def test_importing_the_package_loads_no_torch_and_no_family(found: dict[str, Any]) -> None:
    assert not {"torch", "transformers", "accelerate", "numpy"} & set(found["package"])
    assert "torch" in found["trainer"]


def test_a_trainer_loads_no_transformers_until_it_needs_one(found: dict[str, Any]) -> None:
    assert not (HEAVY | {"soundfile", "trimesh"}) & set(found["trainer"])


def test_codecs_and_tokenizers_load_no_model_library_until_they_need_one(found: dict[str, Any]) -> None:
    assert not HEAVY & set(found["all"])


def test_importing_leaves_warnings_and_logging_alone(found: dict[str, Any]) -> None:
    assert found["alone"]


def test_every_public_name_is_where_it_is_said_to_be() -> None:
    import helicon

    for name in helicon.__all__:
        assert getattr(helicon, name) is not None
