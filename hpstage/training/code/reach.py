"""Names in namespaces that code reaches: globals of the user's modules, and attributes of the user's classes.

Found in bytecode: the names that a function loads or stores, and what they lead to, transitively. Finding too many does
no harm, since only those that change in training matter.
"""

from __future__ import annotations

import builtins
import dis
import functools
import re
import sys
import types
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from operator import is_
from typing import Any

from hpstage.training.code import imports
from hpstage.training.code.owner import HEAP, functions_in, is_users_code, module_of, of_user

MISSING = object()
"""The value of an unbound name."""

OF_CODE = re.compile(r"[\w.]+:")
"""Start of paths that begin at code rather than at an attribute of the trainable."""

_REMEMBERED = 4096
"""Size of caches of disassembled functions: surveys meet the same ones again and again."""


class Slot:
    """A global name of a module."""

    __slots__ = ("name", "namespace", "path")

    def __init__(self, path: str, namespace: dict[str, Any], name: str) -> None:
        self.path, self.namespace, self.name = path, namespace, name

    def get(self) -> object:
        return self.namespace.get(self.name, MISSING)

    def set(self, value: object) -> None:
        if value is MISSING:
            self.namespace.pop(self.name, None)
        else:
            self.namespace[self.name] = value


class LibraryAttribute(Slot):
    """An attribute of a library's class that the user's code sets."""

    __slots__ = ("owner",)

    def __init__(self, path: str, owner: type, name: str) -> None:
        super().__init__(path, {}, name)
        self.owner = owner

    def get(self) -> object:
        return vars(self.owner).get(self.name, MISSING)

    def set(self, value: object) -> None:
        if value is not MISSING:
            setattr(self.owner, self.name, value)
        elif self.name in vars(self.owner):
            delattr(self.owner, self.name)


class ClassAttributes:
    """The attributes of a class: data, functions, and descriptors, which may hold objects."""

    __slots__ = ("_all", "_chosen", "name", "owner", "path")

    def __init__(self, owner: type) -> None:
        self.owner, self.path, self.name = owner, owner.__qualname__, ""
        self._all: dict[str, object] = {}
        self._chosen: dict[str, object] = {}

    def get(self) -> dict[str, object]:
        """Return the attributes. Equal contents are one object, which must not be changed."""
        present = self._present()
        if not self._is_known(present):
            self._all = dict(present)
            self._chosen = self._choose()
        return self._chosen

    def set(self, values: dict[str, object]) -> None:
        for name in self.get().keys() - values.keys():
            type.__delattr__(self.owner, name)
        for name, value in values.items():
            if self._present().get(name, MISSING) is not value:
                type.__setattr__(self.owner, name, value)

    def _is_known(self, present: Mapping[str, object]) -> bool:
        known = self._all
        return len(present) == len(known) and all(map(is_, present.values(), known.values())) and [*present] == [*known]

    def _present(self) -> Mapping[str, object]:
        return vars(self.owner)

    def _choose(self) -> dict[str, object]:
        return {name: value for name, value in self._all.items() if self._counts(name, value)}

    def _counts(self, name: str, value: object) -> bool:
        if name == "_abc_impl" or name in _OF_PYTHON:
            return False
        return not isinstance(value, types.MemberDescriptorType | types.GetSetDescriptorType)


class LibraryNames(ClassAttributes):
    """Replacements of functions and classes in a library's module or class: the names whose values differ from when it
    was first met.

    Libraries also set names at run time: plain values, and functions wrapped under their own name. These are ignored.
    What the user's code sets by a literal name is inspected, whatever it is.
    """

    __slots__ = ("_first",)

    def __init__(self, owner: types.ModuleType | type) -> None:
        super().__init__(type(self))
        self.owner: Any = owner
        name = owner.__name__ if isinstance(owner, types.ModuleType) else f"{module_of(owner)}.{owner.__qualname__}"
        self.path = f"library {name}"
        self._first = self._all = dict(self._present())

    def set(self, values: dict[str, object]) -> None:
        present = self._present()
        for name in [*(self.get().keys() - values.keys()), *values]:
            value = values.get(name, self._first.get(name, MISSING))
            if value is MISSING and name in present:
                delattr(self.owner, name)
            elif value is not present.get(name, MISSING):
                setattr(self.owner, name, value)

    def _is_known(self, present: Mapping[str, object]) -> bool:
        """Compare by equality: four times as fast as identity for thousands of names, and code equals only itself."""
        try:
            return [*present.values()] == [*self._all.values()] and [*present] == [*self._all]
        except Exception:
            return False  # arrays, which cannot be compared in this way

    def _choose(self) -> dict[str, object]:
        first, now = self._first, self._all
        found = {name: now.get(name, MISSING) for name in {**first, **now}}
        return {name: value for name, value in found.items() if _is_put(name, first.get(name, MISSING), value)}


