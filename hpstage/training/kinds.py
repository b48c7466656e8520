"""Which kind an object is of. Whatever is neither of a kind here nor immutable is told apart by identity alone."""

from __future__ import annotations

import collections
import contextvars
import enum
import functools
import io
import random
import threading
import types
import weakref
from typing import Any

from hpstage.training.containers import (
    Bulk,
    Bytes,
    Defaulting,
    Frozen,
    Mapping,
    Objects,
    Ordered,
    ReadOnly,
    Sequence,
    Unordered,
    WeakKeys,
    WeakMembers,
    WeakValues,
    is_bulk,
)
from hpstage.training.instances import (
    Cell,
    ClassNamespace,
    Foreign,
    Function,
    Instance,
    Partial,
    PerThread,
    Scripted,
    Slot,
    TupleWithAttributes,
)
from hpstage.training.kind import Kind, Opaque, by_type, has_dict, has_own_memory, is_atomic, numpy, slots_of, torch
from hpstage.training.reach import ClassAttributes, of_user
from hpstage.training.reach import Slot as GlobalName
from hpstage.training.settings import OfProcess, Settings
from hpstage.training.told import CACHE_TYPE, ITERATORS, Cache, Context, File, Lock, Moving, RandomSource, View
from hpstage.training.values import Values

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
    "multiprocessing.heap",
    "multiprocessing.synchronize",
    "multiprocessing.context",
    "asyncio",
    "inspect",
    "typing",
    "importlib",
    "hpstage",
    "optuna",
    "distributed",
)

VALUES, SET = Values(), Unordered()
_WEAK_SET, _FROZEN = WeakMembers(), Frozen()
SETS = (SET, _WEAK_SET, _FROZEN)
_SEQUENCE, _MAPPING, _FUNCTION, _OPAQUE, _FOREIGN = Sequence(), Mapping(), Function(), Opaque(), Foreign()
_INSTANCE, _OBJECTS, _SCRIPTED = Instance(), Objects(), Scripted()
_BULKS = {_SEQUENCE: Bulk(_SEQUENCE), _MAPPING: Bulk(_MAPPING)}
CACHE = Cache()

_BY_TYPE: tuple[tuple[tuple[Any, ...], Kind], ...] = (
    ((Settings,), OfProcess()),
    ((GlobalName,), Slot()),
    ((ClassAttributes,), ClassNamespace()),
    ((list, collections.deque), _SEQUENCE),
    ((collections.OrderedDict,), Ordered()),
    ((collections.defaultdict,), Defaulting()),
    ((dict,), _MAPPING),
    ((types.MappingProxyType,), ReadOnly()),
    ((weakref.WeakKeyDictionary,), WeakKeys()),
    ((weakref.WeakValueDictionary,), WeakValues()),
    ((set,), SET),
    ((frozenset,), _FROZEN),
    ((weakref.WeakSet,), _WEAK_SET),
    ((types.FunctionType,), _FUNCTION),
    ((types.CellType,), Cell()),
    ((functools.partial,), Partial()),
    ((CACHE_TYPE,), CACHE),
    ((types.GeneratorType, *ITERATORS), Moving()),
    ((io.IOBase,), File()),
    ((memoryview,), View()),
    ((type(threading.Lock()),), Lock()),
    ((threading.local,), PerThread()),
    ((contextvars.ContextVar,), Context()),
)


def kind_of(obj: Any) -> Kind | None:
    """How ``obj`` is handled; ``None``: it is an atom, or a tuple or method, which hold others and never change."""
    kind = type(obj)
    found = _kind_of_type(kind)
    if found is None or kind in _SETTLED:
        return found
    if found is _FUNCTION:
        return found if of_user(obj.__module__) else _OPAQUE
    if found is VALUES:
        arrays = numpy()
        return _OBJECTS if arrays is not None and issubclass(kind, arrays.ndarray) and obj.dtype.hasobject else found
    if (found is _SEQUENCE or found is _MAPPING) and is_bulk(obj):
        return _BULKS[found]
    return found


_SETTLED = frozenset((collections.OrderedDict, set))


@by_type
def _kind_of_type(kind: Any) -> Kind | None:
    library, arrays = torch(), numpy()
    if library is not None and issubclass(kind, library.Tensor):
        return VALUES
    if arrays is not None and issubclass(kind, arrays.ndarray):
        return VALUES
    if kind is bytearray or issubclass(kind, bytearray):
        return _BYTES
    if issubclass(kind, random.SystemRandom):
        return _OPAQUE  # the system's numbers: it has no state
    if issubclass(kind, _generators()):
        return _RANDOM
    if issubclass(kind, enum.Enum) and of_user(kind.__module__):
        return _INSTANCE  # though a member never changes, its attributes may
    if is_atomic(kind) or kind in (tuple, types.MethodType, types.BuiltinFunctionType, weakref.ref):
        return None
    for types_, handler in _BY_TYPE:
        if issubclass(kind, types_):
            return handler
    if issubclass(kind, tuple):
        return TUPLE if has_dict(kind) or slots_of(kind) else None
    if library is not None and issubclass(kind, library.jit.ScriptModule):
        return _SCRIPTED
    if library is None or not issubclass(kind, library.nn.Module):
        module = kind.__module__ or "builtins"
        if any(module == name or module.startswith(f"{name}.") for name in _MACHINERY):
            return _OPAQUE
        if has_own_memory(kind) and not issubclass(kind, int | float | complex | str | bytes):
            return _OPAQUE if hasattr(kind, "__get__") else _FOREIGN
    return _INSTANCE if has_dict(kind) or slots_of(kind) else _OPAQUE


TUPLE = TupleWithAttributes()
_BYTES, _RANDOM = Bytes(), RandomSource()


def _generators() -> tuple[Any, ...]:
    library, arrays = torch(), numpy()
    found: list[Any] = [random.Random]
    if library is not None:
        found.append(library.Generator)
    if arrays is not None:
        found += [arrays.random.RandomState, arrays.random.Generator, arrays.random.BitGenerator]
    return tuple(found)
