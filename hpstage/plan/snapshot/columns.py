"""Objects that refer to each other, in columns: of each class a list per field, which MessagePack decodes in C. Pure.

Of a field, most objects have a value of one type. Numbers are written as they are; strings, and objects of the classes,
as numbers of theirs; containers as their lengths and one column of all items. Nothing else can be written, so that
reading makes objects of these classes alone, and calls none of their methods but the constructors of structs.
"""

from __future__ import annotations

import inspect
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, count, islice
from operator import attrgetter
from types import NoneType
from typing import Any

import msgspec

from hpstage.plan.ordered import Ordered

Column = Any
"""A tag, and what it says how to read."""
Content = tuple[list[str], list[tuple[int, int, list[Column]]], Column]
"""The strings; batches of objects: the number of their class, how many there are, a column for each field; the root."""

_PLAIN, _TEXTS, _CONSTANTS, _OBJECTS, _ITEMS, _PAIRS, _MIXED = range(7)
_NUMBERS = frozenset({NoneType, bool, int, float})
_SEQUENCES: tuple[type, ...] = (list, tuple, set, Ordered)
_MAPPINGS: tuple[Any, ...] = (dict, Counter)


class _Constant:
    """Stands for the type of constants."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Defines which objects can be written.

    Attributes:
        fields: the classes, each with the names of the fields that are written: of a struct, all.
        constants: objects that are not written, and the same wherever they are read.
    """

    fields: Mapping[type, Sequence[str]]
    constants: Sequence[object]

    def write(self, root: object) -> Content:
        """Return the content of an object, and of all that it refers to.

        Raises:
            TypeError: there is something else among it.
        """
        return _Writer(self).write(root)

    def read(self, content: Content, most: int) -> Any:
        """Return the object again.

        Args:
            most: how many objects there are at most.

        Raises:
            HpstageError, ValueError, LookupError, TypeError, AttributeError, StopIteration, RuntimeError: it
                contradicts itself.
        """
        return _Reader(self, content, most).root


class _Texts(dict[str, int]):
    """Strings, numbered in the order in which they first occur."""

    def __missing__(self, text: str) -> int:
        number = self[text] = len(self)
        return number


class _Writer:
    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._constants = {id(constant): number for number, constant in enumerate(layout.constants)}
        self._may_be_constant = {*map(type, layout.constants)}
        self._places = {kind: place for place, kind in enumerate(layout.fields)}
        self._texts = _Texts()
        self._numbers: dict[type, dict[int, int]] = {kind: {} for kind in layout.fields}  # by the objects' ids
        self._new: dict[type, list[object]] = {kind: [] for kind in layout.fields}  # their fields are to be written

    def write(self, root: object) -> Content:
        batches = []
        first = self._column([root])
        while any(self._new.values()):
            for kind, names in self._layout.fields.items():
                if objects := self._new[kind]:
                    self._new[kind] = []
                    columns = [self._column([*map(attrgetter(name), objects)]) for name in names]
                    batches.append((self._places[kind], len(objects), columns))
        return [*self._texts], batches, first

    def _column(self, values: Sequence[Any]) -> Column:
        found = {*map(type, values)}
        if found <= _NUMBERS:
            return _PLAIN, values
        kinds: list[type] = [*map(type, values)]
        if not found.isdisjoint(self._may_be_constant) and not self._constants.keys().isdisjoint(map(id, values)):
            kinds = [_Constant if id(value) in self._constants else type(value) for value in values]
        places = {kind: place for place, kind in enumerate(dict.fromkeys(kinds))}
        if len(places) == 1:
            return self._of(kinds[0], values)
        parts = ([value for value, its in zip(values, kinds, strict=True) if its is kind] for kind in places)
        return _MIXED, [*map(places.__getitem__, kinds)], [self._column(part) for part in parts]

    def _of(self, kind: Any, values: Sequence[Any]) -> Column:
        if kind is str:
            return _TEXTS, [*map(self._texts.__getitem__, values)]
        if kind is _Constant:
            return _CONSTANTS, [self._constants[id(value)] for value in values]
        if kind in self._places:
            return _OBJECTS, self._places[kind], self._numbered(kind, values)
        if kind in _MAPPINGS:
            keys, items = (self._column([*chain.from_iterable(each)]) for each in (values, map(kind.values, values)))
            return _PAIRS, _MAPPINGS.index(kind), [*map(len, values)], keys, items
        if kind not in _SEQUENCES:
            raise TypeError(f"a snapshot cannot hold a value of type {kind.__qualname__}")
        numbers = None
        if kind is set:
            values = [*map(sorted, values)]
        elif kind is tuple and len(distinct := {id(value): value for value in values}) < len(values):
            places = {key: place for place, key in enumerate(distinct)}  # what cannot change is there once
            numbers, values = [*map(places.__getitem__, map(id, values))], [*distinct.values()]
        items = self._column([*chain.from_iterable(values)])
        return _ITEMS, _SEQUENCES.index(kind), numbers, [*map(len, values)], items

    def _numbered(self, kind: type, values: Sequence[Any]) -> list[int]:
        numbers, ids = self._numbers[kind], [*map(id, values)]
        new = {key: value for key, value in zip(ids, values, strict=True) if key not in numbers}
        numbers.update(zip(new, count(len(numbers)), strict=False))
        self._new[kind] += new.values()
        return [*map(numbers.__getitem__, ids)]


