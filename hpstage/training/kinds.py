"""Kinds of mutable objects: how the content of one is read, compared, and put back.

The content of an object is shallow: a list's items, an instance's attributes. Objects in it are objects of their own.
What is neither of a kind here nor a plain value is *opaque*: it is told apart by identity alone, so that a change
inside it cannot be seen, only its replacement.
"""

from __future__ import annotations

import collections
import datetime
import decimal
import enum
import fractions
import functools
import io
import itertools
import pathlib
import random
import re
import sys
import types
import warnings
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import xxhash

from hpstage.checkpoints import leaves
from hpstage.training.reach import of_user

_T = TypeVar("_T")
Child = tuple[str, object]
"""A label to append to the owner's path, and the object there."""

PLAIN = (type(None), bool, int, float, complex, str, bytes)
_ATOMS = frozenset(
    (
        *PLAIN,
        type(...),
        type(NotImplemented),
        range,
        slice,
        re.Pattern,
        types.BuiltinFunctionType,
        types.ModuleType,
        types.CodeType,
        types.MappingProxyType,
        property,
        weakref.ref,
        datetime.date,
        datetime.datetime,
        datetime.timedelta,
        decimal.Decimal,
        fractions.Fraction,
        pathlib.PosixPath,
        pathlib.PurePosixPath,
    )
)
_SOURCES: tuple[Any, ...] = ([], (), {}, {}.values(), {}.items(), set(), "", b"", range(0), range(1 << 70))
_ITERATORS: tuple[Any, ...] = (
    *(type(iter(source)) for source in _SOURCES),
    type(reversed([])),
    enumerate,
    zip,
    map,
    filter,
    *(
        made
        for made in vars(itertools).values()
        if isinstance(made, type) and made is not itertools.tee and "__next__" in vars(made)
    ),
)
# Their instances are machinery (compilers, loggers, threads), not what training computes with.
_MACHINERY = (
    "torch._dynamo",
    "torch._inductor",
    "torch._functorch",
    "torch.fx",
    "torch.jit",
    "torch._C",
    "torch._ops",
    "torch.autograd",
    "logging",
    "threading",
    "_thread",
    "concurrent",
    "multiprocessing",
    "asyncio",
    "inspect",
    "typing",
    "importlib",
    "weakref",
    "hpstage",
    "optuna",
    "distributed",
)

_LEADS_NOWHERE = frozenset((type(None), bool, int, float, str, bytes))

BULK = 4096
"""Containers longer than this have this many of their items looked into, evenly spaced, and all of them compared."""
_LOOKED_INTO = 256
_COPIED = 16 << 20
"""Bytes up to which a copy of an array is kept, by which it can be put back."""
_WHOLE = 1 << 20
_SAMPLED, _BLOCK = 64, 4096


def torch() -> Any:
    """torch, if this process has imported it: else no object here can be one of its."""
    return sys.modules.get("torch")


def numpy() -> Any:
    return sys.modules.get("numpy")


def _by_type(function: Callable[[Any], _T]) -> Callable[[Any], _T]:
    """Ask once for each type. (mypy does not take types for hashable, as ``functools.cache`` wants them.)"""
    known: dict[Any, _T] = {}

    @functools.wraps(function)
    def ask(kind: Any) -> _T:
        try:
            return known[kind]
        except KeyError:
            return known.setdefault(kind, function(kind))

    return ask


@_by_type
def _is_atomic(kind: Any) -> bool:
    if kind in _ATOMS or issubclass(kind, type | enum.Enum):
        return True
    library = torch()
    if library is not None and issubclass(
        kind, (library.dtype, library.device, library.Size, library.layout, library.memory_format)
    ):
        return True
    library = numpy()
    return library is not None and issubclass(kind, (library.generic, library.dtype))


def is_atom(value: object) -> bool:
    """Whether a value is immutable and holds nothing: told apart by type and value."""
    return _is_atomic(type(value))


