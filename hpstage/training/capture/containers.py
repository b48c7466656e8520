"""Kinds of containers: their items, and the attributes of classes derived from them."""

from __future__ import annotations

import collections
import gc
import marshal
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import xxhash

from hpstage.training.capture.kind import (
    LEADS_NOWHERE,
    Child,
    Kept,
    Kind,
    attribute_children,
    is_atom,
    same_items,
    same_mapping,
    same_value,
)
from hpstage.training.capture.set_layout import Layout, empty, hash_is_fixed, layout_of
from hpstage.training.capture.values import opened
from hpstage.training.code.attributes import own_of, write_own

DICT_VIEWS: tuple[type, ...] = type({}.keys()), type({}.values()), type({}.items())
BULK = 1 << 16
"""Limit on the number of containers in a container. A larger one that holds only plain values is tracked by a checksum:
a change is detected and refused, since it cannot be located."""

Items = tuple[list[Any], dict[str, Any]]
Pairs = tuple[dict[Any, Any], dict[str, Any]]


class Sequence(Kind):
    """Lists and deques: the items, and the attributes of subclasses."""

    name = "items"

    def read(self, obj: Any, skip: frozenset[str]) -> Items:
        items = list.copy(obj) if isinstance(obj, list) else list(collections.deque.__iter__(obj))
        return items, own_of(obj)

    def same(self, old: Items, new: Items) -> bool:
        return same_items(old[0], new[0]) and same_mapping(old[1], new[1])

    def write(self, obj: Any, content: Items, skip: frozenset[str] = frozenset()) -> None:
        items, own = content
        if isinstance(obj, list):
            list.__setitem__(obj, slice(None), items)
        else:
            collections.deque.clear(obj)
            collections.deque.extend(obj, items)
        write_own(obj, own)

    def children(self, content: Items) -> Iterator[Child]:
        items, own = content
        for index, item in enumerate(items):
            if leads(item):
                yield f"[{index}]", item
        yield from attribute_children(own)


class Mapping(Kind):
    """Dicts: keys and values in their order."""

    name = "mapping"
    of: Any = dict
    """The class whose methods are called, regardless of overrides in subclasses."""

    def read(self, obj: Any, skip: frozenset[str]) -> Pairs:
        return dict(self.of.items(obj)), own_of(obj)

    def same(self, old: Pairs, new: Pairs) -> bool:
        return same_mapping(old[0], new[0]) and same_mapping(old[1], new[1])

    def write(self, obj: Any, content: Pairs, skip: frozenset[str] = frozenset()) -> None:
        items, own = content
        self.of.clear(obj)
        for key, value in items.items():
            self.of.__setitem__(obj, key, value)
        write_own(obj, own)

    def children(self, content: Pairs) -> Iterator[Child]:
        items, own = content
        for index, (key, value) in enumerate(items.items()):
            if type(key) is str:
                if leads(value):
                    yield f"[{key!r}]", value
                continue
            if leads(key):
                yield f".key({index})", key
            if leads(value):
                yield f"[{index}]", value
        yield from attribute_children(own)


class Ordered(Mapping):
    """``OrderedDict``, which keeps its order separately from the dict's."""

    of = collections.OrderedDict


_FACTORY = "default_factory"


class Defaulting(Mapping):
    """``defaultdict``; its ``default_factory`` counts among its attributes."""

    def read(self, obj: Any, skip: frozenset[str]) -> Pairs:
        items, own = super().read(obj, skip)
        return items, own if _FACTORY in skip else {**own, _FACTORY: obj.default_factory}

    def write(self, obj: Any, content: Pairs, skip: frozenset[str] = frozenset()) -> None:
        items, own = content
        super().write(obj, (items, {name: value for name, value in own.items() if name != _FACTORY}))
        if _FACTORY in own:
            obj.default_factory = own[_FACTORY]


