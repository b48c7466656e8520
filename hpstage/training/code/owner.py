"""Decides whether code is the user's or a library's: by where its module is installed. Wrappers copy the names of
modules; for them, the module counts whose globals they use."""

from __future__ import annotations

import functools
import importlib.util
import inspect
import os
import re
import sys
import sysconfig
import types
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

_T = TypeVar("_T")
_REMEMBERED = 4096
HEAP = 1 << 9
"""Flag of classes written in Python or otherwise created at run time. Code can set attributes on them."""
_HERE = Path(__file__).parents[2]  # the package
_WORKLOADS = "hpstage.workloads"
# The folders algos and cluster may be next to the package and linked into it.
_LIBRARIES = tuple(
    Path(path).resolve()
    for path in (
        sysconfig.get_path("stdlib"),
        sysconfig.get_path("platstdlib"),
        sysconfig.get_path("scripts"),  # on the path of commands that are started from there
        _HERE,
        _HERE / "algos",
        _HERE / "cluster",
    )
)
_OF_PYTHON = tuple(f"{sysconfig.get_path(name)}{os.sep}" for name in ("stdlib", "platstdlib"))


def by_type(function: Callable[[Any], _T]) -> Callable[[Any], _T]:
    """Cache a function's results for the types of its latest calls; a result may keep its type alive. (mypy does not
    consider types hashable, as ``functools.lru_cache`` requires.)"""
    ask: Callable[[Any], _T] = functools.lru_cache(_REMEMBERED)(function)
    return ask


def module_of(obj: object) -> str:
    """Return the module name of a class or function: ``__main__`` also for a main script that multiprocessing has
    imported under another name. A metaclass in C may have a descriptor as ``__module__``."""
    found = getattr(obj, "__module__", None)
    return as_run(found) if isinstance(found, str) else "builtins"


@by_type
def package_of(kind: Any) -> str:
    """Return the package that a class belongs to, or the part of a large one: ``torch.utils``."""
    return ".".join(module_of(kind).split(".")[:2])


def as_run(module: str) -> str:
    """Return the name that a module had in the process that was started with it."""
    return "__main__" if module == "__mp_main__" else module


def name_of(code: Any) -> str:
    """Return the qualified name of a class or function, without the function in which it was defined: classes lose that
    part when they are sent by value."""
    name = getattr(code, "__qualname__", None)
    return name.rpartition("<locals>.")[2] if isinstance(name, str) else type(code).__qualname__


def has_name(obj: object) -> bool:
    """Return whether a class, function or other object has a qualified name. No ``__getattr__`` is called: that of a
    proxy may make up any name."""
    if not _answers_in_python(type(obj)):
        return hasattr(obj, "__qualname__")
    return isinstance(obj, type) or isinstance(inspect.getattr_static(obj, "__qualname__", None), str)


@by_type
def _answers_in_python(kind: Any) -> bool:
    names = ("__getattr__", "__getattribute__")
    return any(isinstance(vars(base).get(name), types.FunctionType) for base in kind.__mro__ for name in names)


def bound_to(method: object) -> object:
    """Return the object that a method written in C is called on, ``TABLE`` of ``TABLE.get``; ``None`` for a function,
    and for a method of a library's class."""
    if not isinstance(method, types.BuiltinFunctionType | types.MethodWrapperType):
        return None
    owner = method.__self__
    of_library = isinstance(owner, types.ModuleType) or (isinstance(owner, type) and not is_users_code(owner))
    return None if of_library or type(owner).__name__.startswith(_OF_FUNCTIONS) else owner


_OF_FUNCTIONS = "PyCapsule", "pybind11_detail_function_record"
"""Types of the objects to which functions made by pybind11 are bound."""


@functools.cache
def is_users(module: str) -> bool:
    """Return whether a module is the user's: not of the standard library, not installed and not of hpstage.

    The reference workloads count as the user's: their code decides training, and may change in the next release. They
    are known by name: neither where they are installed nor whether they are imported may change the answer.
    """
    package = module.partition(".")[0]
    if package == "__main__" or f"{module}.".startswith(f"{_WORKLOADS}."):
        return True
    if package.startswith(_OF_CYTHON):
        return False
    of_python = package in sys.stdlib_module_names
    try:
        # Look for the package: looking for a module inside it would import the package.
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        return package in sys.modules and not of_python  # created by hand
    if spec is None:
        return False
    places = [spec.origin] if spec.has_location else list(spec.submodule_search_locations or ())
    if not places or not places[0] or (of_python and not os.path.exists(places[0])):  # Python's may be in a zip file
        return False
    return is_users_file(str(places[0]))  # a folder of the user's may be named `code`


def is_users_file(path: str) -> bool:
    """Return whether a module or package at this path is the user's."""
    if _INSTALLED.search(path) or (path.startswith(_OF_PYTHON) and os.pardir not in path):
        return False  # without following links, which takes a tenth of a millisecond
    file = Path(path).resolve()
    if _INSTALLED.search(str(file)):
        return False
    return not any(file.is_relative_to(library) for library in _LIBRARIES) and not _is_installed(Path(path))


