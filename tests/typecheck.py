"""The run-time type checker that pytest puts on every function of the package (an int passes for a float, as in PEP 484).

jaxtyping's import hook writes its decorator `jaxtyped` above every function. That one binds each call to the signature, and checks the
arguments before the call and again behind it, which takes more time than most of what is tested. `install` puts another in its
place: the same checker and the same memory of what a letter in a shape stands for, once a call. In a loop of hundreds of equal
steps it checks the first calls of a function and then one in some.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable
from types import FunctionType
from typing import Any, get_args, get_type_hints

import jaxtyping
from beartype import BeartypeConf, beartype
from beartype.roar import BeartypeDecorHintPep673Exception

ALL_OF, ONE_IN = (
    20,
    20,
)  # of the calls of one function in one test: the first that are all checked, and how many of the others

_beartype = beartype(conf=BeartypeConf(is_pep484_tower=True))
_jaxtyped = jaxtyping.jaxtyped
_shapes = _jaxtyped("context")
_test = 0


def install() -> None:
    jaxtyping.jaxtyped = lambda typechecker: decorated  # type: ignore[assignment]


def begin_test() -> None:
    """Calls are counted anew, so that what is checked in a test does not depend on the tests before it."""
    global _test
    _test += 1


def checked(function: Callable[..., Any]) -> Callable[..., Any]:
    try:
        return _beartype(function)
    except BeartypeDecorHintPep673Exception:  # `Self` can be checked on whole classes only
        return function


def decorated(it: Any) -> Any:
    """A function that is checked, or a class whose fields are, if it is a dataclass."""
    if inspect.isclass(it):
        if dataclasses.is_dataclass(it) and "__init__" in vars(it) and not hasattr(it.__init__, "__wrapped__"):
            it.__init__ = decorated(it.__init__)
        return it
    if inspect.isgeneratorfunction(
        it
    ):  # beartype would wait for the first item, and then look into the shapes of another
        return _jaxtyped(it, typechecker=checked)
    hints = {name: _resolved(hint, it.__globals__) for name, hint in it.__annotations__.items()}
    check = checked(_with_hints(it, hints))
    if check is it:
        return it
    return (_in_shapes_of_its_own if any(map(_has_shape, hints.values())) else _plainly)(it, check)


def _plainly(function: Callable[..., Any], check: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        return (function if jaxtyping.config.jaxtyping_disable else check)(*args, **kwargs)

    return wrapped


def _in_shapes_of_its_own(function: Callable[..., Any], check: Callable[..., Any]) -> Callable[..., Any]:
    test, calls = _test, 0

    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        nonlocal test, calls
        test, calls = _test, calls + 1 if test == _test else 1
        if jaxtyping.config.jaxtyping_disable or (calls > ALL_OF and calls % ONE_IN):
            return function(*args, **kwargs)
        with _shapes:
            return check(*args, **kwargs)

    return wrapped


def _resolved(hint: Any, names: dict[str, Any]) -> Any:
    """What a hint written as text means; anything, where it names what is not there at run time (yet)."""
    holder = type("holder", (), {"__annotations__": {"value": hint}})
    try:
        return get_type_hints(holder, names, include_extras=True)["value"]
    except NameError:
        return Any


def _with_hints(function: FunctionType, hints: dict[str, Any]) -> FunctionType:
    if hints == function.__annotations__:
        return function
    parts = (function.__code__, function.__globals__, function.__name__, function.__defaults__, function.__closure__)
    copy = functools.update_wrapper(FunctionType(*parts), function)
    copy.__kwdefaults__, copy.__annotations__ = function.__kwdefaults__, hints
    return copy


def _has_shape(hint: Any) -> bool:
    return (inspect.isclass(hint) and issubclass(hint, jaxtyping.AbstractArray)) or any(map(_has_shape, get_args(hint)))
