"""The whole state of a trainer to a checkpoint and back, and the folder it lives in."""

import json
import logging
import os
import shutil
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from helicon.data.foreign import ForeignLoader
from helicon.data.loader import Loader, Position
from helicon.engine import checkpoint
from helicon.engine.checkpoint import (
    CHECKPOINTS_FOLDER,
    LOCK_FILE,
    RANDOM_FILE,
    STATE_FOLDER,
    TRAINER_FILE,
    Loaded,
    Snapshot,
)
from helicon.engine.runtime import Runtime, random_state, seed_everything, set_random_state
from helicon.engine.shards import read_shards, write_shards
from helicon.nn.network import (
    CONFIG_FILE,
    EMA_FILE,
    STAGES_FOLDER,
    WEIGHTS_FILE,
    Network,
    class_path,
    load_state,
    read_config,
    same_arguments,
    stage_reference,
    weights_hashes,
)

if TYPE_CHECKING:
    from helicon.engine.trainer import Trainer

logger = logging.getLogger(__name__)

# What a run writes into its folder: all that may be cleared from one.
RUN_CONTENTS = {
    *(CHECKPOINTS_FOLDER, STAGES_FOLDER, "samples", "tensorboard"),
    *("recipe.yaml", ".recipe.yaml.partial", "metrics.jsonl", "metrics.writing", "bad_files.txt", LOCK_FILE),
}
# What is left of one that failed before it had learned anything.
BEFORE_A_STEP = {"recipe.yaml", ".recipe.yaml.partial", "bad_files.txt", LOCK_FILE}


def claim_folder(folder: Path, runtime: Runtime, resume: bool, clear: bool) -> None:
    """Makes the run's folder. One that holds something is never wiped or asked about, only refused; but for a run that never began."""
    if folder.exists() and not folder.is_dir():
        raise NotADirectoryError(f"{folder} is a file, not a folder: choose another results_folder")
    found = sorted(path.name for path in folder.iterdir()) if folder.exists() else []
    began, foreign = not BEFORE_A_STEP.issuperset(found), [name for name in found if name not in RUN_CONTENTS]
    runtime.wait()  # every process has looked before one of them writes
    if began and not resume and not clear:
        raise FileExistsError(
            f"{folder} already holds something: continue a run with resume=True (helicon resume {folder}), "
            f"replace it with force_clear_prev_results=True, or choose another results_folder"
        )
    if foreign and clear and not resume:
        raise FileExistsError(
            f"{folder} holds {foreign[0]}, which no run has written: it is not cleared; choose another results_folder"
        )
    if runtime.is_main:
        if found and not resume:
            with checkpoint.locked(folder):  # not from under a run that still goes on
                _clear(folder)
        with checkpoint.writable(folder):
            folder.mkdir(parents=True, exist_ok=True)
    runtime.wait()


def check_still_ours(trainer: "Trainer") -> None:
    """Raises where another trainer, made while the folder was empty as well, has trained there before this one begins."""
    has_begun = trainer.step > 0 or trainer._saved_step is not None
    if trainer.is_main and not has_begun and checkpoint.checkpoints(trainer.results_folder):
        raise FileExistsError(
            f"another trainer has trained in {trainer.results_folder} since this one was made: give each its own results_folder"
        )


def _clear(folder: Path) -> None:
    """Deletes what is in a folder, not the folder: it may be a link, or where a disk is mounted."""
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def newest_on_all(runtime: Runtime, run: Path) -> Path | None:
    """The newest whole checkpoint, looked for and verified by the main process alone so that all processes load the same one."""
    found = checkpoint.newest_whole(run) if runtime.is_main else None
    count = len(checkpoint.checkpoints(run))
    newest, count = runtime.gather((found, count))[0]
    if newest is None and count:
        raise ValueError(
            f"none of the {count} checkpoints of {run} is whole: put one back, or start anew with force_clear_prev_results=True"
        )
    return newest


