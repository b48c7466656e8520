"""Code identity: which code trains, as a digest that changes when the code does and not when a comment does.

What counts is what the training code reaches: the methods of a class and of its user-defined bases, and the functions,
classes and constants that they name, transitively through the user's own modules. The rest of a script (the search
space, the study) does not count. Of libraries the name and version of the package count. An object in a global name
that has no digest (a logger) counts by its class.
"""

from __future__ import annotations

import ast
import dis
import functools
import hashlib
import importlib
import importlib.metadata
import importlib.util
import inspect
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from enum import Enum
from pathlib import Path
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from hpstage.errors import UsageError

_FORMAT = "hpstage-code-1"
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
_NOT_STATE = ("hp", "version", "data_version")


def code_identity(obj: object) -> dict[str, str]:
    """The identity of a trainable's code: ``trainable`` (name), ``code`` and, where there are any, ``attributes``.

    ``obj`` is the user's object or function, or what :func:`~hpstage.trainable.as_trainable` made of it. A stated
    ``version`` stands for the code and for attributes that have no digest; other attributes always count.

    Raises:
        UsageError: an attribute can be neither written as JSON nor digested, and no ``version`` is stated.
    """
    from hpstage.trainable import Adapter

    if isinstance(obj, Adapter):
        obj = obj.subject
    version = getattr(obj, "version", None)
    walk = _Walk()
    if _is_function(obj):
        described = {"trainable": getattr(obj, "__qualname__", type(obj).__name__)}
        root: object = obj
    else:
        described = {"trainable": type(obj).__qualname__}
        root = type(obj)
        attributes = walk.attributes(obj, strict=version is None)
        if attributes:
            described["attributes"] = _hash("\n".join(attributes))
    if version is not None:
        described["code"] = f"version {version}"
    else:
        described["code"] = f"source {walk.digest(root)}"
    return described


class _Walk:
    """Visits code and what it names; the digest is over the set of entries, whatever the order of visits."""

    def __init__(self) -> None:
        self._entries: set[str] = set()
        self._visited: dict[int, object] = {}  # holds what it has seen, so that ids stay its own

    def digest(self, root: object) -> str:
        """The digest of ``root`` and of all that it names."""
        return _hash("\n".join([_FORMAT, self.refer(root), *sorted(self._entries)]))

    def attributes(self, obj: object, *, strict: bool) -> list[str]:
        """``name=value`` of the instance's own attributes, sorted."""
        found = []
        for name, value in sorted(getattr(obj, "__dict__", {}).items()):
            if name in _NOT_STATE:
                continue
            text = self.value(value)
            if text is not None:
                found.append(f"{name}={text}")
            elif strict:
                raise UsageError(
                    f"{type(obj).__name__}.{name} is a {type(value).__qualname__}, which has no digest, so that it is "
                    "not known whether two runs train the same: make it in a method from plain values (numbers, "
                    "texts, lists, arrays), or state the attribute version and change it when the code or this changes"
                )
        return found

    def value(self, value: Any) -> str | None:
        """A value as text that is equal for equal values in every process; ``None`` if there is none."""
        if value is None or isinstance(value, bool | int | float | complex | str | bytes):
            return repr(value) if not isinstance(value, Enum) else f"{type(value).__qualname__}.{value.name}"
        if isinstance(value, list | tuple):
            return self._joined(type(value).__name__, [self.value(item) for item in value])
        if isinstance(value, set | frozenset):
            items = [self.value(item) for item in value]
            return None if None in items else self._joined("set", sorted(filter(None, items)))
        if isinstance(value, Mapping):
            pairs = [self._joined("", [self.value(key), self.value(item)]) for key, item in value.items()]
            return None if None in pairs else self._joined("dict", sorted(filter(None, pairs)))
        if isinstance(value, Enum):
            return f"{type(value).__qualname__}.{value.name}"
        if isinstance(value, Path):
            return f"path {str(value)!r}"
        if isinstance(value, type) or _is_function(value):
            return self.refer(value)
        if type(value).__module__ == "torch" and type(value).__name__ in ("dtype", "device"):
            return repr(value)
        return _array(value)

    @staticmethod
    def _joined(kind: str, items: list[str | None] | list[str]) -> str | None:
        return None if None in items else f"{kind}({', '.join(map(str, items))})"

    def refer(self, target: object) -> str:
        """Visit a function, class or module that is named; returns the name that the entry goes by."""
        if isinstance(target, functools.partial):
            arguments = [self.refer(target.func), self.value(target.args), self.value(dict(target.keywords))]
            return f"partial({', '.join(map(str, arguments))})"
        if isinstance(target, MethodType):
            return f"{self.refer(target.__self__)}.{self.refer(target.__func__)}"
        if isinstance(target, ModuleType):
            return self._library(target.__name__) if not _is_users(target.__name__) else f"module {target.__name__}"
        if not isinstance(target, type) and not hasattr(target, "__qualname__"):
            return self._instance(target)
        module = getattr(target, "__module__", None) or "builtins"
        name = getattr(target, "__qualname__", type(target).__qualname__)
        if not _is_users(module):
            self._library(module)
            return f"library {module}.{name}"
        if id(target) not in self._visited:
            self._visited[id(target)] = target
            if isinstance(target, type):
                self._class(name, target)
            else:
                self._function(name, target)
        return f"code {name}"

    def _library(self, module: str) -> str:
        package = module.partition(".")[0]
        self._entries.add(f"library {package} {_version(package)}")
        return f"library {module}"

    def _instance(self, obj: object) -> str:
        """An object in a global name: its class and those of its attributes that have a digest."""
        kind = type(obj)
        if not _is_users(kind.__module__):
            return self.value(obj) or self.refer(kind)
        if id(obj) in self._visited:
            return f"a {kind.__qualname__}"
        self._visited[id(obj)] = obj
        return f"{self.refer(kind)}({', '.join(self.attributes(obj, strict=False))})"

    def _class(self, name: str, cls: type) -> None:
        bases = [self.refer(base) for base in cls.__bases__]
        self._entries.add(f"class {name}({', '.join(bases)})")
        for member, value in sorted(vars(cls).items()):
            if member in _IGNORED_MEMBERS:
                continue
            for part in _functions_in(value):
                self._entries.add(f"{name}.{member}: {self.refer(part)}")
            text = self.value(value)
            if text is not None:
                self._entries.add(f"{name}.{member} = {text}")

    def _function(self, name: str, function: Any) -> None:
        wrapped = getattr(function, "__wrapped__", None)
        if wrapped is not None:
            self._entries.add(f"{name} wraps {self.refer(wrapped)}")
        if not isinstance(function, FunctionType):
            return
        tree = _tree(function)
        code = function.__code__
        self._entries.add(f"function {name}: {_hash(ast.dump(tree) if tree is not None else _code_text(code))}")
        defaults = self.value((function.__defaults__ or (), function.__kwdefaults__ or {}))
        self._entries.add(f"defaults of {name}: {defaults}")
        for cell_name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            try:
                content = cell.cell_contents
            except ValueError:
                continue  # not bound yet
            if cell_name != "__class__":
                self._named(name, cell_name, content)
        for path, content in _globals_of(code, function.__globals__):
            self._named(name, path, content)
        for module in _imports(tree, function.__globals__) if tree is not None else ():
            self._entries.add(f"{name} imports {self._imported(module)}")

    def _named(self, function: str, name: str, content: object) -> None:
        text = self.value(content) or self.refer(content)
        self._entries.add(f"{function} names {name}: {text}")

    def _imported(self, name: str) -> str:
        """What a function imports when it runs: a user's module or a member of one is visited, as if named."""
        module, _, member = name.partition(":")
        if not _is_users(module):
            return self._library(module)
        content: object = importlib.import_module(module)
        if not member:
            return self.refer(content)
        content = getattr(content, member, None) or importlib.import_module(f"{module}.{member}")
        return self.value(content) or self.refer(content)


