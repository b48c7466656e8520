"""Conversion of immutable Python values, and of NumPy dtypes, to plain parts and back."""

from __future__ import annotations

import datetime
import decimal
import fractions
import pathlib
import re
import struct
import types
import uuid
from collections.abc import Callable
from typing import Any

from hpstage.errors import StateError
from hpstage.training.capture.kind import numpy

Parts = tuple[Any, ...]


def _zoned(offset: Any, name: Any) -> datetime.timezone:
    unnamed = datetime.timezone(offset)
    return unnamed if name == unnamed.tzname(None) else datetime.timezone(offset, name)


def _clock(value: Any) -> Parts:
    return value.hour, value.minute, value.second, value.microsecond, value.tzinfo, value.fold


def _folded(kind: Any) -> Callable[..., Any]:
    return lambda *parts: kind(*parts[:-1], fold=parts[-1])


def _day(value: Any) -> Parts:
    return value.year, value.month, value.day


# By name: the type, a function that returns the parts of a value, which may be atoms, and one that makes it from them.
_BY_NAME: dict[str, tuple[type, Callable[[Any], Parts], Callable[..., Any]]] = {
    "ellipsis": (types.EllipsisType, lambda value: (), types.EllipsisType),
    "not implemented": (types.NotImplementedType, lambda value: (), types.NotImplementedType),
    "complex": (complex, lambda value: (value.real, value.imag), complex),
    "range": (range, lambda value: (value.start, value.stop, value.step), range),
    "slice": (slice, lambda value: (value.start, value.stop, value.step), slice),
    "fraction": (fractions.Fraction, lambda value: (value.numerator, value.denominator), fractions.Fraction),
    "decimal": (decimal.Decimal, lambda value: (str(value),), decimal.Decimal),
    "path": (pathlib.PosixPath, lambda value: (str(value),), pathlib.Path),
    "pure path": (pathlib.PurePosixPath, lambda value: (str(value),), pathlib.PurePosixPath),
    "pattern": (re.Pattern, lambda value: (value.pattern, value.flags), re.compile),
    "format": (struct.Struct, lambda value: (value.format,), struct.Struct),
    "uuid": (uuid.UUID, lambda value: (value.int,), lambda number: uuid.UUID(int=number)),
    "date": (datetime.date, _day, datetime.date),
    "time": (datetime.time, _clock, _folded(datetime.time)),
    "datetime": (datetime.datetime, lambda value: (*_day(value), *_clock(value)), _folded(datetime.datetime)),
    "timedelta": (
        datetime.timedelta,
        lambda value: (value.days, value.seconds, value.microseconds),
        datetime.timedelta,
    ),
    "timezone": (datetime.timezone, lambda value: (value.utcoffset(None), value.tzname(None)), _zoned),
}
_NAMES = {kind: name for name, (kind, _, _) in _BY_NAME.items()}


def parts_of(value: object) -> tuple[str, Parts] | None:
    """Return the name of a value's type and its parts, or ``None`` if its type is not listed here."""
    name = _NAMES.get(type(value))
    return None if name is None else (name, _BY_NAME[name][1](value))


def is_known(name: str) -> bool:
    return name in _BY_NAME


def made_of(name: str, parts: list[Any]) -> Any:
    try:
        return _BY_NAME[name][2](*parts)
    except (TypeError, ValueError, ArithmeticError, RecursionError, re.error, struct.error) as error:
        raise StateError(f"the state holds an invalid {name}: it cannot be made of {parts}") from error


Description = str | list[Any]


def described_wholly(dtype: Any) -> Description | None:
    """Return the description of a dtype, or ``None`` if it would lose a part of the dtype (metadata, alignment)."""
    described = description(dtype)
    if described is None or numpy().lib.format.drop_metadata(dtype) is not dtype:
        return None
    again = dtype_of(described)
    return described if again == dtype and repr(again) == repr(dtype) else None


def description(dtype: Any) -> Description | None:
    """Return the description of a dtype without its metadata, or ``None`` if NumPy has none: for fields that overlap or
    are out of order."""
    try:
        described = numpy().lib.format.dtype_to_descr(numpy().lib.format.drop_metadata(dtype))
    except ValueError:
        return None
    return described if isinstance(described, str) else [list(field) for field in described]


def dtype_of(description: Description) -> Any:
    fields = description if isinstance(description, str) else [tuple(field) for field in description]
    return numpy().lib.format.descr_to_dtype(fields)
