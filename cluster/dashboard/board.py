"""What the page shows, folded from the records that drivers send. Pure, but for the time at which it was last heard of
a plan."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from hpstage.cluster.dashboard.follower import NO_MORE
from hpstage.cluster.dashboard.study import StudyView
from hpstage.errors import HpstageError
from hpstage.events import (
    ChainId,
    ChainLost,
    ChainStarted,
    DriverId,
    Fact,
    NodeId,
    PlanCreated,
    SearchEnded,
    SearchStarted,
    StageFailed,
    StateKey,
    StateReached,
    TargetAsked,
    TrialEnded,
    TrialId,
    TrialProposed,
)
from hpstage.plan import OpenChain, SearchPlan

logger = logging.getLogger("hpstage")

_MOST_PLANS = 16
"""Plans held at most, those of searches under way not counted."""
_QUIET = 60.0
"""Seconds without a word after which nobody follows a plan any more."""

_decode = msgspec.json.Decoder(Fact).decode


class PlanView:
    """A plan, and who trained what in it."""

    def __init__(self) -> None:
        self.position = 0  # the record that comes next
        self.heard = 0.0
        self.problem = ""
        self.plan = SearchPlan(StateKey(""))  # until the first record says whose
        self.studies: dict[str, StudyView] = {}
        self.since: dict[ChainId, float] = {}  # when it was last heard of an open chain
        self.trained: dict[NodeId, list[tuple[int, str]]] = {}  # up to which step, and for which study
        self.failed: dict[NodeId, int] = {}  # the step at which training raises
        self._study_of: dict[TrialId, StudyView] = {}
        self._driven: dict[DriverId, str] = {}

    def fold(self, records: Sequence[bytes]) -> None:
        for record in records:
            self._apply(_decode(record))
            self.position += 1

    def front(self, node: NodeId) -> int:
        """The step up to which a node is trained; training covers a node from its start on, without gaps."""
        pieces = self.trained.get(node)
        return pieces[-1][0] if pieces else self.plan.nodes[node].start

    def study_of(self, chain: OpenChain) -> str:
        return self._driven.get(chain.driver, "")

    def is_driven(self, study: str) -> bool:
        """Is a driver at work on it?"""
        return any(self._driven.get(driver) == study for driver in self.plan.drivers)

    def _apply(self, fact: Fact) -> None:
        plan = self.plan
        match fact:
            case PlanCreated():
                self.plan = SearchPlan(fact.workload, sharing=fact.described.get("sharing") != "off")
                self.plan.apply(fact)
            case TargetAsked():
                self._asked(fact)
            case StateReached():
                self._reached(fact)
            case ChainLost():
                chain = next((chain for chain in plan.chains.values() if chain.worker == fact.worker), None)
                plan.apply(fact)
                study = None if chain is None else self.studies.get(self.study_of(chain))
                if study is not None:
                    study.spend(fact.seconds, fact.at)
            case StageFailed():
                plan.apply(fact)
                if not fact.evaluating:
                    self.failed[fact.node] = min(fact.step, self.failed.get(fact.node, fact.step))
            case _:
                plan.apply(fact)
                self._note(fact)

    def _note(self, fact: Fact) -> None:
        match fact:
            case ChainStarted():
                self.since[fact.chain] = fact.at
            case SearchStarted():
                self.studies.setdefault(fact.study, StudyView(fact)).restart(fact)
            case TrialProposed(trial=trial) if trial is not None:
                self._study_of[trial] = study = self.studies[fact.study]
                study.trials[trial] = None
            case TrialEnded():
                self.studies[fact.study].trials[fact.trial] = fact.state
            case SearchEnded():
                self.studies[fact.study].ended = True
        if len(self.since) > 2 * len(self.plan.chains) + 8:
            self.since = {chain: at for chain, at in self.since.items() if chain in self.plan.chains}

    def _asked(self, fact: TargetAsked) -> None:
        study = self._study_of.get(fact.trial)
        planned = self.plan.trials.get(fact.trial)
        new = planned is not None and fact.step not in planned.targets
        asked = 0 if planned is None else planned.asked
        self.plan.apply(fact)
        if study is None or planned is None:
            return  # a plan that was driven without a study
        self._driven[fact.driver] = study.name
        if new:
            study.ask(planned, asked, fact.step)
        state = self.plan.target(fact.trial, fact.step)
        if state.metrics is not None:
            study.tell(self.plan, planned, fact.step, state.metrics)

    def _reached(self, fact: StateReached) -> None:
        plan = self.plan
        chain = None if fact.chain is None else plan.chains.get(fact.chain)
        node = plan.nodes[fact.node] if 0 <= fact.node < len(plan.nodes) else None
        state = None if node is None else node.states.get(fact.step)
        waiting = [] if state is None or fact.metrics is None else list(state.waiting)
        plan.apply(fact)
        owner = "" if chain is None else self.study_of(chain)
        if fact.chain in self.since:
            self.since[fact.chain] = fact.at
        if fact.step > self.front(fact.node):
            pieces = self.trained.setdefault(fact.node, [])
            if pieces and pieces[-1][1] == owner:
                pieces.pop()
            pieces.append((fact.step, owner))
        study = self.studies.get(owner)
        if study is not None:
            spent = fact.train_seconds + fact.load_seconds + fact.evaluate_seconds + fact.save_seconds
            study.spend(spent, fact.at, steps=fact.step - fact.start)
        metrics = plan.nodes[fact.node].states[fact.step].metrics
        for trial in waiting:
            told = self._study_of.get(trial)
            if told is not None and metrics is not None:
                told.tell(plan, plan.trials[trial], fact.step, metrics, fact.at)


@dataclass(frozen=True, slots=True)
class Shown:
    """A study of a plan. ``key`` tells it from studies of its name in other plans."""

    key: str
    view: PlanView
    study: StudyView


class Board:
    """All plans that drivers have told of, since the scheduler began."""

    def __init__(self) -> None:
        self.plans: dict[str, PlanView] = {}  # those that were heard of last come last

    def offer(self, plan: str, first: int, records: list[bytes]) -> int:
        """Take in what is new of these records, the first of which stands at ``first``; returns which one comes next.

        Of a plan that cannot be shown it returns ``NO_MORE``.
        """
        view = self.plans.setdefault(plan, PlanView())
        view.heard = time.monotonic()
        if not view.problem and first <= view.position:
            try:
                view.fold(records[view.position - first :])
            except (HpstageError, msgspec.MsgspecError) as error:
                logger.warning("hpstage's page cannot show a plan, record %d of it: %s", view.position, error)
                view.problem = f"record {view.position} cannot be read: {error}"
        if view.position or view.problem:
            self.plans[plan] = self.plans.pop(plan)
        self._forget(view.heard)
        return NO_MORE if view.problem else view.position

    def studies(self) -> list[Shown]:
        """Those of all plans, the latest first."""
        found = [
            Shown(f"{plan} {name}", view, study)
            for plan, view in self.plans.items()
            for name, study in view.studies.items()
        ]
        return sorted(found, key=lambda shown: shown.study.started.at, reverse=True)

    def find(self, key: str | None) -> Shown | None:
        """The study of this key; the latest if there is none."""
        studies = self.studies()
        return next((shown for shown in studies if shown.key == key), studies[0] if studies else None)

    def _forget(self, now: float) -> None:
        quiet = [plan for plan, view in self.plans.items() if now - view.heard > _QUIET]
        for plan in quiet[: max(0, len(self.plans) - _MOST_PLANS)]:
            del self.plans[plan]
