"""Reduce on plateau: a schedule that a metric decides while its trial is trained, by ``search/plateaus.py``. Pure.

Until a value is reduced, the schedule is constant. So trials that differ in their patience are one branch until the
metric separates them.
"""

from __future__ import annotations

import inspect
import math
from typing import Literal

import msgspec

from hpstage.errors import ScheduleError
from hpstage.errors.arguments import METRIC, one_of, optional
from hpstage.schedule.forms import Constant
from hpstage.schedule.scalars import count, real
from hpstage.schedule.segments import Schedule, Segment

Mode = Literal["min", "max"]


class Plateau(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """ReduceLROnPlateau for one hyperparameter; made by :func:`plateau`, possibly after other schedules."""

    value: float
    mode: Mode | None
    factor: float
    patience: int
    threshold: float
    threshold_mode: Literal["rel", "abs"]
    cooldown: int
    min_lr: float
    eps: float
    every: int
    metric: str | None
    before: Schedule = Schedule(())
    length: int | None = None

    def __repr__(self) -> str:
        defaults = list(inspect.signature(plateau).parameters.values())[1:]
        words = [f", {p.name}={getattr(self, p.name)!r}" for p in defaults if getattr(self, p.name) != p.default]
        text = f"plateau({self.value!r}{''.join(words)})"
        text = f"{self.before!r}.then({text})" if self.start else text
        return text if self.length is None else f"{text}.until({self.length})"

    @property
    def start(self) -> int:
        """The step from which the metric is observed."""
        length = self.before.length
        assert length is not None
        return length

    @property
    def first_drop(self) -> int:
        """The first step at which the value can be reduced: the first metric is always the best so far."""
        return self.start + self.every * (self.patience + 2)

    def until(self, step: int) -> Plateau | Schedule:
        """Return the first ``step`` steps; ScheduleError if there are fewer."""
        stop = count("step", step)
        if self.length is not None and stop > self.length:
            raise ScheduleError(f"the schedule ends at step {self.length} and cannot be cut at step {stop}")
        return self.before.until(stop) if stop <= self.start else msgspec.structs.replace(self, length=stop)

    def then(self, other: object) -> Schedule:
        raise ScheduleError(
            "nothing can follow s.plateau(...), whose last value is not known in advance; make it the last schedule"
        )

    def since(self, step: int) -> Schedule:
        raise ScheduleError("s.plateau(...) has no .since(step): its values are not known in advance; use .until(step)")

    def after(self, before: Schedule) -> Plateau:
        """Return this schedule as the continuation of another; its steps count from the joint."""
        joint = before.length
        if joint is None:
            raise ScheduleError("nothing can follow a schedule without an end; bound it with .until(step)")
        length = None if self.length is None else self.length + joint
        return msgspec.structs.replace(self, before=before.then(self.before), length=length)

    def looks(self, stop: int) -> range:
        """Return the steps, within the first ``stop``, after which the metric decides how to continue."""
        return range(self.start + self.every, stop, self.every)


class ReduceOnPlateau:
    """A plateau schedule as decided so far by its metric: torch's ReduceLROnPlateau, step by step.

    Args:
        plateau: the schedule, with its ``metric`` and ``mode`` set.
    """

    def __init__(self, plateau: Plateau) -> None:
        self.plateau = plateau
        self._value = plateau.value
        self._best = math.inf if plateau.mode == "min" else -math.inf
        self._bad = 0
        self._cooldown = 0
        self._drops: list[tuple[int, float]] = []

    def see(self, step: int, metric: float) -> bool:
        """Observe the metric of the state after ``step`` steps; return whether the value falls from this step on."""
        plateau = self.plateau
        if self._better(metric):
            self._best, self._bad = metric, 0
        else:
            self._bad += 1
        if self._cooldown > 0:
            self._cooldown -= 1
            self._bad = 0
        if self._bad <= plateau.patience:
            return False
        self._cooldown, self._bad = plateau.cooldown, 0
        lower = max(self._value * plateau.factor, plateau.min_lr)
        if not self._value - lower > plateau.eps:
            return False
        self._value = lower
        self._drops.append((step, lower))
        return True

    def schedule(self) -> Schedule:
        """Return the schedule as decided so far: with the last value to its end, or without an end."""
        starts = [self.plateau.start, *(step for step, _ in self._drops)]
        values = [self.plateau.value, *(value for _, value in self._drops)]
        segments = [
            Segment(Constant(value), None if stop is None else stop - start)
            for value, start, stop in zip(values, starts, [*starts[1:], self.plateau.length], strict=True)
        ]
        return Schedule((*self.plateau.before.segments, *segments))

    def _better(self, metric: float) -> bool:
        plateau, best = self.plateau, self._best
        sign = -1.0 if plateau.mode == "min" else 1.0
        if plateau.threshold_mode == "rel":
            bar = best * (1.0 + sign * plateau.threshold)
        else:
            bar = best + sign * plateau.threshold
        return metric < bar if plateau.mode == "min" else metric > bar


def plateau(
    value: float,
    mode: Mode | None = None,
    factor: float = 0.1,
    patience: int = 10,
    threshold: float = 1e-4,
    threshold_mode: Literal["rel", "abs"] = "rel",
    cooldown: int = 0,
    min_lr: float = 0.0,
    eps: float = 1e-8,
    *,
    metric: str | None = None,
    every: int = 1,
) -> Plateau:
    """ReduceLROnPlateau: multiplied by ``factor`` once the metric has not improved for more than ``patience`` looks.

    A *look* is every ``every`` steps: the state is evaluated, and its metric decides the value of the following steps,
    as in ``scheduler.step(metric)`` after each epoch. May follow another schedule, as its last part:
    ``linear(0.1, total_iters=5).until(5).then(plateau(0.1))`` looks after steps 6, 7 and so on.

    Args:
        value: the first value.
        mode: whether the metric should fall (``"min"``) or rise (``"max"``). By default its direction in the study, or
            ``"min"`` if it is not an objective.
        threshold: by how much a metric must be better than the best: relative to the best, or absolute with
            ``threshold_mode="abs"``.
        cooldown: number of looks after a reduction that do not count as bad.
        min_lr: minimum of the value, also for other hyperparameters than the learning rate.
        eps: smaller reductions are skipped.
        metric: one that ``evaluate`` returns; by default the study's (first) objective.
        every: steps from one look to the next. The state of each look is evaluated and saved: with large models, look
            less often, or set a ``checkpoint_budget``.
    """
    ratio = real("factor", factor)
    if not ratio < 1.0:
        raise ScheduleError(f"factor is {factor!r}; it must be below 1")
    optional(one_of("min", "max")).of("mode", mode, ScheduleError)  # None: the study's direction
    one_of("rel", "abs").of("threshold_mode", threshold_mode, ScheduleError)
    optional(METRIC).of("metric", metric, ScheduleError)
    return Plateau(
        real("value", value),
        mode,
        ratio,
        count("patience", patience),
        real("threshold", threshold),
        threshold_mode,
        count("cooldown", cooldown),
        real("min_lr", min_lr),
        real("eps", eps),
        count("every", every, least=1),
        metric,
    )