def _is_put(name: str, old: object, new: object) -> bool:
    """Return whether ``new`` was put in place of a library's function or class, or beside these, from outside."""
    if new is old or name in _OF_MODULES or name in _SET_BY_LIBRARIES:
        return False
    if not (old is MISSING or _is_code(old)):
        return False
    if is_users_code(type(new)):
        return True
    if isinstance(new, types.ModuleType):
        return False
    if any(map(is_users_code, (new, *functions_in(new)))):
        return True
    return old is not MISSING and getattr(new, "__name__", None) != name


_SET_BY_LIBRARIES = frozenset(("Storage",))
"""torch's default dtype decides which class this is."""


def _is_code(value: object) -> bool:
    return callable(value) or isinstance(value, staticmethod | classmethod | property)


@functools.cache
def library_names(owner: Any) -> LibraryNames:
    """Return the names of a library as of the first call in this process."""
    return LibraryNames(owner)


def libraries() -> Iterator[tuple[str, object]]:
    """Yield the libraries whose functions are replaced most often, regardless of by whom."""
    for name in ("torch", "torch.nn.functional", "numpy"):
        if name in sys.modules:
            names = library_names(sys.modules[name])
            yield names.path, names


class Globals(ClassAttributes):
    """All global names of a module, for code that may access any of them."""

    __slots__ = ("namespace",)

    def __init__(self, namespace: dict[str, Any]) -> None:
        super().__init__(type(self))
        self.namespace = namespace
        self.path = f"{namespace.get('__name__', '')}:globals()"

    def set(self, values: dict[str, object]) -> None:
        for name in self.get().keys() - values.keys():
            del self.namespace[name]
        self.namespace.update(values)

    def _present(self) -> Mapping[str, object]:
        return self.namespace

    def _counts(self, name: str, value: object) -> bool:
        special = name.startswith("__") and name.endswith("__")
        return not special and not isinstance(value, types.ModuleType)


Namespace = Slot | ClassAttributes | imports.Modules
_OF_PYTHON = frozenset(
    f"__{name}__"
    for name in (
        "annotations",
        "annotations_cache",
        "dataclass_fields",
        "dataclass_params",
        "orig_bases",
        "parameters",
        "slotnames",
    )
)
"""Attributes of classes that hold types, some of them created on access, or names, created on pickling."""


def reached_from(code: object) -> list[tuple[str, object]]:
    """Return path and object of all that a class, function or module of the user reaches, each once: names in
    namespaces, and functions that hold objects (a closure, defaults). O(code)."""
    found, functions = _walked(code)
    if isinstance(code, types.ModuleType):  # held as a value: its holder may set any of its names
        found[id(vars(code)), ""] = Globals(vars(code))
    holding = [
        (f"{function.__module__}:{function.__qualname__}", function)
        for function in functions
        if function.__closure__ or function.__defaults__ or function.__kwdefaults__ or vars(function)
    ]
    return sorted([*((space.path, space) for space in found.values()), *holding], key=lambda pair: pair[0])


def functions_reached(code: object) -> list[types.FunctionType]:
    """Return the user's functions that a class or function of the user leads to, including itself."""
    return _walked(code)[1]


