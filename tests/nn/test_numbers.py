import math
import re

import pytest

from helicon.nn.numbers import check_counts, check_finite_numbers, check_probabilities


def test_numbers_that_can_be_pass() -> None:
    check_finite_numbers(temperature=0, cond_scale=-3.5)
    check_probabilities(cond_drop_prob=0, self_cond_prob=1.0)
    check_counts(depth=1, codebook_size=None, periods=(2, 3), windows=())


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_one_that_is_not_finite_is_named(value: float) -> None:
    with pytest.raises(ValueError, match=f"cond_scale={value} must be a finite number"):
        check_finite_numbers(temperature=1.0, cond_scale=value)


@pytest.mark.parametrize("value", [-0.1, 1.1, math.nan])
def test_one_that_is_no_probability_is_named(value: float) -> None:
    with pytest.raises(ValueError, match=f"cond_drop_prob={value} is a probability"):
        check_probabilities(self_cond_prob=0.5, cond_drop_prob=value)


@pytest.mark.parametrize("value", [0, -1, (2, 0)])
def test_one_that_is_no_count_is_named(value: int | tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=re.escape(f"periods={value} must be at least 1")):
        check_counts(depth=1, periods=value)
