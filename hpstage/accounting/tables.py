"""The tables of a plan as plain values, for CSV files and data frames. From the journal alone, without pandas.

All seconds are worker seconds, rounded to 2**-20 s, so that sums are exact, over a plan and over each of its studies:

- ``trials.seconds_used + trials.seconds_saved == trials.seconds_alone``, row by row and summed;
- ``trials.seconds_used`` sums to ``stages`` (train + load + evaluate + save) plus ``workers.wasted_seconds``.

Times (``began``, ``ended``, ``at``) are seconds since the epoch on the workers' clock (virtual in a simulation).
"""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path
from typing import TextIO

import msgspec

from hpstage.accounting.book import Book
from hpstage.accounting.payments import rounded
from hpstage.errors.text import clean
from hpstage.plan.facts import ChainId, Fact, ForkedFrom, StateRef, UserFailure
from hpstage.schedule import Schedule

Value = None | bool | int | float | str

# Maximum number of characters of an event's text.
_TEXT = 400


@dataclass(frozen=True, slots=True)
class Table:
    """Columns of equal length, in order. ``None`` is a missing value.

    ``types``: the pandas types of the columns that tables of this kind always have. Each other column holds values of
    a single type.
    """

    columns: Mapping[str, Sequence[Value]]
    types: Mapping[str, str]

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def write_csv(self, path: Path) -> None:
        """Write a CSV file. Missing values are left empty; numbers are written so that reading restores them
        exactly. Text is written as :func:`cell` does."""
        with path.open("w", newline="", encoding="utf-8") as file:
            self.write_to(file)

    def write_to(self, file: TextIO) -> None:
        """Write the table as CSV, as :meth:`write_csv` does."""
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(map(cell, self.columns))
        writer.writerows(map(cell, row) for row in zip(*self.columns.values(), strict=True))


def cell(value: Value) -> Value:
    """Return the content of a CSV file's cell. In texts, which others may have chosen, control characters are written
    as ``\\x1b``, and a ``'`` is put before a text that a spreadsheet would take for a formula."""
    if not isinstance(value, str):
        return value
    text = clean(value)
    return f"'{text}" if text.startswith(("=", "+", "-", "@")) and not _is_number(text) else text


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def trials(book: Book) -> Table:
    """Return a table with a row per trial, in the order in which they were added to the plan; rejected ones come last.

    =================  ===================================================================================
    ``study``          name of the study
    ``number``         the trial's number in it
    ``trial``          its id in the plan
    ``state``          COMPLETE, PRUNED, FAIL; REJECTED: by the space; RUNNING: its search has not ended; missing: its
                       search ended before the trial did
    ``value``          the value reported to the study; with several objectives ``values_0``, ``values_1``, ...
    ``steps``          its end step
    ``steps_asked``    number of steps requested of it
    ``steps_shared``   how many of these another trial had requested first
    ``seconds_alone``  estimate of its cost without sharing, up to the last target with a result
    ``seconds_used``   worker seconds charged to it: for steps that no other trial had requested before
    ``seconds_saved``  ``seconds_alone - seconds_used``; negative where losses and loading outweigh sharing
    ``donor``          the trial that it branches from, at step ``forked_at``
    ``extends``        the finished trial that it extends
    ``ended``          when the study finished it
    ``rejected``       the exception that the space raised instead of returning its schedules
    ``params_NAME``    the study's parameter (as JSON if types differ)
    =================  ===================================================================================
    """
    account = book.account
    plan = account.plan
    rows: list[tuple[Value, ...]] = []
    several = _Sparse()
    params = _Sparse()
    for row, (id, planned) in enumerate(book.trials.items()):
        ended, proposed = plan.ended.get(id), account.plan.searches.proposed.get(id)
        values = () if ended is None or ended.values is None else tuple(map(float, ended.values))
        if len(values) > 1:
            several.put(row, {f"values_{i}": value for i, value in enumerate(values)})
        number = donor = forked_at = extends = None
        if proposed is not None:
            number, extends = proposed.number, proposed.extends
            if proposed.fork is not None:
                donor, forked_at = proposed.fork.donor, proposed.fork.step
            params.put(row, proposed.params)
        alone, own = book.alone[id], account.trials.get(id)
        used = 0.0 if own is None else own.charged_seconds
        rows.append(
            (
                account.plan.study_of(id),
                number,
                id,
                ended.state if ended is not None else "RUNNING" if account.is_open(id) else None,
                values[0] if len(values) == 1 else None,
                planned.steps,
                planned.requested,
                0 if own is None else own.shared,
                alone,
                used,
                alone - used,
                donor,
                forked_at,
                extends,
                None if ended is None else ended.at,
                None,
            )
        )
    for row, (id, proposed) in enumerate(book.rejected.items(), len(rows)):
        assert proposed.rejected is not None
        params.put(row, proposed.params)
        ended = plan.ended.get(id)
        rows.append(
            (
                *(proposed.study, proposed.number, id, "REJECTED", None, 0, 0, 0, 0.0, 0.0, 0.0, None, None, None),
                *(None if ended is None else ended.at, proposed.rejected.summary),
            )
        )
    fixed = zip(*rows, strict=True) if rows else repeat((), len(_TRIALS))
    columns = dict(zip(_TRIALS, fixed, strict=True))
    return Table({**columns, **several.columns("", len(rows)), **params.columns("params_", len(rows))}, _TRIALS)


