"""What has changed since a survey, as a plain state, and back.

A state holds no classes and runs no code: objects that were there when training began are named by their paths, and
found again under them in the process that goes on. New ones are written out, which containers of plain values, tensors
and arrays can be; an instance of a class that training has made cannot.
"""

from __future__ import annotations

import collections
import enum
import sys
import types
from collections.abc import Callable
from typing import Any

from hpstage.errors import StateError
from hpstage.training.kinds import VALUES, duplicate, fill, is_atom, numpy, torch
from hpstage.training.reach import MISSING
from hpstage.training.survey import Record, Survey

Plain = Any
ANSWERED = ("answered",)
"""In place of what its owner answers for."""
_BUILTINS = (list, dict, set, int, float, str, bool, tuple)
_ITSELF = (type(None), bool, int, float, str, bytes)


class Encoder:
    """Writes contents out.

    Args:
        base: the survey whose objects are named by path.
        but: paths whose owners answer for what cannot be written out.
    """

    def __init__(self, base: Survey, but: Callable[[str], bool]) -> None:
        self._base = base
        self._but = but
        self._new: dict[int, tuple[object, int]] = {}
        self._storages: dict[int, str] = {}
        library = torch()
        if library is not None:
            for record in base:
                if isinstance(record.obj, library.Tensor) and record.obj.layout is library.strided:
                    self._storages.setdefault(record.obj.untyped_storage().data_ptr(), record.path)

    def content(self, record: Record, content: Any) -> Plain:
        """The content of an object that is in the base."""
        kind, path = record.kind.name, record.path
        if kind == "items":
            return kind, self._list(path, content[0]), self._pairs(path, content[1])
        if kind in ("mapping", "attributes"):
            items, own = content if kind == "mapping" else (content, {})
            return kind, self._pairs(path, items), self._pairs(path, own)
        if kind == "set":
            return kind, self._sorted(path, content)
        if kind == "bytearray":
            return kind, content
        if kind in ("name", "variable"):
            return kind, self.value(path, content)
        if kind == "random state":
            return kind, content
        if kind == "function":
            return kind, self.value(path, content[1]), self._pairs(path, content[2]), self._pairs(path, content[3])
        if kind == "values":
            return kind, *self._values(record.obj)
        raise StateError(
            f"{path} is a {_kind(record.obj)} that has moved on in training; its position can be in no state, so that "
            f"forks would go on elsewhere. Make what it gives a function of the step, or keep a position of your own"
        )

    def value(self, path: str, value: Any) -> Plain:
        """A value within a content."""
        kind = type(value)
        if kind in _ITSELF:
            return value
        if value is MISSING:
            return ("missing",)
        known = self._base.path_of(value)
        if known is not None:
            return "@", known
        if id(value) in self._new:
            return "again", self._new[id(value)][1]
        if kind is tuple:
            return "tuple", self._list(path, value)
        if isinstance(value, types.MethodType):
            return "method", self.value(path, value.__self__), value.__func__.__name__
        if is_atom(value):
            return self._atom(path, value)
        return self._fresh(path, value)

    def _atom(self, path: str, value: Any) -> Plain:
        if isinstance(value, complex):
            return "complex", value.real, value.imag
        if isinstance(value, enum.Enum):
            return "enum", type(value).__module__, type(value).__qualname__, value.name
        if isinstance(value, range | slice):
            return type(value).__name__, value.start, value.stop, value.step
        library = torch()
        if library is not None:
            if isinstance(value, library.Size):
                return "size", list(value)
            if isinstance(value, library.dtype):
                return "dtype", str(value).removeprefix("torch.")
            if isinstance(value, library.device):
                return "device", str(value)
        arrays = numpy()
        if arrays is not None and isinstance(value, arrays.generic):
            return value
        return self._named(path, value)

    def _named(self, path: str, value: Any) -> Plain:
        """A function or class, of those that were there before. Another could be any: a state must not choose it."""
        name = getattr(value, "__module__", None), getattr(value, "__qualname__", "")
        if value in _BUILTINS:
            return "builtin", value.__name__
        if self._base.named.get(name) is value:
            return "named", *name
        raise self._refusal(path, value)

    def _fresh(self, path: str, value: Any) -> Plain:
        """An object that training has made."""
        number = len(self._new)
        self._new[id(value)] = value, number
        kind = type(value)
        if kind is list:
            return "list", number, self._list(path, value)
        if kind is dict or kind is collections.OrderedDict:
            return kind.__name__, number, self._pairs(path, value)
        if kind is collections.defaultdict:
            return "defaultdict", number, self._pairs(path, value), self.value(path, value.default_factory)
        if kind is collections.Counter:
            return "Counter", number, self._pairs(path, value)
        if kind is collections.deque:
            return "deque", number, self._list(path, value), value.maxlen
        if kind is set or kind is frozenset:
            return kind.__name__, number, self._sorted(path, value)
        if kind is bytearray:
            return "bytearray", number, bytes(value)
        library, arrays = torch(), numpy()
        if library is not None and kind in (library.Tensor, library.nn.Parameter):
            if value.grad_fn is not None:
                raise StateError(
                    f"{path} is a tensor that is part of a graph of gradients, which no state can hold: detach() it, "
                    f"or take item(); if it is only looked at, name it in `stateless`"
                )
            shared = self._shared(value)
            if shared is not None:
                return "view", number, shared, list(value.shape), list(value.stride()), value.storage_offset()
            return "tensor", number, kind is library.nn.Parameter, *self._values(value)
        if arrays is not None and kind is arrays.ndarray:
            return "array", number, value
        if isinstance(value, types.FunctionType):
            return self._named(path, value)
        raise self._refusal(path, value)

    def _shared(self, tensor: Any) -> str | None:
        """The path of the tensor in the base whose memory this one looks at."""
        if tensor.layout is not torch().strided or tensor.numel() == 0:
            return None
        path = self._storages.get(tensor.untyped_storage().data_ptr())
        if path is None:
            return None
        owner = self._base.paths[path].obj
        return path if owner.dtype == tensor.dtype and owner.device == tensor.device else None

    def _values(self, obj: Any) -> tuple[Plain, ...]:
        library = torch()
        if library is None or not isinstance(obj, library.Tensor):
            return (obj,)
        gradient = obj.grad if obj.is_leaf and obj.requires_grad else None
        return obj.detach(), obj.device.type, obj.requires_grad, None if gradient is None else gradient.detach()

    def _list(self, path: str, items: Any) -> list[Plain]:
        return [self.value(f"{path}[{index}]", item) for index, item in enumerate(items)]

    def _pairs(self, path: str, items: dict[Any, Any]) -> list[Plain]:
        pairs = []
        for index, (key, item) in enumerate(items.items()):
            inner = f"{path}.{key}" if type(key) is str else f"{path}[{index}]"
            try:
                plain = self.value(inner, item)
            except StateError:
                if not self._but(inner):
                    raise
                plain = ANSWERED
            pairs.append((self.value(f"{path}.key({index})", key), plain))
        return pairs

    def _sorted(self, path: str, items: Any) -> list[Plain]:
        return sorted((self.value(f"{path}[...]", item) for item in items), key=repr)

    def _refusal(self, path: str, value: object) -> StateError:
        return StateError(
            f"{path} holds a {_kind(value)} that training has made, and no state can hold one. Make it in model() or "
            f"__init__(), so that it is there when a fork begins, or keep plain values (numbers, tensors, lists); if "
            f"nothing in training hangs on it, name it in `stateless`"
        )


