"""The content of the page, folded from the records that drivers send. Pure, except that it reads the clock for the
times of reports."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hpstage.accounting.accounting import Accounting
from hpstage.accounting.branch_states import cut, running
from hpstage.cluster.dashboard.follower import NO_MORE, OLD, RECORDS
from hpstage.cluster.dashboard.study import Activity, StudyBranch, StudyView
from hpstage.errors import HpstageError
from hpstage.plan.facts import (
    ChainClosed,
    ChainLost,
    ChainProlonged,
    ChainStarted,
    DriverId,
    DriverJoined,
    DriverLeft,
    Fact,
    NodeId,
    PlanCreated,
    SearchEnded,
    SearchStarted,
    StageFailed,
    StateKey,
    StateLoss,
    StateLost,
    StateReached,
    TargetAsked,
    TrialEnded,
    TrialId,
    TrialProposed,
    WorkerId,
)
from hpstage.plan.log import facts_of, fold_checked, shares
from hpstage.plan.open_chain import OpenChain
from hpstage.plan.plan import SearchPlan
from hpstage.store import Cursor

logger = logging.getLogger("hpstage")

_MOST_PLANS = 16
"""Maximum number of plans held, not counting those of running searches."""
_QUIET = 60.0
"""Seconds without reports after which a plan may be forgotten."""

_LOOKED = 5.0
"""Seconds after the last drawing of a page until nobody is assumed to look at it."""
_LONGEST = 1e9
"""Maximum seconds of a plausible estimate of the time left."""


class PlanView(Accounting):
    """A plan, and the views of its studies."""

    def __init__(self) -> None:
        super().__init__(SearchPlan(StateKey("")))  # until the first record gives the workload
        self.hash = b""  # of the records so far; their sender compares it with its journal
        self.updated = 0.0  # time of the last report
        self.store = ""  # the store's address, without secrets
        self.has_end = False  # whether all records of the journal were received at some time
        self.problem = ""  # the reason if the plan cannot be shown
        self.studies: dict[str, StudyView] = {}
        self.left: dict[str, tuple[float, float]] = {}  # by study: seconds left, and when that was received
        self.failed: Counter[Activity] = Counter()  # exceptions in the user's code, by interrupted activity
        self.states_lost: Counter[StateLoss] = Counter()
        self.drivers_lost = 0  # presumed dead
        self.drivers_rejoined = 0  # processes that joined again afterwards
        self._driven: dict[DriverId, str] = {}
        self._branches: dict[NodeId, list[StudyBranch]] = {}  # of all studies
        self._taken_for_dead: set[tuple[str, int]] = set()  # hosts and process ids
        self._changed: set[NodeId] = set()  # nodes whose pieces must be recounted

    def fold(self, records: Sequence[bytes]) -> None:
        try:
            if self.position == 0 and records:
                header = next(facts_of(records), None)
                if isinstance(header, PlanCreated):
                    self.plan = SearchPlan(header.workload, sharing=shares(header))
            fold_checked(self.plan, records, self.position, self.fold_fact)
            self.position += len(records)
            self.hash = Cursor(0, self.hash).after(records).hash
        finally:
            self._count()

    def driven_by(self, chain: OpenChain) -> str:
        return self._driven.get(chain.driver, "")

    def driven(self) -> Counter[str]:
        """Return the number of active drivers of each study that has any. O(drivers)."""
        return Counter(self._driven[driver] for driver in self.plan.drivers if driver in self._driven)

    def is_driven(self, study: str) -> bool:
        return study in self.driven()

    def workers(self) -> dict[str, set[WorkerId]]:
        """Return the workers that run chains of each study. O(open chains)."""
        found: dict[str, set[WorkerId]] = {}
        for chain in self.plan.chains.values():
            found.setdefault(self.driven_by(chain), set()).add(chain.worker)
        return found

    def set_time_left(self, study: object, seconds: object, now: float) -> None:
        """Set the driver's estimate of a study's seconds left, or ``None``. Other values are ignored."""
        if not isinstance(study, str) or study not in self.studies:
            return
        if seconds is None:
            self.left.pop(study, None)
        elif isinstance(seconds, int | float) and 0 <= seconds < _LONGEST:
            self.left[study] = float(seconds), now

    def _count(self) -> None:
        """Recount the stages of changed branches."""
        ahead = running(self.plan) if self._changed else {}
        for node in self._changed:
            for branch in self._branches.get(node, ()):
                study = branch.study
                study.branch_changes.mark(node)
                pieces = tuple(state for _, _, state in cut(self, study.name, branch, ahead.get(node)))
                if pieces != branch.pieces:
                    for state in branch.pieces:
                        study.stages[state] -= 1
                    for state in pieces:
                        study.stages[state] += 1
                    branch.pieces = pieces
        self._changed.clear()

    def _touch(self, chains: Iterable[OpenChain | None]) -> None:
        self._changed.update(span.node for chain in chains if chain is not None for span in chain.spans)

    def _touch_below(self, node: NodeId, step: int) -> None:
        """Mark the nodes that a failure at ``step`` of ``node`` makes unreachable, or that its end makes reachable."""
        below = [(self.plan.nodes[node], step)]
        while below:
            line, passed = below.pop()
            self._changed.add(line.id)
            below += [(child, child.start) for child in line.children if child.start > passed]

    def fold_fact(self, fact: Fact) -> None:
        """Fold a fact into the plan, the tables, and the views of studies."""
        plan = self.plan
        match fact:
            case TargetAsked():
                plan.apply(fact)
                self._requested(fact)
                return
            case StateReached():
                plan.apply(fact)
                self._arrived(fact)
                return
            case ChainClosed():
                self._touch([plan.chains.get(fact.chain)])
            case DriverLeft():
                self._touch(chain for chain in plan.chains.values() if chain.driver == fact.driver)
                driver = plan.drivers.get(fact.driver)
                if driver is not None and fact.reason == "gone":
                    self.drivers_lost += 1
                    self._taken_for_dead.add((driver.host, driver.pid))
            case StateLost():
                # Another driver may have reported it already.
                self.states_lost[fact.reason] += plan.nodes[fact.node].states[fact.step].kept is not None
            case TrialProposed(study=name, trial=trial) | TrialEnded(study=name, trial=trial) if trial is not None:
                self.studies[name].standings.withdraw(trial)
        plan.apply(fact)
        paid = self.apply(fact)
        match fact:
            case StateLost():
                self._changed.add(fact.node)
            case ChainStarted():
                self._touch([plan.chains[fact.chain]])
            case ChainProlonged():
                self._touch([plan.chains.get(fact.chain)])
            case ChainLost():
                assert paid is not None
                study = self._study_of(paid.trial)
                if study is not None:
                    study.trial_changes.mark(paid.trial)
                    study.chains_lost[fact.outcome] += 1
                    self._mark(study, fact.at)
            case StageFailed():
                self.failed["evaluate" if fact.evaluating else "train"] += 1
                self._touch_below(fact.node, fact.step)
            case DriverJoined():
                self.drivers_rejoined += (fact.host, fact.pid) in self._taken_for_dead
                self._taken_for_dead.discard((fact.host, fact.pid))
            case SearchStarted():
                self.studies.setdefault(fact.study, StudyView(fact, self.tallies[fact.study])).restart(fact)
            case TrialProposed(trial=trial) | TrialEnded(trial=trial) if trial is not None:
                study, ended = self.studies[fact.study], plan.ended.get(trial)
                study.standings.enter(trial, feasible=ended is None or ended.feasible)
                study.trial_changes.mark(trial)
            case SearchEnded():
                self.studies[fact.study].ended = True

    def _mark(self, study: StudyView, at: float) -> None:
        """Add a point to a study's history, after a state was reached or a chain was lost."""
        study.mark(at, study.totals.alone_seconds(self.plan.totals.average_evaluate_seconds))

    def _study_of(self, trial: TrialId) -> StudyView | None:
        """Return the trial's study; ``None`` if the plan was trained without a study."""
        return self.studies.get(self.plan.study_of(trial))

    def _requested(self, fact: TargetAsked) -> None:
        study = self._study_of(fact.trial)
        planned, row = self.plan.trials[fact.trial], self.trial(fact.trial)
        new, before = fact.step not in row.targets, row.requested
        self.apply(fact)
        if study is None:
            return
        self._driven[fact.driver] = study.name
        if new:
            for branch in study.request(planned, before, fact.step):
                self._branches.setdefault(branch.node.id, []).append(branch)
            self._changed.update(node.id for node, _, stop in planned.path_to(fact.step) if stop > before)
        state = self.plan.target(fact.trial, fact.step)
        if state.metrics is not None and new:
            study.report(planned, fact.step, state.metrics)

    def _arrived(self, fact: StateReached) -> None:
        plan, id = self.plan, fact.node
        node = plan.nodes[id]
        request = None if fact.metrics is None else self.requests.get((id, fact.step))
        answered = () if request is None else request.waiting or ()
        front, fails_at = self.trained_to(node), self.fails_at(id)
        paid = self.apply(fact)
        assert paid is not None
        self._changed.add(id)
        reached = self.trained_to(node)
        self._changed.update(child.id for child in node.children if front < child.start <= reached)
        if fails_at is not None and self.fails_at(id) != fails_at:
            self._touch_below(id, fails_at)
        study = self._study_of(paid.trial)
        if study is not None:
            study.trial_changes.mark(paid.trial)
            self._mark(study, fact.at)
        metrics = node.states[fact.step].metrics
        for trial in answered:
            study = self._study_of(trial)
            if study is not None and metrics is not None:
                study.report(plan.trials[trial], fact.step, metrics)
                self._mark(study, fact.at)


