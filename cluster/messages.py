"""Messages between driver, workers and training processes, besides chains, amendments and reports.

Encoded as MessagePack, since JSON has no NaN.
"""

from __future__ import annotations

import os
import sys
from typing import Any, Literal

import msgspec

from hpstage.execution.flight import Gathering
from hpstage.execution.retraining import Retrained
from hpstage.execution.runs import Record, Run
from hpstage.executor import Environment
from hpstage.plan.facts import ChainId, StateKey, WorkerId
from hpstage.plan.messages import Amendment, Audit, AuditEnded, AuditId, Chain, ChainReport, Segment
from hpstage.schedule import Scalar

PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"
"""Python version of this process. Another version cannot load the code of functions that this process packs."""


class Problem(msgspec.Struct, frozen=True):
    """Why a worker cannot train: a module is missing, the trainable raised, or its process was killed each time."""

    kind: Literal["import", "trainable", "killed"]
    summary: str
    traceback: str


class Loaded(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a training process that has loaded the trainable. ``cuda``: whether there is a CUDA device.
    ``slots``: number of chains that it trains side by side. ``devices``: UUIDs of the devices on which it trains; empty
    if it shares a device intentionally."""

    cuda: bool = False
    environment: Environment | None = None
    problem: Problem | None = None
    slots: int = 1
    devices: tuple[str, ...] = ()


class Description(Loaded, frozen=True):
    """A worker's description of itself once it has the trainable. ``incarnation``: name of its training process."""

    worker: str
    host: str
    pid: int
    incarnation: str = ""


class Stop(msgspec.Struct, frozen=True, tag=True):
    chain: ChainId
    keep: bool


class Amend(msgspec.Struct, frozen=True, tag=True):
    amendment: Amendment


class Expect(msgspec.Struct, frozen=True, tag=True):
    """The next chains are expected to start from these states, soonest first."""

    keys: tuple[StateKey, ...]


class BeginAudit(msgspec.Struct, frozen=True, tag=True):
    """Start an audit, unless the worker is training. ``checkpoints``: the pickled checkpoint store."""

    audit: Audit
    checkpoints: bytes


class EndAudit(msgspec.Struct, frozen=True, tag=True):
    """End an audit at once, if it is running."""

    audit: AuditId


Order = Stop | Amend | Expect | BeginAudit | EndAudit

# --- between a Dask worker and its training process: requests, one at a time, and orders; and their replies


class Load(msgspec.Struct, frozen=True, tag=True):
    """Unpack the trainable, and describe the process that will train it. The reply is :class:`Loaded`.

    ``script``: script to import first (:mod:`hpstage.cluster.script`). ``arguments``: the driver's command line, the
    program's name first; ``None`` keeps the arguments of the process. ``python``: Python version of the driver, which
    has packed the trainable.
    """

    trainable: bytes
    script: dict[str, str]
    arguments: list[str] | None = None
    python: str = PYTHON


class TryOut(msgspec.Struct, frozen=True, tag=True):
    """Evaluate an untrained model. The reply contains its metrics, or none. ``checkpoints``: the pickled store."""

    initial: dict[str, Scalar]
    checkpoints: bytes


class Measure(msgspec.Struct, frozen=True, tag=True):
    """Measure the step backends. The reply is what :meth:`hpstage.executor.Executor.measure` returns."""

    initial: dict[str, Scalar]
    steps: float


class LookAt(msgspec.Struct, frozen=True, tag=True):
    """Compute digests of inputs of training. The reply is what :meth:`hpstage.executor.Executor.look_at` returns."""

    inputs: tuple[str, ...]


class Train(msgspec.Struct, frozen=True, tag=True):
    """Train a chain in the slot of this name. The reply is empty: results are sent as reports."""

    chain: Chain
    slot: WorkerId
    checkpoints: bytes


class Follow(msgspec.Struct, frozen=True, tag=True):
    """Join a chain's gang as member ``rank``. The gang's leader waits at ``address``. The reply is the reason why
    joining failed, or an empty string."""

    chain: Chain
    address: str
    rank: int
    checkpoints: bytes


class Retrain(msgspec.Struct, frozen=True, tag=True):
    """Retrain a segment and compare. The reply is a :class:`~hpstage.execution.retraining.Retrained`."""

    segment: Segment
    checkpoints: bytes


class Perform(msgspec.Struct, frozen=True, tag=True):
    """Perform a run of a check. The reply is a :class:`~hpstage.execution.runs.Record`. ``states``: a folder."""

    run: Run
    states: str


class Forget(msgspec.Struct, frozen=True, tag=True):
    """Free the states in memory. Has no reply."""


class Ping(msgspec.Struct, frozen=True, tag=True):
    """Reply with :class:`Pong` at once, even during a step."""


class Finish(msgspec.Struct, frozen=True, tag=True):
    """Close the trainable, and end. Has no reply."""


Request = Load | TryOut | Measure | LookAt | Train | Follow | Retrain | Perform | Forget | Ping | Finish


class Reported(msgspec.Struct, frozen=True, tag=True):
    """An encoded report of a running chain."""

    report: bytes
    of: ChainId


class Done(msgspec.Struct, frozen=True, tag=True):
    """The encoded result of a request. ``of``: the chain, if it was a request to train; ``None`` for other requests."""

    value: msgspec.Raw = msgspec.Raw(b"\xc0")  # nil
    of: ChainId | None = None


class Raised(msgspec.Struct, frozen=True, tag=True):
    """A request raised an exception of class ``kind``: an error to show to the user, or an internal error."""

    kind: str
    text: str
    traceback: str
    of: ChainId | None = None


class Received(msgspec.Struct, frozen=True, tag=True):
    """The request to train a chain has arrived. If the process dies after this, the chain may be the cause."""

    of: ChainId


class Pong(msgspec.Struct, frozen=True, tag=True):
    """The process is alive."""


Reply = Reported | Done | Raised | Received | Pong

# msgspec inspects a class when its first decoder is created. Two threads that do so at the same time can crash the
# process. Therefore all decoders are created on import.
encode = msgspec.msgpack.Encoder().encode
decode_chain = msgspec.msgpack.Decoder(Chain).decode
decode_report = msgspec.msgpack.Decoder(ChainReport | Gathering).decode
decode_audited = msgspec.msgpack.Decoder(AuditEnded).decode
decode_orders = msgspec.msgpack.Decoder(list[Order]).decode
decode_description = msgspec.msgpack.Decoder(Description).decode
decode_request = msgspec.msgpack.Decoder(Request | Order).decode
decode_reply = msgspec.msgpack.Decoder(Reply).decode
decode_loaded = msgspec.msgpack.Decoder(Loaded).decode
decode_answer = msgspec.msgpack.Decoder(dict[str, Any] | None).decode
decode_record = msgspec.msgpack.Decoder(Record).decode
decode_retrained = msgspec.msgpack.Decoder(Retrained).decode
decode_refusal = msgspec.msgpack.Decoder(str).decode
decode_nothing = msgspec.msgpack.Decoder(None).decode

SIZE = 8
"""Bytes of the length prefix of each message between a Dask worker and its training process."""


def framed(message: Request | Order | Reply) -> bytes:
    """Return an encoded message, prefixed with its length."""
    encoded = encode(message)
    return len(encoded).to_bytes(SIZE, "big") + encoded


def unframed(channel: int) -> bytes:
    """Read an encoded message from a file descriptor. Raises :class:`EOFError` if the other end is closed."""
    return _read(channel, int.from_bytes(_read(channel, SIZE), "big"))


def _read(channel: int, count: int) -> bytes:
    parts = []
    while count:
        try:
            part = os.read(channel, min(count, 1 << 20))
        except ConnectionResetError:
            part = b""
        if not part:
            raise EOFError
        parts.append(part)
        count -= len(part)
    return b"".join(parts)


def name_of(run: str) -> str:
    """Return the name of a run's plugin, topic and control channel."""
    return f"hpstage-{run}"
