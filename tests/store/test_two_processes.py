"""Two processes on one plan: what both want is trained once; the dead are found out and replaced."""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from unittest.mock import patch

import msgspec
import optuna
import pytest

import hpstage
from hpstage import schedule as s
from hpstage.accounting.savings import merged
from hpstage.checkpoints import FolderCheckpoints
from hpstage.checkpoints.processes import start_of
from hpstage.driver.driver_leases import DriverLeases, host_identity
from hpstage.errors import StoreError, UsageError
from hpstage.optuna.ledger import Ledger
from hpstage.plan.facts import DriverId, DriverJoined, StateLost
from hpstage.plan.log import open_plan, read_facts
from hpstage.plan.plan import SearchPlan
from hpstage.store import MemoryJournal, SQLiteJournal
from hpstage.testing.toys import Tape
from tests.invariants import validate

pytestmark = pytest.mark.sampled(8)

optuna.logging.set_verbosity(optuna.logging.ERROR)

STEPS = 24


class Slow(Tape):
    """A step takes a while, so that searches overlap."""

    pause = 0.005

    def train(self, step, hp):
        time.sleep(type(self).pause)
        super().train(step, hp)


def space(trial: optuna.Trial) -> dict[str, object]:
    a = s.piecewise({0: trial.suggest_int("a", 1, 2), 12: trial.suggest_int("late", 1, 3)})
    return {"a": a, "b": trial.suggest_categorical("b", [1.0, 2.0])}


def wait_while_held(study: optuna.Study, trial: optuna.trial.FrozenTrial) -> None:
    while study.user_attrs["held by"] and Path(study.user_attrs["held by"]).exists():
        time.sleep(0.02)


def search(folder: Path, name: str, seed: int, *, held_by: Path | None = None, **options: object) -> hpstage.Result:
    study = optuna.create_study(
        study_name=name,
        direction="maximize",
        sampler=optuna.samplers.RandomSampler(seed=seed),
        storage=f"sqlite:///{folder / (name + '.db')}",
        load_if_exists=True,
    )
    study.set_user_attr("held by", held_by and str(held_by))
    return hpstage.optimize(
        study,
        Slow(),
        space,
        metric="score",
        steps=STEPS,
        n_trials=8,
        executor=hpstage.InlineExecutor(),
        store=folder / "plan",
        checkpoint_every=4,
        callbacks=[wait_while_held],
        **options,  # type: ignore[arg-type]
    )


def start(folder: Path, name: str, seed: int, **options: object) -> BaseProcess:
    process = multiprocessing.get_context("forkserver").Process(
        target=search, args=(folder, name, seed), kwargs=options
    )
    process.start()
    return process


def succeeds(process: BaseProcess) -> bool:
    process.join(120)
    return process.exitcode == 0


def values(folder: Path, name: str) -> list[tuple[dict[str, object], float | None]]:
    study = optuna.load_study(study_name=name, storage=f"sqlite:///{folder / (name + '.db')}")
    return [(trial.params, trial.value) for trial in study.trials]


def undisturbed(folder: Path, name: str, seed: int) -> list[tuple[dict[str, object], float | None]]:
    Slow.pause = 0.0
    search(folder, name, seed)
    Slow.pause = 0.005
    return values(folder, name)


def final_plan(folder: Path):
    journal = SQLiteJournal(folder / "plan" / "plan.sqlite")
    header = json.loads(journal.read(0, 1)[0])
    plan = open_plan(journal, header["workload"], header["described"])
    journal.close()
    return plan


def trains(plan: SearchPlan, pid: int | None) -> bool:
    """Has the driver in this process a chain?"""
    drivers = {id for id, driver in plan.drivers.items() if driver.pid == pid}
    return any(chain.driver in drivers for chain in plan.chains.values())


@pytest.mark.ci
def test_two_concurrent_searches_train_their_shared_steps_once(tmp_path: Path) -> None:
    # The second begins while the first is at work.
    first = start(tmp_path, "first", 1)
    second = start(tmp_path, "second", 2)
    assert succeeds(first) and succeeds(second)
    plan = final_plan(tmp_path)
    validate(plan)
    assert not plan.drivers and not plan.chains
    # A request that comes after a running chain has passed its branch point costs the steps since the last checkpoint.
    assert merged(plan).steps_unique <= plan.totals.steps_trained <= 1.1 * merged(plan).steps_unique
    assert merged(plan).steps_asked == 2 * 8 * STEPS
    (tmp_path / "alone").mkdir()
    for name, seed in (("first", 1), ("second", 2)):
        assert values(tmp_path, name) == undisturbed(tmp_path / "alone", name, seed)


@pytest.mark.ci
def test_a_small_checkpoint_budget_of_one_of_two_concurrent_searches_changes_no_result(tmp_path: Path) -> None:
    first = start(tmp_path, "first", 1, checkpoint_budget=1000)  # some six checkpoints
    second = start(tmp_path, "second", 2)
    assert succeeds(first) and succeeds(second)
    plan = final_plan(tmp_path)
    validate(plan)
    facts = list(read_facts(SQLiteJournal(tmp_path / "plan" / "plan.sqlite")))
    evicted = [fact for fact in facts if isinstance(fact, StateLost)]
    assert evicted and all("evicted" in fact.reason for fact in evicted), "none was found missing"
    on_disk = set(FolderCheckpoints(tmp_path / "plan" / "checkpoints", plan.workload).keys())
    assert on_disk == set(plan.kept)
    (tmp_path / "alone").mkdir()
    for name, seed in (("first", 1), ("second", 2)):
        assert values(tmp_path, name) == undisturbed(tmp_path / "alone", name, seed)


