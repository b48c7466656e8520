"""Pickles in states. The output of ``pickle.dumps`` depends on which equal strings are one object in memory. Loading
changes that, so otherwise indistinguishable objects can pickle to different bytes."""

from __future__ import annotations

import io
import pickle
import sys
from collections.abc import Iterator
from typing import Any

_PROTOCOL = 4
_UNCHANGING = (str, bytes, tuple, frozenset)


def pickled(obj: object) -> bytes:
    """Return an object as bytes for a state, equal for equal objects; read them with ``pickle.loads``.

    A mutable object that occurs twice is loaded as one object; strings, tuples and dtypes are written each time.
    Meant for library objects (a scikit-learn estimator) whose state is more than a few arrays; for large data, keep
    arrays instead. Raises the same errors as ``pickle.dumps`` for objects that cannot be pickled.
    """
    written = io.BytesIO()
    _Canonical(written, _PROTOCOL).dump(obj)
    return written.getvalue()


class _Canonical(pickle._Pickler):  # the C pickler does not let us choose what to share
    def __init__(self, file: io.BytesIO, protocol: int) -> None:
        super().__init__(file, protocol)
        numpy: Any = sys.modules.get("numpy")
        self._unshared = _UNCHANGING if numpy is None else (*_UNCHANGING, numpy.dtype, numpy.generic)

    def memoize(self, obj: object) -> None:
        if not isinstance(obj, self._unshared):
            super().memoize(obj)  # type: ignore[misc]  # missing from typeshed

    def reducer_override(self, obj: Any) -> Any:
        torch: Any = sys.modules.get("torch")
        if torch is None or not isinstance(obj, torch.storage.TypedStorage):
            return NotImplemented
        # torch writes the address of its memory into the pickle.
        storage = obj._untyped_storage  # untyped() warns that it is deprecated
        content = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        return _storage, (content.cpu().numpy().tobytes(), obj.dtype, storage.device)


def _storage(content: bytes, dtype: Any, device: Any) -> Any:
    """Return the storage of a tensor. Called by ``pickle.loads``."""
    import torch

    values = torch.empty(len(content), dtype=torch.uint8)
    values.numpy()[:] = bytearray(content)
    kind: Any = torch.storage.TypedStorage
    return kind(wrap_storage=values.to(device).untyped_storage(), dtype=dtype, _internal=True)


def pickles_in(state: object, path: str = "state") -> Iterator[tuple[str, bytes]]:
    """Yield path and content of each byte string in a state that looks like a pickle."""
    if isinstance(state, dict):
        for key, value in state.items():
            yield from pickles_in(value, f"{path}[{key!r}]")
    elif isinstance(state, list | tuple):
        for index, value in enumerate(state):
            yield from pickles_in(value, f"{path}[{index}]")
    elif isinstance(state, bytes) and state[:1] == b"\x80" and state[1:2] <= b"\x05" and state[-1:] == b".":
        yield path, state  # of protocol 2 or later


REMEDY = (
    "a pickle also records which equal strings are one object in memory, and loading changes that: keep "
    "hpstage.pickled(object) there instead of pickle.dumps(object) (pickle.loads reads both), or the object's arrays "
    "and numbers themselves"
)