class ReadOnly(Mapping):
    """``MappingProxyType``: a read-only view of a dict, which other code may write to."""

    def read(self, obj: Any, skip: frozenset[str]) -> Pairs:
        return dict(obj), {}

    def write(self, obj: Any, content: Pairs, skip: frozenset[str] = frozenset()) -> None:
        if self.same(content, self.read(obj, skip)):
            return
        [shown] = gc.get_referents(obj)
        if type(shown) is not dict or "__module__" in shown:  # a class's: Python caches look-ups in it
            raise TypeError("it is a view of a class's attributes, or of a mapping that is not a dict")
        super().write(shown, content)


class DictView(Kind):
    """``dict.keys()``, ``.values()``, ``.items()``: the dict that they show."""

    name = "view"

    def read(self, obj: Any, skip: frozenset[str]) -> Any:
        [shown] = gc.get_referents(obj)
        return shown

    def children(self, content: Any) -> Iterator[Child]:
        yield ".mapping", content


class _Weak(Mapping):
    """Dicts that do not keep their keys, or their values, alive. A survey keeps them alive."""

    def read(self, obj: Any, skip: frozenset[str]) -> Pairs:
        own = {name: value for name, value in own_of(obj).items() if name not in _WEAK_OWN}
        return dict(self.of.items(obj)), own

    def write(self, obj: Any, content: Pairs, skip: frozenset[str] = frozenset()) -> None:
        obj.clear()
        obj.update(content[0])


class WeakKeys(_Weak):
    """``WeakKeyDictionary``."""

    of = weakref.WeakKeyDictionary

    def children(self, content: Pairs) -> Iterator[Child]:
        yield from super().children((dict(enumerate(content[0].values())), content[1]))

    def weakly(self, content: Pairs) -> Iterator[Child]:
        return ((f".key({index})", key) for index, key in enumerate(content[0]))


class WeakValues(_Weak):
    """``WeakValueDictionary``."""

    of = weakref.WeakValueDictionary

    def children(self, content: Pairs) -> Iterator[Child]:
        yield from super().children((dict.fromkeys(content[0]), content[1]))

    def weakly(self, content: Pairs) -> Iterator[Child]:
        return ((f"[{key!r}]" if type(key) is str else f"[{i}]", v) for i, (key, v) in enumerate(content[0].items()))


_WEAK_OWN = frozenset(("data", "_remove", "_pending_removals", "_iterating", "_dirty_len"))
"""Attributes in which the two classes of weak dicts keep their items."""


class Members(frozenset[Any]):
    """The members of a set and their order. For numbers, the order depends on what was added and removed before; for
    others it differs between processes."""

    order: tuple[Any, ...]
    layout: Layout | None
    """The layout of a mutable set of numbers, which decides the order of members added later. For an empty set, it is
    only where ``pop()`` looks next: former members do not count, since the ``repr()`` of each dataclass adds an id to a
    set and removes it again."""

    @staticmethod
    def of(items: Iterable[Any]) -> Members:
        order = tuple(items)
        made = Members(order)
        made.order, made.layout = order, None
        return made

    @staticmethod
    def in_set(obj: Any) -> Members:
        made = Members.of(set.__iter__(obj))
        made.layout = layout_of(obj) if made.ordered else None
        if not made and made.layout is not None:
            made.layout = made.layout[0], b""
        return made

    @property
    def ordered(self) -> bool:
        return all(map(hash_is_fixed, self.order))

    @property
    def remade(self) -> bool:
        """Whether a new set, to which these members are added in order, has the same order and layout."""
        made = Members.in_set(set(self.order))
        return made.order == self.order and self.layout in (None, made.layout)


