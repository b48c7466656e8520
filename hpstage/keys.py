"""Keys: the one canonical encoding, and the names of workloads and states that are hashed from it.

A state's key hashes the workload and the *history of values*: at which step which hyper-parameter took which
value. It is a function of the values that training has seen and of nothing else: not of how a schedule was
written or cut, nor of the names of trials and studies, nor of the order of a dict, nor of ``1`` against ``1.0``.
Equal keys mean equal training, and training that has seen equal values has equal keys.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Mapping

from hpstage.events import StateKey
from hpstage.schedule import Scalar

# Part of every key. A change to the encoding or to its meaning must change it.
VERSION = b"hpstage-key-1"
_DIGEST_SIZE = 16


def encode(value: Scalar) -> bytes:
    """Canonical, tagged, self-delimiting bytes of a scalar. Numbers are those of ``schedule.canonical``."""
    if value is None:
        return b"n"
    if value is True:
        return b"t"
    if value is False:
        return b"f"
    if isinstance(value, int):
        return b"i%d;" % value
    if isinstance(value, float):
        return b"d" + struct.pack(">d", value)
    text = value.encode()
    return b"s%d:" % len(text) + text


def workload_key(described: Mapping[str, str]) -> StateKey:
    """Key of what besides the schedules decides training: trainable, code, data, numerics, environment."""
    hasher = hashlib.blake2b(VERSION + b"workload", digest_size=_DIGEST_SIZE)
    for name in sorted(described):
        hasher.update(encode(name) + encode(described[name]))
    return StateKey(hasher.hexdigest())


class History:
    """The values that a line of training has seen, as a running hash.

    ``salt`` sets a line apart that must share with none (a trial trained alone); it is empty otherwise.
    """

    __slots__ = ("_hasher",)

    def __init__(self, workload: StateKey, names: Iterable[str], *, salt: str = "") -> None:
        self._hasher = hashlib.blake2b(VERSION + b"history", digest_size=_DIGEST_SIZE)
        self._hasher.update(encode(workload) + encode(salt))
        for name in names:
            self._hasher.update(b"," + encode(name))

    def copy(self) -> History:
        twin = object.__new__(History)
        twin._hasher = self._hasher.copy()
        return twin

    def change(self, step: int, changes: Iterable[tuple[str, Scalar]]) -> None:
        """From ``step`` on these hyper-parameters have these values. Steps ascend; names are sorted.

        Values that stay the same are not changes: the encoding would depend on where a history was cut.
        """
        self._hasher.update(b"@%d;" % step + b"".join([encode(name) + encode(value) for name, value in changes]))

    def key(self, step: int) -> StateKey:
        """Key of the state after ``step`` steps; all changes before ``step`` have been told, and none after."""
        hasher = self._hasher.copy()
        hasher.update(b"=%d;" % step)
        return StateKey(hasher.hexdigest())
