"""Dicts that a library's class keeps as the ``__dict__`` of all of its instances, as accelerate's states do: a trial
that makes an instance would begin with the attributes that another trial has left."""

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
    """These dicts with what was in them at one time; those of classes that came later, with what their modules put in
    them. Those of the user's classes are surveyed like all else."""

    def __init__(self) -> None:
        self._modules = frozenset(sys.modules)
        self._before = [(kind, name, shared, dict(shared)) for kind, name, shared in _found()]

    def put_back(self) -> None:
        """Restore their content; not of one that its class has exchanged for another, which belongs to instances."""
        for kind, name, shared, content in self._before:
            if vars(kind).get(name) is shared and not same_mapping(content, shared):
                shared.clear()
                shared.update(content)

    def begin(self) -> None:
        """Restore their content, also of classes whose modules only training has imported.

        Raises:
            StateError: what such a module has put in its dict is not known.
        """
        if self._modules != (modules := frozenset(sys.modules)):
            known = {id(shared) for _, _, shared, _ in self._before}
            for kind, name, shared in _found():
                if id(shared) in known:
                    continue
                if shared and not _begins_empty(kind, name):
                    raise StateError(
                        f"{module_of(kind)}.{kind.__qualname__}.{name} keeps the attributes of all instances, and was "
                        f"first imported in training, so that a trial would begin with the ones that another trial "
                        f"left. Import {module_of(kind)} at the top of your module"
                    )
                self._before.append((kind, name, shared, {}))
            self._modules = modules
        self.put_back()


def _found() -> Iterator[Shared]:
    for kind, names in _sharing(frozenset(sys.modules)):
        own = vars(kind)
        yield from ((kind, name, own[name]) for name in names if type(own.get(name)) is dict)


@functools.lru_cache(maxsize=1)  # looked for once in a process, and in none of its forks, while no module is imported
def _sharing(modules: frozenset[str]) -> list[tuple[type, tuple[str, ...]]]:
    """Return the classes of libraries whose constructor gives instances another ``__dict__``, with the names in it."""
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
    """Return whether the code of a class's body binds a name once, to ``{}`` or to what a call of ``dict`` gives."""
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
