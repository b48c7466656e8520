"""The studies of a plan, and its trials, side by side: their progress, best values and cost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Literal

import msgspec

from hpstage.accounting.book import Book
from hpstage.plan.facts import TrialId, to_metric
from hpstage.plan.nodes import PlannedTrial
from hpstage.plan.plan import SearchPlan
from hpstage.plan.searches import SearchRecord
from hpstage.plan.winners import best_state, rank

_Goal = Literal["maximize", "minimize", "lowest", "highest"]


class Best(msgspec.Struct, frozen=True):
    """The best of the values reported to the study; one for each extreme if its search states no direction."""

    metric: str
    value: float | str
    trial: TrialId
    goal: _Goal


class StudyRow(msgspec.Struct, frozen=True):
    """A study of a plan.

    ``trials``: the number of trials by state: COMPLETE, PRUNED, FAIL and REJECTED (by the space, before any training).
    Unfinished trials are RUNNING, PAUSED or NOT BEGUN (:meth:`hpstage.accounting.account.Account.waits_for`) while the
    study is running, otherwise OPEN. ``n_trials``: the number of trials that the sampler proposes. ``state``:
    ``running`` if a driver holds the study, ``interrupted`` if none does although its search has not ended. Steps are
    those that the study's trials requested; seconds are as in :mod:`hpstage.accounting.tables`.
    """

    study: str
    state: Literal["running", "interrupted", "ended"]
    algorithm: str
    n_trials: int | None
    trials: dict[str, int]
    best: list[Best]
    steps_asked: int
    steps_unique: int
    merge_rate: float
    seconds_alone: float
    seconds_used: float
    seconds_paid: float
    seconds_saved: float


def study_rows(book: Book, is_held: Callable[[str], bool]) -> list[StudyRow]:
    """Return a row per study, in the order in which they were added to the plan.

    Args:
        is_held: whether a live driver works on the study of this name.
    """
    by_study: dict[str, list[TrialId]] = {study: [] for study in book.studies}
    for trial in book.trials:
        by_study[book.account.plan.study_of(trial)].append(trial)
    return [_study(book, study, trials, held=is_held(study)) for study, trials in by_study.items()]


def _study(book: Book, study: str, ids: list[TrialId], *, held: bool) -> StudyRow:
    account = book.account
    plan = account.plan
    record = plan.searches.get(study)
    tally = account.tallies[study]
    states: Counter[str] = Counter({end: count for end, count in tally.by_end.items() if end is not None and count})
    states.update(account.waits_for(id) if held else "OPEN" for id in ids if tally.ends.get(id) is None)
    sums = tally.sums
    over = record is None or record.ended
    return StudyRow(
        study=study,
        state="ended" if over else "running" if held else "interrupted",
        algorithm="" if record is None else record.started.algorithm,
        n_trials=None if record is None else record.started.n_trials,
        trials=dict(sorted(states.items())),
        best=[] if record is None else _best(book.feasible, record, ids),
        steps_asked=sums.steps_asked,
        steps_unique=sums.steps_unique,
        merge_rate=sums.merge_rate,
        seconds_alone=account.alone_seconds(study),
        seconds_used=sums.worker_seconds,
        seconds_paid=account.presence.seconds(study),
        seconds_saved=account.saved_seconds(study),
    )


def _best(feasible: Mapping[TrialId, tuple[float, ...]], record: SearchRecord, ids: list[TrialId]) -> list[Best]:
    """Return the best of the study's feasible trials, by each metric of its last search."""
    found: list[Best] = []
    directions = record.started.directions
    for i, metric in enumerate(record.started.metric):
        values = {id: feasible[id][i] for id in ids if i < len(feasible.get(id, ()))}
        if not values:
            continue
        goals: tuple[_Goal, ...] = ("lowest", "highest")
        if i < len(directions):
            goals = ("maximize",) if directions[i] == "maximize" else ("minimize",)
        for goal in goals:
            maximize = goal in ("maximize", "highest")
            id = min(values, key=lambda id: rank(values[id], id, maximize=maximize))
            found.append(Best(metric, to_metric(values[id]), id, goal))
    return found


class RunRow(msgspec.Struct, frozen=True):
    """A trial. ``best``: its study's first metric, the best value, and the step of that value, if it has any; ``at``:
    when it ended, or else was last trained, if known; ``branches``: how many trials branch from it; ``bytes``: size of
    the checkpoints on its path, some of which other trials may share. Parts in common count once."""

    trial: TrialId
    steps: int
    trained: int
    best: tuple[str, float, int] | None
    at: float | None
    branch_of: TrialId | None
    branches: int
    bytes: int


def run_rows(plan: SearchPlan) -> list[RunRow]:
    """Return a row per trial, in the order in which they were added."""
    forks = {id: proposed.fork for id, proposed in plan.searches.proposed.items() if proposed.fork is not None}
    branches = Counter(fork.donor for fork in forks.values())
    rows = []
    for id, planned in plan.trials.items():
        states = [state for state in planned.states() if state.step <= planned.requested]
        ended = plan.ended.get(id)
        used = max((state.used for state in states if state.used), default=None)
        kept = [state.kept for state in states if state.kept is not None]
        parts = {part.key: part.bytes for one in kept for part in one.parts}
        rows.append(
            RunRow(
                trial=id,
                steps=planned.steps,
                trained=max((state.step for state in states if state.is_known), default=0),
                best=_best_of_trial(plan, planned),
                at=used if ended is None else ended.at,  # trials that branch from it later use its states, too
                branch_of=forks[id].donor if id in forks else None,
                branches=branches[id],
                bytes=sum(one.own for one in kept) + sum(parts.values()),
            )
        )
    return rows


def _best_of_trial(plan: SearchPlan, planned: PlannedTrial) -> tuple[str, float, int] | None:
    record = plan.searches.get(plan.study_of(planned.id))
    found = None if record is None else best_state(planned, record.started)
    return None if record is None or found is None else (record.started.metric[0], *found)
