"""Kinds of objects with attributes, and of the namespaces, cells and functions that code reaches."""

from __future__ import annotations

import ast
import ctypes
import mmap
import pickle
import sys
import types
from collections.abc import Iterator
from typing import Any

import xxhash

from hpstage.checkpoints import jax_arrays
from hpstage.checkpoints.state_tree import digest
from hpstage.errors import StateError
from hpstage.training.capture import pointees
from hpstage.training.capture.kind import (
    LEADS_NOWHERE,
    Child,
    Kept,
    Kind,
    attribute_children,
    is_atom,
    same_items,
    same_mapping,
    same_value,
)
from hpstage.training.capture.values import is_tensor
from hpstage.training.code.attributes import own_of, write_own
from hpstage.training.code.made import functions_into
from hpstage.training.code.names import attributes_stored_in
from hpstage.training.code.owner import by_type, functions_in, is_users_code, parts_called

Attributes = dict[str, Any]


class Instance(Kind):
    """Objects with attributes, in ``__dict__`` or ``__slots__``."""

    name = "attributes"

    def read(self, obj: Any, skip: frozenset[str]) -> Attributes:
        found = own_of(obj)
        return {name: value for name, value in found.items() if name not in skip} if skip else found

    def same(self, old: Attributes, new: Attributes) -> bool:
        return same_mapping(old, new)

    def write(self, obj: Any, content: Attributes, skip: frozenset[str] = frozenset()) -> None:
        write_own(obj, content, skip)

    def children(self, content: Attributes) -> Iterator[Child]:
        return attribute_children(content)


class AllBut(frozenset[str]):
    """The set of all attribute names except those given, including names of attributes that do not exist yet."""

    def __contains__(self, name: object) -> bool:
        return not super().__contains__(name)

    def __bool__(self) -> bool:
        return True


class PerThread(Instance):
    """``threading.local``: the attributes visible to this thread."""

    def read(self, obj: Any, skip: frozenset[str]) -> Attributes:
        return {name: value for name, value in vars(obj).items() if name not in skip}

    def write(self, obj: Any, content: Attributes, skip: frozenset[str] = frozenset()) -> None:
        own = vars(obj)
        for name in [name for name in own if name not in skip]:
            del own[name]
        own.update(content)


@by_type
def set_by_libraries(kind: Any) -> frozenset[str]:
    """Return the names of attributes that the code of a class's bases in libraries sets."""
    functions = [
        function
        for base in kind.__mro__
        if not is_users_code(base)
        for member in vars(base).values()
        for function in (member, *functions_in(member))
    ]
    return frozenset(
        name
        for function in functions
        if isinstance(function, types.FunctionType)
        for name in attributes_stored_in(function.__code__)
    )


class Scripted(Instance):
    """A TorchScript module, whose parameters, buffers and numbers are kept by its interpreter."""

    def read(self, obj: Any, skip: frozenset[str]) -> Attributes:
        found = {name: value for name, value in own_of(obj).items() if name not in _OF_SCRIPTS and name not in skip}
        found["parameters"] = tuple(obj.named_parameters(recurse=False))
        found["buffers"] = tuple(obj.named_buffers(recurse=False))
        found["modules"] = tuple(obj.named_children())
        for name in _script_attributes(obj):
            if name in skip:
                continue
            value = getattr(obj, name)
            plain = is_atom(value) or is_tensor(value)  # else it is a copy of what the interpreter keeps
            found[name] = value if plain else (_OF_SCRIPT, _by_tuples(name, value))
        return found

    def write(self, obj: Any, content: Attributes, skip: frozenset[str] = frozenset()) -> None:
        for name in _script_attributes(obj):
            if name not in content or is_tensor(content[name]):
                continue
            value = content[name]
            if type(value) is tuple:  # older versions have written a string
                value = ast.literal_eval(value[1]) if type(value[1]) is str else _of_tuples(value[1])
            setattr(obj, name, value)

    def children(self, content: Attributes) -> Iterator[Child]:
        for name in ("parameters", "buffers", "modules"):
            for inner, value in content[name]:
                yield f".{inner}", value
        for name, value in content.items():
            if is_tensor(value) or (type(value) is tuple and value[:1] == (_OF_SCRIPT,)):
                yield f".{name}", value