def same_value(one: object, other: object) -> bool:
    """Whether two contents' entries are the same: one object, or equal atoms; tuples by their items."""
    if one is other:
        return True
    kind = type(one)
    if kind is not type(other):
        return False
    if kind is float:
        return one == other or (one != one and other != other)
    if isinstance(one, tuple) and isinstance(other, tuple):
        return len(one) == len(other) and all(map(same_value, one, other))
    if isinstance(one, types.MethodType) and isinstance(other, types.MethodType):
        return one.__func__ is other.__func__ and one.__self__ is other.__self__
    return bool(is_atom(one) and one == other)


class Kind(ABC):
    """How objects of some types are handled. Stateless."""

    name: str

    @abstractmethod
    def read(self, obj: Any, skip: frozenset[str]) -> Any:
        """The content, apart from the object: it does not change when the object does."""

    def same(self, old: Any, new: Any) -> bool:
        return old is new or bool(old == new)

    def write(self, obj: Any, content: Any, skip: frozenset[str] = frozenset()) -> None:
        """Put a content back that :meth:`read` gave. Raises ``TypeError`` where that cannot be done."""
        raise TypeError("it cannot be put back")

    def children(self, content: Any) -> Iterator[Child]:
        return iter(())


class Sequence(Kind):
    """Lists and deques: the items, and the attributes of subclasses."""

    name = "items"

    def read(self, obj: Any, skip: frozenset[str]) -> Any:
        return list(obj), _own(obj)

    def same(self, old: Any, new: Any) -> bool:
        return _same_items(old[0], new[0]) and _same_mapping(old[1], new[1])

    def write(self, obj: Any, content: Any, skip: frozenset[str] = frozenset()) -> None:
        items, own = content
        obj.clear()
        obj.extend(items)
        _write_own(obj, own)

    def children(self, content: Any) -> Iterator[Child]:
        items, own = content
        for index in _looked_into(len(items)):
            item = items[index]
            if type(item) not in _LEADS_NOWHERE:
                yield f"[{index}]", item
        if own:
            yield from _attribute_children(own)


class Mapping(Kind):
    """Dicts: keys and values in their order."""

    name = "mapping"

    def read(self, obj: Any, skip: frozenset[str]) -> Any:
        return dict(obj), _own(obj)

    def same(self, old: Any, new: Any) -> bool:
        return _same_mapping(old[0], new[0]) and _same_mapping(old[1], new[1])

    def write(self, obj: Any, content: Any, skip: frozenset[str] = frozenset()) -> None:
        items, own = content
        dict.clear(obj)
        for key, value in items.items():
            dict.__setitem__(obj, key, value)
        _write_own(obj, own)

    def children(self, content: Any) -> Iterator[Child]:
        items, own = content
        if items:
            pairs = list(items.items())
            for index in _looked_into(len(pairs)):
                key, value = pairs[index]
                if type(key) is str:
                    if type(value) not in _LEADS_NOWHERE:
                        yield f"[{key!r}]", value
                    continue
                if not is_atom(key):
                    yield f".key({index})", key
                if type(value) not in _LEADS_NOWHERE:
                    yield f"[{index}]", value
        if own:
            yield from _attribute_children(own)


class Ordered(Mapping):
    """``OrderedDict``: its own order is not the dict's."""

    def write(self, obj: Any, content: Any, skip: frozenset[str] = frozenset()) -> None:
        items, own = content
        obj.clear()
        obj.update(items)
        _write_own(obj, own)


class Defaulting(Mapping):
    """``defaultdict``: what makes its values counts among its attributes."""

    def read(self, obj: Any, skip: frozenset[str]) -> Any:
        return dict(obj), {**_own(obj), "default_factory": obj.default_factory}

    def write(self, obj: Any, content: Any, skip: frozenset[str] = frozenset()) -> None:
        items, own = content
        super().write(obj, (items, {name: value for name, value in own.items() if name != "default_factory"}))
        obj.default_factory = own["default_factory"]


