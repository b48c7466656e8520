"""The graph of the code that training reaches: from a function, class or module of the user's to all objects that its
bytecode names, transitively.

A module is followed to the member that code reads. If code uses a module as a whole (``getattr(nets, name)``), or looks
names up in its globals by string, all of the module's names are reached.
"""

from __future__ import annotations

import builtins
import functools
import re
import sys
import types
from collections import Counter, OrderedDict, defaultdict, deque
from importlib.util import find_spec
from typing import Any
from weakref import WeakValueDictionary

from hpstage.training.code import lookups
from hpstage.training.code.bytecode import Imported, cells_of, inner, references
from hpstage.training.code.made import functions_into
from hpstage.training.code.names import attributes_stored_in, holders_stored_to, names_in, stored_in, texts_in
from hpstage.training.code.namespaces import (
    MISSING,
    OF_MODULES,
    SETTER,
    ClassAttributes,
    Globals,
    LibraryAttribute,
    Slot,
    accessed,
    library_names,
)
from hpstage.training.code.owner import HEAP, bound_to, classes_below, functions_in, is_users_code, module_of, of_user

OF_CODE = re.compile(r"[\w.]+:")
"""Start of paths that begin at code rather than at an attribute of the trainable."""

_PARTS = {"__code__", "__defaults__", "__kwdefaults__"}

Namespace = Slot | ClassAttributes | lookups.Modules