@dataclass(frozen=True, slots=True)
class Shown:
    """A study of a plan. ``key`` distinguishes it from studies of the same name in other plans."""

    key: str
    view: PlanView
    study: StudyView

    @property
    def seconds_saved(self) -> float:
        return self.view.saved_seconds(self.study.name)

    def seconds_left(self, now: float) -> float | None:
        """Return the estimated seconds left at ``now``, a time on this process's monotonic clock; ``None`` if the study
        is not running, or no estimate was received lately."""
        left, received = self.view.left.get(self.study.name, (0.0, -math.inf))
        return max(0.0, left - (now - received)) if now - received <= OLD and self.is_driven else None

    @property
    def is_driven(self) -> bool:
        return not self.study.ended and self.view.is_driven(self.study.name)


class Board:
    """All plans that drivers have reported since the scheduler started."""

    def __init__(self) -> None:
        self.plans: dict[str, PlanView] = {}  # ordered by the time of the last report, the latest last
        self.has_page = False  # whether the scheduler's dashboard has the page
        self.drawn = -math.inf  # when a page was drawn last
        self.lock = threading.Lock()
        """Held while plans change, since other threads may read them."""

    @property
    def is_watched(self) -> bool:
        """Whether somebody looks at a page."""
        return time.monotonic() - self.drawn < _LOOKED

    def offer(self, plan: str, first: int, records: list[bytes]) -> int:
        """Fold those of these records that are new, and return the position of the next record to send.

        Args:
            first: position of the first of ``records`` in the journal.

        Returns:
            ``NO_MORE`` if the plan cannot be shown.
        """
        with self.lock:
            view = self.plans.setdefault(plan, PlanView())
            view.updated = time.monotonic()
            if not view.problem and first <= view.position:
                try:
                    view.fold(records[view.position - first :])
                    view.has_end = view.has_end or (view.position > 0 and len(records) < RECORDS)
                except HpstageError as error:
                    logger.warning("The dashboard page cannot show a plan: %s", error)
                    view.problem = str(error)
            if view.position or view.problem:
                self.plans[plan] = self.plans.pop(plan)
            self._forget(view.updated)
            return NO_MORE if view.problem else view.position

    def take_in(
        self,
        plan: str,
        first: int,
        records: list[bytes],
        anew: bool = False,
        store: str = "",
        left: tuple[str, float | None] | None = None,
    ) -> tuple[int, bytes, bool]:
        """Same as :meth:`offer`, for a process that follows the journal. Return position and hash of the cursor after
        the folded records, and whether somebody looks at a page.

        Args:
            anew: discard all records received so far: the journal has lost some of them.
            store: the address of the journal's store, without secrets.
            left: a study that the process searches, and the estimated seconds until its end, if they are known.
        """
        if anew:
            with self.lock:
                self.plans.pop(plan, None)
        wanted = self.offer(plan, first, records)
        view = self.plans.get(plan)
        if view is not None and store:
            view.store = store
        if view is not None and isinstance(left, tuple | list) and len(left) == 2:
            view.set_time_left(*left, time.monotonic())
        return wanted, b"" if wanted == NO_MORE or view is None else view.hash, self.is_watched

    def studies(self) -> list[Shown]:
        """Return the studies of all plans: first those with active drivers, then the others, each latest first."""
        found = [
            Shown(f"{plan} {name}", view, study)
            for plan, view in self.plans.items()
            for name, study in view.studies.items()
        ]
        return sorted(found, key=lambda shown: (shown.is_driven, shown.study.started.at), reverse=True)

    def find(self, name: str | None) -> Shown | None:
        """Return the study of this key or name; for ``None``, the first of :meth:`studies`."""
        return next((shown for shown in self.studies() if name in (None, shown.key, shown.study.name)), None)

    def _forget(self, now: float) -> None:
        quiet = [plan for plan, view in self.plans.items() if now - view.updated > _QUIET]
        for plan in quiet[: max(0, len(self.plans) - _MOST_PLANS)]:
            del self.plans[plan]
