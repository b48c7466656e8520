"""Surveys: all mutable objects reachable from some roots, each with the path on which it was first met."""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from hpstage.checkpoints.lazy_copies import address_of
from hpstage.training.capture.kind import Kind, torch
from hpstage.training.capture.kinds import INSTANCE, RUNNER, SKIPPED, VALUES
from hpstage.training.code.attributes import attach_dict, attached_dict
from hpstage.training.code.owner import package_of

Step = tuple[str, object]
"""A path and the object at that path."""
UNKNOWN = "?}"
"""Path suffix for one of several objects of a class in a set, which other processes cannot distinguish."""


class Record:
    """An object as a survey met it. The record keeps it alive, so that its id stays unique."""

    __slots__ = ("attached", "content", "inner", "kind", "obj", "of", "path", "skip")

    def __init__(self, path: str, obj: Any, kind: Kind, content: Any, skip: frozenset[str] = frozenset()) -> None:
        self.path, self.obj, self.kind, self.content, self.skip = path, obj, kind, content, skip
        self.of = type(obj)
        self.attached = None if kind.name == "opaque" or kind in _MACHINES else attached_dict(obj)
        """The object's ``__dict__``, unless a library manages it. A step may attach another one."""
        self.inner: list[Step] = []
        """The objects it leads to, in reverse order."""

    def changed(self) -> bool:
        with plainly():
            return self.read() is not self.content or self.has_other_dict()

    def has_other_dict(self) -> bool:
        """Return whether another ``__dict__`` has been attached to the object, even one with the same entries."""
        return self.attached is not None and attached_dict(self.obj) is not self.attached

    def attach(self) -> None:
        """Attach the recorded ``__dict__`` to the object again."""
        attach_dict(self.obj, self.attached)

    def read(self) -> Any:
        """Return the recorded content itself if nothing changed, else the present content in the same detail."""
        return self.kind.again(self.obj, self.skip, self.content)

    def restore(self) -> None:
        """Restore the recorded content. Raises ``TypeError`` if that is impossible."""
        with plainly():
            self.attach()
            self.kind.write(self.obj, self.content, self.skip)


def plainly() -> AbstractContextManager[Any]:
    """Return a context in which tensors are inspected without the overrides of their classes."""
    library = torch()
    return nullcontext() if library is None else library._C.DisableTorchFunctionSubclass()


_MACHINES = (SKIPPED, RUNNER)


class Survey:
    """All objects that a survey has found, by id, in the order in which it found them."""

    def __init__(self) -> None:
        self.records: dict[int, Record] = {}
        self.paths: dict[str, Record] = {}
        self.named: dict[tuple[str | None, str], object] = {}
        """Functions and classes that were met as values, by module and name."""
        self.within_libraries: set[int] = set()
        """Ids of objects that library objects in modules hold, such as the handles of a session."""
        self.referred: set[int] = set()
        """Ids of objects that weak references refer to."""
        self.cached: dict[int, Record] = {}
        """By id, objects reachable only through the caches of ``functools.lru_cache``."""
        self.weak: set[int] = set()
        """Ids of objects that were met by weak references alone: what keeps them alive is not known."""
        self.beyond: Collection[str] = ()
        """Names by which code reaches memory that a tensor or array shares but does not show."""
        self.mentioned: frozenset[str] = frozenset()
        """Names and texts in the user's code."""

    def joined(self, more: Survey) -> Survey:
        """Return a survey of everything in either survey. Objects in both have this survey's records."""
        if not more.records:
            return self
        found = Survey()
        found.records, found.paths = more.records | self.records, more.paths | self.paths
        found.named, found.cached = more.named | self.named, more.cached | self.cached
        found.within_libraries, found.weak = self.within_libraries | more.within_libraries, self.weak | more.weak
        found.referred = self.referred | more.referred
        found.beyond, found.mentioned = self.beyond or more.beyond, self.mentioned | more.mentioned
        return found

    def __contains__(self, obj: object) -> bool:
        return id(obj) in self.records

    def path_of(self, obj: object) -> str | None:
        record = self.records.get(id(obj))
        return None if record is None else record.path

    def at_address(self, number: int) -> str | None:
        """Return the path of the object whose ``id()``, hash or memory address is a number, if it is one of those."""
        record = self.records.get(number) or self.records.get(number << 4)
        return self._addresses.get(number) if record is None else record.path

    @functools.cached_property
    def _addresses(self) -> dict[Any, str]:
        values = (record for record in self if record.kind is VALUES and record.content.storage is not None)
        return {address_of(record.obj): record.path for record in values}

    @functools.cached_property
    def packages(self) -> frozenset[str]:
        """The packages whose classes have instances here that a state holds by their attributes."""
        return frozenset(package_of(kind) for kind in {it.of for it in self if it.kind is INSTANCE})

    def __iter__(self) -> Iterator[Record]:
        return iter(self.records.values())
