"""Lookups by strings at run time, for which no name in the code says what they find."""

from __future__ import annotations

import builtins
import inspect
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from dis import Instruction
from types import CodeType
from typing import Any

from hpstage.training.code.bytecode import FROM_GLOBALS, inner, operations_of
from hpstage.training.code.imports import OWN, imported
from hpstage.training.code.names import texts_among

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
    """Return what ``code`` and the code nested in it look up. ``names`` are its globals."""
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
    """Yield the class, if known, that the last instructions load by a global name and attributes of it."""
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
    """Yield packages of which strings in the code may name modules: ``nets`` for ``"nets."`` and ``"nets.conv"``."""
    return (text.partition(".")[0] for text in texts_among(code.co_consts) if _DOTTED.fullmatch(text))
