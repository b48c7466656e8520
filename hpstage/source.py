"""What can be read off code: where a module comes from, a function's syntax, and what it names and imports."""

from __future__ import annotations

import ast
import dis
import functools
import importlib.metadata
import importlib.util
import inspect
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

_HERE = Path(__file__).parent
# algos and cluster may stand beside the package; links in it lead there.
_LIBRARIES = tuple(
    Path(path).resolve()
    for path in (
        sysconfig.get_path("stdlib"),
        sysconfig.get_path("platstdlib"),
        _HERE,
        _HERE / "algos",
        _HERE / "cluster",
    )
)


@functools.cache
def is_users(module: str) -> bool:
    """Whether a module is the user's own: neither of the standard library, nor installed, nor of hpstage."""
    package = module.partition(".")[0]
    if package == "__main__":
        return True
    if package in sys.stdlib_module_names:
        return False
    try:
        # Of the package alone: for a module inside it, the package would be imported.
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        return package in sys.modules  # made by hand
    if spec is None:
        return False
    places = [spec.origin] if spec.has_location else list(spec.submodule_search_locations or ())
    file = Path(places[0] or "").resolve() if places else Path()
    installed = {"site-packages", "dist-packages"} & set(file.parts)
    return bool(places) and not installed and not any(file.is_relative_to(library) for library in _LIBRARIES)


def came_by_value(module: str) -> bool:
    """Whether code of this module that is here was sent along, as a script's to a worker: there is no such module."""
    package = module.partition(".")[0]
    return package not in sys.modules and importlib.util.find_spec(package) is None


@functools.cache
def version_of(package: str) -> str:
    """The version of an installed package, by the name it is imported under; without importing it."""
    if package in sys.stdlib_module_names:
        return f"{sys.version_info.major}.{sys.version_info.minor}"
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        names = importlib.metadata.packages_distributions().get(package, [])
        return ", ".join(f"{name} {importlib.metadata.version(name)}" for name in sorted(set(names)))


def syntax_tree(function: FunctionType) -> ast.AST | None:
    """The function's syntax tree without docstrings; ``None`` for lambdas and where there is no source."""
    if function.__name__ == "<lambda>":
        return None
    try:
        # Of the code, not of the function: that would look through functools.wraps.
        source = inspect.getsource(function.__code__)
        # Not dedented: a text over several lines may begin left of the function.
        indented = source[0].isspace()
        tree = ast.parse(f"if True:\n{source}" if indented else source)
    except (OSError, TypeError, SyntaxError):
        return None
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
            and ast.get_docstring(node) is not None
        ):
            node.body = node.body[1:] or [ast.Pass()]
    return tree


def bytecode_text(code: CodeType) -> str:
    """Bytecode, names and constants: no addresses, no line numbers, no order of a hash table."""
    return repr((code.co_code, code.co_names, code.co_varnames, [_constant_text(item) for item in code.co_consts]))


def _constant_text(constant: object) -> str:
    if isinstance(constant, CodeType):
        return bytecode_text(constant)
    if isinstance(constant, frozenset):
        return f"frozenset({sorted(map(_constant_text, constant))})"
    if isinstance(constant, tuple):
        return f"({', '.join(map(_constant_text, constant))})"
    return repr(constant)


def globals_of(code: CodeType, names: Mapping[str, Any]) -> Iterator[tuple[str, object]]:
    """Path and content of each global that the code loads; through modules on to the member that it takes."""
    instructions = [item for item in dis.get_instructions(code) if item.opname not in ("CACHE", "EXTENDED_ARG")]
    for index, instruction in enumerate(instructions):
        if instruction.opname not in ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_CLASSDEREF") or instruction.argval not in names:
            continue
        path, content = instruction.argval, names[instruction.argval]
        for following in instructions[index + 1 :]:
            taken = following.opname in ("LOAD_ATTR", "LOAD_METHOD") and isinstance(content, ModuleType)
            if not taken or not hasattr(content, following.argval):
                break
            path, content = f"{path}.{following.argval}", getattr(content, following.argval)
        yield path, content
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from globals_of(constant, names)


def imports_of(tree: ast.AST, names: Mapping[str, Any]) -> Iterator[str]:
    """``module`` or ``module:member`` for each import statement inside a function."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            if node.level:
                module = importlib.util.resolve_name(module, names.get("__package__"))
            yield from (module if alias.name == "*" else f"{module}:{alias.name}" for alias in node.names)