def save_in_background(trainer: "Trainer", keep_last: int) -> None:
    trainer.writer.wait()  # or two copies of everything would be in main memory
    try:
        snapshot = _capture(trainer, trainer.results_folder / CHECKPOINTS_FOLDER / checkpoint.folder_name(trainer.step))
    except (OSError, SafetensorError) as error:  # a stage of it could not be copied
        trainer.writer.fail(trainer.step, trainer.results_folder, error)
        return
    if snapshot is not None:
        trainer.writer.submit(snapshot, trainer.results_folder, keep_last)


def save(trainer: "Trainer", folder: Path) -> None:
    trainer.writer.wait()
    snapshot = _capture(trainer, folder)
    if snapshot is not None:
        checkpoint.write(snapshot, folder)
    trainer.wait()


def _capture(trainer: "Trainer", folder: Path) -> Snapshot | None:
    """A copy of everything in main memory, on the main process; the others only give their part."""
    model, runtime = trainer.task.model, trainer.runtime
    optimizers = {name: optimizer.state() for name, optimizer in trainer.optimizers.items()}
    shards = None
    if runtime.shards:
        shards = _write_optimizer_shards(trainer, folder, optimizers)
    own = model.own_tensors() if runtime.is_main or runtime.shards else {}
    tensors: dict[str, dict[str, Tensor]] = {WEIGHTS_FILE: {name: _copied(value) for name, value in own.items()}}
    if trainer.ema is not None:
        averages = trainer.ema.by_identity()
        tensors[EMA_FILE] = {name: _copied(averages[id(value)]) for name, value in own.items() if id(value) in averages}
    randomness = runtime.gather(random_state())
    if not runtime.is_main:
        return None
    if not runtime.shards:
        for name, values in optimizers.items():
            tensors[_optimizer_file(name)] = {key: _copied(value) for key, value in values.items()}
    if trainer.scale is not None:
        tensors[f"{STATE_FOLDER}/loss_scale.safetensors"] = {k: _copied(v) for k, v in trainer.scale.state().items()}
    stages = {
        name: _stage_reference(stage, name, trainer.results_folder, folder) for name, stage in model.stages().items()
    }
    documents = {
        CONFIG_FILE: {**model.config(), "stages": stages},
        TRAINER_FILE: _trainer_document(trainer),
        RANDOM_FILE: randomness,
    }
    facts = {
        "class": class_path(model.kind),
        "lineage": stages,
        "valid_loss": trainer.valid_loss if trainer.valid_step == trainer.step else None,
    }
    return Snapshot(trainer.step, tensors, documents, facts, shards)


def _trainer_document(trainer: "Trainer") -> dict[str, Any]:
    loader = trainer.feed.train
    return {
        "step": trainer.step,
        "updates": {name: optimizer.schedule.updates for name, optimizer in trainer.optimizers.items()},
        "position": asdict(trainer.position),
        "world_size": trainer.runtime.world_size,
        "asked": _asked(trainer),
        "batch_size": trainer.feed.batch_size,
        "grad_accum_every": trainer.feed.grad_accum_every,
        "samples": len(trainer.feed.dataset) if isinstance(loader, Loader) else None,
        "loader": None if isinstance(loader, Loader) else _jsonable(loader.state),
        "parts": None if isinstance(loader, Loader) else loader.num_parts,
        "valid_loss": trainer.valid_loss,
        "bad_steps": float(trainer.bad_steps),
        "bad_in_a_row": float(trainer.bad_in_a_row),
        "tracker_run": trainer.trackers.run_id,
    }


def _jsonable(value: Any) -> Any:
    """A user's loader state, where it is plain data; otherwise its batches are skipped on resume instead."""
    try:
        json.dumps(value)
    except TypeError:
        return None
    return value


def is_good(folder: Path) -> bool:
    """Whether the step before a checkpoint was finite. (That of a run that was stopped is saved even if not.)"""
    try:
        return not json.loads((folder / TRAINER_FILE).read_text()).get("bad_in_a_row")
    except (OSError, ValueError):  # damaged
        return False


