"""What can be trained, sampled and evaluated: the only list."""

from pathlib import Path

from helicon.engine.checkpoint import resolve
from helicon.nn.network import Network, load_network


def load(path: str | Path, use_ema: bool = True) -> Network:
    """The network of a run, a checkpoint or a saved folder, with the stages it stands on."""
    return load_network(resolve(Path(path)), use_ema=use_ema)
