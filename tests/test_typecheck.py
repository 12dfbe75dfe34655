"""The run-time type checker finds what it is there to find, in functions, dataclasses and generators, and also late in a loop."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import jaxtyping
import pytest
import torch
from jaxtyping import Float, TypeCheckError
from torch import Tensor, nn

import typecheck
from helicon.nn.norms import RMSNorm
from typecheck import decorated

if TYPE_CHECKING:
    from nowhere import Nothing


@decorated
def joined(a: Float[Tensor, "b n"], b: Float[Tensor, "b m"] | None = None, scale: float = 1) -> Float[Tensor, "b n+1"]:
    """With a column more; a second one too many if `scale` is 2."""
    return torch.cat([a, a[:, : int(scale)]], dim=1)


wrong: dict[str, Callable[[], Any]] = {
    "dimensions": lambda: joined(torch.zeros(2)),
    "type of number": lambda: joined(torch.zeros(2, 3, dtype=torch.long)),
    "two sizes for one letter": lambda: joined(torch.zeros(2, 3), torch.zeros(4, 3)),
    "result": lambda: joined(torch.zeros(2, 3), scale=2),
    "no tensor": lambda: joined(torch.zeros(2, 3), scale="1"),
}


@pytest.mark.parametrize("call", wrong.values(), ids=wrong.keys())
def test_wrong_arguments_and_results_are_found(call: Callable[[], Any]) -> None:
    assert joined(torch.zeros(2, 3), torch.zeros(2, 5)).shape == (2, 4)
    with pytest.raises(Exception, match="violates type hint"):
        call()


def test_every_call_has_shapes_of_its_own() -> None:
    @decorated
    def outer(a: Float[Tensor, "b n"]) -> Float[Tensor, "b m"]:
        return joined(a[:1])[:, :0].expand(len(a), 0)

    assert outer(torch.zeros(3, 2)).shape == (3, 0)
    assert joined(torch.zeros(4, 5)).shape == (4, 6)


def test_the_first_calls_of_a_test_are_checked_and_some_of_the_others() -> None:
    good, bad = torch.zeros(2, 3), torch.zeros(2)

    def is_found() -> bool:
        try:
            joined(good, bad)
        except Exception:  # noqa: BLE001 (it is of beartype's own)
            return True
        return False

    found = [is_found() for _ in range(typecheck.ALL_OF + 3 * typecheck.ONE_IN)]
    assert all(found[: typecheck.ALL_OF]) and sum(found[typecheck.ALL_OF :]) == 3
    typecheck.begin_test()
    assert is_found()


def test_dataclasses_generators_and_hints_of_every_kind() -> None:
    @decorated
    @dataclass
    class Pair:
        first: Float[Tensor, " n"]
        second: Float[Tensor, " n"]

        @decorated
        def with_first(self, first: Float[Tensor, " n"], *, of: "Nothing" = None) -> Self:
            return type(self)(first, self.second)

    @decorated
    def rows(a: Float[Tensor, "b n"]) -> Iterator[Tensor]:
        yield from a

    pair = Pair(torch.zeros(2), torch.zeros(2))
    assert torch.equal(pair.with_first(torch.ones(2), of=3).first, torch.ones(2))
    with pytest.raises(Exception, match="violates type hint"):
        Pair(torch.zeros(2), torch.zeros(3))
    assert len(list(rows(torch.zeros(3, 2)))) == 3
    with pytest.raises(TypeCheckError):
        rows(torch.zeros(3))


def test_what_has_no_hints_is_left_alone() -> None:
    def plain(a, b=2):
        return a + b

    assert decorated(plain) is plain and decorated(nn.Linear) is nn.Linear


def test_it_can_be_turned_off(monkeypatch: pytest.MonkeyPatch) -> None:
    @decorated
    def length(a: str) -> int:
        return len(a)

    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    assert length([1]) == 1 and joined(torch.zeros(2, 3, dtype=torch.long)).shape == (2, 4)
    monkeypatch.undo()
    with pytest.raises(Exception, match="violates type hint"):
        length([1])


def test_the_package_is_checked() -> None:
    with pytest.raises(Exception, match="violates type hint"):
        RMSNorm(4)(torch.zeros(2, 4, dtype=torch.long))
