"""The kind of each object. Mutable objects of no other kind are opaque: they are distinguished by identity alone."""

from __future__ import annotations

import _multiprocessing  # type: ignore[import-not-found]
import collections
import contextvars
import enum
import functools
import io
import mmap
import operator
import random
import threading
import types
import weakref
from typing import Any

from hpstage.training.capture import containers, instances, pointees, stateful, values
from hpstage.training.capture.generators import generators
from hpstage.training.capture.kind import RUNNERS, Captured, Kind, Opaque, is_atomic, numpy, torch
from hpstage.training.capture.on_disk import is_read_only_hdf5
from hpstage.training.capture.settings import OfClasses, OfProcess, Registrations, Settings
from hpstage.training.code.attributes import has_dict, has_own_memory, slots_of
from hpstage.training.code.lookups import Modules
from hpstage.training.code.namespaces import ClassAttributes, LibraryNames, Slot
from hpstage.training.code.owner import by_type, is_users_code, module_of

# Modules of classes whose instances describe code, or set modes of it.
_DESCRIPTIONS = (
    "inspect",
    "typing",
    "torch.amp.autocast_mode",  # they record the previous setting each time they are entered
    "torch.cuda.amp.autocast_mode",
)
# Modules of classes whose instances are machinery (compilers, threads), not what training computes with.
_MACHINERY = (
    *_DESCRIPTIONS,
    "torch._dynamo",
    "torch._inductor",
    "torch._functorch",
    "torch.fx",
    "torch.jit",
    "torch._C",
    "torch._ops",
    "torch.autograd",
    "_thread",
    "_ctypes",
    "asyncio.unix_events",
    "multiprocessing.heap",
    "importlib",
    "hpstage",
    "keras.src.utils.tracking",  # which layer has which variables, by ids
    "flax.ids",  # which module is which, in this process
)
# Modules of classes whose instances show, record or run training. Only attributes that the user's code reads count.
_SKIPPED = (
    *_DESCRIPTIONS,
    "logging",
    "tqdm",
    "loguru",
    "structlog",
    *(f"rich.{part}" for part in ("console", "live", "status", "_log_render")),
    "tensorboard",
    "torch.utils.tensorboard",
    "torch.profiler",
    "optuna",
    "distributed",
    # hpstage.torch.lightning saves what training changes in these.
    *(
        f"lightning.pytorch.{part}"
        for part in ("trainer", "loops", "strategies", "plugins", "accelerators", "profilers")
    ),
    *(
        f"lightning.fabric.{part}"
        for part in ("accelerators", "fabric", "loggers", "plugins", "strategies", "utilities")
    ),
)

VALUES, SET = values.Values(), containers.Unordered()
_WEAK_SET, _FROZEN = containers.WeakMembers(), containers.Frozen()
_WEAK_KEYS, _WEAK_VALUES = containers.WeakKeys(), containers.WeakValues()
SETS, WEAK = (SET, _WEAK_SET, _FROZEN), (_WEAK_SET, _WEAK_KEYS, _WEAK_VALUES)
_SEQUENCE, _MAPPING, _FUNCTION = containers.Sequence(), containers.Mapping(), instances.Function()
_OPAQUE, FOREIGN = Opaque(), instances.Foreign()
SKIPPED = instances.Instance()
"""The kind of library objects that show, record or describe training (progress bars, loggers, signatures). ``skip`` is
:class:`AllBut` the attributes that the user's code reads: training cannot depend on the others."""
TUPLE = instances.Instance()
"""The kind of instances of ``tuple`` subclasses that have attributes besides their items."""
INSTANCE, _OBJECTS, _SCRIPTED = instances.Instance(), containers.Objects(), instances.Scripted()
RUNNER = instances.Instance()
"""The kind of threads and pools of the user's classes: the attributes that the user's class adds to the library's."""
_VECTORIZED = instances.Vectorized()
_WRAPPERS = (property, staticmethod, classmethod)  # what they hold never changes, but attributes of subclasses may
_METHODS = (types.MethodType, types.BuiltinFunctionType, types.MethodWrapperType)
_BYTES, RANDOM_STATE, _FILE = containers.Bytes(), stateful.RandomSource(), stateful.File()
_ACCUMULATOR, STORAGE = values.Accumulator(), values.Storage()
WITHOUT_ATTRIBUTES = frozenset((_BYTES, RANDOM_STATE, _FILE, *SETS))
"""Kinds that do not cover attributes, which the user's subclasses of such types may have."""
_BULKS = {_SEQUENCE: containers.Bulk(_SEQUENCE), _MAPPING: containers.Bulk(_MAPPING)}
CACHE, MODULES = stateful.Cache(), instances.ModulesByText()