class Unordered(Kind):
    """Sets. Objects in them are opaque."""

    name = "set"

    def read(self, obj: Any, skip: frozenset[str]) -> Any:
        return frozenset(obj)

    def write(self, obj: Any, content: Any, skip: frozenset[str] = frozenset()) -> None:
        obj.clear()
        obj.update(content)


class Bytes(Kind):
    name = "bytearray"

    def read(self, obj: Any, skip: frozenset[str]) -> Any:
        return bytes(obj)

    def write(self, obj: Any, content: Any, skip: frozenset[str] = frozenset()) -> None:
        obj[:] = content


class Instance(Kind):
    """Objects with attributes, in ``__dict__`` or ``__slots__``."""

    name = "attributes"

    def read(self, obj: Any, skip: frozenset[str]) -> Any:
        found = {name: value for name, value in getattr(obj, "__dict__", {}).items() if name not in skip}
        for name in _slots(type(obj)):
            if name not in skip and hasattr(obj, name):
                found[name] = getattr(obj, name)
        return found

    def same(self, old: Any, new: Any) -> bool:
        return _same_mapping(old, new)

    def write(self, obj: Any, content: Any, skip: frozenset[str] = frozenset()) -> None:
        own = getattr(obj, "__dict__", None)
        slots = _slots(type(obj))
        for name in self.read(obj, skip):
            if name in content:
                continue
            if name in slots:
                object.__delattr__(obj, name)
            elif own is not None:
                del own[name]
        for name, value in content.items():
            if name in slots:
                object.__setattr__(obj, name, value)
            elif own is not None:
                own[name] = value

    def children(self, content: Any) -> Iterator[Child]:
        return _attribute_children(content)


class Slot(Kind):
    """A global name that training code reaches."""

    name = "name"

    def read(self, obj: Any, skip: frozenset[str]) -> Any:
        return obj.get()

    def same(self, old: Any, new: Any) -> bool:
        return same_value(old, new)

    def write(self, obj: Any, content: Any, skip: frozenset[str] = frozenset()) -> None:
        obj.set(content)

    def children(self, content: Any) -> Iterator[Child]:
        yield "", content


class ClassNamespace(Kind):
    """The attributes of a class that training code reaches."""

    name = "attributes"

    def read(self, obj: Any, skip: frozenset[str]) -> Any:
        return {name: value for name, value in obj.get().items() if name not in skip}

    def same(self, old: Any, new: Any) -> bool:
        return _same_mapping(old, new)

    def write(self, obj: Any, content: Any, skip: frozenset[str] = frozenset()) -> None:
        obj.set(content)

    def children(self, content: Any) -> Iterator[Child]:
        return _attribute_children(content)


class Cell(Kind):
    """A variable that functions close over."""

    name = "variable"

    def read(self, obj: Any, skip: frozenset[str]) -> Any:
        try:
            return (obj.cell_contents,)
        except ValueError:  # not bound yet
            return ()

    def same(self, old: Any, new: Any) -> bool:
        return same_value(old, new)

    def write(self, obj: Any, content: Any, skip: frozenset[str] = frozenset()) -> None:
        if content:
            obj.cell_contents = content[0]
        else:
            del obj.cell_contents

    def children(self, content: Any) -> Iterator[Child]:
        for value in content:
            yield "", value


class Function(Kind):
    """Functions of the user's: what they close over, their defaults and attributes."""

    name = "function"

    def read(self, obj: Any, skip: frozenset[str]) -> Any:
        cells = dict(zip(obj.__code__.co_freevars, obj.__closure__ or (), strict=True))
        return cells, obj.__defaults__ or (), obj.__kwdefaults__ or {}, dict(vars(obj))

    def same(self, old: Any, new: Any) -> bool:
        return all(map(_same_entry, old, new))

    def write(self, obj: Any, content: Any, skip: frozenset[str] = frozenset()) -> None:
        _, defaults, keywords, own = content
        obj.__defaults__, obj.__kwdefaults__ = defaults or None, keywords or None
        _write_own(obj, own)

    def children(self, content: Any) -> Iterator[Child]:
        closure, defaults, keywords, own = content
        for name, cell in closure.items():
            yield f".{name}", cell
        for index, value in enumerate(defaults):
            yield f".defaults[{index}]", value
        for name, value in keywords.items():
            yield f".defaults[{name!r}]", value
        yield from _attribute_children(own)


