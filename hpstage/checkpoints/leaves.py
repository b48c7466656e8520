"""Leaves of a state: conversion of tensors, arrays and byte strings to raw bytes and back.

torch and numpy are imported only if a leaf needs them: only a process that has imported torch can hold a tensor.
"""

from __future__ import annotations

import ctypes
import functools
import math
import sys
import weakref
from collections.abc import Iterable
from typing import Any, Literal

import msgspec
import xxhash

from hpstage.checkpoints import lazy_copies

# Exact torch dtype -> (dtype in the safetensors file, its size in bytes, elements per value). Complex values
# are stored as pairs of reals and the 8-bit floats as bytes, since not all readers of safetensors know them.
_TORCH: dict[str, tuple[str, int, int]] = {
    "bool": ("BOOL", 1, 1),
    "uint8": ("U8", 1, 1),
    "uint16": ("U16", 2, 1),
    "uint32": ("U32", 4, 1),
    "uint64": ("U64", 8, 1),
    "int8": ("I8", 1, 1),
    "int16": ("I16", 2, 1),
    "int32": ("I32", 4, 1),
    "int64": ("I64", 8, 1),
    "float16": ("F16", 2, 1),
    "bfloat16": ("BF16", 2, 1),
    "float32": ("F32", 4, 1),
    "float64": ("F64", 8, 1),
    "complex32": ("F16", 2, 2),
    "complex64": ("F32", 4, 2),
    "complex128": ("F64", 8, 2),
    "float8_e4m3fn": ("U8", 1, 1),
    "float8_e4m3fnuz": ("U8", 1, 1),
    "float8_e5m2": ("U8", 1, 1),
    "float8_e5m2fnuz": ("U8", 1, 1),
    "float8_e8m0fnu": ("U8", 1, 1),
}


@functools.cache
def torch_dtypes() -> frozenset[Any]:
    """Return torch's dtypes that can be captured, in a process that has imported torch."""
    import torch

    return frozenset(getattr(torch, name) for name in _TORCH if hasattr(torch, name))


# The same for ``numpy.dtype.str``. Other byte orders are stored as bytes, since safetensors is little-endian.
# longdouble is left out: its meaning differs between machines, and its padding would spoil digests.
_NUMPY: dict[str, tuple[str, int, int]] = {
    "|b1": ("BOOL", 1, 1),
    "|u1": ("U8", 1, 1),
    "<u2": ("U16", 2, 1),
    "<u4": ("U32", 4, 1),
    "<u8": ("U64", 8, 1),
    "|i1": ("I8", 1, 1),
    "<i2": ("I16", 2, 1),
    "<i4": ("I32", 4, 1),
    "<i8": ("I64", 8, 1),
    "<f2": ("F16", 2, 1),
    "<f4": ("F32", 4, 1),
    "<f8": ("F64", 8, 1),
    "<c8": ("F32", 4, 2),
    "<c16": ("F64", 8, 2),
}
_NUMPY |= {
    dtype.replace("<", ">"): ("U8", 1, size * count)
    for dtype, (_, size, count) in _NUMPY.items()
    if dtype.startswith("<")
}


_libc = ctypes.CDLL(None)

# Maximum number of dimensions of a tensor or an array; limit of its bytes, and of each stride.
_DIMENSIONS = 64
_MOST = 2**63


class Leaf(msgspec.Struct, frozen=True):
    """Description of a leaf without its values; ``name`` is its name in the safetensors file."""

    name: str
    kind: Literal["torch", "numpy", "bytes"]
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None = None
    """Strides of a tensor that is not row-major, such as channels_last, and of a column-major array. They can affect
    results, since kernels may combine and add values in the order of memory. Files are always row-major."""

    @property
    def stored(self) -> tuple[str, int, tuple[int, ...]]:
        """dtype, bytes per element and shape in the safetensors file; ``KeyError`` for an unknown dtype."""
        if self.kind == "bytes":
            return "U8", 1, self.shape
        dtype, size, count = (_TORCH if self.kind == "torch" else _NUMPY)[self.dtype]
        return dtype, size, self.shape if count == 1 else (*self.shape, count)

    @property
    def nbytes(self) -> int:
        _, size, shape = self.stored
        return size * math.prod(shape)