class Decoder:
    """Puts together what :class:`Encoder` wrote.

    Args:
        base: the same objects, in this process.
    """

    def __init__(self, base: Survey) -> None:
        self._base = base
        self._new: dict[int, Any] = {}
        self._kept: dict[tuple[str, object], object] = {}

    def keep(self, changed: dict[str, Plain]) -> None:
        """Note what owners have set for themselves, before everything is put back."""
        for path, (kind, *parts) in changed.items():
            record = self._base.paths.get(path)
            if record is None or kind not in ("attributes", "mapping"):
                continue
            present = record.read() if kind == "attributes" else record.read()[0]
            for key, item in parts[0]:
                if item == ANSWERED and key in present:
                    self._kept[path, key] = present[key]

    def check(self, values: dict[str, Any]) -> None:
        """Raises :class:`StateError` where values are of another model."""
        for path, found in values.items():
            record = self._base.paths.get(path)
            if record is None or record.kind is not VALUES:
                raise StateError(f"the state is that of another model, or of other code: {path} is not here")
            if tuple(found.shape) != tuple(record.content.form[0]):
                raise StateError(
                    f"the state is that of another model: {path} has shape {tuple(found.shape)} in it, and "
                    f"{tuple(record.content.form[0])} here"
                )

    def write(self, path: str, plain: Plain) -> None:
        """Give the object at ``path`` a content. Raises :class:`StateError` where there is none like it."""
        record = self._base.paths.get(path)
        if record is None:
            raise StateError(f"the state knows of {path}, which is not here: it is that of other code")
        if plain == ANSWERED:
            return
        kind, *parts = plain
        if kind != record.kind.name:
            raise StateError(f"{path} is {record.kind.name} here, and {kind} in the state: it is that of other code")
        if kind == "values":
            self._write_values(record.obj, parts)
            return
        if kind == "items":
            content: Any = self._list(parts[0]), self._dict(parts[1])
        elif kind == "mapping":
            content = self._dict(parts[0], path), self._dict(parts[1])
        elif kind == "attributes":
            content = self._dict(parts[0], path)
        elif kind == "set":
            content = set(self._list(parts[0]))
        elif kind == "function":
            content = record.content[0], self.value(parts[0]), self._dict(parts[1]), self._dict(parts[2])
        elif kind in ("name", "variable"):
            content = self.value(parts[0])
        else:
            content = parts[0]
        record.kind.write(record.obj, content, record.skip)

    def value(self, plain: Plain) -> Any:
        if type(plain) is not tuple:
            return plain
        tag, *parts = plain
        if tag == "@":
            record = self._base.paths.get(parts[0])
            if record is None:
                raise StateError(f"the state refers to {parts[0]}, which is not here: it is that of other code")
            return record.obj
        if tag == "again":
            return self._new[parts[0]]
        if tag in _PLAIN_TAGS:
            return self._plain(tag, parts)
        return self._made(tag, *parts)

    def _plain(self, tag: str, parts: list[Any]) -> Any:
        if tag == "missing":
            return MISSING
        if tag == "tuple":
            return tuple(self._list(parts[0]))
        if tag == "method":
            owner = self.value(parts[0])
            function = next((vars(c)[parts[1]] for c in type(owner).__mro__ if parts[1] in vars(c)), None)
            if not isinstance(function, types.FunctionType):
                raise StateError(f"the state names a method {parts[1]} of {parts[0]}, which is not here")
            return types.MethodType(function, owner)
        if tag == "complex":
            return complex(*parts)
        if tag == "range":
            return range(*parts)
        if tag == "slice":
            return slice(*parts)
        if tag == "size":
            return torch().Size(parts[0])
        if tag == "device":
            return torch().device(parts[0])
        if tag == "dtype":
            found = getattr(torch(), parts[0], None)
            if not isinstance(found, torch().dtype):
                raise StateError(f"the state names a dtype {parts[0]!r} that this torch does not know")
            return found
        if tag == "enum":
            kind = named(parts[0], parts[1])
            if not isinstance(kind, enum.EnumMeta) or parts[2] not in kind.__members__:
                raise StateError(f"the state names {parts[0]}.{parts[1]}.{parts[2]}, which is not here")
            return kind.__members__[parts[2]]
        if tag == "builtin":
            return next(kind for kind in _BUILTINS if kind.__name__ == parts[0])
        known = self._base.named.get((parts[0], parts[1]))
        if known is None:
            raise StateError(f"the state names {parts[0]}.{parts[1]}, which is not here")
        return known

    def _made(self, tag: str, number: int, *parts: Any) -> Any:
        make: dict[str, Callable[[], Any]] = {
            "list": list,
            "dict": dict,
            "OrderedDict": collections.OrderedDict,
            "Counter": collections.Counter,
            "set": set,
        }
        if tag in make:
            # Known before it is filled: it may contain itself.
            made = self._new[number] = make[tag]()
            if tag == "list":
                made.extend(self._list(parts[0]))
            else:
                made.update(self._list(parts[0]) if tag == "set" else self._dict(parts[0]))
            return made
        if tag == "defaultdict":
            made = self._new[number] = collections.defaultdict(self.value(parts[1]))
            made.update(self._dict(parts[0]))
        elif tag == "deque":
            made = self._new[number] = collections.deque(maxlen=parts[1])
            made.extend(self._list(parts[0]))
        elif tag == "frozenset":
            made = frozenset(self._list(parts[0]))
        elif tag == "bytearray":
            made = bytearray(parts[0])
        elif tag == "array":
            made = parts[0].copy()
        elif tag == "view":
            owner = self._base.paths[parts[0]].obj
            made = owner.detach().as_strided(parts[1], parts[2], parts[3])
        elif tag == "tensor":
            is_parameter, values, device, *rest = parts
            made = duplicate(values).to(device)
            if is_parameter:
                made = torch().nn.Parameter(made, requires_grad=False)
            self._write_values(made, [values, device, *rest])
        else:
            raise StateError(f"the state holds a {tag!r}, which this hpstage does not know")
        self._new[number] = made
        return made

    def _write_values(self, obj: Any, parts: list[Any]) -> None:
        values, *rest = parts
        self.fill(obj, values, rest[2] if rest else None)
        if rest and obj.is_leaf and obj.requires_grad != rest[1]:
            obj.requires_grad_(rest[1])

    def fill(self, obj: Any, values: Any, gradient: Any | None) -> None:
        """Give a tensor or array values and a gradient, of which copies are made."""
        library = torch()
        if library is not None and isinstance(obj, library.Tensor):
            fill(obj, values)
            if obj.is_leaf:
                obj.grad = None if gradient is None else duplicate(gradient).to(obj.device)
        elif obj.shape != values.shape or obj.dtype != values.dtype:
            raise StateError(f"the state has an array of shape {values.shape} where {obj.shape} is here")
        else:
            obj[...] = values

    def _list(self, items: list[Plain]) -> list[Any]:
        return [self.value(item) for item in items]

    def _dict(self, pairs: list[Plain], path: str = "") -> dict[Any, Any]:
        made = {}
        for key, item in pairs:
            name = self.value(key)
            if item != ANSWERED:
                made[name] = self.value(item)
            elif (path, name) in self._kept:
                made[name] = self._kept[path, name]
        return made


_PLAIN_TAGS = frozenset(
    ("missing", "tuple", "method", "complex", "range", "slice", "size", "device", "dtype", "enum", "named", "builtin")
)


def named(module: str, qualname: str) -> object:
    """What a loaded module has under a name. Nothing is imported, and nothing called."""
    found: object = sys.modules.get(module)
    for part in qualname.split("."):
        if not isinstance(found, types.ModuleType | type):
            return None
        found = vars(found).get(part)
    return found


def _kind(value: object) -> str:
    module = type(value).__module__
    return type(value).__qualname__ if module == "builtins" else f"{module}.{type(value).__qualname__}"
