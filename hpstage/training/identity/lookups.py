"""Lookups by name: what code finds by a text when it runs, so that no name in it says which code that is."""

from __future__ import annotations

import builtins
import importlib
import pkgutil
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from dis import Instruction
from types import CodeType
from typing import Any

from hpstage.training.identity.bytecode import FROM_GLOBALS, FROM_LOCALS, inner, instructions_of

_OWN = (builtins.globals, builtins.eval, builtins.exec)
_IMPORTERS = (importlib.import_module, builtins.__import__, pkgutil.resolve_name)
_IMPORTER_NAMES = frozenset(importer.__name__ for importer in _IMPORTERS)
_NAMESPACES = frozenset(("__globals__", "f_globals"))
_ATTRIBUTES = frozenset(("LOAD_ATTR", "LOAD_METHOD", "IMPORT_FROM"))
_CALLS = frozenset(("PRECALL", "CALL"))
_DOTTED = re.compile(r"[^\W\d]\w*\.[\w.]*")


@dataclass(slots=True)
class Lookups:
    """What code looks up by name.

    Attributes:
        own: any name of the module that it is in.
        bases: the classes whose subclasses it asks for.
        modules: modules by names that are written in it, or packages that written names begin with.
        anywhere: modules by names that are not.
    """

    own: bool = False
    bases: list[type] = field(default_factory=list)
    modules: set[str] = field(default_factory=set)
    anywhere: bool = False


def lookups(code: CodeType, names: Mapping[str, Any]) -> Lookups:
    """What ``code``, and the code in it, looks up. ``names``: its globals."""
    found = Lookups()
    for part in inner(code):
        _collect(part, names, found)
    return found


def _collect(code: CodeType, names: Mapping[str, Any], found: Lookups) -> None:
    instructions = [instruction for instruction in instructions_of(code) if instruction.opname != "PUSH_NULL"]
    for index, instruction in enumerate(instructions):
        name, before = instruction.argval, instructions[index - 1] if index else None
        content: object = None
        imports = modules = False
        if instruction.opname in FROM_GLOBALS:
            content = names.get(name, getattr(builtins, name, None))
            imports = any(content is importer for importer in _IMPORTERS)
            modules = content is sys.modules
            found.own |= any(content is looks for looks in _OWN)
        elif instruction.opname in FROM_LOCALS:
            imports = name in _IMPORTER_NAMES
        elif instruction.opname in _ATTRIBUTES:
            imports = name in _IMPORTER_NAMES and instruction.opname != "IMPORT_FROM"
            modules = name == "modules" and before is not None and _is_sys(before, names)
            found.own |= name in _NAMESPACES
            if name == "__subclasses__":
                found.own = True
                found.bases += _class_named(instructions[:index], names)
        if imports:
            _asked_for(instructions[index + 1 : index + 3], code, found)
        if modules:
            found.own = True
            found.modules.update(_packages(code))
            following = instructions[index + 1]
            if following.opname == "LOAD_CONST" and isinstance(following.argval, str):
                found.modules.add(following.argval)


def _asked_for(following: Sequence[Instruction], code: CodeType, found: Lookups) -> None:
    """What is imported, by the instructions that follow on what imports: the argument, and the call if it is alone."""
    argument, call = following
    alone = call.opname in _CALLS
    if alone and argument.opname == "LOAD_CONST" and isinstance(argument.argval, str):
        found.modules.add(argument.argval)
    elif alone and argument.opname in FROM_GLOBALS and argument.argval == "__name__":
        found.own = True
    else:
        found.anywhere = True
        found.modules.update(_packages(code))


def _class_named(instructions: Sequence[Instruction], names: Mapping[str, Any]) -> Iterator[type]:
    """The class, if it is known, that the last instructions give by a global name and attributes of it."""
    attributes: list[str] = []
    for instruction in reversed(instructions):
        if instruction.opname in FROM_GLOBALS:
            content = names.get(instruction.argval)
            for attribute in reversed(attributes):
                content = getattr(content, attribute, None)
            if isinstance(content, type):
                yield content
        if instruction.opname not in _ATTRIBUTES:
            return
        attributes.append(instruction.argval)


def _is_sys(instruction: Instruction, names: Mapping[str, Any]) -> bool:
    name = instruction.argval
    return name == "sys" or (instruction.opname in FROM_GLOBALS and names.get(name) is sys)


def _packages(code: CodeType) -> Iterator[str]:
    """The packages that texts in the code may name modules of: ``"nets."`` and ``"nets.conv"`` are of ``nets``."""
    return (text.partition(".")[0] for text in _texts(code.co_consts) if _DOTTED.fullmatch(text))


def _texts(constants: object) -> Iterator[str]:
    if isinstance(constants, str):
        yield constants
    elif isinstance(constants, tuple | frozenset):
        for constant in constants:
            yield from _texts(constant)