_IGNORED_MEMBERS = frozenset(
    (
        *("__module__", "__qualname__", "__doc__", "__dict__", "__weakref__", "__annotations__", "__firstlineno__"),
        *("__static_attributes__", "__annotate_func__", "__annotations_cache__", "__abstractmethods__", "_abc_impl"),
        *("__parameters__", "__orig_bases__", "__hash__", "__match_args__", "__slots__", "__dataclass_fields__"),
        *_NOT_STATE,
    )
)


def _functions_in(member: Any) -> Iterator[Any]:
    """The functions behind a class member that is no plain function."""
    if isinstance(member, staticmethod | classmethod):
        yield member.__func__
    elif isinstance(member, property):
        yield from (part for part in (member.fget, member.fset, member.fdel) if part is not None)
    elif isinstance(member, functools.cached_property):
        yield member.func


def _is_function(obj: object) -> bool:
    return isinstance(obj, FunctionType | MethodType | functools.partial) or (
        callable(obj) and not isinstance(obj, type) and hasattr(obj, "__qualname__")
    )


@functools.cache
def _is_users(module: str) -> bool:
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


@functools.cache
def _version(package: str) -> str:
    """The version of an installed package, by the name it is imported under; without importing it."""
    if package in sys.stdlib_module_names:
        return f"{sys.version_info.major}.{sys.version_info.minor}"
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        names = importlib.metadata.packages_distributions().get(package, [])
        return ", ".join(f"{name} {importlib.metadata.version(name)}" for name in sorted(set(names)))


def _tree(function: FunctionType) -> ast.AST | None:
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


def _code_text(code: CodeType) -> str:
    """Bytecode, names and constants: no addresses, no line numbers, no order of a hash table."""
    return repr((code.co_code, code.co_names, code.co_varnames, [_constant_text(item) for item in code.co_consts]))


def _constant_text(constant: object) -> str:
    if isinstance(constant, CodeType):
        return _code_text(constant)
    if isinstance(constant, frozenset):
        return f"frozenset({sorted(map(_constant_text, constant))})"
    if isinstance(constant, tuple):
        return f"({', '.join(map(_constant_text, constant))})"
    return repr(constant)


def _globals_of(code: CodeType, names: Mapping[str, Any]) -> Iterator[tuple[str, object]]:
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
            yield from _globals_of(constant, names)


def _imports(tree: ast.AST, names: Mapping[str, Any]) -> Iterator[str]:
    """``module`` or ``module:member`` for each import statement inside a function."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            if node.level:
                module = importlib.util.resolve_name(module, names.get("__package__"))
            yield from (module if alias.name == "*" else f"{module}:{alias.name}" for alias in node.names)


def _array(value: Any) -> str | None:
    """A digest of a tensor or array, or ``None`` for what is none."""
    from hpstage.checkpoints.state_tree import digest
    from hpstage.errors import StateError

    try:
        return f"{type(value).__qualname__} {digest(value)}"
    except StateError:
        return None


def _hash(text: str) -> str:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