class Unordered(Kind):
    """Sets."""

    name = "set"

    def read(self, obj: Any, skip: frozenset[str]) -> Members:
        return Members.in_set(obj)

    def same(self, old: Members, new: Members) -> bool:
        if len(old) != len(new):
            return False
        if old.ordered:
            hidden = None in (old.layout, new.layout) or old.layout == new.layout
            return hidden and all(map(same_value, old.order, new.order))
        return {*map(id, old)} == {*map(id, new)} or (all(map(is_atom, old)) and all(map(is_atom, new)) and old == new)

    def write(self, obj: Any, content: Any, skip: frozenset[str] = frozenset()) -> None:
        members = content if isinstance(content, Members) else Members.of(content)
        for source in (members.order, set(members.order)):  # updated from a set, it gets a table of another size
            empty(obj, members.layout)
            set.update(obj, source)
            if self.same(self.read(obj, skip), members):
                return
        raise TypeError("the order of its members depends on former members")


class Frozen(Kept, Unordered):
    """``frozenset``: immutable itself, but its members may change."""

    def read(self, obj: Any, skip: frozenset[str]) -> Any:
        return Members.of(obj)


class WeakMembers(Unordered):
    """``WeakSet``."""

    def read(self, obj: Any, skip: frozenset[str]) -> Any:
        return Members.of(obj)

    def write(self, obj: Any, content: Any, skip: frozenset[str] = frozenset()) -> None:
        obj.clear()
        obj.update(content.order if isinstance(content, Members) else content)


class Bytes(Kind):
    name = "bytearray"

    def read(self, obj: Any, skip: frozenset[str]) -> Any:
        return bytes(obj)

    def write(self, obj: Any, content: Any, skip: frozenset[str] = frozenset()) -> None:
        obj[:] = content


class Objects(Kind):
    """Arrays of objects."""

    name = "objects"

    def read(self, obj: Any, skip: frozenset[str]) -> Any:
        return list(obj.flat), obj.shape, obj.flags.writeable

    def same(self, old: Any, new: Any) -> bool:
        return same_items(old[0], new[0]) and bool(old[1:] == new[1:])

    def write(self, obj: Any, content: Any, skip: frozenset[str] = frozenset()) -> None:
        items, shape, writeable = content
        if shape != obj.shape:
            raise TypeError("its shape has changed")
        with opened(obj):
            for index, item in enumerate(items):
                obj.flat[index] = item
        if obj.flags.writeable != writeable:
            with opened(obj.base):
                obj.flags.writeable = writeable

    def children(self, content: Any) -> Iterator[Child]:
        for index, item in enumerate(content[0]):
            if type(item) not in LEADS_NOWHERE:
                yield f"[{index}]", item


class Bulk(Kind):
    """A container that holds too many plain containers to track each of them."""

    name = "bulk"

    def __init__(self, kind: Kind) -> None:
        self._kind = kind

    def read(self, obj: Any, skip: frozenset[str]) -> Any:
        return self._kind.read(obj, skip), checksum(obj)

    def same(self, old: Any, new: Any) -> bool:
        return self._kind.same(old[0], new[0]) and old[1] == new[1]

    def write(self, obj: Any, content: Any, skip: frozenset[str] = frozenset()) -> None:
        raise TypeError(f"it holds more than {BULK:,} containers, too many to know what has changed in which")


def checksum(obj: Any) -> str | None:
    """Return a checksum of a container of only plain values; ``None`` for any other."""
    try:
        # Version 0: the bytes depend on values alone, not on interning or on reference counts.
        return xxhash.xxh3_128_hexdigest(marshal.dumps(obj, 0))
    except ValueError:
        return None


def leads(item: Any) -> bool:
    """Return whether a container's item is, or leads to, an object that may change or is identified by its name."""
    kind = type(item)
    if kind in LEADS_NOWHERE:
        return False
    if kind is tuple:
        return any(map(leads, item))
    return True


def is_bulk(obj: Any) -> bool:
    """Return whether a list or dict is to be tracked by a checksum."""
    if type(obj) is list:
        items: Any = obj
    elif type(obj) is dict:
        items = obj.values()
    else:
        return False
    return len(items) > BULK and sum(map(leads, items)) > BULK and checksum(obj) is not None
