"""Scalars: the possible values of a hyperparameter, and their canonical form."""

from __future__ import annotations

from typing import TypeAlias

from hpstage.errors import ScheduleError
from hpstage.errors.arguments import EXACT, shown

Scalar: TypeAlias = str | int | float | bool | None
"""A value of a hyperparameter, in the form returned by ``canonical``."""

PLAIN = frozenset({str, int, float, bool, type(None)})
"""The classes of scalars."""

MAX_STEPS = EXACT + 1
"""Steps below this are exact as floats; lengths and origins stay below it."""

# The integers that JSON can carry. Whole floats in this range become integers and larger integers are refused, so that
# two canonical numbers that compare equal are the same number, of the same type.
_LEAST_INT, _PAST_INT = -(2**63), 2**64


def canonical(value: object) -> Scalar:
    """Return the canonical form of a value: ``1.0`` is ``1``, ``-0.0`` is ``0``, ``True`` is not ``1``.

    NumPy scalars and enums with a plain value become that plain value.

    Raises:
        ScheduleError: not a JSON scalar; NaN or infinite; an integer or a string that JSON cannot carry.
    """
    if type(value) is float:
        return finite(value)
    if type(value) is int:
        if _LEAST_INT <= value < _PAST_INT:
            return value
        raise ScheduleError(f"{shown(value)} does not fit 64 bits; write it as a float or as a string")
    if type(value) is str:
        if not value.isascii():
            try:
                value.encode()
            except UnicodeEncodeError:
                raise ScheduleError(f"{value!r} is not valid Unicode and cannot be written as JSON") from None
        return value
    if value is None or value is True or value is False:
        return value
    kind = type(value)
    if getattr(value, "shape", None) == () and hasattr(value, "item"):
        item = value.item()  # NumPy scalars, and 0-dimensional arrays and tensors
        if type(item) is not kind:
            return canonical(item)
    # Enums with a plain value, and other subclasses: the plain value.
    if isinstance(value, str):
        return canonical(str.__str__(value))
    if isinstance(value, int):
        return canonical(int.__int__(value))
    if isinstance(value, float):
        return canonical(float.__float__(value))
    raise ScheduleError(
        f"{shown(value)} ({kind.__name__}) cannot be a hyperparameter's value; use a string, a number, a bool or None"
    )


def same(a: Scalar, b: Scalar) -> bool:
    """Whether two values are the same for training. ``True`` and ``1`` differ, ``1`` and ``1.0`` do not."""
    return a == b and (a.__class__ is bool) is (b.__class__ is bool)


_TRUE, _FALSE = object(), object()


def distinct(value: Scalar) -> object:
    """Return a value in the form for look-ups: equal only if the values are the same. (In Python, ``True == 1``.)"""
    return value if value.__class__ is not bool else _TRUE if value else _FALSE


def plain(value: object) -> Scalar:
    """Undo :func:`distinct`."""
    return True if value is _TRUE else False if value is _FALSE else value  # type: ignore[return-value]


def finite(value: float) -> int | float:
    """Return a float in canonical form; ScheduleError for NaN and infinities."""
    if value.is_integer():
        return int(value) if _LEAST_INT <= value < _PAST_INT else value
    if value - value != 0.0:
        raise ScheduleError(f"{value!r} cannot be a hyperparameter's value; it must be finite")
    return value


def real(name: str, value: object) -> float:
    """Return the argument ``name`` as a float; ScheduleError if it is not a finite number."""
    plain = _argument(name, value)
    if isinstance(plain, bool) or not isinstance(plain, (int, float)):
        raise ScheduleError(
            f"{name} is {shown(value)}; it must be a number (for other values use piecewise or sampled)"
        )
    return float(plain)


def count(name: str, value: object, *, least: int = 0) -> int:
    """Return the argument ``name`` as a number of steps; ScheduleError if not a whole number of at least ``least``."""
    if type(value) is int and least <= value < MAX_STEPS:
        return value
    plain = _argument(name, value)
    if isinstance(plain, bool) or not isinstance(plain, int) or not least <= plain < MAX_STEPS:
        raise ScheduleError(f"{name} is {shown(value)}; it must be a whole number of steps, at least {least}")
    return plain


def _argument(name: str, value: object) -> Scalar:
    try:
        return canonical(value)
    except ScheduleError as error:
        raise ScheduleError(f"{name}: {error}") from None
