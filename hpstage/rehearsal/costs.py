"""Costs: what steps, evaluations and checkpoints take, from a plan that was trained or from a few steps here."""

from __future__ import annotations

import math
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from hpstage.checkpoints import CheckpointStore, open_checkpoints
from hpstage.errors import UsageError
from hpstage.plan.facts import StateKey
from hpstage.plan.plan import SearchPlan
from hpstage.schedule import Scalar
from hpstage.trainable import Trainable
from hpstage.training.identity.environment import describe
from hpstage.training.identity.threads import restored
from hpstage.training.trainables import as_trainable

StepSeconds = Callable[[Mapping[str, Scalar]], float]

# Steps that are timed under each set of values, after one that is not; and the seconds after which they are enough.
_STEPS = 5
_SECONDS = 2.0
# Pulls the effect of values that were measured little towards none; in shares of the average measurement.
_RIDGE = 0.1
# A hyper-parameter counts if it brings the error down to this share of what it was without it; one of more values than
# these is taken for a continuous one, and does not.
_GAIN = 0.8
_LEVELS = 32
# Parts into which timings are split to see what counts, and how many are looked at for that.
_FOLDS = 10
_TELLING = 2_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Seconds and bytes of a workload. ``step_seconds``: a number, or a function of the values at the step."""

    step_seconds: float | StepSeconds
    evaluate_seconds: float = 0.0
    load_seconds: float = 0.0
    save_seconds: float = 0.0
    checkpoint_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Timing:
    """``steps`` steps under these values took ``seconds``."""

    values: Mapping[str, Scalar]
    steps: int
    seconds: float


def costs_of_plan(plan: SearchPlan) -> Costs:
    """Costs as they were when the plan was trained: means, and for steps the effects of the values.

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
        raise UsageError("nothing was trained on this plan yet, so it tells no seconds per step")
    # A chain that goes on where the last one ended loads nothing.
    entered = sum(number for source, number in totals.sources.items() if source != "continued")
    return Costs(
        step_seconds=by_values(timings),
        evaluate_seconds=totals.evaluate_seconds / totals.evaluations if totals.evaluations else 0.0,
        load_seconds=totals.load_seconds / entered if entered else 0.0,
        save_seconds=totals.save_seconds / totals.saves if totals.saves else 0.0,
        checkpoint_bytes=plan.kept_bytes // len(plan.kept) if plan.kept else 0,
    )


@restored()
def measured(trainable: object, samples: Iterable[Mapping[str, Scalar]]) -> Costs:
    """Costs of a trainable, from a few steps in this process under each of these sets of values.

    Each is set up and trained from the first step on, as a trial of that set alone would be.
    """
    trained = as_trainable(trainable)
    try:
        return _measured(trained, samples)
    finally:
        close: Callable[[], None] = getattr(trained, "close", lambda: None)
        close()  # the object is the caller's again, and is searched next


def _measured(trained: Trainable, samples: Iterable[Mapping[str, Scalar]]) -> Costs:
    describe(trained)  # sets threads and the like as they are on workers, until we return
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
        key = StateKey("0" * 32)
        began = time.perf_counter()
        kept = place.save(key, trained.state_dict(), step=1, parent=None)
        saved = time.perf_counter()
        trained.load_state_dict(place.load(key))
        load_seconds = time.perf_counter() - saved
    return Costs(
        step_seconds=by_values(timings),
        evaluate_seconds=evaluate_seconds,
        load_seconds=load_seconds,
        save_seconds=saved - began,
        checkpoint_bytes=kept.bytes,
    )


def by_values(timings: Sequence[Timing]) -> StepSeconds:
    """Seconds per step as a product of one effect per value (a batch of 256 takes 0.6 of the mean, ...).

    Fitted to the logarithms by ridge regression, weighted by steps. A value that was not measured has no effect, nor
    has a hyper-parameter by which timings that are left out of the fit are told no better: what else went on on the
    machine is not to be taken for an effect of the learning rate. The measured sum is kept.
    """
    found: dict[str, set[Scalar]] = {}
    for timing in timings:
        for name, value in timing.values.items():
            found.setdefault(name, set()).add(value)
    candidates = [name for name, values in found.items() if 1 < len(values) <= _LEVELS]
    # The longest tell the most, and choosing by some thousands is choosing by all.
    telling = sorted(timings, key=lambda timing: -timing.steps)[:_TELLING]
    names: list[str] = []
    error = _error(telling, names)
    while candidates:
        errors = {name: _error(telling, [*names, name]) for name in candidates}
        best = min(candidates, key=lambda name: errors[name])
        if not errors[best] < _GAIN * error:
            break
        error = errors[best]
        candidates.remove(best)
        names.append(best)
    fitted = _fit(timings, names)
    scale = sum(timing.seconds for timing in timings) / sum(
        timing.steps * math.exp(fitted(timing.values)) for timing in timings
    )
    return lambda values: scale * math.exp(fitted(values))


def _fit(timings: Sequence[Timing], names: Sequence[str]) -> StepSeconds:
    """The logarithm of seconds per step, by the values of ``names`` alone."""
    import numpy as np

    columns: dict[tuple[str, Scalar | None], int] = {}
    rows = [[(name, timing.values.get(name)) for name in names] for timing in timings]
    for row in rows:
        for item in row:
            columns.setdefault(item, len(columns))
    weights = np.array([timing.steps for timing in timings], dtype=float)
    logs = np.log([timing.seconds / timing.steps for timing in timings])
    mean = float(weights @ logs / weights.sum())
    design = np.zeros((len(timings), len(columns)))
    for number, row in enumerate(rows):
        design[number, [columns[item] for item in row]] = 1.0
    penalty = _RIDGE * weights.mean() * np.eye(len(columns))
    solved = np.linalg.solve(design.T * weights @ design + penalty, design.T * weights @ (logs - mean))
    effects = {item: float(solved[column]) for item, column in columns.items()}
    return lambda values: mean + sum(effects.get((name, values.get(name)), 0.0) for name in names)


def _error(timings: Sequence[Timing], names: Sequence[str]) -> float:
    """How badly timings are told by the others, by the values of ``names``: weighted squares of logarithms."""
    total = 0.0
    folds = min(_FOLDS, len(timings))
    for fold in range(folds):
        rest = [timing for number, timing in enumerate(timings) if number % folds != fold]
        if not rest:
            return math.inf
        fitted = _fit(rest, names)
        for timing in timings[fold::folds]:
            total += timing.steps * (math.log(timing.seconds / timing.steps) - fitted(timing.values)) ** 2
    return total
