"""Encoding of a share for other processes of a gang: a short text, and the bytes of its tensors one after the other."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hpstage.torch.elastic.reduction import Gradient, Rows, Share

_NONE, _DENSE = 0, 1


def encode(share: Share) -> tuple[bytes, list[Tensor]]:
    """Return the share as a text and 1-dimensional uint8 tensors on the share's device."""
    codes = [_code(gradient) for gradient in share.gradients]
    # Nearly always all are dense: then a thousand parameters take no text.
    forms = None if all(code == _DENSE for code in codes) else codes
    parts = [part for part in share.gradients if part is not None]
    tensors = [tensor for part in parts for tensor in (part if isinstance(part, Rows) else (part,))]
    data = [tensor.detach().contiguous().view(-1).view(torch.uint8) for tensor in (*tensors, *share.buffers)]
    return json.dumps([share.loss, sorted(share.unequal), forms, share.logged]).encode(), data


def decode(text: bytes, data: Tensor, own: Share, parameters: Sequence[Tensor], buffers: Sequence[Tensor]) -> Share:
    """Return a share that is to be combined with ``own``, on the devices of the parameters and buffers that it belongs
    to. Its tensors are parts of ``data``, except gradients that ``own`` does not have: combined, those stay."""
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
