"""What a state may name, so that reading one runs only code that is known here.

A state may come from anyone: it names classes, functions and generators, which are looked up. Of the functions of
libraries, it may name those that only compute, not arbitrary loaded ones: one that reads files or runs programs would
do so with arguments that the state also provides. Looking up a name imports nothing.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import sys
import types
from collections.abc import Callable
from typing import Any

from hpstage.training.capture.kind import RUNNERS, numpy, torch
from hpstage.training.capture.survey import Survey
from hpstage.training.code.attributes import has_own_memory
from hpstage.training.code.owner import found_in, is_users_code

RANDOM: dict[str, Callable[[], Any]] = {
    "Random": lambda: sys.modules["random"].Random,
    "Generator": lambda: torch() and torch().Generator,
    "RandomState": lambda: numpy().random.RandomState,
}


def method_of(owner: object, name: str) -> types.MethodType | types.MethodWrapperType | None:
    """Return an object's method of this name if its class has a function for it, or one of those that Python's own
    types have for operators (``__len__``, ``__next__``), or ``None``."""
    found = next((vars(kind)[name] for kind in type(owner).__mro__ if name in vars(kind)), None)
    if isinstance(found, types.FunctionType):
        return types.MethodType(found, owner)
    return found.__get__(owner) if isinstance(found, types.WrapperDescriptorType) else None


def may_be_given(function: object) -> bool:
    """Return whether a state may provide arguments for a function: the user's, or one that only computes."""
    if isinstance(function, functools.partial):
        return may_be_given(function.func)
    if isinstance(function, types.FunctionType) and is_users_code(function):
        return True
    return pure_name(function) is not None


def creatable(base: Survey, module: str, qualname: str) -> type | None:
    """Return the class of that name if its instances are defined by their attributes: a class of the user, or a
    dataclass, met before training began, a named tuple of a module that is imported, or one of torch's modules and
    optimizers. Creating an instance runs none of its code."""
    library = torch()
    if library is not None and module.startswith(("torch.nn.", "torch.optim.")):
        kinds = _kinds_of_torch(library)
        kind = named(module, qualname)
        if not isinstance(kind, type) or not issubclass(kind, kinds):
            return None
    else:
        kind = base.named.get((module, qualname)) or found_in(sys.modules.get(module), qualname)
        if not isinstance(kind, type):
            return None
        met = (module, qualname) in base.named and (is_users_code(kind) or dataclasses.is_dataclass(kind))
        if not met and not (issubclass(kind, tuple) and hasattr(kind, "_fields")):
            return None
    if any("__del__" in vars(part) for part in kind.__mro__) or inspect.isabstract(kind):
        return None
    if issubclass(kind, tuple):
        return kind if kind.__itemsize__ == tuple.__itemsize__ else None
    return None if has_own_memory(kind) or issubclass(kind, RUNNERS) else kind


def _kinds_of_torch(library: Any) -> tuple[type, ...]:
    # torch does not import all of them: training that prunes may import the module, which a fork has not done yet.
    hooks = (getattr(importlib.import_module(f"torch.nn.{module}"), name) for module, name in _HOOKS)
    return library.nn.Module, library.optim.Optimizer, library.optim.lr_scheduler.LRScheduler, *hooks


_HOOKS = (
    ("modules.module", "_WrappedHook"),
    ("utils.weight_norm", "WeightNorm"),
    ("utils.prune", "BasePruningMethod"),
    *(("utils.spectral_norm", f"SpectralNorm{name}") for name in ("", "LoadStateDictPreHook", "StateDictHook")),
)


def named(module: str, qualname: str) -> object:
    """Return what a loaded module has under a name, without importing or calling anything."""
    found: object = sys.modules.get(module)
    for part in qualname.split("."):
        if not isinstance(found, types.ModuleType | type):
            return None
        found = vars(found).get(part)
    return found


_MODULES = frozenset(
    f"torch{name}" for name in ("", ".nn.functional", ".nn.init", ".special", ".linalg", ".fft", ".optim.swa_utils")
) | {"math", "numpy"}
_OF_SCHEDULERS = frozenset(("SWALR._cosine_anneal", "SWALR._linear_anneal"))
_NOT_PURE = frozenset(("from_file", "boolean_dispatch", "handle_torch_function"))
"""Functions that open files or call their arguments."""


def pure_name(function: Any) -> tuple[str, str] | None:
    """Return module and name under which a pure function is found; ``None`` for any other."""
    if not _may_be_pure(function):
        return None
    for module in sorted(_MODULES):
        for name in (function.__name__, getattr(function, "__qualname__", "")):
            if pure_function(module, name) is function:
                return module, name
    return None


def pure_function(module: str, name: str) -> Any:
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
