"""Encoding of the data that a process of a gang gives the others: a share, or an exception of the user's code.

A share is encoded as a short text and the bytes of its tensors, one after the other. An exception is not pickled, since
unpickling runs code: its class is looked up in the imported modules, and its arguments are plain values. If these do
not give the same exception again, it arrives as a :class:`TrainingError`.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hpstage.errors import TrainingError
from hpstage.torch.elastic.reduction import Gradient, Rows, Share

_NONE, _DENSE = 0, 1


def encode(share: Share) -> tuple[bytes, list[Tensor]]:
    """Return the share as a text and 1-dimensional uint8 tensors on the share's device."""
    codes = [_code(gradient) for gradient in share.gradients]
    # Nearly always all gradients are dense, and then the text has no entry for each.
    forms = None if all(code == _DENSE for code in codes) else codes
    parts = [part for part in share.gradients if part is not None]
    tensors = [tensor for part in parts for tensor in (part if isinstance(part, Rows) else (part,))]
    data = [tensor.detach().contiguous().view(-1).view(torch.uint8) for tensor in (*tensors, *share.buffers)]
    return json.dumps([share.loss, sorted(share.unequal), forms, share.logged]).encode(), data


def decode(text: bytes, data: Tensor, own: Share, parameters: Sequence[Tensor], buffers: Sequence[Tensor]) -> Share:
    """Return the encoded share, which is to be combined with ``own``, on the devices of its parameters and buffers. Its
    tensors are views of ``data``, but for gradients that ``own`` does not have: they are copied, since the combined
    share keeps them."""
    loss, unequal, forms, logged = json.loads(text)
    reader = _Reader(data)
    codes = [_DENSE] * len(parameters) if forms is None else forms
    gradients = [
        _gradient(code, like, reader, stays=mine is None)
        for code, like, mine in zip(codes, parameters, own.gradients, strict=True)
    ]
    shared = [reader.take(like.shape, like) for like in buffers]
    return Share(loss, gradients, shared, frozenset(unequal), {name: tuple(sums) for name, sums in logged.items()})


def _code(gradient: Gradient) -> Any:
    if gradient is None:
        return _NONE
    return list(gradient.indices.shape) if isinstance(gradient, Rows) else _DENSE


def _gradient(code: Any, like: Tensor, reader: _Reader, *, stays: bool) -> Gradient:
    if code == _NONE:
        return None
    if code == _DENSE:
        return reader.take(like.shape, like, stays=stays)
    dimensions, count = code
    indices = reader.take((dimensions, count), torch.empty(0, dtype=torch.int64, device=like.device), stays=stays)
    return Rows(indices, reader.take((count, *like.shape[dimensions:]), like, stays=stays))


class _Reader:
    """Takes tensors from a run of bytes, one after the other."""

    def __init__(self, data: Tensor) -> None:
        self._data = data
        self._at = 0

    def take(self, shape: Sequence[int], like: Tensor, *, stays: bool = False) -> Tensor:
        start, self._at = self._at, self._at + torch.Size(shape).numel() * like.element_size()
        data = self._data[start : self._at]
        if stays or start % like.element_size():  # a view of a larger type begins at a multiple of its size
            data = data.clone()
        return data.view(like.dtype).view(shape).to(like.device)


def encode_failure(error: Exception, node: int) -> bytes:
    """Encode an exception for :func:`decode_failure`."""
    plain = all(isinstance(value, str | int | float | bool | None) for value in error.args)
    kind = type(error)
    return json.dumps(
        [
            kind.__module__,
            kind.__qualname__,
            [*error.args] if plain else None,
            str(error),
            f"in virtual node {node}, in another process:\n{''.join(traceback.format_exception(error))}",
        ]
    ).encode()


def decode_failure(text: bytes) -> Exception:
    """Return the exception that :func:`encode_failure` has encoded, or a :class:`TrainingError` with its message."""
    module, name, arguments, message, note = json.loads(text)
    error = _same(_class(module, name), arguments, message) or TrainingError(f"{name}: {message}")
    error.add_note(note)
    return error


def _class(module: str, name: str) -> Any:
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    return found


def _same(kind: Any, arguments: list[Any] | None, message: str) -> Exception | None:
    """Return an exception with these arguments, if it then has this message."""
    if arguments is None or not (isinstance(kind, type) and issubclass(kind, Exception)):
        return None
    try:
        error: Exception = kind.__new__(kind, *arguments)  # sets args; __init__ may take others
        return error if str(error) == message else None
    except Exception:
        return None  # it needs attributes that __init__ would have set
