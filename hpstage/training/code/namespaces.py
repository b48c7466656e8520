"""Namespaces whose names training may rebind: globals of modules, attributes of classes, and names of libraries."""

from __future__ import annotations

import functools
import inspect
import re
import sys
import types
from collections.abc import Collection, Iterator, Mapping
from operator import is_
from typing import Any

from hpstage.training.code.owner import functions_in, is_users_code, module_of

MISSING = object()
"""The value of an unbound name."""


class Slot:
    """A global name of a module."""

    __slots__ = ("__weakref__", "name", "namespace", "path")

    def __init__(self, path: str, namespace: dict[str, Any], name: str) -> None:
        self.path, self.namespace, self.name = path, namespace, name

    def get(self) -> object:
        return self.namespace.get(self.name, MISSING)

    def set(self, value: object) -> None:
        if value is MISSING:
            self.namespace.pop(self.name, None)
        else:
            self.namespace[self.name] = value


_OF_TYPE: dict[str, Any] = {name: vars(type)[name] for name in ("__bases__", "__name__", "__qualname__")}
"""Attributes of classes that code can set but that are not in ``__dict__``, with the descriptors that read them."""


class LibraryAttribute(Slot):
    """An attribute of a library's class that the user's code sets."""

    __slots__ = ("owner",)

    def __init__(self, path: str, owner: type, name: str) -> None:
        super().__init__(path, {}, name)
        self.owner = owner

    def get(self) -> object:
        of_type = _OF_TYPE.get(self.name)
        return vars(self.owner).get(self.name, MISSING) if of_type is None else of_type.__get__(self.owner)

    def set(self, value: object) -> None:
        if value is not MISSING:
            setattr(self.owner, self.name, value)
        elif self.name in vars(self.owner):
            delattr(self.owner, self.name)


class Accessed(Slot):
    """A value in a library's module that has no Python name, but a function ``set...`` and its counterpart ``get...``,
    such as the timeout of ``socket.setdefaulttimeout``. It is a plain value, or a tuple or dict of plain values."""

    __slots__ = ("_get", "_module", "_set")

    def __init__(self, module: types.ModuleType, name: str) -> None:
        super().__init__(f"{module.__name__}:.{name}()", vars(module), name)
        self._module = module
        self._get, self._set = self.namespace[_getter_of(name)], self.namespace[name]

    def get(self) -> object:
        value = self._get()
        return tuple(value.items()) if type(value) is dict else value

    def set(self, value: Any) -> None:
        if type(self._get()) is dict:
            self._set(**dict(value))
        elif type(value) is tuple:
            self._set(*value)
        else:
            self._set(value)
        if self.get() != value:
            raise ValueError(f"{self.path} has not set {value!r}")


def accessed(module: types.ModuleType, name: str) -> Accessed | None:
    """Return the value that a library's function of this name sets; ``None`` if the value cannot be read."""
    functions = [vars(module).get(of) for of in (name, _getter_of(name))]
    if not all(map(callable, functions)) or module.__name__.partition(".")[0] in _WITH_SETTINGS:
        return None
    if _parameters(functions[1]):
        return None
    found = Accessed(module, name)
    try:
        return found if _is_plain(found.get()) else None
    except Exception:  # the getter needs arguments, or there is no value yet
        return None


_WITH_SETTINGS = frozenset(("torch", "jax", "random", "hpstage"))
"""Libraries whose settings and generators are inspected by other means."""
SETTER = re.compile(r"set_?[A-Za-z]\w*")


def _parameters(function: Any) -> Collection[str]:
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):  # a function in C without a signature
        return ()


def _getter_of(name: str) -> str:
    return f"g{name[1:]}"


def _is_plain(value: object) -> bool:
    if type(value) is tuple:
        return all(map(_is_plain, value))
    return value is None or type(value) in (bool, int, float, str, bytes)


_OF_ANY = frozenset(
    (
        "_abc_impl",
        "__pydantic_core_schema__",  # with the id() of its class
        "__pydantic_serializer__",
        "__pydantic_setattr_handlers__",
        "__pydantic_validator__",
    )
)
"""Attributes that libraries store in a class and that follow from its other attributes."""


