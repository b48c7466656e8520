"""Process-wide settings, and registrations with abstract classes.

Settings, mostly of torch, decide the bits of what training computes. They are restored like any other object. A
registration that a step makes is refused, since no state can hold it. Those that come with an import are ignored.
"""

from __future__ import annotations

import sys
from collections.abc import Container, Iterable, Iterator
from typing import Any

from hpstage.errors import StateError
from hpstage.training.capture.instances import Instance
from hpstage.training.capture.kind import Kind, torch
from hpstage.training.code.owner import module_of
from hpstage.training.code.registrations import Pair, called, registered, undo
from hpstage.training.identity.settings import read_all, write_all


class Settings:
    """The settings of the process, and of the calling thread, as one object."""


SETTINGS = Settings()
PATH = "process"
"""The path of :data:`SETTINGS`."""


def hooks_of_all() -> Iterator[tuple[str, object]]:
    """Yield path and dict of the hooks that torch calls for every module and every optimizer of the process."""
    for path in ("torch.nn.modules.module", "torch.optim.optimizer"):
        for name, value in vars(sys.modules[path]).items():
            if name.startswith("_global_") and isinstance(value, dict):
                yield f"{path}.{name}", value


_COMPILED = 32
"""Number of versions of a function that torch may compile in a process, for shapes and modes. More are refused."""

_REFUSE = ("fail_on_recompile_limit_hit", "fail_on_cache_limit_hit")
"""The setting of torch 2.7, and that of 2.6, that refuses more versions. torch 2.5 has none, and gets no limit."""

_NO_LIMIT = 2**31


def compile_by_arguments_only() -> None:
    """Make what ``torch.compile`` generates depend on a function's arguments only, not on those of earlier calls.

    By default it depends on the history of the process: a function called with two shapes is compiled for all shapes,
    which changes the bits for the first one, too; a function compiled too often is not compiled any more.
    """
    config: Any = sys.modules.get("torch._dynamo.config")
    if config is None:
        return
    guard: Any = sys.modules.get("torch._dynamo.mutation_guard")
    if guard is not None and getattr(sys.modules["torch"].nn.Module, "___needs_generation_tag_patch", True):
        guard.install_generation_tagging_init()  # as the first compiling would, within a step: it patches nn.Module
    refuse = next((name for name in _REFUSE if hasattr(config, name)), None)
    if refuse is None and config.cache_size_limit < _NO_LIMIT:
        config.automatic_dynamic_shapes = False
        config.cache_size_limit = config.accumulated_cache_size_limit = _NO_LIMIT
    elif refuse is not None and not getattr(config, refuse):
        config.automatic_dynamic_shapes = False
        config.cache_size_limit = max(config.cache_size_limit, _COMPILED)  # since torch 2.7 also called recompile_limit
        setattr(config, refuse, True)


class OfProcess(Instance):
    """The kind of :data:`SETTINGS`, which are read and written as attributes are."""

    name = "settings"

    def read(self, obj: Any, skip: frozenset[str]) -> dict[str, Any]:
        return read_all()

    def write(self, obj: Any, content: dict[str, Any], skip: frozenset[str] = frozenset()) -> None:
        write_all(content)


def has_new_handle(records: Iterable[Any], before: Container[object]) -> bool:
    """Return whether a record is of a torch hook's handle that is not in ``before``. A handle has the hook's number."""
    library = torch()
    kind = None if library is None else library.utils.hooks.RemovableHandle
    return any(record.of is kind and record.obj not in before for record in records)


class Registrations:
    """The registrations of this process, as one object."""


REGISTRATIONS = Registrations()
REGISTERED = "registered classes"
"""The path of :data:`REGISTRATIONS`."""

Content = tuple[list[Pair], frozenset[str]]
"""The registrations, and the names of the modules that were imported then."""


class OfClasses(Kind):
    """The kind of :data:`REGISTRATIONS`."""

    name = "registrations"

    def read(self, obj: Any, skip: frozenset[str]) -> Content:
        return registered(), frozenset(sys.modules)

    def again(self, obj: Any, skip: frozenset[str], old: Content) -> Content:
        return old if registered() is old[0] else super().again(obj, skip, old)  # fast: every survey does this

    def same(self, old: Content, new: Content) -> bool:
        return not _made(old, new)

    def write(self, obj: Any, content: Content, skip: frozenset[str] = frozenset()) -> None:
        undo(_made(content, self.read(obj, skip)))


def _made(before: Content, now: Content) -> list[Pair]:
    """Return the pairs that have been registered since ``before``, except by importing a module. Classes defined in
    functions do not count: each training makes them again."""
    known = {(id(abstract), id(cls)) for abstract, cls in before[0]}
    new = [pair for pair in now[0] if (id(pair[0]), id(pair[1])) not in known]
    return [pair for pair in new if all(_was_there(cls, before[1]) for cls in pair)]


def _was_there(cls: type, modules: frozenset[str]) -> bool:
    return module_of(cls) in modules and "<locals>" not in cls.__qualname__


def refused_registration(before: Content, now: Content) -> StateError:
    """Return the error for what training has registered."""
    abstract, cls = _made(before, now)[0]
    return StateError(
        f"{called(cls)} has been registered with {called(abstract)} in training, on which isinstance() depends, and "
        f"which no state can hold: register it at the top of your module"
    )
