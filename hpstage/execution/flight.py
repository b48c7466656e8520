"""Flight: a chain while a worker trains it: its position, values, logs and seconds since its last report."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import msgspec

from hpstage.execution import device_memory
from hpstage.execution.course import Course
from hpstage.execution.saving import Saves
from hpstage.execution.verification import ForkVerification
from hpstage.plan.facts import NO_FROZEN_WORK, ChainId, FrozenWork, StateReached, WorkerId, to_metrics
from hpstage.plan.messages import Boundary, Chain, Stage
from hpstage.schedule import Scalar, varies
from hpstage.training.step_log import Recorder


class Values(dict[str, Scalar]):
    """Every hyperparameter's value at the current step of a stage; only varying ones are recomputed."""

    def __init__(self, stage: Stage) -> None:
        super().__init__({name: form.value(stage.start) for name, form in stage.forms.items()})
        self._varying = [(name, form) for name, form in stage.forms.items() if varies(form)]

    def move(self, step: int) -> None:
        for name, form in self._varying:
            self[name] = form.value(step)


@dataclass(frozen=True, slots=True)
class Due:
    """The step that a chain trains next, and the values at it."""

    step: int
    values: Values


class Gathering(msgspec.Struct, frozen=True, tag=True):
    """The leader of a gang waits at ``address`` for the other workers; the executor must send them there."""

    chain: ChainId
    address: str


@dataclass(frozen=True, slots=True)
class Took:
    """Seconds of a step of a chain that shares its worker with other chains. ``share``: the chain's share; ``whole``:
    the sum of all chains' shares; ``alone``: the estimate for a worker without other chains; ``frozen``: the step's
    work on frozen layers."""

    share: float
    whole: float
    alone: float
    frozen: FrozenWork = NO_FROZEN_WORK


class Flight:
    """A running chain: its position, and its work since its last report."""

    def __init__(self, chain: Chain, saves: Saves) -> None:
        self.chain = chain
        self.workers = 1 + len(chain.gang)
        self.saves = saves
        self.course = Course(chain)
        self.index = 0
        self.stage = self.course.stages[0]
        self.step = self.since = self.stage.start  # ``since``: the first step not reported yet
        self.recorder = Recorder(self.step)
        self.kept = self.step  # step at which a state was last kept, or training started
        self.announced = False  # whether a report at ``step`` was announced
        self.parent = chain.source  # the last saved state on the path
        self.source: Literal["fresh", "continued", "live", "disk"] | None = None
        self.load_seconds = 0.0
        self.train_seconds = 0.0  # its share; next line: of all chains, and estimated without other chains
        self.whole_seconds = self.alone_seconds = 0.0
        self.frozen = NO_FROZEN_WORK
        self.peak_bytes: int | None = None  # of device memory, while the clock ran
        self.at_boundary = False
        self.verification: ForkVerification | None = None
        self._began: float | None = None
        self._kept_at = self._turned_at = time.perf_counter()  # time of ``kept``; start time of the current step

    def train(self, took: Took) -> None:
        """Add seconds of training, and work on frozen layers."""
        self.train_seconds += took.share
        self.whole_seconds += took.whole
        self.alone_seconds += took.alone
        self.frozen += took.frozen

    @property
    def part(self) -> float:
        """The share of the worker's time that the chain had since its last report; 1 if it trained no other chain."""
        return self.train_seconds / self.whole_seconds if self.whole_seconds > self.train_seconds else 1.0

    @property
    def alone(self) -> float | None:
        """The estimated seconds of training on a worker that trains no other chain; ``None`` on such a worker."""
        return self.alone_seconds if self.part < 1.0 else None

    def reached(
        self,
        boundary: Boundary,
        worker: WorkerId,
        at: float,
        *,
        metrics: Mapping[str, float] | None,
        evaluate_seconds: float,
        save_seconds: float,
        alone_seconds: float | None,
    ) -> StateReached:
        """Return the report of a boundary. Seconds are given as elapsed seconds, and reported as worker-seconds."""
        return StateReached(
            chain=self.chain.id,
            worker=worker,
            node=boundary.node,
            start=self.since,
            step=boundary.step,
            at=at,
            train_seconds=self.train_seconds * self.workers,
            load_seconds=self.load_seconds * self.workers,
            evaluate_seconds=evaluate_seconds * self.workers,
            save_seconds=save_seconds * self.workers,
            source=self.source,
            metrics=None if metrics is None else to_metrics(metrics),
            peak_bytes=self.peak_bytes if self.step > self.since else None,
            workers=self.workers * self.part,
            alone_seconds=alone_seconds,
            frozen=self.frozen if self.frozen.batches else None,
        )

    def has_reported(self) -> None:
        """Reset the counts since the last report."""
        self.since, self.peak_bytes, self.frozen = self.step, None, NO_FROZEN_WORK
        self.train_seconds = self.whole_seconds = self.alone_seconds = 0.0
        self.source, self.load_seconds = None, 0.0

    def begin_step(self) -> None:
        """Set the chain's own boundary after the next step, if one is due, and record whether a report is announced
        there."""
        step, course, chain = self.step + 1, self.course, self.chain
        due = course.keeps(step)
        if chain.keep_seconds is not None:
            now = time.perf_counter()
            due |= now - self._kept_at + now - self._turned_at > chain.keep_seconds  # one more such step exceeds it
            self._turned_at = now
        if step not in course.boundaries:
            if due:
                course.boundaries[step] = course.own(step)
            elif chain.time_first and self.source is not None:
                course.boundaries[step] = course.own(step, keep=False)
        boundary = course.boundaries.get(step)
        self.announced = boundary is not None and (boundary.evaluate or boundary.keep)

    def has_kept(self) -> None:
        """Record that the state at the current step is kept."""
        self.kept, self._kept_at = self.step, time.perf_counter()

    def take_back(self) -> None:
        """After a state that could not be written, count the later boundaries as unreported."""
        lost = self.saves.withheld()
        if lost:
            self.since = lost[0].start
            # Elapsed seconds: reports have the seconds of all workers.
            self.train_seconds += sum(reached.train_seconds for reached in lost) / self.workers
            self.load_seconds += sum(reached.load_seconds for reached in lost) / self.workers

    def turn(self) -> None:
        """Move to the next stage. The end of a stage is always a boundary, so everything before it was reported."""
        self.index += 1
        self.stage = self.course.stages[self.index]
        self.since = self.stage.start

    def start_clock(self) -> None:
        device_memory.reset_peak()
        self._began = time.perf_counter()

    def stop_clock(self) -> None:
        if self._began is not None:
            passed = time.perf_counter() - self._began
            self.train(Took(passed, passed, passed))
            self._began = None
            peak = device_memory.peak_bytes()
            if peak is not None:
                self.peak_bytes = max(self.peak_bytes or 0, peak)
