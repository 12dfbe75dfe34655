"""Keywords of other packages for what is not there: taken where they say nothing, refused where they would be another network elsewhere."""

from typing import Any

# Of layers: the values that mean what leaving them out means, and the reason.
ABSENT: dict[str, tuple[tuple[Any, ...], str]] = {
    "add_value_residual": ((True, False), "values are not mixed with those of the first layer"),
    "learned_value_residual_mix": ((True, False), "values are not mixed with those of the first layer"),
    "num_residual_streams": ((4, 1), "there is one residual stream"),
}


def check_absent(**keywords: tuple[Any, tuple[Any, ...], str]) -> None:
    """Refuses what would be another network elsewhere and is the same one here: (value, those that say nothing, reason)."""
    for name, (value, silent, reason) in keywords.items():
        if value not in silent:
            raise ValueError(f"{name}={value}: {reason}, leave it out")


def check_absent_layers(where: str = "", **keywords: Any) -> None:
    """The same of keywords in `ABSENT`; None was not given."""
    given = {name: value for name, value in keywords.items() if value is not None}
    check_absent(**{f"{where}{name}": (value, *ABSENT[name]) for name, value in given.items()})
