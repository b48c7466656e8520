"""Objects that refer to each other, in columns: for each class a list per field, which MessagePack decodes in C. Pure.

Most objects have a value of the same type in a field. Numbers are written as they are; strings, and objects of the
layout's classes, as their numbers in tables; containers as their lengths and one column of all their items. Nothing
else can be written. So reading creates only objects of these classes, and calls none of their methods except the
constructors of structs. Each column is decoded only when it is needed: all decoded columns together would take as much
memory as the objects.
"""

from __future__ import annotations

import inspect
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, compress, count, islice, repeat
from operator import attrgetter, is_
from types import NoneType
from typing import Annotated, Any

import msgspec

from hpstage.plan.ordered import Ordered

_Number = Annotated[int, msgspec.Meta(ge=0)]


class _Plain(msgspec.Struct, array_like=True, tag=0):
    values: list[int | float | bool | None]


class _Texts(msgspec.Struct, array_like=True, tag=1):
    numbers: list[_Number]


class _Constants(msgspec.Struct, array_like=True, tag=2):
    numbers: list[_Number]


class _Objects(msgspec.Struct, array_like=True, tag=3):
    """Objects of one class. ``kind``: the number of the class; ``numbers``: the number of each object."""

    kind: _Number
    numbers: list[_Number]


class _Items(msgspec.Struct, array_like=True, tag=4):
    """Sequences. Tuples that are the same object are written once; ``numbers`` is then the index of each value."""

    kind: _Number
    numbers: list[_Number] | None
    lengths: list[_Number]
    items: msgspec.Raw


class _Pairs(msgspec.Struct, array_like=True, tag=5):
    kind: _Number
    lengths: list[_Number]
    keys: msgspec.Raw
    items: msgspec.Raw


class _Mixed(msgspec.Struct, array_like=True, tag=6):
    """Values of several types. ``kinds``: for each value, the index of the column that holds it."""

    kinds: list[_Number]
    columns: list[msgspec.Raw]


class _Same(msgspec.Struct, array_like=True, tag=7):
    """The same value ``length`` times. ``value``: a column of this value only."""

    length: _Number
    value: msgspec.Raw


_Column = _Plain | _Texts | _Constants | _Objects | _Items | _Pairs | _Mixed | _Same
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_Column).decode

Content = tuple[list[str], list[tuple[int, int, list[msgspec.Raw]]], msgspec.Raw]
"""The strings; batches of objects (number of the class, number of objects, a column for each field); the root."""

_PER_BYTE = 16
"""Upper bound on the length of a :class:`_Same` column, relative to the number of bytes of the snapshot."""
_NUMBERS = frozenset({NoneType, bool, int, float})
_SEQUENCES: tuple[type, ...] = (list, tuple, set, Ordered)
_MAPPINGS: tuple[Any, ...] = (dict, Counter)


def slots_of(kind: type) -> list[str]:
    """Return the names of the slots of a class and of its bases."""
    return [name for base in reversed(kind.__mro__) for name in vars(base).get("__slots__", ())]


class _Constant:
    """Stands for the type of constants."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Defines which objects can be written.

    Attributes:
        fields: the classes, each with the names of its fields that are written; for a struct, all its fields.
        constants: objects of which only a reference is written; reading returns these very objects.
    """

    fields: Mapping[type, Sequence[str]]
    constants: Sequence[object]

    def write(self, root: object) -> Content:
        """Return the content of an object and of all objects that it refers to.

        Raises:
            TypeError: one of these objects is of a class that cannot be written.
        """
        return _Writer(self).write(root)

    def read(self, content: Content, most: int) -> Any:
        """Return the object that was written.

        Args:
            most: upper bound on the number of objects.

        Raises:
            HpstageError, ValueError, LookupError, TypeError, AttributeError, StopIteration, RuntimeError: the content
                contradicts itself.
        """
        return _Reader(self, content, most).root


