"""Tidy data frames of a plan, from its journal alone. Needs pandas (``pip install "hpstage[report]"``).

Seconds are those of workers, rounded to 2**-20 s, so that sums are exact: over a plan,

- ``trials.seconds_used + trials.seconds_saved == trials.seconds_alone``, row by row and summed;
- ``trials.seconds_used`` sums to ``stages`` (train + load + evaluate + save) plus ``workers.wasted_seconds``; for each
  study to those of its stages plus what it wasted.

Times (``began``, ``ended``, ``at``) are seconds since the epoch on the workers' clock (of a simulation: virtual).
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from hpstage.errors import UsageError
from hpstage.events import Fact, ForkedFrom, StateRef, UserFailure
from hpstage.locations import open_journal
from hpstage.report.account import Account, began, new_account, rounded, values_of
from hpstage.schedule import Schedule
from hpstage.store import Journal

if TYPE_CHECKING:
    import pandas as pd

# Characters of an event's text.
_TEXT = 400


@dataclass(frozen=True, slots=True)
class Frames:
    """The frames of a plan; their columns are described by the functions of the same names + ``_frame``."""

    trials: pd.DataFrame
    stages: pd.DataFrame
    states: pd.DataFrame
    workers: pd.DataFrame
    events: pd.DataFrame


def frames(source: Journal | str | os.PathLike[str]) -> Frames:
    """The frames of a plan as its journal tells it now.

    Args:
        source: an open journal, or a store as for ``optimize(store=...)``: a folder, or the URL of a Redis server with
            the plan's ``?prefix=``. A store is opened, read and closed, and not changed.

    Raises:
        UsageError: pandas is not installed, or the URL names no plan.
        StoreError: there is no plan, or it cannot be read.
    """
    _pandas()
    with ExitStack() as closing:
        journal = source if isinstance(source, Journal) else open_journal(source, closing=closing, read_only=True)
        facts: list[Fact] = []
        account = new_account(journal)
        account.catch_up(journal, facts.append)
    return Frames(
        trials=trials_frame(account),
        stages=stages_frame(account),
        states=states_frame(account),
        workers=workers_frame(account),
        events=events_frame(facts),
    )


def trials_frame(account: Account) -> pd.DataFrame:
    """A row per trial of the plan, in the order in which they were added.

    =================  ===================================================================================
    ``study``          name of the study
    ``number``         the trial's number in it
    ``trial``          its id in the plan
    ``state``          COMPLETE, PRUNED, FAIL; RUNNING: its search is not over; missing: its search ended without it
    ``value``          the value that the study was told; of several objectives ``values_0``, ``values_1``, ...
    ``steps``          where it would end
    ``steps_asked``    steps that were asked of it
    ``steps_shared``   of these, steps that another trial had asked for before
    ``seconds_alone``  estimate of what it would have taken alone, up to the last target that was answered
    ``seconds_used``   what workers spent for it, and for no trial that had asked before
    ``seconds_saved``  ``seconds_alone - seconds_used``; negative where losses and loading outweigh sharing
    ``donor``          the trial that it grew out of (population based training), from step ``forked_at`` on
    ``extends``        the finished trial that it carries on
    ``ended``          when the study finished it
    =================  ===================================================================================
    """
    plan = account.plan
    rows = []
    for id, planned in plan.trials.items():
        ended, proposed = plan.ended.get(id), account.proposed.get(id)
        number = proposed.number if proposed is not None else None
        values = () if ended is None or ended.values is None else tuple(map(float, ended.values))
        fork = None if proposed is None else proposed.fork
        alone, used = account.alone(id), account.used.get(id, 0.0)
        named = {f"values_{i}": value for i, value in enumerate(values)} if len(values) > 1 else {}
        rows.append(
            {
                "study": account.study_of(id),
                "number": number,
                "trial": id,
                "state": ended.state if ended is not None else "RUNNING" if account.is_open(id) else None,
                "value": values[0] if len(values) == 1 else None,
                "steps": planned.steps,
                "steps_asked": planned.asked,
                "steps_shared": planned.shared,
                "seconds_alone": alone,
                "seconds_used": used,
                "seconds_saved": alone - used,
                "donor": None if fork is None else fork.donor,
                "forked_at": None if fork is None else fork.step,
                "extends": None if proposed is None else proposed.extends,
                "ended": None if ended is None else ended.at,
                **named,
            }
        )
    return _frame(rows, _TRIALS)


def stages_frame(account: Account) -> pd.DataFrame:
    """A row per stage as a worker trained it, in the order of the journal. One without steps evaluated a kept state.

    ====================  ================================================================================
    ``node``, ``parent``  the node in the plan, and the one whose line it continues
    ``start``, ``stop``   steps ``[start, stop)`` were trained
    ``worker``, ``chain``  by whom, as part of which chain
    ``began``, ``at``     when it began and was done, times
    ``train_seconds``, ``load_seconds``, ``evaluate_seconds``, ``save_seconds``  what took how long
    ``source``            where the chain's first stage started: fresh, continued, live, disk; else missing
    ``trial``, ``study``  who paid: asked first for the step before ``stop``
    ``hp_NAME``           the hyper-parameter at ``start`` (where types differ, as JSON)
    ====================  ================================================================================
    """
    rows = []
    for charge in account.charges:
        fact = charge.fact
        node = account.plan.nodes[fact.node]
        rows.append(
            {
                "node": fact.node,
                "parent": None if node.parent is None else node.parent.id,
                "start": fact.start,
                "stop": fact.step,
                "worker": fact.worker,
                "chain": fact.chain,
                "began": began(fact),
                "at": fact.at,
                "train_seconds": rounded(fact.train_seconds),
                "load_seconds": rounded(fact.load_seconds),
                "evaluate_seconds": rounded(fact.evaluate_seconds),
                "save_seconds": rounded(fact.save_seconds),
                "source": fact.source,
                "trial": charge.trial,
                "study": account.study_of(charge.trial),
                **{f"hp_{name}": value for name, value in values_of(node, fact).items()},
            }
        )
    return _frame(rows, _STAGES)


def states_frame(account: Account) -> pd.DataFrame:
    """A row per state that was ever asked for or reached, by node and step.

    ================  ====================================================================================
    ``node``, ``step``  the state: the node's line after so many steps
    ``key``           its name for ever, also that of its checkpoint
    ``waiting``       trials that wait for its metrics
    ``kept_bytes``    bytes of its checkpoint; missing: there is none
    ``lost_reason``   why its checkpoint went, when it last did
    ``metrics_NAME``  what was measured
    ================  ====================================================================================
    """
    plan = account.plan
    rows = []
    for node in plan.nodes:
        for step, state in sorted(node.states.items()):
            lost = account.lost.get(StateRef(node.id, step))
            rows.append(
                {
                    "node": node.id,
                    "step": step,
                    "key": plan.key(node, step),
                    "waiting": len(state.waiting),
                    "kept_bytes": None if state.kept is None else state.kept.bytes,
                    "lost_reason": None if lost is None else lost.reason,
                    **{f"metrics_{name}": value for name, value in (state.metrics or {}).items()},
                }
            )
    return _frame(rows, _STATES)


def workers_frame(account: Account) -> pd.DataFrame:
    """A row per chain: when its worker was busy with it, in the order in which they were started.

    ==================  ==================================================================================
    ``worker``          the worker's id
    ``chain``, ``driver``  what it was given, by whom
    ``start``, ``end``  times; ``end`` is missing while it runs
    ``steps``           trained and reported
    ``wasted_seconds``, ``wasted_steps``  after its last boundary, thrown away (paid for: see above)
    ``outcome``         why they were: stopped, failed, lost, died, ...; missing: nothing was
    ==================  ==================================================================================
    """
    rows = [
        {
            "worker": chain.worker,
            "chain": chain.id,
            "driver": chain.driver,
            "start": chain.began,
            "end": chain.ended,
            "steps": chain.steps,
            "wasted_seconds": chain.wasted_seconds,
            "wasted_steps": chain.wasted_steps,
            "outcome": chain.outcome,
        }
        for chain in account.chains
    ]
    return _frame(rows, _WORKERS)


def events_frame(facts: Iterable[Fact]) -> pd.DataFrame:
    """A row per record of the journal.

    ============  ========================================================================================
    ``position``  in the journal
    ``type``      as in :mod:`hpstage.events`
    ``at``        when it happened, for those that tell
    ``text``      what it says, in short
    ============  ========================================================================================
    """
    rows = [
        {"position": position, "type": type(fact).__name__, "at": getattr(fact, "at", None), "text": _text(fact)}
        for position, fact in enumerate(facts)
    ]
    return _frame(rows, _EVENTS)


def _text(fact: Fact) -> str:
    """The fields of a fact, in short: what is long is named only, what is empty is left out."""
    parts = []
    for name in fact.__struct_fields__:
        value = getattr(fact, name)
        if name == "at" or value is None or value in ("", 0.0, (), {}):
            continue
        match value:
            case UserFailure():
                value = value.summary
            case ForkedFrom():
                value = f"{value.donor} at {value.step}"
            case Mapping() if any(isinstance(item, Schedule) for item in value.values()):
                value = " ".join(value)
            case Mapping() if name == "sampler":
                continue  # random states
            case Mapping():
                value = " ".join(f"{key}={item}" for key, item in value.items())
            case tuple():
                value = " ".join(str(msgspec.to_builtins(item)) for item in value)
            case msgspec.Struct():
                value = " ".join(f"{key}={item}" for key, item in msgspec.structs.asdict(value).items())
        parts.append(f"{name} {value}")
    text = ", ".join(parts)
    return text if len(text) <= _TEXT else f"{text[: _TEXT - 3]}..."


# Columns that are always there, with their types: a frame without rows has them, too.
_TRIALS = {
    "study": "string",
    "number": "Int64",
    "trial": "string",
    "state": "string",
    "value": "float64",
    "steps": "int64",
    "steps_asked": "int64",
    "steps_shared": "int64",
    "seconds_alone": "float64",
    "seconds_used": "float64",
    "seconds_saved": "float64",
    "donor": "string",
    "forked_at": "Int64",
    "extends": "string",
    "ended": "float64",
}
_STAGES = {
    "node": "int64",
    "parent": "Int64",
    "start": "int64",
    "stop": "int64",
    "worker": "string",
    "chain": "string",
    "began": "float64",
    "at": "float64",
    "train_seconds": "float64",
    "load_seconds": "float64",
    "evaluate_seconds": "float64",
    "save_seconds": "float64",
    "source": "string",
    "trial": "string",
    "study": "string",
}
_STATES = {
    "node": "int64",
    "step": "int64",
    "key": "string",
    "waiting": "int64",
    "kept_bytes": "Int64",
    "lost_reason": "string",
}
_WORKERS = {
    "worker": "string",
    "chain": "string",
    "driver": "string",
    "start": "float64",
    "end": "float64",
    "steps": "int64",
    "wasted_seconds": "float64",
    "wasted_steps": "int64",
    "outcome": "string",
}
_EVENTS = {"position": "int64", "type": "string", "at": "float64", "text": "string"}


def _pandas() -> Any:
    try:
        import pandas
    except ImportError:
        raise UsageError('data frames need pandas: pip install "hpstage[report]"') from None
    return pandas


def _frame(rows: list[dict[str, Any]], types: Mapping[str, str]) -> pd.DataFrame:
    """A frame of these columns in this order, then of all others that any row has, in order of appearance."""
    pandas = _pandas()
    names = list(dict.fromkeys([*types, *(name for row in rows for name in row)]))
    columns = {}
    for name in names:
        values = [row.get(name) for row in rows]
        columns[name] = pandas.Series(values if name in types else _alike(values), dtype=types.get(name))
    return pandas.DataFrame(columns)


def _alike(values: list[Any]) -> list[Any]:
    """Values of one type, so that every file format takes the column; else their JSON."""
    kinds = {type(value) for value in values if value is not None}
    if any(type(value) is int and value >= 2**63 for value in values):
        kinds = {object}  # pandas has a type for these, but not together with negative or missing ones
    if object not in kinds and (len(kinds) <= 1 or kinds == {int, float}):
        return values
    return [None if value is None else json.dumps(value) for value in values]
