"""Dicts that a library's class keeps as the ``__dict__`` of all of its instances, as accelerate's states do.

They are restored between trials: otherwise, a new instance would begin with the attributes that another trial left.
"""

from __future__ import annotations

import builtins
import functools
import sys
import types
from collections.abc import Iterator
from typing import Any

from hpstage.errors import StateError
from hpstage.training.capture.kind import same_mapping
from hpstage.training.code.bytecode import code_in, inner, instructions_of, operations_of
from hpstage.training.code.owner import classes_below, is_users_code, module_of

Shared = tuple[type, str, dict[str, Any]]
"""A class, the name under which it keeps such a dict, and the dict."""


class ClassDicts:
    """The shared dicts of library classes, each with the content to restore: that at the creation of this object;
    for classes imported later, nothing. Shared dicts of the user's classes are surveyed like all other objects."""

    def __init__(self) -> None:
        self._modules = frozenset(sys.modules)
        self._before = [(kind, name, shared, dict(shared)) for kind, name, shared in _found()]

    def put_back(self) -> None:
        """Restore all dicts that are still shared. A dict that its class has replaced belongs to its instances."""
        for kind, name, shared, content in self._before:
            if vars(kind).get(name) is shared and not same_mapping(content, shared):
                shared.clear()
                shared.update(content)

    def begin(self) -> None:
        """Restore the content of all dicts, also for classes of modules that training was the first to import.

        Raises:
            StateError: the content that such a module gave a dict at first is not known.
        """
        if self._modules != (modules := frozenset(sys.modules)):
            known = {id(shared) for _, _, shared, _ in self._before}
            for kind, name, shared in _found():
                if id(shared) in known:
                    continue
                if shared and not _begins_empty(kind, name):
                    raise StateError(
                        f"{module_of(kind)}.{kind.__qualname__}.{name} keeps the attributes of all instances, and was "
                        f"first imported in training, so a trial would begin with the attributes that another trial "
                        f"left. Import {module_of(kind)} at the top of your module"
                    )
                self._before.append((kind, name, shared, {}))
            self._modules = modules
        self.put_back()


def find_classes() -> None:
    """Search the classes for such dicts now rather than when they are restored."""
    _sharing(frozenset(sys.modules))


def _found() -> Iterator[Shared]:
    for kind, names in _sharing(frozenset(sys.modules)):
        own = vars(kind)
        yield from ((kind, name, own[name]) for name in names if type(own.get(name)) is dict)


@functools.lru_cache(maxsize=1)  # one search in a process, and none in its forks, until a module is imported
def _sharing(modules: frozenset[str]) -> list[tuple[type, tuple[str, ...]]]:
    """Return the library classes whose ``__init__`` assigns ``__dict__``, each with the names in its code."""
    found: list[tuple[type, tuple[str, ...]]] = []
    for kind in classes_below(object):
        constructor = vars(kind).get("__init__")
        code = constructor.__code__ if type(constructor) is types.FunctionType else None
        if code is not None and _sets_dict(code) and not is_users_code(kind):
            found.append((kind, code.co_names))
    return found


def _sets_dict(code: types.CodeType) -> bool:
    if "__dict__" not in code.co_names:  # as in all but a few of the thousands of constructors in a process
        return False
    return any(item.opname == "STORE_ATTR" and item.argval == "__dict__" for item in instructions_of(code))


def _begins_empty(kind: type, name: str) -> bool:
    """Return whether the body of a class binds a name exactly once, and to ``{}`` or ``dict()``."""
    module = sys.modules.get(module_of(kind))
    code = None if module is None else code_in(module)
    if module is None or code is None:
        return False
    bodies = [operations_of(part) for part in inner(code) if part.co_qualname == kind.__qualname__]
    stored = "STORE_NAME", name
    bound = [(body, at) for body in bodies for at, item in enumerate(body) if (item.opname, item.argval) == stored]
    if len(bound) != 1:
        return False
    body, at = bound[0]
    made_by, made = body[max(at - 2, 0)], body[at - 1]
    called = vars(module).get(made_by.argval, vars(builtins).get(made_by.argval))
    return made.arg == 0 and (
        made.opname == "BUILD_MAP" or (made.opname == "CALL" and made_by.opname == "LOAD_NAME" and called is dict)
    )
