"""Functions of libraries that compute and do nothing else: a state may choose among them by name.

It may not choose among all that a process has loaded: one that reads files or runs programs would do so with arguments
that the state brings as well. Nothing is imported for a name.
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
"""They open files, or call what they are given."""


def name_of(function: Any) -> tuple[str, str] | None:
    """Module and name under which a function is found; ``None``: it is none of those."""
    if not _may_be_pure(function):
        return None
    for module in sorted(_MODULES):
        for name in (function.__name__, getattr(function, "__qualname__", "")):
            if function_of(module, name) is function:
                return module, name
    return None


def function_of(module: str, name: str) -> Any:
    """The function of that name; ``None``: there is none."""
    space = sys.modules.get(module)
    if module not in _MODULES or space is None or name in _NOT_PURE:
        return None
    if module == "torch.optim.swa_utils":
        return getattr(space.SWALR, name.partition(".")[2]) if name in _OF_SCHEDULERS else None
    found = None if name.startswith("_") else vars(space).get(name)
    if module == "torch":  # what works on tensors, and not what sets how
        of_tensors = type(found) is types.BuiltinFunctionType and found.__qualname__.startswith("_VariableFunctions")
        return found if of_tensors else None
    if module == "numpy" and type(found) is not space.ufunc:
        return None
    return found if _may_be_pure(found) else None


def _may_be_pure(function: object) -> bool:
    library = numpy()
    return type(function) in (types.FunctionType, types.BuiltinFunctionType) or (
        library is not None and type(function) is library.ufunc
    )
