"""A survey of all mutable objects reachable from some roots, each with the path on which it was first met."""

from __future__ import annotations

import sys
import types
from collections.abc import Collection, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from hpstage.checkpoints.lazy_copies import address_of
from hpstage.errors import StateError
from hpstage.training.capture.kind import LEADS_NOWHERE, Kind, is_atom, torch
from hpstage.training.capture.kinds import (
    CACHE,
    FOREIGN,
    SETS,
    SKIPPED,
    TUPLE,
    VALUES,
    WEAK,
    WITHOUT_ATTRIBUTES,
    kind_of,
    kind_of_type,
)
from hpstage.training.capture.stateful import CACHED, Cache
from hpstage.training.capture.stateless import LOCAL, excluding, unmarked
from hpstage.training.capture.values import Marked, owner_of
from hpstage.training.code.attributes import COMPILED, dict_of, own_of
from hpstage.training.code.graph import OF_CODE, Graph
from hpstage.training.code.known import has_no_state
from hpstage.training.code.names import names_in, texts_in
from hpstage.training.code.namespaces import ClassAttributes, Slot
from hpstage.training.code.owner import is_users_code, name_of, of_user

# Modules keep their members in dicts under these names; paths read better without.
_UNNAMED = ("._parameters", "._buffers", "._modules")
Step = tuple[str, object]
"""A path and the object at that path."""


class Record:
    """An object as it was met. The record keeps it alive, so that its id stays unique."""

    __slots__ = ("content", "inner", "kind", "obj", "of", "path", "skip")

    def __init__(self, path: str, obj: Any, kind: Kind, content: Any, skip: frozenset[str] = frozenset()) -> None:
        self.path, self.obj, self.kind, self.content, self.skip = path, obj, kind, content, skip
        self.of = type(obj)
        self.inner: list[Step] = []
        """The objects it leads to, in reverse order."""

    def changed(self) -> bool:
        with plainly():
            return self.read() is not self.content

    def read(self) -> Any:
        """Return the present content in the same detail as the recorded one, or that itself if nothing changed."""
        return self.kind.again(self.obj, self.skip, self.content)

    def restore(self) -> None:
        """Restore the recorded content. Raises ``TypeError`` if that is impossible."""
        with plainly():
            self.kind.write(self.obj, self.content, self.skip)


def plainly() -> AbstractContextManager[Any]:
    """Return a context in which tensors are inspected without the overrides of their classes."""
    library = torch()
    return nullcontext() if library is None else library._C.DisableTorchFunctionSubclass()


class Survey:
    """All objects that were met, by id, in the order of meeting."""

    def __init__(self) -> None:
        self.records: dict[int, Record] = {}
        self.paths: dict[str, Record] = {}
        self.named: dict[tuple[str | None, str], object] = {}
        """Functions and classes that were met as values, by module and name."""
        self._addresses: dict[Any, str] | None = None
        self.within_libraries: set[int] = set()
        """Ids of what objects of libraries hold that modules keep, such as the handles of a session."""
        self.cached: dict[int, Record] = {}
        """By id, objects reachable only through what functions keep by ``functools.lru_cache``."""
        self.weak: set[int] = set()
        """Ids of objects that were met by weak references alone: what keeps them alive is not known."""
        self.beyond: Collection[str] = ()
        """Names by which code reaches memory that a tensor or array shares but does not show."""

    def joined(self, more: Survey) -> Survey:
        """Return a survey of what either has met; of what both have, this one's records."""
        if not more.records:
            return self
        found = Survey()
        found.records, found.paths = more.records | self.records, more.paths | self.paths
        found.named, found.cached = more.named | self.named, more.cached | self.cached
        found.within_libraries, found.weak = self.within_libraries | more.within_libraries, self.weak | more.weak
        found.beyond = self.beyond or more.beyond
        return found

    def __contains__(self, obj: object) -> bool:
        return id(obj) in self.records

    def path_of(self, obj: object) -> str | None:
        record = self.records.get(id(obj))
        return None if record is None else record.path

    def at_address(self, number: int) -> str | None:
        """Return the path of the object whose ``id()``, hash or memory address is a number, if it is one of those."""
        record = self.records.get(number) or self.records.get(number << 4)
        if record is not None:
            return record.path
        if self._addresses is None:
            values = (record for record in self if record.kind is VALUES and record.content.storage is not None)
            self._addresses = {address_of(record.obj): record.path for record in values}
        return self._addresses.get(number)

    def __iter__(self) -> Iterator[Record]:
        return iter(self.records.values())


