"""What an object that answers for its own state begins to change after the steps that the first fork has seen."""

from __future__ import annotations

import re
from collections.abc import Iterator

from hpstage.capture.kinds import CACHE, VALUES
from hpstage.capture.portrait import texts_of
from hpstage.capture.settings import SETTINGS
from hpstage.capture.survey import UNKNOWN, Survey, plainly
from hpstage.capture.values import Marked
from hpstage.capture.world import World

_EARLY = 2
"""Steps after which the first fork of a workload is verified."""
MADE = " (made)"
"""Behind the path of an object that was not there before."""
_INDEX = re.compile(r"\[[^]]*\]")


def without_index(path: str) -> str:
    """Items of a list are one path."""
    return _INDEX.sub("[]", path)


class Changes:
    """Paths of what training has changed since it was set up, less those that a verified fork has taken account of.

    What is made is told apart from what changes within it later.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._known = Survey()  # what changes are counted from
        self._trained = 0
        self._before: frozenset[str] = frozenset()  # changed up to there
        self._verified: frozenset[str] | None = None

    def begin(self) -> None:
        """All is set up; no step is trained yet."""
        self._count_from_here()
        self._trained, self._before = 0, frozenset()

    def loaded(self) -> None:
        """A state was loaded. What changes in the steps that follow counts as seen where this process has seen none:
        the process that has trained up to the state has told of what began before it."""
        self.begin()

    def trained(self) -> None:
        """A step was trained."""
        self._trained += 1
        if self._trained == _EARLY:
            self._note()
            if self._verified is None:
                self._verified = self._before

    def unverified(self) -> frozenset[str]:
        """What has changed, and had not when a fork was verified."""
        if self._verified is None:
            return frozenset()
        self._note()
        return self._before - self._verified

    def verified(self, paths: frozenset[str]) -> None:
        """A fork was verified when these had changed."""
        self._verified = paths | (self._verified or frozenset())

    def _note(self) -> None:
        known, now = self._known, self._count_from_here()
        self._before |= {without_index(path) for path in _changed(known, now)}

    def _count_from_here(self) -> Survey:
        known, self._known = self._known, self._world.survey(self._known)
        with plainly():
            for record in self._known:
                if record.kind is VALUES and record is not known.records.get(id(record.obj)):
                    record.content = Marked(record.obj, sampled=True)
        return self._known


def _changed(known: Survey, now: Survey) -> Iterator[str]:
    for record in now:
        before = known.records.get(id(record.obj))
        if record is before or record.kind is CACHE or record.obj is SETTINGS or UNKNOWN in record.path:
            continue
        if before is None:
            yield f"{record.path}{MADE}"
        elif record.kind is VALUES:
            yield record.path
        else:
            texts = dict(texts_of(before, known))
            yield from (path for path, text in texts_of(record, now) if texts.get(path) != text)
