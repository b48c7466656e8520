"""A study has one identity, also when two processes are the first to ask for it at the same time; an older copy of its
storage is not mistaken for it."""

from __future__ import annotations

import multiprocessing
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from multiprocessing.queues import Queue
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.storages import BaseStorage, JournalStorage, RDBStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial

import hpstage
from hpstage.algos import FullTraining
from hpstage.errors import UsageError
from hpstage.optuna.ledger import Ledger
from hpstage.optuna.patient_storage import patient
from hpstage.testing.toys import Tape


def database(folder: Path) -> BaseStorage:
    return RDBStorage(f"sqlite:///{folder / 'study.db'}")


def journal(folder: Path) -> BaseStorage:
    return JournalStorage(JournalFileBackend(str(folder / "study.log")))


def ask(
    make: Callable[[Path], BaseStorage], folder: Path, both_looked: Barrier, one_has_it: Barrier, late: bool, found: Any
) -> None:
    """Read the identity; both look first and find none, and one has its answer before the other continues."""
    study = optuna.load_study(study_name="x", storage=make(folder))
    look = study._storage.get_study_system_attrs
    looks = 0

    def look_together(study_id: int) -> dict[str, Any]:
        nonlocal looks
        looks += 1
        seen = look(study_id)
        if looks == 1:
            both_looked.wait(60)
            if late:
                one_has_it.wait(60)
        return seen

    study._storage.get_study_system_attrs = look_together  # type: ignore[method-assign]
    with patient(study):
        first = Ledger(study).identity()
        if not late:
            one_has_it.wait(60)
        found.put((first, Ledger(study).identity()))


@pytest.mark.ci
@pytest.mark.parametrize("make", [database, journal])
def test_two_processes_at_the_same_time_read_the_same_identity_of_a_new_study(
    make: Callable[[Path], BaseStorage], tmp_path: Path
) -> None:
    optuna.create_study(study_name="x", storage=make(tmp_path))
    context = multiprocessing.get_context("forkserver")
    both_looked, one_has_it = context.Barrier(2), context.Barrier(2)
    found: Queue[tuple[str, str]] = context.Queue()
    processes = [
        context.Process(target=ask, args=(make, tmp_path, both_looked, one_has_it, late, found))
        for late in (False, True)
    ]
    for process in processes:
        process.start()
    identities = [*found.get(timeout=120), *found.get(timeout=120)]
    for process in processes:
        process.join()
    assert len(set(identities)) == 1
    assert Ledger(optuna.load_study(study_name="x", storage=make(tmp_path))).identity() == identities[0]
    optuna.create_study(study_name="y", storage=make(tmp_path))
    assert Ledger(optuna.load_study(study_name="y", storage=make(tmp_path))).identity() != identities[0]


def space(trial: optuna.Trial) -> dict[str, int]:
    return {"a": trial.suggest_int("a", 0, 99)}


@pytest.mark.parametrize("interrupted", [False, True])
def test_a_study_restored_from_an_older_copy_is_refused_and_continues_under_another_name(
    interrupted: bool, tmp_path: Path
) -> None:
    database, older = tmp_path / "study.db", tmp_path / "older.db"

    def search(seed: int, name: str = "one", **options: Any) -> optuna.Study:
        study = optuna.create_study(
            storage=f"sqlite:///{database}",
            study_name=name,
            load_if_exists=True,
            sampler=optuna.samplers.RandomSampler(seed=seed),
        )
        options |= {"executor": hpstage.InlineExecutor()}
        hpstage.optimize(study, Tape(), space, metric="score", steps=6, store=tmp_path / "store", n_trials=3, **options)
        return study

    def copy(study: optuna.Study, trial: FrozenTrial) -> None:
        if trial.number == 0:
            shutil.copy(database, older)
        elif interrupted:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) if interrupted else nullcontext():
        search(0, callbacks=[copy], algorithm=FullTraining(window=1))
    shutil.copy(older, database)
    with pytest.raises(UsageError, match=r"this store has trial 1 of study 'one', the study's storage does not"):
        search(1)
    url = f"sqlite:///{database}"
    assert len(optuna.load_study(study_name="one", storage=url).trials) == 1
    optuna.copy_study(from_study_name="one", from_storage=url, to_storage=url, to_study_name="two")
    assert len(search(1, "two").trials) == 4
