"""Costs: what steps, evaluations and checkpoints take, from a plan that was trained or from a few steps here."""

from __future__ import annotations

import math
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from hpstage.checkpoints import CheckpointStore, open_checkpoints
from hpstage.environment import describe
from hpstage.errors import UsageError
from hpstage.events import StateKey
from hpstage.plan import SearchPlan
from hpstage.schedule import Scalar
from hpstage.trainable import as_trainable

StepSeconds = Callable[[Mapping[str, Scalar]], float]

# Steps that are timed under each set of values, after one that is not; and the seconds after which they are enough.
_STEPS = 5
_SECONDS = 2.0
# Pulls the effect of values that were measured little towards none; in shares of the average measurement.
_RIDGE = 0.1


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


def measured(trainable: object, samples: Iterable[Mapping[str, Scalar]]) -> Costs:
    """Costs of a trainable, from a few steps in this process under each of these sets of values.

    Each is set up and trained from the first step on, as a trial of that set alone would be.
    """
    trained = as_trainable(trainable)
    describe(trained)  # sets threads and the like as they are on workers
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

    Fitted to the logarithms by ridge regression, weighted by steps; a value that was not measured has no effect. The
    measured sum is kept.
    """
    import numpy as np

    columns: dict[tuple[str, Scalar], int] = {}
    for timing in timings:
        for item in timing.values.items():
            columns.setdefault(item, len(columns))
    weights = np.array([timing.steps for timing in timings], dtype=float)
    seconds = np.array([timing.seconds for timing in timings])
    logs = np.log(seconds / weights)
    mean = float(weights @ logs / weights.sum())
    design = np.zeros((len(timings), len(columns)))
    for row, timing in enumerate(timings):
        design[row, [columns[item] for item in timing.values.items()]] = 1.0
    penalty = _RIDGE * weights.mean() * np.eye(len(columns))
    effects = np.linalg.solve(design.T * weights @ design + penalty, design.T * weights @ (logs - mean))
    scale = float(seconds.sum() / (weights @ np.exp(mean + design @ effects)))
    known = {item: float(effects[column]) for item, column in columns.items()}

    def step_seconds(values: Mapping[str, Scalar]) -> float:
        return scale * math.exp(mean + sum(known.get(item, 0.0) for item in values.items()))

    return step_seconds
