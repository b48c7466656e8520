"""Tensors and arrays: how changes are detected, where their memory is, and how values are restored."""

from __future__ import annotations

import gc
import mmap
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import xxhash

from hpstage.checkpoints import lazy_copies, leaves
from hpstage.training.capture.kind import Child, Kind, attribute_children, numpy, same_mapping, torch
from hpstage.training.code.attributes import dict_of, own_of, write_own

_COPIED = 16 << 20
"""Bytes up to which a copy of an array is kept, from which it can be restored."""
_WHOLE, _WHOLE_ELSEWHERE = 256 << 20, 1 << 20
"""Bytes up to which a value's checksum covers all of it: in this process's memory, and on a device."""
_SAMPLED, _BLOCK = 64, 4096


class Marked:
    """Marks by which a changed tensor or array is recognized.

    Args:
        sampled: also keep a checksum of its bytes. If it is large, only some of them are covered, and its version
            counter is kept, too: writing to it through another tensor on the same memory (``.data``, ``numpy()``) may
            stay undetected until forks are verified.
        copied: also keep a copy, unless it is large, from which it can be restored.
    """

    __slots__ = (
        "copy",
        "form",
        "gradient",
        "hooks",
        "own",
        "plain",
        "registered",
        "sample",
        "start",
        "storage",
        "trained",
        "version",
    )

    def __init__(self, obj: Any, *, sampled: bool = False, copied: bool = False) -> None:
        self.gradient: object | None = None
        self.hooks: Hooks = NO_HOOKS
        self.registered = 0  # number of hooks registered in this process until then
        self.trained = False
        self.version = 0
        self.storage: Any = None  # kept alive, so that no other storage gets its address
        self.start = 0  # in bytes
        self.sample: str | None = None
        self.copy: Any = None
        plain: Any
        if is_tensor(obj):
            self.own = _own(obj)
            self.hooks, self.registered = hooks_of(obj), torch().utils.hooks.RemovableHandle.next_id
            self.form: tuple[Any, ...] = tensor_form(obj)
            self.trained = obj.requires_grad
            if obj.is_leaf:
                self.gradient = obj.grad
            plain = plain_tensor(obj)
            if plain is not None:
                self.storage = plain.untyped_storage()
                self.start = plain.storage_offset() * plain.element_size()
            on_cpu = obj.device.type == "cpu"
        else:
            self.own = _own_of_array(obj)
            self.form = obj.shape, obj.strides, obj.dtype
            self.trained = obj.flags.writeable
            plain = plain_array(obj)
            on_cpu = True
        self.plain = plain is not None
        """Whether a state can hold it."""
        if plain is None or sampled:
            self._look(obj, plain, on_cpu)
        if copied and plain is not None and on_cpu and nbytes(plain) <= _COPIED:
            self.copy = duplicate(plain)

    def _look(self, obj: Any, plain: Any, on_cpu: bool) -> None:
        of_torch = is_tensor(obj)
        if plain is None and not of_torch:
            plain = obj.view(numpy().ndarray)  # a memmap, or a read-only array
        whole = False
        self.sample = ""
        if plain is not None and (of_torch or not cannot_change(obj)):
            self.sample, whole = sample(plain, on_cpu)
        if of_torch and not whole and self.form[0] is not None and not obj.is_inference():
            self.version = obj._version  # inference tensors have no version counter

    def same(self, other: Marked) -> bool:
        return self.same_place(other) and self.version == other.version and self.sample == other.sample

    def same_place(self, other: Marked) -> bool:
        """Return whether form, memory, gradient and attributes are the same: all but the values."""
        return (
            self.form == other.form
            and self.same_memory(other)
            and self.trained == other.trained
            and self.gradient is other.gradient
            and same_hooks(self.hooks, other.hooks)
            and same_mapping(self.own, other.own)
        )

    def same_memory(self, other: Marked) -> bool:
        """Return whether both were seen in the same memory. Its address may have changed: that of a lazy copy does when
        it is written to."""
        return self.storage is other.storage and self.start == other.start

    def at_place(self, obj: Any) -> bool:
        """Return whether an ordinary tensor is unchanged except for its values. Fast."""
        return (
            obj.untyped_storage() is self.storage
            and obj.storage_offset() == self.form[4]
            and obj.requires_grad is self.trained
            and (not obj.is_leaf or obj.grad is self.gradient)
            and obj.shape == self.form[0]
            and obj.dtype is self.form[2]
            and obj.stride() == self.form[1]
            and self._has_its_hooks(obj)
            and same_mapping(_own(obj), self.own)
        )

    def _has_its_hooks(self, obj: Any) -> bool:
        """Return whether a tensor has its hooks in the same dicts as then. It has if no hook was registered since."""
        registered = torch().utils.hooks.RemovableHandle.next_id
        return registered == self.registered or same_hooks(hooks_of(obj), self.hooks)

    def put_place(self, obj: Any) -> None:
        """Restore form, memory, gradient and attributes of ``obj``: all but the values."""
        if self.plain and is_ordinary(obj) and self.at_place(obj):
            return
        if not is_tensor(obj):
            if (obj.shape, obj.strides, obj.dtype) != self.form:
                raise TypeError("its form has changed")
            restore_array(obj, self.trained, self.own)
            return
        if not self._has_its_hooks(obj):
            raise TypeError("it has been given a hook, which torch keeps where it cannot be reached")
        if self.plain:
            if self.form != tensor_form(obj) or not self.same_memory(Marked(obj)):
                shape, strides, dtype, _, offset = self.form
                move(obj, self.storage, shape, strides, dtype, offset)
            if obj.is_leaf and obj.requires_grad != self.trained:
                obj.requires_grad_(self.trained)
        elif self.form != tensor_form(obj):
            raise TypeError("its form has changed")
        if obj.is_leaf and obj.grad is not self.gradient:
            obj.grad = self.gradient
        if not same_mapping(_own(obj), self.own):
            write_own(obj, self.own)

    def put_back(self, obj: Any) -> None:
        self.put_place(obj)
        if self.copy is None:
            raise TypeError("it is too large to be put back" if self.plain else "no state can hold it")
        fill(obj, self.copy)
        if self.version:
            self.version = obj._version


