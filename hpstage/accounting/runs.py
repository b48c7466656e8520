"""The trials of a plan as runs: how far each was trained, its best value, branches and bytes. Pure."""

from __future__ import annotations

from collections import Counter

import msgspec

from hpstage.plan.facts import TrialId
from hpstage.plan.nodes import PlannedTrial
from hpstage.plan.plan import SearchPlan
from hpstage.plan.winners import best_state


class RunRow(msgspec.Struct, frozen=True):
    """A trial. ``best``: value, step and name of its study's first metric, if it has any; ``at``: when it ended, or
    else was trained last, as far as is known; ``branches``: how many trials branch from it; ``bytes``: of the
    checkpoints on its path, what they have in common once; other trials may have some of them."""

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
                best=_best(plan, planned),
                at=used if ended is None else ended.at,  # what branches from it later uses its states, too
                branch_of=forks[id].donor if id in forks else None,
                branches=branches[id],
                bytes=sum(one.own for one in kept) + sum(parts.values()),
            )
        )
    return rows


def _best(plan: SearchPlan, planned: PlannedTrial) -> tuple[str, float, int] | None:
    record = plan.searches.get(plan.study_of(planned.id))
    found = None if record is None else best_state(planned, record.started)
    return None if record is None or found is None else (record.started.metric[0], *found)
