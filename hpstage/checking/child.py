"""A process of a check: trains runs one after the other, as a worker trains chains, and reports on each.

``python -m hpstage.checking.child LIBRARY...`` imports the libraries and then forks a process for each job. Job files
are named on standard input, one per line. Records go to standard output, one per line, followed at the end of a job by
a line with ``=`` and the process's status.
"""

from __future__ import annotations

import importlib
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import cloudpickle
from msgspec.structs import replace

from hpstage.checking.runs import Job, Record, Run, decode_job, encode
from hpstage.checking.snapshot import snapshot
from hpstage.checkpoints import FolderCheckpoints
from hpstage.checkpoints.state_tree import clone
from hpstage.execution.outcomes import outcome_of
from hpstage.execution.retraining import Loop, Problem, problem_of
from hpstage.plan.facts import StateKey
from hpstage.trainable import Trainable
from hpstage.training.adapter import checked_metrics, noisy_of
from hpstage.training.identity.environment import describe
from hpstage.training.trainables import as_trainable

WORKLOAD = "check"


class Trainer:
    """Trains runs on one trainable."""

    def __init__(self, trainable: Trainable, states: str) -> None:
        self._trainable = trainable
        self._store = FolderCheckpoints(states, WORKLOAD, sweep=False)
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


def do(job: Job, report: Callable[[Record], None]) -> None:
    """Train all runs of a job."""
    sys.path[:] = job.path
    try:
        trainable: Any = as_trainable(cloudpickle.loads(job.trainable))
        described = describe(trainable)
    except Exception as error:
        first = job.runs[0]
        report(Record(name=first.name, fork=first.fork, problem=problem_of(error, first.fork, __file__)))
        return
    trainer = Trainer(trainable, job.states)
    for number, run in enumerate(job.runs):
        record = trainer.perform(run)
        if number == 0:
            record.workload = described.described | described.identity
        report(record)
        if record.problem is not None and run.kept:
            return  # the other runs begin with the states it keeps


def fork(file: Path, records: BinaryIO) -> int:
    """Do the job in ``file`` in a forked process. Return its status."""
    pid = os.fork()
    if pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    # Keep the output of the user's code separate from the records.
    output = os.open(file.with_suffix(".output"), os.O_WRONLY | os.O_CREAT)
    for stream in (1, 2):
        os.dup2(output, stream)

    def report(record: Record) -> None:
        records.write(encode(record) + b"\n")
        records.flush()

    status = 1
    try:
        do(decode_job(file.read_bytes()), report)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)  # a normal exit would wait for threads that the user's code has left


def main(libraries: list[str]) -> None:
    for name in libraries:
        importlib.import_module(name)
    if "torch" in libraries:
        from hpstage.torch.environment import warm_up

        warm_up()
    records = os.fdopen(os.dup(1), "wb")
    for line in sys.stdin:
        records.write(b"=%d\n" % fork(Path(line.rstrip("\n")), records))
        records.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
