"""Tensors and arrays that share memory. A state preserves the sharing: what is written to one is seen in the other."""

from __future__ import annotations

import bisect
import ctypes
from collections.abc import Callable, Iterable
from itertools import compress
from typing import Any

from hpstage.checkpoints import leaves
from hpstage.checkpoints.lazy_copies import address_of
from hpstage.errors import StateError
from hpstage.training.capture.kind import numpy, torch
from hpstage.training.capture.kinds import VALUES
from hpstage.training.capture.survey import Record, Survey
from hpstage.training.capture.values import duplicate, is_tensor, look_at, plain_array, plain_tensor

Extent = tuple[int, int]
"""Address of the first byte of some memory, and the address after its last byte."""
_ALIGNED = 64


class Places:
    """Finds the memory of new tensors and arrays: memory that existed when training began, new memory that several of
    them share, or memory of their own.

    Args:
        base: survey of what existed when training began.
        now: survey of what exists now.
    """

    def __init__(self, base: Survey, now: Survey) -> None:
        before = [record for record in base if _is_plain(record)]
        # A state holds the bytes of old memory only where a value of the base still lies in it.
        written = {id(record.content.storage) for record in now if _is_plain(record) and record.obj in base}
        is_old = [record.content.storage is None or id(record.content.storage) in written for record in before]
        self._old = _Blocks(_blocks_of(compress(before, is_old)))
        left = compress(before, (not old for old in is_old))
        self._left = _Blocks(_blocks_of(record for record in left if record.obj in now))
        extents = []
        for record in now:
            if _is_plain(record) and _is_new(record, base):
                extent = _extent(record.obj)
                if extent is not None and self._old.holding(extent) is None:
                    extents.append((*extent, record.obj))
                    if now.beyond or not _is_dense(record.obj):  # twice: it counts as shared, and is kept with its gaps
                        extents.append((*(_block(record.obj) if now.beyond else extent), record.obj))
        self._shared = _Blocks(_shared(extents))
        self._foreign = _Blocks([(*extent, record.path) for record in now if (extent := _exposed(record)) is not None])
        self._numbers: dict[int, int] = {}
        self.written: list[tuple[int, Any]] = []
        """Blocks of new memory that several values share: the padding before each, for alignment, and its bytes."""

    def admit(self, local: Survey, now: Survey) -> None:
        """From now on, also find values in the memory of objects of ``local`` that have not moved to other memory."""
        present = (record for record in local if _is_plain(record) and record.obj in now)
        kept = (record for record in present if not _is_new(now.records[id(record.obj)], local))
        self._old = _Blocks([*self._old.blocks, *_blocks_of(kept)])

    def of(self, obj: Any) -> tuple[Any, ...] | None:
        """Return the location of the memory of ``obj`` as a plain value, or ``None`` if it shares no memory.

        Raises:
            StateError: it shares memory with an object that is not a tensor or array, or has got the memory that
                belonged to another tensor when training began.
        """
        extent = _extent(obj)
        if extent is None:
            return None
        foreign = self._foreign.holding(extent)
        if foreign is not None:
            raise StateError(
                f"training has made a tensor or array in the memory of {foreign[2]}, which no state can hold: make "
                f"both in model() or before the loop, or keep a copy"
            )
        left = self._left.holding(extent)
        if left is not None:
            raise StateError(
                f"training has given the memory of {left[2]} to another tensor, and other memory to {left[2]}, which "
                f"no state can hold: exchange their values (`copy_()`), not their `data`"
            )
        held = self._old.holding(extent)
        if held is not None:
            return "of", held[2], extent[0] - held[0]
        held = self._shared.holding(extent)
        if held is None:
            return None
        start, end, owner = held
        before = (start - _block(owner)[0]) % _ALIGNED
        if start not in self._numbers:
            self._numbers[start] = len(self.written)
            self.written.append((before, _bytes(owner, start, end)))
        return "in", self._numbers[start], extent[0] - start + before


def _exposed(record: Record) -> Extent | None:
    """Return the memory that an object such as a ``bytearray`` or ``array.array`` exposes for writing, or ``None``."""
    if record.kind.name not in ("bytearray", "foreign"):
        return None
    try:
        memory = (ctypes.c_ubyte * memoryview(record.obj).nbytes).from_buffer(record.obj)
    except (TypeError, ValueError, BufferError):  # it exposes no memory, or only read-only memory
        return None
    start = ctypes.addressof(memory)
    return start, start + len(memory)


def holding(survey: Survey) -> Callable[[Any], bool]:
    """Return a function that checks whether a tensor or array lies in the memory of surveyed tensors and arrays."""
    blocks = _Blocks(_blocks_of(filter(_is_plain, survey)))

    def held(obj: Any) -> bool:
        extent = _extent(obj)
        return extent is not None and blocks.holding(extent) is not None

    return held