_OF_SCRIPT = "container of TorchScript's"


def _by_tuples(name: str, value: Any) -> Any:
    """Return a TorchScript container as nested tuples of its type and items. Raise if an item cannot be inspected."""
    kind = type(value)
    if kind is dict:
        return "dict", *((key, _by_tuples(name, item)) for key, item in value.items())
    if kind is list:
        return "list", *(_by_tuples(name, item) for item in value)
    if issubclass(kind, tuple):  # a plain tuple can set one with named fields
        return "tuple", *(_by_tuples(name, item) for item in value)
    if is_atom(value) or is_tensor(value):
        return value
    raise StateError(
        f"{name} of a module of TorchScript holds a {kind.__module__}.{kind.__qualname__}, which nothing can look "
        f"into: keep numbers, strings and tensors in it; if training does not change it, name it in `stateless` by its "
        f"path, such as 'model.layer.{name}'"
    )


def _of_tuples(plain: Any) -> Any:
    if type(plain) is not tuple:
        return plain
    kind, *items = plain
    if kind == "dict":
        return {key: _of_tuples(item) for key, item in items}
    return tuple(map(_of_tuples, items)) if kind == "tuple" else [*map(_of_tuples, items)]


_OF_SCRIPTS = frozenset(("_c", "_modules", "_concrete_type", "_forward_hooks", "_forward_pre_hooks"))


def _script_attributes(obj: Any) -> list[str]:
    kind = object.__getattribute__(obj, "__dict__").get("_concrete_type")
    return [] if kind is None else list(kind.get_attributes())


class Foreign(Instance):
    """Objects of classes written in C: their attributes, and what is inside them.

    Inside is the first of these that an object has: memory that it exposes; bytes from which its own ``__setstate__``
    restores it, such as those of a tokenizer; the checksum of its pickle; ``None``. More than 64 MiB of memory have a
    checksum, too. A checksum shows a change, but nothing can be restored from it. A pickle of more than 1 MiB is not
    inspected.
    """

    name = "foreign"

    def read(self, obj: Any, skip: frozenset[str]) -> Any:
        return super().read(obj, skip), _inside(obj), pointees.of(obj)

    def again(self, obj: Any, skip: frozenset[str], old: Any) -> Any:
        inside = old[1] if old[1] in (None, _LONG) or jax_arrays.is_array(obj) else _inside(obj)
        new = super().read(obj, skip), inside, pointees.of(obj)
        return old if self.same(old, new) else new

    def same(self, old: Any, new: Any) -> bool:
        return same_mapping(old[0], new[0]) and bool(old[1] == new[1]) and same_items(old[2], new[2])

    def write(self, obj: Any, content: Any, skip: frozenset[str] = frozenset()) -> None:
        super().write(obj, content[0], skip)
        inside = _inside(obj)
        if content[1] == inside:
            return
        if isinstance(inside, tuple) and isinstance(content[1], tuple) and type(content[1][1]) is bytes:
            obj.__setstate__(content[1][1])
            if _inside(obj) == content[1]:
                return
        if not isinstance(inside, bytes) or not isinstance(content[1], bytes) or len(inside) != len(content[1]):
            raise TypeError("its class is written in C")
        ctypes.memmove((ctypes.c_ubyte * len(inside)).from_buffer(obj), content[1], len(inside))

    def children(self, content: Any) -> Iterator[Child]:
        yield from attribute_children(content[0])
        for index, pointee in enumerate(content[2]):
            yield f".pointee({index})", pointee


def _inside(obj: Any) -> bytes | str | tuple[str, bytes] | None:
    if jax_arrays.is_array(obj):
        try:
            return digest(obj)  # over the whole array, and only once: a JAX array never changes
        except StateError:
            return pickled(obj) or "gone"  # an array that no state can hold
    if isinstance(obj, mmap.mmap):
        return None  # a fork, and whoever maps the same file, writes to the same memory
    try:
        with memoryview(obj) as memory:
            if not memory.readonly and memory.nbytes <= _LONGEST_BUFFER:
                content = memory.tobytes()
                return pointees.Address(content.hex()) if pointees.points(obj, content) else content
            if not memory.readonly:  # too large to keep: a change of it is refused by name
                return xxhash.xxh3_128_hexdigest(memory)
    except (TypeError, BufferError, ValueError):
        pass  # it exposes no memory
    state = _own_state(obj)
    return pickled(obj) if state is None else (_STATE, state)


