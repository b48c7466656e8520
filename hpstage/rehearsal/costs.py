"""Costs of steps, evaluations and checkpoints, taken from a trained plan or measured over a few steps here."""

from __future__ import annotations

import math
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from hpstage.checkpoints import CheckpointStore, open_checkpoints
from hpstage.errors import UsageError
from hpstage.plan.facts import StateKey
from hpstage.plan.plan import SearchPlan
from hpstage.plan.step_times import StepTimes
from hpstage.schedule import Scalar
from hpstage.trainable import Elastic, Trainable, close
from hpstage.training.identity.environment import describe
from hpstage.training.identity.threads import restored
from hpstage.training.trainables import as_trainable

StepSeconds = Callable[[Mapping[str, Scalar]], float]

# Number of steps timed under each set of values, after one untimed step; timing ends earlier after _SECONDS.
_STEPS = 5
_SECONDS = 2.0
# A hyperparameter gets effects if they reduce the error to less than this share of the error without them.
_GAIN = 0.8


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Seconds and bytes of a workload. ``step_seconds`` is a number, or a function of the values at the step."""

    step_seconds: float | StepSeconds
    evaluate_seconds: float = 0.0
    load_seconds: float = 0.0
    save_seconds: float = 0.0
    checkpoint_bytes: int = 0
    shared_bytes: int = 0
    """Bytes of the parts that checkpoints share; each part is stored once."""
    step_times: StepTimes | None = None
    """Time of a step of several siblings that a worker trains as one, if it does; only ratios matter."""
    virtual_nodes: int = 1
    """Maximum number of workers that train a chain together."""


@dataclass(frozen=True, slots=True)
class Timing:
    """The ``seconds`` that ``steps`` steps took under given values."""

    values: Mapping[str, Scalar]
    steps: int
    seconds: float


def costs_of_plan(plan: SearchPlan) -> Costs:
    """Return the costs measured when the plan was trained: means; for steps, the fit of :func:`by_values`.

    Raises:
        UsageError: nothing was trained on the plan.
    """
    totals = plan.totals
    timings = []
    for node in plan.nodes:
        if node.trained and node.seconds > 0.0:
            constant = {
                name: form.value(node.start)
                for index, (name, form) in enumerate(zip(node.names, node.forms, strict=True))
                if index not in node.varying
            }
            timings.append(Timing(constant, node.trained, node.seconds))
    if not timings:
        raise UsageError("nothing was trained on this plan, so it has no costs; give a plan with trained steps")
    shared = sum(part.bytes for part, _ in plan.parts.values())
    # A chain that continues at the end of its worker's last chain loads nothing.
    entered = sum(number for source, number in totals.sources.items() if source != "continued")
    return Costs(
        step_seconds=by_values(timings),
        evaluate_seconds=totals.average_evaluate_seconds,
        load_seconds=totals.load_seconds / entered if entered else 0.0,
        save_seconds=totals.save_seconds / totals.saves if totals.saves else 0.0,
        checkpoint_bytes=(plan.kept_bytes - shared) // len(plan.kept) if plan.kept else 0,
        shared_bytes=shared,
        step_times=plan.step_times,
    )


@restored()
def measured(trainable: object, samples: Iterable[Mapping[str, Scalar]]) -> Costs:
    """Measure the costs of a trainable in this process.

    For each set of hyperparameter values in ``samples``, the trainable is set up and trained for a few steps from the
    first one, as for a trial with these values.
    """
    trained = as_trainable(trainable)
    try:
        return _measured(trained, samples)
    finally:
        close(trained)  # the caller may use the trainable in a search next


def _measured(trained: Trainable, samples: Iterable[Mapping[str, Scalar]]) -> Costs:
    describe(trained)  # also sets threads etc. as on workers; restored when the caller returns
    synchronize: Callable[[], None] = getattr(trained, "synchronize", lambda: None)
    timings = []
    for values in samples:
        trained.setup(values)
        trained.train(0, values)  # allocates, compiles, fills caches
        synchronize()
        seconds: list[float] = []
        while len(seconds) < _STEPS and sum(seconds) < _SECONDS:
            began = time.perf_counter()
            trained.train(len(seconds) + 1, values)
            synchronize()
            seconds.append(time.perf_counter() - began)
        timings.append(Timing(values, len(seconds), len(seconds) * statistics.median(seconds)))
    began = time.perf_counter()
    trained.evaluate()
    evaluate_seconds = time.perf_counter() - began
    with tempfile.TemporaryDirectory(prefix="hpstage-") as folder:
        place: CheckpointStore = open_checkpoints(folder, "0" * 32)
        trained.setup(values)
        place.meet(trained.state_dict())
        trained.train(0, values)
        before, key = StateKey("0" * 32), StateKey("1" * 32)
        place.save(before, trained.state_dict(), step=1, parent=None)  # also saves the parts that all states share
        trained.train(1, values)
        began = time.perf_counter()
        kept = place.save(key, trained.state_dict(), step=2, parent=before)
        saved = time.perf_counter()
        trained.load_state_dict(place.load(key))
        load_seconds = time.perf_counter() - saved
    return Costs(
        step_seconds=by_values(timings),
        evaluate_seconds=evaluate_seconds,
        load_seconds=load_seconds,
        save_seconds=saved - began,
        checkpoint_bytes=kept.own,
        shared_bytes=sum(part.bytes for part in kept.parts),
        virtual_nodes=trained.virtual_nodes if isinstance(trained, Elastic) else 1,
    )


def by_values(timings: Sequence[Timing]) -> StepSeconds:
    """Fit seconds per step as a product: the median, times a factor for each hyperparameter's value (0.6 for a batch
    size of 256, ...).

    The factor is the median ratio of the value's timings to their prediction without it: a few timings taken while the
    machine was busy do not change it. It is 1 for values that were not measured, and for all values of a hyperparameter
    that predicts the timings little better than chance.
    """
    median = statistics.median(timing.seconds / timing.steps for timing in timings)
    left = [math.log(timing.seconds / timing.steps / median) for timing in timings]
    effects: dict[str, dict[Scalar | None, float]] = {}
    # Few values first: otherwise a learning rate that differs in each trial would absorb the effect of the batch size.
    names = {name for timing in timings for name in timing.values}
    candidates = sorted(names, key=lambda name: (len({timing.values.get(name) for timing in timings}), name))
    while True:
        for name in candidates:
            values = [timing.values.get(name) for timing in timings]
            effect = _medians(values, left)
            rest = [one - effect[value] for one, value in zip(left, values, strict=True)]
            if _error(timings, rest, len(effect)) < _GAIN * _error(timings, left, 0):
                break
        else:
            return lambda values: median * math.exp(sum(of.get(values.get(name), 0.0) for name, of in effects.items()))
        candidates.remove(name)
        effects[name], left = effect, rest


def _medians(values: Sequence[Scalar | None], left: Sequence[float]) -> dict[Scalar | None, float]:
    groups: dict[Scalar | None, list[float]] = defaultdict(list)
    for value, one in zip(values, left, strict=True):
        groups[value].append(one)
    return {value: statistics.median(group) for value, group in groups.items()}


def _error(timings: Sequence[Timing], left: Sequence[float], effects: int) -> float:
    """Return the sum of absolute deviations, weighted by steps, per degree of freedom. With an effect per timing there
    are no degrees of freedom, and the error is infinite.

    Deviations are capped at a factor of e: a few outliers do not dominate.
    """
    free = len(timings) - effects
    total = sum(timing.steps * min(abs(one), 1.0) for timing, one in zip(timings, left, strict=True))
    return total / free if free else math.inf
