"""Checks of the arguments of public functions: a table per function names the kind of each argument.

::

    @checked(n_trials=optional(whole()), timeout=optional(seconds(above=0)))
    def optimize(..., n_trials: int | None = None, timeout: float | None = None): ...
"""

from __future__ import annotations

import functools
import inspect
import math
import operator
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from numbers import Real
from types import MappingProxyType
from typing import Any, ParamSpec, TypeVar

from hpstage.errors import UsageError

_P = ParamSpec("_P")
_T = TypeVar("_T")

EXACT = 2**53 - 1
"""The largest whole number that all storage formats keep exactly."""
_LONGEST = 1e9
"""Longest duration in seconds, more than 30 years. Sums of durations are finite, and exact to a millisecond."""
_SHOWN = 200


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of argument: converts a value, or refuses it.

    ``read`` returns a value in plain form (NumPy's numbers as Python's) and raises any exception for a value of another
    kind; ``remedy`` says what to give instead.
    """

    read: Callable[[Any], Any]
    remedy: str

    def of(self, name: str, value: object, error: type[UsageError] = UsageError) -> Any:
        """Return the argument ``name`` in plain form. Raise an ``error`` that names it if it is of another kind."""
        try:
            return self.read(value)
        except Exception as wrong:  # methods of the value may raise anything
            remedy = str(wrong) if isinstance(wrong, _Better) else self.remedy
        raise error(f"{name} is {shown(value)}; give {remedy}")


class _Better(Exception):
    """A remedy for one value that is more specific than the remedy of the kind."""


def checked(
    elsewhere: Mapping[str, str] = MappingProxyType({}), /, **kinds: Kind
) -> Callable[[Callable[_P, _T]], Callable[_P, _T]]:
    """Return a decorator that reads the given arguments by their kinds before the function is called. Defaults are not
    read.

    Args:
        elsewhere: arguments that other libraries have but this function lacks, each with what to do instead.
    """

    def decorated(function: Callable[_P, _T]) -> Callable[_P, _T]:
        signature = inspect.signature(function)

        @functools.wraps(function)
        def call(*args: _P.args, **kwargs: _P.kwargs) -> _T:
            try:
                bound = signature.bind(*args, **kwargs)
            except TypeError as error:
                remedies = [f"; {name}: {elsewhere[name]}" for name in kwargs if name in elsewhere]
                raise TypeError(f"{function.__name__}() {error}{''.join(remedies)}") from None
            given = bound.arguments
            given |= {name: kind.of(name, given[name]) for name, kind in kinds.items() if name in given}
            return function(*bound.args, **bound.kwargs)

        call.kinds = kinds  # type: ignore[attr-defined]
        return call

    return decorated


def shown(value: object) -> str:
    """Return a value as errors show it."""
    try:
        text = f"the class {value.__name__}" if isinstance(value, type) else repr(value)
    except Exception:  # from a user's class, or for an integer with thousands of digits
        text = f"<{type(value).__name__}>"
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


# --- numbers ----------------------------------------------------------------------------------------------


def whole(least: int = 1, most: int = EXACT) -> Kind:
    """Return the kind of whole numbers from ``least`` to ``most``, both included."""

    def read(value: object) -> int:
        numpy = sys.modules.get("numpy")
        if isinstance(value, bool) or (numpy is not None and isinstance(value, numpy.bool_)):  # an index in NumPy 1
            raise TypeError
        found = operator.index(value)  # type: ignore[arg-type]
        if found > most == EXACT:
            raise _Better(f"a whole number of at most {most:,}")
        return _within(found, least <= found <= most)

    return Kind(read, f"a whole number {f'of at least {least}' if most == EXACT else f'from {least} to {most:,}'}")


def number(*, least: float | None = None, above: float | None = None, most: float = math.inf, unit: str = "") -> Kind:
    """Return the kind of finite numbers in a range: at least ``least`` or above ``above``, and at most ``most``."""
    noun = f"a number of {unit}" if unit else "a number"

    def read(value: object) -> float:
        if isinstance(value, bool) or not isinstance(value, Real):
            raise TypeError
        found = float(value)
        if most < found < math.inf:
            raise _Better(f"{noun} that is at most {most:,.10g}")
        fits = math.isfinite(found) and (least is None or found >= least) and (above is None or found > above)
        return _within(found, fits)

    return Kind(read, f"{noun} above {above:g}" if above is not None else f"{noun} that is at least {least or 0:g}")


def seconds(*, least: float | None = None, above: float | None = None) -> Kind:
    """Return the kind of numbers of seconds in a range."""
    return number(least=least, above=above, most=_LONGEST, unit="seconds")


def _bytes(size: object) -> int:
    if isinstance(size, str):
        from dask.utils import parse_bytes

        size = parse_bytes(size) if size.strip()[:1].isdigit() else None
    return whole(0, 2**63 - 1).of("", size)  # type: ignore[no-any-return]


BYTES = Kind(_bytes, "bytes: a whole number, or a text such as '20 GB' or '500 MiB'")
"""The valid values of a size: ``20_000_000_000`` or ``"20 GB"``."""


def _within(value: _T, fits: bool) -> _T:
    if not fits:
        raise ValueError
    return value


# --- objects ----------------------------------------------------------------------------------------------


def instance(classes: Any, remedy: str) -> Kind:
    """Return the kind of instances of one or several classes. If a class is given, the error proposes an instance."""

    def read(value: object) -> object:
        if not isinstance(value, classes):
            raise _Better(f"an instance: {value.__name__}(...)") if isinstance(value, type) else TypeError
        return value

    return Kind(read, remedy)


def function(remedy: str) -> Kind:
    """Return the kind of callables that are not classes."""
    return Kind(lambda value: _within(value, callable(value) and not isinstance(value, type)), remedy)


def one_of(*words: str) -> Kind:
    """Return the kind of several words."""

    def read(value: object) -> str:
        if not isinstance(value, str) or value not in words:
            raise ValueError
        return str(value)

    return Kind(read, f"one of {', '.join(map(repr, words))}")


def text(remedy: str) -> Kind:
    """Return the kind of strings that are not empty and can be encoded."""

    def read(value: object) -> str:
        if not isinstance(value, str) or not value:
            raise TypeError
        try:
            value.encode()
        except UnicodeEncodeError:
            raise _Better("another, which is valid Unicode") from None
        return str(value)

    return Kind(read, remedy)


switch = Kind(lambda value: _within(value, isinstance(value, bool)), "True or False")
METRIC = text("the name of one of the numbers that evaluate() returns")
SPACE = function("a function of an optuna.Trial that returns a dict")
PLACE = Kind(lambda value: _within(value, "\0" not in (os.fspath(value) or "\0")), "a folder or a URL")
"""Where something is stored. Names of folders need not be valid Unicode."""
SEED = whole(0, 2**32 - 1)
WORKERS = whole(most=1024)
"""Number of workers on one host."""


# --- several kinds ----------------------------------------------------------------------------------------


def optional(kind: Kind) -> Kind:
    """Return the kind of ``None`` and the values of ``kind``."""
    return Kind(lambda value: None if value is None else kind.read(value), f"{kind.remedy}, or None")


def either(*kinds: Kind) -> Kind:
    """Return the kind of values of any of the given kinds."""

    def read(value: object) -> Any:
        for kind in kinds[:-1]:
            try:
                return kind.read(value)
            except Exception:  # it may be of another kind
                continue
        return kinds[-1].read(value)

    return Kind(read, ", or ".join(kind.remedy for kind in kinds))


def several(kind: Kind, remedy: str, *, least: int = 0, single: bool = True) -> Kind:
    """Return the kind of an iterable of at least ``least`` values of ``kind``, or a single one; it is read as a
    tuple."""

    def read(value: object) -> tuple[Any, ...]:
        values = in_tuple(value)
        return _within(tuple(map(kind.read, values)), len(values) >= least and (single or values != (value,)))

    return Kind(read, remedy)


_ERROR = Kind(lambda value: _within(value, isinstance(value, type) and issubclass(value, Exception)), "")
CATCH = several(_ERROR, "classes of exceptions, such as (ValueError,)")


def in_tuple(values: object) -> tuple[Any, ...]:
    """Return one value, or an iterable of several values, as a tuple."""
    single = isinstance(values, str | bytes | Mapping | type) or not isinstance(values, Iterable)
    return (values,) if single else tuple(values)  # type: ignore[arg-type]