class ClassAttributes:
    """The attributes of a class: data, functions, and descriptors, which may hold objects; its bases and its name."""

    __slots__ = ("_all", "_chosen", "_typed", "name", "owner", "path")

    def __init__(self, owner: type) -> None:
        self.owner, self.path, self.name = owner, owner.__qualname__, ""
        self._all: dict[str, object] = {}
        self._typed: tuple[object, ...] = ()
        self._chosen: dict[str, object] = {}

    def get(self) -> dict[str, object]:
        """Return the attributes: the same dict until one of them changes. Callers must not change it."""
        present, typed = self._present(), self._of_type()
        if not (self._is_known(present) and len(typed) == len(self._typed) and all(map(is_, typed, self._typed))):
            self._all, self._typed = dict(present), typed
            self._chosen = self._choose()
        return self._chosen

    def set(self, values: dict[str, object]) -> None:
        for name in self.get().keys() - values.keys() - _OF_TYPE.keys():
            type.__delattr__(self.owner, name)
        for name, value in values.items():
            present = self._present().get(name, MISSING)
            if name in _OF_TYPE:
                present = _OF_TYPE[name].__get__(self.owner)
                if type(value) is tuple and type(present) is tuple and [*map(id, value)] == [*map(id, present)]:
                    continue  # Python may refuse to set even the present bases
            if present is not value:
                type.__setattr__(self.owner, name, value)

    def _is_known(self, present: Mapping[str, object]) -> bool:
        known = self._all
        return len(present) == len(known) and all(map(is_, present.values(), known.values())) and [*present] == [*known]

    def _present(self) -> Mapping[str, object]:
        return vars(self.owner)

    def _of_type(self) -> tuple[object, ...]:
        return tuple([member.__get__(self.owner) for member in _OF_TYPE.values()])

    def _choose(self) -> dict[str, object]:
        chosen = {name: value for name, value in self._all.items() if self._counts(name, value)}
        return chosen | dict(zip(_OF_TYPE, self._typed, strict=False))

    def _counts(self, name: str, value: object) -> bool:
        if name in _OF_ANY or name in _OF_PYTHON:
            return False
        return not isinstance(value, types.MemberDescriptorType | types.GetSetDescriptorType)


OF_LIBRARY = "library "
"""Prefix of the paths of names in a library's modules and classes."""


class LibraryNames(ClassAttributes):
    """The replaced functions and classes of a library's module or class: the names whose values have changed since this
    object was made.

    Libraries also set names at run time: plain values, and functions wrapped under their own name. These are ignored.
    Names that the user's code sets literally are inspected by other means, whatever their values.
    """

    __slots__ = ("_first",)

    def __init__(self, owner: types.ModuleType | type) -> None:
        super().__init__(type(self))
        self.owner: Any = owner
        name = owner.__name__ if isinstance(owner, types.ModuleType) else f"{module_of(owner)}.{owner.__qualname__}"
        self.path = f"{OF_LIBRARY}{name}"
        self._first = self._all = dict(self._present())

    def _of_type(self) -> tuple[object, ...]:
        return ()  # a LibraryAttribute holds these where code sets them

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
    """Return whether other code has replaced a library's function or class with ``new``, or has added ``new``."""
    if new is old or name in OF_MODULES or name in _SET_BY_LIBRARIES:
        return False
    if not (old is MISSING or _is_code(old)):
        return False
    if is_users_code(type(new)):
        return True
    if isinstance(new, types.ModuleType) or module_of(new) == "torch._dynamo.mutation_guard":
        return False  # torch wraps methods with the latter on the first compilation, to count new modules
    if any(map(is_users_code, (new, *functions_in(new)))):
        return True
    return old is not MISSING and getattr(new, "__name__", None) != name


_SET_BY_LIBRARIES = frozenset(("Storage",))
"""Names that torch binds to another class when its default dtype changes."""


def _is_code(value: object) -> bool:
    return callable(value) or isinstance(value, staticmethod | classmethod | property)


@functools.cache
def library_names(owner: Any) -> LibraryNames:
    """Return the names of a library's module or class that have been replaced since the first call in this process."""
    return LibraryNames(owner)


def libraries() -> Iterator[tuple[str, object]]:
    """Yield path and names of the libraries in which functions are replaced most often, by whatever code."""
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

    def _of_type(self) -> tuple[object, ...]:
        return ()

    def _counts(self, name: str, value: object) -> bool:
        special = name.startswith("__") and name.endswith("__")
        return not special and not isinstance(value, types.ModuleType)


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
"""Attributes of classes in which Python keeps types, created partly on access, and names, created on pickling."""

OF_MODULES = frozenset(
    f"__{name}__" for name in ("annotations", "builtins", "cached", "loader", "spec", "warningregistry")
)
"""Global names that Python sets in every module, and that lead to its own machinery."""