class _NumberedTexts(dict[str, int]):
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
        self._texts = _NumberedTexts()
        self._numbers: dict[type, dict[int, int]] = {kind: {} for kind in layout.fields}  # by the objects' ids
        self._new: dict[type, list[object]] = {kind: [] for kind in layout.fields}  # objects yet to be written

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

    def _column(self, values: list[Any]) -> msgspec.Raw:
        return msgspec.Raw(_encode(self._of_all(values)))

    def _of_all(self, values: list[Any]) -> _Column:
        if len(values) > 1 and all(map(is_, values, repeat(values[0]))):
            return _Same(len(values), self._column(values[:1]))
        kinds: list[type] = [*map(type, values)]
        found = {*kinds}
        if found <= _NUMBERS:
            return _Plain(values)
        if not found.isdisjoint(self._may_be_constant) and not self._constants.keys().isdisjoint(map(id, values)):
            kinds = [_Constant if id(value) in self._constants else type(value) for value in values]
        places = {kind: place for place, kind in enumerate(dict.fromkeys(kinds))}
        if len(places) == 1:
            return self._of(kinds[0], values)
        parts = ([*compress(values, map(is_, kinds, repeat(kind)))] for kind in places)
        return _Mixed([*map(places.__getitem__, kinds)], [self._column(part) for part in parts])

    def _of(self, kind: Any, values: list[Any]) -> _Column:
        if kind is str:
            texts = [*map(self._texts.__getitem__, values)]
            if len(texts) > 1 and texts.count(texts[0]) == len(texts):
                return _Same(len(values), self._column(values[:1]))
            return _Texts(texts)
        if kind is _Constant:
            return _Constants([self._constants[id(value)] for value in values])
        if kind in self._places:
            return _Objects(self._places[kind], self._numbered(kind, values))
        if kind in _MAPPINGS:
            keys, items = (self._column([*chain.from_iterable(each)]) for each in (values, map(kind.values, values)))
            return _Pairs(_MAPPINGS.index(kind), [*map(len, values)], keys, items)
        if kind not in _SEQUENCES:
            raise TypeError(f"a snapshot cannot hold a value of type {kind.__qualname__}")
        numbers: list[int] | None = None
        if kind is set:
            values = [*map(sorted, values)]
        elif kind is tuple and len(distinct := {id(value): value for value in values}) < len(values):
            places = {key: place for place, key in enumerate(distinct)}  # a tuple cannot change: once is enough
            numbers, values = [*map(places.__getitem__, map(id, values))], [*distinct.values()]
        items = self._column([*chain.from_iterable(values)])
        return _Items(_SEQUENCES.index(kind), numbers, [*map(len, values)], items)

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
        self._batches: dict[type, list[list[msgspec.Raw]]] = {kind: [] for kind in self._kinds}
        self._most = _PER_BYTE * most
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

    def _fill(self, kind: type, objects: Sequence[Any], columns: Sequence[msgspec.Raw]) -> None:
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
        """Return the structs of a class, creating them at the first reference. No struct refers to a struct of its own
        class, so all fields of a class can be read before its structs are created."""
        if kind not in self._made:
            make = _maker(kind)
            batches = ([self._values(column) for column in columns] for columns in self._batches[kind])
            self._made[kind] = [made for columns in batches for made in map(make, *columns)]
        return self._made[kind]

    def _values(self, column: msgspec.Raw) -> list[Any]:
        match _decode(column):
            case _Plain(values):
                return values
            case _Texts(numbers):
                return _picked(self._texts, numbers)
            case _Constants(numbers):
                return _picked(self._layout.constants, numbers)
            case _Objects(kind, numbers):
                return _picked(self._structs(self._kinds[kind]), numbers)
            case _Items(kind, numbers, lengths, items):
                values = self._values(items)
                sequences = [*map(_SEQUENCES[kind], _cut(lengths, values, len(values)))]
                return sequences if numbers is None else _picked(sequences, numbers)
            case _Pairs(kind, lengths, keys, items):
                if not any(lengths):
                    return [_MAPPINGS[kind]() for _ in lengths]
                names = self._values(keys)
                pairs = zip(names, self._values(items), strict=True)
                made = map(dict, _cut(lengths, pairs, len(names)))
                return [*(made if _MAPPINGS[kind] is dict else map(_MAPPINGS[kind], made))]
            case _Mixed(kinds, columns):
                each = [iter(self._values(one)) for one in columns]
                mixed = [*map(next, map(each.__getitem__, kinds))]
                if len(mixed) < len(kinds):
                    raise ValueError(f"there are {len(mixed)} values, not {len(kinds)}")
                return mixed
            case _Same(length, value):
                if length > self._most:
                    raise ValueError(f"a value is repeated {length} times, more than {self._most}")
                [only] = self._values(value)
                return [only] * length


def _maker(kind: Any) -> Callable[..., Any]:
    """Return a function that creates a struct from its field values, in order."""
    names, given = kind.__struct_fields__, inspect.signature(kind).parameters.values()
    if all(one.kind is one.POSITIONAL_OR_KEYWORD for one in given):
        return kind  # type: ignore[no-any-return]
    return lambda *values: kind(**dict(zip(names, values, strict=True)))


def _picked(table: Sequence[Any], numbers: Sequence[int]) -> list[Any]:
    return [*map(table.__getitem__, numbers)]


def _cut(lengths: Sequence[int], values: Iterable[Any], total: int) -> Iterator[Iterable[Any]]:
    """Cut ``total`` values into consecutive parts of these lengths. Each part must be read before the next."""
    if sum(lengths) != total:
        raise ValueError(f"the lengths add up to {sum(lengths)}, not {total}")
    return map(islice, repeat(iter(values)), lengths)
