"""SimulatedExecutor: workers on a virtual clock, under the real driver.

For tests of scheduling and recovery, and for predicting makespans: nothing is trained, time jumps from event to
event, and faults happen when the test says.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import count
from typing import Literal

from hpstage.checkpoints.store import CheckpointStore
from hpstage.course import Course
from hpstage.errors import InternalError
from hpstage.events import (
    Amendment,
    BoundaryMissed,
    BoundaryReached,
    Chain,
    ChainEnded,
    ChainId,
    Kept,
    NodeId,
    Report,
    StateKey,
    WorkerId,
    WorkerJoined,
    WorkerLeft,
    to_metrics,
)
from hpstage.executor import Environment, Executor
from hpstage.schedule import Scalar, varies

StepSeconds = Callable[[Mapping[str, Scalar]], float]
Measure = Callable[[StateKey, int], dict[str, float]]


def value_of_key(key: StateKey, step: int) -> dict[str, float]:
    """A metric that depends on the state and on nothing else: uniform in [0, 1)."""
    return {"value": int(key, 16) / 16 ** len(key)}


@dataclass(slots=True)
class _Flight:
    """A chain on a simulated worker."""

    chain: Chain
    worker: WorkerId
    course: Course
    place: tuple[int, int]  # where it stood at ``since``
    since: float
    counted_from: int  # first step not yet reported
    load: float
    source: Literal["fresh", "continued", "live", "disk"] | None
    version: int = 0


class SimulatedExecutor(Executor):
    """``workers`` workers on a virtual clock.

    Args:
        workers: how many.
        step_seconds: seconds per step, or a function of the values at that step.
        evaluate_seconds, load_seconds, save_seconds: cost of each such act.
        measure: metrics of a state; by default ``{"value": ...}`` from its key.
        state_bytes: what each checkpoint takes.
        kept: keys in the (imaginary) checkpoint store; pass one set to several executors to let states outlive them.
    """

    def __init__(
        self,
        workers: int,
        *,
        step_seconds: float | StepSeconds = 1.0,
        evaluate_seconds: float = 0.0,
        load_seconds: float = 0.0,
        save_seconds: float = 0.0,
        measure: Measure = value_of_key,
        state_bytes: int = 0,
        kept: set[StateKey] | None = None,
    ) -> None:
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
        self.busy_seconds = 0.0
        self.trained: list[tuple[NodeId, int, int]] = []  # every stretch of steps that any worker finished
        for _ in range(workers):
            self.join(0.0)

    # --- what tests make happen ---------------------------------------------------------------------------

    def join(self, after: float) -> WorkerId:
        """A new worker comes ``after`` seconds from now."""
        worker = WorkerId(f"sim-{next(self._names)}")

        def come() -> list[Report]:
            self._stand[worker] = None
            return [WorkerJoined(worker, self._now)]

        self._at(after, come)
        return worker

    def kill(self, worker: WorkerId, after: float) -> None:
        """A worker dies ``after`` seconds from now, with the chain it runs."""

        def die() -> list[Report]:
            if worker not in self._stand:
                return []
            del self._stand[worker]
            self._flights = {id: flight for id, flight in self._flights.items() if flight.worker != worker}
            return [WorkerLeft(worker, self._now)]

        self._at(after, die)

    def _at(self, after: float, act: Callable[[], list[Report]]) -> None:
        heapq.heappush(self._agenda, (self._now + after, next(self._order), act))

    # --- Executor -----------------------------------------------------------------------------------------

    def open(self, trainable: object, checkpoints: CheckpointStore | None) -> Environment:
        return Environment({"simulated": "1"})

    def use(self, checkpoints: CheckpointStore) -> None:
        """Checkpoints are imaginary here."""

    def try_out(self, initial: Mapping[str, Scalar]) -> dict[str, float] | None:
        return None

    def start(self, worker: WorkerId, chain: Chain) -> None:
        if worker not in self._stand or any(f.worker == worker for f in self._flights.values()):
            raise InternalError(f"{chain.id} was started on {worker}, which is not an idle worker")
        source: Literal["fresh", "continued", "live", "disk"] = "fresh"
        load = 0.0
        if chain.source is not None:
            if chain.source not in self.kept:
                ended = ChainEnded(chain.id, worker, "unreadable", self._now, message="not kept")
                self._at(0.0, lambda: [ended])
                return
            continued = self._stand[worker] == chain.source
            source, load = ("continued", 0.0) if continued else ("disk", self._load_seconds)
        course = Course(chain)
        start = course.stages[0].start
        flight = _Flight(chain, worker, course, (0, start), self._now + load, start, load, source)
        self._flights[chain.id] = flight
        self._aim(flight, extra=load)

    def amend(self, amendment: Amendment) -> None:
        flight = self._flights.get(amendment.chain)
        if flight is None:
            return
        place, left_over = self._progress(flight)
        missed = flight.course.amend(amendment, place)
        if missed:
            node = flight.course.stages[place[0]].node
            late: list[Report] = [
                BoundaryMissed(flight.chain.id, flight.worker, id, step, place[1] if id == node else step)
                for id, step in missed
            ]
            self._at(0.0, lambda: late)
        flight.place, flight.since = place, self._now - left_over
        self._aim(flight, extra=-left_over)

    def stop(self, chain: ChainId) -> None:
        flight = self._flights.get(chain)
        if flight is None:
            return
        place, left_over = self._progress(flight)
        flight.version += 1
        seconds = self._seconds_at(flight, place)
        steps = place[1] - flight.counted_from
        if left_over > 0:
            steps += 1
        wait = seconds - left_over if left_over > 0 else 0.0

        def stopped() -> list[Report]:
            del self._flights[chain]
            self._stand[flight.worker] = None
            return [
                ChainEnded(
                    chain,
                    flight.worker,
                    "stopped",
                    self._now,
                    node=flight.course.stages[place[0]].node,
                    step=place[1],
                    wasted_seconds=steps * seconds,
                    wasted_steps=steps,
                )
            ]

        self._at(wait, self._if_current(flight, stopped))

    def wait(self, timeout: float | None) -> list[Report]:
        reports: list[Report] = []
        if timeout == 0.0 and self._agenda and self._agenda[0][0] > self._now:
            return reports  # nobody waits: time stands still
        while self._agenda and (not reports or self._agenda[0][0] <= self._now):
            self._now, _, act = heapq.heappop(self._agenda)
            reports += act()
        if timeout and not reports:
            self._now += timeout  # nothing is to come, and the caller waits for the time alone
        return reports

    def clock(self) -> float:
        return self._now

    def close(self) -> None:
        self._agenda.clear()

    # --- the course of a chain ----------------------------------------------------------------------------

    def _seconds_at(self, flight: _Flight, place: tuple[int, int]) -> float:
        if not callable(self._step_seconds):
            return self._step_seconds
        stage = flight.course.stages[place[0]]
        step = min(place[1], stage.stop - 1)
        return self._step_seconds({name: form.value(step) for name, form in stage.forms.items()})

    def _seconds_between(self, flight: _Flight, index: int, start: int, stop: int) -> float:
        """Seconds for steps ``[start, stop)`` of a stage; in one go where they all take the same time."""
        if not callable(self._step_seconds) or not any(map(varies, flight.course.stages[index].forms.values())):
            return (stop - start) * self._seconds_at(flight, (index, start))
        return sum(self._seconds_at(flight, (index, at)) for at in range(start, stop))

    def _progress(self, flight: _Flight) -> tuple[tuple[int, int], float]:
        """Where the chain stands now, and the seconds spent on the step under way (below 0: it is still loading)."""
        index, step = flight.place
        spent = self._now - flight.since
        if spent <= 0:
            return flight.place, spent
        first = min(flight.course.boundaries)
        while (index, step) < first:
            stop = first[1] if index == first[0] else flight.course.stages[index].stop
            whole = self._seconds_between(flight, index, step, stop)
            if spent < whole - 1e-12:
                break
            spent -= whole
            index, step = (index, stop) if index == first[0] else (index + 1, stop)
        while (index, step) < first:
            seconds = self._seconds_at(flight, (index, step))
            if spent < seconds - 1e-12:
                break
            uniform = not callable(self._step_seconds)
            steps = max(1, int(spent / seconds)) if uniform and seconds else 1
            spent -= steps * seconds
            step += steps
        return (index, step), spent

    def _aim(self, flight: _Flight, extra: float) -> None:
        """Put the chain's next boundary on the agenda."""
        flight.version += 1
        first = min(flight.course.boundaries)
        index, step = flight.place
        seconds = extra
        while index < first[0]:
            stop = flight.course.stages[index].stop
            seconds += self._seconds_between(flight, index, step, stop)
            index, step = index + 1, stop
        seconds += self._seconds_between(flight, index, step, first[1])
        boundary = flight.course.boundaries[first]
        if boundary.evaluate:
            seconds += self._evaluate_seconds
        if boundary.keep:
            seconds += self._save_seconds
        self._at(max(0.0, seconds), self._if_current(flight, lambda: self._reach(flight, first)))

    def _if_current(self, flight: _Flight, act: Callable[[], list[Report]]) -> Callable[[], list[Report]]:
        version = flight.version

        def guarded() -> list[Report]:
            if self._flights.get(flight.chain.id) is not flight or flight.version != version:
                return []
            return act()

        return guarded

    def _reach(self, flight: _Flight, place: tuple[int, int]) -> list[Report]:
        boundary = flight.course.boundaries.pop(place)
        index, step = place
        stage = flight.course.stages[index]
        start = flight.counted_from if flight.place[0] == index else stage.start
        trained = self._seconds_between(flight, index, start, step)
        if boundary.keep:
            self.kept.add(boundary.key)
            self._stand[flight.worker] = boundary.key
        if step > start:
            self.trained.append((stage.node, start, step))
        self.busy_seconds += trained + flight.load
        reports: list[Report] = [
            BoundaryReached(
                chain=flight.chain.id,
                worker=flight.worker,
                node=boundary.node,
                start=start,
                step=step,
                at=self._now,
                train_seconds=trained,
                load_seconds=flight.load,
                evaluate_seconds=self._evaluate_seconds if boundary.evaluate else 0.0,
                save_seconds=self._save_seconds if boundary.keep else 0.0,
                source=flight.source,
                metrics=to_metrics(self._measure(boundary.key, step)) if boundary.evaluate else None,
                kept=Kept(boundary.key, self._state_bytes, boundary.key) if boundary.keep else None,
            )
        ]
        flight.load, flight.source = 0.0, None
        flight.place, flight.since, flight.counted_from = place, self._now, step
        if place == flight.course.end or not flight.course.boundaries:
            del self._flights[flight.chain.id]
            reports.append(ChainEnded(flight.chain.id, flight.worker, "done", self._now, node=stage.node, step=step))
        else:
            self._aim(flight, extra=0.0)
        return reports
