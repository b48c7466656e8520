"""The search plan: the persistent tree of nodes, folded from the journal. Pure.

Each trial is a path through the tree. Trials that see equal values from step 0 on share their path; where values
diverge, a node begins. The tree is a compressed trie over the values at each step: a node holds one *form* per
hyperparameter and is never split; children attach to it at any step. The children at one step of a node are
distinguished by their values at that step, so that finding a path costs a look-up per segment and not per step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

from hpstage.errors import InternalError
from hpstage.plan.endings import Endings
from hpstage.plan.facts import (
    Audited,
    ChainClosed,
    ChainId,
    ChainLost,
    ChainProlonged,
    ChainStarted,
    DriverId,
    DriverJoined,
    DriverLeft,
    Fact,
    ForkVerified,
    InputsRead,
    Kept,
    Part,
    PlanCreated,
    SearchEnded,
    SearchStarted,
    StageFailed,
    StateDiffers,
    StateKey,
    StateLost,
    StateReached,
    StateRef,
    StepsTimed,
    TargetAsked,
    TrainingEnded,
    TrialAdded,
    TrialEnded,
    TrialId,
    TrialProposed,
    UserFailure,
    WorkersChanged,
    to_numbers,
)
from hpstage.plan.node_tree import NodeTree
from hpstage.plan.nodes import Node, PlannedTrial, State, branches_beyond
from hpstage.plan.open_chain import OpenChain
from hpstage.plan.open_targets import OpenTargets
from hpstage.plan.regimes import Regimes
from hpstage.plan.searches import Searches
from hpstage.plan.step_times import StepTimes
from hpstage.plan.totals import Totals
from hpstage.plan.winners import Winners
from hpstage.schedule import Scalar
from hpstage.store.cursor import Cursor

AMBIGUOUS = "?"
"""The digest of an input that two workers have read with different contents."""


class SearchPlan:
    """The fold of a journal.

    ``sharing=False`` keeps every trial on a separate branch, as a search without a stage tree would train it.
    """

    def __init__(self, workload: StateKey, *, sharing: bool = True) -> None:
        self.workload = workload
        self.sharing = sharing
        self.id: str = workload
        """Unique even among plans of the same workload: a study may be searched on several."""
        self.cursor = Cursor()  # after the last record folded
        self.restored = 0  # how many of these records were restored from a snapshot instead of folded here
        self._tree = NodeTree(workload, sharing=sharing)
        self.nodes = self._tree.nodes
        self.trials: dict[TrialId, PlannedTrial] = {}
        self.totals = Totals()
        self.winners = Winners()
        self.failures: list[StageFailed] = []
        self.endings = Endings()
        self.open_targets = OpenTargets()
        self._targets: dict[tuple[int, ...], tuple[int, ...]] = {}  # one tuple for all trials with equal targets
        self.kept: dict[StateKey, State] = {}
        self.kept_bytes = 0  # counts each part once
        self.parts: dict[StateKey, tuple[Part, int]] = {}  # each with the number of states that have it
        self.differences: list[StateDiffers | ForkVerified] = []  # evidence that training is not exact
        self.inputs: dict[str, str] = {}  # read by training and not part of the key: digests by name
        self.verified = Regimes()  # regimes under which a fork was verified
        self.audited: set[StateRef] = set()  # states that audits have found equal
        self.ended: dict[TrialId, TrialEnded] = {}
        self.drivers: dict[DriverId, DriverJoined] = {}  # drivers that have not left
        self.place = ""  # checkpoint location of the driver that joined last
        self.chains: dict[ChainId, OpenChain] = {}
        self.losses: dict[StateRef, list[ChainLost]] = {}  # consecutive worker deaths on the path from a state
        self.milestones = self._tree.milestones
        self.branch_points = self._tree.branch_points
        self.searches = Searches()
        self.step_times: StepTimes | None = None  # of several chains side by side, if a worker trains several

    @property
    def position(self) -> int:
        """Number of the journal's records that are folded."""
        return self.cursor.position

    # --- folding ------------------------------------------------------------------------------------------

    def apply(self, fact: Fact) -> None:
        """Fold a fact that passed :func:`hpstage.plan.checks.check`."""
        _HANDLERS[fact.__class__](self, fact)

    def _create(self, fact: PlanCreated) -> None:
        self.id = fact.id or fact.workload

    def _lose(self, fact: StateLost) -> None:
        # Two drivers may both report the same checkpoint as gone.
        self._keep(self.nodes[fact.node].states[fact.step], None)

    def _fail(self, fact: StageFailed) -> None:
        self.failures.append(fact)
        self.losses.pop(StateRef(fact.node, fact.step), None)
        for state in self.beyond(fact):
            self.open_targets.drop(state)
        if not fact.evaluating:
            self.endings.fail(fact)

    def _end(self, fact: TrainingEnded) -> None:
        """Withdraw the trials' targets beyond the end of training, as would happen without sharing."""
        self.endings.end(fact, self.nodes[fact.node].state(fact.last))
        ended: dict[TrialId, None] = {}
        for state in self.beyond(fact):
            ended |= dict.fromkeys(state.unanswered or ())
            self.open_targets.drop(state)
            state.unanswered = None
        for trial in ended:
            planned = self.trials[trial]
            planned.requested = fact.last
            planned.targets = tuple([step for step in planned.targets if step <= fact.last])
            if fact.outcome == "complete" and fact.last not in planned.targets:
                planned.targets += (fact.last,)
                self._answer(planned, fact.last)

    def _waste(self, fact: ChainLost) -> None:
        self.totals.waste(fact)
        if fact.blames:
            self.losses.setdefault(StateRef(fact.node, fact.step), []).append(fact)

    def _start(self, fact: ChainStarted) -> None:
        chain = OpenChain.begun(fact)
        root = self.nodes[fact.spans[0].node]
        if root.parent is None:
            self.searches.train(root)
        source = self.source_of(chain)
        if source is not None and source.used < fact.at:
            source.used = fact.at
        self.chains[fact.chain] = chain

    def _prolong(self, fact: ChainProlonged) -> None:
        if fact.chain in self.chains:
            self.chains[fact.chain].prolong(fact.spans)

    def _close(self, fact: ChainClosed) -> None:
        self.chains.pop(fact.chain, None)

    def _join(self, fact: DriverJoined) -> None:
        self.drivers[fact.driver] = fact
        self.place = fact.checkpoints or self.place

    def _leave(self, fact: DriverLeft) -> None:
        self.drivers.pop(fact.driver, None)
        self.forget(fact.driver)
        if not self.drivers:
            self.endings.forget_failures()

    def _begin(self, fact: SearchStarted) -> None:
        self._tree.default(fact.defaults)
        self.winners.begin(fact)
        self.searches.begin(fact)

    def _time(self, fact: StepsTimed) -> None:
        found = StepTimes(fact.seconds)
        self.step_times = found if self.step_times is None else self.step_times.extended(found)

    def _propose(self, fact: TrialProposed) -> None:
        planned = None if fact.trial is None else self.trials.get(fact.trial)
        self.searches.propose(fact, None if planned is None else planned.root)

    def _finish(self, fact: TrialEnded) -> None:
        planned = self.trials.get(fact.trial)
        self.searches.finish(fact, None if planned is None else planned.root)
        self.ended[fact.trial] = fact
        if planned is not None:
            self.winners.end(fact, self.result_of(planned))

    def _reached(self, fact: StateReached) -> None:
        node = self.nodes[fact.node]
        state = node.ensure_state(fact.step)
        if self.losses:
            self.losses.pop(StateRef(node.id, fact.start), None)
        if not node.trained and node.parent is None and fact.step > fact.start:
            self.searches.train(node)
        node.trained += fact.step - fact.start
        node.seconds += fact.own_seconds
        self.totals.reach(fact)
        if fact.metrics is not None:
            numbers = to_numbers(fact.metrics)
            state.metrics = numbers if state.metrics is None else state.metrics | numbers
            self.open_targets.drop(state)
            for trial in state.unanswered or ():
                self._answer(self.trials[trial], fact.step)
            state.unanswered = None
        state.reach(fact)
        if fact.kept is not None:
            self._keep(state, fact.kept)
        chain = self.chains.get(fact.chain)
        if chain is not None:
            chain.advance(state, fact)

    def _verify(self, fact: ForkVerified) -> None:
        if fact.difference is None:
            self.verified.add(self.nodes[fact.node].regime)
        else:
            self.differences.append(fact)

    def _audit(self, fact: Audited) -> None:
        if fact.outcome == "equal":
            self.audited.add(StateRef(fact.node, fact.step))

    def _read(self, fact: InputsRead) -> None:
        for name, digest in fact.inputs.items():
            if self.inputs.setdefault(name, digest) != digest:
                self.inputs[name] = AMBIGUOUS

    def _keep(self, state: State, kept: Kept | None) -> None:
        if state.kept is not None:
            self.kept_bytes -= state.kept.own
            del self.kept[state.kept.key]
            self.count_parts(state.kept, -1)
        if kept is not None:
            self.kept_bytes += kept.own
            self.kept[kept.key] = state
            self.count_parts(kept, 1)
        state.kept = kept

    def count_parts(self, kept: Kept, change: Literal[-1, 1]) -> None:
        """Count the parts of a state that was saved (1) or whose checkpoint is gone (-1)."""
        for named in kept.parts:
            part, count = self.parts.get(named.key, (named, 0))
            if count + change:
                self.parts[part.key] = part, count + change
            else:
                del self.parts[part.key]
            if not count or not count + change:
                self.kept_bytes += change * part.bytes

    def _add(self, fact: TrialAdded) -> None:
        known = self.trials.get(fact.trial)
        if known is None:
            known = PlannedTrial(fact.trial, fact.steps)
            known.last = self._tree.walk(known, fact.schedules, fact.steps)
            self.trials[fact.trial] = known
        elif known.steps < fact.steps or not known.has(self._tree.filled(fact.schedules), fact.steps):
            # Added again with more or other steps. The steps already requested are unchanged.
            known.last, known.steps = self._tree.walk(known, fact.schedules, fact.steps), fact.steps
        if fact.keep_at or known.keep_at:
            known.keep(fact.keep_at)
        if fact.plateaus or known.plateaus:
            known.plateaus = fact.plateaus

    def forget(self, driver: DriverId) -> None:
        """Drop the chains and targets of a driver that is gone."""
        self.chains = {id: chain for id, chain in self.chains.items() if chain.driver != driver}
        self.open_targets.forget(driver)

    def open_trials(self) -> Iterator[PlannedTrial]:
        """Yield the trials that an algorithm may train further."""
        for trial in self.searches.open:
            if trial in self.trials:
                yield self.trials[trial]

    def source_of(self, chain: OpenChain) -> State | None:
        """Return the state that a chain starts from, or ``None`` for the start of training."""
        first = chain.spans[0]
        node = self.nodes[first.node]
        if first.start > node.start:
            return node.state(first.start)
        return None if node.parent is None else node.parent.state(first.start)

    def will_keep(self, ref: StateRef) -> bool:
        """Whether a running chain will pass this state, and so may keep it (again)."""
        return any(chain.will_pass(ref) for chain in self.chains.values())

    def beyond(self, fact: StageFailed | TrainingEnded) -> Iterator[State]:
        """Yield the states that a failure or an end of training puts out of reach; for a failed evaluation, only the
        evaluated state."""
        node = self.nodes[fact.node]
        if isinstance(fact, StageFailed) and fact.evaluating:
            state = node.state(fact.step)
            if state is not None:
                yield state
            return
        last = fact.last if isinstance(fact, TrainingEnded) else fact.step
        for branch, passed in branches_beyond(node, fact.step, last):
            states = branch.states
            yield from (states[at] for at in sorted(states) if at > passed)

    def failure_on(self, trial: TrialId, step: int) -> UserFailure | None:
        """Return the failure that currently prevents training ``trial`` to ``step``, if any."""
        return self.endings.failure(self.trials[trial], step)

    def ending_on(self, trial: TrialId, step: int) -> TrainingEnded | None:
        """Return the fact that ended the training of ``trial`` before ``step``, if there is one."""
        return self.endings.ending(self.trials[trial], step)

    # --- targets ------------------------------------------------------------------------------------------

    def target(self, trial: TrialId, step: int) -> State:
        """Return the state of ``trial`` trained to ``step``, creating it if needed. O(segments)."""
        return self._planned(trial, step).node_at(step).ensure_state(step)

    def _planned(self, trial: TrialId, step: int) -> PlannedTrial:
        planned = self.trials.get(trial)
        if planned is None:
            raise InternalError(f"trial {trial} was requested but never added")
        if not 1 <= step <= planned.steps:
            raise InternalError(f"step {step} was requested of trial {trial}, which ends at {planned.steps}")
        return planned

    def known(self, trial: TrialId, step: int) -> State | None:
        """Return the state of ``trial`` trained to ``step``, if the plan has it."""
        return self._planned(trial, step).node_at(step).state(step)

    def _ask(self, fact: TargetAsked) -> None:
        """Account for a target. The first trial to request a step of a node is charged for it. O(segments)."""
        planned = self._planned(fact.trial, fact.step)
        ending = self.endings.ending(planned, fact.step)
        step = fact.step if ending is None else ending.last
        if step > planned.requested:
            planned.requested = step
            self.searches.ask(self._study_of(planned), planned.id)
        if ending is not None and ending.outcome == "pruned":
            return  # a pruned trial has no value there
        state = planned.node_at(step).ensure_state(step)
        known = step in planned.targets  # a resumed call requests it again
        if not known:
            planned.targets = self._steps_of(planned.targets, step)
        if state.metrics is not None:
            if not known:
                self._answer(planned, step)
            return
        if not known:
            if state.unanswered is None:
                state.unanswered = [planned.id]
            else:
                state.unanswered.append(planned.id)
        if self.endings.failure(planned, step) is None:
            self.open_targets.add(planned.id, state, fact.driver)

    def _steps_of(self, before: tuple[int, ...], step: int) -> tuple[int, ...]:
        """Return the steps with a further one added, as the same tuple for all trials with equal steps."""
        steps = (*before, step) if not before or before[-1] < step else tuple(sorted((*before, step)))
        return self._targets.setdefault(steps, steps)

    def _answer(self, planned: PlannedTrial, step: int) -> None:
        self.winners.answer(planned.study, planned.node_at(step).ensure_state(step))
        planned.answered = max(planned.answered, step)
        if planned.answered >= planned.requested:
            self.searches.answer(planned.study, planned.id)

    # --- reading ------------------------------------------------------------------------------------------

    @property
    def defaults(self) -> Mapping[str, Scalar]:
        """Values of hyperparameters for trials without them."""
        return self._tree.defaults

    def study_of(self, trial: TrialId) -> str:
        """Return the trial's study; in a plan driven without a study, the prefix of the trial's id."""
        proposed = self.searches.proposed.get(trial)
        return proposed.study if proposed is not None else trial.rpartition("/")[0]

    def _study_of(self, trial: PlannedTrial) -> str:
        """Return the trial's study. A trial is proposed before any of its steps is requested."""
        if not trial.study:
            trial.study = self.study_of(trial.id)
        return trial.study

    def result_of(self, trial: PlannedTrial) -> State | None:
        """Return the state of the trial's last result, if it has any."""
        return trial.node_at(trial.answered).state(trial.answered) if trial.answered else None

    def is_trained(self, trial: PlannedTrial) -> bool:
        """Return whether the trial has a result at its last step, or where the user's code has ended training."""
        return trial.answered >= trial.requested and (
            trial.requested >= trial.steps or self.endings.ending(trial, trial.steps) is not None
        )

    def step_seconds(self, node: Node) -> float:
        """Return a node's seconds per step: measured, or its nearest measured ancestor's, or else the average."""
        measured = node.step_seconds()
        return self.totals.average_step_seconds if measured is None else measured

    def key(self, node: Node, step: int) -> StateKey:
        """Return the key of a state. O(1) for constant forms, otherwise amortised O(steps) per node."""
        return node.history_before(step).key(step)