class Partial(Kind):
    """``functools.partial``: immutable but for what it holds."""

    name = "partial"

    def read(self, obj: Any, skip: frozenset[str]) -> Any:
        return obj.func, obj.args, dict(obj.keywords)

    def same(self, old: Any, new: Any) -> bool:
        return all(map(_same_entry, old, new))

    def children(self, content: Any) -> Iterator[Child]:
        function, arguments, keywords = content
        yield ".func", function
        for index, value in enumerate(arguments):
            yield f".args[{index}]", value
        for name, value in keywords.items():
            yield f".keywords[{name!r}]", value


class RandomSource(Kind):
    """Generators of random numbers: their state, as plain values."""

    name = "random state"

    def read(self, obj: Any, skip: frozenset[str]) -> Any:
        if isinstance(obj, random.Random):
            return obj.getstate()
        library = numpy()
        if library is not None:
            if isinstance(obj, library.random.RandomState):
                return obj.get_state(legacy=False)
            if isinstance(obj, library.random.Generator):
                return obj.bit_generator.state
            if isinstance(obj, library.random.BitGenerator):
                return obj.state
        return obj.get_state()  # torch's

    def same(self, old: Any, new: Any) -> bool:
        from hpstage.checkpoints.state_tree import digest

        return digest(old) == digest(new)

    def write(self, obj: Any, content: Any, skip: frozenset[str] = frozenset()) -> None:
        if isinstance(obj, random.Random):
            obj.setstate(content)
            return
        library = numpy()
        if library is not None:
            if isinstance(obj, library.random.RandomState):
                obj.set_state(content)
                return
            if isinstance(obj, library.random.Generator):
                obj.bit_generator.state = content
                return
            if isinstance(obj, library.random.BitGenerator):
                obj.state = content
                return
        obj.set_state(content)


class Moving(Kind):
    """Generators and iterators: where they are can be told, and not put back."""

    name = "iterator"

    def read(self, obj: Any, skip: frozenset[str]) -> Any:
        if isinstance(obj, types.GeneratorType):
            frame = obj.gi_frame
            return (-1, {}) if frame is None else (frame.f_lasti, dict(frame.f_locals))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of 3.12: iterators of itertools
            try:
                reduced = obj.__reduce__()
            except TypeError:  # of 3.14
                return (0, {})
        return (repr([part for part in reduced[1:] if is_atom(part)]), {str(i): p for i, p in enumerate(reduced[1:])})

    def same(self, old: Any, new: Any) -> bool:
        return old[0] == new[0] and _same_mapping(old[1], new[1])

    def children(self, content: Any) -> Iterator[Child]:
        for name, value in content[1].items():
            yield f".{name}", value


class File(Kind):
    """Open files: the position."""

    name = "file"

    def read(self, obj: Any, skip: frozenset[str]) -> Any:
        return obj.tell() if not obj.closed and obj.seekable() else -1


class Values(Kind):
    """Tensors and arrays. What is read tells little: see :class:`Marked`."""

    name = "values"

    def read(self, obj: Any, skip: frozenset[str]) -> Any:
        return Marked(obj)

    def same(self, old: Marked, new: Marked) -> bool:
        return old.same(new)

    def write(self, obj: Any, content: Marked, skip: frozenset[str] = frozenset()) -> None:
        content.put_back(obj)

    def children(self, content: Marked) -> Iterator[Child]:
        if content.gradient is not None:
            yield ".grad", content.gradient


