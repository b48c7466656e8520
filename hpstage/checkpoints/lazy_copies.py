"""Lazy copies: tensors on the CPU that have their memory in common until one of them is written to.

torch gives a tensor memory of its own before anything can write to it: an operation in place, also through ``.data``
or a view, and whatever takes its address (``numpy()``, ``data_ptr()``, DLPack). Only an address that was taken before
is out of its sight. So lazy copies are made of tensors that :func:`allow_copies` has found no other user of.

Everything here reads a tensor's memory without giving it one of its own.
"""

from __future__ import annotations

import sys
from typing import Any

SMALLEST = 1 << 14
"""Bytes of the smallest tensor that is worth it."""
# What holds the memory of a tensor that nobody else has: itself, and torch's object for the memory, if there is one.
_HOLDERS = 2


def address_of(tensor: Any) -> int:
    """Return the address of a tensor's first element."""
    return int(sys.modules["torch"]._C._data_address(tensor))


def is_lazy(tensor: Any) -> bool:
    """Return whether a tensor is a lazy copy, or has any: nobody knows the address of its memory."""
    torch = sys.modules["torch"]
    return bool(tensor.layout is torch.strided and torch._C._is_cow_tensor(tensor))


def allow_copies(tensor: Any) -> bool:
    """Let copies of a tensor be lazy, unless somebody else may have its memory. Return whether they are."""
    torch = sys.modules["torch"]
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.layout is not torch.strided:
        return False
    if tensor.device.type != "cpu" or tensor.is_quantized or tensor.is_inference() or not _is_whole(tensor):
        return False
    storage = tensor.untyped_storage()
    if is_lazy(tensor):
        return True
    if torch._C._storage_Use_Count(storage._cdata) > _HOLDERS:
        return False
    try:
        torch._lazy_clone(tensor)
    except RuntimeError:  # memory that torch has not allocated: a mapped file, an array
        return False
    return True


def copy(tensor: Any) -> Any | None:
    """Return a lazy copy of a tensor with the same strides; ``None`` if it is not allowed."""
    if tensor.device.type != "cpu" or not is_lazy(tensor) or not _is_whole(tensor):
        return None
    return sys.modules["torch"]._lazy_clone(tensor.detach())


def clone(tensor: Any) -> Any:
    """Return a copy of a tensor that is lazy if it may be, without gradient."""
    lazy = copy(tensor)
    return tensor.detach().clone() if lazy is None else lazy.detach()


def _is_whole(tensor: Any) -> bool:
    nbytes = tensor.numel() * tensor.element_size()
    return bool(nbytes >= SMALLEST and tensor.untyped_storage().nbytes() == nbytes)
