"""Callbacks of a search that write its trials to a tracker while they train."""

from __future__ import annotations

import logging
import math
import queue
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpstage.checkpoints.store import CheckpointStore
from hpstage.errors import CheckpointUnreachable
from hpstage.errors.arguments import seconds
from hpstage.plan.facts import StateKey, TrialId
from hpstage.plan.plan import SearchPlan
from hpstage.report.trackers import not_installed
from hpstage.report.trackers.runs import RunWriter, Tracker, TrialRun, measured_in, rows_of, run_of
from hpstage.report.trial_log import joined, loaded, log_keys

if TYPE_CHECKING:
    import optuna

logger = logging.getLogger("hpstage")


@dataclass(frozen=True, slots=True)
class _Sight:
    """A snapshot of a trial.

    Attributes:
        keys: keys under which checkpoint stores may have logs of the trial.
        reached: the last step that is known to be trained, but at most the first state whose metrics are missing.
        metrics: the names of all metrics known so far.
    """

    run: TrialRun
    measured: Mapping[int, Mapping[str, float]]
    keys: tuple[StateKey, ...]
    reached: int
    metrics: Collection[str]
    checkpoints: CheckpointStore


@dataclass(slots=True)
class _Written:
    """A run that is being written, and the content written so far."""

    writer: RunWriter
    last: TrialRun
    keys: set[StateKey] = field(default_factory=set)
    steps: set[int] = field(default_factory=set)  # with metrics