class Marked:
    """What tells a changed tensor or array.

    Args:
        sampled: also a digest of its bytes; of a large one of some of them, and then its version counter counts as
            well: writing to a part of it through another tensor on the same memory (``.data``, ``numpy()``) may stay
            unseen until forks are verified.
        copied: also a copy, of one that is not large, by which it can be put back.
    """

    __slots__ = ("copy", "form", "gradient", "sample", "trained", "version")

    def __init__(self, obj: Any, *, sampled: bool = False, copied: bool = False) -> None:
        library = torch()
        self.gradient: object | None = None
        self.trained = False
        if library is not None and isinstance(obj, library.Tensor):
            self.trained = obj.requires_grad
            self.form: object = tensor_form(obj)
            self.version = 0 if obj.is_inference() else obj._version  # inference tensors count none
            if obj.is_leaf and obj.requires_grad:
                self.gradient = obj.grad
            on_cpu = obj.device.type == "cpu"
        else:
            self.form, self.version = (obj.shape, obj.strides, obj.dtype.str), 0
            on_cpu = True
        self.sample: str | None = None
        if sampled:
            self.sample, whole = _sample(obj)
            if whole:
                self.version = 0
        self.copy = duplicate(obj) if copied and on_cpu and nbytes(obj) <= _COPIED else None

    def same(self, other: Marked) -> bool:
        return (
            self.form == other.form
            and self.version == other.version
            and self.sample == other.sample
            and self.gradient is other.gradient
        )

    def put_back(self, obj: Any) -> None:
        if self.copy is None:
            raise TypeError("it is too large to be put back")
        library = torch()
        if library is None or not isinstance(obj, library.Tensor):
            obj[...] = self.copy
            return
        fill(obj, self.copy)
        if obj.is_leaf:
            obj.requires_grad_(self.trained)
            obj.grad = self.gradient


def nbytes(obj: Any) -> int:
    library = torch()
    if library is not None and isinstance(obj, library.Tensor):
        return int(obj.numel() * obj.element_size())
    return int(obj.nbytes)


def duplicate(obj: Any) -> Any:
    """A copy of a tensor or array with memory of its own, on the same device, with the same strides."""
    leaf = leaves.describe("", obj)
    if not isinstance(leaf, leaves.Leaf):
        return None
    return leaves.copy(leaf, obj)


def fill(tensor: Any, values: Any) -> None:
    """Give a tensor these values, in place where its form allows."""
    with torch().no_grad():
        if tensor.shape == values.shape and tensor.dtype == values.dtype and tensor.stride() == values.stride():
            # Through .data: a leaf that needs gradients refuses to be written to, and views keep looking at it.
            tensor.data.copy_(values)
        else:
            tensor.data = values.to(tensor.device, copy=True)


def fill_any(obj: Any, values: Any) -> None:
    """Give a tensor or an array of the same form these values."""
    library = torch()
    if library is not None and isinstance(obj, library.Tensor):
        fill(obj, values)
    else:
        obj[...] = values


def tensor_form(tensor: Any) -> tuple[Any, ...]:
    strides = tensor.stride() if tensor.layout is torch().strided else None
    return tuple(tensor.shape), strides, str(tensor.dtype), str(tensor.device), tensor.requires_grad


def _sample(obj: Any) -> tuple[str, bool]:
    """A digest of the bytes, and whether it is of all of them: of up to 1 MiB it is, else of blocks of them."""
    leaf = leaves.describe("", obj)
    if not isinstance(leaf, leaves.Leaf):
        return "", False
    library = torch()
    if library is not None and isinstance(obj, library.Tensor):
        contiguous = obj.device.type == "cpu" and obj.is_contiguous()
    else:
        contiguous = obj.flags.c_contiguous
    if leaf.nbytes > _WHOLE and not contiguous:
        return "", False  # it would have to be copied
    content = leaves.content(leaf, obj)
    if content.nbytes <= _WHOLE:
        return xxhash.xxh3_128_hexdigest(content), True
    hasher = xxhash.xxh3_128()
    for number in range(_SAMPLED):
        start = (content.nbytes - _BLOCK) * number // (_SAMPLED - 1)
        hasher.update(content[start : start + _BLOCK])
    return hasher.hexdigest(), False