class Values(Kind):
    """Tensors and arrays, as :class:`Marked`."""

    name = "values"

    def read(self, obj: Any, skip: frozenset[str]) -> Marked:
        return Marked(obj)

    def again(self, obj: Any, skip: frozenset[str], old: Marked) -> Marked:
        """Return ``old`` itself if nothing changed, else present marks in as much detail."""
        if old.sample is None and is_ordinary(obj) and old.at_place(obj):
            return old
        new = Marked(obj, sampled=old.sample is not None)
        return old if old.same(new) else new

    def same(self, old: Marked, new: Marked) -> bool:
        return old.same(new)

    def write(self, obj: Any, content: Marked, skip: frozenset[str] = frozenset()) -> None:
        content.put_back(obj)

    def children(self, content: Marked) -> Iterator[Child]:
        if content.gradient is not None:
            yield ".grad", content.gradient
        for name, hooks in zip(_HOOKS, content.hooks, strict=False):
            if hooks is not None:
                yield f".{name}", hooks
        for index, hooks in enumerate(content.hooks[len(_HOOKS) :]):
            yield f".AccumulateGrad.hooks[{index}]", hooks
        yield from attribute_children(content.own)


_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")
Hooks = tuple[object, ...]
"""The dicts of a tensor's hooks, then those of the hooks of the node that accumulates its gradient."""
NO_HOOKS = (None, None)


def hooks_of(tensor: Any) -> Hooks:
    own = tensor._backward_hooks, tensor._post_accumulate_grad_hooks
    if not (tensor.requires_grad and tensor.is_leaf) or tensor.is_inference() or is_lazy(tensor):
        return own
    with torch().inference_mode(False), torch().enable_grad():
        node = tensor.view_as(tensor).grad_fn.next_functions[0][0]
    return *own, *(hooks for hooks in _hooks_in(node) if hooks is not own[0])


def _hooks_in(node: Any) -> list[object]:
    """Return the dicts of a node's hooks, which torch keeps in C++, but shows to Python's garbage collector."""
    return [hooks for hooks in gc.get_referents(node) if type(hooks) is OrderedDict]


class Storage(Kind):
    """The memory of tensors: all its bytes, including those that no tensor shows."""

    name = "storage"

    def read(self, obj: Any, skip: frozenset[str]) -> Any:
        return self._bytes(obj).clone()

    def again(self, obj: Any, skip: frozenset[str], old: Any) -> Any:
        present = self._bytes(obj)
        return old if torch().equal(present, old) else present.clone()

    def write(self, obj: Any, content: Any, skip: frozenset[str] = frozenset()) -> None:
        if obj.nbytes() != content.numel():
            obj.resize_(content.numel())
        self._bytes(obj).copy_(content)

    def _bytes(self, storage: Any) -> Any:
        return look_at(storage, (storage.nbytes(),), (1,), torch().uint8, 0)


def owner_of(obj: Any, content: Marked) -> Child | None:
    """Return the owner of the memory of a tensor or array, if that does not show all of it, or may not."""
    if content.storage is not None:
        shown = content.storage.nbytes() == nbytes(obj)
        return None if shown else (".untyped_storage()", content.storage)
    base = getattr(obj, "base", None)
    return (".base", base) if isinstance(base, numpy().ndarray | bytearray | memoryview) else None


