"""Changes of a data set that loading processes do not see: they have it as it was when they were started."""

from __future__ import annotations

from collections.abc import Collection

from hpstage.errors import StateError
from hpstage.training.capture.kinds import CACHE, VALUES
from hpstage.training.capture.portrait import texts_of
from hpstage.training.capture.survey import Record, Survey
from hpstage.training.capture.surveyor import Surveyor


class Sent:
    """Values of a data set and of its collate function when worker processes were started.

    Args:
        parts: the objects, by name.
        owner: the trainable, which is not looked into: training changes it.
        stateless: paths to ignore.
    """

    def __init__(self, parts: dict[str, object], owner: object, stateless: Collection[str]) -> None:
        beyond = Survey()
        if owner is not None:
            beyond.records[id(owner)] = None  # type: ignore[assignment]  # only whether it is there counts
        self._then = Surveyor(stateless).survey(parts.items(), beyond=beyond, sampled=True)

    def changed(self) -> Record | None:
        return next((record for record in self._then if record.kind is not CACHE and record.changed()), None)

    def check(self) -> None:
        """Raise :class:`StateError` if anything has changed since."""
        record = self.changed()
        if record is None:
            return
        path = record.path
        if record.kind is not VALUES:
            now = Record(path, record.obj, record.kind, record.read(), record.skip)
            before, after = (dict(texts_of(one, self._then)) for one in (record, now))
            path = next((name for name in (*before, *after) if before.get(name) != after.get(name)), path)
        raise StateError(
            f"training has changed {path}, which the processes that load data ahead do not see: let the data set be a "
            f"function of the index and of the global generators (random, NumPy, torch); or load with num_workers = 0, "
            f"where what training changes is part of the state; if samples do not depend on it, name it in `stateless`"
        )