def _is_installed(file: Path) -> bool:
    """Return whether an installer has put a module or package where it is, as ``pip install --target`` does."""
    package = file.parent if file.name.startswith("__init__.") else file
    return any(package.parent.glob("*.dist-info"))


_OF_CYTHON = "_cython_"
"""Beginning of the name of a module without a file in which Cython keeps the types that all its code shares."""
_INSTALLED = re.compile(r"[/\\](site|dist)-packages[/\\]")


def came_by_value(module: str) -> bool:
    """Return whether code of this module was sent by value, as a script's is to a worker: the module does not exist
    here."""
    package = module.partition(".")[0]
    if package.startswith(_OF_NAMED_TUPLES):
        return False
    return package not in sys.modules and importlib.util.find_spec(package) is None


_OF_NAMED_TUPLES = "namedtuple_"
"""Beginning of the name that Python gives to the module of a named tuple's constructor."""


@functools.cache
def of_user(module: str | None) -> bool:
    """Return whether a module is the user's, present here or only where its code was sent from."""
    return module is not None and (is_users(module) or came_by_value(module))


def is_users_code(value: object) -> bool:
    """Return whether a function, method or class is the user's, even if it bears the name of a library's function that
    it wraps, or was made by a library for the user (``type()``, ``exec``, ``make_dataclass``). Other values are not
    code."""
    if isinstance(value, types.MethodType):
        value = value.__func__
    if isinstance(value, types.FunctionType):
        return of_user(module_of(value)) or _is_users_function(value)
    if isinstance(value, type):
        key = id(value)  # a metaclass may define equality
        known = _CLASSES.get(key)
        if known is None:
            known = _CLASSES[key] = weakref.ref(value, lambda _: _CLASSES.pop(key, None)), _is_users_class(value)
        return known[1]
    return False


_CLASSES: dict[int, tuple[weakref.ref[type], bool]] = {}
"""Results by the id of the class, while the class exists."""


def _is_users_function(function: types.FunctionType) -> bool:
    """Return whether a function is the user's, by the module whose globals it uses. A function compiled by ``exec`` has
    no module; it is the user's unless a loaded module contains it. The function's file does not count: for code sent to
    another process, it is unknown."""
    name = function.__globals__.get("__name__")
    return of_user(name) if isinstance(name, str) else not _is_found(function)


def _is_users_class(cls: type) -> bool:
    """Return whether a class belongs to a module of the user's, or was made from parts of the user's by a call (of
    ``type``, ``make_dataclass``). Such a class names the module in which ``type`` was called, but this module does not
    contain it."""
    if is_users(module_of(cls)):
        return True
    members = list(vars(cls).values())
    if not cls.__flags__ & HEAP or any(isinstance(member, _OF_C) for member in members) or _is_found(cls):
        return False
    if came_by_value(module_of(cls)) or any(map(is_users_code, cls.__bases__)):
        return True
    parts = [part for member in members for part in (member, *functions_in(member))]
    if any(map(is_users_code, parts)):
        return True
    names = [part.__code__.co_qualname for part in parts if isinstance(part, types.FunctionType)]
    written = "<locals>" in cls.__qualname__ or any(name.startswith(f"{cls.__qualname__}.") for name in names)
    return not written and cls.__bases__ == (object,)


_OF_C = (types.MethodDescriptorType, types.WrapperDescriptorType, types.BuiltinFunctionType)


def _is_found(code: types.FunctionType | type) -> bool:
    """Return whether a loaded module contains this function or class under its name."""
    return found_in(sys.modules.get(module_of(code)), code.__qualname__) is code


def found_in(owner: object, path: str) -> object:
    """Return the object that a module has under a qualified name, else ``None``. No code of the user's is called."""
    for part in path.split("."):
        owner = vars(owner).get(part) if isinstance(owner, types.ModuleType | type) else None
    return owner


def classes_below(base: type) -> list[type]:
    """Return the subclasses of a class at any depth, each once. By ids: a metaclass may define equality."""
    found: dict[int, type] = {}
    todo = [base]
    while todo:
        below: list[type] = type.__subclasses__(todo.pop())
        new = {id(kind): kind for kind in below if id(kind) not in found}
        found |= new
        todo += new.values()
    return list(found.values())


def functions_in(member: object) -> Iterator[Any]:
    """Yield the functions behind a class member that is not a function itself."""
    return (part for _, part in parts_called(member))


def parts_called(member: object) -> Iterator[tuple[str, Any]]:
    """Yield the functions that a class member wraps, such as a property's, each after the attribute that holds it."""
    names: tuple[str, ...] = ()
    if isinstance(member, staticmethod | classmethod):
        names = ("__func__",)
    elif isinstance(member, property):
        names = "fget", "fset", "fdel"
    elif isinstance(member, functools.cached_property | functools.partialmethod):
        names = ("func",)
    for name in names:
        part = getattr(member, name, None)
        if part is not None:
            yield name, part
