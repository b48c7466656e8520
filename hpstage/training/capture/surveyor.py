"""Finds all mutable objects reachable from some roots."""

from __future__ import annotations

import sys
import types
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import partial
from typing import Any

from hpstage.errors import StateError
from hpstage.training.capture import kinds
from hpstage.training.capture.instances import AllBut, set_by_libraries
from hpstage.training.capture.kind import LEADS_NOWHERE, is_atom, torch
from hpstage.training.capture.stateful import CACHED
from hpstage.training.capture.stateless import LOCAL, excluding, unmarked
from hpstage.training.capture.survey import UNKNOWN, Record, Step, Survey, plainly
from hpstage.training.capture.values import Marked, nbytes, owner_of
from hpstage.training.code.attributes import COMPILED, dict_of, own_of
from hpstage.training.code.graph import OF_CODE, Graph
from hpstage.training.code.known import has_no_state
from hpstage.training.code.names import names_in, texts_in
from hpstage.training.code.namespaces import ClassAttributes, Slot
from hpstage.training.code.owner import is_users_code, name_of, of_user

# torch's modules keep their members in dicts under these names. Paths read better without them.
_UNNAMED = ("._parameters", "._buffers", "._modules")
_BEYOND = frozenset(
    (
        *("_base", "base", "untyped_storage", "storage", "_typed_storage", "as_strided", "as_strided_", "resize_"),
        *("resize_as_", "set_", "data_ptr", "from_address", "__array_interface__", "ctypes"),
    )
)
"""Names by which code reaches memory around a view."""
_COMPARED = "._flat_weight_refs"
"""Weak references by which torch's recurrent layers only ask whether a weight is still the one that it was."""
Mark = Callable[[Any], Marked]