def describe(name: str, value: object) -> Leaf | str | None:
    """Return the leaf for ``value``, ``None`` if it is not a leaf, or the reason why it cannot be captured."""
    if type(value) is bytes:
        return Leaf(name=name, kind="bytes", dtype="bytes", shape=(len(value),))
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        if type(value) not in (torch.Tensor, torch.nn.Parameter):
            return f"is a {type(value).__name__}, a tensor subclass"
        if value.is_nested:
            return "is a nested tensor"
        dtype = str(value.dtype).removeprefix("torch.")
        if value.layout is not torch.strided or value.is_meta or dtype not in _TORCH:
            return f"is a tensor of dtype {dtype}, layout {value.layout} on device {value.device}"
        return Leaf(name=name, kind="torch", dtype=dtype, shape=tuple(value.shape), strides=_strides(value))
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.ndarray):
        if type(value) is not numpy.ndarray:
            return f"is a {type(value).__name__}, an array subclass"
        if value.dtype.str not in _NUMPY:
            return f"is an array of dtype {value.dtype}"
        strides = None
        if value.flags.f_contiguous and not value.flags.c_contiguous:
            strides = tuple(stride // value.itemsize for stride in value.strides)
        return Leaf(name=name, kind="numpy", dtype=value.dtype.str, shape=value.shape, strides=strides)
    return None


def _strides(tensor: Any) -> tuple[int, ...] | None:
    """Return the strides; ``None`` if row-major ones suffice, also if the tensor has gaps in memory or overlaps."""
    strides: tuple[int, ...] = tensor.stride()
    # Not is_contiguous(): it ignores the strides of dimensions of size 1, which kernels do take into account.
    plain, reach = [], 1
    for size in reversed(tensor.shape):
        plain.append(reach)
        reach *= max(1, size)
    if strides == tuple(reversed(plain)) or not tensor.numel() or not _is_dense(strides, tensor.shape):
        return None
    return strides


def _is_dense(strides: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    """Whether a tensor has neither gaps in memory nor overlaps."""
    reach = 1
    for stride, size in sorted(zip(strides, shape, strict=True)):
        if size > 1:
            if stride != reach:
                return False
            reach = stride * size
    return True


def check(leaf: Leaf) -> None:
    """Raise ``ValueError`` or ``LookupError`` if :func:`describe` cannot have returned this leaf, since its value could
    not be created, or would take more memory than its bytes."""
    _, size, shape = leaf.stored
    reach = size * math.prod(max(1, count) for count in shape)
    if len(shape) > _DIMENSIONS or min(shape, default=0) < 0 or reach >= _MOST:
        raise ValueError(f"leaf {leaf.name!r} has the shape {leaf.shape}")
    if leaf.kind != "torch" or leaf.strides is None:
        return
    if min(leaf.strides, default=0) < 0 or max(leaf.strides, default=0) >= _MOST:
        raise ValueError(f"leaf {leaf.name!r} has the strides {leaf.strides}")
    if not _is_dense(leaf.strides, leaf.shape):
        raise ValueError(f"leaf {leaf.name!r} of shape {leaf.shape} has the strides {leaf.strides}")


def is_torch_size(value: object) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and type(value) is torch.Size


def numpy_scalar(value: object) -> tuple[str, bytes] | None:
    """Return dtype and bytes of a numpy scalar of a dtype that can be captured, else ``None``."""
    numpy = sys.modules.get("numpy")
    if numpy is None or not isinstance(value, numpy.generic) or value.dtype.str not in _NUMPY:
        return None
    return value.dtype.str, value.tobytes()


def make_numpy_scalar(dtype: str, content: bytes) -> object:
    """Return the numpy scalar of :func:`numpy_scalar`. Raises ``ValueError`` for invalid input."""
    import numpy

    if dtype not in _NUMPY:
        raise ValueError(f"unknown dtype {dtype}")
    (scalar,) = numpy.frombuffer(content, numpy.dtype(dtype))
    return scalar


def content(leaf: Leaf, value: Any) -> memoryview:
    """Return the raw bytes of a leaf in row-major order, without a copy if it is contiguous and on the CPU."""
    if leaf.kind == "bytes":
        return memoryview(value)
    if leaf.kind == "numpy":
        import numpy

        return numpy.ascontiguousarray(value).reshape(-1).view(numpy.uint8).data
    if not value.numel():
        return memoryview(b"")
    tensor = value.detach().resolve_conj().resolve_neg().cpu().contiguous()
    # Not numpy(): it makes the storage, which may be the user's, permanently non-resizable.
    memory: Any = (ctypes.c_ubyte * (tensor.numel() * tensor.element_size())).from_address(
        lazy_copies.address_of(tensor)
    )
    memory.owner = tensor  # keeps the memory alive
    return memoryview(memory).cast("B")


# Hashes by object id; empty if not computed yet. The reference removes an entry before another object can get the id.
_known: dict[int, tuple[weakref.ref[Any], str]] = {}


def note_unmodified(value: Any) -> None:
    """Record that nobody modifies a tensor or array from now on."""
    identity = id(value)
    if identity not in _known:
        _known[identity] = weakref.ref(value, lambda _: _known.pop(identity, None)), ""


def hash_of(leaf: Leaf, value: Any) -> str:
    """Return the xxh3_128 of a leaf's bytes. Values given to :func:`note_unmodified`, such as shared ones, are hashed
    once."""
    found = _known.get(id(value))
    if found is not None and found[1]:
        return found[1]
    digest = xxhash.xxh3_128_hexdigest(content(leaf, value))
    if found is not None:
        _known[id(value)] = found[0], digest
    return digest


def empty(leaf: Leaf) -> tuple[Any, memoryview]:
    """Return a new tensor or array, not yet filled, and its memory."""
    if leaf.kind == "numpy":
        import numpy

        array = numpy.empty(leaf.shape, numpy.dtype(leaf.dtype))
        return array, array.reshape(-1).view(numpy.uint8).data
    import torch

    # The device is explicit since the user may have set another default.
    tensor = torch.empty(leaf.shape, dtype=getattr(torch, leaf.dtype), device="cpu")
    return tensor, tensor.reshape(-1).view(torch.uint8).numpy().data


def arranged(leaf: Leaf, value: Any) -> Any:
    """Convert a row-major value to the strides of its leaf."""
    if leaf.strides is None:
        return value
    if leaf.kind == "numpy":
        return value.copy(order="F")
    import torch

    return torch.empty_strided(leaf.shape, leaf.strides, dtype=value.dtype, device=value.device).copy_(value)


def reread(leaf: Leaf, value: Any) -> Any:
    """Return the value as it would be read back from a file; a lazy copy if that is allowed."""
    if leaf.kind == "bytes":
        return value
    if (lazy := _lazy(leaf, value)) is not None:
        return lazy
    made, memory = empty(leaf)
    memory[:] = content(leaf, value)
    return arranged(leaf, made)


def copy(leaf: Leaf, value: Any, into: Any = None) -> Any:
    """Return a copy of the value on the same device, without gradient. ``into``: memory of :func:`room` to be used."""
    if leaf.kind == "bytes":
        return value
    if leaf.kind == "numpy":
        if into is None:
            return value.copy(order="C" if leaf.strides is None else "F")
        into[...] = value
        return into
    value = value.detach().resolve_conj().resolve_neg()
    if (lazy := _lazy(leaf, value)) is not None:
        return lazy
    if into is not None and into.device == value.device:
        return into.copy_(value)
    if leaf.strides is not None:
        return arranged(leaf, value)
    import torch

    # Not clone() alone: it keeps the order of strides of a tensor with gaps, which is read back row-major.
    return value.clone(memory_format=torch.contiguous_format)


def _lazy(leaf: Leaf, value: Any) -> Any | None:
    """Return a lazy copy of a value, if that is allowed and the value has the strides of its leaf."""
    lazy = lazy_copies.copy(value)
    if lazy is None or lazy.is_conj() or lazy.is_neg():
        return None
    return lazy if leaf.strides is not None or lazy.is_contiguous() else None


def same(pairs: Iterable[tuple[Leaf, Any, Any]]) -> list[bool]:
    """Return for each leaf whether its two values have the same bytes; :func:`copy` must have returned the second. Each
    device is waited for once."""
    found = [_same(leaf, value, other) for leaf, value, other in pairs]
    waiting = [index for index, one in enumerate(found) if not isinstance(one, bool)]
    if waiting:
        import torch

        by_device: dict[Any, list[int]] = {}
        for index in waiting:
            by_device.setdefault(found[index].device, []).append(index)
        for indices in by_device.values():
            for index, one in zip(indices, torch.stack([found[index] for index in indices]).tolist(), strict=True):
                found[index] = one
    return found


def same_bytes(one: Any, other: Any) -> bool:
    """Return whether two tensors on one device have the same shape, dtype and strides, no gaps, and the same bytes."""
    leaf = describe("", one)
    return (
        isinstance(leaf, Leaf)
        and leaf == describe("", other)
        and _is_dense(one.stride(), one.shape)
        and bool(_same(leaf, one, other))
    )


def _same(leaf: Leaf, value: Any, other: Any) -> Any:
    """Return whether two values of a leaf have the same bytes: a bool, or for tensors on a device a tensor of it
    there."""
    if leaf.kind == "bytes":
        return bool(value == other)
    if leaf.kind == "numpy":
        if not (value.flags.c_contiguous or value.flags.f_contiguous):
            return False

        return value.nbytes == other.nbytes and _equal_memory(value.ctypes.data, other.ctypes.data, value.nbytes)
    if value.device != other.device or value.stride() != other.stride():
        return False
    if any(one.is_conj() or one.is_neg() for one in (value, other)):
        return False
    if not value.numel() or lazy_copies.address_of(value) == lazy_copies.address_of(other):
        return True
    if value.device.type == "cpu":
        addresses = lazy_copies.address_of(value), lazy_copies.address_of(other)
        return _equal_memory(*addresses, value.numel() * value.element_size())
    import torch

    one, two = (tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8) for tensor in (value, other))
    if one.storage_offset() % 8 == two.storage_offset() % 8 == len(one) % 8 == 0:
        one, two = one.view(torch.int64), two.view(torch.int64)  # several times as fast
    return (one == two).all()


def _equal_memory(one: int, other: int, nbytes: int) -> bool:
    """Return whether two addresses hold the same ``nbytes`` bytes. ``torch.equal`` takes eight times as long."""
    return nbytes == 0 or _libc.memcmp(ctypes.c_void_p(one), ctypes.c_void_p(other), ctypes.c_size_t(nbytes)) == 0


def room(leaf: Leaf, value: Any) -> Any:
    """Return memory on the CPU for a copy of such a value, already written to once; ``None`` if a copy takes none
    there.

    The system provides memory when it is first written to, which takes several times as long as copying.
    """
    if leaf.kind == "bytes" or (leaf.kind == "torch" and value.device.type != "cpu"):
        return None
    if leaf.kind == "numpy":
        import numpy

        array = numpy.empty_like(value, order="C" if leaf.strides is None else "F", subok=False)
        array[...] = 0
        return array
    if lazy_copies.is_lazy(value):
        return None
    import torch

    # As bytes, since not every dtype can be filled. Not zeros(), which may not write to it.
    flat = torch.empty(leaf.nbytes, dtype=torch.uint8, device="cpu").zero_().view(value.dtype)
    return flat.view(leaf.shape) if leaf.strides is None else flat.as_strided(leaf.shape, leaf.strides)
