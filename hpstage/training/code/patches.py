"""What the user's code has put into libraries, in place of what was there or beside it, found where it stands."""

from __future__ import annotations

import functools
import sys
import types
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise
from typing import Any

from hpstage.training.code import bytecode
from hpstage.training.code.bytecode import code_in, written_in
from hpstage.training.code.owner import found_in, functions_in, is_users

_WITHOUT_TRAINING = frozenset(("sys", "time", "warnings", "logging", "threading", "signal", "hpstage", "optuna"))
"""Packages where a process attaches what observes it, the clock, and packages that run trainings."""
_HOOKS = "_global_"
"""Beginning of the names of dicts in which torch keeps the hooks of all modules, and of all optimizers."""


def standing() -> Iterator[tuple[str, Any]]:
    """Yield the place, such as ``torch.nn.functional:relu``, and the value of each function or class of the user's in a
    module or class of a library. It trains whether or not other code of the user's names it, unlike data."""
    users, libraries = _modules()
    own = frozenset(id(vars(module)) for module in libraries.values())
    passed_by: set[type] = set()
    for name, module in libraries.items():
        items = _items(vars(module))
        for _, value in items:
            if issubclass(type(value), type) and value.__module__ == name:
                for member, inner in _users(users, own, passed_by, _items(vars(value))):
                    yield f"{name}:{value.__qualname__}.{member}", inner
        for attribute, value in _users(users, own, passed_by, items):
            yield f"{name}:{attribute}", value


def operators() -> Iterator[types.ModuleType]:
    """Yield the user's modules that define operators of torch, which run wherever torch calls them, under whatever
    name: those whose code names ``torch.library``."""
    if "torch" in sys.modules:
        for name in sorted(_modules()[0]):
            if _defines_operators(sys.modules[name]):
                yield sys.modules[name]


@functools.lru_cache(4096)
def _defines_operators(module: types.ModuleType) -> bool:
    if "library" not in "".join(written_in(module)):
        return False
    torch = sys.modules["torch"]
    code = code_in(module)
    for part in bytecode.inner(code) if code is not None else ():
        for before, found in pairwise(bytecode.instructions_of(part)):
            if found.opname == "IMPORT_NAME" and str(found.argval).startswith("torch.library"):
                return True
            of_torch = before.argval == "torch" or vars(module).get(str(before.argval)) is torch
            if found.argval == "library" and found.opname in ("LOAD_ATTR", "LOAD_METHOD", "IMPORT_FROM") and of_torch:
                return True
    return False


def patches() -> dict[str, str]:
    """Return a description of each by its place. Equal code has equal descriptions in all processes."""
    return {place: _text(value) for place, value in standing()}


def lacking(there: Mapping[str, str]) -> list[str]:
    """Return the places of those patches of another process that are not, or are others, here. Libraries that are not
    imported here are passed by."""
    places = {place: place.partition(":") for place in there}
    return [
        place
        for place, (module, _, path) in places.items()
        if module in sys.modules and _text(found_in(sys.modules[module], path)) != there[place]
    ]


def _modules() -> tuple[frozenset[str], dict[str, types.ModuleType]]:
    """Return the names of the user's modules, and the libraries' modules by name."""
    packages: dict[str, bool] = {}
    users, libraries = set(), {}
    for name, module in [*sys.modules.items()]:
        package = name.partition(".")[0]
        if package not in packages:
            packages[package] = is_users(package)
        if packages[package]:
            if name == "__main__" or getattr(module, "__file__", None) is not None:  # else made by a compiler
                users.add(name)
        elif package not in _WITHOUT_TRAINING and issubclass(type(module), types.ModuleType):
            libraries[name] = module
    return frozenset(users), libraries


def _users(
    users: frozenset[str], own: frozenset[int], passed_by: set[type], items: Iterable[tuple[str, Any]]
) -> Iterator[tuple[str, object]]:
    """Yield the names that stand for code or objects of the user's. Fast: there are hundreds of thousands of names.

    Args:
        own: ids of the namespaces of libraries' modules.
        passed_by: types of which no object is the user's, to which others are added.
    """
    for name, value in items:
        kind = type(value)
        if kind in passed_by:
            continue
        if kind is types.FunctionType:
            if id(value.__globals__) not in own and value.__globals__.get("__name__") in users:
                yield name, value
        elif issubclass(kind, type):  # isinstance() would ask the object, which may be any
            if value.__module__ in users:
                yield name, value
        elif kind in _WRAPPERS:
            if any(part.__globals__.get("__name__") in users for part in _parts(value)):
                yield name, value
        elif kind in _TABLES:
            if name.startswith(_HOOKS) and _has_code(users, value):
                yield name, value
        elif kind.__module__ not in users:
            passed_by.add(kind)
        elif callable(value):
            yield name, value


def _items(names: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Return the items as of one moment: another thread may import meanwhile."""
    while True:
        try:
            return list(names.items())
        except RuntimeError:  # it has changed size
            continue


_WRAPPERS = frozenset((staticmethod, classmethod, property, functools.partial))
_TABLES = frozenset((dict, OrderedDict))


def _has_code(users: frozenset[str], hooks: Mapping[Any, object]) -> bool:
    """Libraries keep functions of their own in such tables, too."""
    functions = (hook for hook in hooks.values() if isinstance(hook, types.FunctionType))
    return any(function.__globals__.get("__name__") in users for function in functions)


def _parts(wrapper: Any) -> Iterable[types.FunctionType]:
    parts = (wrapper.func,) if isinstance(wrapper, functools.partial) else functions_in(wrapper)
    return [part for part in parts if isinstance(part, types.FunctionType)]


def _text(value: Any) -> str:
    if isinstance(value, types.FunctionType):
        return f"{value.__qualname__} {bytecode.digest(value.__code__)}"
    if isinstance(value, type):
        return value.__qualname__
    if type(value) in _WRAPPERS:
        return " ".join([type(value).__name__, *map(_text, _parts(value))])
    if isinstance(value, dict):
        return ", ".join(map(_text, value.values()))
    return f"an object of {type(value).__qualname__}"
