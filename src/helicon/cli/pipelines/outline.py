"""What a pipeline is: what was asked for, the steps that follow from it, and the command that makes more of what comes of them."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from helicon.cli.steps import Step, Work
from helicon.config import ConfigError, recipe_names

SYNTHETIC = "synthetic"


@dataclass(frozen=True)
class Request:
    """What was asked for on the command line."""

    data: str
    captions: str | None
    seconds: float | None
    size: str | None
    delayed: bool
    codec: Path | None = None  # in the place of one that is trained
    mulan: Path | None = None

    @property
    def has_texts(self) -> bool:
        return self.captions is not None or self.data == SYNTHETIC

    @property
    def is_a_trial(self) -> bool:
        """To see that everything runs: of made-up sounds, which never run out, few are enough."""
        return (self.size, self.data) == ("debug", SYNTHETIC)

    def check_size(self) -> None:
        known = sizes()
        if self.size is not None and self.size not in known:
            raise ConfigError(
                f"--size {self.size} is none of {', '.join(known)}: give one of these, or leave it out for the full size"
            )

    def sized(self, recipe: str) -> str:
        """The recipe in the size that was asked for."""
        return recipe if self.size is None else f"{recipe}-{self.size}"

    def about_data(self) -> list[str]:
        """Settings of recipes that learn from texts, or from tokens of sounds that may have some."""
        seconds = [] if self.seconds is None else [f"data.data_max_length_seconds={self.seconds}"]
        return [*seconds, f"data.captions={json.dumps(self.captions)}", *self.not_made_up()]

    def not_made_up(self) -> list[str]:
        """(Recipes of demos choose among made-up sounds.)"""
        return [] if self.data == SYNTHETIC else ["data.sounds=null"]


def sizes() -> list[str]:
    """Those that there are recipes of, beside the full one."""
    stem = "audiolm/semantic-"  # a stage of every pipeline
    return [name.removeprefix(stem) for name in recipe_names() if name.startswith(stem)]


@dataclass(frozen=True)
class Pipeline:
    steps: Callable[[Request], Sequence[Step]]  # raises ConfigError for what the kind cannot do
    next_command: Callable[[Work], str]