_SEQUENCE, _MAPPING, _ORDERED, _SET, _BYTES = Sequence(), Mapping(), Ordered(), Unordered(), Bytes()
_INSTANCE, CELL, _FUNCTION, _PARTIAL = Instance(), Cell(), Function(), Partial()
_RANDOM, _MOVING, _FILE = RandomSource(), Moving(), File()
SLOT, CLASS, VALUES = Slot(), ClassNamespace(), Values()


def kind_of(obj: object) -> Kind | None:
    """How ``obj`` is handled; ``None``: it is opaque, or an atom."""
    if isinstance(obj, type):
        return None
    found = _kind_of_type(type(obj))
    if found is _FUNCTION and not of_user(getattr(obj, "__module__", None)):
        return None
    return found


@_by_type
def _kind_of_type(kind: Any) -> Kind | None:
    library = torch()
    if library is not None and issubclass(kind, library.Tensor):
        return VALUES
    arrays = numpy()
    if arrays is not None and issubclass(kind, arrays.ndarray):
        return VALUES
    generators: list[Any] = [random.Random]
    if library is not None:
        generators.append(library.Generator)
    if arrays is not None:
        generators += [arrays.random.RandomState, arrays.random.Generator, arrays.random.BitGenerator]
    tables: list[tuple[tuple[Any, ...], Kind]] = [
        (tuple(generators), _RANDOM),
        ((list, collections.deque), _SEQUENCE),
        ((collections.OrderedDict,), _ORDERED),
        ((collections.defaultdict,), Defaulting()),
        ((dict,), _MAPPING),
        ((set,), _SET),
        ((bytearray,), _BYTES),
        ((types.FunctionType,), _FUNCTION),
        ((types.CellType,), CELL),
        ((functools.partial,), _PARTIAL),
        ((types.GeneratorType, *_ITERATORS), _MOVING),
        ((io.IOBase,), _FILE),
    ]
    for types_, handler in tables:
        if issubclass(kind, types_):
            return handler
    module = kind.__module__ or "builtins"
    if any(module == name or module.startswith(f"{name}.") for name in _MACHINERY):
        return None
    if module in ("builtins", "types"):
        return None
    has_attributes = getattr(kind, "__dictoffset__", 0) != 0 or bool(_slots(kind))
    return _INSTANCE if has_attributes else None


@_by_type
def _slots(kind: Any) -> tuple[str, ...]:
    found: list[str] = []
    for base in kind.__mro__:
        declared = vars(base).get("__slots__", ())
        for name in (declared,) if isinstance(declared, str) else tuple(declared):
            if name not in ("__dict__", "__weakref__"):
                mangled = f"_{base.__name__.lstrip('_')}{name}" if name.startswith("__") else name
                found.append(mangled)
    return tuple(found)


def _own(obj: Any) -> dict[str, Any]:
    """Attributes of a container of a class of its own."""
    own = getattr(obj, "__dict__", None)
    return dict(own) if own else {}


def _write_own(obj: Any, own: dict[str, Any]) -> None:
    there = getattr(obj, "__dict__", None)
    if there is not None:
        there.clear()
        there.update(own)


def _attribute_children(content: dict[str, Any]) -> Iterator[Child]:
    for name, value in content.items():
        if type(value) not in _LEADS_NOWHERE:
            yield f".{name}", value


def _looked_into(length: int) -> range | list[int]:
    if length <= BULK:
        return range(length)
    return [number * length // _LOOKED_INTO for number in range(_LOOKED_INTO)]


def _same_items(old: list[Any], new: list[Any]) -> bool:
    return len(old) == len(new) and all(map(same_value, old, new))


def _same_mapping(old: dict[Any, Any], new: dict[Any, Any]) -> bool:
    return (
        len(old) == len(new)
        and all(a is b or same_value(a, b) for a, b in zip(old, new, strict=True))
        and all(a is b or same_value(a, b) for a, b in zip(old.values(), new.values(), strict=True))
    )


def _same_entry(old: Any, new: Any) -> bool:
    return _same_mapping(old, new) if isinstance(old, dict) else same_value(old, new)
