"""``hpstage status``: shows what the searches of a store have done and are doing; reads only the store."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from hpstage.accounting.account import Account, new_account
from hpstage.accounting.audits import audited
from hpstage.accounting.book import Book
from hpstage.accounting.failures import by_cause, failures_of, where
from hpstage.accounting.savings import skipped_work
from hpstage.accounting.studies import Best, StudyRow, study_rows
from hpstage.cli import options
from hpstage.cli.terminal import columns, echo
from hpstage.driver.driver_leases import DriverLeases
from hpstage.errors import HistoryChanged, StoreError, UsageError
from hpstage.errors.arguments import seconds
from hpstage.errors.text import aligned, allocated_time, clean, count_of, duration, rate, shortened, size, table
from hpstage.plan.facts import DriverId
from hpstage.plan.log import open_existing_plan
from hpstage.plan.messages import host_of
from hpstage.plan.plan import SearchPlan
from hpstage.report.names import worker_names, workers_in_order
from hpstage.store import Journal
from hpstage.store.opening import DEFAULT_ROOT, default_stores, last_written, open_journal

# Maximum number of lines in each of the tables of running chains, studies and drivers; --json has all.
_LINES = 40
_CAUSES = 5  # of failures that are shown
_SUMMARY = 200  # characters of an exception
_NAMED = 5  # studies of a store, in the list of stores
_CLEAR = "\x1b[H\x1b[2J"


class DriverStatus(msgspec.Struct, frozen=True):
    driver: DriverId
    host: str
    pid: int
    alive: bool
    joined: float


class ChainStatus(msgspec.Struct, frozen=True):
    """A running chain. Its last report was at ``step`` of ``node``, and it ends at step ``stop`` of node ``last``.
    ``name``: the worker's name for people, with host and number."""

    chain: str
    worker: str
    name: str
    driver: DriverId
    began: float
    node: int
    step: int
    last: int
    stop: int


class PlanStatus(msgspec.Struct, frozen=True):
    """Figures of the whole plan. Seconds are worker time. ``seconds_used`` is busy time and includes wasted steps;
    ``seconds_paid`` is allocated time and includes idle time. ``nodes`` counts nodes with a requested step, ``audits``
    finished audits; the seconds of audits are not in ``seconds_used``. ``frozen_...``: see
    :class:`~hpstage.plan.facts.FrozenWork`."""

    workload: str
    records: int
    trials: int
    nodes: int
    steps_asked: int
    steps_unique: int
    steps_trained: int
    steps_wasted: int
    stages_done: int
    merge_rate: float
    seconds_alone: float
    seconds_used: float
    seconds_paid: float
    seconds_saved: float
    failures: int
    differences: int
    checkpoints: int
    checkpoint_bytes: int
    audits: int = 0
    steps_audited: int = 0
    seconds_audited: float = 0.0
    audit_differences: int = 0
    frozen_batches: int = 0
    frozen_skipped: int = 0
    frozen_seconds: float = 0.0


class CauseStatus(msgspec.Struct, frozen=True):
    """All exceptions of one class from one line of the user's code. ``summary``: text of the first one."""

    summary: str
    where: str
    failures: int
    trials: int


class Status(msgspec.Struct, frozen=True):
    plan: PlanStatus
    causes: list[CauseStatus]
    studies: list[StudyRow]
    drivers: list[DriverStatus]
    chains: list[ChainStatus]


def status(
    store: options.ListedStore = None,
    watch: Annotated[bool, typer.Option("--watch", help="Refresh until Ctrl-C.")] = False,
    interval: Annotated[
        float | None, typer.Option(help="Seconds between two refreshes of --watch.", show_default="1")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one line of JSON; with --watch, a line at each change.")
    ] = False,
) -> None:
    """Show what the searches of a store have done and are doing.

    It needs only the store, from any host that reaches it, and does not change it; no search needs to be running.
    Without STORE, it lists the stores in the folder .hpstage, the default location of stores, the last written first.

    Examples:

    \b
    hpstage status
    hpstage status .hpstage/Digits-1f2e3d4c5b6a
    hpstage status "redis://head:6379?prefix=NAME" --watch
    hpstage status STORE --json | jq .plan.merge_rate
    """
    if interval is not None:
        seconds(above=0).of("--interval", interval)
        if not watch:
            raise UsageError(f"--interval {interval:g} is for --watch; give both or neither")
    if store is None:
        stores = default_stores()
        if watch or not stores:
            there = ", ".join(map(clean, stores)) or "no store"
            raise UsageError(f"STORE is missing; give one ({DEFAULT_ROOT} has {there})")
        echo(msgspec.json.encode([str(path) for path in stores]).decode() if as_json else _listed(stores))
        return
    with ExitStack() as closing:
        journal = open_journal(store, closing=closing, read_only=True)
        account = new_account(journal)
        shown = ""
        try:
            while True:
                try:
                    account.catch_up(journal)
                except HistoryChanged:  # the journal now holds another plan
                    account = new_account(journal)
                    account.catch_up(journal)
                found = status_of(account, journal)
                text = msgspec.json.encode(found).decode() if as_json else as_text(found, columns())
                if text != shown:
                    redraw = watch and not as_json and os.isatty(1)
                    echo(f"{_CLEAR if redraw else ''}{text}")
                shown = text
                if not watch:
                    return
                time.sleep(1.0 if interval is None else interval)
        except KeyboardInterrupt:
            if not watch:
                raise


