"""Loading of a state written by :mod:`hpstage.training.capture.encoding` into the objects that it names."""

from __future__ import annotations

import collections
import enum
import functools
import math
import sys
import threading
import types
import weakref
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from hpstage.checkpoints import jax_arrays
from hpstage.errors import StateError
from hpstage.training.capture import allowed, rebuilt
from hpstage.training.capture.aliases import RestoredMemory
from hpstage.training.capture.allowed import CONTAINERS, RANDOM, creatable, may_be_given, method_of
from hpstage.training.capture.atoms import dtype_of, is_known, made_of
from hpstage.training.capture.derived import counting_step, without_graph
from hpstage.training.capture.encoding import BUILTINS, Plain, is_answered
from hpstage.training.capture.generators import of_process
from hpstage.training.capture.kind import is_struct, numpy, torch
from hpstage.training.capture.kinds import VALUES
from hpstage.training.capture.on_disk import opened_file, opened_hdf5, opened_map
from hpstage.training.capture.refusals import cannot_be_read
from hpstage.training.capture.stateful import RandomSource
from hpstage.training.capture.survey import Survey
from hpstage.training.capture.values import duplicate, fill, is_tensor, move, restore_array
from hpstage.training.code.attributes import container_of, write_own
from hpstage.training.code.namespaces import MISSING
from hpstage.training.code.owner import found_in

_MALFORMED = (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, SyntaxError, RecursionError)
"""Errors that Python and libraries raise for malformed parts, which no encoder writes."""