class Graph:
    """All code that functions, classes or modules of the user's lead to.

    Attributes:
        namespaces: names that may be rebound, each once.
        functions: the user's functions, including the roots.
    """

    def __init__(self, *roots: object) -> None:
        self.namespaces: dict[tuple[int, str], Namespace] = {}
        self.functions: list[types.FunctionType] = []
        self._todo: list[object] = []
        self._seen: dict[int, object] = {}  # kept, so that ids stay unique
        self._downwards = False  # whether code looks up the subclasses of classes
        for root in roots:
            self.add(root)

    def add(self, root: object) -> None:
        """Add the code that a further root leads to."""
        self._todo.append(root)
        while self._todo:
            obj = self._todo.pop()
            if id(obj) not in self._seen:
                self._seen[id(obj)] = obj
                self._visit(obj)
            if not self._todo and self._downwards:
                classes = [one for one in self._seen.values() if isinstance(one, type) and is_users_code(one)]
                self._todo += [below for one in classes for below in classes_below(one) if id(below) not in self._seen]
        if isinstance(root, types.ModuleType):  # held as a value: its holder may set any of its names
            self.namespaces[id(vars(root)), ""] = Globals(vars(root))

    def reached(self) -> list[tuple[str, object]]:
        """Return everything that training may change, as pairs of path and object, sorted by path: the namespaces, and
        the functions with a closure, defaults or attributes. If code names a part of functions, such as ``__code__``,
        return all functions."""
        codes = [function.__code__ for function in self.functions]
        altered = any(not _PARTS.isdisjoint((*names_in(code), *texts_in(code))) for code in codes)
        holding = [
            (f"{function.__module__}:{function.__qualname__}", function)
            for function in self.functions
            if altered or function.__closure__ or function.__defaults__ or function.__kwdefaults__ or vars(function)
        ]
        spaces = ((space.path, space) for space in self.namespaces.values())
        return sorted([*spaces, *holding], key=lambda pair: pair[0])

    def _visit(self, obj: object) -> None:
        if isinstance(obj, type):
            self._class(obj)
        elif isinstance(obj, types.FunctionType):
            self._todo.append(vars(obj).get("__wrapped__"))
            if is_users_code(obj):
                self._function(obj)
        elif isinstance(obj, types.ModuleType):
            if of_user(obj.__name__):
                for name in list(vars(obj)):
                    self._global(name, vars(obj))
            else:
                self._library(obj)
        elif isinstance(obj, types.MethodType):
            self._todo += (obj.__func__, type(obj.__self__))
        elif isinstance(obj, functools.partial):
            self._todo.append(obj.func)
        elif (owner := bound_to(obj)) is not None:
            self._todo.append(owner)
        elif type(obj).__name__ == "ufunc":
            self._todo += functions_into(obj)
        elif is_users_code(type(obj)):
            self._todo.append(type(obj))
        self._todo += functions_in(obj)  # where one wrapper holds another

    def _class(self, cls: type) -> None:
        if not is_users_code(cls):
            self._library(cls)
            return
        self.namespaces[id(cls), ""] = ClassAttributes(cls)
        self._todo += cls.__bases__
        for value in vars(cls).values():
            self._todo += [value] if isinstance(value, types.FunctionType) else functions_in(value)

    def _function(self, function: types.FunctionType) -> None:
        self.functions.append(function)
        code, names, cells = function.__code__, function.__globals__, cells_of(function)
        found = references(code, names, cells, _imported, of_user)
        for named in found.named:
            if named.module == names.get("__name__", "") and named.name in names:
                self._global(named.name, names)
            elif named.module in sys.modules:
                self._global(named.name, vars(sys.modules[named.module]))
            self._todo.append(named.content)
        for imported in found.imported:
            content = _imported(imported)
            if imported.member and not isinstance(content, types.ModuleType | None):
                self._global(imported.member, vars(sys.modules[imported.module]))
            self._todo.append(content)
        for name in stored_in(code):
            self._global(name, names)
        self._todo += cells.values()
        self._by_text(function)
        self._of_libraries(function)

    def _global(self, name: str, namespace: dict[str, Any]) -> None:
        if name in OF_MODULES:
            return
        value = namespace.get(name, MISSING)
        self._todo.append(value)
        is_function = isinstance(value, types.BuiltinFunctionType) and bound_to(value) is None
        if not isinstance(value, types.ModuleType) and not is_function:
            slot = Slot(f"{namespace.get('__name__', '')}:{name}", namespace, name)
            self.namespaces[id(namespace), name] = _once(namespace, slot)

    def _library(self, owner: types.ModuleType | type) -> None:
        path = owner.__name__ if isinstance(owner, types.ModuleType) else module_of(owner)
        alterable = isinstance(owner, types.ModuleType) or owner.__flags__ & HEAP
        if alterable and path.partition(".")[0] not in _WITHOUT_TRAINING:
            self.namespaces[id(owner), ""] = library_names(owner)

    def _by_text(self, function: types.FunctionType) -> None:
        """Add the modules that a function imports by string or takes from ``sys.modules``, and all globals if it looks
        these up by string."""
        code, names = function.__code__, names_in(function.__code__)
        texts = [found for part in inner(code) for found in lookups.imported(part, function.__globals__)]
        for text, complete in texts:
            prefix = str(function.__globals__.get("__package__") or "") if text.startswith(".") else text
            if text == lookups.OWN:
                prefix, complete = str(function.__globals__.get("__name__") or ""), False
            if not complete:
                self.namespaces[id(lookups.Modules), prefix] = _modules(prefix)
            else:  # now, to survey its contents before training imports it
                self._todo.append(_imported(Imported(text)))
        self._downwards |= "__subclasses__" in names
        if "modules" in names and "sys" in names:
            for text in texts_in(code):
                if text == "__main__":
                    continue
                if text in sys.modules:
                    self._todo.append(sys.modules[text])
                elif text.isidentifier() and find_spec(text) is None:  # code may create such a module
                    slot = Slot(f"sys:.modules[{text!r}]", sys.modules, text)
                    self.namespaces[id(sys.modules), text] = _once(sys.modules, slot)
        if not _BY_TEXT.isdisjoint(names):
            self.namespaces[id(function.__globals__), ""] = Globals(function.__globals__)
            for name in list(function.__globals__):
                self._global(name, function.__globals__)

    def _of_libraries(self, function: types.FunctionType) -> None:
        """Add the libraries that a function names, and the attributes that it sets on them."""
        names = {*names_in(function.__code__)}
        pending = [value for name in names if isinstance(value := function.__globals__.get(name), _OWNERS)]
        setters = {*filter(SETTER.fullmatch, names)}
        for value in (function.__globals__[name] for name in names & function.__globals__.keys()):
            is_function = isinstance(value, types.BuiltinFunctionType | types.FunctionType)
            if is_function and SETTER.fullmatch(value.__name__) and not is_users_code(value):
                self._set_by(sys.modules.get(module_of(value)), value.__name__)
        for name in names:
            paths = (name, *(f"{owner}.{name}" for owner in names))
            pending += [sys.modules[path] for path in paths if path in sys.modules]
        stored, holders = {*attributes_stored_in(function.__code__)}, holders_stored_to(function.__code__)
        read = names | {*texts_in(function.__code__)} if names & _BY_ATTRIBUTE else names
        for name in names - function.__globals__.keys():
            if _is_put_there(vars(builtins).get(name)):
                self._global(name, vars(builtins))
        seen: set[int] = set()
        while pending:
            obj: Any = pending.pop()
            if id(obj) in seen or not isinstance(obj, _OWNERS):
                continue
            seen.add(id(obj))
            if isinstance(obj, types.ModuleType):
                if not of_user(obj.__name__):
                    self._todo.append(obj)
                    for name in setters:
                        self._set_by(obj, name)
                    for name in holders:
                        value = vars(obj).get(name)
                        if type(getattr(value, "__dict__", None)) is dict and not isinstance(value, _OWNERS):
                            self._global(name, vars(obj))  # an object, whose attributes are then state
                    inner = [value for name in names if isinstance(value := vars(obj).get(name), _OWNERS)]
                    pending += [value for value in inner if stored or not isinstance(value, types.FunctionType)]
            elif is_users_code(obj):
                continue
            elif isinstance(obj, type):
                self._todo.append(obj)
            self._attributes(obj, stored, read)

    def _set_by(self, module: types.ModuleType | None, name: str) -> None:
        slot = None if module is None else accessed(module, name)
        if slot is not None:
            self.namespaces[id(slot.namespace), slot.path] = _once(module, slot)

    def _attributes(self, owner: Any, stored: set[str], read: set[str]) -> None:
        """Add the attributes of a module, or of a library's function or class, that code sets, and those that it reads
        and can change in place."""
        own = vars(owner)
        for name in stored | (read & own.keys()):
            value = own.get(name)
            if _is_put_there(value) and not (owner is sys and name in _OF_IMPORTS):
                self._todo.append(value)
            elif name not in stored or not (value is None or isinstance(value, _PLAIN)):
                continue  # a module, or a library's object
            if isinstance(owner, types.ModuleType):
                path = f"{owner.__name__}:.{name}"
            else:
                path = f"{module_of(owner)}:{owner.__qualname__}.{name}"
            if not isinstance(owner, type):
                self.namespaces[id(own), name] = _once(own, Slot(path, own, name))
            elif owner.__flags__ & HEAP:
                self.namespaces[id(owner), name] = _once(owner, LibraryAttribute(path, owner, name))


