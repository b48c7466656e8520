"""SimulatedExecutor: workers on a virtual clock, under the real driver.

For tests of scheduling and recovery, and for predicting makespans. Nothing is trained, and time jumps from event to
event.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal

from hpstage.checkpoints.store import CheckpointStore
from hpstage.errors import InternalError
from hpstage.execution.course import Course
from hpstage.execution.simulated_chain import SimulatedChain, StepSeconds
from hpstage.execution.simulated_cluster import SimulatedCluster
from hpstage.executor import Environment, Executor
from hpstage.plan.facts import ChainId, ForkVerified, Kept, Span, StateKey, StateReached, WorkerId, to_metrics
from hpstage.plan.messages import (
    Amendment,
    BoundaryMissed,
    BoundaryReached,
    Chain,
    ChainEnded,
    Report,
    StepsMeasured,
    host_of,
    names_of,
)
from hpstage.plan.step_times import ALONE, StepTimes
from hpstage.schedule import Scalar

Measure = Callable[[StateKey, int], dict[str, float]]


def value_of_key(key: StateKey, step: int) -> dict[str, float]:
    """Return a metric that depends only on the state, uniform in [0, 1)."""
    return {"value": int(key, 16) / 16 ** len(key)}


class SimulatedExecutor(Executor):
    """Workers on a virtual clock.

    Args:
        workers: number of workers, or a cluster of them, on which other executors may train, too.
        virtual_nodes: maximum number of workers that train a chain together.
        speedup: returns the factor by which a number of workers trains faster than one; by default, that number.
        gather_seconds: time that the workers of a gang need to find each other.
        step_seconds: seconds per step, or a function of the values at that step.
        evaluate_seconds, load_seconds, save_seconds: cost of each such operation.
        measure: returns the metrics of a state; by default ``{"value": ...}`` from its key.
        state_bytes: size of each checkpoint.
        kept: keys in the (imaginary) checkpoint store; pass one set to several executors to let states outlive them.
        step_times: duration of a step of several chains on one worker, relative to one chain; by default, chains are
            trained one after another. A worker knows it from the start, and reports it.
    """

    def __init__(
        self,
        workers: int | SimulatedCluster,
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
        step_times: StepTimes = ALONE,
    ) -> None:
        self.cluster = workers if isinstance(workers, SimulatedCluster) else SimulatedCluster(workers)
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
        self._flights: dict[ChainId, SimulatedChain] = {}
        self._on: dict[WorkerId, SimulatedChain] = {}  # the running chain of each busy worker
        self.trained: list[Span] = []  # spans finished by any worker
        self.inbox: list[Report] = []
        self.cluster.attach(self)

    # --- calls of the cluster -----------------------------------------------------------------------------

    def trains_on(self, slots: Iterable[WorkerId]) -> bool:
        return any(slot in self._on for slot in slots)

    def release(self, slots: Sequence[WorkerId]) -> None:
        for flight in self._on_any(slots):
            self.stop(flight.chain.id, keep=True)

    def lose(self, slots: Sequence[WorkerId]) -> None:
        for flight in self._on_any(slots):
            self._land(flight)
            if flight.worker not in slots:
                gone = next(worker for worker in flight.workers if worker in slots)
                now = self.clock()
                self.inbox.append(ChainEnded(flight.chain.id, flight.worker, "lost", now, message=f"{gone} died"))

    def _on_any(self, slots: Sequence[WorkerId]) -> list[SimulatedChain]:
        return list({id(self._on[slot]): self._on[slot] for slot in slots if slot in self._on}.values())

    # --- Executor -----------------------------------------------------------------------------------------

    def open(self, trainable: object, checkpoints: CheckpointStore | None) -> Environment:
        return Environment({"simulated": "1"})

    def use(self, checkpoints: CheckpointStore) -> None:
        """Do nothing: checkpoints are imaginary here."""

    def try_out(self, initial: Mapping[str, Scalar]) -> dict[str, float] | None:
        return None

    def start(self, worker: WorkerId, chain: Chain) -> None:
        workers = {worker, *chain.gang}
        live = self.cluster.live
        if len(workers) <= len(chain.gang) or self.cluster.busy(workers) or not workers <= live.keys():
            raise InternalError(f"{chain.id} was started on {sorted(workers)}, which are not all idle workers")
        source: Literal["fresh", "continued", "live", "disk"] = "fresh"
        load = 0.0
        if chain.source is not None:
            if chain.source not in self.kept:
                ended = ChainEnded(chain.id, worker, "unreadable", self.clock(), message="not kept")
                self.cluster.at(0.0, lambda: self.inbox.append(ended))
                return
            continued = live[worker] == chain.source
            source, load = ("continued", 0.0) if continued else ("disk", self._load_seconds)
        if chain.gang:
            load += self._gather_seconds
        course = Course(chain)
        start = course.stages[0].start
        begins = self.clock() + load
        speed = self._speedup(len(workers)) / self.cluster.slowness(workers)
        flight = SimulatedChain(
            chain, worker, course, self._step_seconds, start, begins, start, start, begins, load, source, speed
        )
        self._flights[chain.id] = flight
        self._on.update(dict.fromkeys(flight.workers, flight))
        self._verify(flight, after=load)
        self._aim(flight, extra=load)
        self._share(host_of(worker))
        if self.slots > 1 and not chain.step_times:
            seconds = self._step_times.up_to(self.slots).seconds
            self.inbox.append(StepsMeasured(chain.id, worker, seconds, self.clock()))

    def amend(self, amendment: Amendment) -> None:
        flight = self._flights.get(amendment.chain)
        if flight is None:
            return
        place, left_over = flight.progress(self.clock())
        missed = flight.course.amend(amendment, place)
        if missed:
            late: list[Report] = [
                BoundaryMissed(flight.chain.id, flight.worker, ref.node, ref.step, place) for ref in missed
            ]
            self.cluster.at(0.0, lambda: self.inbox.extend(late))
        flight.place, flight.since = place, self.clock() - left_over
        self._aim(flight, extra=-left_over)

    def stop(self, chain: ChainId, *, keep: bool = False) -> None:
        flight = self._flights.get(chain)
        if flight is None:
            return
        place, left_over = flight.progress(self.clock())
        flight.place, flight.since = place, self.clock() - left_over
        stands = left_over <= 1e-12 or place in flight.course.boundaries
        flight.halt, flight.keep = place if stands else place + 1, keep
        self._aim(flight, extra=-left_over)

    def adapt(self, demand: Callable[[float, float], int]) -> None:
        self.cluster.follow(demand)

    def wait(self, timeout: float | None) -> list[Report]:
        self.cluster.advance(timeout)
        reports, self.inbox = self.inbox, []
        return reports

    @property
    def pool(self) -> str:
        return self.cluster.pool

    @property
    def present(self) -> int:
        return self.cluster.workers

    @property
    def slots(self) -> int:
        return self.cluster.slots

    def clock(self) -> float:
        return self.cluster.now

    def close(self) -> None:
        self._flights.clear()
        self._on.clear()
        self.cluster.detach(self)

    # --- the course of a chain ----------------------------------------------------------------------------

    def _aim(self, flight: SimulatedChain, extra: float) -> None:
        """Schedule the chain's arrival at its next boundary, or at the step where it stops."""
        flight.version += 1
        place = flight.next_place()
        seconds = extra + flight.seconds_between(flight.place, place)
        boundary = flight.course.boundaries.get(place)
        if boundary is not None:
            seconds += self._evaluate_seconds * boundary.evaluate + self._save_seconds * boundary.keep
        version = flight.version

        def arrive() -> None:
            if self._flights.get(flight.chain.id) is flight and flight.version == version:
                self._arrive(flight, place)

        self.cluster.at(max(0.0, seconds), arrive)

    def _share(self, host: WorkerId) -> None:
        """Set the speed of a worker's chains according to their current number."""
        if self.slots == 1:
            return
        on = [self._on[slot] for slot in names_of(host, self.slots) if slot in self._on]
        sharing = [flight for flight in on if host_of(flight.worker) == host]
        for flight in sharing:
            if flight.sharing == len(sharing):
                continue
            place, left_over = flight.progress(self.clock())
            training = left_over > 0 and place < min(flight.course.boundaries)  # not loading, evaluating or saving
            flight.count(place, left_over if training else 0.0)
            slower = self._step_times.slowness(len(sharing)) / self._step_times.slowness(flight.sharing)
            flight.sharing, flight.speed = len(sharing), flight.speed / slower
            left_over *= slower if training else 1.0
            flight.place, flight.since = place, self.clock() - left_over
            self._aim(flight, extra=-left_over)

    def _verify(self, flight: SimulatedChain, after: float) -> None:
        """If the next stage verifies its fork, report the verification after its first step, as workers do."""
        if flight.place == flight.course.stages[-1].stop:
            return  # a saved state is only evaluated
        stage = flight.course.stage_at(flight.place + 1)
        if not stage.verify or stage.node in flight.verified:
            return
        flight.verified.add(stage.node)
        chain, start = flight.chain.id, flight.place

        def verified() -> None:
            if self._flights.get(chain) is flight:
                self.inbox.append(ForkVerified(chain, flight.worker, stage.node, start, 1, 0.0, self.clock()))

        self.cluster.at(after + flight.seconds_of(stage, start) / flight.speed, verified)

    def _arrive(self, flight: SimulatedChain, place: int) -> None:
        course, chain, worker = flight.course, flight.chain, flight.worker
        if place in course.boundaries:
            self.inbox.append(self._reach(flight, place))
        done = place == course.end or not course.boundaries
        if not done and place != flight.halt:
            self._verify(flight, after=0.0)
            self._aim(flight, extra=0.0)
            return
        self._land(flight)
        self._share(host_of(worker))
        wasted = place - flight.counted_from
        flight.count(place)
        for other in flight.workers:
            self.cluster.live[other] = None if wasted else self.cluster.live[worker]
        ended = ChainEnded(
            chain.id,
            worker,
            "done" if done else "stopped",
            self.clock(),
            node=course.stage_at(place).node,
            step=place,
            wasted_seconds=flight.share * len(flight.workers),
            wasted_steps=wasted,
        )
        self.inbox.append(ended)
        for other in flight.workers:
            self.cluster.chain_ended(other)

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
            flight.kept, flight.kept_at = place, self.clock()
        self.cluster.live[flight.worker] = boundary.key if boundary.keep else None
        if place > start:
            self.trained.append(Span(boundary.node, start, place))
        reached = StateReached(
            chain=flight.chain.id,
            worker=flight.worker,
            node=boundary.node,
            start=start,
            step=place,
            at=self.clock(),
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
        flight.place, flight.since, flight.counted_from = place, self.clock(), place
        return BoundaryReached(reached)
