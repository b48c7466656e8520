"""Snapshots of a plan: what was folded from a journal, in bytes, so that it need not be folded again. Pure.

A snapshot only saves time. One of another layout or workload, a damaged one, and one that contradicts itself are
:class:`Unusable`, and the journal is folded instead. It is typed MessagePack, never pickle; where there are many
equal things, in columns, one list per field.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import msgspec
import xxhash

from hpstage.errors import StoreError
from hpstage.plan import facts, keys
from hpstage.plan.checks import FORMAT
from hpstage.plan.facts import StateKey
from hpstage.plan.plan import SearchPlan
from hpstage.plan.snapshot.contents import Contents, contents_of, fill
from hpstage.schedule import Plateau, Schedule, Segment, forms
from hpstage.store.cursor import Cursor

LAYOUT = 1
"""Version of what the columns mean. Other fields change :data:`TAG` by themselves."""


class Unusable(StoreError):
    """A snapshot is of no use here, and why; or a plan has none."""


class _Header(msgspec.Struct, array_like=True, frozen=True):
    """What a snapshot is of: the records before a cursor of a journal."""

    workload: str
    sharing: bool
    position: int
    hash: bytes


def _structs(*places: object) -> Iterator[type[msgspec.Struct]]:
    """Yield the structs among classes, and in modules."""
    for place in places:
        for kind in [place] if isinstance(place, type) else vars(place).values():
            if isinstance(kind, type) and issubclass(kind, msgspec.Struct) and kind is not msgspec.Struct:
                yield kind


def _layout() -> Iterator[str]:
    yield f"{LAYOUT} {FORMAT} {keys.VERSION!r} {sys.byteorder}"
    for kind in _structs(facts, forms, Plateau, Schedule, Segment, Contents):
        yield f"{kind.__qualname__} {[(field.name, str(field.type)) for field in msgspec.structs.fields(kind)]}"


TAG = b"hpstage-snapshot " + xxhash.xxh3_128_hexdigest("\n".join(_layout()).encode()).encode() + b"\n"
"""The first bytes of every snapshot of this layout; the next are the digest of the rest."""
_START = len(TAG) + xxhash.xxh3_128().digest_size

_decode = msgspec.msgpack.Decoder(tuple[_Header, msgspec.Raw]).decode
_decode_contents = msgspec.msgpack.Decoder(Contents).decode


def snapshot_of(plan: SearchPlan) -> bytes:
    """Return the snapshot of a plan, which must not change meanwhile.

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
        Unusable: it is damaged, of another layout or workload, or contradicts itself.
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
