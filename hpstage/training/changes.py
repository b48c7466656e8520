"""Detects objects that a trainable with its own ``state_dict`` first changes after the steps that a fork has
verified."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from hpstage.training.capture.kind import same_value
from hpstage.training.capture.kinds import CACHE, VALUES
from hpstage.training.capture.portrait import texts_of
from hpstage.training.capture.settings import SETTINGS
from hpstage.training.capture.survey import UNKNOWN, Survey
from hpstage.training.capture.world import World

_EARLY = 2
"""Number of steps after which the first fork of a workload is verified."""
MADE = " (made)"
"""Suffix of the path of an object that did not exist before."""
_INDEX = re.compile(r"\[[^]]*\]")


class Changes:
    """Paths that training has changed since it was set up, except those covered by a verified fork.

    The creation of an object and later changes within it are recorded separately.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._known = Survey()  # the survey to which later ones are compared
        self._trained = 0
        self._before: frozenset[str] = frozenset()  # paths changed up to that survey
        self._verified: frozenset[str] | None = None

    def begin(self) -> None:
        """Start recording changes: everything is set up and no step has been trained yet."""
        self._count_from_here()
        self._trained, self._before = 0, frozenset()

    def loaded(self) -> None:
        """Record that a state was loaded: the first fork does not cover what the next steps change."""
        self.begin()
        self._verified = self._verified or frozenset()

    def trained(self) -> None:
        """Record that a step was trained."""
        self._trained += 1
        if self._trained == _EARLY:
            self._note()
            if self._verified is None:
                self._verified = self._before

    def unverified(self) -> frozenset[str]:
        """Return the paths that have changed, but had not when a fork was verified."""
        if self._verified is None:
            return frozenset()
        self._note()
        return self._before - self._verified

    def verified(self, paths: frozenset[str]) -> None:
        """Record that a fork was verified after ``paths`` had changed."""
        self._verified = paths | (self._verified or frozenset())

    def _note(self) -> None:
        known, now = self._known, self._count_from_here()
        self._before |= set(_changed(known, now))

    def _count_from_here(self) -> Survey:
        self._known = self._world.sampled(self._known)
        return self._known


def _changed(known: Survey, now: Survey) -> Iterator[str]:
    for record in now:
        before = known.records.get(id(record.obj))
        if record is before or record.kind is CACHE or record.obj is SETTINGS or UNKNOWN in record.path:
            continue
        if before is None:
            yield f"{_INDEX.sub('[]', record.path)}{MADE}"  # a list may grow without bound
        elif record.kind is VALUES:
            yield record.path
        else:
            texts = dict(texts_of(before, known))
            paths = [path for path, text in texts_of(record, now) if texts.get(path) != text]
            if record.path in paths:
                yield from _items(record.path, before.content, record.content)
            yield from paths


def _items(path: str, before: Any, now: Any) -> Iterator[str]:
    """Yield the items that differ between two lists or dicts of the same size."""
    (old, *_), (new, *_) = (content if type(content) is tuple and content else (content,) for content in (before, now))
    if type(old) is dict is type(new) and old.keys() == new.keys():
        yield from (f"{path}[{key!r}]" for key, value in new.items() if not same_value(old[key], value))
    elif isinstance(old, list | tuple) and isinstance(new, list | tuple) and len(old) == len(new):
        yield from (f"{path}[{i}]" for i, pair in enumerate(zip(old, new, strict=True)) if not same_value(*pair))
