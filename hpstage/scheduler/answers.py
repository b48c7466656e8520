"""Answers: which requested targets are now reached, or can never be. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hpstage.plan.facts import DriverId, StageFailed, TargetAsked, TrainingEnded, TrialId, UserFailure
from hpstage.plan.nodes import State
from hpstage.plan.plan import SearchPlan
from hpstage.scheduler.stage_tree import StageTree


@dataclass(frozen=True, slots=True)
class Answer:
    """The outcome of a target: its metrics, or the failure that prevents reaching it.

    ``ending``: set if training ended before the target. The metrics are then those of the last state, ``None`` if it
    was pruned.
    """

    trial: TrialId
    step: int
    metrics: dict[str, float] | None
    failure: UserFailure | None = None
    ending: TrainingEnded | None = None


@dataclass(eq=False, repr=False)
class Answers:
    """Folds the facts that request, reach and end targets, and returns the answers that ``driver`` waits for."""

    plan: SearchPlan
    tree: StageTree
    driver: DriverId

    def known(self, trial: TrialId, step: int) -> Answer | None:
        """Return the answer to a target, if already known."""
        ending = self.plan.ending_on(trial, step)
        if ending is not None:
            return self._ended(trial, step, ending)
        state = self.plan.known(trial, step)
        if state is not None and state.metrics is not None:
            return Answer(trial, step, state.metrics)
        failure = self.plan.failure_on(trial, step)
        return None if failure is None else Answer(trial, step, None, failure)

    def request(self, fact: TargetAsked) -> list[Answer]:
        """Fold a request for a target."""
        self.plan.apply(fact)
        if fact in self.plan.open_targets:
            self.tree.want(self.plan.trials[fact.trial].node_at(fact.step), fact.step)
            return []
        known = self.known(fact.trial, fact.step) if fact.driver == self.driver else None
        return [] if known is None else [known]

    def reach(
        self,
        state: State,
        waiting: Mapping[TrialId, DriverId],
        metrics: dict[str, float] | None,
        failure: UserFailure | None,
    ) -> list[Answer]:
        """Return the answers for this driver's trials among those that waited for the state."""
        self.tree.unwant(state.node, state.step)
        mine = (trial for trial, driver in waiting.items() if driver == self.driver)
        return [Answer(trial, state.step, metrics, failure) for trial in mine]

    def _waiting_beyond(self, fact: StageFailed | TrainingEnded) -> list[tuple[State, dict[TrialId, DriverId]]]:
        """Return the states that are now out of reach and that trials wait for, each with these trials."""
        beyond = ((state, self.plan.open_targets.waiting(state)) for state in self.plan.beyond(fact))
        return [(state, waiting) for state, waiting in beyond if waiting]

    def fail(self, fact: StageFailed) -> list[Answer]:
        """Fold a failure of the user's code. If it was in training, every state beyond is out of reach."""
        out_of_reach = self._waiting_beyond(fact)
        self.plan.apply(fact)
        return [answer for state, waiting in out_of_reach for answer in self.reach(state, waiting, None, fact.failure)]

    def end(self, fact: TrainingEnded) -> list[Answer]:
        """Fold an end of training: every state beyond is out of reach."""
        out_of_reach = self._waiting_beyond(fact)
        self.plan.apply(fact)
        answers: list[Answer] = []
        for state, waiting in out_of_reach:
            self.tree.unwant(state.node, state.step)
            answers += [self._ended(id, state.step, fact) for id, driver in waiting.items() if driver == self.driver]
        return answers

    def _ended(self, trial: TrialId, step: int, ending: TrainingEnded) -> Answer:
        complete = ending.outcome == "complete"
        state = self.plan.known(trial, ending.last) if complete else None
        return Answer(trial, step, None if state is None else state.metrics, ending=ending)