def functions_reached(code: object) -> list[types.FunctionType]:
    """Return the user's functions that a class or function of the user leads to, including itself."""
    return Graph(code).functions


_WITHOUT_TRAINING = frozenset(("sys", "builtins", "warnings", "logging", "threading", "signal", "hpstage", "optuna"))
"""Modules to which Python's own machinery is attached, and those that run trainings: names replaced there are
ignored."""
_BY_TEXT = frozenset(("globals", "eval", "exec", "__globals__", "f_globals"))
_BY_ATTRIBUTE = frozenset(("getattr", "setattr", "delattr", "vars", "__dict__"))
"""Functions that take the name of an attribute as a string."""
_PLAIN = (bool, int, float, str, bytes, types.FunctionType, types.BuiltinFunctionType)
_OWNERS = (types.ModuleType, types.FunctionType, type)
"""Types of objects on which code can set attributes that other code reads."""
_DATA = frozenset((list, dict, set, bytearray, Counter, OrderedDict, defaultdict, deque))
_VALUES = (("torch", "Tensor"), ("torch.nn", "Parameter"), ("numpy", "ndarray"))
_OF_IMPORTS = frozenset(("modules", "path", "meta_path", "path_hooks", "path_importer_cache"))


def _is_put_there(value: object) -> bool:
    """Return whether code can change the value of a library's name in place: it is data, or an object of the user's."""
    kind = type(value)
    values = [getattr(sys.modules.get(library), name, None) for library, name in _VALUES]
    return kind in _DATA or is_users_code(value) or is_users_code(kind) or kind in values


def _imported(imported: Imported) -> object:
    """Return the object that a function imports; ``None`` if the module is not the user's, or the import fails."""
    if not of_user(imported.module.partition(".")[0]):
        return None
    try:
        return imported.result()
    except Exception:  # training may never import it; if it does, the error is raised there
        return None


_modules = functools.cache(lookups.Modules)
_SLOTS: WeakValueDictionary[tuple[int, str], Slot] = WeakValueDictionary()


def _once(owner: object, slot: Slot) -> Slot:
    """Return the one slot of a name, which all graphs share, so that its path does not depend on which code reaches it
    first. As long as the slot exists, it keeps its owner alive, so that the owner's id stays unique."""
    return _SLOTS.setdefault((id(owner), slot.name), slot)
