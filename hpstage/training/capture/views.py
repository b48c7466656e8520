"""Views that training makes of objects: parts of arrays of objects, and the dicts in which instances keep attributes.

In a state, a view would be a copy of its own: what is written through it would no longer be seen in the other.
"""

from __future__ import annotations

from hpstage.errors import StateError
from hpstage.training.capture.kind import numpy
from hpstage.training.capture.stateless import excluding
from hpstage.training.capture.survey import Record, Survey
from hpstage.training.code.attributes import dict_of


class Views:
    """Refuses views of what a survey has met."""

    def __init__(self, now: Survey) -> None:
        self._now = now
        self._arrays: list[Record] | None = None
        self._attributes: dict[int, str] | None = None

    def refuse(self, path: str, value: object) -> None:
        """Check that an object made by training is no view of another.

        Raises:
            StateError: it is one. The message names both.
        """
        if type(value) is dict:
            owner = self._owners().get(id(value))
            if owner is not None:
                raise StateError(
                    f"{path} is the `__dict__` of {owner}, kept by training, and in a state it would be a dict of its "
                    f"own: keep the object, or a copy of the dict; {excluding(path)}"
                )
        elif isinstance(value, numpy().ndarray) and value.dtype.hasobject:
            for record in self._of_objects():
                if record.obj is not value and numpy().may_share_memory(record.obj, value):
                    raise StateError(
                        f"{path} is an array of objects that training has made as a view, of the memory of "
                        f"{record.path}, and in a state it would have memory of its own: keep a copy, or take the view "
                        f"where it is used; {excluding(path)}"
                    )

    def _of_objects(self) -> list[Record]:
        if self._arrays is None:
            self._arrays = [record for record in self._now if record.kind.name == "objects"]
        return self._arrays

    def _owners(self) -> dict[int, str]:
        """Return the paths of instances by the ids of their dicts."""
        if self._attributes is None:
            instances = [record for record in self._now if record.kind.name == "attributes"]
            self._attributes = {id(dict_of(record.obj)): record.path for record in instances}
        return self._attributes
