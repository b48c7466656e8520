"""Patches of libraries by the user's code: the functions and classes that it has replaced or added there."""

from __future__ import annotations

import atexit
import functools
import operator
import sys
import types
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, ValuesView
from itertools import chain, pairwise
from typing import Any

from hpstage.training.code import bytecode
from hpstage.training.code.bytecode import code_in, written_in
from hpstage.training.code.owner import found_in, functions_in, is_users, is_users_code
from hpstage.training.code.tables import ENTRY_POINT, Contents, code_named, listed, registered, tables_among

_WITHOUT_TRAINING = frozenset(("sys", "time", "warnings", "logging", "threading", "signal", "hpstage", "optuna"))
"""Packages whose patches do not count: those that observe a process, the clock, and those that run trainings."""
_HOOKS = "_global_"
"""Beginning of the names of dicts in which torch keeps the hooks of all modules, and of all optimizers."""


_OF_POINTERS = "PyCPointerType"
"""Name of the metaclass of ctypes' pointer types. All modules share such a type, but it names the first that made
it."""

_clean: dict[str, tuple[Mapping[str, Any], list[ValuesView[Any]], Contents, list[Any]]] = {}
"""Libraries' modules in which nothing of the user's was found, by name: the module's namespace, views of the values in
it and in its classes, the contents of their tables, and the values found in the views."""
atexit.register(_clean.clear)  # so that the objects are released with their modules, in Python's order
_makers: set[object] = set()
"""Names of the modules that define the objects found in libraries. Once one of them is a module of the user's, all
libraries have to be searched again."""


def standing() -> Iterator[tuple[str, Any]]:
    """Find the user's code inside libraries.

    Yield each function or class of the user's that a module or class of a library contains, as a pair of its place,
    such as ``torch.nn.functional:relu``, and its value. For an entry of a registry (a dict, list or set), the value is
    a list of the entry and the user's objects in it. Unlike data, such code may affect training even if nothing else
    in the user's code names it.

    A module whose names refer to the same objects as before is not searched again.
    """
    users, libraries = _modules()
    if not users.isdisjoint(_makers):
        _clean.clear()
        _makers.clear()
    sought = _Sought(users, libraries.values())
    for name, module in libraries.items():
        if not _is_as_it_was(name, vars(module)):
            yield from _within(sought, name, vars(module), code_named)


def look_ahead() -> None:
    """Search the libraries for the user's code before any of it is imported. In forks of this process,
    :func:`standing` then skips unchanged modules. Modules with strings that may name the user's code are left to the
    forks, since resolving such a string imports the code."""
    users, libraries = _modules()
    sought = _Sought(users, libraries.values())
    for name, module in libraries.items():
        texts: list[str] = []
        _within(sought, name, vars(module), texts.append)
        if any(map(ENTRY_POINT.fullmatch, texts)):
            _clean.pop(name, None)


def _is_as_it_was(name: str, names: Mapping[str, Any]) -> bool:
    if name not in _clean or _clean[name][0] is not names:
        return False
    _, views, tables, before = _clean[name]
    if sum(map(len, views)) != len(before):
        return False
    try:
        return all(map(operator.is_, chain.from_iterable(views), before)) and tables.are_as_before()
    except RuntimeError:  # another thread has changed the size of a namespace
        return False


def _within(
    sought: _Sought, name: str, names: Mapping[str, Any], named: Callable[[str], object]
) -> list[tuple[str, Any]]:
    """Return the user's code in a library's module, its classes and tables, as pairs of place and value."""
    items = listed(names.items())
    values = [value for _, value in items]
    classes = [value for value in values if issubclass(type(value), type) and value.__module__ == name]
    sought.tables = False
    found = [(f"{name}:{attribute}", value) for attribute, value in sought.among(items)]
    tables = tables_among(name, dict(items), sought.own)
    for each in classes:
        members = listed(vars(each).items())
        values += [value for _, value in members]
        path = each.__qualname__
        found += [(f"{name}:{path}.{member}", value) for member, value in sought.among(members)]
        tables += [(f"{path}.{member}", table) for member, table in tables_among(name, dict(members), sought.own)]
    found += registered(name, tables, sought.among, named)
    if found or sought.tables:
        _clean.pop(name, None)
    else:
        views = [names.values(), *(vars(each).values() for each in classes)]
        _clean[name] = names, views, Contents(table for _, table in tables), values
    return found