class Accumulator(Kind):
    """The graph node that accumulates the gradient of a tensor. Its hooks live as long as some object holds it."""

    name = "node"

    def read(self, obj: Any, skip: frozenset[str]) -> tuple[object, ...]:
        return obj.variable, *_hooks_in(obj)

    def children(self, content: tuple[object, ...]) -> Iterator[Child]:
        yield ".variable", content[0]
        for index, hooks in enumerate(content[1:]):
            yield f".hooks[{index}]", hooks


def same_hooks(here: Hooks, there: Hooks) -> bool:
    """Return whether two tuples have the same dicts. An empty dict, left by a removed hook, is ignored."""
    return list(map(id, filter(None, here))) == list(map(id, filter(None, there)))


def _own(tensor: Any) -> dict[str, Any]:
    """Return attributes set on a tensor, without those set by the compiler."""
    own = dict_of(tensor)
    if not own:
        return _NOTHING
    return {name: value for name, value in own_of(tensor).items() if not name.startswith("_dynamo")}


_NOTHING: dict[str, Any] = {}
_OF_MEMMAPS = ("_mmap", "filename", "offset", "mode")
"""Attributes in which a memmap keeps the origin of its memory. They do not count: its values do."""


def _own_of_array(array: Any) -> dict[str, Any]:
    own = own_of(array)
    if isinstance(array, numpy().memmap):
        for name in _OF_MEMMAPS:
            own.pop(name, None)
    return own


def restore_array(array: Any, writeable: bool, own: dict[str, Any]) -> None:
    """Restore whether an array can be written to, and its attributes."""
    if array.flags.writeable != writeable:
        with opened(array.base):
            array.flags.writeable = writeable
    if not same_mapping(_own_of_array(array), own):
        write_own(array, own, frozenset(_OF_MEMMAPS))


def cannot_change(array: Any) -> bool:
    """Return whether an array is a view of a file that is mapped read-only. It may be larger than memory."""
    while isinstance(array, numpy().ndarray):
        array = array.base
    return isinstance(array, mmap.mmap) and is_read_only(array)


def is_read_only(memory: mmap.mmap) -> bool:
    if memory.closed:
        return True
    with memoryview(memory) as view:
        return view.readonly


def is_tensor(obj: Any) -> bool:
    library = torch()
    return library is not None and isinstance(obj, library.Tensor)


def is_ordinary(obj: Any) -> bool:
    """Return whether ``obj`` is a tensor of one of torch's two classes."""
    library = torch()
    return library is not None and type(obj) in (library.Tensor, library.nn.Parameter)


def is_lazy(obj: Any) -> bool:
    """Return whether a tensor has no shape yet (``torch.nn.LazyLinear``)."""
    library = torch()
    return library is not None and isinstance(obj, library.nn.parameter.UninitializedTensorMixin)


def tensor_form(tensor: Any) -> tuple[Any, ...]:
    """Return shape, strides, dtype, device and storage offset."""
    if is_lazy(tensor):
        return None, None, tensor.dtype, tensor.device, 0
    if tensor.is_nested:
        return (), f"nested {tensor.layout}", tensor.dtype, tensor.device, 0
    if tensor.layout is not torch().strided:
        return tensor.shape, str(tensor.layout), tensor.dtype, tensor.device, 0
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.storage_offset()


def plain_tensor(tensor: Any) -> Any:
    """Return an ordinary tensor on the memory of ``tensor``, or ``None`` if a state cannot hold that."""
    library = torch()
    if not is_ordinary(tensor):
        if is_lazy(tensor) or hasattr(type(tensor), "__tensor_flatten__"):
            return None
        tensor = tensor.as_subclass(library.Tensor)
    strided = tensor.layout is library.strided and not tensor.is_nested
    held = strided and not tensor.is_meta and tensor.dtype in leaves.torch_dtypes()
    return tensor.detach() if held else None


def plain_array(array: Any) -> Any:
    """Return a plain view of an array; ``None`` if it holds objects, can never be written to, or is in a file."""
    library = numpy()
    if isinstance(array, library.memmap) or array.dtype.hasobject or not _may_be_written(array):
        return None
    return array.view(library.ndarray)


def _may_be_written(array: Any) -> bool:
    """Return whether an array is writeable or can be made so. Only an array in read-only memory cannot."""
    try:
        with opened(array):
            return True
    except ValueError:
        return False


