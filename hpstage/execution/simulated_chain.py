"""A chain on a simulated worker: its step at a given time, and its time to a given step. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from hpstage.execution.course import Course
from hpstage.plan.facts import NodeId, WorkerId
from hpstage.plan.messages import Chain, Stage
from hpstage.schedule import Scalar, varies

StepSeconds = Callable[[Mapping[str, Scalar]], float]


@dataclass(slots=True, eq=False)
class SimulatedChain:
    """The course of a chain in time. Times are seconds on the clock of its executor."""

    chain: Chain
    worker: WorkerId
    course: Course
    step_seconds: float | StepSeconds
    place: int  # the step it had reached at ``since``
    since: float
    counted_from: int  # first step not yet reported
    kept: int  # step at which a state was last kept, or training began
    kept_at: float  # time of ``kept``
    load: float
    source: Literal["fresh", "continued", "live", "disk"] | None
    speed: float = 1.0  # relative to one worker that trains only this chain
    sharing: int = 1  # how many chains its worker trains, itself included
    alone: float = 0.0  # since its last report: seconds of training on one worker without other chains
    share: float = 0.0  # its share of ``passed``
    passed: float = 0.0  # elapsed seconds of training
    own: int | None = None  # a boundary ahead that the chain has set itself
    halt: int | None = None  # step at which the driver wants it to stop
    keep: bool = False  # whether to keep its state there
    verified: set[NodeId] = field(default_factory=set)  # where a fork was verified
    version: int = 0
    _even: dict[NodeId, float | None] = field(default_factory=dict)  # seconds per step, if constant
    _uneven: dict[int, float] = field(default_factory=dict)  # seconds of single steps of other nodes

    @property
    def workers(self) -> tuple[WorkerId, ...]:
        return (self.worker, *self.chain.gang)

    # --- seconds ------------------------------------------------------------------------------------------

    def seconds_of(self, stage: Stage, step: int) -> float:
        """Return the seconds of a step, on one worker."""
        if not callable(self.step_seconds):
            return self.step_seconds
        even = self._even_seconds(stage)
        if even is not None:
            return even
        if step not in self._uneven:
            self._uneven[step] = self.step_seconds({name: form.value(step) for name, form in stage.forms.items()})
        return self._uneven[step]

    def _even_seconds(self, stage: Stage) -> float | None:
        """Return the seconds of each step of a stage, if all take the same time."""
        if not callable(self.step_seconds):
            return self.step_seconds
        if stage.node not in self._even:
            values = {name: form.value(stage.start) for name, form in stage.forms.items()}
            varied = any(map(varies, stage.forms.values()))
            self._even[stage.node] = None if varied else self.step_seconds(values)
        return self._even[stage.node]

    def seconds_between(self, start: int, stop: int) -> float:
        """Return the seconds for steps ``[start, stop)``; O(1) for each stage whose steps take the same time."""
        seconds = 0.0
        index = self.course.index_at(start + 1)
        while start < stop:
            stage = self.course.stages[index]
            until = min(stop, stage.stop)
            even = self._even_seconds(stage)
            if even is not None:
                seconds += (until - start) * even
            else:
                seconds += sum(self.seconds_of(stage, step) for step in range(start, until))
            start, index = until, index + 1
        return seconds / self.speed

    def walk(self, step: int, last: int, seconds: float) -> tuple[int, float]:
        """Return the step, at most ``last``, that training from ``step`` reaches in ``seconds``, and the time left."""
        while step < last:
            stage = self.course.stage_at(step + 1)
            stop = min(stage.stop, last)
            whole = self.seconds_between(step, stop)
            if seconds >= whole - 1e-12:
                seconds, step = seconds - whole, stop
                continue
            even = self._even_seconds(stage) is not None
            while seconds >= (each := self.seconds_of(stage, step) / self.speed) - 1e-12:
                steps = max(1, int(seconds / each)) if even and each else 1
                seconds, step = seconds - steps * each, step + steps
            break
        return step, seconds

    def progress(self, now: float) -> tuple[int, float]:
        """Return the current step, and the seconds spent on the one in progress (below 0: still loading)."""
        spent = now - self.since
        if spent <= 0:
            return self.place, spent
        return self.walk(self.place, min(self.course.boundaries), spent)

    # --- boundaries ---------------------------------------------------------------------------------------

    def set_own(self) -> None:
        """Add the chain's own next boundary (``keep_every``, ``keep_seconds``, ``time_first``) if it comes before the
        next requested one."""
        course, chain, place = self.course, self.chain, self.place
        if self.own is not None and self.own > place:
            course.boundaries.pop(self.own, None)  # it was computed before the chain was amended
        first, own, keep = min(course.boundaries), None, True
        if chain.keep_every is not None:
            own = (place // chain.keep_every + 1) * chain.keep_every
        elif chain.keep_seconds is not None:
            left = chain.keep_seconds - (self.since - self.kept_at)
            own = max(place + 1, self.walk(place, first, left)[0])
        if chain.time_first and self.source is not None:
            own, keep = place + 1, False
        self.own = own if own is not None and place < own < first else None
        if self.own is not None:
            course.boundaries[self.own] = course.own(self.own, keep=keep)

    def next_place(self) -> int:
        """Return the step of the next boundary, or the step at which the chain stops if that comes first."""
        self.set_own()
        place = min(self.course.boundaries)
        if self.halt is not None:
            place = min(place, self.halt)
            if self.keep and place == self.halt > self.kept:
                self.course.keep_at(place)
        return place

    # --- counting -----------------------------------------------------------------------------------------

    def count(self, place: int, left_over: float = 0.0) -> None:
        """Count what was trained since the last count, up to a step and ``left_over`` seconds into the next."""
        alone = (self.seconds_between(self.counted_from, place) + left_over) * self.speed
        passed = (alone - self.alone) / self.speed
        self.alone = alone
        self.share += passed / self.sharing
        self.passed += passed