def _own_state(obj: Any) -> bytes | None:
    """Return the bytes in which an object's class pickles and restores it; ``None`` if that runs any Python code."""
    kind = type(obj)
    methods = (getattr(kind, name, None) for name in ("__reduce_ex__", "__reduce__", "__getstate__", "__setstate__"))
    if not all(isinstance(method, types.MethodDescriptorType) for method in methods):
        return None
    try:
        state = obj.__reduce_ex__(2)[2]
    except Exception:
        return None  # whatever its class raises
    return state if type(state) is bytes and len(state) <= _LONGEST else None


_STATE = "state"
_LONG = "more than is looked at"
_LONGEST = 1 << 20
_LONGEST_BUFFER = 1 << 26


class _TooLongError(Exception):
    """The pickle is longer than the limit."""


class _Sum:
    """A file that only computes a checksum of what is written to it."""

    def __init__(self) -> None:
        self.hasher = xxhash.xxh3_128()
        self._length = 0

    def write(self, data: Any) -> int:
        length = memoryview(data).nbytes
        self._length += length
        if self._length > _LONGEST:
            raise _TooLongError
        self.hasher.update(data)
        return length

    def take(self, buffer: pickle.PickleBuffer) -> None:
        raw = buffer.raw()
        if raw.nbytes > _LONGEST_BUFFER:
            raise _TooLongError
        self.hasher.update(raw)


def pickled(obj: Any) -> str | None:
    """Return a checksum of an object's pickle, :data:`_LONG` if it is too long, or ``None`` if there is none."""
    summed = _Sum()
    try:
        pickle.Pickler(summed, protocol=5, buffer_callback=summed.take).dump(_image_of(obj))
    except _TooLongError:
        return _LONG
    except Exception:
        return None  # whatever its class raises
    return summed.hasher.hexdigest()


def _image_of(obj: Any) -> Any:
    """Return a Pillow image that shows ``obj`` if that is a pixel buffer, which cannot be pickled; else ``obj``."""
    library: Any = sys.modules.get("PIL.Image")
    is_pixels = library is not None and type(obj).__name__ == "ImagingCore" and not is_users_code(type(obj))
    return library.Image()._new(obj) if is_pixels else obj


class Slot(Kind):
    """A global name that training code reaches."""

    name = "name"

    def read(self, obj: Any, skip: frozenset[str]) -> Any:
        return obj.get()

    def write(self, obj: Any, content: Any, skip: frozenset[str] = frozenset()) -> None:
        obj.set(content)

    def children(self, content: Any) -> Iterator[Child]:
        yield "", content


class ClassNamespace(Kind):
    """The attributes of a class that training code reaches."""

    name = "attributes"

    def read(self, obj: Any, skip: frozenset[str]) -> Attributes:
        found: Attributes = obj.get()
        return {name: value for name, value in found.items() if name not in skip} if skip else found

    def same(self, old: Attributes, new: Attributes) -> bool:
        return old is new or same_mapping(old, new)

    def write(self, obj: Any, content: Attributes, skip: frozenset[str] = frozenset()) -> None:
        present: Attributes = obj.get()
        obj.set({name: value for name, value in present.items() if name in skip} | content)

    def children(self, content: Attributes) -> Iterator[Child]:
        for name, value in content.items():
            if type(value) not in _CODE:  # objects held by functions are reached from the class
                yield f".{name}", value
            yield from _called(f".{name}", value)


def _called(path: str, member: object) -> Iterator[Child]:
    """Yield the callables, other than functions, in a class member (``staticmethod``, ``property``): partials, say."""
    for name, part in parts_called(member):
        inner = f"{path}.{name}"
        if type(part) is not types.FunctionType:
            yield inner, part
        yield from _called(inner, part)


class ModulesByText(Kept):
    """Modules that code may import by a string. An imported module stays imported, and its content is surveyed."""

    name = "modules"

    def read(self, obj: Any, skip: frozenset[str]) -> tuple[types.ModuleType, ...]:
        found: tuple[types.ModuleType, ...] = obj.get()
        return found

    def same(self, old: tuple[types.ModuleType, ...], new: tuple[types.ModuleType, ...]) -> bool:
        return old == new or {*new} <= {*old}

    def children(self, content: tuple[types.ModuleType, ...]) -> Iterator[Child]:
        for module in content:
            yield f":{module.__name__}", module