def restore(trainer: "Trainer", path: Path, is_verified: bool = False) -> None:
    """Puts a trainer into the state a checkpoint holds. Refused before anything is changed if it is another model's."""
    loaded = Loaded.open(path, is_verified)
    mine, theirs = class_path(trainer.task.model.kind), loaded.document(CONFIG_FILE)["class"]
    if mine != theirs:
        raise ValueError(
            f"{loaded.folder} is a checkpoint of {theirs.partition(':')[2]}, and this trainer trains a "
            f"{mine.partition(':')[2]}: give it one of its own"
        )
    _check_stages(loaded, trainer.task.model)
    document = loaded.document(TRAINER_FILE)
    own = trainer.task.model.own_tensors()
    weights = trainer.task.model.completed(loaded.weights)
    _check_shapes(loaded, weights, own)
    states = {name: _optimizer_state(loaded, name) for name in trainer.optimizers}
    for name, optimizer in trainer.optimizers.items():
        optimizer.check_state(states[name])
    _fill(own, weights)
    averaged = weights if loaded.averaged is None else trainer.task.model.completed(loaded.averaged)
    if trainer.ema is not None:
        averages = trainer.ema.by_identity()
        mine_averaged = {name: averages[id(value)] for name, value in own.items() if id(value) in averages}
        _fill(mine_averaged, averaged)
    for name, optimizer in trainer.optimizers.items():
        optimizer.load_state(states[name], document["updates"][name])
    if trainer.scale is not None and loaded.has(f"{STATE_FOLDER}/loss_scale.safetensors"):
        trainer.scale.load_state(loaded.tensors(f"{STATE_FOLDER}/loss_scale.safetensors"))
    trainer.step = document["step"]
    trainer.valid_loss = document["valid_loss"]
    trainer.bad_steps.fill_(document["bad_steps"])
    trainer.bad_in_a_row = torch.full_like(trainer.bad_in_a_row, document.get("bad_in_a_row", 0.0))
    trainer.trackers.run_id = document["tracker_run"]
    _restore_data(trainer, document)
    _restore_randomness(trainer, loaded.document(RANDOM_FILE))


def _restore_data(trainer: "Trainer", document: dict[str, Any]) -> None:
    trainer.position = Position(**document["position"])
    loader = trainer.feed.train
    if (document["samples"] is None) != isinstance(loader, ForeignLoader):
        logger.warning(
            "the run was saved with a dataset and goes on with a loader, or the reverse: its data starts over"
        )
        trainer.position = Position()
        return
    if isinstance(loader, ForeignLoader):
        _restore_foreign(trainer, loader, document)
        return
    if document["samples"] not in (None, len(trainer.feed.dataset)):
        logger.warning(
            "the run was saved with %d training samples and there are %d now: the order from here on is another",
            document["samples"],
            len(trainer.feed.dataset),
        )
    whole = document["batch_size"] * document["grad_accum_every"] * document["world_size"]
    if loader.global_batch == whole:
        return
    if document["asked"] == _asked(trainer):
        _keep_global_batch(trainer, whole)
    else:
        logger.warning("a step has %d samples from here on; it had %d before", loader.global_batch, whole)


