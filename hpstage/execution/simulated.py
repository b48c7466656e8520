"""SimulatedExecutor: workers on a virtual clock, under the real driver.

For tests of scheduling and recovery, and for predicting makespans. Nothing is trained, time jumps from event to event,
and faults happen when the test schedules them.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import count
from typing import Literal

from hpstage.checkpoints.store import CheckpointStore
from hpstage.errors import InternalError
from hpstage.execution.route import Course
from hpstage.executor import Environment, Executor
from hpstage.plan.facts import ChainId, ForkVerified, Kept, NodeId, Span, StateKey, StateReached, WorkerId, to_metrics
from hpstage.plan.messages import (
    Amendment,
    BoundaryMissed,
    BoundaryReached,
    Chain,
    ChainEnded,
    Report,
    Stage,
    WorkerJoined,
    WorkerLeft,
    host_of,
    names_of,
)
from hpstage.plan.step_times import ALONE, StepTimes, named
from hpstage.schedule import Scalar, varies

StepSeconds = Callable[[Mapping[str, Scalar]], float]
Measure = Callable[[StateKey, int], dict[str, float]]


def value_of_key(key: StateKey, step: int) -> dict[str, float]:
    """Return a metric that depends only on the state, uniform in [0, 1)."""
    return {"value": int(key, 16) / 16 ** len(key)}


@dataclass(slots=True)
class _Flight:
    """A chain on a simulated worker."""

    chain: Chain
    worker: WorkerId
    course: Course
    place: int  # the step it had reached at ``since``
    since: float
    counted_from: int  # first step not yet reported
    kept: int  # step at which a state was last kept, or training began
    kept_at: float  # time of ``kept``
    load: float
    source: Literal["fresh", "continued", "live", "disk"] | None
    speed: float = 1.0  # how many times as fast as one worker its workers train, or as its own trains it alone
    beside: int = 1  # how many chains its worker trains, itself included
    alone: float = 0.0  # seconds trained since its last report, for a worker alone; below, its share of what passed
    share: float = 0.0
    passed: float = 0.0
    own: int | None = None  # a boundary ahead that the chain has set itself
    halt: int | None = None  # step at which it has been asked to stop
    keep: bool = False  # whether to keep its state there
    verified: set[NodeId] = field(default_factory=set)  # where a fork was verified
    version: int = 0


class SimulatedExecutor(Executor):
    """``workers`` workers on a virtual clock.

    Args:
        workers: number of workers.
        virtual_nodes: the most workers that train a chain together.
        speedup: how many times as fast as one worker so many train it; by default each adds what one alone does.
        gather_seconds: time that they need to find each other.
        step_seconds: seconds per step, or a function of the values at that step.
        evaluate_seconds, load_seconds, save_seconds: cost of each such operation.
        measure: returns the metrics of a state; by default ``{"value": ...}`` from its key.
        state_bytes: size of each checkpoint.
        kept: keys in the (imaginary) checkpoint store; pass one set to several executors to let states outlive them.
        lanes: the most chains that a worker trains side by side.
        step_times: what a step of several takes, relative to one; by default as long as one after the other.
    """

    def __init__(
        self,
        workers: int,
        *,
        virtual_nodes: int = 1,
        speedup: Callable[[int], float] = float,
        gather_seconds: float = 0.0,
        step_seconds: float | StepSeconds = 1.0,
        evaluate_seconds: float = 0.0,
        load_seconds: float = 0.0,
        save_seconds: float = 0.0,
        measure: Measure = value_of_key,
        state_bytes: int = 0,
        kept: set[StateKey] | None = None,
        lanes: int = 1,
        step_times: StepTimes = ALONE,
    ) -> None:
        self._workers = workers
        self._lanes = lanes
        self._step_times = step_times
        self.widest = virtual_nodes
        self._speedup = speedup
        self._gather_seconds = gather_seconds
        self._step_seconds = step_seconds
        self._evaluate_seconds = evaluate_seconds
        self._load_seconds = load_seconds
        self._save_seconds = save_seconds
        self._measure = measure
        self._state_bytes = state_bytes
        self.kept: set[StateKey] = set() if kept is None else kept
        self._now = 0.0
        self._order = count()
        self._agenda: list[tuple[float, int, Callable[[], list[Report]]]] = []
        self._flights: dict[ChainId, _Flight] = {}
        self._stand: dict[WorkerId, StateKey | None] = {}
        self._names = count()
        self.trained: list[Span] = []  # spans finished by any worker
        for _ in range(workers):
            self.join(0.0)

    # --- events scheduled by tests ------------------------------------------------------------------------

    def join(self, after: float) -> WorkerId:
        """Let a new worker join ``after`` seconds from now."""
        worker = WorkerId(f"sim-{next(self._names)}")

        lanes = names_of(worker, self._lanes)

        def come() -> list[Report]:
            self._stand |= dict.fromkeys(lanes)
            return [WorkerJoined(lane, self._now) for lane in lanes]

        self._at(after, come)
        return worker

    def kill(self, worker: WorkerId, after: float) -> None:
        """Let a worker die ``after`` seconds from now, with the chains it runs."""
        lanes = names_of(worker, self._lanes)

        def die() -> list[Report]:
            if worker not in self._stand:
                return []
            for lane in lanes:
                del self._stand[lane]
            reports: list[Report] = [WorkerLeft(lane, self._now) for lane in lanes]
            for id, flight in list(self._flights.items()):
                if flight.worker in lanes:
                    del self._flights[id]
                elif worker in flight.chain.gang:
                    del self._flights[id]
                    reports.append(ChainEnded(id, flight.worker, "lost", self._now, message=f"{worker} died"))
            return reports

        self._at(after, die)

    def _at(self, after: float, act: Callable[[], list[Report]]) -> None:
        heapq.heappush(self._agenda, (self._now + after, next(self._order), act))

    # --- Executor -----------------------------------------------------------------------------------------

    def open(self, trainable: object, checkpoints: CheckpointStore | None) -> Environment:
        return Environment({"simulated": "1"})

    def use(self, checkpoints: CheckpointStore) -> None:
        """Do nothing: checkpoints are imaginary here."""

    def try_out(self, initial: Mapping[str, Scalar]) -> dict[str, float] | None:
        return None

    def start(self, worker: WorkerId, chain: Chain) -> None:
        workers = {worker, *chain.gang}
        busy = {other for flight in self._flights.values() for other in (flight.worker, *flight.chain.gang)}
        if len(workers) <= len(chain.gang) or workers & busy or not workers <= self._stand.keys():
            raise InternalError(f"{chain.id} was started on {sorted(workers)}, which are not all idle workers")
        source: Literal["fresh", "continued", "live", "disk"] = "fresh"
        load = 0.0
        if chain.source is not None:
            if chain.source not in self.kept:
                ended = ChainEnded(chain.id, worker, "unreadable", self._now, message="not kept")
                self._at(0.0, lambda: [ended])
                return
            continued = self._stand[worker] == chain.source
            source, load = ("continued", 0.0) if continued else ("disk", self._load_seconds)
        if chain.gang:
            load += self._gather_seconds
        course = Course(chain)
        start = course.stages[0].start
        begins = self._now + load
        speed = self._speedup(len(workers))
        flight = _Flight(chain, worker, course, start, begins, start, start, begins, load, source, speed)
        self._flights[chain.id] = flight
        self._verify(flight, after=load)
        self._aim(flight, extra=load)
        self._share(host_of(worker))

    def amend(self, amendment: Amendment) -> None:
        flight = self._flights.get(amendment.chain)
        if flight is None:
            return
        place, left_over = self._progress(flight)
        missed = flight.course.amend(amendment, place)
        if missed:
            late: list[Report] = [
                BoundaryMissed(flight.chain.id, flight.worker, ref.node, ref.step, place) for ref in missed
            ]
            self._at(0.0, lambda: late)
        flight.place, flight.since = place, self._now - left_over
        self._aim(flight, extra=-left_over)

    def stop(self, chain: ChainId, *, keep: bool = False) -> None:
        flight = self._flights.get(chain)
        if flight is None:
            return
        place, left_over = self._progress(flight)
        flight.place, flight.since = place, self._now - left_over
        stands = left_over <= 1e-12 or place in flight.course.boundaries
        flight.halt, flight.keep = place if stands else place + 1, keep
        self._aim(flight, extra=-left_over)

    def wait(self, timeout: float | None) -> list[Report]:
        reports: list[Report] = []
        if timeout == 0.0 and self._agenda and self._agenda[0][0] > self._now:
            return reports  # nobody waits: time stands still
        while self._agenda and (not reports or self._agenda[0][0] <= self._now):
            self._now, _, act = heapq.heappop(self._agenda)
            reports += act()
        if timeout and not reports:
            self._now += timeout  # nothing is scheduled, and the caller only waits for time to pass
        return reports

    @property
    def present(self) -> int:
        return self._workers

    @property
    def lanes(self) -> int:
        return self._lanes

    def measure(self, initial: Mapping[str, Scalar], steps: float) -> dict[str, float] | None:
        return named(self._step_times.up_to(self._lanes)) if self._lanes > 1 else None

    def clock(self) -> float:
        return self._now

    def close(self) -> None:
        self._agenda.clear()

    # --- the course of a chain ----------------------------------------------------------------------------

    def _step_seconds_at(self, stage: Stage, step: int) -> float:
        if not callable(self._step_seconds):
            return self._step_seconds
        return self._step_seconds({name: form.value(step) for name, form in stage.forms.items()})

    def _is_even(self, stage: Stage) -> bool:
        """Whether all steps of the stage take the same time."""
        return not callable(self._step_seconds) or not any(map(varies, stage.forms.values()))

    def _seconds_between(self, flight: _Flight, start: int, stop: int) -> float:
        """Return the seconds for steps ``[start, stop)``; O(1) for each stage whose steps take the same time."""
        seconds = 0.0
        while start < stop:
            stage = flight.course.stage_at(start + 1)
            until = min(stop, stage.stop)
            if self._is_even(stage):
                seconds += (until - start) * self._step_seconds_at(stage, start)
            else:
                seconds += sum(self._step_seconds_at(stage, step) for step in range(start, until))
            start = until
        return seconds / flight.speed

    def _walk(self, flight: _Flight, step: int, last: int, seconds: float) -> tuple[int, float]:
        """Return the step, at most ``last``, that training from ``step`` reaches in ``seconds``, and the time left."""
        while step < last:
            stage = flight.course.stage_at(step + 1)
            stop = min(stage.stop, last)
            whole = self._seconds_between(flight, step, stop)
            if seconds >= whole - 1e-12:
                seconds, step = seconds - whole, stop
                continue
            even = self._is_even(stage)
            while seconds >= (each := self._step_seconds_at(stage, step) / flight.speed) - 1e-12:
                steps = max(1, int(seconds / each)) if even and each else 1
                seconds, step = seconds - steps * each, step + steps
            break
        return step, seconds

    def _progress(self, flight: _Flight) -> tuple[int, float]:
        """Return the chain's current step, and the seconds spent on the one in progress (below 0: still loading)."""
        spent = self._now - flight.since
        if spent <= 0:
            return flight.place, spent
        return self._walk(flight, flight.place, min(flight.course.boundaries), spent)

    def _set_own(self, flight: _Flight) -> None:
        """Set the chain's own next boundary, if one is due before the boundaries that were set for it."""
        course, chain, place = flight.course, flight.chain, flight.place
        if flight.own is not None and flight.own > place:
            course.boundaries.pop(flight.own, None)  # it was computed before the chain was amended
        first, own, keep = min(course.boundaries), None, True
        if chain.keep_every is not None:
            own = (place // chain.keep_every + 1) * chain.keep_every
        elif chain.keep_seconds is not None:
            left = chain.keep_seconds - (flight.since - flight.kept_at)
            own = max(place + 1, self._walk(flight, place, first, left)[0])
        if chain.time_first and flight.source is not None:
            own, keep = place + 1, False
        flight.own = own if own is not None and place < own < first else None
        if flight.own is not None:
            course.boundaries[flight.own] = course.own(flight.own, keep=keep)

    def _aim(self, flight: _Flight, extra: float) -> None:
        """Schedule the chain's arrival at its next boundary, or at the step where it stops."""
        flight.version += 1
        self._set_own(flight)
        place = min(flight.course.boundaries)
        if flight.halt is not None:
            place = min(place, flight.halt)
            if flight.keep and place == flight.halt > flight.kept:
                flight.course.keep_at(place)
        seconds = extra + self._seconds_between(flight, flight.place, place)
        boundary = flight.course.boundaries.get(place)
        if boundary is not None:
            seconds += self._evaluate_seconds * boundary.evaluate + self._save_seconds * boundary.keep
        self._at(max(0.0, seconds), self._if_current(flight, lambda: self._arrive(flight, place)))

    def _share(self, host: WorkerId) -> None:
        """Let the chains of a worker go on at the pace of as many as there are now."""
        if self._lanes == 1:
            return
        beside = [flight for flight in self._flights.values() if host_of(flight.worker) == host]
        for flight in beside:
            if flight.beside == len(beside):
                continue
            place, left_over = self._progress(flight)
            training = left_over > 0 and place < min(flight.course.boundaries)  # not loading, evaluating or saving
            self._count(flight, place, left_over if training else 0.0)
            slower = self._step_times.slowness(len(beside)) / self._step_times.slowness(flight.beside)
            flight.beside, flight.speed = len(beside), flight.speed / slower
            left_over *= slower if training else 1.0
            flight.place, flight.since = place, self._now - left_over
            self._aim(flight, extra=-left_over)

    def _count(self, flight: _Flight, place: int, left_over: float = 0.0) -> None:
        """Count what was trained since the last count, up to a step and so many seconds into the next."""
        alone = (self._seconds_between(flight, flight.counted_from, place) + left_over) * flight.speed
        passed = (alone - flight.alone) / flight.speed
        flight.alone = alone
        flight.share += passed / flight.beside
        flight.passed += passed

    def _if_current(self, flight: _Flight, act: Callable[[], list[Report]]) -> Callable[[], list[Report]]:
        version = flight.version

        def guarded() -> list[Report]:
            if self._flights.get(flight.chain.id) is not flight or flight.version != version:
                return []
            return act()

        return guarded

    def _verify(self, flight: _Flight, after: float) -> None:
        """If a fork is to be verified on the stage ahead, report it after a step, as workers do."""
        if flight.place == flight.course.stages[-1].stop:
            return  # a kept state is only evaluated
        stage = flight.course.stage_at(flight.place + 1)
        if not stage.verify or stage.node in flight.verified:
            return
        flight.verified.add(stage.node)
        chain, start = flight.chain.id, flight.place

        def verified() -> list[Report]:
            if self._flights.get(chain) is not flight:
                return []
            return [ForkVerified(chain, flight.worker, stage.node, start, 1, 0.0, self._now)]

        self._at(after + self._step_seconds_at(stage, start) / flight.speed, verified)

    def _arrive(self, flight: _Flight, place: int) -> list[Report]:
        course, chain, worker = flight.course, flight.chain, flight.worker
        workers = (worker, *chain.gang)
        reports: list[Report] = []
        if place in course.boundaries:
            reports.append(self._reach(flight, place))
        done = place == course.end or not course.boundaries
        if not done and place != flight.halt:
            self._verify(flight, after=0.0)
            self._aim(flight, extra=0.0)
            return reports
        del self._flights[chain.id]
        self._share(host_of(worker))
        wasted = place - flight.counted_from
        self._count(flight, place)
        for other in workers:
            self._stand[other] = None if wasted else self._stand[worker]
        reports.append(
            ChainEnded(
                chain.id,
                worker,
                "done" if done else "stopped",
                self._now,
                node=course.stage_at(place).node,
                step=place,
                wasted_seconds=flight.share * len(workers),
                wasted_steps=wasted,
            )
        )
        return reports

    def _reach(self, flight: _Flight, place: int) -> BoundaryReached:
        boundary = flight.course.boundaries.pop(place)
        start = flight.counted_from
        self._count(flight, place)
        workers = 1 + len(flight.chain.gang)
        part = flight.share / flight.passed if flight.passed > flight.share else float(workers)
        if boundary.keep:
            self.kept.add(boundary.key)
            flight.kept, flight.kept_at = place, self._now
        self._stand[flight.worker] = boundary.key if boundary.keep else None
        if place > start:
            self.trained.append(Span(boundary.node, start, place))
        reached = StateReached(
            chain=flight.chain.id,
            worker=flight.worker,
            node=boundary.node,
            start=start,
            step=place,
            at=self._now,
            train_seconds=flight.share * workers,
            load_seconds=flight.load * workers,
            evaluate_seconds=self._evaluate_seconds * workers if boundary.evaluate else 0.0,
            save_seconds=self._save_seconds * workers if boundary.keep else 0.0,
            source=flight.source,
            metrics=to_metrics(self._measure(boundary.key, place)) if boundary.evaluate else None,
            kept=Kept(boundary.key, self._state_bytes, boundary.key) if boundary.keep else None,
            workers=part,
            alone_seconds=flight.alone if part != 1.0 else None,
        )
        flight.alone = flight.share = flight.passed = 0.0
        flight.load, flight.source = 0.0, None
        flight.place, flight.since, flight.counted_from = place, self._now, place
        return BoundaryReached(reached)