class LiveCallback:
    """Writes a run for each trial of a search while it trains.

    Every few seconds, a thread of the calling process writes the new metrics and logged values of each trial. Logged
    values are known when the next checkpoint is saved. Training does not wait for the tracker, and results do not
    depend on it. A call that resumes writes its runs again, from the first step.
    """

    def __init__(self, every: float, package: str, make: Callable[[], Tracker]) -> None:
        """``make``: creates the tracker; raises ``ImportError`` if ``package`` is not installed."""
        self._package = package
        self._every = seconds(least=0).of("every", every)
        self._due = 0.0
        self._written: dict[TrialId, _Written] = {}  # only of trials that have not ended
        self._sights: queue.SimpleQueue[list[_Sight] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._ended: set[TrialId] = set()
        try:
            self._tracker = make()
        except ImportError as error:
            raise not_installed(error, package) from None

    def __call__(self, study: optuna.Study, trial: optuna.trial.FrozenTrial) -> None:
        """Do nothing. Optuna calls this for each trial that ends."""

    def follow(
        self,
        plan: SearchPlan,
        trials: Iterable[TrialId],
        metrics: Collection[str],
        checkpoints: CheckpointStore,
        *,
        last: bool = False,
    ) -> None:
        """Have the progress of trials written, if ``every`` seconds have passed. Call it in the thread that changes the
        plan.

        Args:
            metrics: the names of metrics that are known already.
            last: have it written even if less time has passed.
        """
        now = time.monotonic()
        if not last and (now < self._due or not self._sights.empty()):
            return
        self._due = now + self._every
        names = {*metrics}
        sights = []
        for id in trials:
            if id in self._ended or id not in plan.trials:
                continue
            trial = plan.trials[id]
            measured = measured_in(trial)
            names |= {name for found in measured.values() for name in found}
            keys = tuple(log_keys(plan, trial))
            run = run_of(plan, id, measured)
            states = [*trial.states()]
            reached = max((state.step for state in states if state.is_known), default=0)
            awaited = (state.step for state in states if state.metrics is None and state.step in trial.targets)
            reached = min([reached, *awaited])
            if run.state != "running":
                reached = trial.steps  # the step that failed has a log, too
            sights.append(_Sight(run, measured, keys, reached, names, checkpoints))
            if id in plan.ended:
                self._ended.add(id)
        if self._thread is None:
            self._thread = threading.Thread(target=self._write_all, name=f"hpstage {self._package}", daemon=True)
            self._thread.start()
        self._sights.put(sights)

    def close(self) -> None:
        """Wait until everything is written, and close all runs, also of unfinished trials. Another search can use this
        object again."""
        if self._thread is not None:
            self._sights.put(None)
            self._thread.join()
        self._thread, self._due = None, 0.0
        self._ended.clear()

    def _write_all(self) -> None:
        try:
            while (sights := self._sights.get()) is not None:
                for sight in sights:
                    self._write(sight)
            for written in self._written.values():
                written.writer.end(written.last)
        except Exception as error:
            logger.warning(
                "Trials are no longer written to %s: %s: %s. The search continues; `hpstage export` writes all of them "
                "later.",
                self._package,
                type(error).__name__,
                error,
            )
            while self._sights.get() is not None:
                pass
        finally:
            self._written.clear()

    def _write(self, sight: _Sight) -> None:
        run, measured = sight.run, sight.measured
        written = self._written.get(run.id)
        keys = [key for key in sight.keys if written is None or key not in written.keys]
        try:
            found = [(key, log) for key in keys for log in loaded(sight.checkpoints, [key])]
        except CheckpointUnreachable:
            if run.state == "running":
                return  # the next snapshot is tried again
            found = []
        # Values of later steps wait until the steps before them are known, since trackers take only ascending steps.
        logs = [(key, log) for key, log in found if log.stop <= sight.reached]
        fresh = {
            step: found
            for step, found in measured.items()
            if step <= sight.reached and (written is None or step not in written.steps)
        }
        rows = rows_of(joined([log for _, log in logs]).values, fresh, sight.metrics)
        if written is None:
            if not rows and run.state == "running":
                return
            known = dict.fromkeys(sight.metrics, math.nan)
            written = _Written(self._tracker.start(replace(run, metrics={**known, **run.metrics})), run)
            self._written[run.id] = written
        written.last = run
        written.keys.update(key for key, _ in logs)
        written.steps.update(fresh)
        if rows:
            written.writer.log(rows)
        if run.state != "running":
            written.writer.end(run)
            del self._written[run.id]


class TensorBoardCallback(LiveCallback):
    """Write each trial to TensorBoard while it trains: ``callbacks=[TensorBoardCallback("runs")]``, then
    ``tensorboard --logdir runs``.

    Args:
        folder: folder of all runs; each trial is written to ``<study>/<number>`` in it.
        every: seconds between two updates.

    Raises:
        UsageError: tensorboard is not installed.
    """

    def __init__(self, folder: str | PathLike[str] = "runs", *, every: float = 5.0) -> None:
        def make() -> Tracker:
            from hpstage.report.trackers.tensorboard import TensorBoard

            return TensorBoard(Path(folder))

        super().__init__(every, "tensorboard", make)


class MLflowCallback(LiveCallback):
    """Write each trial to MLflow while it trains, as a run in an experiment of the study's name.

    Args:
        tracking_uri: URI of the server or database; by default ``MLFLOW_TRACKING_URI``, or else MLflow's own default.
        every: seconds between two updates.

    Raises:
        UsageError: mlflow is not installed.
    """

    def __init__(self, tracking_uri: str | None = None, *, every: float = 5.0) -> None:
        def make() -> Tracker:
            from hpstage.report.trackers.mlflow import MLflow

            return MLflow(None, tracking_uri)

        super().__init__(every, "mlflow", make)


class WeightsAndBiasesCallback(LiveCallback):
    """Write each trial to Weights & Biases while it trains, as a run in a group of the study's name.

    Args:
        project: name of the project; by default the study's name.
        every: seconds between two updates.
        wandb_kwargs: further arguments of ``wandb.init``: ``entity``, ``mode``, ``dir``, ...

    Raises:
        UsageError: wandb is not installed.
    """

    def __init__(
        self, project: str | None = None, *, wandb_kwargs: Mapping[str, Any] | None = None, every: float = 5.0
    ) -> None:
        settings = {**({} if project is None else {"project": project}), **(wandb_kwargs or {})}

        def make() -> Tracker:
            from hpstage.report.trackers.wandb import WeightsAndBiases

            return WeightsAndBiases(None, settings)

        super().__init__(every, "wandb", make)
