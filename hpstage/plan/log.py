"""Reading a journal's facts, folding them into a plan, and writing new ones."""

from __future__ import annotations

import logging
import re
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Annotated, overload

import msgspec

from hpstage.errors import HpstageError, InternalError, StoreError, UsageError
from hpstage.plan.checks import FORMAT, VERSION, check, in_other_format
from hpstage.plan.facts import Fact, PlanCreated, StateKey, StateReached, TargetAsked, TrialId
from hpstage.plan.plan import SearchPlan
from hpstage.plan.same_workload import check_workload, format_of
from hpstage.plan.uncollected import uncollected
from hpstage.store.cursor import Cursor
from hpstage.store.journal import NO_FENCES, Journal

logger = logging.getLogger("hpstage")

encode = msgspec.json.Encoder().encode
_decoder = msgspec.json.Decoder(Fact | Annotated[tuple[Fact, ...], msgspec.Meta(min_length=1)])
_raw = msgspec.json.Decoder(tuple[msgspec.Raw, ...])
NOTHING: Mapping[str, str] = MappingProxyType({})
PIECE = 1000
"""Number of records of a long journal that are read at a time, each of up to ten facts."""
# Number of facts from which on it pays to pause the garbage collector.
_MANY = 100
# Maximum number of facts in a record: it bounds pieces of a journal and the facts between snapshots, both of which are
# counted in records.
_JOINED = 10


def open_plan(
    journal: Journal,
    workload: StateKey,
    described: Mapping[str, str],
    loaded: Mapping[str, str] = NOTHING,
    *,
    origin: tuple[str, str] = ("", ""),
    sharing: bool = True,
) -> SearchPlan:
    """Fold the plan from a journal; an empty journal gets its first event.

    Args:
        described: the description that the workload's key was hashed from.
        loaded: digests of the workload's code by name, to report differences.
        origin: the trainable as a command line names it, and the folder that this name starts from.

    Raises:
        StoreError: the journal belongs to another workload (naming what differs), was written by a newer hpstage,
            contains a record that is not a fact, or contradicts itself.
    """
    if len(journal) == 0:
        created = PlanCreated(FORMAT, workload, dict(described), uuid.uuid4().hex, dict(loaded), *origin)
        journal.append([_record_of([created])], expect=Cursor())  # may lose a race: the check below covers both
    check_workload(journal.read(0, 1)[0], workload, described, loaded, lambda: _is_trained(journal))
    plan = from_snapshot(journal, workload, sharing)
    if plan is None:
        plan = SearchPlan(workload, sharing=sharing)
        fold_all(journal, plan, plan.apply)
    return plan


def from_snapshot(journal: Journal, workload: StateKey, sharing: bool) -> SearchPlan | None:
    """Return the plan of a journal, restored from its snapshot and folded from there on; ``None`` if it has no snapshot
    that can be used."""
    try:
        content = journal.read_snapshot()
        if content is None:
            return None
        from hpstage.plan.snapshot import restored  # builds the decoders of all columns

        with uncollected():
            plan = restored(content, workload, sharing=sharing)
            fold_all(journal, plan, plan.apply)
        return plan
    except StoreError as error:  # also if the snapshot is of another journal, or contradicts the records after it
        logger.info("The plan's snapshot cannot be used (%s): the whole journal is folded", error)
        return None


def fold_all(journal: Journal, plan: SearchPlan, fold: Callable[[Fact], object]) -> None:
    """Fold all of the journal's records after the plan's cursor, as :func:`fold_on` does."""
    with uncollected():
        # In pieces, so that the records of a long journal need not be in memory at once.
        while fold_on(journal, plan, fold, PIECE) == PIECE:
            pass


