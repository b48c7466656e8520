"""Encoding of the changes since a survey as a plain state.

A state holds no classes and runs no code. It refers to objects that existed when training began by their paths, by
which the process that continues training finds them. New objects are written out: containers, tensors, arrays, random
number generators, and, by their attributes, instances of the user's classes and of torch's modules and optimizers.
"""

from __future__ import annotations

import collections
import enum
import functools
import io
import threading
import types
import weakref
from collections.abc import Callable
from typing import Any

from hpstage.checkpoints import jax_arrays, leaves
from hpstage.errors import StateError
from hpstage.training.capture import allowed, rebuilt, refusals
from hpstage.training.capture.aliases import Places, holding
from hpstage.training.capture.allowed import CONTAINERS, RANDOM, Method, creatable, may_be_given, method_of
from hpstage.training.capture.atoms import described_wholly, description, parts_of
from hpstage.training.capture.containers import Members
from hpstage.training.capture.derived import is_plain, optimizer_counted_by, reached_by_gradients, weights_among
from hpstage.training.capture.endings import acts_at_end
from hpstage.training.capture.generators import Generators
from hpstage.training.capture.kind import SMALLEST_ADDRESS, is_atom, items_of, numpy, same_value, torch
from hpstage.training.capture.kinds import RANDOM_STATE, kind_of
from hpstage.training.capture.on_disk import where_file_is, where_hdf5_is, where_map_is
from hpstage.training.capture.settings import refused_registration
from hpstage.training.capture.stateful import RandomSource, stands_only
from hpstage.training.capture.stateless import excluding, unmarked
from hpstage.training.capture.survey import UNKNOWN, Record, Survey
from hpstage.training.capture.values import NO_HOOKS, device_of, hooks_of, is_tensor, same_hooks, storable
from hpstage.training.capture.views import Views
from hpstage.training.code.attributes import container_of, own_of
from hpstage.training.code.namespaces import MISSING
from hpstage.training.code.owner import name_of

Plain = Any
ANSWERED = ("answered",)
"""Replaces content that the state leaves out, since its owner restores it: a trainable with a state of its own."""
BUILTINS = (list, dict, set, int, float, str, bool, tuple)
_NOTHING: dict[Any, Any] = {}
_ITSELF = (type(None), bool, int, float, str, bytes)


