"""Nothing is unpickled, whatever file it is offered as."""

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from helicon.engine import checkpoint
from helicon.engine.checkpoint import checkpoints, read_manifest, verify
from helicon.nn.network import load_network
from toys import Line, ToyTrainer, line_task

RUN = Path("run")


class Payload:
    """Unpickling it makes a file."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (exec, ("import pathlib; pathlib.Path('executed').touch()",))


def test_the_payload_works_where_something_unpickles() -> None:
    pickle.loads(pickle.dumps(Payload()))
    assert Path("executed").exists()


@pytest.fixture
def run_of_a_network() -> Path:
    ToyTrainer(line_task(), results_folder=RUN, num_train_steps=1).train()
    return checkpoints(RUN)[-1]


@pytest.mark.parametrize("how", ["pickle", "torch"])
@pytest.mark.parametrize("name", ["model.safetensors", "ema.safetensors", "config.json"])
def test_a_pickle_offered_as_a_file_of_a_network_is_refused_and_not_executed(name: str, how: str) -> None:
    Line().save_pretrained("line")
    offer(Path("line") / name, how)
    with pytest.raises(ValueError, match=r"never unpickled|not a configuration written by Helicon"):
        load_network(Path("line"))
    with pytest.raises(ValueError):
        Line.from_pretrained("line")
    assert not Path("executed").exists()


@pytest.mark.parametrize("name", ["state/optimizer-model.safetensors", "state/trainer.json", "state/random.json"])
def test_a_pickle_inside_a_resealed_checkpoint_is_refused_and_not_executed(run_of_a_network: Path, name: str) -> None:
    """Someone who makes the manifest fit gets no further."""
    path = run_of_a_network
    offer(path / name, "pickle")
    manifest = read_manifest(path)
    manifest["files"][name] = {"size": (path / name).stat().st_size, "sha256": checkpoint.sha256(path / name)}
    (path / "manifest.json").write_text(json.dumps({**manifest, "sha256": checkpoint._seal(manifest)}))
    verify(path)
    with pytest.raises(ValueError):
        ToyTrainer(line_task(), results_folder=RUN, resume=True)
    assert not Path("executed").exists()


def test_a_pickle_offered_as_a_checkpoint_file_is_refused_and_not_executed() -> None:
    offer(Path("model.pt"), "torch")
    trainer = ToyTrainer(line_task(), results_folder=RUN)
    for load in (trainer.load, lambda path: ToyTrainer(line_task(), results_folder="other", init_from=path)):
        with pytest.raises(ValueError, match="never unpickled"):
            load("model.pt")
    assert not Path("executed").exists()


def offer(path: Path, how: str) -> None:
    if how == "torch":
        torch.save(Payload(), path)
    else:
        path.write_bytes(pickle.dumps(Payload()))
