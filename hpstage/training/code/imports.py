"""Modules that code imports by a string, with ``importlib.import_module`` or ``__import__``."""

from __future__ import annotations

import dis
import functools
import importlib
import re
import sys
import types
from collections.abc import Iterator, Mapping
from typing import Any

from hpstage.training.code.bytecode import inner

_IMPORTERS = ("import_module", "__import__")
_BETWEEN = frozenset(("CACHE", "PUSH_NULL", "PRECALL", "EXTENDED_ARG", "NOP"))
"""Instructions that may be between a function and its first argument, or between that and the call."""
_MADE_TO_RUN = ("__main__", "__mp_main__")
"""Modules that are run, which are not imported by name."""
_PLAIN = re.compile(r"[\w.]*")


class Modules:
    """The user's loaded modules whose names begin with a prefix: code may import any of them."""

    __slots__ = ("path", "prefix")

    def __init__(self, prefix: str) -> None:
        self.prefix, self.path = prefix, f"modules {prefix}*"


def import_functions(names: tuple[str, ...], namespace: Mapping[str, Any]) -> frozenset[str]:
    """Return the names in code under which an importing function may be called, renamed or not."""
    known = id(importlib.import_module), id(__import__)
    renamed = {name for name in names if id(namespace.get(name)) in known}  # by id, to call no user code
    return frozenset(renamed.union(name for name in _IMPORTERS if name in names))


@functools.lru_cache(4096)
def imported(code: types.CodeType, functions: frozenset[str]) -> tuple[tuple[str, bool], ...]:
    """Return what calls of these functions in a code object, or one nested in it, import: a name, and whether it is
    complete rather than a prefix."""
    return tuple(found for part in inner(code) for found in _imported(part, functions))


def _imported(code: types.CodeType, functions: frozenset[str]) -> Iterator[tuple[str, bool]]:
    instructions = [item for item in dis.get_instructions(code) if item.opname not in _BETWEEN]
    for index, item in enumerate(instructions[:-2]):
        if type(item.argval) is not str or item.argval not in functions:
            continue
        argument, then = instructions[index + 1 : index + 3]
        if item.opname == "IMPORT_FROM":
            if argument.argval != item.argval:
                yield "", False  # imported under another name, which is not followed
        elif item.opname.startswith("LOAD_") and item.opname != "LOAD_CONST":
            text = argument.argval if argument.opname == "LOAD_CONST" else None
            joined = then.opname in ("LOAD_ATTR", "LOAD_METHOD") and then.argval != "format"
            if not isinstance(text, str) or joined:
                yield "", False
            else:
                start = _PLAIN.match(text)
                yield start[0] if start else "", then.opname.startswith(("CALL", "KW_NAMES")) and text[:1] != "."


def load(name: str) -> types.ModuleType | None:
    """Import a module now: if code later imported it by a string, its contents would not have been surveyed."""
    try:
        return importlib.import_module(name)
    except Exception:  # training may never import it; if it does, the error is raised there
        return None


def loaded(prefix: str, is_users: Any) -> tuple[types.ModuleType, ...]:
    """Return the user's loaded modules whose names begin with ``prefix``."""
    return tuple(
        module
        for name, module in sorted(sys.modules.items())
        if name.startswith(prefix)
        and name not in _MADE_TO_RUN
        and isinstance(module, types.ModuleType)
        and is_users(name.partition(".")[0])
    )
