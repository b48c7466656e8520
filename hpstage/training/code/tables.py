"""Tables in which libraries keep what is registered with them: environments, nodes of trees, functions by class.

A table is a dict, list or set that is bound to a name in a library's module or class. The library may call the user's
code in a table although no other code names it.
"""

from __future__ import annotations

import functools
import importlib
import re
import sys
import types
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from importlib.util import find_spec
from itertools import chain
from typing import Any, TypeVar, cast

from hpstage.training.code.attributes import own_of
from hpstage.training.code.owner import found_in, is_users, is_users_code
from hpstage.training.code.source import code_of

_WITHOUT_REGISTRIES = frozenset(
    (
        *("abc", "ast", "asyncio", "atexit", "builtins", "cloudpickle", "concurrent", "contextlib", "ctypes"),
        *("dataclasses", "dill", "doctest", "enum", "functools", "gc", "importlib", "inspect", "linecache"),
        *("multiprocessing", "pickle", "pkgutil", "pydoc", "tempfile", "traceback", "types", "typing"),
        *("typing_extensions", "unittest", "weakref"),
        *("IPython", "_pytest", "charset_normalizer", "coverage", "dask", "distributed", "fontTools"),
        *("hypothesis", "ipykernel", "joblib", "matplotlib", "pluggy", "pytest", "tornado", "traitlets", "xdist"),
        "zmq",
    )
)
"""Packages whose tables do not count: they are caches, or hold objects that observe a process or end with it."""
_OF_TORCH = ("torch.library", "torch._library", "torch._ops", "torch._dynamo", "torch._inductor", "torch._functorch")
"""Modules whose tables do not count: they hold compiled code, or operators, whose defining modules count instead."""
_FILLED = re.compile(
    r"__\w+__|_global_|_(member_names|member_map|value2member_map|unhashable_values)_|.*(cache|memo)", re.IGNORECASE
)
"""Names of tables that do not count here: Python makes them, training fills them, or they hold hooks (see patches)."""
ENTRY_POINT = re.compile(r"([^\W\d]\w*(?:\.\w+)*):([^\W\d]\w*(?:\.\w+)*)")
_DEPTH = 2
"""Depth to which an entry is searched: an object, and its dict of arguments."""
_PLAIN = frozenset((int, float, bool, complex, bytes, type(None), types.BuiltinFunctionType, types.ModuleType, range))
_PLAIN_OR_TEXT = _PLAIN | {str}
_LONG = 100
_CODE = frozenset((types.FunctionType, staticmethod, classmethod, property, functools.partial))

_T = TypeVar("_T")
Table = dict[Any, Any] | list[Any] | set[Any]
Among = Callable[[Iterable[tuple[Any, Any]]], Iterator[tuple[Any, Any]]]


def tables_among(module: str, names: Mapping[str, Any], own: frozenset[int]) -> list[tuple[str, Table]]:
    """Return the tables that are bound to names of a library's module or class.

    Args:
        module: the module's name.
        own: ids of the namespaces of libraries' modules, which are no tables.
    """
    if module.partition(".")[0] in _WITHOUT_REGISTRIES or module.startswith(_OF_TORCH):
        return []
    kinds = {kind for kind in _kinds(names.values()) if _is_of_tables(kind)}
    return [
        (name, value)
        for name, value in (listed(names.items()) if kinds else ())
        if type(value) in kinds and id(value) not in own and not _is_namespace(value) and not _FILLED.match(name)
    ]


def registered(
    module: str, tables: Iterable[tuple[str, Table]], among: Among, named: Callable[[str], object]
) -> Iterator[tuple[str, list[Any]]]:
    """Yield the entries of a module's tables that contain code or objects of the user's: the place of the entry, and a
    list of the entry and these objects.

    Args:
        module: the module's name. Only objects of its library are searched for attributes.
        tables: the tables, each after its name.
        among: yields those items of which the value, a function, class or other object, is the user's.
        named: returns the object that a string names, as :func:`code_named` does.
    """
    package = module.partition(".")[0]
    entries = [
        (name, key, entry)
        for name, table in tables
        for key, entry in _items(table)
        if type(key) not in _PLAIN_OR_TEXT or not _is_blank(entry)
    ]
    parts = [
        (number, part)
        for number, (_, key, entry) in enumerate(entries)
        for part in (*_classes_in(key), *_parts(entry, package, _DEPTH))
    ]
    found: dict[int, list[Any]] = {}
    for number, part in among(pair for pair in parts if type(pair[1]) is not str):
        if _is_code(part):
            found.setdefault(number, []).append(part)
    for number, text in parts:
        if type(text) is str and is_users_code(code := named(text)):
            found.setdefault(number, []).append(code)
    for number, users in found.items():
        name, key, entry = entries[number]
        if not any(map(_is_replaced, _classes_in(key))):
            yield f"{module}:{name}[{_written(key)}]", [entry, *users]


def listed(values: Iterable[_T]) -> list[_T]:
    """Return the values as of one moment: another thread may change their number."""
    while True:
        try:
            return [*values]
        except RuntimeError:  # another thread did
            continue


