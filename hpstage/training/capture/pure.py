"""Library functions that only compute: a state may refer to them by name.

It may not refer to arbitrary loaded functions: one that reads files or runs programs would do so with arguments that
the state also provides. Looking up a name imports nothing.
"""

from __future__ import annotations

import sys
import types
from typing import Any

from hpstage.training.capture.kind import numpy

_MODULES = frozenset(
    f"torch{name}" for name in ("", ".nn.functional", ".nn.init", ".special", ".linalg", ".fft", ".optim.swa_utils")
) | {"math", "numpy"}
_OF_SCHEDULERS = frozenset(("SWALR._cosine_anneal", "SWALR._linear_anneal"))
_NOT_PURE = frozenset(("from_file", "boolean_dispatch", "handle_torch_function"))
"""Functions that open files or call their arguments."""


def name_of(function: Any) -> tuple[str, str] | None:
    """Return module and name under which a pure function is found; ``None`` for any other."""
    if not _may_be_pure(function):
        return None
    for module in sorted(_MODULES):
        for name in (function.__name__, getattr(function, "__qualname__", "")):
            if function_of(module, name) is function:
                return module, name
    return None


def function_of(module: str, name: str) -> Any:
    """Return the pure function of that name, or ``None`` if there is none."""
    space = sys.modules.get(module)
    if module not in _MODULES or space is None or name in _NOT_PURE:
        return None
    if module == "torch.optim.swa_utils":
        return getattr(space.SWALR, name.partition(".")[2]) if name in _OF_SCHEDULERS else None
    found = None if name.startswith("_") else vars(space).get(name)
    if module == "torch":  # functions that work on tensors, not those that change settings
        of_tensors = type(found) is types.BuiltinFunctionType and found.__qualname__.startswith("_VariableFunctions")
        return found if of_tensors else None
    if module == "numpy" and type(found) is not space.ufunc:
        return None
    return found if _may_be_pure(found) else None


def _may_be_pure(function: object) -> bool:
    return type(function) in (types.FunctionType, types.BuiltinFunctionType, numpy().ufunc)
