"""What every network of Helicon is: a module that remembers how it was built, so that a folder alone rebuilds it.

A saved network is `config.json` (class, version, constructor arguments) beside `model.safetensors`. An argument that is itself
a network is either a *part*, trained and saved with its owner (the class names those in `parts`), or a *stage*, trained
before: never written twice into the weights, it stands in a folder of its own (`stages/<argument>`) or is referred to by
path and hash. Nothing is unpickled, and no class outside the package is imported because a file says so.
"""

import hashlib
import importlib
import inspect
import json
import logging
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
from huggingface_hub import ModelHubMixin
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

import helicon

logger = logging.getLogger(__name__)

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
EMA_FILE = "ema.safetensors"
STAGES_FOLDER = "stages"

_MARKS = {"stage", "network", "callable"}  # what stands in a config for a value that is not plain data

_named_callables: dict[str, Callable[..., Any]] = {}


def named(function: Callable[..., Any]) -> Callable[..., Any]:
    """Registers a function, by its name, as a constructor argument that can be saved (a noise schedule, say)."""
    _named_callables[function.__name__] = function
    return function


class Network(nn.Module, ModelHubMixin, library_name="helicon"):
    """A module with `from_pretrained`, `save_pretrained` and `push_to_hub`, whose constructor arguments are recorded."""

    parts: ClassVar[tuple[str, ...]] = ()  # networks among the arguments that are trained and saved with this one
    later: ClassVar[tuple[str, ...]] = ()  # tensors that earlier versions did not save: loading leaves them as they are
    unsaved_arguments: ClassVar[tuple[str, ...]] = ()  # modules a user lends (a perceptual backbone): used, never saved

    arguments: dict[str, Any]
    kind: type["Network"]  # the class as written; sharding gives a network a class of its own
    source: Path | None = None  # the folder this network was loaded from
    source_sha256: str | None = None
    compared_sha256: str | None = None  # of a source whose weights were seen to be these

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        network = super().__new__(cls)
        network.__dict__["kind"] = cls
        network.__dict__["arguments"] = _bound_arguments(cls, args, kwargs)
        return network

    def config(self, prefix: str = "") -> dict[str, Any]:
        """The json that rebuilds this network; stages stand in it as references by name."""
        encoded = {
            key: self._encoded(key, value, prefix)
            for key, value in self.arguments.items()
            if key not in self.unsaved_arguments
        }
        return {"class": class_path(self.kind), "helicon": helicon.__version__, "arguments": encoded}

    def _encoded(self, key: str, value: Any, prefix: str) -> Any:
        if isinstance(value, Network):
            return {"network": value.config(f"{prefix}{key}.")} if key in self.parts else {"stage": f"{prefix}{key}"}
        return _encode(value, key, type(self).__name__)

    def stages(self, prefix: str = "") -> dict[str, "Network"]:
        """The networks this one stands on, by (dotted) argument name."""
        found: dict[str, Network] = {}
        for key, value in self.arguments.items():
            if isinstance(value, Network) and key in self.parts:
                found |= value.stages(f"{prefix}{key}.")
            elif isinstance(value, Network):
                found[f"{prefix}{key}"] = value
        return found

    def own_tensors(self) -> dict[str, Tensor]:
        """The parameters and buffers that belong to this network: no stages, no lent modules, tied tensors once."""
        seen = self._foreign_tensors()
        own = {}
        for name, value in self.state_dict(keep_vars=True).items():
            if id(value) not in seen:
                seen.add(id(value))
                own[name] = value
        return own

    def own_state(self) -> dict[str, Tensor]:
        return {name: value.detach() for name, value in self.own_tensors().items()}

    def completed(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """With what networks that were saved by an earlier version lack, as this one has it."""
        return {name: value for name, value in self.own_state().items() if name in self.later} | dict(state)

    def load_own_state(self, state: Mapping[str, Tensor]) -> None:
        """The inverse of `own_state`; names and shapes must match exactly, but for tensors that have come `later`."""
        expected, state = self.own_state(), self.completed(state)
        missing, unexpected = sorted(expected.keys() - state.keys()), sorted(state.keys() - expected.keys())
        if missing or unexpected:
            raise ValueError(
                f"these weights are not of this {type(self).__name__}: "
                f"missing {_some(missing)}, not expected {_some(unexpected)}; build it with the arguments it was saved with"
            )
        for name, value in expected.items():
            if value.shape != state[name].shape:
                raise ValueError(
                    f"{name} has shape {tuple(state[name].shape)} in the file and {tuple(value.shape)} in this "
                    f"{type(self).__name__}; build it with the arguments it was saved with"
                )
        with torch.no_grad():
            for name, value in expected.items():
                value.copy_(state[name])

    def save(self, path: str | Path) -> None:
        """Writes the folder that `load` and `from_pretrained` read."""
        self.save_pretrained(path)

    def load(self, path: str | Path) -> None:
        """Takes over the weights of a saved network or checkpoint, the averaged (EMA) ones where there are some."""
        folder = Path(path)
        if folder.is_file():
            raise ValueError(
                f"{folder} is a file: give a folder made by save, save_pretrained or a trainer; .pt files are not read"
            )
        saved_class = read_config(folder)["class"]
        if saved_class != class_path(self.kind):
            raise ValueError(
                f"{folder} holds a {saved_class}, not a {class_path(self.kind)}: load it with helicon.load"
            )
        state = load_state(folder / WEIGHTS_FILE)
        if (folder / EMA_FILE).exists():
            state |= load_state(folder / EMA_FILE)
        self.load_own_state(state)
        self.source, self.source_sha256 = folder.resolve(), sha256(folder / WEIGHTS_FILE)

    @classmethod
    def init_and_load(cls, path: str | Path) -> Any:
        """`from_pretrained`, by the name another package has for it."""
        return cls.from_pretrained(path)

    def _foreign_tensors(self) -> set[int]:
        lent = [self.arguments.get(key) for key in self.unsaved_arguments]
        modules = [value for value in [*self.stages().values(), *lent] if isinstance(value, nn.Module)]
        return {id(value) for module in modules for value in module.state_dict(keep_vars=True).values()}

    def _save_pretrained(self, save_directory: Path) -> None:
        config = self.config()
        config["stages"] = {}
        for name, stage in self.stages().items():
            folder = save_directory / STAGES_FOLDER / name
            folder.mkdir(parents=True, exist_ok=True)
            stage._save_pretrained(folder)
            config["stages"][name] = stage_reference(folder, f"{STAGES_FOLDER}/{name}")
        write_json(save_directory / CONFIG_FILE, config)
        save_state(self.own_state(), save_directory / WEIGHTS_FILE)
        (save_directory / EMA_FILE).unlink(missing_ok=True)  # another network's: it would be loaded instead of this one

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: str | Path,
        *,
        force_download: bool = False,
        token: str | bool | None = None,
        cache_dir: str | Path | None = None,
        local_files_only: bool = False,
        revision: str | None = None,
        **arguments: Any,
    ) -> Any:
        """The network saved in a folder or on the Hub; `arguments` replace constructor arguments (and `use_ema`).

        (The mixin's own would hand the entries of config.json to any constructor that takes `**kwargs`.)
        """
        folder = Path(pretrained_model_name_or_path)
        if folder.is_file() or folder.suffix in (".pt", ".pth", ".ckpt"):
            raise ValueError(
                f"{folder} is a file, and a network is read from the folder it was saved in; .pt files are not read"
            )
        if not folder.is_dir() and (folder.parent / "checkpoints").is_dir():  # RUN/best, say
            raise ValueError(f"{folder} is of a run: load it with helicon.load")
        if not folder.is_dir():
            from huggingface_hub import snapshot_download

            folder = Path(
                snapshot_download(
                    repo_id=str(pretrained_model_name_or_path),
                    revision=revision,
                    cache_dir=cache_dir,
                    force_download=force_download,
                    local_files_only=local_files_only,
                    token=token,
                )
            )
        network = load_network(folder, **arguments)
        if not isinstance(network, cls):
            raise ValueError(
                f"{folder} holds a {type(network).__name__}, not a {cls.__name__}: load it with helicon.load"
            )
        return network