def fold_on(journal: Journal, plan: SearchPlan, fold: Callable[[Fact], object], limit: int | None = None) -> int:
    """Fold the journal's records after the plan's cursor, at most ``limit`` of them, and return how many.

    Args:
        fold: applies the next fact to the plan.

    Raises:
        HistoryChanged: the journal no longer contains the records folded before.
        StoreError: a record is not a fact, or contradicts those before it.
    """
    records, behind = journal.read_on(plan.cursor, limit)
    first = plan.cursor.position
    if records:  # in most turns of a driver there are none
        with _newer_named(journal):
            fold_checked(plan, records, first, fold)
    plan.cursor = behind
    return len(records)


class _Joined(msgspec.Struct, tag="DriverJoined"):
    version: str = ""


_decode_joined = msgspec.json.Decoder(_Joined).decode


@contextmanager
def _newer_named(journal: Journal) -> Iterator[None]:
    """Name the cause if a newer hpstage has written records that this one does not understand."""
    try:
        yield
    except StoreError as error:
        newest = VERSION
        for record in journal.read():
            with suppress(msgspec.MsgspecError, RecursionError):  # most are of other kinds
                for fact in split(record):
                    newest = max(newest, _decode_joined(fact).version, key=_numbers)
        if newest == VERSION:
            raise
        raise StoreError(
            f"this store was written by a newer hpstage (version {newest}; this is {VERSION}): upgrade "
            f"hpstage, or choose another store ({error})"
        ) from error


def _numbers(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version)]


def fold_checked(plan: SearchPlan, records: Iterable[bytes], first: int, fold: Callable[[Fact], object]) -> None:
    """Fold records, the first of which is at position ``first`` of the journal.

    Raises:
        StoreError: a record does not consist of facts, or contradicts those before it.
    """
    position = first
    try:
        for position, record in enumerate(records, first):
            for fact in _decode(record, position):
                check(plan, fact)
                fold(fact)
    except (InternalError, UsageError, LookupError, ValueError, AssertionError) as error:
        kind = "" if isinstance(error, HpstageError) else f"{type(error).__name__}: "
        raise StoreError(
            f"record {position} of the journal contradicts those before it ({kind}{error}); it was damaged: choose "
            f"another store"
        ) from error


@dataclass(eq=False, repr=False)
class Log:
    """The only writer of a plan's journal. It folds facts once they are written, in the journal's order."""

    plan: SearchPlan  # folded from the journal so far
    journal: Journal
    fold: Callable[[Fact], object]  # applies a fact to the plan, regardless of who wrote it
    fences: Callable[[], Mapping[str, int]] = lambda: NO_FENCES
    """Returns the leases that every record depends on, as fencing tokens by name."""
    noted: list[Fact] = field(default_factory=list)
    """Facts to be written with the next write."""

    def note(self, fact: Fact) -> None:
        """Buffer a fact, to be written with the next write."""
        self.noted.append(fact)

    @property
    def requested(self) -> set[TrialId]:
        """Trials of which targets are noted but not yet written."""
        return {fact.trial for fact in self.noted if isinstance(fact, TargetAsked)}

    def commit(self, facts: Sequence[Fact]) -> bool:
        """Write facts and fold them if every earlier record is folded; otherwise fold those and return False.

        Raises the errors of :func:`check`, and :class:`StoreError` for a fact whose record could not be read again:
        nothing is written then.
        """
        facts = (*self.noted, *facts)
        for fact in facts:
            check(self.plan, fact)
        records = [_record_of(facts[start : start + _JOINED]) for start in range(0, len(facts), _JOINED)]
        if records and self.journal.append(records, expect=self.plan.cursor, fences=self.fences()) is None:
            self.catch_up()
            return False
        self.noted.clear()
        if records:
            self.plan.cursor = self.plan.cursor.after(records)
        with uncollected() if len(facts) >= _MANY else nullcontext():
            for fact in facts:
                self.fold(fact)
        return True

    def write(self, facts: Sequence[Fact] = ()) -> None:
        """Write facts that are true regardless of the records of other drivers, which are folded first."""
        while not self.commit(facts):
            pass

    def catch_up(self) -> None:
        """Fold the records that others have written."""
        fold_on(self.journal, self.plan, self.fold)


