"""Runs: a check trains a trial in several ways, one after another in one process, and records the outcome of each."""

from __future__ import annotations

import time
from typing import Literal

import msgspec
from msgspec.structs import replace

from hpstage.checkpoints import FolderCheckpoints
from hpstage.checkpoints.state_tree import clone
from hpstage.execution.outcomes import outcome_of
from hpstage.execution.retraining import Loop, Problem, problem_of
from hpstage.execution.snapshot import Snapshot, snapshot
from hpstage.plan.facts import StateKey
from hpstage.schedule import Scalar
from hpstage.trainable import Trainable
from hpstage.training.adapter import checked_metrics, noisy_of


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """One way of training a trial.

    Attributes:
        values: value of every hyperparameter at each step, up to the last step trained.
        fork: the step at which the run begins.
        source: where the state at that step comes from. A fresh run is set up and trained from step 0.
        reported: steps after which a report is wanted, since a state is kept or evaluated there.
        kept: steps after which the state is kept.
        evaluated: evaluate after each step, not only after the last.
        observed: take a snapshot after each step, not only after the last.
    """

    name: str
    values: list[dict[str, Scalar]]
    fork: int = 0
    source: Literal["fresh", "memory", "disk"] = "fresh"
    reported: list[int]
    kept: list[int] = []
    evaluated: bool = False
    observed: bool = True

    @property
    def steps(self) -> int:
        """Number of steps to train."""
        return len(self.values) - self.fork


class Record(msgspec.Struct, kw_only=True):
    """The outcome of a run.

    Attributes:
        snapshots: by number of steps trained.
        loaded: the snapshot right after the state was loaded.
        metrics: by number of steps trained; exact, as strings.
        workload: the process's description of its workload; only in the first run of a process.
        code: digests of the code loaded in the process, by name; recorded with ``workload``.
        beside_eager: how the run's first steps compare with eager ones, if they are not eager.
    """

    name: str
    fork: int = 0
    snapshots: dict[int, Snapshot] = {}
    loaded: Snapshot = {}
    metrics: dict[int, Snapshot] = {}
    workload: Snapshot = {}
    code: Snapshot = {}
    beside_eager: str = ""
    seconds: float = 0.0
    problem: Problem | None = None


class Runs:
    """Trains runs on one trainable.

    Args:
        states: the folder of saved states.
    """

    def __init__(self, trainable: Trainable, states: str) -> None:
        self._trainable = trainable
        self._store = FolderCheckpoints(states, "check", sweep=False)
        self._live: dict[int, object] = {}
        self._noisy = noisy_of(getattr(trainable, "subject", trainable))

    def perform(self, run: Run) -> Record:
        record = Record(name=run.name, fork=run.fork)
        began = time.perf_counter()
        loop = Loop(self._trainable)
        try:
            self._train(run, record, loop)
        except Exception as error:
            record.problem = self._problem(error, loop.trained or run.fork)
        record.seconds = time.perf_counter() - began
        record.beside_eager = getattr(self._trainable, "beside_eager", "")
        return record

    def _train(self, run: Run, record: Record, loop: Loop) -> None:
        trainable = self._trainable
        if run.source == "fresh":
            loop.enter(run.values[0])
            if run.observed:
                record.snapshots[0], _ = snapshot(trainable, trained=False)
        else:
            state = self._live[run.fork] if run.source == "memory" else self._store.load(_key(run.fork))
            loop.enter(run.values[0], run.fork, state)
            record.loaded, _ = snapshot(trainable, trained=False)
        last = len(run.values)
        for step in loop.steps(last, run.values.__getitem__, run.reported):
            if run.observed or step == last:
                record.snapshots[step], state = snapshot(trainable)
            if step in run.kept:
                self._store.save(_key(step), state, step=step, parent=None)
                self._live[step] = clone(state)
            if run.evaluated or step == last:
                metrics = checked_metrics(trainable.evaluate())
                record.metrics[step] = {name: repr(value) for name, value in metrics.items() if name not in self._noisy}

    @staticmethod
    def _problem(error: Exception, step: int) -> Problem:
        problem = problem_of(error, step, __file__)
        if outcome_of(error) is None:
            return problem
        remedy = f"check the steps before it, with steps={step}" if step else "check another trial"
        return replace(problem, text=f"{problem.text}; {remedy}")


def _key(step: int) -> StateKey:
    return StateKey(f"{step:032d}")