@pytest.mark.ci
def test_a_search_resumes_without_waiting_for_the_leases_of_its_killed_driver(tmp_path: Path) -> None:
    process = start(tmp_path, "killed", 3)
    journal = SQLiteJournal(tmp_path / "plan" / "plan.sqlite")
    while len(journal) < 15:
        assert process.is_alive()
        time.sleep(0.02)
    process.kill()
    process.join()
    plan = final_plan(tmp_path)
    names = [*(f"driver/{id}" for id in plan.drivers), *(f"study/{id}" for id in plan.searches.identities())]
    held = {name: lease.token for name in names if (lease := journal.holder(name)) is not None}
    assert len(held) == 2 and not journal.renew_all(held, 3600.0)  # whoever waited for them would hang
    journal.close()
    search(tmp_path, "killed", 3)
    (tmp_path / "alone").mkdir()
    assert values(tmp_path, "killed") == undisturbed(tmp_path / "alone", "killed", 3)
    plan = final_plan(tmp_path)
    assert not plan.drivers and not plan.chains


@pytest.mark.parametrize("again", [True, False], ids=["its old pid", "a pid of its own"])
def test_a_restarted_driver_takes_over_its_old_leases_even_under_the_same_pid(again: bool) -> None:
    journal = MemoryJournal()
    study = optuna.create_study(direction="maximize", sampler=optuna.samplers.RandomSampler(seed=1))

    def call() -> hpstage.Result:
        return hpstage.optimize(
            study,
            Tape(),
            space,
            metric="score",
            steps=STEPS,
            n_trials=2,
            executor=hpstage.InlineExecutor(),
            store=journal,
        )

    call()
    # As the first process of a container has it, that was killed and started again.
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    pid = os.getpid() if again else child.pid
    last = DriverId("last life")
    start = "1" if again else start_of(child.pid)
    joined = DriverJoined(last, "pool", host_identity(), pid, time.time(), "", start)
    journal.append([msgspec.json.encode(joined)])
    leases = [f"driver/{last}", f"study/{Ledger(study).identity()}"]
    assert journal.acquire_all(leases, last, 3600.0) is not None
    if not again:
        with pytest.raises(UsageError, match="being driven by another process"):
            call()
        child.kill()
        child.communicate()
    plan = call().plan
    assert len(study.trials) == 4 and not plan.drivers
    child.kill()
    child.communicate()


@pytest.mark.ci
def test_a_driver_takes_over_the_training_of_another_driver_that_was_killed(tmp_path: Path) -> None:
    dying = start(tmp_path, "dying", 4)
    other = start(tmp_path, "other", 4)
    journal = SQLiteJournal(tmp_path / "plan" / "plan.sqlite")
    while len(journal) < 25:
        time.sleep(0.02)
    journal.close()
    while not trains(final_plan(tmp_path), dying.pid):  # else nothing would be taken over, nor its death be noticed
        assert dying.is_alive()
        time.sleep(0.002)
    dying.kill()
    dying.join()
    assert succeeds(other)
    (tmp_path / "alone").mkdir()
    assert values(tmp_path, "other") == undisturbed(tmp_path / "alone", "other", 4)
    plan = final_plan(tmp_path)
    assert not plan.drivers and not plan.chains


def test_a_study_that_another_process_drives_is_refused(tmp_path: Path) -> None:
    hold = tmp_path / "hold"
    hold.touch()
    process = start(tmp_path, "mine", 5, held_by=hold)
    journal = SQLiteJournal(tmp_path / "plan" / "plan.sqlite")
    while len(journal) < 10:
        time.sleep(0.02)
    journal.close()
    with pytest.raises(UsageError, match=r"study 'mine' is being driven by another process"):
        search(tmp_path, "mine", 5)
    hold.unlink()
    assert succeeds(process)


def test_a_call_that_could_not_release_its_leases_is_repeated_at_once_in_the_same_process(tmp_path: Path) -> None:
    journal, full = SQLiteJournal(tmp_path / "plan.sqlite"), StoreError("the disk is full")

    def enter(name: str, others: Sequence[DriverJoined] = ()) -> tuple[DriverLeases, DriverJoined]:
        leases = DriverLeases(journal, DriverId(name))
        return leases, leases.enter("study", "identity", "pool", "", others)

    first, joined = enter("first")
    with pytest.raises(UsageError, match="is being driven by another process"):
        enter("concurrent", [joined])
    with patch.object(journal, "release_all", side_effect=full), pytest.raises(StoreError, match="full"):
        first.close()
    again, _ = enter("again", [joined])
    assert again.is_gone(joined)
    again.close()
    journal.close()


def test_a_second_driver_with_another_checkpoint_location_is_refused(tmp_path: Path) -> None:
    hold = tmp_path / "hold"
    hold.touch()
    process = start(tmp_path, "mine", 6, held_by=hold)
    journal = SQLiteJournal(tmp_path / "plan" / "plan.sqlite")
    while len(journal) < 10:
        time.sleep(0.02)
    journal.close()
    with pytest.raises(UsageError, match=f"process {process.pid} on .* keeps its checkpoints in another place"):
        search(tmp_path, "other", 6, checkpoints=tmp_path / "elsewhere")
    hold.unlink()
    assert succeeds(process)
    search(tmp_path, "other", 6, checkpoints=tmp_path / "elsewhere")  # without the other's checkpoints it trains again


def test_a_memory_journal_can_be_used_by_one_search_after_another() -> None:
    journal = MemoryJournal()
    for name in ("one", "two"):
        study = optuna.create_study(study_name=name, direction="maximize")
        hpstage.optimize(
            study,
            Tape(),
            space,
            metric="score",
            steps=STEPS,
            n_trials=2,
            executor=hpstage.InlineExecutor(),
            store=journal,
        )
    assert b"DriverLeft" in journal.read()[-1]