class Surveyor:
    """Makes surveys.

    Args:
        stateless: names to ignore: attributes of ``self`` (write ``cache`` for ``self.cache``), global and local
            variables, or whole paths such as ``self.model.cache``.
    """

    def __init__(self, stateless: Collection[str] = ()) -> None:
        self._stateless = frozenset((*stateless, *(LOCAL + name for name in stateless)))
        self._skips: dict[str, frozenset[str]] = {}
        for name in stateless:
            owner, _, last = (name if "." in name else f"self.{name}").rpartition(".")
            for path in (owner, LOCAL + owner) if "." in name else (owner,):
                self._skips[path] = self._skips.get(path, frozenset()) | {last}
        self._code: dict[int, tuple[object, list[Step]]] = {}  # what a class or function reaches
        self.read: set[str] = set()  # names that the user's code mentions

    def survey(
        self,
        roots: Iterable[Step],
        *,
        known: Survey | None = None,
        beyond: Survey | None = None,
        sampled: bool = False,
        copied: bool = False,
    ) -> Survey:
        """Survey everything reachable from ``roots``.

        Args:
            roots: paths and objects.
            known: an earlier survey. Its objects keep their paths, and their records if nothing has changed.
            beyond: a survey whose objects, and what they lead to, are ignored.
            sampled: whether to record a sample of tensors and arrays, which shows whether values have changed
                (:class:`Marked`).
            copied: whether to record copies, too, from which values can be restored.
        """
        marked = partial(Marked, sampled=sampled or copied, copied=copied)
        with plainly():
            return _Walk(self, roots, known or Survey(), beyond or Survey(), marked).survey()

    def met(self, found: Survey, path: str, obj: Any, marked: Mark) -> Record:
        """Return a record of an object that no earlier survey has met.

        Raises:
            StateError: the object cannot be inspected.
        """
        kind = kinds.kind_of(obj)
        assert kind is not None, f"{path} is a {type(obj).__qualname__}, which leads nowhere"
        skip = self._skips.get(unmarked(path), frozenset())
        if COMPILED in (dict_of(obj) or ()):
            skip |= {COMPILED}
        if type(obj) is ClassAttributes:
            skip |= self._stateless
        if kind is kinds.RUNNER:
            skip |= set_by_libraries(type(obj))
        if kind is kinds.SKIPPED:
            skip = AllBut(self.read)
        if kind is kinds.VALUES:
            return Record(path, obj, kind, marked(obj), skip)
        content = kind.read(obj, skip)
        passed_by = CACHED in path or id(obj) in found.within_libraries or has_no_state(type(obj))
        if kind is kinds.FOREIGN and content[1] is None and not passed_by:
            raise StateError(
                f"{path} is a {type(obj).__module__}.{type(obj).__qualname__}, which nothing can look into, so it is "
                f"not known whether training changes it. Make it where it is used, or keep plain values (numbers, "
                f"tensors); {excluding(path)}"
            )
        return Record(path, obj, kind, content, skip)

    def lead(self, found: Survey, record: Record) -> None:
        """Record the objects that a record leads to."""
        path, members = record.path, record.path.endswith(_UNNAMED)
        base = path.rpartition(".")[0] if members else path
        pairs = list(record.kind.children(record.content))
        if members:
            pairs = [(f".{label[2:-2]}" if label.startswith("['") else label, child) for label, child in pairs]
        if record.kind in kinds.WITHOUT_ATTRIBUTES:
            own = dict_of(record.obj)
            # Not for streams of the process: they get another `write` while their output is recorded.
            if own is not None and record.obj is not sys.stdout and record.obj is not sys.stderr:
                pairs.append((".__dict__", own))
        if record.kind is kinds.TUPLE:
            pairs += [(f"[{index}]", item) for index, item in enumerate(tuple.__iter__(record.obj))]
        if OF_CODE.match(path) and (id(record.obj) in found.within_libraries or _is_of_a_library(record)):
            found.within_libraries.update(id(child) for _, child in pairs)
        record.inner = self.led(found, base, pairs)
        record.inner.reverse()

    def led(self, found: Survey, path: str, pairs: Iterable[tuple[str, object]]) -> list[Step]:
        """Return the mutable objects that ``pairs`` lead to, also within tuples and methods, which never change."""
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
            elif kind is weakref.ref:
                if not path.endswith(_COMPARED):
                    found.referred.add(id(obj()))
            elif kind is types.ModuleType:
                found.named[obj.__name__, ""] = obj
                if of_user(obj.__name__):
                    led.append((inner, obj))
            elif kind is types.BuiltinFunctionType:
                self.name(found, obj)
                if not issubclass(type(obj.__self__), types.ModuleType | type(None)):
                    todo.append((f"{inner}.__self__", obj.__self__))
            elif issubclass(kind, type):
                self.name(found, obj)
                if is_users_code(obj):
                    led.append((inner, obj))
            elif kind is frozenset:
                if not all(map(is_atom, obj)):
                    led.append((inner, obj))
            elif kinds.kind_of(obj) is None:
                if issubclass(kind, tuple) and not is_atom(obj):
                    items = [(f"{inner}[{index}]", item) for index, item in enumerate(tuple.__iter__(obj))]
                    todo += reversed(items)
            elif kind is types.CellType and inner.rpartition(".")[2] in self._stateless:
                continue
            else:
                if kind is types.FunctionType:
                    self.name(found, obj)
                led.append((inner, obj))
        return led

    def name(self, found: Survey, code: Any) -> None:
        """Record a function or class that was found, by its module and name."""
        found.named[code.__module__, name_of(code)] = code

    def reached(self, code: object) -> list[Step]:
        """Return what the code of a function or class reaches, in reverse order."""
        known = self._code.get(id(code))
        if known is None:
            user = of_user(code.__name__) if isinstance(code, types.ModuleType) else is_users_code(code)
            graph = Graph(code) if user else None
            reached = [pair for pair in graph.reached() if not self._passed_by(*pair)] if graph is not None else []
            known = self._code[id(code)] = code, reached
            for function in graph.functions if graph is not None else ():
                self.read.update(names_in(function.__code__), texts_in(function.__code__))
        return known[1]

    def _passed_by(self, path: str, obj: object) -> bool:
        if path in self._stateless or path.replace(":", ".") in self._stateless:
            return True
        return isinstance(obj, Slot) and obj.name in self._stateless


