"""Training without capture: nothing is surveyed, and a state is what the ``state_dict()`` of model and optimizer give.

An audit trains a whole trial alone in this way, to compare it with the same trial in a search, which used capture. The
tests of audits train whole searches in this way, by setting ``HPSTAGE_UNWATCHED``.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from hpstage.checkpoints.state_tree import clone
from hpstage.training.capture.kind import torch
from hpstage.training.capture.survey import Survey
from hpstage.training.capture.surveyor import Surveyor
from hpstage.training.capture.variables import Variable
from hpstage.training.capture.world import Roots, World

VARIABLE = "HPSTAGE_UNWATCHED"
_off = False


@contextmanager
def unwatched() -> Iterator[None]:
    """Switch capture off for trainables that are adapted inside the block."""
    global _off
    before, _off = _off, True
    try:
        yield
    finally:
        _off = before


def world_of(stateless: Collection[str], roots: Callable[[], Roots]) -> World:
    """Return the world of one trainable in this process."""
    return (Unwatched if _off or VARIABLE in os.environ else World)(stateless, roots)


class _Blind(Surveyor):
    """Finds nothing, so that nothing is restored, refused or compared."""

    def survey(self, *_: Any, **__: Any) -> Survey:
        return Survey()


class Unwatched(World):
    """A world of which only the roots' own ``state_dict()`` is known."""

    surveyor = _Blind

    def capture(
        self, variables: Sequence[Variable] = (), *, but: Callable[[str], bool] = lambda path: False
    ) -> dict[str, Any]:
        values: dict[str, Any] = {}
        changed: dict[str, Any] = {}
        for path, root in self._stateful():
            state = root.state_dict()
            if _is_module(root):
                values |= {f"{path}.{name}": value for name, value in state.items()}
            else:
                changed[path] = state
        return {"values": values, "changed": changed, "memory": {}}

    def load(
        self,
        state: Mapping[str, Any],
        local: Mapping[str, Any] | None = None,
        write: Callable[[dict[str, object], Mapping[str, str]], None] | None = None,
    ) -> None:
        for path, root in self._stateful():
            if _is_module(root):
                prefix = f"{path}."
                own = {name.removeprefix(prefix): value for name, value in state["values"].items()
                       if name.startswith(prefix)}  # fmt: skip
                root.load_state_dict(own)
            else:
                root.load_state_dict(clone(state["changed"][path]))

    def _stateful(self) -> Iterator[tuple[str, Any]]:
        for path, root in self._roots():
            if path != "self" and callable(getattr(root, "state_dict", None)):
                yield path, root


def _is_module(root: object) -> bool:
    library = torch()
    return library is not None and isinstance(root, library.nn.Module)