def stages(book: Book) -> Table:
    """Return a table with a row per trained stage, in the journal's order. A stage without steps evaluated a saved
    state.

    ====================  ================================================================================
    ``node``, ``parent``  the node in the plan, and the node whose branch it continues
    ``start``, ``stop``   steps ``[start, stop)`` were trained
    ``worker``, ``chain``  the worker, and the chain the stage was part of
    ``began``, ``at``     when it started and finished, times
    ``train_seconds``, ``load_seconds``, ``evaluate_seconds``, ``save_seconds``  seconds of workers by activity
    ``workers``           how many trained it; a fraction of one that trained several stages side by side
    ``alone_seconds``     ``train_seconds`` of one worker that trains nothing else; missing: the same, or unknown
    ``source``            where the chain's first stage started: fresh, continued, live, disk; else missing
    ``trial``, ``study``  the trial charged: the first to request the step before ``stop``
    ``hp_NAME``           the hyperparameter at ``start`` (as JSON if types differ)
    ====================  ================================================================================
    """
    account, charges = book.account, book.charges
    facts = [charge.fact for charge in charges]
    nodes = [account.plan.nodes[fact.node] for fact in facts]
    columns: list[Sequence[Value]] = [
        [fact.node for fact in facts],
        [None if node.parent is None else node.parent.id for node in nodes],
        [fact.start for fact in facts],
        [fact.step for fact in facts],
        [fact.worker for fact in facts],
        [fact.chain for fact in facts],
        [fact.began for fact in facts],
        [fact.at for fact in facts],
        [rounded(fact.train_seconds) for fact in facts],
        [rounded(fact.load_seconds) for fact in facts],
        [rounded(fact.evaluate_seconds) for fact in facts],
        [rounded(fact.save_seconds) for fact in facts],
        [fact.workers for fact in facts],
        [None if fact.alone_seconds is None else rounded(fact.alone_seconds) for fact in facts],
        [fact.source for fact in facts],
        [charge.trial for charge in charges],
        [account.plan.study_of(charge.trial) for charge in charges],
    ]
    values = _Sparse()
    for row, (node, fact) in enumerate(zip(nodes, facts, strict=True)):
        # A stage without steps may lie at the end of a schedule, past its last value.
        at = min(fact.start, fact.step - 1)
        values.put(row, {name: form.value(at) for name, form in zip(node.names, node.forms, strict=True)})
    return Table({**dict(zip(_STAGES, columns, strict=True)), **values.columns("hp_", len(facts))}, _STAGES)


def states(book: Book) -> Table:
    """Return a table with a row per state that was ever requested or reached, by node and step; for a study's book,
    only the states on its trials' paths.

    ================  ====================================================================================
    ``node``, ``step``  the state: the node's branch after this many steps
    ``key``           its permanent key, also of its checkpoint
    ``waiting``       number of trials waiting for its metrics
    ``kept_bytes``    bytes of its checkpoint; missing: there is none
    ``lost_reason``   why its checkpoint was last removed
    ``metrics_NAME``  the measured value; missing: it was not evaluated
    ================  ====================================================================================
    """
    account = book.account
    rows: list[tuple[Value, ...]] = []
    metrics = _Sparse()
    for node in account.plan.nodes:
        for step in sorted(node.states):
            if book.study is not None and step > book.reach.get(node.id, 0):
                continue
            state = node.states[step]
            lost = account.lost.get(StateRef(node.id, step))
            if state.metrics is not None:
                metrics.put(len(rows), state.metrics)
            rows.append(
                (
                    node.id,
                    step,
                    account.plan.key(node, step) if state.kept is None else state.kept.key,
                    len(account.plan.open_targets.waiting(state)),
                    None if state.kept is None else state.kept.bytes,
                    None if lost is None else lost.reason if not lost.message else f"{lost.reason}: {lost.message}",
                )
            )
    fixed = zip(*rows, strict=True) if rows else repeat((), len(_STATES))
    return Table({**dict(zip(_STATES, fixed, strict=True)), **metrics.columns("metrics_", len(rows))}, _STATES)


