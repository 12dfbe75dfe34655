"""Numbers that users give, refused in one sentence where they cannot be."""

import math


def check_finite_numbers(**numbers: float) -> None:
    for name, value in numbers.items():
        if not math.isfinite(value):
            raise ValueError(f"{name}={value} must be a finite number")


def check_probabilities(**numbers: float) -> None:
    for name, value in numbers.items():
        if not 0 <= value <= 1:
            raise ValueError(f"{name}={value} is a probability: it must be between 0 and 1")
