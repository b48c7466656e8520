"""SimulatedExecutor: workers on a virtual clock, under the real driver.

For tests of scheduling and recovery, and for predicting makespans. Nothing is trained, time jumps from event to event,
and faults happen when the test schedules them.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping
from itertools import count
from typing import Literal

from hpstage.checkpoints.store import CheckpointStore
from hpstage.errors import InternalError
from hpstage.execution.route import Course
from hpstage.execution.simulated_chain import SimulatedChain, StepSeconds
from hpstage.execution.simulated_scaling import Scaler, Scaling
from hpstage.executor import Environment, Executor
from hpstage.plan.facts import ChainId, ForkVerified, Kept, Span, StateKey, StateReached, WorkerId, to_metrics
from hpstage.plan.messages import (
    Amendment,
    BoundaryMissed,
    BoundaryReached,
    Chain,
    ChainEnded,
    Report,
    WorkerJoined,
    WorkerLeft,
    host_of,
    names_of,
)
from hpstage.plan.step_times import ALONE, StepTimes, named
from hpstage.schedule import Scalar

Measure = Callable[[StateKey, int], dict[str, float]]


def value_of_key(key: StateKey, step: int) -> dict[str, float]:
    """Return a metric that depends only on the state, uniform in [0, 1)."""
    return {"value": int(key, 16) / 16 ** len(key)}


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
        scaling: lets workers come and go with the demand; ``workers`` are there from the beginning.
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
        scaling: Scaling | None = None,
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
        self._flights: dict[ChainId, SimulatedChain] = {}
        self._on: dict[WorkerId, SimulatedChain] = {}  # by each of its workers
        self._stand: dict[WorkerId, StateKey | None] = {}
        self._names = count()
        self.trained: list[Span] = []  # spans finished by any worker
        self.scaler = None if scaling is None else Scaler(scaling, self)
        self._expected: set[WorkerId] = set()  # workers that are to join
        for _ in range(workers):
            self.join(0.0)

    # --- events scheduled by tests ------------------------------------------------------------------------

    def join(self, after: float) -> WorkerId:
        """Let a new worker join ``after`` seconds from now."""
        worker = WorkerId(f"sim-{next(self._names)}")

        lanes = names_of(worker, self._lanes)
        self._expected.add(worker)
        if self.scaler is not None:
            self.scaler.add(worker)

        def come() -> list[Report]:
            if worker not in self._expected:
                return []  # it is not needed any more
            self._expected.remove(worker)
            self._stand |= dict.fromkeys(lanes)
            return [WorkerJoined(lane, self._now) for lane in lanes]

        self._at(after, come)
        return worker

    def leave(self, worker: WorkerId) -> None:
        """Let an idle worker leave, or one that is to join not come."""
        lanes = names_of(worker, self._lanes)
        if self._on.keys() & lanes:
            raise InternalError(f"{worker} trains, and is not to leave")
        if self.scaler is not None:
            self.scaler.remove(worker)
        if worker in self._expected:
            self._expected.remove(worker)
            return
        for lane in lanes:
            del self._stand[lane]
        reports: list[Report] = [WorkerLeft(lane, self._now, "closed") for lane in lanes]
        self._at(0.0, lambda: reports)

    def is_present(self, worker: WorkerId) -> bool:
        return worker in self._stand

    def idle_workers(self) -> list[WorkerId]:
        """Return the workers that train no chain."""
        busy = {host_of(lane) for lane in self._on}
        return [worker for worker in self._stand if worker == host_of(worker) and worker not in busy]

    def later(self, after: float, act: Callable[[], None]) -> bool:
        """Call ``act`` after so many seconds, if anything else is to happen; return whether it will be called."""
        if not self._agenda:
            return False

        def called() -> list[Report]:
            act()
            return []

        self._at(after, called)
        return True

    def kill(self, worker: WorkerId, after: float) -> None:
        """Let a worker die ``after`` seconds from now, with the chains it runs."""
        lanes = names_of(worker, self._lanes)

        def die() -> list[Report]:
            if worker not in self._stand:
                return []
            if self.scaler is not None:
                self.scaler.remove(worker)
            for lane in lanes:
                del self._stand[lane]
            reports: list[Report] = [WorkerLeft(lane, self._now) for lane in lanes]
            for flight in [self._on[lane] for lane in lanes if lane in self._on]:
                self._land(flight)
                if flight.worker not in lanes:
                    lost = ChainEnded(flight.chain.id, flight.worker, "lost", self._now, message=f"{worker} died")
                    reports.append(lost)
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
        if len(workers) <= len(chain.gang) or workers & self._on.keys() or not workers <= self._stand.keys():
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
        flight = SimulatedChain(
            chain, worker, course, self._step_seconds, start, begins, start, start, begins, load, source, speed
        )
        self._flights[chain.id] = flight
        self._on.update(dict.fromkeys(flight.workers, flight))
        self._verify(flight, after=load)
        self._aim(flight, extra=load)
        self._share(host_of(worker))

    def amend(self, amendment: Amendment) -> None:
        flight = self._flights.get(amendment.chain)
        if flight is None:
            return
        place, left_over = flight.progress(self._now)
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
        place, left_over = flight.progress(self._now)
        flight.place, flight.since = place, self._now - left_over
        stands = left_over <= 1e-12 or place in flight.course.boundaries
        flight.halt, flight.keep = place if stands else place + 1, keep
        self._aim(flight, extra=-left_over)

    def adapt(self, demand: Callable[[float, float], int]) -> None:
        if self.scaler is not None:
            self.scaler.follow(demand)

    def wait(self, timeout: float | None) -> list[Report]:
        reports: list[Report] = []
        if self.scaler is not None:
            self.scaler.look()
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

    def _aim(self, flight: SimulatedChain, extra: float) -> None:
        """Schedule the chain's arrival at its next boundary, or at the step where it stops."""
        flight.version += 1
        place = flight.next_place()
        seconds = extra + flight.seconds_between(flight.place, place)
        boundary = flight.course.boundaries.get(place)
        if boundary is not None:
            seconds += self._evaluate_seconds * boundary.evaluate + self._save_seconds * boundary.keep
        self._at(max(0.0, seconds), self._if_current(flight, lambda: self._arrive(flight, place)))

    def _share(self, host: WorkerId) -> None:
        """Let the chains of a worker go on at the pace of as many as there are now."""
        if self._lanes == 1:
            return
        on = [self._on[lane] for lane in names_of(host, self._lanes) if lane in self._on]
        beside = [flight for flight in on if host_of(flight.worker) == host]
        for flight in beside:
            if flight.beside == len(beside):
                continue
            place, left_over = flight.progress(self._now)
            training = left_over > 0 and place < min(flight.course.boundaries)  # not loading, evaluating or saving
            flight.count(place, left_over if training else 0.0)
            slower = self._step_times.slowness(len(beside)) / self._step_times.slowness(flight.beside)
            flight.beside, flight.speed = len(beside), flight.speed / slower
            left_over *= slower if training else 1.0
            flight.place, flight.since = place, self._now - left_over
            self._aim(flight, extra=-left_over)

    def _if_current(self, flight: SimulatedChain, act: Callable[[], list[Report]]) -> Callable[[], list[Report]]:
        version = flight.version

        def guarded() -> list[Report]:
            if self._flights.get(flight.chain.id) is not flight or flight.version != version:
                return []
            return act()

        return guarded

    def _verify(self, flight: SimulatedChain, after: float) -> None:
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

        self._at(after + flight.seconds_of(stage, start) / flight.speed, verified)

    def _arrive(self, flight: SimulatedChain, place: int) -> list[Report]:
        course, chain, worker = flight.course, flight.chain, flight.worker
        reports: list[Report] = []
        if place in course.boundaries:
            reports.append(self._reach(flight, place))
        done = place == course.end or not course.boundaries
        if not done and place != flight.halt:
            self._verify(flight, after=0.0)
            self._aim(flight, extra=0.0)
            return reports
        self._land(flight)
        self._share(host_of(worker))
        wasted = place - flight.counted_from
        flight.count(place)
        for other in flight.workers:
            self._stand[other] = None if wasted else self._stand[worker]
        reports.append(
            ChainEnded(
                chain.id,
                worker,
                "done" if done else "stopped",
                self._now,
                node=course.stage_at(place).node,
                step=place,
                wasted_seconds=flight.share * len(flight.workers),
                wasted_steps=wasted,
            )
        )
        return reports

    def _land(self, flight: SimulatedChain) -> None:
        del self._flights[flight.chain.id]
        for worker in flight.workers:
            del self._on[worker]

    def _reach(self, flight: SimulatedChain, place: int) -> BoundaryReached:
        boundary = flight.course.boundaries.pop(place)
        start = flight.counted_from
        flight.count(place)
        workers = len(flight.workers)
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