def _listed(stores: Sequence[Path]) -> str:
    """Return a table of stores: studies, trials by state, steps trained, and the time since the last write."""
    rows = [("store", "studies", "trials", "steps trained", "written")]
    for store in stores:
        age = f"{duration(max(0.0, time.time() - last_written(store)))} ago"
        try:
            with ExitStack() as closing:
                plan = open_existing_plan(open_journal(store, closing=closing, read_only=True))
        except StoreError as error:
            rows.append((clean(store), shortened(str(error), _SUMMARY), "-", "-", age))
            continue
        studies = dict.fromkeys(map(plan.study_of, plan.trials))
        ends = Counter(plan.ended[id].state.lower() if id in plan.ended else "unfinished" for id in plan.trials)
        trials = ", ".join(f"{number:,} {state}" for state, number in sorted(ends.items()))
        more = f" and {len(studies) - _NAMED:,} more" if len(studies) > _NAMED else ""
        names = ", ".join(map(clean, islice(studies, _NAMED)))
        rows.append((clean(store), f"{names}{more}" or "-", trials or "-", f"{plan.totals.steps_trained:,}", age))
    return table(rows, left=3, width=columns())


def status_of(account: Account, journal: Journal) -> Status:
    """Return the present figures of an account, and which drivers are alive."""
    plan = account.plan
    leases = DriverLeases(journal, DriverId("looking on"))  # only to read the leases of others
    drivers = [
        DriverStatus(other.driver, other.host.partition("/")[0], other.pid, not leases.seems_gone(other), other.at)
        for other in plan.drivers.values()
    ]
    alive = {driver.driver for driver in drivers if driver.alive}
    book = Book(account)
    studies = study_rows(book, lambda study: _holder(journal, plan, study) in alive)
    chains = []
    names = worker_names(workers_in_order(account)) if plan.chains else {}
    for id, chain in plan.chains.items():
        # A driver that has its plan for itself never joins.
        if chain.driver in alive or chain.driver not in plan.drivers:
            first, last = chain.spans[0], chain.spans[-1]
            at = chain.reached
            node, step = (first.node, first.start) if at is None else (at.node.id, at.step)
            name, began = names[host_of(chain.worker)], account.chains[id].began
            if slot := chain.worker.partition("#")[2]:
                name += f", slot {slot}"
            chains.append(ChainStatus(id, chain.worker, name, chain.driver, began, node, step, last.node, last.stop))
    whole = account.whole()
    return Status(
        plan=PlanStatus(
            workload=plan.workload,
            records=plan.position,
            trials=len(plan.trials),
            nodes=account.requested_nodes(),
            steps_asked=whole.steps_asked,
            steps_unique=whole.steps_unique,
            steps_trained=whole.steps_trained,
            steps_wasted=whole.steps_wasted,
            stages_done=whole.stages_done,
            merge_rate=whole.merge_rate,
            seconds_alone=account.alone_seconds(),
            seconds_used=whole.worker_seconds,
            seconds_paid=account.presence.seconds(),
            seconds_saved=account.saved_seconds(),
            failures=len(account.failures()),
            differences=len(plan.differences),
            audits=len(account.audits.found),
            steps_audited=account.audits.steps,
            seconds_audited=account.audits.seconds,
            audit_differences=account.audits.differences,
            frozen_batches=whole.frozen_batches,
            frozen_skipped=whole.frozen_skipped,
            frozen_seconds=whole.frozen_seconds,
            checkpoints=len(plan.kept),
            checkpoint_bytes=plan.kept_bytes,
        ),
        causes=[
            CauseStatus(cause.failures[0].failure.summary, where(cause), len(cause.failures), len(cause.trials))
            for cause in by_cause(failures_of(book))
        ],
        studies=studies,
        drivers=drivers,
        chains=chains,
    )


def _holder(journal: Journal, plan: SearchPlan, study: str) -> str | None:
    record = plan.searches.get(study)
    held = None if record is None else journal.holder(f"study/{record.started.identity}")
    return None if held is None else held.owner


def as_text(found: Status, width: int | None = None) -> str:
    """Return the status as tables that fit a terminal of ``width`` columns."""
    parts = [
        aligned(_of_plan(found), width=width),
        _table(_STUDY, map(_study_cells, found.studies[-_LINES:]), found.studies, left=4, width=width),
        _table(_DRIVER, map(_driver_cells, found.drivers[-_LINES:]), found.drivers, left=4, width=width),
        _table(_CHAIN, map(_chain_cells, found.chains[-_LINES:]), found.chains, left=3, width=width),
    ]
    if not found.chains and any(study.state == "running" for study in found.studies):
        parts.append("no chain is running")
    return "\n\n".join(filter(None, parts))