def operators() -> Iterator[types.ModuleType]:
    """Yield the user's modules that define operators of torch, by naming ``torch.library``. Code may call an operator
    without naming these modules."""
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


def code_in_libraries(patched: Iterable[tuple[str, object]]) -> Iterator[tuple[str, object]]:
    """Yield pairs of place and object for all code of the user's in libraries that may have a state: the functions and
    classes in ``patched``, the result of :func:`standing`, and the modules that define operators."""
    for place, value in patched:
        for each in value if isinstance(value, list) else [value]:
            parts = [each.func] if isinstance(each, functools.partial) else functions_in(each)
            for part in (each, *parts):
                if isinstance(part, types.FunctionType | type) and is_users_code(part):
                    yield place, part
    for module in operators():
        yield f"{module.__name__}:", module


def patches() -> dict[str, str]:
    """Return a description of each patch, by place. Equal code has equal descriptions in all processes."""
    return {place: _text(value) for place, value in standing()}


def lacking(there: Mapping[str, str]) -> list[str]:
    """Return the places of those patches of another process that are missing or different in this process. Libraries
    that this process has not imported are skipped."""
    here = patches() if any(place.endswith("]") for place in there) else {}  # only entries of tables need it
    found = []
    for place in there:
        module, _, path = place.partition(":")
        if module in sys.modules:
            text = here.get(place) if place.endswith("]") else _text(found_in(sys.modules[module], path))
            if text != there[place]:
                found.append(place)
    return found


def _modules() -> tuple[frozenset[str], dict[str, types.ModuleType]]:
    """Return the names of the user's modules, and the libraries' modules by name."""
    packages: dict[str, bool] = {}
    users, libraries = set(), {}
    for name, module in listed(sys.modules.items()):
        package = name.partition(".")[0]
        if package not in packages:
            packages[package] = is_users(package)
        if packages[package]:
            if name == "__main__" or getattr(module, "__file__", None) is not None:  # else made by a compiler
                users.add(name)
        elif package not in _WITHOUT_TRAINING and issubclass(type(module), types.ModuleType):
            libraries[name] = module
    return frozenset(users), libraries


class _Sought:
    """Finds code and objects of the user's modules. Fast: there are hundreds of thousands of names."""

    def __init__(self, users: frozenset[str], libraries: Iterable[types.ModuleType]) -> None:
        self._users = users
        self.own = frozenset(id(vars(module)) for module in libraries)  # ids of namespaces, which are no tables
        self._passed_by: set[type] = set()  # types without objects of the user's
        self.tables = False  # whether there were objects that may come to hold the user's code

    def among(self, items: Iterable[tuple[Any, Any]]) -> Iterator[tuple[Any, Any]]:
        users, own, passed_by, makers = self._users, self.own, self._passed_by, _makers
        for name, value in items:
            kind = type(value)
            if kind in passed_by:
                continue
            if kind is types.FunctionType:
                if id(value.__globals__) not in own:
                    maker = value.__globals__.get("__name__")
                    if maker in users:
                        yield name, value
                    else:
                        makers.add(maker)
            elif issubclass(kind, type):  # isinstance() would call code of the object's class
                if kind.__name__ == _OF_POINTERS:
                    continue
                if value.__module__ in users:
                    yield name, value
                else:
                    makers.add(value.__module__)
            elif kind in _WRAPPERS:
                found = [part.__globals__.get("__name__") for part in _parts(value)]
                if not users.isdisjoint(found):
                    yield name, value
                else:
                    makers.update(found)
            elif kind in _TABLES:
                if name.startswith(_HOOKS):
                    self.tables = True
                    if _has_code(users, value):
                        yield name, value
            elif kind.__module__ not in users:
                passed_by.add(kind)
                makers.add(kind.__module__)
            else:
                self.tables = True
                if callable(value):
                    yield name, value


_WRAPPERS = frozenset((staticmethod, classmethod, property, functools.partial, functools.partialmethod))
_TABLES = frozenset((dict, OrderedDict))


def _has_code(users: frozenset[str], hooks: Mapping[Any, object]) -> bool:
    """Return whether a table of hooks contains a function of the user's modules; libraries keep their own functions in
    such tables, too."""
    functions = (hook for hook in listed(hooks.values()) if isinstance(hook, types.FunctionType))
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
    if isinstance(value, dict | list):
        return ", ".join(map(_text, value.values() if isinstance(value, dict) else value))
    return f"an object of {type(value).__qualname__}"