def _walked(code: object) -> tuple[dict[tuple[int, str], Namespace], list[types.FunctionType]]:
    found: dict[tuple[int, str], Namespace] = {}
    functions: list[types.FunctionType] = []
    seen: set[int] = set()
    todo: list[object] = [code]
    while todo:
        thing = todo.pop()
        if id(thing) in seen:
            continue
        seen.add(id(thing))
        if isinstance(thing, type):
            if is_users_code(thing):
                found[id(thing), ""] = ClassAttributes(thing)
                todo += thing.__bases__
                for value in vars(thing).values():
                    todo += [value] if isinstance(value, types.FunctionType) else functions_in(value)
            else:
                _library(thing, found)
        elif isinstance(thing, types.FunctionType):
            todo.append(getattr(thing, "__wrapped__", None))
            if is_users_code(thing):
                functions.append(thing)
                for name in dict.fromkeys(names_in(thing.__code__)):
                    if name in thing.__globals__:
                        _global(name, thing.__globals__, found, todo)
                for name in stored_in(thing.__code__):
                    _global(name, thing.__globals__, found, todo)
                for cell in thing.__closure__ or ():
                    todo.append(_content(cell))
                _elsewhere(thing, found, todo)
        elif isinstance(thing, types.ModuleType):
            if of_user(thing.__name__):
                for name in list(vars(thing)):
                    _global(name, vars(thing), found, todo)
            else:
                _library(thing, found)
        elif isinstance(thing, types.MethodType):
            todo += (thing.__func__, type(thing.__self__))
        elif isinstance(thing, functools.partial):
            todo.append(thing.func)
        elif is_users_code(type(thing)):
            todo.append(type(thing))
    return found, functions


def _global(name: str, namespace: dict[str, Any], found: dict[tuple[int, str], Namespace], todo: list[object]) -> None:
    if name in _OF_MODULES:
        return
    value = namespace.get(name, MISSING)
    todo.append(value)
    if not isinstance(value, types.ModuleType | types.BuiltinFunctionType):
        slot = Slot(f"{namespace.get('__name__', '')}:{name}", namespace, name)
        found[id(namespace), name] = _once(namespace, slot)


def _library(owner: types.ModuleType | type, found: dict[tuple[int, str], Namespace]) -> None:
    path = owner.__name__ if isinstance(owner, types.ModuleType) else module_of(owner)
    alterable = isinstance(owner, types.ModuleType) or owner.__flags__ & HEAP
    if alterable and path.partition(".")[0] not in _WITHOUT_TRAINING:
        found[id(owner), ""] = library_names(owner)


_WITHOUT_TRAINING = frozenset(("sys", "builtins", "warnings", "logging", "threading", "signal", "hpstage", "optuna"))
"""Modules where Python's own machinery is attached, and those that run trainings: names in them may be replaced."""

_OF_MODULES = frozenset(
    f"__{name}__" for name in ("annotations", "builtins", "cached", "loader", "spec", "warningregistry")
)
"""Global names that Python sets in every module, and that lead to its own machinery."""


def _elsewhere(function: types.FunctionType, found: dict[tuple[int, str], Namespace], todo: list[object]) -> None:
    """Add names in modules that a function imports or sets attributes of, and all globals if it uses ``globals``."""
    names = {*names_in(function.__code__)}
    _by_text(function, found, todo)
    if "globals" in names:
        found[id(function.__globals__), ""] = Globals(function.__globals__)
    things = [value for name in names if _may_be_given(value := function.__globals__.get(name))]
    for name in names:
        things += [sys.modules[path] for path in (name, *(f"{owner}.{name}" for owner in names)) if path in sys.modules]
    stored = {*attributes_stored_in(function.__code__)}
    read = names | {*texts_in(function.__code__)} if names & _BY_TEXT else names
    for name in names - function.__globals__.keys():
        if _is_put_there(vars(builtins).get(name)):
            _global(name, vars(builtins), found, todo)
    seen: set[int] = set()
    while things:
        thing: Any = things.pop()
        if id(thing) in seen:
            continue
        seen.add(id(thing))
        if isinstance(thing, types.ModuleType):
            todo.append(thing)
            if not of_user(thing.__name__):
                inner = [value for name in names if _may_be_given(value := vars(thing).get(name))]
                things += [value for value in inner if stored or not isinstance(value, types.FunctionType)]
        elif is_users_code(thing):
            continue
        elif isinstance(thing, type):
            todo.append(thing)
        own = vars(thing)
        for name in stored | (read & own.keys()):
            value = own.get(name)
            if _is_put_there(value) and not (thing is sys and name in _OF_IMPORTS):
                todo.append(value)
            elif name not in stored or not (value is None or isinstance(value, _PLAIN)):
                continue  # a module, or an object of the library's
            # Nothing is asked of a module: torch.classes makes up what it does not have.
            is_module = isinstance(thing, types.ModuleType)
            path = f"{own['__name__']}:.{name}" if is_module else f"{module_of(thing)}:{thing.__qualname__}.{name}"
            if not isinstance(thing, type):
                found[id(own), name] = _once(own, Slot(path, own, name))
            elif thing.__flags__ & HEAP:
                found[id(thing), name] = _once(thing, LibraryAttribute(path, thing, name))


