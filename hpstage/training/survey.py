"""A survey of all mutable objects that can be reached from some roots, each with the path on which it was first met."""

from __future__ import annotations

import types
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from hpstage.training.kinds import CELL, CLASS, SLOT, VALUES, Kind, Marked, is_atom, kind_of
from hpstage.training.reach import ClassAttributes, Slot, of_user, reached_from

# Modules keep their members in dicts under these names; paths read better without.
_UNNAMED = ("._parameters", "._buffers", "._modules")


@dataclass(slots=True)
class Record:
    """An object as it was met. It is kept alive, so that its id stays its own."""

    path: str
    obj: Any
    kind: Kind
    content: Any
    skip: frozenset[str] = frozenset()

    def changed(self) -> bool:
        return not self.kind.same(self.content, self.read())

    def read(self) -> Any:
        """The present content, in as much detail as the one that is held."""
        if self.kind is VALUES and self.content.sample is not None:
            return Marked(self.obj, sampled=True)
        return self.kind.read(self.obj, self.skip)

    def restore(self) -> None:
        """Put the content back. Raises ``TypeError`` where that cannot be done."""
        self.kind.write(self.obj, self.content, self.skip)


class Survey:
    """All that was met, by id, in the order of meeting."""

    def __init__(self) -> None:
        self.records: dict[int, Record] = {}
        self.paths: dict[str, Record] = {}
        self.named: dict[tuple[str | None, str], object] = {}
        """Functions and classes that were met as values, by module and name."""

    def __contains__(self, obj: object) -> bool:
        return id(obj) in self.records

    def path_of(self, obj: object) -> str | None:
        record = self.records.get(id(obj))
        return None if record is None else record.path

    def add(self, record: Record) -> None:
        while record.path in self.paths:
            record.path += "'"
        self.records[id(record.obj)] = record
        self.paths[record.path] = record

    def __iter__(self) -> Iterator[Record]:
        return iter(self.records.values())


class Surveyor:
    """Makes surveys.

    Args:
        stateless: what is passed by: attributes of the trainable (``cache`` is ``self.cache``), global and local
            variables, or whole paths.
    """

    def __init__(self, stateless: Collection[str] = ()) -> None:
        self._stateless = frozenset(stateless)
        self._skips: dict[str, frozenset[str]] = {}
        for name in stateless:
            owner, _, last = (name if "." in name else f"self.{name}").rpartition(".")
            self._skips[owner] = self._skips.get(owner, frozenset()) | {last}
        self._code: dict[int, tuple[object, list[tuple[str, object]]]] = {}  # what a class or function reaches

    def survey(
        self, roots: Iterable[tuple[str, object]], *, known: Survey | None = None, copied: bool = False
    ) -> Survey:
        """All that can be reached from ``roots``.

        Args:
            roots: paths and objects.
            known: what it has met keeps its path.
            copied: have what is needed to put values back.
        """
        found = Survey()
        stack: list[tuple[str, object]] = list(reversed(list(roots)))
        seen_code: set[int] = set()
        while stack:
            path, obj = stack.pop()
            if path in self._stateless or is_atom_not_code(obj):
                continue
            if id(obj) in found.records:
                continue
            if isinstance(obj, tuple | types.MethodType):
                stack += reversed(list(_inner(path, obj)))
                continue
            for pair in self._reached(obj, seen_code):
                if id(pair[1]) not in found.records and not self._passed_by(*pair):
                    stack.append(pair)
            kind: Kind | None
            if isinstance(obj, Slot):
                kind = SLOT
            else:
                kind = CLASS if isinstance(obj, ClassAttributes) else kind_of(obj)
            if kind is None or (kind is CELL and path.rpartition(".")[2] in self._stateless):
                continue
            skip = self._skips.get(path, frozenset())
            if kind is CLASS:
                skip |= self._stateless
            before = known.records.get(id(obj)) if known is not None else None
            if before is not None:
                path, skip, content = before.path, before.skip, before.read()
            elif kind is VALUES and copied:
                content = Marked(obj, sampled=True, copied=True)
            else:
                content = kind.read(obj, skip)
            found.add(Record(path, obj, kind, content, skip))
            members = path.endswith(_UNNAMED)
            base = path.rpartition(".")[0] if members else path
            inner = []
            for label, child in kind.children(content):
                if type(child) in _NAMED or isinstance(child, type):
                    found.named[child.__module__, child.__qualname__] = child  # type: ignore[attr-defined]
                if members and label.startswith("['"):
                    label = f".{label[2:-2]}"
                inner.append((base + label, child))
            inner.reverse()
            stack += inner
        return found

    def _passed_by(self, path: str, obj: object) -> bool:
        return path in self._stateless or (isinstance(obj, Slot) and obj.name in self._stateless)

    def _reached(self, obj: object, seen: set[int]) -> list[tuple[str, object]]:
        """What the code of ``obj``, or of its class, reaches."""
        kind = type(obj)
        code: object = obj if kind is types.FunctionType or isinstance(obj, type) else kind
        if id(code) in seen:
            return []
        seen.add(id(code))
        known = self._code.get(id(code))
        if known is None:
            module = getattr(code, "__module__", None)
            known = self._code[id(code)] = code, reached_from(code) if of_user(module) else []
        return known[1]


_NAMED = frozenset((types.FunctionType, types.BuiltinFunctionType))


def is_atom_not_code(obj: object) -> bool:
    """Atoms that lead nowhere; a class of the user's leads to its attributes."""
    if isinstance(obj, type):
        return not of_user(obj.__module__)
    return is_atom(obj)


def _inner(path: str, obj: Any) -> Iterator[tuple[str, object]]:
    if isinstance(obj, types.MethodType):
        yield f"{path}.__self__", obj.__self__
        yield f"{path}.__func__", obj.__func__
    else:
        for index, item in enumerate(obj):
            yield f"{path}[{index}]", item