class Decoder:
    """Reconstructs what :class:`~hpstage.training.capture.encoding.Encoder` wrote.

    Args:
        base: the survey in this process that corresponds to the encoder's base.
        memory: the encoder's :attr:`~hpstage.training.capture.encoding.Encoder.memory`.
    """

    def __init__(self, base: Survey, memory: Plain) -> None:
        self._base = base
        self._new: dict[int, Any] = {}
        self._kept: dict[tuple[str, object], object] = {}
        self._memory = RestoredMemory(base, memory)

    def admit(self, local: Survey) -> None:
        """From now on, also find the objects of ``local`` by their paths."""
        self._base = self._base.joined(local)
        self._memory.base = self._base

    def keep(self, changed: dict[str, Plain]) -> None:
        """Remember the values that owners have restored themselves, before everything else is restored."""
        for path, (kind, *parts) in changed.items():
            record = self._base.paths.get(path)
            if record is None or kind not in ("attributes", "mapping"):
                continue
            present = record.read() if kind == "attributes" else record.read()[0]
            for key, item in parts[0]:
                if is_answered(item) and key in present:
                    self._kept[path, key] = present[key]

    def fill(self, values: dict[str, Any], changed: dict[str, Plain]) -> None:
        """Move tensors and arrays to their places in memory and fill in their values.

        Raises:
            StateError: the values belong to another model.
        """
        filled = []
        for path, found in values.items():
            record = self._base.paths.get(path)
            if record is None or record.kind is not VALUES:
                raise StateError(f"the state belongs to another model or other code: there is no {path} here")
            plain = changed.get(path)
            place = plain[1] if plain is not None and plain[0] == "values" else None
            shape = tuple(found.shape) if place is None else tuple(place[2])
            as_bytes = not is_tensor(found) and found.dtype != record.obj.dtype
            if place is None and not as_bytes and shape != tuple(record.content.form[0]):
                raise StateError(
                    f"the state belongs to another model: {path} has shape {shape} in it, and "
                    f"{tuple(record.content.form[0])} here"
                )
            filled.append((record.obj, found))
            if place is not None:
                self._move(record.obj, *place)
        for obj, found in filled:
            fill(obj, found)

    def _move(self, obj: Any, place: Plain, dtype: str, shape: Any, strides: Any) -> None:
        kind = self._make_dtype(dtype)
        if place is None:
            storage, offset = torch().empty(0, dtype=kind, device=obj.device).untyped_storage(), 0
        else:
            at = self._memory.tensor(place, shape, strides, kind, obj.device)
            storage, offset = at.untyped_storage(), at.storage_offset()
        move(obj, storage, shape, tuple(strides), kind, offset)

    def write_all(self, changed: dict[str, Plain]) -> None:
        """Write contents into the objects at their paths. Raises :class:`StateError` if one cannot be written."""
        for path, plain in changed.items():
            with cannot_be_read(f"the state sets {path} to an object that does not exist here"):
                self._write(path, plain)

    def _write(self, path: str, plain: Plain) -> None:
        """Write content into the object at ``path``. Raises :class:`StateError` if no such object exists."""
        record = self._base.paths.get(path)
        if record is None:
            raise StateError(f"the state sets {path}, which is not available here: it was saved by other code")
        if is_answered(plain):
            return
        kind, *parts = plain
        if kind != record.kind.name:
            raise StateError(f"the state was saved by other code: {path} is {kind} in it, and {record.kind.name} here")
        if kind == "values":
            self._write_tensor(record.obj, *parts[1:])
            return
        if kind == "items":
            content: Any = self._list(parts[0]), self._dict(parts[1])
        elif kind == "objects":
            content = self._list(parts[0]), record.obj.shape, parts[1]
        elif kind == "mapping":
            content = self._dict(parts[0], path, record.content[0]), self._dict(parts[1])
        elif kind == "attributes":
            content = self._dict(parts[0], path, record.content)
        elif kind == "foreign":
            content = self._dict(parts[0]), parts[1]
        elif kind == "set":
            content = self._list(parts[0])
        elif kind == "settings":
            content = {name: self.value(value) for name, value in parts[0]}
        elif kind == "function":
            closure, *_, code = record.content
            content = closure, self.value(parts[0]), self._dict(parts[1]), self._dict(parts[2]), code
        elif kind in ("name", "variable"):
            content = self.value(parts[0])
        else:
            content = parts[0]
        record.kind.write(record.obj, content, record.skip)

    def _write_tensor(self, obj: Any, trained: bool, gradient: Plain, own: Plain) -> None:
        if not is_tensor(obj):
            restore_array(obj, trained, self._dict(own))
            return
        if obj.is_leaf:
            if obj.requires_grad != trained:
                obj.requires_grad_(trained)
            obj.grad = self.value(gradient)
        write_own(obj, self._dict(own))

    def value(self, plain: Plain) -> Any:
        """Return the value that a plain value stands for.

        Raises:
            StateError: it does not exist in this process, or no encoder writes such a plain value.
        """
        if type(plain) is not tuple:
            return plain
        tag, *parts = plain or ("",)
        try:  # not in a function around this one: one more call for each level would limit how deep a state can be
            if tag == "@":
                record = self._base.paths.get(parts[0])
                if record is None:
                    raise StateError(
                        f"the state refers to {parts[0]}, which is not available here: it was saved by other code"
                    )
                return record.obj
            if tag == "again":
                return self._new[parts[0]]
            if tag in CONTAINERS:
                return self._container(tag, *parts)
            if is_known(tag):
                return made_of(tag, self._list(parts))
            name = tag.replace(" ", "_")
            if (create := getattr(self, f"_create_{name}", None)) is not None:
                number, *rest = parts
                made = self._new[number] = create(*rest)
                return made
            make: Callable[..., Any] | None = getattr(self, f"_make_{name}", None)
            if make is None:
                raise StateError(f"the state holds a {tag!r}, which this version of hpstage does not know")
            return make(*parts)
        except StateError:
            raise
        except _MALFORMED as error:
            raise StateError(f"the state holds an invalid {tag}: {error}") from error

    # --- immutable values

    def _make_missing(self) -> Any:
        return MISSING

    def _make_tuple(self, items: Plain) -> Any:
        return tuple(self._list(items))

    def _make_method(self, owner: Plain, name: str) -> Any:
        found = self.value(owner)
        return _here(method_of(found, name), f"a method {name} of {type(found).__qualname__}")

    _make_slot = _make_method

    def _make_weak(self, target: Plain) -> Any:
        found = self.value(target)
        return weakref.ref(_Gone() if found is None else found)

    def _make_size(self, sizes: list[int]) -> Any:
        return torch().Size(sizes)

    def _make_device(self, name: str) -> Any:
        return torch().device(name)

    def _make_constant(self, name: str) -> Any:
        found = vars(torch()).get(name)  # not getattr(): torch would import a module of that name
        if not isinstance(found, torch().layout | torch().memory_format):
            raise StateError(f"the state names torch.{name}, which this version of torch does not know")
        return found

    _make_numpy_dtype = staticmethod(dtype_of)

    def _make_descriptor(self, kind: Plain, name: str) -> Any:
        owner = self.value(kind)
        found = vars(owner).get(name) if isinstance(owner, type) else None
        is_method = isinstance(found, types.MethodDescriptorType | types.WrapperDescriptorType)
        return _here(found if is_method else None, f"a method {name} of a class")

    def _make_dtype(self, name: str) -> Any:
        found = vars(torch()).get(name)
        if not isinstance(found, torch().dtype):
            raise StateError(f"the state names a dtype {name!r} that this version of torch does not know")
        return found

    def _make_numpy_text(self, text: str | bytes) -> Any:
        return numpy().str_(text) if isinstance(text, str) else numpy().bytes_(text)

    def _make_numpy_time(self, dtype: str, number: int) -> Any:
        return numpy().int64(number).astype(dtype)

    def _make_enum(self, module: str, qualname: str, *names: str) -> Any:
        kind = found_in(sys.modules.get(module), qualname)
        if not isinstance(kind, enum.EnumMeta) or any(name not in kind.__members__ for name in names):
            raise StateError(f"the state names {module}.{qualname}.{'|'.join(names)}, which is not available here")
        members: list[Any] = [kind.__members__[name] for name in names]
        return kind(sum(member.value for member in members)) if issubclass(kind, enum.Flag) else members[0]

    def _make_builtin(self, name: str) -> Any:
        return _here(next((kind for kind in BUILTINS if kind.__name__ == name), None), f"builtins.{name}")

    def _make_named(self, module: str, qualname: str) -> Any:
        return _here(self._base.named.get((module, qualname)), f"{module}.{qualname}")

    def _make_nameable(self, module: str, qualname: str) -> Any:
        return _here(allowed.nameable(self._base, module, qualname), f"{module}.{qualname}")

    def _make_module(self, name: str) -> Any:
        return _here(allowed.module_named(self._base, name), f"the module {name}")

    def _make_pure(self, module: str, name: str) -> Any:
        found = allowed.pure_function(module, name) or allowed.ufunc(self._base, module, name)
        return _here(found, f"{module}.{name}")

    def _make_counting_step(self, optimizer: Plain) -> Any:
        return counting_step(self.value(optimizer))

    # --- objects created by training

    def _container(self, tag: str, number: int, items: Plain, rest: Plain) -> Any:
        made: Any
        if tag == "frozenset":
            made = frozenset(self._list(items))
        elif tag == "bytearray":
            made = bytearray(memoryview(items))  # memoryview() refuses a number, which would give as many zeros
        else:
            made = collections.deque(maxlen=rest) if tag == "deque" else CONTAINERS[tag]()
        self._new[number] = made  # before it is filled: it may contain itself
        if tag in ("list", "deque"):
            made.extend(self._list(items))
        elif tag == "set":
            made.update(self._list(items))
        elif tag not in ("frozenset", "bytearray"):
            for key, item in self._dict(items).items():
                made[key] = item
            own = self._dict(rest)
            if tag == "defaultdict":
                made.default_factory = own["factory"]
            else:
                write_own(made, own)
        return made

    def _make_objects(self, number: int, items: Plain, shape: list[int], order: Any, writeable: bool) -> Any:
        if math.prod(shape) != len(items):
            raise StateError(f"the state holds {len(items)} objects for an array of the shape {shape}")
        made = self._new[number] = numpy().empty(tuple(shape), dtype=object, order=order)
        for index, item in enumerate(self._list(items)):
            made.flat[index] = item
        made.flags.writeable = writeable
        return made

    def _make_thread_local(self, number: int, own: Plain) -> threading.local:
        made = self._new[number] = threading.local()
        vars(made).update(self._dict(own))
        return made

    def _create_array(self, values: Any, description: Plain, shape: list[int], writeable: bool) -> Any:
        dtype = dtype_of(description)
        made = values if values.dtype == dtype else values.view(dtype).reshape(tuple(shape))
        made = made.copy(order="K")
        made.flags.writeable = writeable
        return made

    def _create_jax_array(self, array: Any) -> Any:
        if not jax_arrays.is_array(array):
            raise StateError(f"the state holds a {type(array).__qualname__} where a JAX array belongs")
        return array

    def _create_array_view(
        self, place: Plain, description: Plain, shape: Any, strides: Any, writeable: bool, base: str | None
    ) -> Any:
        owner = None if base is None else self.value(("@", base))
        made = self._memory.array(place, shape, strides, dtype_of(description), owner)
        made.flags.writeable = writeable
        return made

    def _make_tensor(self, number: int, values: Any, parameter: bool, device: str, *rest: Any) -> Any:
        return self._tensor(number, duplicate(values).to(device), parameter, *rest)

    def _create_sparse(self, indices: Any, values: Any, shape: list[int], coalesced: bool, device: str) -> Any:
        parts = duplicate(indices).to(device), duplicate(values).to(device)
        return torch().sparse_coo_tensor(*parts, shape, check_invariants=True)._coalesced_(coalesced)

    def _make_view(self, number: int, place: Plain, dtype: str, shape: Any, strides: Any, *form: Any) -> Any:
        conj, neg, parameter, device, *rest = form
        at = self._memory.tensor(place, tuple(shape), tuple(strides), self._make_dtype(dtype), device)
        at = at.conj() if conj else at
        at = torch()._neg_view(at) if neg else at
        return self._tensor(number, at, parameter, *rest)

    def _tensor(self, number: int, made: Any, parameter: bool, trained: bool, gradient: Plain, own: Plain) -> Any:
        if parameter:
            made = torch().nn.Parameter(made, requires_grad=False)
        self._new[number] = made
        self._write_tensor(made, trained, gradient, own)
        return made

    def _create_random(self, name: str, content: Any, device: str) -> Any:
        kind = RANDOM[name]()
        made = kind(device) if device else kind()
        RandomSource().write(made, content)
        return made

    def _create_generator_of_process(self, name: str, content: Any) -> Any:
        made = _here(of_process().get(name), f"the random generator of {name}")
        RandomSource().write(made, content)
        return made

    def _create_numbers(self, source: Plain) -> Any:
        return numpy().random.Generator(self.value(source))

    def _create_source(self, name: str, sequence: Plain, content: Any) -> Any:
        random = numpy().random
        kind = vars(random).get(name)
        if not isinstance(kind, type) or not issubclass(kind, random.BitGenerator) or kind is random.BitGenerator:
            raise StateError(f"the state holds a bit generator {name!r} that this version of NumPy does not know")
        entropy, key, size = sequence
        made = kind(random.SeedSequence(entropy, spawn_key=tuple(key), pool_size=size))
        RandomSource().write(made, content)
        return made

    def _make_source_of(self, path: str) -> Any:
        return self.value(("@", path)).bit_generator

    def _create_derived(self, values: Any, device: str, path: str, leaves: Plain = ()) -> Any:
        return without_graph(duplicate(values).to(device), path, self._list(leaves))

    def _make_partial(self, number: int, function: Plain, arguments: Plain, keywords: Plain, own: Plain) -> Any:
        made: Any = functools.partial(_Gone)
        self._new[number] = made  # before it is filled: what it holds may refer to it
        called = self.value(function)
        if not may_be_given(called):
            raise StateError(f"the state holds arguments for {called!r}, and no state may provide them")
        made.__setstate__((called, tuple(self._list(arguments)), self._dict(keywords), self._dict(own)))
        return made

    def _create_map(
        self, path: str, sampled: str, offset: int, order: str, description: Plain, shape: list[int]
    ) -> Any:
        return opened_map(path, sampled, offset, order, dtype_of(description), shape)

    _create_opened, _create_hdf5 = staticmethod(opened_file), staticmethod(opened_hdf5)

    def _make_instance(self, number: int, module: str, qualname: str, items: Plain, own: Plain) -> Any:
        simple = (module, qualname) == ("types", "SimpleNamespace")
        kind: Any = types.SimpleNamespace if simple else creatable(self._base, module, qualname)
        if kind is None:
            raise StateError(f"the state holds a {module}.{qualname}, which is not available here")
        if items is not None:
            made = self._new[number] = _tuple_of(kind, self._list(items))
        else:
            made = self._new[number] = kind() if simple else object.__new__(kind)
        write_own(made, self._dict(own))
        return made

    def _make_filled(self, number: int, module: str, qualname: str, items: Plain, own: Plain) -> Any:
        kind: Any = creatable(self._base, module, qualname)
        container = None if kind is None else container_of(kind)
        if container is None:
            raise StateError(f"the state holds a {module}.{qualname}, which is not available here")
        made = self._new[number] = container.__new__(kind)
        if container is list:
            list.extend(made, self._list(items))
        else:
            dict.update(made, self._dict(items))
        write_own(made, self._dict(own))
        return made

    def _create_rebuilt(self, name: str, parts: Plain) -> Any:
        return rebuilt.made_of(name, self._list(parts), self._base)

    def _list(self, items: list[Plain]) -> list[Any]:
        return [self.value(item) for item in items]

    def _dict(self, pairs: list[Plain], path: str = "", before: Mapping[Any, Any] = MappingProxyType({})) -> Any:
        made = {}
        for key, item in pairs:
            name = self.value(key)
            if type(item) is tuple and item[0] == "same":
                made[name] = before[name]
            elif not is_answered(item):
                made[name] = self.value(item)
            elif (path, name) in self._kept:
                made[name] = self._kept[path, name]
        return made


def _here(found: Any, name: str) -> Any:
    """Return the object found for a name in a state. Raises :class:`StateError` if none was found in this process."""
    if found is None:
        raise StateError(f"the state names {name}, which is not available here")
    return found


def _tuple_of(kind: Any, items: list[Any]) -> Any:
    """Return a tuple of the class ``kind`` from the items that :func:`items_of` returned."""
    if not is_struct(kind):
        return tuple.__new__(kind, items)
    try:
        return kind(items)
    except TypeError as error:
        raise StateError(
            f"the state's {kind.__qualname__} of {len(items)} items cannot be restored: {error}"
        ) from error


class _Gone:
    """Stands for the object of a dead weak reference."""

    __slots__ = ("__weakref__",)