# Dispatched by type, since a match statement over all types would take as long as the handlers.
_HANDLERS: dict[type, Callable[[SearchPlan, Any], None]] = {
    PlanCreated: SearchPlan._create,
    TrialAdded: SearchPlan._add,
    TargetAsked: SearchPlan._ask,
    StateReached: SearchPlan._reached,
    StateLost: SearchPlan._lose,
    StateDiffers: lambda plan, fact: plan.differences.append(fact),
    ForkVerified: SearchPlan._verify,
    Audited: SearchPlan._audit,
    InputsRead: SearchPlan._read,
    StageFailed: SearchPlan._fail,
    TrainingEnded: SearchPlan._end,
    ChainLost: SearchPlan._waste,
    ChainStarted: SearchPlan._start,
    ChainProlonged: SearchPlan._prolong,
    ChainClosed: SearchPlan._close,
    DriverJoined: SearchPlan._join,
    DriverLeft: SearchPlan._leave,
    WorkersChanged: lambda plan, fact: None,  # no decision depends on allocated workers
    SearchStarted: SearchPlan._begin,
    TrialProposed: SearchPlan._propose,
    TrialEnded: SearchPlan._finish,
    SearchEnded: lambda plan, fact: plan.searches.end(fact),
    StepsTimed: SearchPlan._time,
}