def load_network(folder: Path, use_ema: bool = True, **arguments: Any) -> Network:
    """Rebuilds the network saved in `folder`, with the stages its config names; `arguments` replace constructor arguments."""
    config = read_config(folder)
    network_class = find_class(config["class"])
    references = config.get("stages", {})
    # A stage inside a part has a dotted name, which is no argument of the constructor but can be replaced all the same.
    stages = {name: arguments.pop(name) for name in references if "." in name and name in arguments}
    for name, reference in references.items():
        if name not in arguments and name not in stages:
            stages[name] = _load_stage(folder, name, reference, network_class.__name__)
    decoded = {key: _decode(value, stages) for key, value in config["arguments"].items() if key not in arguments}
    try:
        network = network_class(**decoded, **arguments)
    except TypeError as error:
        raise ValueError(f"{folder} names arguments that {network_class.__name__} does not take: {error}") from error
    network.load_own_state(load_state(folder / WEIGHTS_FILE))
    if use_ema and (folder / EMA_FILE).exists():
        averaged = load_state(folder / EMA_FILE)
        network.load_own_state({**network.own_state(), **averaged})
        logger.info("%s: using the averaged (EMA) weights", folder)
    if use_ema or not (folder / EMA_FILE).exists():  # otherwise the folder, read again, would give other weights
        network.source, network.source_sha256 = folder.resolve(), sha256(folder / WEIGHTS_FILE)
    return network.eval()