def workers(book: Book) -> Table:
    """Return a table with a row per chain and the time its worker spent on it, in the order in which the chains were
    started; for a study's book, only the chains that worked for it, with their work for it.

    ==================  ==================================================================================
    ``worker``          the worker's id
    ``chain``, ``driver``  the chain, and the driver that started it
    ``start``, ``end``  times; ``end`` is missing while it is running
    ``steps``           steps trained and reported
    ``wasted_seconds``, ``wasted_steps``  training discarded after its last boundary (charged: see above)
    ``outcome``         why it was discarded: stopped, failed, lost, died, ...; missing: nothing was discarded
    ==================  ==================================================================================
    """
    steps: dict[ChainId, int] = {}
    for charge in book.charges:
        fact = charge.fact
        steps[fact.chain] = steps.get(fact.chain, 0) + fact.step - fact.start
    wasted: dict[ChainId, tuple[float, int]] = {}
    for waste in book.wastes:
        seconds, count = wasted.get(waste.fact.chain, (0.0, 0))
        wasted[waste.fact.chain] = seconds + waste.seconds, count + waste.fact.steps
    rows: list[tuple[Value, ...]] = [
        (
            chain.worker,
            id,
            chain.driver,
            chain.began,
            chain.ended,
            steps.get(id, 0),
            *wasted.get(id, (0.0, 0)),
            chain.outcome,
        )
        for id, chain in book.account.chains.items()
        if book.study is None or id in steps or id in wasted
    ]
    fixed = zip(*rows, strict=True) if rows else repeat((), len(_WORKERS))
    return Table(dict(zip(_WORKERS, fixed, strict=True)), _WORKERS)


def events(facts: Sequence[Fact]) -> Table:
    """Return a table with a row per fact of the journal.

    ============  ========================================================================================
    ``position``  number of facts before it
    ``type``      as in :mod:`hpstage.plan.facts`
    ``at``        when it happened, if the fact records it
    ``text``      summary of its fields
    ============  ========================================================================================
    """
    columns: list[Sequence[Value]] = [
        range(len(facts)),
        [type(fact).__name__ for fact in facts],
        [getattr(fact, "at", None) for fact in facts],
        [_text(fact) for fact in facts],
    ]
    return Table(dict(zip(_EVENTS, columns, strict=True)), _EVENTS)


def tables_of(book: Book) -> dict[str, Table]:
    """Return all tables of a book by name, except that of events."""
    return {table.__name__: table(book) for table in (trials, stages, states, workers)}


def _text(fact: Fact) -> str:
    """Summarize the fields of a fact: long fields are only named, empty ones omitted."""
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


class _Sparse:
    """Columns without a value in some rows, in order of appearance."""

    def __init__(self) -> None:
        self._rows: dict[str, tuple[list[int], list[Value]]] = {}

    def put(self, row: int, values: Mapping[str, Value]) -> None:
        for name, value in values.items():
            at, found = self._rows.setdefault(name, ([], []))
            at.append(row)
            found.append(value)

    def columns(self, prefix: str, length: int) -> dict[str, Sequence[Value]]:
        """Return the columns with ``length`` rows; absent values are missing."""
        filled: dict[str, Sequence[Value]] = {}
        for name, (at, found) in self._rows.items():
            values = _uniform(found)
            if len(values) < length:
                whole: list[Value] = [None] * length
                for row, value in zip(at, values, strict=True):
                    whole[row] = value
                values = whole
            filled[f"{prefix}{name}"] = values
        return filled


def _uniform(values: list[Value]) -> list[Value]:
    """Convert values to a single type, so that every file format accepts the column: their JSON if types differ."""
    kinds: set[type] = {*map(type, values)} - {type(None)}
    # pandas has a type for integers of 64 bits and more, but not together with negative or missing values.
    wide = int in kinds and any(type(value) is int and value >= 2**63 for value in values)
    if not wide and (len(kinds) <= 1 or kinds == {int, float}):
        return values
    return [None if value is None else json.dumps(value) for value in values]


# Columns that every table has, even one without rows, with their types.
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
    "rejected": "string",
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
    "workers": "float64",
    "alone_seconds": "float64",
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
