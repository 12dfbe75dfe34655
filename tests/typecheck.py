"""The run-time type checker that pytest puts on every function of the package (an int passes for a float, as in PEP 484)."""

from collections.abc import Callable
from typing import Any

from beartype import BeartypeConf, beartype
from beartype.roar import BeartypeDecorHintPep673Exception

_beartype = beartype(conf=BeartypeConf(is_pep484_tower=True))


def checked(function: Callable[..., Any]) -> Callable[..., Any]:
    try:
        return _beartype(function)
    except BeartypeDecorHintPep673Exception:  # `Self` can be checked on whole classes only
        return function
