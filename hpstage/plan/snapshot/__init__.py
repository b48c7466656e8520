"""Snapshots of a plan: the result of folding a journal, in bytes, so that it need not be folded again. Pure.

A snapshot only saves time. One of other code or of another workload, a damaged one, and one that contradicts itself are
:class:`Unusable`, and the journal is folded instead. It is typed MessagePack, never pickle; many rows with
equal fields are stored as columns, one list per field.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
import xxhash

from hpstage.errors import StoreError
from hpstage.plan.facts import StateKey
from hpstage.plan.plan import SearchPlan
from hpstage.plan.snapshot.contents import Contents, contents_of, fill
from hpstage.store.cursor import Cursor


class Unusable(StoreError):
    """A snapshot is of no use here, and why; or a plan has none."""


class _Header(msgspec.Struct, array_like=True, frozen=True):
    """The origin of a snapshot: the records before a cursor of a journal."""

    workload: str
    sharing: bool
    position: int
    hash: bytes


def tag(package: Path) -> bytes:
    """Return what snapshots of a version of hpstage begin with: a digest of its code that folds facts, since other code
    may make another plan of them."""
    hasher = xxhash.xxh3_128()
    for folder in ("plan", "schedule"):
        for file in sorted((package / folder).rglob("*.py")):
            hasher.update(file.read_bytes())
    return b"hpstage-snapshot " + hasher.hexdigest().encode() + b"\n"


TAG = tag(Path(__file__).parents[2])
"""The first bytes of every snapshot of this version; the next are the digest of the rest."""
_START = len(TAG) + xxhash.xxh3_128().digest_size

_decode = msgspec.msgpack.Decoder(tuple[_Header, msgspec.Raw]).decode
_decode_contents = msgspec.msgpack.Decoder(Contents).decode


def snapshot_of(plan: SearchPlan) -> bytes:
    """Return the snapshot of a plan, which must not change during the call.

    Raises:
        Unusable: the plan holds what no snapshot can, such as an integer of more than 64 bits.
    """
    header = _Header(plan.workload, plan.sharing, plan.cursor.position, plan.cursor.hash)
    encoder = msgspec.msgpack.Encoder()
    content = bytearray(_START)
    try:
        encoder.encode_into((header, msgspec.Raw(encoder.encode(contents_of(plan)))), content, _START)
    except (OverflowError, UnicodeError) as error:
        raise Unusable(f"the plan holds what cannot be written ({error})") from error
    content[:_START] = TAG + xxhash.xxh3_128_digest(memoryview(content)[_START:])
    return bytes(content)


def restored(content: bytes, workload: StateKey, *, sharing: bool) -> SearchPlan:
    """Return the plan of a snapshot.

    Raises:
        Unusable: it is damaged, of another version or workload, or contradicts itself.
    """
    if not content.startswith(TAG):
        raise Unusable("it is of another version of hpstage")
    body = memoryview(content)[_START:]
    if content[len(TAG) : _START] != xxhash.xxh3_128_digest(body):
        raise Unusable("it is damaged")
    plan = SearchPlan(workload, sharing=sharing)
    try:
        header, contents = _decode(body)
        if (header.workload, header.sharing) != (workload, sharing):
            raise Unusable("it is of another workload")
        fill(plan, _decode_contents(contents))
    except (msgspec.MsgspecError, LookupError, ValueError, TypeError, AttributeError, ArithmeticError) as error:
        raise Unusable(f"it contradicts itself ({type(error).__name__}: {error})") from error
    plan.cursor, plan.restored = Cursor(header.position, header.hash), header.position
    return plan
