"""Modules that code imports by a string, with ``importlib.import_module`` or ``__import__``."""

from __future__ import annotations

import importlib
import pkgutil
import re
import sys
import types
from collections.abc import Iterator, Mapping
from itertools import zip_longest
from typing import Any

from hpstage.training.code.bytecode import FROM_GLOBALS, operations_of
from hpstage.training.code.owner import of_user

_IMPORTERS = (importlib.import_module, __import__, pkgutil.resolve_name)
_NAMES = frozenset(importer.__name__ for importer in _IMPORTERS)
_KNOWN = frozenset(map(id, _IMPORTERS))  # by id, to call no user code
OWN = "__name__"
"""Placeholder for the module of the code itself."""
_MADE_TO_RUN = ("__main__", "__mp_main__")
"""Modules that are run, which are not imported by name."""
_PLAIN = re.compile(r"[\w.]*")


class Modules:
    """The user's loaded modules whose names begin with a prefix: code may import any of them."""

    __slots__ = ("path", "prefix")

    def __init__(self, prefix: str) -> None:
        self.prefix, self.path = prefix, f"modules {prefix}*"

    def get(self) -> tuple[types.ModuleType, ...]:
        return tuple(
            module
            for name, module in sorted(sys.modules.items())
            if name.startswith(self.prefix)
            and name not in _MADE_TO_RUN
            and isinstance(module, types.ModuleType)
            and of_user(name.partition(".")[0])
        )


def imported(code: types.CodeType, namespace: Mapping[str, Any]) -> Iterator[tuple[str, bool]]:
    """Yield what a code object, not those nested in it, imports: a name or :data:`OWN`, and whether it is complete
    rather than a prefix."""
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
