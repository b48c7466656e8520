"""What an object that answers for its state changes late: after the steps in which the first fork is verified."""

from __future__ import annotations

from collections.abc import Iterator

from hpstage.capture.kinds import CACHE, VALUES
from hpstage.capture.portrait import differences, texts_of
from hpstage.capture.settings import SETTINGS
from hpstage.capture.survey import UNKNOWN, Survey, plainly
from hpstage.capture.values import Marked
from hpstage.capture.world import World
from hpstage.checkpoints.state_tree import digest
from hpstage.errors import StateError

_EARLY = 2
"""Steps after which the first fork is verified: what has changed by then was seen there."""
_REMEMBERED = 1024


class LateChanges:
    """Compares what has begun to change late as it was when a state was taken, and as it is once that is loaded.

    In one process: states are known by their content, and by nothing that was kept with them.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._set_up = Survey()
        self._trained: int | None = None
        self._early: set[str] | None = None
        self._taken: dict[str, dict[str, str]] = {}

    def begin(self) -> None:
        """All is set up; no step is trained yet."""
        self._set_up = self._world.survey()
        with plainly():
            for record in self._set_up:
                if record.kind is VALUES:
                    record.content = Marked(record.obj, sampled=True)
        self._trained = 0

    def trained(self) -> None:
        """A step was trained."""
        if self._trained is not None:
            self._trained += 1
            if self._trained == _EARLY:
                self._early = (self._early or set()) | dict(self._changed()).keys()

    def taken(self, state: object) -> None:
        if self._early is not None and (self._trained is None or self._trained > _EARLY):
            late = {path: text for path, text in self._changed() if path not in self._early}
            if late:
                self._taken[digest(state)] = late
                if len(self._taken) > _REMEMBERED:
                    del self._taken[next(iter(self._taken))]

    def loaded(self, state: object) -> None:
        """Raises :class:`StateError`, naming the first thing that is not what it was."""
        self._trained = None
        late = self._taken.get(digest(state)) if self._taken else None
        if late is None:
            return
        asked = (record for record in self._set_up if record.kind is not VALUES or record.path in late)
        unchanged = dict(text for record in asked for text in texts_of(record, self._set_up))
        now = unchanged | dict(self._changed())
        found = {path: now[path] for path in late if path in now}
        for path, was, has_become in differences(late, found, answered=True):
            raise StateError(
                f"{path} was {was} when the state was taken and is {has_become} once it is loaded: training has "
                f"changed it, and state_dict() leaves it out, or load_state_dict() does not take it over. Give it in "
                f"the one and take it over in the other; if no training hangs on it, name it in `stateless`"
            )

    def _changed(self) -> Iterator[tuple[str, str]]:
        """Path and text of all that is not as it was set up."""
        now = self._world.survey(known=self._set_up)
        for record in now:
            before = self._set_up.records.get(id(record.obj))
            if record is before or record.kind is CACHE or record.obj is SETTINGS or UNKNOWN in record.path:
                continue
            texts = {} if before is None or record.kind is VALUES else dict(texts_of(before, self._set_up))
            yield from ((path, text) for path, text in texts_of(record, now) if texts.get(path) != text)
