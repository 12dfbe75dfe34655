"""Numbers that users give, refused in one sentence where they cannot be."""

import math
from collections.abc import Sequence


def check_finite_numbers(**numbers: float) -> None:
    for name, value in numbers.items():
        if not math.isfinite(value):
            raise ValueError(f"{name}={value} must be a finite number")


def check_counts(**numbers: int | Sequence[int] | None) -> None:
    """Of one thing or of several; None is no number yet."""
    for name, value in numbers.items():
        if value is not None and min([value] if isinstance(value, int) else value, default=1) < 1:
            raise ValueError(f"{name}={value} must be at least 1")


def check_probabilities(**numbers: float) -> None:
    for name, value in numbers.items():
        if not 0 <= value <= 1:
            raise ValueError(f"{name}={value} is a probability: it must be between 0 and 1")