class _Walk:
    """Makes a survey. Some objects that are found have to wait until all others are surveyed."""

    def __init__(self, surveyor: Surveyor, roots: Iterable[Step], known: Survey, beyond: Survey, marked: Mark) -> None:
        self._surveyor = surveyor
        self._known = known
        self._beyond = beyond
        self._marked = marked
        self._found = found = Survey()
        found.named, found.within_libraries = known.named.copy(), known.within_libraries
        found.referred = known.referred.copy()
        self._into, self._before = found.records, known.records
        self._stack = [step for path, obj in roots for step in surveyor.led(found, path, [("", obj)])]
        self._stack.reverse()
        self._skipped: list[Step] = []
        self._sets: list[Record] = []
        self._weak: list[Record] = []
        self._caches: list[Record] = []
        self._late = self._weakly = False
        self._seen: set[int] = set()

    def survey(self) -> Survey:
        self._visit_all()
        while self._wait_no_longer():
            self._visit_all()
        known, read = self._known.mentioned, self._surveyor.read
        self._found.mentioned = known if len(known) == len(read) else frozenset(read)
        return self._found

    def _wait_no_longer(self) -> bool:
        """Continue with some of the objects that have waited. Return whether there were any."""
        found, surveyor = self._found, self._surveyor
        if self._skipped:
            self._stack, self._skipped, self._late = self._skipped, [], True  # now it is known what code reads
        elif not found.beyond and (read := surveyor.read & _BEYOND):
            found.beyond = read
            self._stack = _owners(found)
        elif self._sets:
            # Only now: members may be met elsewhere first, in an order that is the same in every process.
            self._stack = [step for record in self._sets for step in _members(found.records, record)]
            self._stack.reverse()
            self._sets = []
        elif self._weak:
            self._stack = [step for record in reversed(self._weak) for step in reversed(self._led_weakly(record))]
            self._weak, self._weakly = [], True
        elif self._caches:
            self._weakly = False
            self._into, self._before = found.cached, self._known.cached
            kept = [
                (one.path + label, value) for one in self._caches for label, value in kinds.CACHE.cached(one.content)
            ]
            self._stack = surveyor.led(found, "", kept)
            self._caches = []
        else:
            return False
        return True

    def _led_weakly(self, record: Record) -> list[Step]:
        if record.kind in kinds.SETS:
            return _members(self._found.records, record)
        return self._surveyor.led(self._found, record.path, record.kind.weakly(record.content))

    def _visit_all(self) -> None:
        surveyor, found, stack, into, seen = self._surveyor, self._found, self._stack, self._into, self._seen
        records, beyond, beyond_cached = found.records, self._beyond.records, self._beyond.cached
        while stack:
            path, obj = stack.pop()
            key = id(obj)
            if key in records or key in into or key in beyond or key in beyond_cached:
                continue
            kind = type(obj)
            if id(kind) not in seen:
                seen.add(id(kind))
                surveyor.name(found, kind)
                stack += surveyor.reached(kind)
            if kind is types.FunctionType:
                stack += surveyor.reached(obj)
            known = self._before.get(key)
            if (kinds.kind_of_type(kind) if known is None else known.kind) is kinds.SKIPPED:
                if not self._late:
                    self._skipped.append((path, obj))
                    continue
                if known is not None and any(name in known.skip and name in surveyor.read for name in own_of(obj)):
                    known = None
            if known is None and issubclass(kind, type | types.ModuleType):
                if key not in seen:
                    seen.add(key)
                    stack += surveyor.reached(obj)
                continue
            record = self._new(path, obj) if known is None else self._again(known, obj)
            into[key] = record
            self._note(record)
            stack += record.inner

    def _new(self, path: str, obj: object) -> Record:
        record = self._surveyor.met(self._found, path, obj, self._marked)
        while record.path in self._found.paths:
            record.path += "'"
        self._surveyor.lead(self._found, record)
        return record

    def _again(self, known: Record, obj: object) -> Record:
        """Return the record of an object that an earlier survey has met: the earlier record if nothing changed."""
        if type(obj) is not known.of:
            raise StateError(
                f"{known.path} was a {known.of.__qualname__} and has become a {type(obj).__qualname__} in "
                f"training, which no state can hold: create it with its final class in model() or __init__()"
            )
        content = known.kind.again(obj, known.skip, known.content)
        if content is known.content and not known.has_other_dict():
            return known
        record = Record(known.path, obj, known.kind, content, known.skip)
        self._surveyor.lead(self._found, record)
        return record

    def _note(self, record: Record) -> None:
        if self._weakly:
            self._found.weak.add(id(record.obj))
        if self._into is self._found.records:
            self._found.paths[record.path] = record
        if record.kind in kinds.WEAK:
            self._weak.append(record)
        elif record.kind in kinds.SETS:
            self._sets.append(record)
        elif record.kind is kinds.CACHE:
            self._caches.append(record)


def _owners(found: Survey) -> list[Step]:
    """Return the owners of memory that tensors and arrays use, but that they do not show as a whole."""
    values = [record for record in found if record.kind is kinds.VALUES]
    shown = {id(record.content.storage) for record in values if owner_of(record.obj, record.content) is None}
    shown |= _shown_in_parts(values)
    pairs = ((record.path, owner_of(record.obj, record.content)) for record in values)
    return [(path + owner[0], owner[1]) for path, owner in pairs if owner and id(owner[1]) not in shown]


def _shown_in_parts(values: list[Record]) -> set[int]:
    """Return the ids of memory of which several tensors together show every byte."""
    shown: dict[int, int] = {}  # up to which byte
    for record in sorted(values, key=lambda record: record.content.start):
        memory, start = record.content.storage, record.content.start
        if memory is not None and start <= shown.get(id(memory), 0) and record.obj.is_contiguous():
            shown[id(memory)] = max(shown.get(id(memory), 0), start + nbytes(record.obj))
    storages = (record.content.storage for record in values if record.content.storage is not None)
    return {id(memory) for memory in storages if shown.get(id(memory)) == memory.nbytes()}


def _is_of_a_library(record: Record) -> bool:
    """Return whether a record is of an instance of a library's class other than torch's modules."""
    library = torch()
    modules = () if library is None else library.nn.Module
    return record.kind.name == "attributes" and not is_users_code(record.of) and not issubclass(record.of, modules)


def _members(records: dict[int, Record], record: Record) -> list[Step]:
    """Return the objects found only in a set, with paths that are equal in every process where such objects exist."""
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
        elif not is_atom(item) and kinds.kind_of(item) is not None:
            yield item
