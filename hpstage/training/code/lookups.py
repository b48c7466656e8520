"""Lookups by string at run time, whose results cannot be seen from names in the code; and imports by string, with
``importlib.import_module`` or ``__import__``."""

from __future__ import annotations

import builtins
import importlib
import inspect
import pkgutil
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from dis import Instruction
from itertools import zip_longest
from types import CodeType, ModuleType
from typing import Any

from hpstage.training.code.bytecode import FROM_GLOBALS, inner, operations_of
from hpstage.training.code.names import texts_among
from hpstage.training.code.owner import of_user

_IMPORTERS = (importlib.import_module, __import__, pkgutil.resolve_name)
_NAMES = frozenset(importer.__name__ for importer in _IMPORTERS)
_KNOWN = frozenset(map(id, _IMPORTERS))  # by id, to call no user code
OWN = "__name__"
"""Placeholder for the module of the code itself."""
_MADE_TO_RUN = ("__main__", "__mp_main__")
"""Names of modules that are run, not imported."""
_PLAIN = re.compile(r"[\w.]*")
_OWN = (builtins.globals, builtins.eval, builtins.exec)
_NAMESPACES = frozenset(("__globals__", "f_globals"))
_ATTRIBUTES = frozenset(("LOAD_ATTR", "LOAD_METHOD", "IMPORT_FROM"))
_DOTTED = re.compile(r"[^\W\d]\w*\.[\w.]*")


@dataclass(slots=True)
class Lookups:
    """The lookups by name in a piece of code.

    Attributes:
        own: whether it looks up arbitrary names of its own module.
        bases: classes whose subclasses it looks up.
        modules: modules whose names are written in it, or packages that such names begin with.
        anywhere: whether it imports modules by names that are not written in it.
    """

    own: bool = False
    bases: list[type] = field(default_factory=list)
    modules: set[str] = field(default_factory=set)
    anywhere: bool = False


def lookups(code: CodeType, names: Mapping[str, Any]) -> Lookups:
    """Return the lookups in ``code`` and in the code nested in it. ``names`` are the code's globals."""
    found = Lookups()
    for part in inner(code):
        _collect(part, names, found)
    return found


def _collect(code: CodeType, names: Mapping[str, Any], found: Lookups) -> None:
    for text, complete in imported(code, names):
        if text == OWN:
            found.own = True
        elif complete:
            found.modules.add(text)
        else:
            found.anywhere = True
            found.modules.update(_packages(code))
    instructions = operations_of(code)
    for index, instruction in enumerate(instructions):
        name, before = instruction.argval, instructions[index - 1] if index else None
        modules = False
        if instruction.opname in FROM_GLOBALS:
            content = names.get(name, getattr(builtins, name, None))
            modules = content is sys.modules
            found.own |= any(content is looks for looks in _OWN)
        elif instruction.opname in _ATTRIBUTES:
            modules = name == "modules" and before is not None and _is_sys(before, names)
            found.own |= name in _NAMESPACES
            if name == "__subclasses__":
                found.own = True
                found.bases += _class_named(instructions[:index], names)
        if modules:
            found.own = True
            found.modules.update(_packages(code))
            following = instructions[index + 1]
            if following.opname == "LOAD_CONST" and isinstance(following.argval, str):
                found.modules.add(following.argval)


def _class_named(instructions: Sequence[Instruction], names: Mapping[str, Any]) -> Iterator[type]:
    """Yield the class that the last instructions load, if it is known: by a global name and attributes."""
    attributes: list[str] = []
    for instruction in reversed(instructions):
        if instruction.opname in FROM_GLOBALS:
            content = names.get(instruction.argval)
            for attribute in reversed(attributes):
                content = inspect.getattr_static(content, attribute, None)
            if isinstance(content, type):
                yield content
        if instruction.opname not in _ATTRIBUTES:
            return
        attributes.append(instruction.argval)


def _is_sys(instruction: Instruction, names: Mapping[str, Any]) -> bool:
    name = instruction.argval
    return name == "sys" or (instruction.opname in FROM_GLOBALS and names.get(name) is sys)


def _packages(code: CodeType) -> Iterator[str]:
    """Yield the packages whose modules may be named by strings in the code: ``nets`` for ``"nets."`` and
    ``"nets.conv"``."""
    return (text.partition(".")[0] for text in texts_among(code.co_consts) if _DOTTED.fullmatch(text))


class Modules:
    """The user's loaded modules whose names begin with a prefix: code may import any of them."""

    __slots__ = ("path", "prefix")

    def __init__(self, prefix: str) -> None:
        self.prefix, self.path = prefix, f"modules {prefix}*"

    def get(self) -> tuple[ModuleType, ...]:
        return tuple(
            module
            for name, module in sorted(sys.modules.items())
            if name.startswith(self.prefix)
            and name not in _MADE_TO_RUN
            and isinstance(module, ModuleType)
            and of_user(name.partition(".")[0])
        )


def imported(code: CodeType, namespace: Mapping[str, Any]) -> Iterator[tuple[str, bool]]:
    """Yield the imports by string in a code object, without the code nested in it: the module's name or :data:`OWN`,
    and whether the name is complete rather than a prefix."""
    names = code.co_names + code.co_varnames + code.co_freevars
    functions = {name for name in names if name in _NAMES or id(namespace.get(name)) in _KNOWN}
    operations = operations_of(code) if functions else ()
    for item, argument, then in zip_longest(operations, operations[1:], operations[2:]):
        if type(item.argval) is not str or item.argval not in functions or argument is None:
            continue
        if item.opname == "IMPORT_FROM":
            if argument.argval != item.argval:
                yield "", False  # imported under another name, which is not followed
        elif item.opname.startswith("LOAD_") and item.opname not in ("LOAD_CONST", "LOAD_CLOSURE"):
            following = "" if then is None else then.opname
            alone = following.startswith(("CALL", "KW_NAMES"))
            text = argument.argval if argument.opname == "LOAD_CONST" else None
            joined = following in ("LOAD_ATTR", "LOAD_METHOD") and then.argval != "format"
            if alone and argument.opname in FROM_GLOBALS and argument.argval == OWN:
                yield OWN, True
            elif not isinstance(text, str) or joined:
                yield "", False
            else:
                start = _PLAIN.match(text)
                yield start[0] if start else "", alone and text[:1] != "."
