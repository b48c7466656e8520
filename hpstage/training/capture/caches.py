"""Results that ``functools.lru_cache`` keeps: no state holds them, so they must not depend on what training changes."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from typing import Any

from hpstage.errors import StateError
from hpstage.training.capture.kinds import CACHE, VALUES
from hpstage.training.capture.stateful import arguments_kept
from hpstage.training.capture.stateless import excluding, unmarked
from hpstage.training.capture.survey import Record, Step, Survey


def refuse_results_of_state(base: Survey, now: Survey, reached: Callable[[Any], list[Step]]) -> None:
    """Refuse results that were cached since setup for arguments that have changed, or by code that reads what has
    changed.

    Args:
        base: what training began with.
        now: the present survey.
        reached: returns what the code of a function or class reaches.

    Raises:
        StateError: a fork would compute another result, or get one that it has not computed.
    """
    for record in now:
        if record.kind is not CACHE or record is base.records.get(id(record.obj)):
            continue
        for argument in arguments_kept(record.obj):
            before, present = base.records.get(id(argument)), now.records.get(id(argument))
            if before is not None and before is not present:
                raise _stale(record, f"for {unmarked(before.path)}")
        for read in _read_by(record, now, reached):
            before = base.records.get(id(read.obj))
            if before is not None and (before is not read or (read.kind is VALUES and read.content.trained)):
                raise _stale(record, f"that depends on {unmarked(before.path)}")


def _stale(record: Record, of: str) -> StateError:
    return StateError(
        f"{unmarked(record.path)} has cached a result {of}, which training changes: a fork would get another result. "
        f"Pass it the numbers or texts that it depends on instead, or keep the result as an attribute; "
        f"{excluding(record.path)}"
    )


def _read_by(cache: Record, now: Survey, reached: Callable[[Any], list[Step]]) -> Iterator[Record]:
    """Yield the records of all objects that the function behind a cache leads to."""
    seen: set[int] = set()
    todo: list[Any] = [cache.obj.__wrapped__]
    while todo:
        obj = todo.pop()
        if id(obj) in seen:
            continue
        seen.add(id(obj))
        todo += [one for _, one in reached(obj)] if isinstance(obj, type | types.FunctionType) else []
        record = now.records.get(id(obj))
        if record is not None and record.kind is not CACHE:
            yield record
            todo += [one for _, one in record.inner]
