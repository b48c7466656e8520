"""What the page shows, folded from the records that drivers send. Pure, but for the time at which it was last heard of
a plan."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import msgspec

from hpstage.cluster.dashboard.follower import NO_MORE, RECORDS
from hpstage.cluster.dashboard.pieces import PieceState
from hpstage.cluster.dashboard.study import Activity, Lane, StudyView
from hpstage.errors import HpstageError
from hpstage.plan.facts import (
    ChainClosed,
    ChainId,
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
from hpstage.plan.nodes import Node
from hpstage.plan.open_chain import OpenChain
from hpstage.plan.plan import SearchPlan
from hpstage.store import Cursor

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
        self.hash = b""  # of the chain of those before it: by it their reader knows if they stand in the journal yet
        self.heard = 0.0
        self.whole = False  # it was once at the journal's end: its numbers are those of the plan
        self.problem = ""
        self.plan = SearchPlan(StateKey(""))  # until the first record says whose
        self.studies: dict[str, StudyView] = {}
        self.since: dict[ChainId, float] = {}  # when it was last heard of an open chain
        self.trained: dict[NodeId, list[tuple[int, str]]] = {}  # up to which step, and for which study
        self.failed: dict[NodeId, int] = {}  # the step at which training raises
        self.failures: Counter[Activity] = Counter()  # exceptions in the user's code, by what they ended
        self.states_lost: Counter[StateLoss] = Counter()
        self.drivers_lost = 0  # taken for dead
        self.drivers_rejoined = 0  # processes that joined again after that
        self._study_of: dict[TrialId, StudyView] = {}
        self._driven: dict[DriverId, str] = {}
        self._lanes: dict[NodeId, list[Lane]] = {}  # of all studies
        self._closed: dict[ChainId, OpenChain] = {}  # the last
        self._taken_for_dead: set[tuple[str, int]] = set()  # hosts and process ids
        self._changed: set[NodeId] = set()  # nodes whose pieces are to be counted again

    def fold(self, records: Sequence[bytes]) -> None:
        try:
            for record in records:
                self._apply(_decode(record))
                self.position += 1
            self.hash = Cursor(0, self.hash).after(records).hash
        finally:
            self._count()

    def front(self, node: NodeId) -> int:
        """The step up to which a node is trained; training covers a node from its start on, without gaps."""
        pieces = self.trained.get(node)
        return pieces[-1][0] if pieces else self.plan.nodes[node].start

    def is_out_of_reach(self, node: Node) -> bool:
        """Does training fail before it comes to the node? O(depth), where there are failures."""
        while self.failed and node.parent is not None:
            if self.failed.get(node.parent.id, node.start) < node.start:
                return True
            node = node.parent
        return False

    def study_of(self, chain: OpenChain) -> str:
        return self._driven.get(chain.driver, "")

    def driven(self) -> Counter[str]:
        """Studies with drivers at work on them: how many. O(drivers)."""
        return Counter(self._driven[driver] for driver in self.plan.drivers if driver in self._driven)

    def is_driven(self, study: str) -> bool:
        """Is a driver at work on it?"""
        return study in self.driven()

    def workers(self) -> dict[str, set[WorkerId]]:
        """On which workers chains of each study run. O(open chains)."""
        found: dict[str, set[WorkerId]] = {}
        for chain in self.plan.chains.values():
            found.setdefault(self.study_of(chain), set()).add(chain.worker)
        return found

    def _count(self) -> None:
        """Count the stages of lanes that have changed."""
        ahead = running(self) if self._changed else {}
        for node in self._changed:
            for lane in self._lanes.get(node, ()):
                study = lane.study
                pieces = tuple(state for _, _, state in cut(self, study.name, lane, ahead.get(node)))
                if pieces != lane.pieces:
                    for state in lane.pieces:
                        study.stages[state] -= 1
                    for state in pieces:
                        study.stages[state] += 1
                    lane.pieces = pieces
        self._changed.clear()

    def _touch(self, chains: Iterable[OpenChain | None]) -> None:
        self._changed.update(span.node for chain in chains if chain is not None for span in chain.spans)

    def _touch_below(self, node: NodeId, step: int) -> None:
        """What a failure puts out of reach, or within it again."""
        below = [(self.plan.nodes[node], step)]
        while below:
            line, passed = below.pop()
            self._changed.add(line.id)
            for start, children in line.children.items():
                if start > passed:
                    below += [(child, child.start) for child in children.values()]

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
            case ChainClosed():
                chain = plan.chains.get(fact.chain)
                self._touch([chain])
                plan.apply(fact)
                if chain is not None:
                    self._closed = {fact.chain: chain}  # what it threw away is told with it
            case DriverLeft():
                self._left(fact)
            case StateLost():
                kept = len(plan.kept)
                plan.apply(fact)
                if len(plan.kept) < kept:  # else another driver has said so already
                    self.states_lost[fact.reason] += 1
            case _:
                plan.apply(fact)
                self._note(fact)

    def _note(self, fact: Fact) -> None:
        match fact:
            case ChainStarted():
                self.since[fact.chain] = fact.at
                self._touch([self.plan.chains[fact.chain]])
            case ChainProlonged():
                self._touch([self.plan.chains.get(fact.chain)])
            case ChainLost():
                self._lost(fact)
            case StageFailed():
                self.failures["evaluate" if fact.evaluating else "train"] += 1
                if not fact.evaluating:
                    self.failed[fact.node] = min(fact.step, self.failed.get(fact.node, fact.step))
                    self._touch_below(fact.node, fact.step)
            case DriverJoined():
                self.drivers_rejoined += (fact.host, fact.pid) in self._taken_for_dead
                self._taken_for_dead.discard((fact.host, fact.pid))
            case SearchStarted():
                self.studies.setdefault(fact.study, StudyView(fact, self.plan.totals)).restart(fact)
            case TrialProposed(trial=trial) if trial is not None:
                self._study_of[trial] = study = self.studies[fact.study]
                study.set_trial(trial, None)
            case TrialEnded():
                self.studies[fact.study].set_trial(fact.trial, fact.state)
            case SearchEnded():
                self.studies[fact.study].ended = True
        if len(self.since) > 2 * len(self.plan.chains) + 8:
            self.since = {chain: at for chain, at in self.since.items() if chain in self.plan.chains}

    def _left(self, fact: DriverLeft) -> None:
        plan = self.plan
        self._touch(chain for chain in plan.chains.values() if chain.driver == fact.driver)
        driver = plan.drivers.get(fact.driver)
        plan.apply(fact)
        if driver is not None and fact.reason == "gone":
            self.drivers_lost += 1
            self._taken_for_dead.add((driver.host, driver.pid))

    def _lost(self, fact: ChainLost) -> None:
        chain = self.plan.chains.get(fact.chain) or self._closed.get(fact.chain)
        study = None if chain is None else self.studies.get(self.study_of(chain))
        if study is not None:
            study.lose(fact)

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
            for lane in study.ask(planned, asked, fact.step):
                self._lanes.setdefault(lane.node.id, []).append(lane)
            self._changed.update(node.id for node, _, stop in planned.legs(fact.step) if stop > asked)
        state = self.plan.target(fact.trial, fact.step)
        if state.metrics is not None:
            study.tell(self.plan, planned, fact.step, state.metrics)

    def _reached(self, fact: StateReached) -> None:
        plan = self.plan
        chain = None if fact.chain is None else plan.chains.get(fact.chain)
        node = plan.nodes[fact.node] if 0 <= fact.node < len(plan.nodes) else None
        state = None if node is None else node.states.get(fact.step)
        waiting = [] if state is None or fact.metrics is None else list(state.waiting)
        before = 0.0 if node is None else plan.step_seconds(node)
        plan.apply(fact)
        node = plan.nodes[fact.node]
        faster = before - plan.step_seconds(node)
        for lane in self._lanes.get(fact.node, ()):
            lane.study.repace(lane, faster)
        owner = "" if chain is None else self.study_of(chain)
        if fact.chain in self.since:
            self.since[fact.chain] = fact.at
        self._advance(node, fact.step, owner)
        study = self.studies.get(owner)
        if study is not None:
            study.spend(fact)
        metrics = node.states[fact.step].metrics
        for trial in waiting:
            told = self._study_of.get(trial)
            if told is not None and metrics is not None:
                told.tell(plan, plan.trials[trial], fact.step, metrics, fact.at)

    def _advance(self, node: Node, step: int, owner: str) -> None:
        """A node is trained up to ``step``, as it may have been before."""
        self._changed.add(node.id)
        front = self.front(node.id)
        if step <= front:
            return
        pieces = self.trained.setdefault(node.id, [])
        if pieces and pieces[-1][1] == owner:
            pieces.pop()
        pieces.append((step, owner))
        for start, children in node.children.items():
            if front < start <= step:
                self._changed.update(child.id for child in children.values())
        if step > self.failed.get(node.id, step):
            self._touch_below(node.id, self.failed.pop(node.id))


def running(view: PlanView) -> dict[NodeId, int]:
    """The step to which each node is being trained. O(open chains)."""
    ahead: dict[NodeId, int] = {}
    for chain in view.plan.chains.values():
        for span in chain.ahead():
            ahead[span.node] = max(span.stop, ahead.get(span.node, 0))
    return ahead


def cut(view: PlanView, study: str, lane: Lane, running: int | None) -> Iterator[tuple[int, int, PieceState]]:
    """``(start, stop, state)`` of each piece of a lane of ``study``'s, from its node's start to its reach."""
    node, reach = lane.node, lane.reach
    at = node.start
    for stop, owner in view.trained.get(node.id, ()):
        if at < reach:
            yield at, min(stop, reach), "done" if owner in ("", study) else "reused"
        at = stop
    if at < reach and running is not None and running > at:
        yield at, min(running, reach), "running"
        at = running
    if at < reach:
        if view.failed.get(node.id, reach) < reach or view.is_out_of_reach(node):
            yield at, reach, "failed"
        else:
            ready = running is None and (
                at > node.start or node.parent is None or view.front(node.parent.id) >= node.start
            )
            yield at, reach, "ready" if ready else "waiting"


@dataclass(frozen=True, slots=True)
class Shown:
    """A study of a plan. ``key`` tells it from studies of its name in other plans."""

    key: str
    view: PlanView
    study: StudyView

    @property
    def is_driven(self) -> bool:
        return not self.study.ended and self.view.is_driven(self.study.name)


class Board:
    """All plans that drivers have told of, since the scheduler began."""

    def __init__(self) -> None:
        self.plans: dict[str, PlanView] = {}  # those that were heard of last come last
        self.has_page = False  # on the scheduler's dashboard
        self.lock = threading.Lock()
        """Held while plans change: others than the scheduler's thread may read them."""

    def offer(self, plan: str, first: int, records: list[bytes]) -> int:
        """Take in what is new of these records, the first of which stands at ``first``; returns which one comes next.

        Of a plan that cannot be shown it returns ``NO_MORE``.
        """
        with self.lock:
            return self._offer(plan, first, records)

    def take_in(self, plan: str, first: int, records: list[bytes], anew: bool = False) -> tuple[int, bytes]:
        """As :meth:`offer`, for a process that follows the journal; returns the cursor behind what is taken in.

        Args:
            anew: the journal has lost records that were taken in: forget them.
        """
        if anew:
            with self.lock:
                self.plans.pop(plan, None)
        wanted = self.offer(plan, first, records)
        view = self.plans.get(plan)
        return wanted, b"" if wanted == NO_MORE or view is None else view.hash

    def _offer(self, plan: str, first: int, records: list[bytes]) -> int:
        view = self.plans.setdefault(plan, PlanView())
        view.heard = time.monotonic()
        if not view.problem and first <= view.position:
            try:
                view.fold(records[view.position - first :])
                view.whole = view.whole or (view.position > 0 and len(records) < RECORDS)
            except (HpstageError, msgspec.MsgspecError) as error:
                logger.warning("hpstage's page cannot show a plan, record %d of it: %s", view.position, error)
                view.problem = f"record {view.position} cannot be read: {error}"
        if view.position or view.problem:
            self.plans[plan] = self.plans.pop(plan)
        self._forget(view.heard)
        return NO_MORE if view.problem else view.position

    def studies(self) -> list[Shown]:
        """Those of all plans: first those that are being driven, then the others, the latest first."""
        found = [
            Shown(f"{plan} {name}", view, study)
            for plan, view in self.plans.items()
            for name, study in view.studies.items()
        ]
        return sorted(found, key=lambda shown: (shown.is_driven, shown.study.started.at), reverse=True)

    def find(self, key: str | None) -> Shown | None:
        """The study of this key; the first of :meth:`studies` if there is none."""
        studies = self.studies()
        return next((shown for shown in studies if shown.key == key), studies[0] if studies else None)

    def _forget(self, now: float) -> None:
        quiet = [plan for plan, view in self.plans.items() if now - view.heard > _QUIET]
        for plan in quiet[: max(0, len(self.plans) - _MOST_PLANS)]:
            del self.plans[plan]
