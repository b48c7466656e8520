"""Pickles in states. What ``pickle.dumps`` gives also tells which equal texts are one object in memory: loading changes
that, so that two objects that nothing else tells apart have other bytes."""

from __future__ import annotations

import io
import pickle
import sys
from collections.abc import Iterator
from typing import Any

_PROTOCOL = 4
_UNCHANGING = (str, bytes, tuple, frozenset)


def pickled(obj: object) -> bytes:
    """An object as bytes for a state, which are equal for equal objects; ``pickle.loads`` gives it back.

    What can change and is met twice comes back as one object; texts, tuples and dtypes are written each time.
    It is for objects of libraries (an estimator of scikit-learn's) whose state is more than some arrays; for much
    data, give arrays. Raises what ``pickle.dumps`` raises for what cannot be pickled.
    """
    written = io.BytesIO()
    _Canonical(written, _PROTOCOL).dump(obj)
    return written.getvalue()


class _Canonical(pickle._Pickler):  # the one in C cannot be told what to share
    def __init__(self, file: io.BytesIO, protocol: int) -> None:
        super().__init__(file, protocol)
        numpy: Any = sys.modules.get("numpy")
        self._unshared = _UNCHANGING if numpy is None else (*_UNCHANGING, numpy.dtype, numpy.generic)

    def memoize(self, obj: object) -> None:
        if not isinstance(obj, self._unshared):
            super().memoize(obj)  # type: ignore[misc]  # typeshed has not all of it


def pickles_in(state: object, path: str = "state") -> Iterator[tuple[str, bytes]]:
    """Path and bytes of all that looks like a pickle in a state."""
    if isinstance(state, dict):
        for key, value in state.items():
            yield from pickles_in(value, f"{path}[{key!r}]")
    elif isinstance(state, list | tuple):
        for index, value in enumerate(state):
            yield from pickles_in(value, f"{path}[{index}]")
    elif isinstance(state, bytes) and is_pickle(state):
        yield path, state


def is_pickle(content: bytes) -> bool:
    """Whether it begins and ends like one, of protocol 2 or later."""
    return content[:1] == b"\x80" and content[1:2] <= b"\x05" and content[-1:] == b"."


REMEDY = (
    "a pickle also tells which equal texts are one object in memory, which loading changes: keep "
    "hpstage.pickled(object) there in place of pickle.dumps(object), which pickle.loads reads, or its arrays and "
    "numbers themselves"
)
