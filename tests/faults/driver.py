"""A search in a process of its own, to be killed, frozen and run again: ``python -m tests.faults.driver TASK.json``.

Writes the study to a file when it has ended. While it runs it writes, next to the journal, the position and the hash of
each record whose append was acknowledged.
"""

from __future__ import annotations

import faulthandler
import hashlib
import json
import logging
import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import optuna
from distributed import Client
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock
from optuna.trial import TrialState

import hpstage
from hpstage.cluster import DaskExecutor
from hpstage.errors import CheckpointError, ClusterError, StoreError
from hpstage.optuna.private import cut_torn_line
from hpstage.plan.log import split
from hpstage.store import Cursor, RedisJournal
from hpstage.store.journal import NO_FENCES
from tests.faults import work
from tests.faults.grind import Grind

RUN_AGAIN = 75
"""Exit code of a driver that lost a service it needs and is to be run again."""


SILENCE = 15.0
"""Seconds after which a training process is ended that does not answer."""
_STORY = ("hpstage:failure", "hpstage:traceback")


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """What a driver is to do. Without ``scheduler`` it trains in its own process, with a store of its own."""

    kind: str  # "halving", "full" or "local": full training on a local cluster of its own
    round: int
    seed: int
    trials: int
    folder: str  # for its results and the logs of its work
    studies: str  # the folder of the study
    pause: float = 0.0
    poison: tuple[int, ...] = (0,)
    deadly: int = 30
    scheduler: str = ""
    redis: str = ""
    prefix: str = ""
    checkpoints: str = ""

    @property
    def name(self) -> str:
        return f"{self.kind}-{self.round}"

    @property
    def study(self) -> Path:
        return Path(self.studies) / f"{self.name}.log"

    @property
    def found(self) -> Path:
        return Path(self.folder) / f"{self.name}.found.json"

    @property
    def metric(self) -> str:
        return "score" if self.kind == "halving" else "hash"

    def write(self) -> Path:
        path = Path(self.folder) / f"{self.name}.task.json"
        path.write_bytes(msgspec.json.encode(self))
        return path


class Noting(RedisJournal):
    """A journal that notes in a file what was acknowledged."""

    def __init__(self, url: str, *, prefix: str, notes: Path) -> None:
        super().__init__(url, prefix=prefix)
        self._notes = notes

    def append(
        self,
        records: Sequence[bytes],
        *,
        expect: Cursor | None = None,
        fences: Mapping[str, int] = NO_FENCES,
    ) -> int | None:
        position = super().append(records, expect=expect, fences=fences)
        if position is not None:
            with self._notes.open("a") as notes:
                for offset, record in enumerate(records):
                    notes.write(f"{position + offset} {hashlib.sha256(record).hexdigest()}\n")
        return position


def search(task: Task) -> None:
    folder = Path(task.folder)
    storage = storage_of(task)
    try:
        study = optuna.create_study(
            study_name=task.name,
            storage=storage,
            sampler=work.sampler(task.kind, task.seed),
            direction="maximize",
            load_if_exists=True,
        )
    except OSError as error:  # Optuna's own, before hpstage is called
        cut_torn_line(storage)
        raise StoreError(f"the study cannot be made: {error}") from error
    call: dict[str, Any] = {
        "metric": task.metric,
        "steps": work.STEPS,
        "n_trials": task.trials,
        "algorithm": work.algorithm(task.kind),
        "checkpoint_every": work.INTERVAL,
        "verify": "off",  # which would train two steps twice
    }
    trainable = Grind(task.folder, task.pause, task.deadly)
    space = work.space(task.round, task.poison)
    if not task.scheduler:
        executor = hpstage.InlineExecutor()
        hpstage.optimize(study, trainable, space, executor=executor, store=folder / f"{task.name}.plan", **call)
    else:
        notes = folder / f"{task.name}.acknowledged-{os.getpid()}"
        journal = Noting(task.redis, prefix=task.prefix, notes=notes)
        # One that was killed between its end and the writing of what it found has nothing left to do.
        if not any(has_ended(record, task.name) for record in journal.read()):
            with executor_of(task) as executor:
                hpstage.optimize(
                    study, trainable, space, executor=executor, store=journal, checkpoints=task.checkpoints, **call
                )
        journal.close()
    dump(study, task.found)


def storage_of(task: Task) -> JournalStorage:
    lock = JournalFileOpenLock(str(task.study), grace_period=4)  # a killed one leaves it behind
    return JournalStorage(JournalFileBackend(str(task.study), lock_obj=lock))


@contextmanager
def executor_of(task: Task) -> Iterator[DaskExecutor]:
    if task.kind == "local":
        yield DaskExecutor(n_workers=2, worker_timeout=SILENCE)
        return
    with connected(task.scheduler) as client:
        yield DaskExecutor(client, worker_timeout=SILENCE)


def connected(scheduler: str) -> Client:
    """A client of the scheduler, which may be killed while it is connected to: a user would start the program again."""
    deadline = time.monotonic() + 60
    while True:
        try:
            return Client(scheduler, set_as_default=False)
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)


def has_ended(record: bytes, study: str) -> bool:
    facts = map(json.loads, split(record))
    return any(fact["type"] == "SearchEnded" and fact["study"] == study for fact in facts)


def dump(study: optuna.Study, path: Path) -> None:
    """What became of the study's trials, but for those that were cut off while they were proposed."""
    listed = [
        [
            trial.params,
            trial.state.name,
            trial.value,
            trial.intermediate_values,
            *(trial.user_attrs.get(attr) for attr in _STORY),
        ]
        for trial in study.trials
        if trial.state != TrialState.FAIL or "hpstage:failure" in trial.user_attrs
    ]
    aside = path.with_suffix(".part")
    aside.write_text(json.dumps(listed))
    aside.rename(path)


def main() -> None:
    faulthandler.register(signal.SIGUSR1, all_threads=True)  # where does it hang?
    logging.basicConfig(format="%(asctime)s %(name)s %(levelname)s %(message)s")
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    task = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=Task)
    try:
        search(task)
    except (ClusterError, StoreError, CheckpointError) as error:
        logging.getLogger("tests.faults").exception("to be run again")
        Path(task.folder, f"{task.name}.left-{os.getpid()}").write_text(f"{type(error).__name__}\n{error}")
        sys.exit(RUN_AGAIN)


if __name__ == "__main__":
    main()
