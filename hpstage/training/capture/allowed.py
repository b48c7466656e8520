"""What a state may name, so that reading one runs only code that is known here.

A state may come from anyone: it names classes, functions and generators, which are looked up.
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

from hpstage.training.capture import pure
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
    return pure.name_of(function) is not None


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