def read_config(folder: Path) -> dict[str, Any]:
    path = folder / CONFIG_FILE
    if (folder / "checkpoints").is_dir():
        raise ValueError(f"{folder} is a run: load it with helicon.load, or name one of its checkpoints")
    if not path.exists():
        raise FileNotFoundError(
            f"{folder} holds no {CONFIG_FILE}: give a checkpoint folder or one made by save_pretrained"
        )
    try:
        config = json.loads(path.read_text())
        is_ours = isinstance(config["class"], str) and isinstance(config["arguments"], dict)
    except (json.JSONDecodeError, KeyError, TypeError, UnicodeDecodeError):
        is_ours = False
    if not is_ours:
        raise ValueError(f"{path} is not a configuration written by Helicon")
    return config


def stage_reference(folder: Path, path: str) -> dict[str, Any]:
    """What a later stage records of an earlier one: where it is, the hash of its weights and its whole config."""
    return {"path": path, **weights_hashes(folder), "config": read_config(folder)}


def weights_hashes(folder: Path) -> dict[str, str | None]:
    averaged = folder / EMA_FILE
    return {"sha256": sha256(folder / WEIGHTS_FILE), "ema_sha256": sha256(averaged) if averaged.exists() else None}


def same_arguments(first: Mapping[str, Any], second: Mapping[str, Any]) -> bool:
    """Whether two configs, read or just made, are of networks of one class that were built alike."""
    plain = [json.loads(json.dumps({key: config[key] for key in ("class", "arguments")})) for config in (first, second)]
    return bool(plain[0] == plain[1])


def same_network(first: Network, second: Network) -> bool:
    """Whether two networks are one and the same, or copies: of one class, with the same weights, or without any and built alike."""
    if first is second:
        return True
    mine, others = first.own_state(), second.own_state()
    if not mine and not others:
        return same_arguments(first.config(), second.config())
    shared = mine.keys() & others.keys()  # a copy that is only used may have left out what is needed to train
    return (
        first.kind is second.kind
        and bool(shared)
        and all(mine[name].shape == others[name].shape for name in shared)
        and all(torch.equal(mine[name].cpu(), others[name].cpu()) for name in shared)
    )


def class_path(network_class: type) -> str:
    return f"{network_class.__module__}:{network_class.__qualname__}"


def find_class(path: str) -> type[Network]:
    """The class a config names: one of the package, or one of the user's that is already imported."""
    module_name, _, name = path.partition(":")
    if module_name.startswith("helicon."):
        try:
            importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            if not f"{module_name}.".startswith(f"{error.name}."):
                raise  # the module is there, and needs a package that is not
            raise ValueError(f"this version of Helicon ({helicon.__version__}) has no {path}") from error
    found = getattr(sys.modules.get(module_name), name, None)
    if not (isinstance(found, type) and issubclass(found, Network)):
        raise ValueError(f"{path} is not a network known here: import the module that defines it before loading")
    return found