def _restore_foreign(trainer: "Trainer", loader: ForeignLoader, document: dict[str, Any]) -> None:
    """A user's own loader gives batches: a step keeps its number of them, and goes on where the source stood."""
    whole, processes = document["grad_accum_every"] * document["world_size"], loader.world_size
    if whole != loader.grad_accum_every * processes:
        if document["asked"] != _asked(trainer):
            logger.warning(
                "a step has %d batches from here on; it had %d before", loader.grad_accum_every * processes, whole
            )
        elif whole % processes:
            raise ValueError(_uneven(whole, "batches", processes))
        else:
            trainer.feed.set_batch(trainer.feed.batch_size, whole // processes)
    parts = document.get("parts", loader.num_parts)
    if parts != loader.num_parts:  # the source is split otherwise than before, and its state is of no use
        trainer.position = replace(trainer.position, offset=trainer.position.offset * parts // loader.num_parts)
    elif document["loader"] is not None:
        loader.load_state(document["loader"])


def _uneven(whole: int, things: str, processes: int) -> str:
    return (
        f"the run was saved with {whole} {things} per step, which {processes} processes cannot share evenly: "
        f"resume on a number of processes that divides {whole}"
    )


def _asked(trainer: "Trainer") -> list[Any]:
    """What the user asked of a batch, whatever number of processes shares it."""
    options = trainer.options
    return [options.batch_size, options.grad_accum_every, options.split_batches]


def _keep_global_batch(trainer: "Trainer", whole: int) -> None:
    """On another number of processes, accumulation (or else the local batch) changes so that a step sees the same samples."""
    processes = trainer.runtime.world_size
    batch_size, accumulate = trainer.feed.batch_size, trainer.feed.grad_accum_every
    if whole % (processes * batch_size) == 0:
        trainer.feed.set_batch(batch_size, whole // (processes * batch_size))
    elif whole % (processes * accumulate) == 0:
        trainer.feed.set_batch(whole // (processes * accumulate), accumulate)
    else:
        raise ValueError(_uneven(whole, "samples", processes))
    logger.info(
        "a step keeps its %d samples: %d processes x %d micro-batches of %d",
        whole,
        processes,
        trainer.feed.grad_accum_every,
        trainer.feed.batch_size,
    )


def _restore_randomness(trainer: "Trainer", states: list[dict[str, Any]]) -> None:
    rank = trainer.runtime.rank
    if rank < len(states):
        set_random_state(states[rank])
    else:  # a process the saved run did not have
        seed_everything((trainer.options.seed * 1_000_003 + rank) ^ (trainer.step * 7_919))


def load_weights(model: Network, folder: Path) -> None:
    """Starts a network from the weights of another of its kind, whose own stages need not be there any more."""
    config = read_config(folder)
    if config["class"] != class_path(model.kind):
        kind = config["class"].rpartition(":")[2]
        raise ValueError(f"init_from holds a {kind}, and this trainer trains a {model.kind.__name__}")
    model.load(folder)
    references = config.get("stages", {})
    for name, stage in model.stages().items():
        if name in references and not _is_stage(stage, references[name], folder):
            logger.warning(
                "init_from: these weights were trained on another %s than this run has, and what it makes of data is new to them",
                name,
            )


def _stage_reference(stage: Network, name: str, run: Path, folder: Path) -> dict[str, Any]:
    """Where a later reader finds a stage: the folder it was loaded from, or else a copy saved once in the run.

    A run deletes its old checkpoints as it goes on, so a checkpoint is no place to refer to.
    """
    source = stage.source
    if source is not None and source.parent.name != CHECKPOINTS_FOLDER and (source / WEIGHTS_FILE).exists():
        reference = stage_reference(source, os.path.relpath(source, folder.resolve()))
        if reference["sha256"] == stage.source_sha256 and _is_as_in(source, stage, reference["sha256"]):
            return reference
    # Never saved, or changed since, or what stands in its folder now is another network than the one in use here. (Another one than the run
    # had before gets a folder beside that one's, which earlier checkpoints refer to.)
    home = run / STAGES_FOLDER / name
    while home.exists() and not _are_of(_saved_weights(home), stage):
        home = home.with_name(f"{home.name}-again")
    if not home.exists():
        part = home.with_name(f".{home.name}")  # until all of it is written
        shutil.rmtree(part, ignore_errors=True)
        stage.save_pretrained(part)
        part.rename(home)
    reference = stage_reference(home, os.path.relpath(home.resolve(), folder.resolve()))
    stage.source, stage.source_sha256 = home.resolve(), reference["sha256"]
    return reference


def _is_as_in(source: Path, stage: Network, sha256: str) -> bool:
    """Whether a stage still has the weights it was loaded with. They are compared once: none of them is trained here."""
    if stage.compared_sha256 != sha256 and _are_of(_saved_weights(source), stage):
        stage.compared_sha256 = sha256
    return stage.compared_sha256 == sha256


def _saved_weights(folder: Path) -> dict[str, Tensor] | None:
    """Of the network in a folder, the averaged ones where there are some; None where there is no network, or a damaged one."""
    try:
        saved = load_state(folder / WEIGHTS_FILE)
        return saved | load_state(folder / EMA_FILE) if (folder / EMA_FILE).exists() else saved
    except ValueError:
        return None


def _are_of(weights: dict[str, Tensor] | None, stage: Network) -> bool:
    """Whether these are the stage's own weights. (There may be more: a tokenizer in use has no adversary.)"""
    own = stage.own_state()
    return (
        weights is not None
        and own.keys() <= weights.keys()
        and all(
            value.dtype == weights[name].dtype and torch.equal(value.cpu(), weights[name])
            for name, value in own.items()
        )
    )


def _check_stages(loaded: Loaded, model: Network) -> None:
    """Refuses to go on with a network that stands on others than the saved one did: a tokenizer may have been trained further
    since, and nothing else would tell that every token means something new."""
    stages = model.stages()
    for name, reference in loaded.document(CONFIG_FILE)["stages"].items():
        stage, folder = stages.get(name), (loaded.folder / reference["path"]).resolve()
        if stage is not None and _is_stage(stage, reference, loaded.folder):
            continue
        remedy = "start a new run from the weights with init_from"
        if stage is None or _is_unchanged(folder, reference) or not stage.own_state():
            raise ValueError(
                f"{loaded.folder} was trained on the {name} at {folder}, and this trainer has "
                f"{'none' if stage is None else 'another'}: give it that one, or {remedy}"
            )
        if (folder / WEIGHTS_FILE).exists():
            raise ValueError(
                f"{loaded.folder} was trained on another {name} than the one that is now at {folder}: put that one back, or {remedy}"
            )
        logger.warning(
            "the %s of this run is not at %s any more: see to it that the one given is the same", name, folder
        )


def _is_stage(stage: Network, reference: Mapping[str, Any], base: Path) -> bool:
    """Whether this is the stage that a checkpoint or saved network in `base` refers to."""
    if not stage.own_state():  # a log-mel spectrogram, say: how it was built is all there is
        return same_arguments(reference["config"], stage.config())
    folder = (base / reference["path"]).resolve()
    if _is_unchanged(folder, reference):
        return _are_of(_saved_weights(folder), stage)
    return stage.source_sha256 == reference["sha256"]


def _is_unchanged(folder: Path, reference: Mapping[str, Any]) -> bool:
    """Whether what a reference names is still what stands there."""
    if not (folder / WEIGHTS_FILE).exists():
        return False
    return all(reference.get(name) == value for name, value in weights_hashes(folder).items())


def _write_optimizer_shards(trainer: "Trainer", folder: Path, optimizers: dict[str, dict[str, Tensor]]) -> Path:
    trainer.writer.wait()
    shards = folder.with_name(f".{folder.name}.shards")
    if trainer.is_main:
        shutil.rmtree(shards, ignore_errors=True)
        shards.mkdir(parents=True)
    trainer.wait()
    flat = {f"{network}:{key}": value for network, values in optimizers.items() for key, value in values.items()}
    write_shards(shards, flat, trainer.runtime.rank)
    trainer.wait()
    return shards


def _optimizer_state(loaded: Loaded, name: str) -> dict[str, Tensor]:
    if loaded.has(_optimizer_file(name)):
        return loaded.tensors(_optimizer_file(name))
    shards = loaded.folder / STATE_FOLDER / "shards"
    if not shards.is_dir():
        return {}  # saved before this network's first update
    return {key.partition(":")[2]: value for key, value in read_shards(shards).items() if key.startswith(f"{name}:")}


def _optimizer_file(name: str) -> str:
    return f"{STATE_FOLDER}/optimizer-{name}.safetensors"


def _copied(value: Tensor) -> Tensor:
    """A copy in main memory that training cannot change any more; whole, where the tensor is sharded."""
    value = value.detach()
    whole = value.full_tensor() if isinstance(value, DTensor) else value
    return whole.to("cpu", copy=True)


def _check_shapes(loaded: Loaded, weights: dict[str, Tensor], own: dict[str, Tensor]) -> None:
    odd = sorted(weights.keys() ^ own.keys()) or [name for name in own if own[name].shape != weights[name].shape]
    if odd:
        raise ValueError(
            f"{loaded.folder} holds a model of other sizes than this one ({odd[0]} differs): build the model with the arguments in its {CONFIG_FILE}"
        )


@torch.no_grad()
def _fill(targets: dict[str, Tensor], values: dict[str, Tensor]) -> None:
    for name, target in targets.items():
        value = values[name].to(target.device)
        if isinstance(target, DTensor):
            value = distribute_tensor(value, target.device_mesh, target.placements)
        target.copy_(value)
