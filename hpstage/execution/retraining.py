"""Retrains steps and compares the results with those of the first training: the loop of checks, reruns and audits."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack
from typing import Any, Literal

import msgspec
from msgspec.structs import replace

from hpstage.checkpoints.state_tree import differing, digest, flatten, summary
from hpstage.checkpoints.store import CheckpointStore
from hpstage.errors import CheckpointError, HpstageError
from hpstage.execution.outcomes import outcome_of
from hpstage.plan.facts import to_numbers
from hpstage.plan.messages import Compared, Segment, Stage
from hpstage.schedule import Scalar, varies
from hpstage.trainable import Elastic, Trainable, close
from hpstage.training.adapter import checked_metrics, noisy_of
from hpstage.training.capture.portrait import state_texts, values_text
from hpstage.training.capture.unwatched import unwatched
from hpstage.training.tensors import named_tensors
from hpstage.training.trainables import as_trainable

Values = Callable[[int], Mapping[str, Scalar]]


class Apart(msgspec.Struct, frozen=True):
    """The first difference: after how many steps, in which leaf of the state or which metric, and both contents."""

    step: int
    what: str
    before: str
    again: str

    def __str__(self) -> str:
        return f"after {self.step} steps, {self.what} is {self.again}, and was {self.before} when first trained"


class Problem(msgspec.Struct, frozen=True):
    """Why training did not finish: ``refused`` by hpstage, with its message; ``failed`` in the user's code, with the
    traceback; or ``unreadable``: the state from which to start is gone, or cannot be reached."""

    kind: Literal["refused", "failed", "unreadable"]
    text: str
    step: int
    """Number of steps that were trained."""


class Retrained(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of training a segment again.

    Attributes:
        steps: number of steps trained.
        states: number of states compared.
        metrics: number of metrics compared.
        apart: the first difference, if there is any.
        problem: why training did not finish, if it did not.
        digests: digests of the retrained states that were compared, by step.
    """

    steps: int
    seconds: float
    states: int = 0
    metrics: int = 0
    apart: Apart | None = None
    problem: Problem | None = None
    digests: dict[int, str] = {}

    @property
    def equal(self) -> bool:
        return self.apart is None and self.problem is None


class Loop:
    """Trains one trainable, step by step, as a worker trains chains.

    Attributes:
        trained: number of steps trained so far, counted from the start of training.
    """

    def __init__(self, trainable: Trainable) -> None:
        self._trainable = trainable
        self._announce: Callable[[bool], None] | None = getattr(trainable, "announce", None)
        self.trained = 0

    def enter(self, initial: Mapping[str, Scalar], start: int = 0, state: object | None = None) -> None:
        """Set up, and load the state after ``start`` steps, if one is given."""
        self.trained = start
        self._trainable.setup(initial)
        if state is not None:
            self._trainable.load_state_dict(state)

    def steps(self, stop: int, values: Values, reported: Collection[int]) -> Iterator[int]:
        """Train up to ``stop`` steps, and yield the number of trained steps after each.

        Args:
            values: returns the values of the hyperparameters in a step.
            reported: the numbers of steps after which a report is wanted, since a state is kept or evaluated there.
        """
        for step in range(self.trained, stop):
            if self._announce is not None:
                self._announce(step + 1 in reported)
            try:
                self._trainable.train(step, values(step))
            except Exception as error:
                if not (outcome_of(error) == "complete" and step + 1 == stop):
                    raise  # else training ended itself here, as it did before
            self.trained = step + 1
            yield step + 1


def changing(stages: Iterable[Stage], initial: Mapping[str, Scalar]) -> frozenset[str]:
    """Return the hyperparameters whose value differs, somewhere on the stages, from that at step 0."""
    return frozenset(
        name
        for stage in stages
        for name, form in stage.forms.items()
        if varies(form) or form.value(stage.start) != initial[name]
    )


def retrain(trainable: Trainable, checkpoints: CheckpointStore, segment: Segment) -> Retrained:
    """Train a segment again in this process, from its state or from scratch, up to the first difference."""
    began = time.perf_counter()
    if isinstance(trainable, Elastic) and trainable.virtual_nodes > 1:
        segment = replace(segment, captured=True)  # only capture distinguishes virtual nodes
    with ExitStack() as closing:
        if not segment.captured:
            closing.enter_context(unwatched())
            trainable = as_trainable(getattr(trainable, "subject", trainable))
            closing.callback(close, trainable)
        comparison = _Comparison(trainable, checkpoints, segment)
        loop = Loop(trainable)
        problem = None
        try:
            _train(trainable, checkpoints, segment, loop, comparison)
        except CheckpointError as error:
            problem = Problem("unreadable", str(error), loop.trained)
        except Exception as error:
            problem = problem_of(error, loop.trained, __file__)
    return Retrained(
        steps=loop.trained - segment.start,
        seconds=time.perf_counter() - began,
        states=comparison.states,
        metrics=comparison.metrics,
        apart=comparison.apart,
        problem=problem,
        digests=comparison.digests,
    )


