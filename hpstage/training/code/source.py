"""Reads the source of modules, which may have been edited since their import, and the versions of packages."""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import os
import pkgutil
import re
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from importlib.machinery import FileFinder, ModuleSpec, PathFinder
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

from hpstage.errors import UsageError
from hpstage.training.code.bytecode import digest, inner
from hpstage.training.code.owner import functions_in

ABSENT = "absent"


@functools.cache
def version_of(package: str) -> str:
    """Return the version of a package by its import name, or :data:`ABSENT`, without importing it."""
    if package in sys.stdlib_module_names:
        return f"{sys.version_info.major}.{sys.version_info.minor}"
    names = distributions_of(package)
    if names == (package,):
        return importlib.metadata.version(package)
    if not names and package not in sys.modules and importlib.util.find_spec(package) is None:
        return ABSENT
    return ", ".join(f"{name} {importlib.metadata.version(name)}" for name in names)


@functools.cache
def distributions_of(package: str) -> tuple[str, ...]:
    """Return the installed distributions that provide a package, by its import name: often one of the same name."""
    if package in sys.stdlib_module_names:
        return ()
    try:
        importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return tuple(sorted({found.name for found in importlib.metadata.distributions() if _provides(found, package)}))
    return (package,)


def _provides(distribution: importlib.metadata.Distribution, package: str) -> bool:
    """Return whether a distribution provides a package. ``importlib.metadata.packages_distributions()`` would look at
    every file of every distribution, which takes most of a second."""
    if top_level := distribution.read_text("top_level.txt"):
        return package in top_level.split()
    record = distribution.read_text("RECORD")
    if record is None:
        return any(file.parts[0] == package for file in distribution.files or ())
    return re.search(rf'^"?{re.escape(package)}(/|(\.[^/,\n]+)?\.(py|so|pyd)"?,)', record, re.MULTILINE) is not None


def code_of(spec: ModuleSpec | None) -> CodeType | None:
    """Return a module's code, compiled from the present content of its file; ``None`` if there is none.

    The cached bytecode is not used: Python decides with a resolution of one second whether it is stale.
    """
    if spec is None or spec.origin is None or not spec.has_location:
        return None
    if spec.origin.endswith(".py"):
        try:
            return _compiled(Path(spec.origin).read_bytes(), spec.origin)
        except (OSError, SyntaxError, ValueError):
            return None  # removed, or in the midst of being edited
    get_code = getattr(spec.loader, "get_code", None)
    code: CodeType | None = get_code(spec.name) if get_code is not None else None
    return code


def compiled(source: Any, path: str, flags: int = 0) -> Any:
    """Compile the source of a module, or its tree. Warnings are suppressed: they may be set to raise."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return compile(source, path, "exec", flags, dont_inherit=True)


_compiled: Callable[[bytes, str], CodeType] = functools.lru_cache(64)(compiled)


def submodules_of(name: str, places: Iterable[str]) -> Iterator[ModuleSpec]:
    """Yield the specs of the modules inside a package at any depth, imported or not, without importing any. If ``name``
    is empty, ``places`` are folders with modules and packages, as in ``sys.path``."""
    for found in pkgutil.iter_modules(list(places)):
        if not isinstance(found.module_finder, FileFinder):
            continue
        spec = found.module_finder.find_spec(f"{name}.{found.name}" if name else found.name)
        if spec is not None:
            yield spec
            yield from submodules_of(spec.name, spec.submodule_search_locations or ())


def source_at(path: str) -> str:
    """Return the source file from which a cached file of bytecode was compiled; other paths unchanged."""
    try:
        source = importlib.util.source_from_cache(path)
    except ValueError:
        return path
    return source if os.path.exists(source) else path


def spec_of(name: str) -> ModuleSpec | None:
    """Return the spec of a module on the path, without importing the packages that it is in."""
    spec, places = None, None
    for part in beginnings(name):
        spec = PathFinder.find_spec(part, places)
        if spec is None:
            return None
        places = list(spec.submodule_search_locations or ())
    return spec


def beginnings(path: str) -> list[str]:
    """Return a dotted path and the paths of all packages above it: ``a`` and ``a.b`` for ``a.b``."""
    parts = path.split(".")
    return [".".join(parts[:count]) for count in range(1, len(parts) + 1)]


def name_at(path: str, folders: Iterable[str]) -> str:
    """Return the name by which the source file ``path`` was imported from one of these folders; empty if the module was
    loaded by its path."""
    for folder in map(os.path.abspath, folders):
        if path.startswith(f"{folder}{os.sep}"):
            name = path[len(folder) + 1 :].removesuffix(".py").removesuffix(f"{os.sep}__init__").replace(os.sep, ".")
            spec = spec_of(name) if name in sys.modules else None
            if spec is not None and spec.origin is not None and os.path.abspath(spec.origin) == path:
                return name
    return ""


def as_written(function: FunctionType) -> CodeType:
    """Return the function's code without pytest's rewriting of assertions."""
    module = sys.modules.get(function.__module__)
    if module is None or not is_rewritten(module):
        return function.__code__
    loaded = function.__code__
    codes = _written(module.__name__).get((loaded.co_qualname, loaded.co_firstlineno), [])
    if digest(loaded) in map(digest, codes) or not codes:
        return loaded
    return codes[0]


@functools.cache
def _written(module: str) -> dict[tuple[str, int], list[CodeType]]:
    written: dict[tuple[str, int], list[CodeType]] = {}
    code = code_of(sys.modules[module].__spec__)
    for part in inner(code) if code is not None else ():
        written.setdefault((part.co_qualname, part.co_firstlineno), []).append(part)
    return written


def is_rewritten(module: ModuleType) -> bool:
    """Return whether pytest has rewritten the module's assertions, so that it differs from its source."""
    return type(getattr(module, "__loader__", None)).__name__ == "AssertionRewritingHook"


def see_as_written(module: ModuleType, code: CodeType) -> None:
    """Check that the functions of a module are those of its source.

    Args:
        code: compiled from the source as it is now.

    Raises:
        UsageError: the file was edited after it was imported.
    """
    if is_rewritten(module):
        return
    written = {digest(part) for part in inner(code)}
    for function in _functions_of(module):
        if function.__code__.co_filename == module.__file__ and digest(function.__code__) not in written:
            raise UsageError(
                f"{module.__name__}.{function.__qualname__} differs from its source: {module.__file__} was edited "
                f"after it was imported. Restart this process (the notebook's kernel, the workers), or reload the "
                f"module (importlib.reload)"
            )


def _functions_of(module: ModuleType) -> Iterator[FunctionType]:
    for value in list(vars(module).values()):
        if getattr(value, "__module__", None) != module.__name__:
            continue
        members = vars(value).values() if isinstance(value, type) else [value]
        for member in members:
            for part in (member, *functions_in(member)):
                function = part
                while hasattr(function, "__wrapped__"):
                    function = function.__wrapped__
                if isinstance(function, FunctionType) and function.__module__ == module.__name__:
                    yield function