_BEYOND = frozenset(
    (
        *("_base", "base", "untyped_storage", "storage", "_typed_storage", "as_strided", "as_strided_", "resize_"),
        *("resize_as_", "set_", "data_ptr", "from_address", "__array_interface__", "ctypes"),
    )
)
"""Names by which code reaches memory around a view."""
UNKNOWN = "?}"
"""Path suffix for one of several objects of a class in a set, which other processes cannot distinguish."""


class Surveyor:
    """Makes surveys.

    Args:
        stateless: what is ignored: attributes of ``self`` (``cache`` is ``self.cache``), global and local variables, or
            whole paths.
    """

    def __init__(self, stateless: Collection[str] = ()) -> None:
        self._stateless = frozenset((*stateless, *(LOCAL + name for name in stateless)))
        self._skips: dict[str, frozenset[str]] = {}
        for name in stateless:
            owner, _, last = (name if "." in name else f"self.{name}").rpartition(".")
            for path in (owner, LOCAL + owner) if "." in name else (owner,):
                self._skips[path] = self._skips.get(path, frozenset()) | {last}
        self._code: dict[int, tuple[object, list[Step]]] = {}  # what a class or function reaches
        self._read: set[str] = set()  # names that the user's code mentions

    def survey(
        self,
        roots: Iterable[Step],
        *,
        known: Survey | None = None,
        beyond: Survey | None = None,
        copied: bool = False,
    ) -> Survey:
        """Survey everything reachable from ``roots``.

        Args:
            roots: paths and objects.
            known: an earlier survey. Its objects keep their paths, and their records if nothing has changed.
            beyond: a survey whose objects, and what they lead to, are ignored.
            copied: whether to keep what is needed to restore values.
        """
        with plainly():
            return self._survey(roots, known, beyond or Survey(), copied)

    def _survey(self, roots: Iterable[Step], known: Survey | None, beyond: Survey, copied: bool) -> Survey:
        found = Survey()
        if known is not None:
            found.named = known.named.copy()
            found.within_libraries = known.within_libraries
        records, paths = found.records, found.paths
        before = {} if known is None else known.records
        stack = [step for path, obj in roots for step in self._led(found, path, [("", obj)])]
        stack.reverse()
        sets: list[Record] = []
        caches: list[Record] = []
        skipped: list[Step] = []
        weak: list[Record] = []
        seen: set[int] = set()
        late = weakly = False
        into = records
        while stack or skipped or sets or weak or caches or (self._read & _BEYOND and not found.beyond):
            if not stack and skipped:
                stack, skipped, late = skipped, [], True  # now it is known what code reads
            if not stack and not found.beyond and self._read & _BEYOND:
                found.beyond = self._read & _BEYOND
                stack = self._owners(found)
                continue
            if not stack and not sets and weak:
                stack = [step for record in reversed(weak) for step in reversed(self._weakly(found, record))]
                weak, weakly = [], True
                continue
            if not stack and not sets:
                weakly = False
                into, before = found.cached, {} if known is None else known.cached
                kept = [pair for record in caches for pair in _kept_by(record)]
                stack = self._led(found, "", kept)
                caches = []
                continue
            if not stack:
                # Last of all, since members may be met elsewhere, in an order that is the same everywhere.
                stack = [step for record in sets for step in _members(records, record)]
                stack.reverse()
                sets = []
                continue
            path, obj = stack.pop()
            key = id(obj)
            if key in records or key in into or key in beyond.records or key in beyond.cached:
                continue
            kind = type(obj)
            if id(kind) not in seen:
                seen.add(id(kind))
                self._name(found, kind)
                stack += self._reached(kind)
            if kind is types.FunctionType:
                stack += self._reached(obj)
            record = before.get(key)
            if (kind_of_type(kind) if record is None else record.kind) is SKIPPED:
                if not late:
                    skipped.append((path, obj))
                    continue
                if record is not None and record.skip != self._not_read(obj):
                    record = None
            if record is not None:
                if kind is not record.of:
                    raise StateError(
                        f"{record.path} was a {record.of.__qualname__} and has become a {kind.__qualname__} in "
                        f"training, which no state can hold: make it what it is to be in model() or __init__()"
                    )
                content = record.kind.again(obj, record.skip, record.content)
                if content is not record.content:
                    record = Record(record.path, obj, record.kind, content, record.skip)
                    self._lead(found, record)
            elif issubclass(kind, type | types.ModuleType):
                if key not in seen:
                    seen.add(key)
                    stack += self._reached(obj)
                continue
            else:
                record = self._met(found, path, obj, copied)
                while record.path in paths:
                    record.path += "'"
                self._lead(found, record)
            into[key] = record
            if weakly:
                found.weak.add(key)
            if into is records:
                paths[record.path] = record
            if record.kind in WEAK:
                weak.append(record)
            elif record.kind in SETS:
                sets.append(record)
            elif record.kind is CACHE:
                caches.append(record)
            stack += record.inner
        return found

    def _met(self, found: Survey, path: str, obj: Any, copied: bool) -> Record:
        kind = kind_of(obj)
        assert kind is not None, f"{path} is a {type(obj).__qualname__}, which leads nowhere"
        skip = self._skips.get(unmarked(path), frozenset())
        if COMPILED in (dict_of(obj) or ()):
            skip |= {COMPILED}
        if type(obj) is ClassAttributes:
            skip |= self._stateless
        if kind is SKIPPED:
            skip = self._not_read(obj)
        if kind is VALUES:
            return Record(path, obj, kind, Marked(obj, sampled=copied, copied=copied), skip)
        content = kind.read(obj, skip)
        passed_by = CACHED in path or id(obj) in found.within_libraries or has_no_state(type(obj))
        if kind is FOREIGN and content[1] is None and not passed_by:
            raise StateError(
                f"{path} is a {type(obj).__module__}.{type(obj).__qualname__}, which nothing can look into: whether "
                f"training changes it is not known. Make it where it is used, or keep plain values (numbers, tensors); "
                f"{excluding(path)}"
            )
        return Record(path, obj, kind, content, skip)

    def _lead(self, found: Survey, record: Record) -> None:
        """Note what a record leads to."""
        path, members = record.path, record.path.endswith(_UNNAMED)
        base = path.rpartition(".")[0] if members else path
        pairs = list(record.kind.children(record.content))
        if members:
            pairs = [(f".{label[2:-2]}" if label.startswith("['") else label, child) for label, child in pairs]
        if record.kind in WITHOUT_ATTRIBUTES:
            own = dict_of(record.obj)
            # Of the streams of the process, `write` is another one while what is printed is recorded.
            if own is not None and record.obj is not sys.stdout and record.obj is not sys.stderr:
                pairs.append((".__dict__", own))
        if record.kind is TUPLE:
            pairs += [(f"[{index}]", item) for index, item in enumerate(tuple.__iter__(record.obj))]
        if OF_CODE.match(path) and (id(record.obj) in found.within_libraries or _is_of_a_library(record)):
            found.within_libraries.update(id(child) for _, child in pairs)
        record.inner = self._led(found, base, pairs)
        record.inner.reverse()

    def _weakly(self, found: Survey, record: Record) -> list[Step]:
        if record.kind in SETS:
            return _members(found.records, record)
        return self._led(found, record.path, record.kind.weakly(record.content))

    def _led(self, found: Survey, path: str, pairs: Iterable[tuple[str, object]]) -> list[Step]:
        """Return the mutable objects these lead to. Tuples and methods never change, but what they hold may."""
        led: list[Step] = []
        todo: list[tuple[str, Any]] = [(path + label, obj) for label, obj in pairs]
        todo.reverse()
        while todo:
            inner, obj = todo.pop()
            kind = type(obj)
            if kind in LEADS_NOWHERE or inner in self._stateless:
                continue
            if kind is types.MethodType:
                todo += [(f"{inner}.__func__", obj.__func__), (f"{inner}.__self__", obj.__self__)]
            elif kind is types.MethodWrapperType:
                todo.append((f"{inner}.__self__", obj.__self__))
            elif kind is types.ModuleType:
                if of_user(obj.__name__):
                    led.append((inner, obj))
            elif kind is types.BuiltinFunctionType:
                self._name(found, obj)
                if not issubclass(type(obj.__self__), types.ModuleType | type(None)):
                    todo.append((f"{inner}.__self__", obj.__self__))
            elif issubclass(kind, type):
                self._name(found, obj)
                if is_users_code(obj):
                    led.append((inner, obj))
            elif kind is frozenset:
                if not all(map(is_atom, obj)):
                    led.append((inner, obj))
            elif kind_of(obj) is None:
                if issubclass(kind, tuple) and not is_atom(obj):
                    items = [(f"{inner}[{index}]", item) for index, item in enumerate(tuple.__iter__(obj))]
                    todo += reversed(items)
            elif kind is types.CellType and inner.rpartition(".")[2] in self._stateless:
                continue
            else:
                if kind is types.FunctionType:
                    self._name(found, obj)
                led.append((inner, obj))
        return led

    def _name(self, found: Survey, code: Any) -> None:
        found.named[code.__module__, name_of(code)] = code

    def _reached(self, code: object) -> list[Step]:
        """Return what the code of a function or class reaches, in reverse order."""
        known = self._code.get(id(code))
        if known is None:
            user = of_user(code.__name__) if isinstance(code, types.ModuleType) else is_users_code(code)
            graph = Graph(code) if user else None
            reached = [pair for pair in graph.reached() if not self._passed_by(*pair)] if graph is not None else []
            known = self._code[id(code)] = code, reached
            for function in graph.functions if graph is not None else ():
                self._read.update(names_in(function.__code__), texts_in(function.__code__))
        return known[1]

    def _owners(self, found: Survey) -> list[Step]:
        """Return what holds memory that no tensor or array shows as a whole."""
        values = [record for record in found if record.kind is VALUES]
        shown = {id(record.content.storage) for record in values if owner_of(record.obj, record.content) is None}
        pairs = ((record.path, owner_of(record.obj, record.content)) for record in values)
        return [(path + owner[0], owner[1]) for path, owner in pairs if owner and id(owner[1]) not in shown]

    def _not_read(self, obj: object) -> frozenset[str]:
        """Return the attributes of an object that no code of the user's mentions."""
        return frozenset(own_of(obj).keys() - self._read)

    def _passed_by(self, path: str, obj: object) -> bool:
        if path in self._stateless or path.replace(":", ".") in self._stateless:
            return True
        return isinstance(obj, Slot) and obj.name in self._stateless


def _is_of_a_library(record: Record) -> bool:
    """Return whether a record is of an instance of a library's class other than torch's modules."""
    library = torch()
    modules = () if library is None else library.nn.Module
    return record.kind.name == "attributes" and not is_users_code(record.of) and not issubclass(record.of, modules)


def _kept_by(cache: Record) -> Iterator[Step]:
    assert isinstance(cache.kind, Cache)
    return ((cache.path + label, value) for label, value in cache.kind.cached(cache.content))


def _members(records: dict[int, Record], record: Record) -> list[Step]:
    """List what is met only in a set, under paths that are equal in every process where such objects exist."""
    met = [item for item in _parts(record.content.order) if id(item) not in records]
    names = [type(item).__qualname__ for item in met]
    return [
        (f"{record.path}{{{name}{UNKNOWN if names.count(name) > 1 else '}'}", item)
        for name, item in zip(names, met, strict=True)
    ]


def _parts(items: Iterable[object]) -> Iterator[object]:
    """Yield the mutable items, including those inside tuples."""
    for item in items:
        if type(item) is tuple:
            yield from _parts(item)
        elif not is_atom(item) and kind_of(item) is not None:
            yield item