def _train(trainable: Any, checkpoints: CheckpointStore, segment: Segment, loop: Loop, comparison: _Comparison) -> None:
    if segment.numerics and hasattr(trainable, "train_by"):
        trainable.train_by(segment.numerics)
    if hasattr(trainable, "foresee"):
        trainable.foresee(changing(segment.stages, segment.initial))
    state = None if segment.source is None else checkpoints.load(segment.source)
    loop.enter(segment.initial, segment.start, state)
    del state
    # Without capture, the trial is trained as without sharing: no report is wanted before its end.
    reported = comparison.reported.union(segment.reported) if segment.captured else {segment.stop}
    for step in loop.steps(segment.stop, segment.values, reported):
        if step in comparison.steps:
            comparison.see(step)
            if comparison.apart is not None:
                return


class _Comparison:
    """Compares states and metrics with those of the first training."""

    def __init__(self, trainable: Trainable, checkpoints: CheckpointStore, segment: Segment) -> None:
        self._trainable = trainable
        self._checkpoints = checkpoints
        # Without capture, the state is complete only if the user defines it.
        self._whole = segment.captured or getattr(trainable, "answers_for_state", False)
        self._compared = {compared.step: compared for compared in segment.compared}
        self._metrics = {
            step: metrics for step, metrics in segment.metrics.items() if segment.captured or step == segment.stop
        }
        self._measured = segment.measured
        self._noisy = noisy_of(getattr(trainable, "subject", trainable))
        self._unequal = {f"state['metrics'][{name!r}]" for name in self._noisy}  # paths in states of training functions
        self.steps = self._compared.keys() | self._metrics.keys()
        self.reported = {compared.step for compared in segment.compared if compared.reported} | self._metrics.keys()
        self.states = self.metrics = 0
        self.apart: Apart | None = None
        self.digests: dict[int, str] = {}

    def see(self, step: int) -> None:
        """Compare the current state and metrics, after ``step`` steps."""
        if step in self._compared:
            self._see_state(self._compared[step])
        if self.apart is None and step in self._metrics:
            self._see_metrics(step)

    def _see_state(self, compared: Compared) -> None:
        state = self._trainable.state_dict()
        now = self.digests[compared.step] = digest(state)
        if now == compared.digest:
            self.states += 1
            return
        try:
            then = compared.texts or self._texts(self._checkpoints.load(compared.key))
        except CheckpointError as error:
            if self._whole:
                self.states += 1
                names = [leaf.name for leaf in flatten(state).leaves]
                where = differing(compared.marks, summary(state)[1], names) if compared.marks else None
                what = f"the state ({error}, so that its parts cannot be compared)" if where is None else where
                self.apart = Apart(compared.step, what, compared.digest, now)
            return
        self.states += 1
        again = self._texts(state)
        found = [
            path
            for path in (dict.fromkeys([*then, *again]) if self._whole else (path for path in then if path in again))
            if then.get(path) != again.get(path) and (self._measured or not _of_measuring(path))
        ]
        if not self._measured and not found:
            return
        first = next((path for path in found if path not in self._unequal), None)
        if first is not None:
            self.apart = Apart(compared.step, first, then.get(first, "absent"), again.get(first, "absent"))
        elif self._whole and not found:
            self.apart = Apart(compared.step, "the state", compared.digest, now)

    def _texts(self, state: object) -> dict[str, str]:
        if self._whole:
            return dict(state_texts("state", state))
        return {name: values_text(value) for name, value in named_tensors(state)}

    def _see_metrics(self, step: int) -> None:
        again = checked_metrics(self._trainable.evaluate())
        for name, value in to_numbers(self._metrics[step]).items():
            if name in self._noisy:
                continue
            self.metrics += 1
            now = repr(again.get(name, "absent"))
            if now != repr(value) and now == repr(checked_metrics(self._trainable.evaluate()).get(name, "absent")):
                self.apart = Apart(step, f"the metric {name}", repr(value), now)
                return  # else it never repeats, such as a duration


def _of_measuring(path: str) -> bool:
    """Return whether a leaf of a training function's state may be a measurement, which no step reads."""
    return path.startswith(("state['locals']", "state['metrics']"))


def problem_of(error: Exception, step: int, within: str) -> Problem:
    """Describe why training stopped after ``step`` steps. A traceback omits its first frames, in the file
    ``within``."""
    if (outcome := outcome_of(error)) is not None:
        return Problem("refused", f"training ended itself in step {step}, as {outcome} ({error})", step)
    if isinstance(error, HpstageError):
        return Problem("refused", str(error), step)
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename in (within, __file__):
        frames = frames.tb_next
    return Problem("failed", "".join(traceback.format_exception(type(error), error, frames)).rstrip(), step)
