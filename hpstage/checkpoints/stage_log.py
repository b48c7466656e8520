"""The log of some steps of training, as a small file: columns of steps and values by name, and the printed text.

A file is msgpack with a checksum, never pickle. It is kept under the key of the state at its end, and outlives the
state's checkpoint.
"""

from __future__ import annotations

import msgspec
import xxhash

from hpstage.errors import CheckpointCorrupt, CheckpointForeign
from hpstage.plan.facts import StateKey

FORMAT = 1


class Series(msgspec.Struct, frozen=True):
    """The values logged under one name: ``values[i]`` in step ``steps[i]``, counted from 0, ascending."""

    steps: list[int]
    values: list[float]

    def __post_init__(self) -> None:
        if len(self.steps) != len(self.values):
            raise ValueError(f"there are {len(self.steps)} steps, but {len(self.values)} values")


class StageLog(msgspec.Struct, frozen=True):
    """The log of steps ``[start, stop)`` of a branch: logged values and printed text.

    ``output`` is the end of what was printed, standard output and standard error in their order; ``left_out``: the
    number of characters before it.
    """

    start: int
    stop: int
    series: dict[str, Series] = {}
    output: str = ""
    left_out: int = 0


class _Sealed(msgspec.Struct, frozen=True):
    """The content of a file: ``log`` is an encoded :class:`StageLog`, ``xxh3_128`` its checksum."""

    format: int
    key: StateKey
    workload: str
    xxh3_128: str
    log: bytes


_decode_sealed = msgspec.msgpack.Decoder(_Sealed).decode
_decode_log = msgspec.msgpack.Decoder(StageLog).decode


def encode(log: StageLog, key: StateKey, workload: str) -> bytes:
    content = msgspec.msgpack.encode(log)
    return msgspec.msgpack.encode(_Sealed(FORMAT, key, workload, xxhash.xxh3_128_hexdigest(content), content))


def decode(content: bytes, key: StateKey, workload: str, where: str) -> StageLog:
    """Decode a file.

    Raises:
        CheckpointCorrupt: it is damaged, or of another state.
        CheckpointForeign: it is of another workload.
    """
    try:
        sealed = _decode_sealed(content)
        if sealed.format != FORMAT:
            raise CheckpointCorrupt(f"{where} has format {sealed.format}; this hpstage reads format {FORMAT}")
        if xxhash.xxh3_128_hexdigest(sealed.log) != sealed.xxh3_128:
            raise CheckpointCorrupt(f"{where} does not match its checksum")
        log = _decode_log(sealed.log)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CheckpointCorrupt(f"{where} is not a log of a stage: {error}") from error
    if sealed.key != key:
        raise CheckpointCorrupt(f"{where} holds the log of another state, {sealed.key}")
    if sealed.workload != workload:
        raise CheckpointForeign(f"{where} belongs to workload {sealed.workload}, not to {workload}")
    return log