class Contents:
    """A snapshot of the contents of tables, which does not keep them alive: the values in them and in the tables among
    these values. For a long table of only numbers and strings, only its length is compared."""

    def __init__(self, tables: Iterable[Table]) -> None:
        self._long: list[Collection[Any]] = []
        self._views: list[Iterable[Any]] = []
        for table in tables:
            view = _view(table)
            if len(view) > _LONG and _is_plain(table):
                self._long.append(view)
                continue
            self._views.append(view)
            if any(map(_is_of_tables, _kinds(view))):
                self._views += (_view(value) for value in listed(view) if _is_table(value) and not _is_plain(value))
        self._before = self._now()

    def are_as_before(self) -> bool:
        return not (self._long or self._views) or self._now() == self._before

    def _now(self) -> list[int]:
        while True:
            try:
                return [*map(len, self._long), *map(id, chain.from_iterable(self._views))]
            except RuntimeError:  # another thread has changed the size of one
                continue


def _kinds(values: Iterable[object]) -> set[type]:
    return set(map(type, listed(values)))


def _is_of_tables(kind: type) -> bool:
    """Return whether the content of such objects is known without calling a method of their class."""
    return kind is list or kind is set or issubclass(kind, dict)


def _is_table(value: object) -> bool:
    return _is_of_tables(type(value)) and not _is_namespace(value)


def _is_namespace(value: object) -> bool:
    """Return whether a value is the namespace of a module."""
    return isinstance(value, dict) and dict.__contains__(value, "__builtins__")


def _is_plain(table: Table) -> bool:
    """Return whether a table cannot contain anything of the user's."""
    kinds = _kinds(_view(table))
    if not kinds <= _PLAIN_OR_TEXT or not kinds:
        return False
    if isinstance(table, dict) and not _kinds(dict.keys(table)) <= _PLAIN_OR_TEXT:
        return False
    return str not in kinds or all(map(_is_blank, listed(_view(table))))


def _view(table: Table) -> Collection[Any]:
    return dict.values(table) if isinstance(table, dict) else table


def _items(table: Table) -> list[tuple[Any, Any]]:
    return listed(dict.items(table)) if isinstance(table, dict) else [(None, value) for value in listed(table)]


def _parts(value: Any, package: str, depth: int) -> Iterator[Any]:
    """Yield the objects in an entry that may be the user's, and the strings in it."""
    kind = type(value)
    if kind is types.FunctionType or kind is str or kind in _CODE or issubclass(kind, type):
        yield value
    elif kind is types.MethodType:
        yield value.__func__
    elif issubclass(kind, dict | list | tuple | set | frozenset):
        if depth and not _is_namespace(value):
            for item in listed(_view(value)):
                if not _is_blank(item):
                    yield from _parts(item, package, depth - 1)
    elif kind.__module__.partition(".")[0] == package:
        if depth and kind.__module__ != "torch._ops":
            for item in own_of(value).values():
                if not _is_blank(item):
                    yield from _parts(item, package, depth - 1)
    else:
        yield value


def _is_blank(value: object) -> bool:
    """Return whether a value contains nothing of the user's: a number, or a string that names no code."""
    kind = type(value)
    return kind in _PLAIN or (kind is str and ":" not in cast(str, value))


def _classes_in(key: object) -> list[type]:
    """Return the classes in a key. Exceptions are left out: they do not train, and tblib registers all of them on
    import."""
    parts = key if isinstance(key, tuple) else (key,)
    return [part for part in parts if issubclass(type(part), type) and not issubclass(part, BaseException)]


def _is_code(part: Any) -> bool:
    """Return whether a part is code, or an object whose ``__call__`` is the user's. (The one of a model is torch's.)"""
    kind = type(part)
    if kind in _CODE or issubclass(kind, type):
        return True
    return any("__call__" in vars(base) and is_users_code(base) for base in kind.__mro__)


def _is_replaced(cls: type) -> bool:
    """Return whether another class now has the name of this one, as after a notebook cell has run again."""
    now = found_in(sys.modules.get(cls.__module__), cls.__qualname__)
    return now is not None and now is not cls


def code_named(text: str) -> object:
    """Return the object that ``module:name`` names if the module is the user's and its source contains the name."""
    written = ENTRY_POINT.fullmatch(text)
    if written is None or not is_users(written[1]):
        return None
    module, path = written.groups()
    try:
        if module not in sys.modules:
            code = code_of(find_spec(module))
            if code is None or path.partition(".")[0] not in code.co_names:
                return None
        return found_in(importlib.import_module(module), path)
    except Exception:  # the library raises this error if it imports the module
        return None


def _written(key: object) -> str:
    """Return a key as text that is the same in every process."""
    if isinstance(key, tuple):
        return ", ".join(map(_written, key))
    if isinstance(key, type):
        return f"{key.__module__}.{key.__qualname__}"
    return repr(key) if type(key) in (str, int, bool, float) else ""
