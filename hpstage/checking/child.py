"""A process of a check: trains one run after the other, as a worker trains chains, and tells what became of each.

``python -m hpstage.checking.child JOB``, with the name of the file that has the job. Records go to standard output, one
a line; what the user's code prints goes where errors go.
"""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle

from hpstage.checking.runs import Job, Problem, Record, Run, decode_job, encode
from hpstage.checking.snapshot import snapshot
from hpstage.checkpoints import FolderCheckpoints
from hpstage.checkpoints.state_tree import clone
from hpstage.environment import describe
from hpstage.errors import HpstageError
from hpstage.events import StateKey
from hpstage.trainable import Trainable, as_trainable, checked_metrics

WORKLOAD = "check"


class Trainer:
    """Trains runs on one trainable."""

    def __init__(self, trainable: Trainable, states: str) -> None:
        self._trainable = trainable
        self._store = FolderCheckpoints(states, WORKLOAD, sweep=False)
        self._live: dict[int, object] = {}
        self._announce: Callable[[bool], None] | None = getattr(trainable, "announce", None)

    def perform(self, run: Run) -> Record:
        record = Record(name=run.name, fork=run.fork)
        began = time.perf_counter()
        self._trained = run.fork
        try:
            self._train(run, record)
        except Exception as error:
            record.problem = problem_of(error, self._trained)
        record.seconds = time.perf_counter() - began
        return record

    def _train(self, run: Run, record: Record) -> None:
        trainable = self._trainable
        trainable.setup(run.values[0])
        if run.source != "fresh":
            state = self._live[run.fork] if run.source == "memory" else self._store.load(_key(run.fork))
            trainable.load_state_dict(state)
            record.loaded = snapshot(trainable)
        elif run.observed:
            record.snapshots[0] = snapshot(trainable, state=False)
        last = len(run.values)
        for step in range(run.fork, last):
            if self._announce is not None:
                self._announce(step + 1 in run.reported)
            trainable.train(step, run.values[step])
            self._trained = step + 1
            if run.observed or step + 1 == last:
                record.snapshots[step + 1] = snapshot(trainable)
            if step + 1 in run.kept:
                state = trainable.state_dict()
                self._store.save(_key(step + 1), state, step=step + 1, parent=None)
                self._live[step + 1] = clone(state)
            if run.evaluated or step + 1 == last:
                metrics = checked_metrics(trainable.evaluate())
                record.metrics[step + 1] = {name: repr(value) for name, value in metrics.items()}


def problem_of(error: Exception, step: int) -> Problem:
    if isinstance(error, HpstageError):
        return Problem("refused", str(error), step)
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename == __file__:
        frames = frames.tb_next
    return Problem("failed", "".join(traceback.format_exception(type(error), error, frames)).rstrip(), step)


def _key(step: int) -> StateKey:
    return StateKey(f"{step:032d}")


def main(file: str) -> None:
    told = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)

    def tell(record: Record) -> None:
        told.write(encode(record) + b"\n")
        told.flush()

    job: Job = decode_job(Path(file).read_bytes())
    sys.path[:] = job.path
    try:
        trainable: Any = as_trainable(cloudpickle.loads(job.trainable))
        described = describe(trainable)
    except Exception as error:
        tell(Record(name=job.runs[0].name, fork=job.runs[0].fork, problem=problem_of(error, 0)))
        return
    trainer = Trainer(trainable, job.states)
    for number, run in enumerate(job.runs):
        record = trainer.perform(run)
        if number == 0:
            record.workload = described.described | described.identity
        tell(record)


if __name__ == "__main__":
    main(sys.argv[1])
