"""Pretrained models of `transformers` that are only used: codecs and feature extractors, by hub name or folder.

What such a model makes of a clip must not depend on who asks: not on the batch the clip came in, the caller's precision,
mode or random state. Token caches and resumed runs rely on it.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int, Shaped, UInt8
from torch import Tensor, nn

from helicon.nn.lengths import check_lengths


class Frozen(nn.Module):
    """Holds a model: always in evaluation mode and single precision, never optimised, weights never saved again.

    `fingerprint` is saved in the place of the weights; `check` refuses another model where the saved one was.
    `identity` is what else the model's output depends on (its settings).
    """

    model: Any
    fingerprint: Tensor

    def __init__(self, model: nn.Module, name: str, identity: Mapping[str, Any]):
        super().__init__()
        self.name = name
        # Not a submodule: a parent must not optimise, average, initialise, save or switch the mode of these weights.
        object.__setattr__(self, "model", model.eval().requires_grad_(False))
        self.register_buffer("fingerprint", _fingerprint(model, identity))

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Frozen":
        # It goes where its parent goes, but its numbers stay as they are: half precision would give other tokens.
        self.model.to(fn(torch.empty(0, device=self.device)).device)
        return super()._apply(fn, recurse)

    @contextmanager
    def undisturbed(self) -> Iterator[Any]:
        """The model, to be run here: without gradients or the caller's autocast, and the caller's random state is kept."""
        # Some models draw random numbers (for layers to drop) even in evaluation mode.
        with torch.no_grad(), torch.autocast(self.device.type, enabled=False), torch.random.fork_rng(devices=[]):
            yield self.model

    def check(self, saved: Tensor | None) -> None:
        if saved is None or not torch.equal(saved.cpu(), self.fingerprint.cpu()):
            raise ValueError(f"the model at {self.name} is not the one this was saved with: put the old one back")


def pretrained_name(name_or_folder: str | Path) -> str:
    """The name as it stays true in another working directory; a single file is never a model of `transformers`."""
    path = Path(name_or_folder).expanduser()
    if path.is_file():
        raise ValueError(
            f"{path} is a file, and checkpoints of other packages (pickles) are never read: "
            f"give the folder or the hub name of a model of transformers"
        )
    return str(path.resolve() if path.is_dir() else name_or_folder)


def read_pretrained(reader: Callable[..., Any], name: str, what: str, **options: Any) -> Any:
    """`reader(name)`, one of the `from_pretrained` of `transformers`; what goes wrong is told in one sentence."""
    try:
        return reader(name, **options)
    except (OSError, ValueError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise ValueError(
            f"the {what} {name!r} could not be read ({reason}): give the folder or the hub name of a downloaded model"
        ) from error


def read_model(model_class: Any, name: str, what: str, *, needless: tuple[str, ...] = (), **options: Any) -> nn.Module:
    """The model in single precision, with every weight from the file (but the `needless` ones, used in training only)."""
    options = {**options, "dtype": torch.float32, "output_loading_info": True}
    model, loading = read_pretrained(model_class.from_pretrained, name, what, **options)
    missing = sorted(key for key in loading["missing_keys"] if not key.endswith(needless or "\0"))
    if missing:
        raise ValueError(
            f"{name} has no weights for {missing[0]}{f' and {len(missing) - 1} more' if missing[1:] else ''}: "
            f"it is not the {what} it should be"
        )
    return model


def by_length(
    inputs: Shaped[Tensor, "b ... n"],
    lengths: Int[Tensor, " b"] | None,
    function: Callable[[Tensor], Tensor],
    *,
    size: int,
    fill: float,
    least: int = 1,
) -> Shaped[Tensor, "b ... t"]:
    """`function` of the rows cut to their own lengths, those of one length together, its results padded with `fill` to `size`.

    So no row sees any padding, and batches give what single clips give. Rows shorter than `least` give `fill` alone.
    """
    parts = [(rows, function(cut)) for rows, cut in cut_by_length(inputs, lengths, least)]
    return joined(len(inputs), parts, size, fill)


def cut_by_length(
    inputs: Shaped[Tensor, "b ... n"], lengths: Int[Tensor, "..."] | None, least: int = 1
) -> list[tuple[list[int], Tensor]]:
    """The rows of each length, without their padding: their numbers, and `[g, ..., length]`."""
    size = inputs.shape[-1]
    if lengths is not None and lengths.shape != (len(inputs),):
        raise ValueError(f"lengths of shape {list(lengths.shape)} do not fit {len(inputs)} rows: give one for each")
    check_lengths(None if lengths is None else lengths.cpu(), size)
    groups: dict[int, list[int]] = {}
    for row, length in enumerate([size] * len(inputs) if lengths is None else lengths.tolist()):
        groups.setdefault(length, []).append(row)
    if max(groups, default=0) < least:
        raise ValueError(
            f"the longest row has a length of {max(groups, default=0)}, and nothing can be made of less than {least}"
        )
    if len(groups) == 1:  # nothing to pick out, and no copy
        ((length, rows),) = groups.items()
        return [(rows, inputs[..., :length])]
    return [(rows, inputs[rows][..., :length]) for length, rows in sorted(groups.items()) if length >= least]


def joined(count: int, parts: Sequence[tuple[list[int], Tensor]], size: int, fill: float) -> Shaped[Tensor, "b ... t"]:
    """The rows of a batch of `count` in their order again, padded with `fill` to `size`."""
    first = parts[0][1]
    if len(parts) == 1 and first.shape[0] == count and first.shape[-1] == size:
        return first
    outputs = first.new_full((count, *first.shape[1:-1], size), fill)
    for rows, part in parts:
        outputs[rows, ..., : part.shape[-1]] = part
    return outputs


def _fingerprint(model: nn.Module, identity: Mapping[str, Any]) -> UInt8[Tensor, "16"]:
    """Tells models apart without reading all their weights: by their settings, and a few numbers of every tensor."""
    digest = hashlib.blake2b(digest_size=16)
    digest.update(json.dumps([type(model).__name__, identity], sort_keys=True).encode())
    for name, value in model.state_dict().items():
        flat = value.detach().flatten()
        some = flat[:: max(1, len(flat) // 64)][:64].double().cpu()
        digest.update(json.dumps([name, list(value.shape), some.tolist()]).encode())
    return torch.frombuffer(bytearray(digest.digest()), dtype=torch.uint8)