def _of_plan(found: Status) -> list[tuple[str, str]]:
    plan = found.plan
    rows = [
        ("trials", f"{plan.trials:,} on {count_of(plan.nodes, 'node')}"),
        ("steps", f"{plan.steps_asked:,} requested, {plan.steps_unique:,} unique, {plan.steps_trained:,} trained"),
        ("stages", f"{plan.stages_done:,} done"),
        ("merge rate, all studies" if len(found.studies) > 1 else "merge rate", rate(plan.merge_rate)),
        ("busy worker time", duration(plan.seconds_used)),
        ("allocated worker time", allocated_time(plan.seconds_paid, plan.seconds_used)),
        ("saved", _saved(found)),
        ("checkpoints", f"{plan.checkpoints:,} ({size(plan.checkpoint_bytes)})"),
    ]
    if plan.trials == 1:  # nothing to share with
        rows = [row for row in rows if row[0] not in ("merge rate", "saved")]
    if plan.seconds_audited:
        share = plan.steps_audited / plan.steps_trained if plan.steps_trained else 0.0
        rows.insert(-1, ("audited", audited(share, plan.audit_differences, plan.seconds_audited)))
    if skipped := skipped_work(plan.frozen_batches, plan.frozen_skipped, plan.frozen_seconds):
        rows.insert(-1, ("frozen layers skipped", skipped))
    if plan.failures:
        rows += [("failed stages", f"{plan.failures:,}"), *(("", _caused(cause)) for cause in found.causes[:_CAUSES])]
        if len(found.causes) > _CAUSES:
            rows.append(("", f"... and {count_of(len(found.causes) - _CAUSES, 'more cause')}: see the report"))
    if plan.differences:
        rows.append(("not exact", f"{count_of(plan.differences, 'time')}: see the report"))
    return rows


def _table(
    titles: tuple[str, ...],
    cells: Iterable[tuple[str, ...]],
    rows: Sequence[object],
    *,
    left: int,
    width: int | None,
) -> str:
    """Return the table of the last rows, with the number of rows left out; empty if there are no rows."""
    more = [f"... and {len(rows) - _LINES:,} earlier (--json has all)"] if len(rows) > _LINES else []
    return "\n".join([table([titles, *cells], left=left, width=width), *more]) if rows else ""


_STUDY = "study", "state", "trials", "best", "steps requested", "merge rate", "busy", "saved"


def _study_cells(study: StudyRow) -> tuple[str, ...]:
    is_shown = study.state == "ended" or study.seconds_saved > 0  # negative until trials share stages
    return (
        clean(study.study),
        study.state,
        _trials(study),
        ", ".join(map(_best, study.best)) or "-",
        f"{study.steps_asked:,}",
        rate(study.merge_rate),
        duration(study.seconds_used),
        duration(study.seconds_saved) if is_shown else "-",
    )


_DRIVER = "driver", "host", "process", "state"


def _driver_cells(driver: DriverStatus) -> tuple[str, ...]:
    return clean(driver.driver), clean(driver.host), str(driver.pid), "alive" if driver.alive else "gone"


_CHAIN = "worker", "chain", "since", "node", "step", "to"


def _chain_cells(chain: ChainStatus) -> tuple[str, ...]:
    return (
        chain.name,
        clean(chain.chain),
        _clock(chain.began),
        f"{chain.node}",
        f"{chain.step:,}",
        f"{chain.stop:,}" + (f" of node {chain.last}" if chain.last != chain.node else ""),
    )


def _saved(found: Status) -> str:
    plan = found.plan
    if plan.seconds_saved <= 0 and all(study.state != "ended" for study in found.studies):
        return "nothing yet"
    if plan.seconds_saved < 0:
        return f"nothing: {duration(-plan.seconds_saved)} more"
    return f"{duration(plan.seconds_saved)} of {duration(plan.seconds_alone)}"


def _caused(cause: CauseStatus) -> str:
    return f"{cause.where} ({count_of(cause.trials, 'trial')}): {clean(shortened(cause.summary, _SUMMARY))}"


def _trials(study: StudyRow) -> str:
    counts = ", ".join(f"{number:,} {state.lower()}" for state, number in study.trials.items()) or "none"
    # An algorithm's forks are trials in addition to the n_trials that the search proposes.
    unknown = study.n_trials is None or sum(study.trials.values()) > study.n_trials
    return counts if unknown or study.state == "ended" else f"{counts} (of {study.n_trials:,})"


def _best(best: Best) -> str:
    end = f"{best.goal} " if best.goal in ("lowest", "highest") else ""
    return f"{end}{clean(best.metric)} {shortened(best.value)} (trial {clean(best.trial.rpartition('/')[2])})"


def _clock(at: float) -> str:
    return datetime.fromtimestamp(at).strftime("%Y-%m-%d %H:%M:%S")