def save_state(state: Mapping[str, Tensor], path: Path) -> None:
    save_file({name: value.detach().contiguous() for name, value in state.items()}, path, metadata={"format": "pt"})


def load_state(path: Path) -> dict[str, Tensor]:
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (a safetensors file is no dict)
    except (SafetensorError, OSError) as error:
        raise ValueError(
            f"{path} is damaged or not a safetensors file ({error}); files of other formats are never unpickled"
        ) from error


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")


def _load_stage(folder: Path, name: str, reference: Mapping[str, Any], owner: str) -> Network:
    stage = (folder / reference["path"]).resolve()
    if not (stage / WEIGHTS_FILE).exists():
        raise FileNotFoundError(
            f"{owner} in {folder} was trained on the {name} at {stage}, which is not there: put it back, or pass {name}=..."
        )
    if any(value != reference.get(key) for key, value in weights_hashes(stage).items()):
        raise ValueError(
            f"{owner} in {folder} was trained on another {name} than the one now at {stage}: put the old one back, or pass {name}=..."
        )
    return load_network(stage)


def _bound_arguments(cls: type, args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Constructor arguments by name, defaults included: a checkpoint must not change with a later version's defaults."""
    signature = inspect.signature(cls.__init__)  # type: ignore[misc]
    try:
        bound = signature.bind(None, *args, **kwargs)
    except TypeError:
        if args or kwargs:
            raise
        return {}  # copying and unpickling call __new__ bare, and bring the arguments along afterwards
    bound.apply_defaults()
    arguments = dict(bound.arguments)
    arguments.pop(next(iter(signature.parameters)))  # self
    extra = next((p.name for p in signature.parameters.values() if p.kind is p.VAR_KEYWORD), None)
    further = arguments.pop(extra) if extra else {}
    return {name: _own_copy(value) for name, value in (arguments | further).items()}


def _own_copy(value: Any) -> Any:
    """Lists and dictionaries as they were given: a constructor (or its caller) may go on to change its own."""
    if isinstance(value, dict):
        return {key: _own_copy(item) for key, item in value.items()}
    return [_own_copy(item) for item in value] if isinstance(value, list) else value


def _encode(value: Any, key: str, owner: str) -> Any:
    if isinstance(value, (list, tuple)):
        return [_encode(item, key, owner) for item in value]
    if isinstance(value, Mapping):
        if not all(isinstance(name, str) for name in value) or (len(value) == 1 and value.keys() <= _MARKS):
            raise ValueError(f"{owner}({key}=...) cannot be saved: {dict(value)!r} would read back as something else")
        return {name: _encode(item, key, owner) for name, item in value.items()}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    name = getattr(value, "__name__", None)
    if name is not None and _named_callables.get(name) is value:
        return {"callable": name}
    raise ValueError(
        f"{owner}({key}=...) cannot be saved: {type(value).__name__} is neither plain data, a Helicon network, "
        f"nor a function registered with helicon.nn.network.named"
    )


def _decode(value: Any, stages: Mapping[str, Network]) -> Any:
    if isinstance(value, dict) and value.keys() == {"stage"}:
        return stages[value["stage"]]
    if isinstance(value, dict) and value.keys() == {"network"}:
        arguments = value["network"]["arguments"]
        return find_class(value["network"]["class"])(**{key: _decode(item, stages) for key, item in arguments.items()})
    if isinstance(value, dict) and value.keys() == {"callable"}:
        if value["callable"] not in _named_callables:
            raise ValueError(f"no function is registered as {value['callable']!r}: import the module that defines it")
        return _named_callables[value["callable"]]
    if isinstance(value, dict):
        return {key: _decode(item, stages) for key, item in value.items()}
    if isinstance(value, list):
        return [_decode(item, stages) for item in value]
    return value


def _some(names: Iterable[str], limit: int = 3) -> str:
    names = list(names)
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return (", ".join(names[:limit]) or "nothing") + more
