"""Views that training makes of objects: parts of arrays of objects, and the dicts in which objects keep attributes.

In a state, a view would become a separate copy: what is written through it would no longer be seen in the original.
"""

from __future__ import annotations

import functools
import threading
from typing import Any

from hpstage.errors import StateError
from hpstage.training.capture.kind import numpy
from hpstage.training.capture.kinds import WITHOUT_ATTRIBUTES
from hpstage.training.capture.stateless import excluding
from hpstage.training.capture.survey import Record, Survey
from hpstage.training.code.attributes import attached_dict, dict_of


class Views:
    """Refuses views of objects that a survey has met."""

    def __init__(self, now: Survey) -> None:
        self._now = now

    def refuse(self, path: str, value: object) -> None:
        """Check that an object made by training is no view of another.

        Raises:
            StateError: it is one. The message names both.
        """
        if type(value) is dict:
            _, owners = self._owners.get(id(value), (None, []))
            if owners:
                raise StateError(
                    f"{path} is the `__dict__` of {owners[0].path}, kept by training, and in a state it would be a "
                    f"dict of its own: keep the object, or a copy of the dict; {excluding(path)}"
                )
        own = _attributes_of(value)
        if own is not None and (other := self._shared(value, own)) is not None:
            raise StateError(
                f"the `__dict__` of {path}, an object that training has made, is {other}, too, and in a state it would "
                f"be a dict of its own: give the object its own attributes, or make it in model() or __init__(); "
                f"{excluding(path)}"
            )
        if isinstance(value, numpy().ndarray) and value.dtype.hasobject:
            for record in self._of_objects:
                if record.obj is not value and numpy().may_share_memory(record.obj, value):
                    raise StateError(
                        f"{path} is an array of objects that training has made as a view, of the memory of "
                        f"{record.path}, and in a state it would have memory of its own: keep a copy, or take the view "
                        f"where it is used; {excluding(path)}"
                    )

    def other_dict(self, record: Record) -> str | None:
        """Return why no state can hold that another ``__dict__`` was attached to an object; ``None`` if none was, or if
        nothing else refers to either dict, so that only their entries count.
        """
        present = attached_dict(record.obj) if record.has_other_dict() else None
        if present is None or record.attached is None:
            return None
        if (other := self._shared(record.obj, present)) is not None:
            why = f"which is {other}, too"
        elif (other := self._shared(record.obj, record.attached)) is not None:
            why = f"while the one before is {other}, too"
        elif type(present) is not type(record.attached):
            why = f"a {type(present).__qualname__}"
        elif record.kind in WITHOUT_ATTRIBUTES:
            why = "whose entries it shows"
        else:
            return None
        return (
            f"training has attached another `__dict__` to {record.path}, {why}, and in a state it would be a dict of "
            f"its own: change the attributes of the object instead; {excluding(record.path)}"
        )

    @functools.cached_property
    def _of_objects(self) -> list[Record]:
        return [record for record in self._now if record.kind.name == "objects"]

    def _shared(self, value: object, own: dict[str, Any]) -> str | None:
        """Return what else refers to the ``__dict__`` of an object: another object, or a path to the dict."""
        _, owners = self._owners.get(id(own), (None, []))
        for owner in owners:
            if owner.obj is not value:
                return f"that of {owner.path}"
        met = self._now.path_of(own)
        return None if met == f"{self._now.path_of(value)}.__dict__" else met

    @functools.cached_property
    def _owners(self) -> dict[int, tuple[Any, list[Record]]]:
        """Return the dicts in which objects keep their attributes, by id, each with its objects. The result keeps them
        alive: a class may make another dict whenever it is read, and a dict of training's could then get its id."""
        found: dict[int, tuple[Any, list[Record]]] = {}
        for record in self._now:
            own = _attributes_of(record.obj)
            if own is not None:
                found.setdefault(id(own), (own, []))[1].append(record)
        return found


def _attributes_of(obj: Any) -> dict[str, Any] | None:
    """Return the dict in which an object of any kind keeps its attributes, of this thread if there are several."""
    return vars(obj) if issubclass(type(obj), threading.local) else dict_of(obj)
