"""Registrations with abstract classes: those that a step makes are refused, since no state can hold them; others that
come with modules which are imported are none of training's."""

from __future__ import annotations

import sys
from typing import Any

from hpstage.errors import StateError
from hpstage.training.capture.kind import Kind
from hpstage.training.code.owner import module_of
from hpstage.training.code.registrations import Pair, called, registered, undo


class Registrations:
    """The registrations of this process, as one object."""


REGISTRATIONS = Registrations()
PATH = "registered classes"
"""The path of :data:`REGISTRATIONS`."""

Content = tuple[list[Pair], frozenset[str]]
"""The registrations, and the names of the modules that were imported then."""


class OfClasses(Kind):
    """The kind of :data:`REGISTRATIONS`."""

    name = "registrations"

    def read(self, obj: Any, skip: frozenset[str]) -> Content:
        return registered(), frozenset(sys.modules)

    def again(self, obj: Any, skip: frozenset[str], old: Content) -> Content:
        return old if registered() is old[0] else super().again(obj, skip, old)  # at each survey

    def same(self, old: Content, new: Content) -> bool:
        return not _made(old, new)

    def write(self, obj: Any, content: Content, skip: frozenset[str] = frozenset()) -> None:
        undo(_made(content, self.read(obj, skip)))


def _made(before: Content, now: Content) -> list[Pair]:
    """Return what has been registered, other than by importing a module. Classes made in functions are made again by
    each training."""
    known = {(id(abstract), id(cls)) for abstract, cls in before[0]}
    new = [pair for pair in now[0] if (id(pair[0]), id(pair[1])) not in known]
    return [pair for pair in new if all(_was_there(cls, before[1]) for cls in pair)]


def _was_there(cls: type, modules: frozenset[str]) -> bool:
    return module_of(cls) in modules and "<locals>" not in cls.__qualname__


def refusal(before: Content, now: Content) -> StateError:
    """Return the error for what training has registered."""
    abstract, cls = _made(before, now)[0]
    return StateError(
        f"{called(cls)} has been registered with {called(abstract)} in training, which no state can hold, though "
        f"isinstance() goes by it: register it where your module begins"
    )
