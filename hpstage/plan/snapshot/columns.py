"""Columns: rows with equal fields as one list per field, which MessagePack decodes in C. Pure."""

from __future__ import annotations

import typing
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from operator import attrgetter
from types import GenericAlias
from typing import Any, Generic, TypeVar

import msgspec

_encode = msgspec.msgpack.Encoder().encode

T = TypeVar("T")
V = TypeVar("V")
Row = TypeVar("Row", bound=msgspec.Struct)


class Texts(dict["str | None", int]):
    """Distinct strings, numbered from 0 in the order in which they first occur; ``None`` is -1."""

    def __init__(self) -> None:
        super().__init__({None: -1})

    def __missing__(self, text: str) -> int:
        number = self[text] = len(self) - 1
        return number

    def table(self) -> list[str]:
        return [text for text in self if text is not None]


def pick(table: Sequence[T], numbers: Sequence[int], least: int = 0) -> list[T]:
    """Return the items of a table that have these numbers; a number of -1, if ``least`` is, is the table's last item.

    Raises:
        IndexError: the table has no such number.
    """
    if len(numbers) and min(numbers) < least:
        raise IndexError(f"there is no number {min(numbers)}")
    return list(map(table.__getitem__, numbers))


def check_numbers(numbers: Sequence[int], count: int) -> None:
    """Raise IndexError unless all numbers are below ``count``."""
    if len(numbers) and not 0 <= min(numbers) <= max(numbers) < count:
        raise IndexError(f"there are numbers from {min(numbers)} to {max(numbers)} of {count}")


def check_lengths(count: int, *columns: Sequence[object]) -> None:
    """Raise ValueError unless all columns have ``count`` items."""
    for column in columns:
        if len(column) != count:
            raise ValueError(f"a column has {len(column)} items, not {count}")


def slices(counts: Sequence[int], total: int) -> Iterator[tuple[int, int]]:
    """Yield the ends of consecutive parts of a column of ``total`` items.

    Raises:
        ValueError: the parts are not the whole.
    """
    if (len(counts) and min(counts) < 0) or sum(counts) != total:
        raise ValueError(f"parts of {sum(counts)} of {total} items")
    return pairwise(accumulate(counts, initial=0))


def some(table: Sequence[T], pairs: Sequence[tuple[int, V]]) -> Iterator[tuple[T, V]]:
    """Yield the items of a table that have something, with what they have. Raises as :func:`pick` does."""
    check_numbers([number for number, _ in pairs], len(table))
    return ((table[number], value) for number, value in pairs)


class Rows(Generic[Row]):
    """How structs of a class become columns, one per field; strings become their numbers in :class:`Texts`."""

    def __init__(self, kind: type[Row]) -> None:
        self._kind = kind
        fields = msgspec.structs.fields(kind)
        self._names = [field.name for field in fields]
        self._least = [_least(field.type) for field in fields]
        kinds = [field.type if least is None else int for field, least in zip(fields, self._least, strict=True)]
        columns = GenericAlias(tuple, tuple(GenericAlias(list, (kind,)) for kind in kinds))
        self._decode = msgspec.msgpack.Decoder(columns).decode

    def split(self, rows: Sequence[Row], texts: Texts) -> msgspec.Raw:
        columns = [
            [*map(attrgetter(name), rows)] if least is None else [texts[getattr(row, name)] for row in rows]
            for name, least in zip(self._names, self._least, strict=True)
        ]
        return msgspec.Raw(_encode(columns))

    def join(self, columns: msgspec.Raw, table: Sequence[str | None]) -> list[Row]:
        """Return the structs again; ``table`` holds the strings, and ``None`` at its end."""
        found = self._decode(columns)
        check_lengths(len(found[0]), *found)
        values = [
            column if least is None else pick(table, column, least)
            for column, least in zip(found, self._least, strict=True)
        ]
        return [*map(self._kind, *values)]


def _least(kind: Any) -> int | None:
    """Return the least number of a string in a field, 0, or -1 if it may be ``None``; ``None`` for other fields."""
    parts = {getattr(part, "__supertype__", part) for part in typing.get_args(kind) or (kind,)}
    if parts == {str}:
        return 0
    return -1 if parts == {str, type(None)} else None