class RestoredMemory:
    """The inverse of :class:`Places`: memory reconstructed from results of :meth:`Places.of`."""

    def __init__(self, base: Survey, written: Any) -> None:
        self.base = base
        self._written = written
        self._storages: dict[int, Any] = {}

    def tensor(self, place: Any, shape: Any, strides: Any, dtype: Any, device: Any) -> Any:
        storage = self._storage(place, device)
        size = torch().empty(0, dtype=dtype).element_size()
        return look_at(storage, shape, strides, dtype, place[2] // size)

    def array(self, place: Any, shape: Any, strides: Any, dtype: Any, base: Any) -> Any:
        """Return an array at ``place``: a view of ``base``, an array on that memory, or else of the whole memory."""
        storage = self._storage(place, "cpu")
        memory = look_at(storage, (storage.nbytes(),), (1,), torch().uint8, 0).numpy() if torch() else storage
        lowest = sum(min(0, (size - 1) * stride) for size, stride in zip(shape, strides, strict=True))
        offset = place[2] - lowest
        if base is not None:
            offset += _address(memory) - _address(base)
            memory = base if base.flags.c_contiguous else base.ravel(order="K")
        return numpy().ndarray(tuple(shape), dtype, memory, offset, tuple(strides))

    def _storage(self, place: Any, device: Any) -> Any:
        library = torch()
        if place[0] == "in":
            number = place[1]
            if number not in self._storages:
                before, content = self._written[number]
                if not 0 <= before < _ALIGNED:
                    raise StateError("the state holds memory with an invalid alignment")
                memory = numpy().empty(before + content.size, "u1")
                memory[before:] = content
                self._storages[number] = (
                    memory if library is None else library.from_numpy(memory).to(device, copy=True).untyped_storage()
                )
            return self._storages[number]
        record = self.base.paths.get(place[1])
        if record is None or record.kind is not VALUES:
            raise StateError(
                f"the state refers to the memory of {place[1]}, which is not available here: it was saved by other code"
            )
        if record.content.storage is not None:
            return record.content.storage
        start, end = _block(record.obj)
        memory = numpy().frombuffer(_memory(start, end, record.obj), "u1")
        return memory if library is None else library.from_numpy(memory).untyped_storage()


def _address(array: Any) -> int:
    return int(array.__array_interface__["data"][0])


def _is_dense(obj: Any) -> bool:
    """Return whether a leaf of a state preserves how the values of a tensor or array lie in memory."""
    plain = plain_tensor(obj) if is_tensor(obj) else obj
    leaf = leaves.describe("", plain)
    if isinstance(leaf, leaves.Leaf) and leaf.strides is not None:
        return True
    return bool(plain.is_contiguous() if is_tensor(obj) else plain.flags.c_contiguous)


class _Blocks:
    def __init__(self, blocks: list[tuple[int, int, Any]]) -> None:
        self.blocks: list[tuple[int, int, Any]] = []
        for block in sorted(blocks, key=lambda block: (block[0], -block[1])):
            if block[1] > block[0] and (not self.blocks or block[1] > self.blocks[-1][1]):
                self.blocks.append(block)
        self._starts = [start for start, _, _ in self.blocks]

    def holding(self, extent: Extent) -> tuple[int, int, Any] | None:
        index = bisect.bisect_right(self._starts, extent[0]) - 1
        if index >= 0 and extent[1] <= self.blocks[index][1]:
            return self.blocks[index]
        return None


def _is_plain(record: Record) -> bool:
    return record.kind is VALUES and record.content.plain


def _is_new(record: Record, base: Survey) -> bool:
    before = base.records.get(id(record.obj))
    return before is None or not before.content.same_memory(record.content)


def _shared(extents: list[tuple[int, int, Any]]) -> list[tuple[int, int, Any]]:
    """Return the unions of overlapping extents, each with one of its objects; drop extents that overlap no other."""
    found: list[tuple[int, int, Any, int]] = []
    for start, end, obj in sorted(extents, key=lambda extent: extent[:2]):
        if found and start < found[-1][1]:
            begin, last, owner, count = found[-1]
            found[-1] = begin, max(end, last), owner, count + 1
        else:
            found.append((start, end, obj, 1))
    return [(start, end, owner) for start, end, owner, count in found if count > 1]


def _extent(obj: Any) -> Extent | None:
    """Return the memory range of a tensor or array, or ``None`` if it is empty or its memory is unknown."""
    if is_tensor(obj):
        plain = plain_tensor(obj)
        if plain is None or not plain.numel():
            return None
        reach = sum((size - 1) * stride for size, stride in zip(plain.shape, plain.stride(), strict=True))
        start = address_of(plain)
        return start, start + (reach + 1) * plain.element_size()
    plain = plain_array(obj)
    if plain is None or not plain.size:
        return None
    start = _address(plain)
    reaches = [(size - 1) * stride for size, stride in zip(plain.shape, plain.strides, strict=True)]
    low, high = sum(min(0, reach) for reach in reaches), sum(max(0, reach) for reach in reaches)
    return start + low, start + high + plain.itemsize


def _block(obj: Any, storage: Any = None) -> Extent:
    """Return all the memory behind a tensor or array: its storage, or the memory of the array that it is a view of."""
    if is_tensor(obj):
        storage = storage or obj.untyped_storage()
        start = address_of(look_at(storage, (0,), (1,), torch().uint8, 0))
        return start, start + int(storage.nbytes())
    root = obj
    while isinstance(root.base, numpy().ndarray):
        root = root.base
    return _extent(root) or (0, 0)


def _blocks_of(records: Iterable[Record]) -> list[tuple[int, int, Any]]:
    return [(*_block(record.obj, record.content.storage), record.path) for record in records]


def _memory(start: int, end: int, owner: Any) -> Any:
    memory: Any = (ctypes.c_ubyte * (end - start)).from_address(start)
    memory.owner = owner  # keeps it alive
    return memory


def _bytes(owner: Any, start: int, end: int) -> Any:
    if is_tensor(owner) and owner.device.type != "cpu":
        storage = owner.untyped_storage()
        part = look_at(storage, (end - start,), (1,), torch().uint8, start - storage.data_ptr())
        return duplicate(part).cpu().numpy()
    return numpy().frombuffer(_memory(start, end, owner), "u1").copy()
