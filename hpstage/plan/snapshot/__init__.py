"""Snapshots of a plan: the result of folding a journal, in bytes, so that it need not be folded again. Pure.

A snapshot only saves time. It is :class:`Unusable` if it was written by other code, belongs to another workload, is
damaged or contradicts itself; then the journal is folded instead. It is MessagePack, never pickle: the fields of all
objects in a plan, except the fields that can be derived from others.
"""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any, get_args

import msgspec
import xxhash

from hpstage.errors import HpstageError, StoreError
from hpstage.plan import facts, nodes
from hpstage.plan.facts import Record, StateKey
from hpstage.plan.nodes import Node, PlannedTrial, State
from hpstage.plan.open_chain import OpenChain
from hpstage.plan.plan import SearchPlan
from hpstage.plan.searches import SearchRecord
from hpstage.plan.snapshot.columns import Content, Layout, slots_of
from hpstage.plan.step_times import StepTimes
from hpstage.plan.uncollected import uncollected
from hpstage.plan.winners import _OfStudy
from hpstage.schedule import Form, Plateau, Schedule, Segment
from hpstage.schedule.scalars import distinct
from hpstage.store.cursor import Cursor


class Unusable(StoreError):
    """A snapshot cannot be used, or a plan cannot be written as a snapshot; the message gives the reason."""


class _Header(msgspec.Struct, array_like=True, frozen=True):
    """What a snapshot is made from: the records of a journal before a cursor."""

    workload: str
    sharing: bool
    position: int
    hash: bytes


def tag(package: Path) -> bytes:
    """Return the first bytes of snapshots that a version of hpstage writes. They contain a digest of the code that
    folds facts, since other code may fold them into another plan."""
    hasher = xxhash.xxh3_128()
    for folder in ("plan", "schedule"):
        for file in sorted((package / folder).rglob("*.py")):
            hasher.update(file.read_bytes())
    return b"hpstage-snapshot " + hasher.hexdigest().encode() + b"\n"


TAG = tag(Path(__file__).parents[2])
"""The first bytes of every snapshot of this version; the next are the digest of the rest."""
_START = len(TAG) + xxhash.xxh3_128().digest_size

_decode = msgspec.msgpack.Decoder(tuple[_Header, msgspec.Raw]).decode
_decode_content = msgspec.msgpack.Decoder(Content).decode

_DERIVED = {
    *("cursor", "restored", "nodes", "milestones", "branch_points", "_targets"),  # of a plan
    *("_roots", "_equal", "_siblings"),  # of a tree
    *("_history", "_trail"),  # of a node
}
"""Derived fields, which are not written."""
_OF_TREE = {"nodes", "milestones", "branch_points"}
"""Fields of the tree that are written nevertheless; the plan's fields of these names are the same objects."""


def _layout() -> Layout:
    plan = SearchPlan(StateKey(""), sharing=True)
    fields = {
        type(part): [name for name in vars(part) if name not in _DERIVED or (part is plan._tree and name in _OF_TREE)]
        for part in (plan, *vars(plan).values())
        if hasattr(part, "__dict__")
    }
    for kind in (type(plan.totals), StepTimes, Node, State, PlannedTrial, OpenChain, SearchRecord, _OfStudy):
        fields[kind] = [name for name in slots_of(kind) if name not in _DERIVED]
    structs: list[Any] = [kind for kind in vars(facts).values() if isinstance(kind, type) and issubclass(kind, Record)]
    for kind in (*structs, *get_args(Form), Segment, Schedule, Plateau):
        fields[kind] = kind.__struct_fields__
    # Objects that are compared by identity.
    constants = distinct(True), distinct(False), nodes._NONE, nodes._NO_STATES, nodes._NO_PLATEAUS
    return Layout(fields, constants)


_LAYOUT = _layout()
# Number of saved states, evenly distributed, whose keys are computed again as a check.
_KEYS = 100


def snapshot_of(plan: SearchPlan) -> bytes:
    """Return the snapshot of a plan, which must not change during the call.

    Raises:
        Unusable: the plan contains a value that cannot be written, such as an integer of more than 64 bits.
    """
    header = _Header(plan.workload, plan.sharing, plan.cursor.position, plan.cursor.hash)
    encoder = msgspec.msgpack.Encoder()
    content = bytearray(_START)
    try:
        with uncollected():
            encoder.encode_into((header, msgspec.Raw(encoder.encode(_LAYOUT.write(plan)))), content, _START)
    except (OverflowError, UnicodeError, TypeError) as error:
        raise Unusable(f"the plan contains a value that cannot be written ({error})") from error
    content[:_START] = TAG + xxhash.xxh3_128_digest(memoryview(content)[_START:])
    return bytes(content)


def restored(content: bytes, workload: StateKey, *, sharing: bool) -> SearchPlan:
    """Return the plan of a snapshot.

    Raises:
        Unusable: the snapshot is damaged, of another version or workload, or contradicts itself.
    """
    if not content.startswith(TAG):
        raise Unusable("it was written by another version of hpstage")
    body = memoryview(content)[_START:]
    if content[len(TAG) : _START] != xxhash.xxh3_128_digest(body):
        raise Unusable("it is damaged")
    try:
        header, encoded = _decode(body)
        if (header.workload, header.sharing) != (workload, sharing):
            raise Unusable("it belongs to another workload")
        plan: SearchPlan = _LAYOUT.read(_decode_content(encoded), len(body))
        _complete(plan)
        _check(plan)
    except Unusable:
        raise
    except (*_CONTRADICTIONS, HpstageError) as error:
        raise Unusable(f"it contradicts itself ({type(error).__name__}: {error})") from error
    plan.cursor, plan.restored = Cursor(header.position, header.hash), header.position
    return plan


_CONTRADICTIONS = (
    *(msgspec.MsgspecError, LookupError, ValueError, TypeError, AttributeError, ArithmeticError, StopIteration),
    RuntimeError,  # StopIteration in a generator, or recursion
)


def _complete(plan: SearchPlan) -> None:
    """Set the derived fields."""
    tree = plan._tree
    plan.nodes, plan.milestones, plan.branch_points = tree.nodes, tree.milestones, tree.branch_points
    plan._targets = {trial.targets: trial.targets for trial in plan.trials.values()}
    tree._roots, tree._equal = {}, {}
    for number, node in enumerate(tree.nodes):
        node._history = node._trail = None
        if node.id != number or (node.parent is not None and node.parent.id >= number):
            raise ValueError(f"node {node.id} is out of place")
        if node.parent is None:
            tree.begin(node)
    tree.index_siblings()


def _check(plan: SearchPlan) -> None:
    """Raise ValueError if the sum of trained steps or the key of any of some saved states is wrong."""
    if plan.totals.steps_trained != sum([node.trained for node in plan.nodes]):
        raise ValueError("the nodes' steps do not add up")
    for key, state in islice(plan.kept.items(), 0, None, 1 + len(plan.kept) // _KEYS):
        if plan.key(state.node, state.step) != key:
            raise ValueError(f"step {state.step} of node {state.node.id} is not the state {key}")