class _Reader:
    def __init__(self, layout: Layout, content: Content, most: int) -> None:
        self._texts, batches, root = content
        self._layout = layout
        self._kinds = [*layout.fields]
        self._made: dict[type, list[Any]] = {}
        self._batches: dict[type, list[list[Column]]] = {kind: [] for kind in self._kinds}
        if sum(size for _, size, _ in batches) > most:
            raise ValueError("there are more objects than bytes")
        empty = [(self._kinds[place], size, columns) for place, size, columns in batches]
        for kind, size, columns in empty:
            self._batches[kind].append(columns)
            if not issubclass(kind, msgspec.Struct):
                self._made.setdefault(kind, []).extend([kind.__new__(kind) for _ in range(size)])
        done = Counter[type]()
        for kind, size, columns in empty:
            if not issubclass(kind, msgspec.Struct):
                self._fill(kind, self._made[kind][done[kind] : done[kind] + size], columns)
                done[kind] += size
        [self.root] = self._values(root)

    def _fill(self, kind: type, objects: Sequence[Any], columns: Sequence[Column]) -> None:
        for name, column in zip(self._layout.fields[kind], columns, strict=True):
            values = self._values(column)
            if len(values) != len(objects):
                raise ValueError(f"there are {len(values)} values of {name}, not {len(objects)}")
            slot = getattr(kind, name, None)
            if inspect.ismemberdescriptor(slot):
                deque(map(slot.__set__, objects, values), maxlen=0)
            else:
                for obj, value in zip(objects, values, strict=True):
                    vars(obj)[name] = value

    def _structs(self, kind: type) -> list[Any]:
        """Return the structs of a class. They are created when they are first referred to, which only structs of other
        classes do."""
        if kind not in self._made:
            make = _maker(kind)
            batches = ([self._values(column) for column in columns] for columns in self._batches[kind])
            self._made[kind] = [made for columns in batches for made in map(make, *columns)]
        return self._made[kind]

    def _values(self, column: Column) -> list[Any]:
        tag, *parts = column
        if tag == _PLAIN:
            [values] = parts
            return values  # type: ignore[no-any-return]
        if tag == _TEXTS:
            return _picked(self._texts, *parts)
        if tag == _CONSTANTS:
            return _picked(self._layout.constants, *parts)
        if tag == _OBJECTS:
            return _picked(self._structs(self._kinds[parts[0]]), parts[1])
        if tag == _PAIRS:
            place, lengths, keys, items = parts
            pairs = _cut(lengths, [*zip(self._values(keys), self._values(items), strict=True)])
            made = [_MAPPINGS[place]() for _ in lengths]
            for mapping, its in zip(made, pairs, strict=True):
                dict.update(mapping, its)
            return made
        if tag == _ITEMS:
            place, numbers, lengths, items = parts
            sequences = [*map(_SEQUENCES[place], _cut(lengths, self._values(items)))]
            return sequences if numbers is None else _picked(sequences, numbers)
        numbers, columns = parts
        each = [iter(self._values(one)) for one in columns]
        return [next(each[number]) for number in numbers]


def _maker(kind: Any) -> Callable[..., Any]:
    """Return what makes a struct of its fields in their order."""
    names, given = kind.__struct_fields__, inspect.signature(kind).parameters.values()
    if all(one.kind is one.POSITIONAL_OR_KEYWORD for one in given):
        return kind  # type: ignore[no-any-return]
    return lambda *values: kind(**dict(zip(names, values, strict=True)))


def _picked(table: Sequence[Any], numbers: Sequence[int]) -> list[Any]:
    if numbers and min(numbers) < 0:
        raise IndexError(f"there is no number {min(numbers)}")
    return [*map(table.__getitem__, numbers)]


def _cut(lengths: Sequence[int], values: Sequence[Any]) -> Iterator[Iterator[Any]]:
    """Yield consecutive parts of a column, each to be read before the next."""
    if sum(lengths) != len(values):
        raise ValueError(f"parts of {sum(lengths)} of {len(values)} items")
    left = iter(values)
    return (islice(left, length) for length in lengths)
