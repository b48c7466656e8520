"""What driver and workers tell each other beside chains, amendments and reports. MessagePack: JSON has no NaN."""

from __future__ import annotations

from typing import Literal

import msgspec

from hpstage.events import Amendment, BoundaryMissed, BoundaryReached, Chain, ChainEnded, ChainId, ForkVerified
from hpstage.executor import Environment
from hpstage.schedule import Scalar

ChainReport = BoundaryReached | BoundaryMissed | ForkVerified | ChainEnded


class Problem(msgspec.Struct, frozen=True):
    """Why a worker cannot train: a module is not there, or the trainable raised."""

    kind: Literal["import", "trainable"]
    summary: str
    traceback: str


class Description(msgspec.Struct, frozen=True):
    """What a worker says of itself once the trainable has arrived. ``cuda``: it has a CUDA device."""

    worker: str
    host: str
    pid: int
    cuda: bool = False
    environment: Environment | None = None
    problem: Problem | None = None


class Stop(msgspec.Struct, frozen=True, tag=True):
    chain: ChainId
    keep: bool


class Amend(msgspec.Struct, frozen=True, tag=True):
    amendment: Amendment


Order = Stop | Amend

encode = msgspec.msgpack.Encoder().encode
decode_chain = msgspec.msgpack.Decoder(Chain).decode
decode_report = msgspec.msgpack.Decoder(ChainReport).decode
decode_values = msgspec.msgpack.Decoder(dict[str, Scalar]).decode
decode_orders = msgspec.msgpack.Decoder(list[Order]).decode
decode_description = msgspec.msgpack.Decoder(Description).decode


def name_of(run: str) -> str:
    """The name of a run's plugin, thread, topic and control channel."""
    return f"hpstage-{run}"