def _is_put_there(value: object) -> bool:
    """Return whether a name of a library's stands for what code can change without setting it: data, or the user's."""
    kind = type(value)
    values = [getattr(sys.modules.get(library), name, None) for library, name in _VALUES]
    return kind in _DATA or is_users_code(value) or is_users_code(kind) or kind in values


_DATA = frozenset((list, dict, set, bytearray, Counter, OrderedDict, defaultdict, deque))
_VALUES = (("torch", "Tensor"), ("torch.nn", "Parameter"), ("numpy", "ndarray"))
_OF_IMPORTS = frozenset(("modules", "path", "meta_path", "path_hooks", "path_importer_cache"))


def _by_text(function: types.FunctionType, found: dict[tuple[int, str], Namespace], todo: list[object]) -> None:
    """Add modules that a function imports by a string, and those that it takes from ``sys.modules``."""
    code, names = function.__code__, names_in(function.__code__)
    for text, complete in imports.imported(code, imports.import_functions(names, function.__globals__)):
        prefix = str(function.__globals__.get("__package__") or "") if text.startswith(".") else text
        if not complete:
            found[id(imports.Modules), prefix] = _modules(prefix)
        elif of_user(text.partition(".")[0]):
            todo.append(imports.load(text))
    if "modules" in names and "sys" in names:
        for text in texts_in(code):
            if text in sys.modules and text != "__main__":
                todo.append(sys.modules[text])
            elif text.isidentifier() and find_spec(text) is None:  # one that code would make by hand
                slot = Slot(f"sys:.modules[{text!r}]", sys.modules, text)
                found[id(sys.modules), text] = _once(sys.modules, slot)


@functools.cache
def _modules(prefix: str) -> imports.Modules:
    return imports.Modules(prefix)


_SLOTS: dict[tuple[int, str], Slot] = {}


def _once(owner: object, slot: Slot) -> Slot:
    """Return the only slot of a name, regardless of what reaches it, so that its path does not depend on the code met
    first. The slot keeps its owner alive, so that the owner's id stays unique."""
    return _SLOTS.setdefault((id(owner), slot.name), slot)


def _may_be_given(value: object) -> bool:
    """Return whether code can set attributes on ``value`` that other code sees."""
    return isinstance(value, types.ModuleType | types.FunctionType | type)


_PLAIN = (bool, int, float, str, bytes, types.FunctionType, types.BuiltinFunctionType)
_BY_TEXT = frozenset(("getattr", "setattr", "delattr", "vars", "__dict__"))
"""What takes the name of an attribute as a string."""


def _content(cell: types.CellType) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # not bound yet
        return None


@functools.lru_cache(_REMEMBERED)
def stored_in(code: types.CodeType) -> tuple[str, ...]:
    """Return names that a code object, or one nested in it, declares global and binds."""
    return _arguments(code, "STORE_GLOBAL")


@functools.lru_cache(_REMEMBERED)
def attributes_stored_in(code: types.CodeType) -> tuple[str, ...]:
    """Return names of attributes that a code object, or one nested in it, sets, including by ``setattr``."""
    texts: tuple[str, ...] = ()
    if not {"setattr", "delattr", "vars", "__dict__"}.isdisjoint(names_in(code)):
        texts = tuple(text for text in texts_in(code) if text.isidentifier())
    return _arguments(code, "STORE_ATTR") + texts


def texts_in(code: types.CodeType) -> Iterator[str]:
    """Yield string literals in a code object or one nested in it."""
    return (constant for part in _codes(code) for constant in part.co_consts if isinstance(constant, str))


def _arguments(code: types.CodeType, operation: str) -> tuple[str, ...]:
    return tuple(
        item.argval for part in _codes(code) for item in dis.get_instructions(part) if item.opname == operation
    )


@functools.lru_cache(_REMEMBERED)
def names_in(code: types.CodeType) -> tuple[str, ...]:
    """Return names that a code object, or one nested in it, loads or stores other than local variables."""
    return tuple(name for part in _codes(code) for name in part.co_names)


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)