@contextmanager
def opened(array: Any) -> Iterator[None]:
    """Make an array writeable inside the block. The base of a view is made writeable first."""
    closed = array if isinstance(array, numpy().ndarray) and not array.flags.writeable else None
    if closed is None:
        yield
        return
    with opened(array.base):
        closed.flags.writeable = True
        try:
            yield
        finally:
            closed.flags.writeable = False


def storable(obj: Any) -> Any:
    """Return a tensor or array as a leaf of a state, or ``None`` if no state can hold it."""
    if is_tensor(obj):
        return plain_tensor(obj)
    plain = plain_array(obj)
    if plain is None or isinstance(leaves.describe("", plain), leaves.Leaf):
        return plain
    return numpy().frombuffer(plain.tobytes(), "u1")  # dates, strings and records: as bytes


def device_of(obj: Any) -> str:
    """Return the name of a tensor's or generator's device. The current device has no index in it, since the process
    that continues may have another current device."""
    device = obj.device
    if device.index is None:
        return str(device.type)
    current = getattr(torch().get_device_module(device), "current_device", None)
    return str(device.type if current is not None and current() == device.index else device)


def nbytes(obj: Any) -> int:
    return int(obj.numel() * obj.element_size() if is_tensor(obj) else obj.nbytes)


def duplicate(obj: Any) -> Any:
    """Copy a plain tensor or array to new memory on the same device, with the same strides."""
    leaf = leaves.describe("", obj)
    return leaves.copy(leaf, obj) if isinstance(leaf, leaves.Leaf) else obj.copy()


def move(tensor: Any, storage: Any, shape: Any, strides: Any, dtype: Any, offset: int) -> None:
    """Make a tensor a view of this memory."""
    library = torch()
    with library.no_grad():
        at = look_at(storage, shape, strides, dtype, offset)
        tensor.data = at.as_subclass(type(tensor)) if type(tensor.data) is not library.Tensor else at


def look_at(storage: Any, shape: Any, strides: Any, dtype: Any, offset: int) -> Any:
    """Return a tensor on a storage, which grows if it is too small."""
    made = torch().empty(0, dtype=dtype, device=storage.device)
    reach = offset + 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    if 0 not in shape and reach * made.element_size() > storage.nbytes():
        storage.resize_(reach * made.element_size())
    return made.set_(storage, offset, shape, strides)


def fill(obj: Any, values: Any) -> None:
    """Write these values into a tensor or array in place."""
    if not is_tensor(obj):
        if values.dtype != obj.dtype:
            values = values.view(obj.dtype)
        with opened(obj):
            obj.view(numpy().ndarray)[...] = values.reshape(obj.shape)
        return
    library = torch()
    with library.inference_mode(obj.is_inference()), library.no_grad():
        # Through .data: leaves that require gradients cannot be written to directly, and views remain views.
        target, values = obj.data.as_subclass(library.Tensor), values.detach().as_subclass(library.Tensor)
        if lazy_copies.is_lazy(target) and leaves.same_bytes(target, values):
            return  # so that it keeps sharing memory with its copies
        for dimension, (size, stride) in enumerate(zip(target.shape, target.stride(), strict=True)):
            if stride == 0 and size > 1:  # one value at many indices
                target, values = target.narrow(dimension, 0, 1), values.narrow(dimension, 0, 1)
        target.copy_(values)


def sample(plain: Any, on_cpu: bool) -> tuple[str, bool]:
    """Return a checksum of the bytes, and whether it covers all of them, not only some."""
    whole = nbytes(plain) <= (_WHOLE if on_cpu else _WHOLE_ELSEWHERE)
    if not whole:
        if not on_cpu:
            return "", False
        if not (plain.is_contiguous() if is_tensor(plain) else plain.flags.c_contiguous):
            for axis, size in enumerate(plain.shape):  # an evenly spaced part, since it has to be copied
                index = (slice(None),) * axis
                plain = plain[(*index, slice(None, None, max(1, size // _SAMPLED)))]
    leaf = leaves.describe("", plain)
    if not isinstance(leaf, leaves.Leaf) and not whole and not is_tensor(plain) and plain.flags.c_contiguous:
        plain = plain.reshape(-1).view("u1")  # dates, strings and records: as bytes, possibly far too many to copy
        leaf = leaves.describe("", plain)
    if not isinstance(leaf, leaves.Leaf):
        return xxhash.xxh3_128_hexdigest(plain.tobytes()), whole
    content = leaves.content(leaf, plain)
    if whole or content.nbytes <= _WHOLE:
        return xxhash.xxh3_128_hexdigest(content), whole
    hasher = xxhash.xxh3_128()
    for number in range(_SAMPLED):
        start = (content.nbytes - _BLOCK) * number // (_SAMPLED - 1)
        hasher.update(content[start : start + _BLOCK])
    return hasher.hexdigest(), False
