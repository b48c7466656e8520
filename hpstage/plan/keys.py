"""State keys and workload keys, which are hashes of a canonical encoding.

A state's key hashes the workload and the *history of values*: at which step which hyperparameter took which
value. It depends only on the values that training has seen: not on how a schedule was written or cut, on the
names of trials and studies, on dict order, or on ``1`` versus ``1.0``.
Equal keys mean equal training, and training that has seen equal values has equal keys, with one exception: states that
were trained without a hyperparameter keep their keys when the hyperparameter gets a default (``NodeTree.default``).
How the code enters the keys, and which edits change them: :mod:`hpstage.training.identity.code_identity`.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Mapping

from hpstage.plan.facts import StateKey
from hpstage.schedule import Scalar

# Part of every key. A change to the encoding or to its meaning must change it.
VERSION = b"hpstage-key-2"
_DIGEST_SIZE = 16


def encode(value: Scalar) -> bytes:
    """Return the canonical, tagged, self-delimiting bytes of a scalar. Numbers are as in ``schedule.canonical``."""
    if value.__class__ is float:  # most are
        return b"d" + _pack(value)
    if value is None:
        return b"n"
    if value is True:
        return b"t"
    if value is False:
        return b"f"
    if isinstance(value, int):
        return b"i%d;" % value
    if isinstance(value, float):
        return b"d" + _pack(value)
    text = value.encode()
    return b"s%d:" % len(text) + text


_pack = struct.Struct(">d").pack


def workload_key(described: Mapping[str, str]) -> StateKey:
    """Return the key of everything besides the schedules that determines training: trainable, code, data, numerics,
    environment; as :mod:`hpstage.training.identity.environment` describes it."""
    parts = [encode(name) + encode(described[name]) for name in sorted(described)]
    return StateKey(_digest(VERSION + b"workload" + b"".join(parts)).hexdigest())


class ValueHistory:
    """The values that training has seen so far, as a chain of digests: 16 bytes for any number of steps.

    It is sent with a stage, so that the worker can compute the keys of the states on it.
    """

    __slots__ = ("digest",)

    def __init__(self, digest: bytes) -> None:
        self.digest = digest

    @classmethod
    def new(cls, workload: StateKey, names: Iterable[str], *, salt: str = "") -> ValueHistory:
        """Return an empty history. ``salt`` separates a trial that must not share its training."""
        parts = [encode(workload), encode(salt), *(b"," + encode(name) for name in names)]
        return cls(_digest(VERSION + b"history" + b"".join(parts)).digest())

    def changed(self, step: int, changes: Iterable[tuple[str, Scalar]]) -> ValueHistory:
        """Return the history with these values from ``step`` on. Steps must ascend and names must be sorted.

        Unchanged values must be left out, or the encoding would depend on where a history was cut.
        """
        parts = [encode(name) + encode(value) for name, value in changes]
        return ValueHistory(_digest(self.digest + b"@%d;" % step + b"".join(parts)).digest())

    def key(self, step: int) -> StateKey:
        """Return the key of the state after ``step`` steps. The history must hold all changes before ``step`` and none
        after."""
        return StateKey(_digest(self.digest + b"=%d;" % step).hexdigest())


def _digest(content: bytes) -> hashlib.blake2b:
    return hashlib.blake2b(content, digest_size=_DIGEST_SIZE)