class Encoder:
    """Encodes the contents of objects as plain values.

    Args:
        base: the survey whose objects are referred to by path.
        now: the present survey.
        but: returns whether content at a path may be left out if it cannot be encoded, since its owner restores it.
    """

    def __init__(self, base: Survey, now: Survey, but: Callable[[str], bool]) -> None:
        self._base = base
        self._now = now
        self._but = but
        self._new: dict[int, tuple[object, int]] = {}
        self._within: list[str] = []
        self._answered = False
        self._local = Survey()
        self._places = Places(base, now)
        self._views = Views(now)
        self._generators = Generators()
        self._functions = frozenset((types.BuiltinFunctionType, types.FunctionType, *allowed.functions_of_numpy()))

    @property
    def memory(self) -> Plain:
        """Memory shared by several new values; complete once everything is written."""
        return self._places.written

    def admit(self, local: Survey) -> None:
        """From now on, also refer to the objects of ``local`` by path, unless they have been written out.

        Raises:
            StateError: a new object shares memory with one of them; a state would separate the two.
        """
        self._local = local
        if not local.records:
            return
        held = holding(local)
        for record in self._now:
            if record.kind.name == "values" and record.obj not in self._base and held(record.obj):
                before, now = local.records.get(id(record.obj)), record.content
                same = before is not None and now.same_memory(before.content) and now.form == before.content.form
                if not same and (before is not None or self.is_new(record.obj)):
                    raise StateError(
                        f"{unmarked(record.path)} shares memory with a tensor or array of a local variable, and no "
                        f"state can hold both: keep a copy; {excluding(record.path)}"
                    )
        self._places.admit(local, self._now)

    def is_new(self, value: object) -> bool:
        """Return whether an object has been written out."""
        return id(value) in self._new

    def other_dict(self, record: Record) -> str | None:
        """Return why no state can hold the ``__dict__`` that an object of the base has now; ``None`` if one can."""
        return self._views.other_dict(record)

    def content(self, record: Record, content: Any) -> Plain:
        """Encode the content of an object that is in the base."""
        kind, path = record.kind.name, record.path
        if UNKNOWN in path:
            raise refusals.mixed_up(path)
        if kind in ("items", "objects"):
            # Attributes, or whether an array can be written to.
            rest = self._pairs(path, content[1]) if kind == "items" else content[2]
            return kind, self._list(path, content[0]), rest
        if kind == "mapping":
            return kind, self._pairs(path, content[0], record.content[0]), self._pairs(path, content[1])
        if kind == "attributes":
            return kind, self._pairs(path, content, record.content), []
        if kind == "foreign" and (
            (content[1] == record.content[1] and all(is_atom(part) or part in self._base for part in content[2]))
            or (isinstance(content[1], bytes) and len(content[1]) == len(record.content[1] or ""))
            or isinstance(content[1], tuple)  # from which its class restores it
        ):
            return kind, self._pairs(path, content[0]), content[1]
        if kind == "set":
            return kind, self._set(path, content)
        if kind == "file" and stands_only(record.obj, record.content, content):
            return kind, content
        if kind in ("bytearray", "storage", "random state", "settings"):
            return kind, self._settings(content) if kind == "settings" else content
        if kind in ("name", "variable"):
            return kind, self.value(path, content)
        if kind == "function":
            if content[4] is not record.content[4]:
                raise StateError(
                    f"{unmarked(path)} has been given other code in training, which no state can hold: define two "
                    "functions, and choose between them"
                )
            return kind, self.value(path, content[1]), self._pairs(path, content[2]), self._pairs(path, content[3])
        if kind == "values":
            return kind, *self._place(record, content)
        if kind == "registrations":
            raise refused_registration(record.content, content)
        raise refusals.unmoving(record)

    def leave(self, changed: dict[str, Plain], answered: list[Record]) -> None:
        """Leave out the attributes and items that hold the objects in ``answered``, or objects that training has
        created for their owner. The owner sets them, and may create other objects for them, such as an iterator at
        another position."""
        objects = {id(record.obj) for record in answered}
        for record in self._base if objects or self._answered else ():
            present = self._now.records.get(id(record.obj))
            if present is None or record.kind.name not in ("attributes", "mapping") or not self._but(record.path):
                continue
            before, items = (
                one if record.kind.name == "attributes" else one[0] for one in (record.content, present.content)
            )
            names = {name for name, item in items.items() if id(item) in objects}
            known = changed.get(record.path)
            if is_answered(known) or not (names or known):
                continue
            kind, pairs, rest = known or self.content(record, present.content)
            pairs = [(key, ANSWERED if type(key) is str and key in names else plain) for key, plain in pairs]
            changed[record.path] = kind, pairs, rest
            for key, plain in pairs:
                former = (
                    self._base.records.get(id(before.get(key))) if type(key) is str and is_answered(plain) else None
                )
                if former is not None and former.kind.name == "iterator":
                    changed.setdefault(former.path, ANSWERED)  # the same state, even if a fork has made another

    def value(self, path: str, value: Any) -> Plain:
        """Encode a value within a content."""
        kind = type(value)
        if kind is int and value > SMALLEST_ADDRESS and (named := self._now.at_address(value)) is not None:
            raise StateError(
                f"{unmarked(path)} holds the id() of {named}, which differs in the process that continues. Keep the "
                f"object itself, or its name, instead; {excluding(path)}"
            )
        if kind in _ITSELF:
            return value
        if value is MISSING:
            return ("missing",)
        known = self._base.path_of(value)
        if known is None and id(value) in self._new:
            return "again", self._new[id(value)][1]
        known = known or self._local.path_of(value)
        if known is not None:
            if UNKNOWN in known:
                raise refusals.mixed_up(known)
            return "@", known
        if kind is tuple:
            return "tuple", self._list(path, value)
        if kind is types.MethodType or kind is types.MethodWrapperType:
            return self._method(path, value)
        if kind is weakref.ref:
            return "weak", self._referred(path, value())
        if is_atom(value):
            return self._atom(path, value)
        if kind in self._functions:
            return self._named(path, value)
        self._within.append(path)
        try:
            refusals.see_depth(self._within)
            return self._fresh(path, value)
        finally:
            self._within.pop()

    def attempt(self, path: str, value: Any) -> Plain:
        """Encode a value that may be left out if that fails. Then its parts are forgotten: nothing refers to them."""
        made = len(self._new)
        try:
            return self.value(path, value)
        except StateError:
            for new in list(self._new)[made:]:
                del self._new[new]
            raise

    def _referred(self, path: str, value: Any) -> Plain:
        leads = not issubclass(type(value), type | types.ModuleType) and kind_of(value) is not None
        if leads and (value not in self._now or id(value) in self._now.weak):
            raise refusals.held_by_nothing(path)
        return self.value(path, value)

    def _method(self, path: str, value: Any) -> Plain:
        called = getattr(value, "__func__", value)  # a method may be bound to any callable
        name = called.__name__ if isinstance(called, types.FunctionType | Method) else ""
        if not same_value(method_of(value.__self__, name), value):
            raise refusals.made_in_training(path, value)
        tag = "slot" if called is value else "method"
        return tag, self.value(path if called is not value else f"{path}.__self__", value.__self__), name

    def _atom(self, path: str, value: Any) -> Plain:
        if isinstance(value, enum.Enum):
            members = list(value) if isinstance(value, enum.Flag) else [value]
            if isinstance(value, enum.Flag) and sum(member.value for member in members) != value.value:
                raise refusals.made_in_training(path, value)  # it has bits without a name
            return "enum", type(value).__module__, name_of(type(value)), *(member.name for member in members)
        parts = parts_of(value)
        if parts is not None:
            return parts[0], *self._list(path, parts[1])
        library = torch()
        if library is not None:
            if isinstance(value, library.Size):
                return "size", list(value)
            if isinstance(value, library.dtype):
                return "dtype", str(value).removeprefix("torch.")
            if isinstance(value, library.layout | library.memory_format):
                return "constant", str(value).removeprefix("torch.")
            if isinstance(value, library.device):
                return "device", str(value)
        arrays = numpy()
        if type(value) in (arrays.str_, arrays.bytes_):
            # str() and item() drop null characters at the end.
            return "numpy text", str.__str__(value) if isinstance(value, str) else bytes(value)
        if isinstance(value, arrays.datetime64 | arrays.timedelta64):
            return "numpy time", value.dtype.str, int(value.astype("i8"))
        if leaves.numpy_scalar(value) is not None:
            return value
        if isinstance(value, arrays.dtype) and (described := described_wholly(value)) is not None:
            return "numpy dtype", described
        if isinstance(value, types.MethodDescriptorType | types.WrapperDescriptorType):
            return "descriptor", self.value(path, value.__objclass__), value.__name__
        if isinstance(value, type):
            return self._named(path, value)
        if type(value) is types.ModuleType:
            name = value.__name__
            if any(allowed.module_named(base, name) is value for base in (self._base, self._local)):
                return "module", name
        raise refusals.made_in_training(path, value)

    def _named(self, path: str, value: Any) -> Plain:
        """Encode a function or class that existed when training began, or that only computes. A state must not be able
        to name an arbitrary one."""
        name = getattr(value, "__module__", None), name_of(value)
        if any(value is kind for kind in BUILTINS):
            return "builtin", value.__name__
        if self._base.named.get(name) is value or self._local.named.get(name) is value:
            return "named", *name
        found = allowed.pure_name(value) or allowed.ufunc_name(self._base, value)
        if found is not None:
            return "pure", *found
        module = str(name[0])
        if any(allowed.nameable(base, module, name[1]) is value for base in (self._base, self._local)):
            return "nameable", module, name[1]
        if type(value) is types.FunctionType and (optimizer := optimizer_counted_by(value)) is not None:
            return "counting step", self.value(path, optimizer)
        if type(value) is types.BuiltinMethodType and not isinstance(value.__self__, types.ModuleType | None):
            return self._method(path, value)
        raise refusals.made_in_training(path, value)

    def _fresh(self, path: str, value: Any) -> Plain:
        number = len(self._new)
        self._new[id(value)] = value, number
        self._views.refuse(path, value)
        if acts_at_end(value, self._now):
            raise refusals.made_in_training(path, value)
        kind = type(value)
        if kind is list or kind is collections.deque:
            own = value.maxlen if kind is collections.deque else None
            return kind.__name__, number, self._list(path, value), own
        if CONTAINERS.get(kind.__name__) is kind:
            if kind is set or kind is frozenset:
                members = Members.in_set(value) if kind is set else Members.of(value)
                return kind.__name__, number, self._set(path, members), None
            if kind is bytearray:
                return kind.__name__, number, bytes(value), None
            own = own_of(value) if kind is not collections.defaultdict else {"factory": value.default_factory}
            return kind.__name__, number, self._pairs(path, value), self._pairs(path, own)
        library, arrays = torch(), numpy()
        if library is not None and kind in (library.Tensor, library.nn.Parameter):
            return self._tensor(path, number, value)
        if kind is arrays.ndarray:
            return self._array(path, number, value)
        if jax_arrays.is_array(value):
            return "jax array", number, value
        if kind is arrays.memmap and (where := where_map_is(value)) and (form := description(value.dtype)):
            return "map", number, *where, form, list(value.shape)
        if kind in (io.BufferedReader, io.FileIO) and (where := where_file_is(value)):
            return "opened", number, *where
        if (where := where_hdf5_is(value)) is not None:
            return "hdf5", number, *where
        if kind is threading.local:
            return "thread local", number, self._pairs(path, vars(value))
        if kind is types.SimpleNamespace:
            return "instance", number, "types", "SimpleNamespace", None, self._pairs(path, vars(value))
        if kind is functools.partial and may_be_given(value.func):
            parts = self._list(path, value.args), self._pairs(path, value.keywords), self._pairs(path, own_of(value))
            return "partial", number, self.value(f"{path}.func", value.func), *parts
        if kind_of(value) is RANDOM_STATE and (source := self._generators.named(path, value)) is not None:
            return "generator of process", number, source, RandomSource().read(value, frozenset())
        source = next((name for name, source in RANDOM.items() if source() is kind), None)
        if source is not None:
            device = "" if getattr(value, "device", None) is None else device_of(value)
            return "random", number, source, RandomSource().read(value, frozenset()), device
        if kind is arrays.random.Generator or issubclass(kind, arrays.random.BitGenerator):
            return self._numbers(path, number, value)
        name = kind.__module__, name_of(kind)
        if (made_of := rebuilt.parts_of(value, self._base)) is not None:
            return "rebuilt", number, made_of[0], self._list(path, made_of[1])
        if creatable(self._base, *name) is kind or creatable(self._local, *name) is kind:
            if (container := container_of(kind)) is not None:
                held = self._list(path, list.copy(value)) if container is list else self._pairs(path, value)
                return "filled", number, *name, held, self._pairs(path, own_of(value))
            items = self._list(path, items_of(value)) if issubclass(kind, tuple) else None
            own = self._pairs(path, own_of(value))
            return "instance", number, kind.__module__, name_of(kind), items, own
        raise refusals.made_in_training(path, value)

    def _numbers(self, path: str, number: int, value: Any) -> Plain:
        """Encode a NumPy generator, or a bit generator, which several generators may share, with its seed sequence."""
        if hasattr(value, "bit_generator"):
            source = value.bit_generator
            return "numbers", number, self._sources.get(id(source)) or self.value(f"{path}.bit_generator", source)
        kind, seeds = type(value), value.seed_seq
        if getattr(numpy().random, kind.__name__, None) is not kind or type(seeds) is not numpy().random.SeedSequence:
            raise refusals.made_in_training(path, value)
        entropy = seeds.entropy if isinstance(seeds.entropy, int) else [int(part) for part in seeds.entropy]
        sequence = entropy, [int(part) for part in seeds.spawn_key], seeds.pool_size
        return "source", number, kind.__name__, sequence, RandomSource().read(value, frozenset())

    @functools.cached_property
    def _sources(self) -> dict[int, Plain]:
        """Plain values for the bit generators of the base's generators, by the id of the bit generator."""
        generators = (record for record in self._base if issubclass(type(record.obj), numpy().random.Generator))
        return {id(record.obj.bit_generator): ("source of", record.path) for record in generators}

    @functools.cached_property
    def _derived(self) -> set[int]:
        return set(map(id, weights_among(record.obj for record in self._now)))

    @functools.cached_property
    def _graph(self) -> set[Any]:
        """Nodes of the graph of gradients of which training can reach the tensor."""
        return {record.obj.grad_fn for record in self._now if is_tensor(record.obj)} - {None}

    def _of_graph(self, path: str, number: int, value: Any) -> Plain:
        """Encode a tensor through which no gradients can be requested any more, or that is recomputed before use."""
        leaves, plain = reached_by_gradients(value, self._graph), storable(value)
        if plain is None or not (
            id(value) in self._derived or (not leaves and is_plain(value) and self._places.of(plain) is None)
        ):
            raise refusals.of_a_graph(path)
        return "derived", number, plain, device_of(value), path, self._list(path, leaves)

    def _tensor(self, path: str, number: int, value: Any) -> Plain:
        if value.grad_fn is not None:
            return self._of_graph(path, number, value)
        if not same_hooks(hooks_of(value), NO_HOOKS):
            raise refusals.hooked(path)
        if value.layout is torch().sparse_coo and not value.requires_grad:
            parts = value._indices(), value._values()
            return "sparse", number, *parts, list(value.shape), value.is_coalesced(), device_of(value)
        plain = storable(value)
        if plain is None:
            raise refusals.unstorable(path, value)
        rest = (
            type(value) is torch().nn.Parameter,
            device_of(value),
            value.requires_grad,
            self.value(f"{path}.grad", value.grad),
            self._pairs(path, own_of(value)),
        )
        place = self._places.of(plain)
        if place is None:
            return "tensor", number, plain, *rest
        dtype = str(value.dtype).removeprefix("torch.")
        if value._is_view() and "_base" in self._now.beyond:
            raise refusals.based(path, "_base")
        form = list(plain.shape), list(plain.stride()), plain.is_conj(), plain.is_neg()
        return "view", number, place, dtype, *form, *rest

    def _array(self, path: str, number: int, value: Any) -> Plain:
        if value.dtype.hasobject:
            if value.dtype.str != "|O":
                raise refusals.unstorable(path, value)
            order = "F" if value.flags.f_contiguous or sum(size > 1 for size in value.shape) < 2 else "C"
            return "objects", number, self._list(path, value.flat), list(value.shape), order, value.flags.writeable
        described = description(value.dtype)
        if described is None:
            raise refusals.unstorable(path, value)
        form = described, list(value.shape)
        place = self._places.of(value)
        if place is not None:
            base = self._base.path_of(value.base)
            if base is None and value.base is not None and "base" in self._now.beyond:
                raise refusals.based(path, "base")
            return "array view", number, place, *form, list(value.strides), value.flags.writeable, base
        plain = storable(value)
        return "array", number, value.copy() if plain is None else plain, *form, value.flags.writeable

    def _place(self, record: Record, content: Any) -> tuple[Plain, ...]:
        """Encode the memory location of a tensor or array of the base, and all else about it except its values."""
        before, obj = record.content, record.obj
        if not content.plain or not before.plain:
            raise refusals.unstorable(record.path, obj)
        if not same_hooks(content.hooks, before.hooks):
            raise refusals.hooked(record.path)
        place: Plain = None
        if not content.same_memory(before) or content.form != before.form:
            shape, strides, dtype = content.form[:3]
            if not is_tensor(obj):
                raise StateError(
                    f"{unmarked(record.path)} has another shape, strides or dtype than when training began, which no "
                    f"state can hold: reshape() or convert it where it is used"
                )
            if content.form[3] != before.form[3]:
                raise StateError(
                    f"{unmarked(record.path)} has moved from {before.form[3]} to {content.form[3]} in training, which "
                    f"no state can hold: move it in setup(), or a copy of it where it is used"
                )
            form = str(dtype).removeprefix("torch."), list(shape), list(strides)
            place = (self._places.of(storable(obj)), *form)
        gradient = self.value(f"{record.path}.grad", content.gradient)
        return place, content.trained, gradient, self._pairs(record.path, content.own)

    def _settings(self, content: dict[str, Any]) -> list[Plain]:
        return [(name, self.value(f"torch.{name}", value)) for name, value in content.items()]

    def _list(self, path: str, items: Any) -> list[Plain]:
        return [self.value(f"{path}[{index}]", item) for index, item in enumerate(items)]

    def _pairs(self, path: str, items: dict[Any, Any], before: dict[Any, Any] = _NOTHING) -> list[Plain]:
        """Encode keys and values. A value that cannot be encoded must be unchanged since ``before``, or its owner's."""
        pairs = []
        for index, (key, item) in enumerate(dict.items(items)):
            inner = f"{path}.{key}" if type(key) is str else f"{path}[{index}]"
            name = self.value(f"{path}.key({index})", key)  # before its value, which may refer to it
            try:
                plain = self.attempt(inner, item)
            except StateError:
                if type(key) is str and before.get(key, MISSING) is item:
                    plain = ("same",)
                elif self._but(inner):
                    plain, self._answered = ANSWERED, True
                else:
                    raise
            pairs.append((name, plain))
        return pairs

    def _set(self, path: str, members: Members) -> list[Plain]:
        """Encode the members of a set: numbers in iteration order, which depends on their insertion; other members,
        whose order differs between processes, sorted."""
        plain = [self.value(f"{path}[...]", item) for item in members.order]
        if not members.ordered:
            return sorted(plain, key=repr)
        if not members.remade:
            raise StateError(
                f"{unmarked(path)} is a set whose order no state can hold, since members were removed, or were added "
                "in another order. Use a dict, which keeps the order in which it was filled (`next(iter(d))` is its "
                f"first key); {excluding(path)}"
            )
        return plain


def is_answered(plain: Plain) -> bool:
    return type(plain) is tuple and len(plain) == 1 and plain[0] == ANSWERED[0]