class LibraryNamespace(ClassNamespace):
    """Replacements of a library's functions and classes. Functions among them lead on, since no class reaches them."""

    def children(self, content: Attributes) -> Iterator[Child]:
        return attribute_children(content)


_CODE = frozenset((types.FunctionType, staticmethod, classmethod, property, *LEADS_NOWHERE))


class Cell(Kind):
    """A variable that functions close over."""

    name = "variable"

    def read(self, obj: Any, skip: frozenset[str]) -> Any:
        try:
            return (obj.cell_contents,)
        except ValueError:  # not bound yet
            return ()

    def write(self, obj: Any, content: Any, skip: frozenset[str] = frozenset()) -> None:
        if content:
            obj.cell_contents = content[0]
        else:
            del obj.cell_contents

    def children(self, content: Any) -> Iterator[Child]:
        for value in content:
            yield "", value


class Function(Kind):
    """Functions of the user: what they close over, their defaults, attributes and code."""

    name = "function"

    def read(self, obj: Any, skip: frozenset[str]) -> Any:
        cells = dict(zip(obj.__code__.co_freevars, obj.__closure__ or (), strict=True))
        own = {name: value for name, value in vars(obj).items() if "dynamo" not in name}  # torch keeps caches there
        return cells, obj.__defaults__ or (), dict(obj.__kwdefaults__ or {}), own, obj.__code__

    def same(self, old: Any, new: Any) -> bool:
        return all(map(_same_entry, old, new))

    def write(self, obj: Any, content: Any, skip: frozenset[str] = frozenset()) -> None:
        _, defaults, keywords, own, code = content
        if obj.__code__ is not code:
            obj.__code__ = code
        obj.__defaults__, obj.__kwdefaults__ = defaults or None, dict(keywords) or None
        vars(obj).clear()
        vars(obj).update(own)

    def children(self, content: Any) -> Iterator[Child]:
        closure, defaults, keywords, own, _ = content
        yield from attribute_children(closure)
        for index, value in enumerate(defaults):
            yield f".defaults[{index}]", value
        for name, value in keywords.items():
            yield f".defaults[{name!r}]", value
        yield from attribute_children(own)


class Partial(Kind):
    """``functools.partial``: immutable except for the objects it holds."""

    name = "partial"

    def read(self, obj: Any, skip: frozenset[str]) -> Any:
        return obj.func, obj.args, dict(obj.keywords), own_of(obj)

    def same(self, old: Any, new: Any) -> bool:
        return all(map(_same_entry, old, new))

    def children(self, content: Any) -> Iterator[Child]:
        function, arguments, keywords, own = content
        yield ".func", function
        for index, value in enumerate(arguments):
            yield f".args[{index}]", value
        for name, value in keywords.items():
            yield f".keywords[{name!r}]", value
        yield from attribute_children(own)


class Operator(Kept):
    """``operator.itemgetter``, ``attrgetter`` and ``methodcaller``: immutable except for the objects they hold."""

    name = "operator"

    def read(self, obj: Any, skip: frozenset[str]) -> tuple[Any, ...]:
        made_by, parts = obj.__reduce__()
        return parts if isinstance(made_by, type) else (*made_by.args, *parts, *made_by.keywords.items())

    def children(self, content: tuple[Any, ...]) -> Iterator[Child]:
        for index, part in enumerate(content):
            yield f"[{index}]", part


class Vectorized(Kept):
    """``numpy.ufunc``: immutable, except for objects that functions hold which it calls (``numpy.frompyfunc``)."""

    name = "ufunc"

    def read(self, obj: Any, skip: frozenset[str]) -> tuple[types.FunctionType, ...]:
        return tuple(functions_into(obj))

    def children(self, content: tuple[types.FunctionType, ...]) -> Iterator[Child]:
        for function in content:
            yield f".{function.__name__}", function


def _same_entry(old: Any, new: Any) -> bool:
    return same_mapping(old, new) if isinstance(old, dict) else same_value(old, new)
