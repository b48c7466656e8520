"""Random generators that libraries keep. No state can hold one: a copy would draw its numbers independently."""

from __future__ import annotations

import functools
import random
import sys
import types
from collections.abc import Iterator
from typing import Any

from hpstage.errors import StateError
from hpstage.training.capture.kind import numpy, torch
from hpstage.training.capture.stateless import excluding
from hpstage.training.code.attributes import dict_of
from hpstage.training.code.owner import classes_below, of_user

OF_PROCESS = "of the process"
"""Stands for the state of a generator of the process: a state does not hold it."""


def of_process() -> dict[str, Any]:
    """Return the generators that are seeded before each step, by the names by which a state refers to them."""
    library = torch()
    found = {"Python": vars(random)["_inst"], "NumPy": vars(numpy().random.mtrand)["_rand"]}
    return found if library is None else {**found, "torch": library.default_generator}


class Generators:
    """The random generators that library modules hold, as of the first call of :meth:`named` that needs them."""

    def named(self, path: str, value: object) -> str | None:
        """Return the name of a generator of the process; ``None`` for one that training has made.

        Raises:
            StateError: a library module holds the generator. The message names it.
        """
        name = next((name for name, generator in of_process().items() if generator is value), None)
        if name is not None:
            return name
        if (held := self._held.get(id(value))) is not None:
            raise StateError(
                f"{path} holds the random generator {held} of a library. A state would hold a copy, which draws its "
                f"numbers independently: keep a generator that you make and seed; {excluding(path)}"
            )
        return None

    @functools.cached_property
    def _held(self) -> dict[int, str]:
        return dict(_of_libraries())


def _of_libraries() -> Iterator[tuple[int, str]]:
    """Yield the id and the name of each generator that a library holds. No module imports anything then."""
    kinds = {id(kind) for base in generators() for kind in (base, *classes_below(base))}
    wanted = {*kinds, id(tuple)}  # by ids: a metaclass may define equality
    for module_name, module in list(sys.modules.items()):
        if not issubclass(type(module), types.ModuleType):
            continue
        names = list((dict_of(module) or {}).items())
        for name, value in [(name, value) for name, value in names if id(type(value)) in wanted]:
            for held in value if type(value) is tuple else (value,):
                if id(type(held)) in kinds and not of_user(module_name):
                    yield id(held), f"{module_name}.{name}"
                    source = getattr(held, "_bit_generator", None)  # of a NumPy generator
                    if source is not None:
                        yield id(source), f"{module_name}.{name}._bit_generator"


def generators() -> tuple[Any, ...]:
    """Return the base classes of all random generators."""
    library, source = torch(), numpy().random
    of_torch = () if library is None else (library.Generator,)
    return random.Random, source.RandomState, source.Generator, source.BitGenerator, *of_torch
