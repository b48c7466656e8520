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
                constructor = vars(kind).get("__init__")
                # Of the thousands of classes in a process, few have such a constructor.
                if type(constructor) is types.FunctionType and "__dict__" in constructor.__code__.co_names:
                    yield from _attached_by(constructor.__code__, kind)


def _attached_by(code: types.CodeType, kind: type) -> Iterator[tuple[type, str, dict[str, Any]]]:
    """Yield the dicts of a library's class that its constructor names, if it gives instances another ``__dict__``."""
    sets = any(item.opname == "STORE_ATTR" and item.argval == "__dict__" for item in instructions_of(code))
    if sets and not is_users_code(kind):
        own = vars(kind)
        yield from ((kind, name, own[name]) for name in code.co_names if type(own.get(name)) is dict)