_BY_TYPE: tuple[tuple[tuple[Any, ...], Kind], ...] = (
    ((Settings,), OfProcess()),
    ((Registrations,), OfClasses()),
    ((Slot,), instances.Slot()),
    ((Modules,), MODULES),
    ((LibraryNames,), instances.LibraryNamespace()),
    ((ClassAttributes,), instances.ClassNamespace()),
    ((list, collections.deque), _SEQUENCE),
    ((collections.OrderedDict,), containers.Ordered()),
    ((collections.defaultdict,), containers.Defaulting()),
    ((dict,), _MAPPING),
    ((types.MappingProxyType,), containers.ReadOnly()),
    (containers.DICT_VIEWS, containers.DictView()),
    ((weakref.WeakKeyDictionary,), _WEAK_KEYS),
    ((weakref.WeakValueDictionary,), _WEAK_VALUES),
    ((set,), SET),
    ((frozenset,), _FROZEN),
    ((weakref.WeakSet,), _WEAK_SET),
    ((types.FunctionType,), _FUNCTION),
    ((types.CellType,), instances.Cell()),
    ((functools.partial,), instances.Partial()),
    ((operator.itemgetter, operator.attrgetter, operator.methodcaller), instances.Operator()),
    ((stateful.CACHE_TYPE,), CACHE),
    ((types.GeneratorType, *stateful.ITERATORS), stateful.Moving()),
    ((io.IOBase,), _FILE),
    ((bytearray,), _BYTES),
    ((memoryview,), stateful.View()),
    ((type(threading.Lock()), _multiprocessing.SemLock), stateful.Lock()),
    ((threading.local,), instances.PerThread()),
    ((contextvars.ContextVar,), stateful.Context()),
)


def kind_of(obj: Any) -> Kind | None:
    """Return the kind of ``obj``; ``None`` for atoms, and for tuples and methods, which only hold other objects."""
    kind = type(obj)
    found = kind_of_type(kind)
    if found is None or kind in _SETTLED:
        return found
    if found is _FUNCTION:
        return found if is_users_code(obj) or _holds_users(obj) else _OPAQUE
    if found is VALUES:
        return _OBJECTS if issubclass(kind, numpy().ndarray) and obj.dtype.hasobject else found
    if found is FOREIGN and isinstance(obj, mmap.mmap) and values.is_read_only(obj):
        return _FILE
    if found is FOREIGN and is_read_only_hdf5(obj):
        return SKIPPED if has_dict(kind) else _OPAQUE
    if (found is _SEQUENCE or found is _MAPPING) and containers.is_bulk(obj):
        return _BULKS[found]
    return found


def _holds_users(function: Any) -> bool:
    """Return whether a library's function, such as a wrapper, closes over code or objects of the user's."""
    cells = [cell.cell_contents for cell in function.__closure__ or () if cell != _UNBOUND]
    return any(is_users_code(content) or is_users_code(type(content)) for content in cells)


_UNBOUND = types.CellType()
_SETTLED = frozenset((collections.OrderedDict, set))


@by_type
def kind_of_type(kind: Any) -> Kind | None:
    library, arrays = torch(), numpy()
    if library is not None and issubclass(kind, library.Tensor):
        return VALUES
    if library is not None and kind is library._C._functions.AccumulateGrad:
        return _ACCUMULATOR
    if library is not None and issubclass(kind, library.UntypedStorage):
        return STORAGE
    if issubclass(kind, arrays.ndarray):
        return VALUES
    if kind is arrays.ufunc:
        return _VECTORIZED
    if issubclass(kind, random.SystemRandom):
        return INSTANCE if is_users_code(kind) else _OPAQUE  # the system's random numbers have no state
    if issubclass(kind, (*generators(), arrays.random.SeedSequence)):
        return RANDOM_STATE
    if issubclass(kind, enum.Enum) and is_users_code(kind):
        return INSTANCE  # a member never changes, but its attributes may
    if is_atomic(kind) or kind in (tuple, *_METHODS, weakref.ref):
        return None
    for types_, handler in _BY_TYPE:
        if issubclass(kind, types_):
            return handler
    if issubclass(kind, tuple):
        return TUPLE if has_dict(kind) or slots_of(kind) else None
    if library is not None and issubclass(kind, library.jit.ScriptModule):
        return _SCRIPTED
    if issubclass(kind, pointees.DATA):
        return FOREIGN  # not by its class's module: ``POINTER(c_int)`` is one class for all modules
    if library is None or not issubclass(kind, library.nn.Module):
        module = module_of(kind)
        if _is_among(module, ("h5py",)):
            return FOREIGN
        if issubclass(kind, RUNNERS):
            return RUNNER if is_users_code(kind) else _OPAQUE
        if not is_users_code(kind) and not issubclass(kind, Captured):
            if _is_among(module, _SKIPPED) and (has_dict(kind) or slots_of(kind)):
                return SKIPPED
            if _is_among(module, _MACHINERY):
                return _OPAQUE
        if has_own_memory(kind) and not issubclass(kind, int | float | complex | str | bytes):
            if hasattr(kind, "__get__") and not is_users_code(kind):
                return _OPAQUE
            if not issubclass(kind, _WRAPPERS):
                return FOREIGN
    return INSTANCE if has_dict(kind) or slots_of(kind) else _OPAQUE


def _is_among(module: str, names: tuple[str, ...]) -> bool:
    return any(module == name or module.startswith(f"{name}.") for name in names)
