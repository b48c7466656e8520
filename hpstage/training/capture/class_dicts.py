"""Dicts that a library's class keeps as the ``__dict__`` of all of its instances, as accelerate's states do: a trial
that makes an instance would begin with the attributes that another trial has left."""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Any

from hpstage.training.capture.kind import same_mapping
from hpstage.training.code.bytecode import instructions_of
from hpstage.training.code.owner import is_users_code


class ClassDicts:
    """These dicts with what was in them at one time. Those of the user's classes are surveyed like all else."""

    def __init__(self) -> None:
        self._before = [(kind, name, shared, dict(shared)) for kind, name, shared in _found()]

    def put_back(self) -> None:
        """Restore their content; not of one that its class has exchanged for another, which belongs to instances."""
        for kind, name, shared, content in self._before:
            if vars(kind).get(name) is shared and not same_mapping(content, shared):
                shared.clear()
                shared.update(content)


def _found() -> Iterator[tuple[type, str, dict[str, Any]]]:
    seen: set[int] = set()
    todo: list[type] = [object]
    while todo:
        derived: list[type] = type.__subclasses__(todo.pop())
        for kind in derived:
            if id(kind) not in seen:
                seen.add(id(kind))
                todo.append(kind)
                members = list(vars(kind).items())
                dicts = [(name, value) for name, value in members if type(value) is dict]
                named = {name for _, member in members if dicts for name in _attached_by(member)}
                if named and not is_users_code(kind):
                    yield from ((kind, name, value) for name, value in dicts if name in named)


def _attached_by(member: object) -> tuple[str, ...]:
    """Return the names in a function that gives an object another ``__dict__``; no names for all else."""
    if not isinstance(member, types.FunctionType) or "__dict__" not in member.__code__.co_names:
        return ()
    code = member.__code__
    sets = any(item.opname == "STORE_ATTR" and item.argval == "__dict__" for item in instructions_of(code))
    return code.co_names if sets else ()
