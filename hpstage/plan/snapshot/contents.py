"""All that a snapshot holds of a plan: columns of nodes, states and trials, and the rest. Pure.

These are the lines to edit when the fields of the plan's other classes change.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import islice

import msgspec

from hpstage.plan.facts import (
    ChainId,
    ChainLost,
    DriverId,
    DriverJoined,
    ForkVerified,
    NodeId,
    SearchStarted,
    Span,
    StageFailed,
    StateDiffers,
    StateRef,
    TrainingEnded,
    TrialEnded,
    TrialId,
    TrialProposed,
    UserFailure,
    WorkerId,
)
from hpstage.plan.nodes import State
from hpstage.plan.open_chain import OpenChain
from hpstage.plan.plan import SearchPlan
from hpstage.plan.regimes import Regime, Regimes
from hpstage.plan.searches import Searches, SearchRecord
from hpstage.plan.snapshot.columns import Rows, Texts, check_numbers, pick
from hpstage.plan.snapshot.nodes import (
    NodeColumns,
    StateColumns,
    columns_of_nodes,
    columns_of_states,
    fill_nodes,
    fill_states,
)
from hpstage.plan.snapshot.trials import TrialColumns, columns_of_trials, fill_trials, new_trials
from hpstage.plan.step_times import StepTimes
from hpstage.plan.totals import Totals
from hpstage.plan.winners import Costs, _OfStudy
from hpstage.schedule import Scalar

# Number of saved states, evenly distributed, whose keys are computed again as a check.
_KEYS = 100

_PROPOSED, _ENDED = Rows(TrialProposed), Rows(TrialEnded)


class ChainRow(msgspec.Struct, array_like=True):
    id: ChainId
    driver: DriverId
    worker: WorkerId
    spans: list[Span]
    since: float
    kept: int
    gang: tuple[WorkerId, ...]
    reached: StateRef | None


class SearchRow(msgspec.Struct, array_like=True):
    """``proposed``: numbers of proposals."""

    started: SearchStarted
    proposed: list[int]
    open: list[TrialId]
    paused: list[TrialId]
    unbegun: dict[NodeId, int]
    ended: bool


class WinnersRow(msgspec.Struct, array_like=True):
    search: SearchStarted
    leading: tuple[Costs, StateRef] | None
    completed: list[tuple[Costs, int, StateRef]]


class Contents(msgspec.Struct, array_like=True):
    """A plan. Trials, nodes and strings are named by numbers, in their order."""

    id: str
    place: str
    texts: list[str]
    trials: TrialColumns
    nodes: NodeColumns
    states: StateColumns
    totals: Totals
    proposals: msgspec.Raw
    proposed: list[int]
    searches: list[SearchRow]
    ended: msgspec.Raw
    winners: list[WinnersRow]
    open: list[tuple[DriverId, list[tuple[int, StateRef]]]]
    chains: list[ChainRow]
    drivers: list[DriverJoined]
    losses: list[list[ChainLost]]
    endings: list[TrainingEnded]
    failed: list[tuple[NodeId, int, UserFailure]]
    failures: list[StageFailed]
    differences: list[StateDiffers | ForkVerified]
    verified: list[Regime]
    step_times: tuple[tuple[int, float], ...] | None
    audited: list[StateRef] = []
    inputs: dict[str, str] = {}
    defaults: dict[str, Scalar] = {}
    lacking: dict[NodeId, tuple[str, ...]] = {}


def contents_of(plan: SearchPlan) -> Contents:
    texts = Texts()
    trials = {id: number for number, id in enumerate(plan.trials)}
    proposals = _all_proposals(plan.searches)
    rows = {id(fact): number for number, fact in enumerate(proposals)}
    return Contents(
        id=plan.id,
        place=plan.place,
        trials=columns_of_trials(plan, texts),
        nodes=columns_of_nodes(plan.nodes, trials),
        states=columns_of_states(plan, trials, texts),
        totals=plan.totals,
        proposals=_PROPOSED.split(proposals, texts),
        proposed=[rows[id(fact)] for fact in plan.searches.proposed.values()],
        searches=[
            SearchRow(
                *(record.started, [rows[id(fact)] for fact in record.proposed], [*record.open], [*record.paused]),
                *(record.unbegun, record.ended),
            )
            for record in plan.searches.values()
        ],
        ended=_ENDED.split([*plan.ended.values()], texts),
        winners=[
            WinnersRow(
                own.search,
                own.leading and (own.leading[0], own.leading[1].ref),
                [(costs, number, state.ref) for costs, number, state in own.completed],
            )
            for own in plan.winners._of.values()
        ],
        open=[
            (driver, [(trials[trial], state.ref) for (trial, _), state in open.items()])
            for driver, open in plan.open_targets.by_driver.items()
        ],
        chains=[
            ChainRow(
                *(one.id, one.driver, one.worker, one.spans, one.since, one.kept, one.gang),
                None if one.reached is None else one.reached.ref,
            )
            for one in plan.chains.values()
        ],
        drivers=[*plan.drivers.values()],
        losses=[*plan.losses.values()],
        endings=[*plan.endings.ended.values()],
        failed=[(node, *failed) for node, failed in plan.endings._failed.items()],
        failures=plan.failures,
        differences=plan.differences,
        verified=sorted(plan.verified),
        step_times=None if plan.step_times is None else plan.step_times.seconds,
        audited=sorted(plan.audited),
        inputs=plan.inputs,
        defaults=plan._tree.defaults,
        lacking=plan._tree.lacking,
        texts=texts.table(),
    )


def _all_proposals(searches: Searches) -> list[TrialProposed]:
    """Return the proposals of the latest searches, and the latest of each trial, each of them once."""
    found = {id(fact): fact for record in searches.values() for fact in record.proposed}
    return [*(found | {id(fact): fact for fact in searches.proposed.values()}).values()]


def fill(plan: SearchPlan, contents: Contents) -> None:
    """Fill an empty plan.

    Raises:
        ValueError, LookupError: the contents contradict each other.
    """
    ids, texts = contents.trials.ids, [*contents.texts, None]
    trials = new_trials(contents.trials, contents.texts)
    plan._tree.defaults, plan._tree.lacking = contents.defaults, contents.lacking
    fill_nodes(plan, contents.nodes, trials)
    fill_states(plan, contents.states, ids, texts)
    fill_trials(plan, contents.trials, trials)
    plan.id, plan.place, plan.totals = contents.id, contents.place, contents.totals
    _fill_searches(plan.searches, contents, texts)
    plan.ended = {fact.trial: fact for fact in _ENDED.join(contents.ended, texts)}

    def state(ref: StateRef) -> State:
        if ref.node < 0:
            raise IndexError(f"there is no node {ref.node}")
        return plan.nodes[ref.node].states[ref.step]

    for won in contents.winners:
        plan.winners._of[won.search.study] = _OfStudy(
            won.search,
            won.leading and (won.leading[0], state(won.leading[1])),
            [(costs, number, state(ref)) for costs, number, ref in won.completed],
        )
    for driver, targets in contents.open:
        waited = [(pick(ids, [number])[0], state(ref)) for number, ref in targets]
        plan.open_targets.by_driver[driver] = {(trial, found.step): found for trial, found in waited}
    for row in contents.chains:
        check_numbers([span.node for span in row.spans], len(plan.nodes))
        reached = None if row.reached is None else state(row.reached)
        plan.chains[row.id] = OpenChain(
            row.id, row.driver, row.worker, row.spans, row.since, row.kept, row.gang, reached
        )
    plan.drivers = {fact.driver: fact for fact in contents.drivers}
    plan.losses = {StateRef(lost[0].node, lost[0].step): lost for lost in contents.losses}
    plan.endings.ended = {fact.node: fact for fact in contents.endings}
    plan.endings._failed = {node: (step, failure) for node, step, failure in contents.failed}
    plan.failures, plan.differences, plan.verified = contents.failures, contents.differences, Regimes(contents.verified)
    plan.inputs = contents.inputs
    plan.step_times = None if contents.step_times is None else StepTimes(contents.step_times)
    check_numbers([ref.node for ref in contents.audited], len(plan.nodes))
    plan.audited = {*contents.audited}
    _check(plan)


def _check(plan: SearchPlan) -> None:
    """Raise ValueError if sums, or the keys of some saved states, do not match their parts."""
    if plan.totals.steps_trained != sum([node.trained for node in plan.nodes]):
        raise ValueError("the nodes' steps do not add up")
    for key, state in islice(plan.kept.items(), 0, None, 1 + len(plan.kept) // _KEYS):
        if plan.key(state.node, state.step) != key:
            raise ValueError(f"step {state.step} of node {state.node.id} is not the state {key}")


def _fill_searches(searches: Searches, contents: Contents, texts: Sequence[str | None]) -> None:
    proposals = _PROPOSED.join(contents.proposals, texts)
    for row in contents.searches:
        searches._latest[row.started.study] = SearchRecord(
            *(row.started, pick(proposals, row.proposed), dict.fromkeys(row.open), dict.fromkeys(row.paused)),
            *(Counter(row.unbegun), row.ended),
        )
    latest = pick(proposals, contents.proposed)
    searches.proposed = {fact.trial: fact for fact in latest if fact.trial is not None}
