"""Lazy copies: tensors on the CPU that share memory until one of them is written to.

torch gives a tensor its own memory before anything can write to it: an operation in place, also through ``.data`` or a
view, or a call that returns its address (``numpy()``, ``data_ptr()``, DLPack). torch cannot know who uses an address
that was taken earlier. Lazy copies are therefore made only of tensors for which :func:`allow_copies` has found no other
user.

All functions here read a tensor's memory without making torch copy it.
"""

from __future__ import annotations

import sys
from typing import Any

SMALLEST = 1 << 14
"""Minimum bytes of a tensor that is worth a lazy copy."""
# Maximum number of references to the memory of a tensor without other users: the tensor's, and that of torch's storage
# object, if there is one. References to the tensor itself are those of its Python object, and of users by DLPack.
_HOLDERS = 2


def address_of(tensor: Any) -> int:
    """Return the address of a tensor's first element."""
    offset: int = tensor.storage_offset() * tensor.element_size()  # torch's address does not include it
    whole = tensor.detach().as_strided((0,), (1,), 0) if offset else tensor
    return int(sys.modules["torch"]._C._data_address(whole)) + offset


def is_lazy(tensor: Any) -> bool:
    """Return whether a tensor is a lazy copy, or has lazy copies: nobody knows the address of its memory."""
    torch = sys.modules["torch"]
    return bool(tensor.layout is torch.strided and torch._C._is_cow_tensor(tensor))


def allow_copies(value: Any) -> bool:
    """Allow lazy copies of a value, if it is a tensor whose memory has no other user. Return whether they are
    allowed."""
    if not _has_one_user(value):
        return False
    if is_lazy(value):
        return True
    try:
        sys.modules["torch"]._lazy_clone(value)
    except RuntimeError:  # memory that torch has not allocated: a mapped file, an array
        return False
    return True


def is_mapped(value: Any) -> bool:
    """Return whether a value is a tensor in a safetensors file that is privately mapped, as transformers loads models,
    and has no other user. (A mapping of another file may also belong to an array.)"""
    if not sys.platform.startswith("linux") or not _has_one_user(value):
        return False
    address = address_of(value)
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
        for line in maps:
            place, rights, *_, path = line.split(maxsplit=5)
            begin, _, end = place.partition("-")
            if int(begin, 16) <= address < int(end, 16):
                name = path.rstrip().removesuffix(" (deleted)")
                return rights.endswith("p") and name.endswith(".safetensors")
    return False


def _has_one_user(value: Any) -> bool:
    """Return whether a value is a tensor whose memory has no other user, as far as torch knows."""
    if not _is_whole(value) or value.is_inference() or value._use_count() > 1:
        return False
    storage = value.untyped_storage()
    return bool(sys.modules["torch"]._C._storage_Use_Count(storage._cdata) <= _HOLDERS)


def copy(value: Any) -> Any | None:
    """Return a lazy copy with the same strides; ``None`` if it is not allowed, or the value is not a tensor."""
    return sys.modules["torch"]._lazy_clone(value.detach()) if _is_whole(value) and is_lazy(value) else None


def clone(tensor: Any) -> Any:
    """Return a copy of a tensor without gradient; a lazy copy if that is allowed."""
    lazy = copy(tensor)
    return tensor.detach().clone() if lazy is None else lazy.detach()


def _is_whole(value: Any) -> bool:
    """Return whether a value is an ordinary tensor on the CPU that shows all of its memory."""
    torch = sys.modules.get("torch")
    if torch is None or type(value) not in (torch.Tensor, torch.nn.Parameter) or value.layout is not torch.strided:
        return False
    nbytes = value.numel() * value.element_size()
    if nbytes < SMALLEST or value.device.type != "cpu" or value.is_quantized:
        return False
    return bool(value.untyped_storage().nbytes() == nbytes)
