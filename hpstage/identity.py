"""Code identity: which code trains, as a digest that changes when the code does and not when a comment does.

What counts is what the training code reaches: the methods of a class and of its user-defined bases, and the functions,
classes and constants that they name, transitively through the user's own modules. The rest of a script (the search
space, the study) does not count. Of libraries the name and version of the package count. An object in a global name
that can be neither digested nor pickled counts by its class.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib
import sys
from collections.abc import Iterator, Mapping
from enum import Enum
from types import FunctionType, MethodType, ModuleType
from typing import Any

from hpstage.errors import StateError, UsageError
from hpstage.source import bytecode_text, came_by_value, globals_of, imports_of, is_users, syntax_tree, version_of

_FORMAT = "hpstage-code-1"
_NOT_STATE = ("hp", "version", "data_version")


def code_identity(obj: object) -> dict[str, str]:
    """The identity of a trainable's code: ``trainable`` (name), ``code``, and where there are any ``attributes`` and
    ``data version``.

    ``obj`` is the user's object or function, or what :func:`~hpstage.trainable.as_trainable` made of it. A stated
    ``version`` stands for the code and for attributes that have no digest; other attributes always count.

    Raises:
        UsageError: an attribute can be neither digested nor pickled, and no ``version`` is stated.
    """
    from hpstage.trainable import Adapter

    if isinstance(obj, Adapter):
        obj = obj.subject
    version, data_version = getattr(obj, "version", None), getattr(obj, "data_version", None)
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
    if data_version is not None:
        described["data version"] = str(data_version)
    if version is not None:
        described["code"] = f"version {version}"
    else:
        described["code"] = f"source {walk.digest(root)}"
    return described


def packages(obj: object) -> frozenset[str]:
    """The names, as imported, of the libraries that the code of a trainable or function names."""
    walk = _Walk()
    walk.digest(obj if _is_function(obj) else type(obj))
    return frozenset(walk.packages)


class _Walk:
    """Visits code and what it names; the digest is over the set of entries, whatever the order of visits."""

    def __init__(self) -> None:
        self.packages: set[str] = set()
        self._entries: set[str] = set()
        self._open: set[int] = set()  # objects being written, which may refer to themselves
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
                    "texts, lists, arrays, what can be pickled), or state the attribute version and change it when the "
                    "code or this changes"
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
        if isinstance(value, type) or _is_function(value):
            return self.refer(value)
        return _array(value) or self._reduced(value)

    def _reduced(self, value: Any) -> str | None:
        """An object by what pickling would keep of it: how it is made, and its attributes."""
        if id(value) in self._open:
            return f"within {type(value).__qualname__}"
        self._open.add(id(value))
        try:
            reduced = value.__reduce_ex__(4)
            if isinstance(reduced, str):
                return f"global {reduced}"
            make, arguments, *rest = reduced
            parts = [part if part is None or index == 0 else list(part) for index, part in enumerate(rest[:3])]
            return self._joined(
                f"{self.refer(type(value))} {self.refer(make)}", [self.value(arguments), self.value(parts)]
            )
        except Exception:  # whatever an object that cannot be pickled raises
            return None
        finally:
            self._open.discard(id(value))

    @staticmethod
    def _joined(kind: str, items: list[str | None] | list[str]) -> str | None:
        return None if None in items else f"{kind}({', '.join(map(str, items))})"

    def refer(self, target: object) -> str:
        """Visit a function, class or module that is named; returns the name that the entry goes by."""
        if isinstance(target, functools.partial):
            arguments = [self.refer(target.func), self.value(target.args), self.value(dict(target.keywords))]
            return f"partial({', '.join(map(str, arguments))})"
        if isinstance(target, MethodType) and not _is_librarys(target):
            return f"{self.refer(target.__self__)}.{self.refer(target.__func__)}"
        if isinstance(target, ModuleType):
            return self._library(target.__name__) if not is_users(target.__name__) else f"module {target.__name__}"
        if not isinstance(target, type) and not hasattr(target, "__qualname__"):
            return self._instance(target)
        module = getattr(target, "__module__", None) or "builtins"
        name = getattr(target, "__qualname__", type(target).__qualname__)
        if not (is_users(module) or came_by_value(module)):
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
        self.packages.add(package)
        if package != "hpstage":  # what of hpstage decides bits has a name of its own: the class of numerics
            self._entries.add(f"library {package} {version_of(package)}")
        return f"library {module}"

    def _instance(self, obj: object) -> str:
        """An object in a global name; without a digest, its class and those of its attributes that have one."""
        kind = type(obj)
        text = self.value(obj)
        if text is not None or not is_users(kind.__module__):
            return text or self.refer(kind)
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
            if member.startswith("__") and not _is_function(value):
                continue
            text = self.value(value)
            if text is not None:
                self._entries.add(f"{name}.{member} = {text}")

    def _function(self, name: str, function: Any) -> None:
        wrapped = getattr(function, "__wrapped__", None)
        if wrapped is not None:
            self._entries.add(f"{name} wraps {self.refer(wrapped)}")
        if not isinstance(function, FunctionType):
            return
        tree = syntax_tree(function)
        code = function.__code__
        self._entries.add(f"function {name}: {_hash(ast.dump(tree) if tree is not None else bytecode_text(code))}")
        defaults = self.value((function.__defaults__ or (), function.__kwdefaults__ or {}))
        self._entries.add(f"defaults of {name}: {defaults}")
        for cell_name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            try:
                content = cell.cell_contents
            except ValueError:
                continue  # not bound yet
            if cell_name != "__class__":
                self._named(name, cell_name, content)
        for path, content in globals_of(code, function.__globals__):
            self._named(name, path, content)
        for module in imports_of(tree, function.__globals__) if tree is not None else ():
            self._entries.add(f"{name} imports {self._imported(module)}")

    def _named(self, function: str, name: str, content: object) -> None:
        text = self.value(content) or self.refer(content)
        self._entries.add(f"{function} names {name}: {text}")

    def _imported(self, name: str) -> str:
        """What a function imports when it runs: a user's module or a member of one is visited, as if named."""
        module, _, member = name.partition(":")
        if not is_users(module):
            return self._library(module)
        content: object = importlib.import_module(module)
        if not member:
            return self.refer(content)
        content = getattr(content, member, None) or importlib.import_module(f"{module}.{member}")
        return self.value(content) or self.refer(content)


# Python's own bookkeeping; what else it keeps under names like __slotnames__, sometimes late, is no function.
_IGNORED_MEMBERS = frozenset(("_abc_impl", "__annotate__", "__annotate_func__", *_NOT_STATE))


def _is_librarys(method: MethodType) -> bool:
    """Whether it is a library's function, a method of an object of the library's own: ``random.shuffle``.

    The state of those generators is another in each process, and before each step it is keyed from the seed.
    """
    module = getattr(method.__func__, "__module__", None) or "builtins"
    library = None if is_users(module) else sys.modules.get(module)
    return library is not None and getattr(library, method.__name__, None) == method


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


def _array(value: Any) -> str | None:
    """A digest of a tensor or array, or ``None`` for what is none."""
    from hpstage.checkpoints.state_tree import digest

    try:
        return f"{type(value).__qualname__} {digest(value)}"
    except StateError:
        return None


def _hash(text: str) -> str:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