def open_existing_plan(journal: Journal) -> SearchPlan:
    """Fold the plan of a journal of any workload. Raises as :func:`open_plan` does, also if the journal is empty."""
    header = read_header(journal)
    return open_plan(journal, header.workload, header.described, sharing=shares(header))


def read_header(journal: Journal) -> PlanCreated:
    """Return a journal's first event. Raises as :func:`open_plan` does, also if the journal is empty."""
    records = journal.read(0, 1)
    for record in records:
        with suppress(msgspec.MsgspecError):  # refused below
            if (form := format_of(record)) != FORMAT:
                raise in_other_format(form)  # before it is decoded, since it may have unknown fields
    header = next(facts_of(records), None)
    if not isinstance(header, PlanCreated):
        raise StoreError("this is not the journal of a search plan; choose another store")
    check_workload(records[0], header.workload, header.described, NOTHING, lambda: _is_trained(journal))
    return header


def shares(header: PlanCreated) -> bool:
    """Return whether trials share equal beginnings on this plan."""
    return header.described.get("sharing") != "off"


class Facts(Sequence[Fact]):
    """The facts of a journal's records, decoded at every access: decoded facts take twice the memory."""

    def __init__(self, records: Sequence[bytes]) -> None:
        self._records = [fact for record in records for fact in split(record)]

    @overload
    def __getitem__(self, at: int) -> Fact: ...
    @overload
    def __getitem__(self, at: slice) -> Facts: ...
    def __getitem__(self, at: int | slice) -> Fact | Facts:
        return Facts(self._records[at]) if isinstance(at, slice) else _decode(self._records[at], at)[0]

    def __iter__(self) -> Iterator[Fact]:
        return facts_of(self._records)

    def __len__(self) -> int:
        return len(self._records)


def read_facts(journal: Journal) -> Iterator[Fact]:
    """Yield the facts of a journal in order. Raises :class:`StoreError` at a record that is not a fact."""
    with _newer_named(journal):
        yield from facts_of(journal.read())


def _is_trained(journal: Journal) -> bool:
    """Return whether a state was reached."""
    return any(isinstance(fact, StateReached) for fact in read_facts(journal))


def facts_of(records: Iterable[bytes], start: int = 0) -> Iterator[Fact]:
    """Yield the facts of records, the first of which is at position ``start`` of a journal."""
    for position, record in enumerate(records, start):
        yield from _decode(record, position)


def split(record: bytes) -> Sequence[bytes]:
    """Return the facts of a record, still encoded."""
    return [bytes(fact) for fact in _raw.decode(record)] if record.startswith(b"[") else (record,)


def _decode(record: bytes, position: int) -> tuple[Fact, ...]:
    """Return the facts of a record: one, or several that were written together."""
    try:
        found: Fact | tuple[Fact, ...] = _decoder.decode(record)
        return found if isinstance(found, tuple) else (found,)
    except msgspec.MsgspecError as error:
        raise StoreError(
            f"record {position} of the journal cannot be read ({error}); it was damaged, or written by another version "
            f"of hpstage: use that version, or choose another store"
        ) from error


def _record_of(facts: Sequence[Fact]) -> bytes:
    """Return the record of facts, after decoding it as a test: a record that cannot be decoded would make the journal
    permanently useless."""
    try:
        record = encode(facts if len(facts) > 1 else facts[0])
        _decoder.decode(record)
    except (msgspec.MsgspecError, TypeError, ValueError, OverflowError) as error:
        if len(facts) > 1:
            for fact in facts:
                _record_of([fact])  # raises an error that names the fact
        raise StoreError(
            f"{type(facts[0]).__name__} cannot be stored, since it could not be read again ({error}); nothing was "
            f"written"
        ) from error
    return record
