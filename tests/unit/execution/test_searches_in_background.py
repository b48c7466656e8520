"""Searches that write states in the background find what others find, whatever ends them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import optuna
import pytest

import hpstage
from hpstage import schedule as s
from hpstage.algorithm import Algorithm
from hpstage.algos import ASHA, FullTraining, SuccessiveHalving
from hpstage.checkpoints import FolderCheckpoints
from hpstage.checkpoints.state_tree import digest
from hpstage.execution import saving
from hpstage.plan.facts import StateReached
from hpstage.plan.log import read_facts
from hpstage.store import MemoryJournal
from hpstage.testing.chains import key
from hpstage.testing.toys import Tape
from tests.bundled import Tapes
from tests.invariants import validate
from tests.unit.execution.background import BackgroundExecutor
from tests.unit.search.test_resume import Fuse

pytestmark = pytest.mark.sampled(4)

STEPS = 12


@pytest.fixture(autouse=True)
def _none_is_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saving, "_SMALL", 0)


def space(trial: optuna.Trial) -> dict[str, Any]:
    first, late = trial.suggest_int("first", 1, 3), trial.suggest_int("late", 1, 3)
    return {"a": s.piecewise({0: first, 4: late}), "b": trial.suggest_int("b", 1, 2)}


def search(trainable: object, executor: hpstage.InlineExecutor, **options: Any) -> hpstage.Result:
    study = optuna.create_study(
        study_name="study",
        direction="maximize",
        sampler=optuna.samplers.RandomSampler(seed=3),
        storage=options.pop("storage", None),
        load_if_exists=True,
    )
    settings: dict[str, Any] = {"metric": "score", "steps": STEPS, "n_trials": 12, "checkpoint_every": 3}
    return hpstage.optimize(study, trainable, space, executor=executor, **(settings | options))


def states_of(journal: MemoryJournal) -> dict[str, str | None]:
    """The digests of the states with a checkpoint, by key."""
    facts = [fact for fact in read_facts(journal) if isinstance(fact, StateReached)]
    return {fact.kept.key: fact.kept.digest for fact in facts if fact.kept is not None}


@pytest.mark.ci
@pytest.mark.parametrize("bundled", [False, True], ids=["single", "bundled"])
@pytest.mark.parametrize("algorithm", [FullTraining(), SuccessiveHalving(2, 2), ASHA(2, 2)], ids=repr)
def test_a_search_with_background_writes_saves_the_same_states_as_with_synchronous_writes(
    algorithm: Algorithm, bundled: bool
) -> None:
    journals = MemoryJournal(), MemoryJournal()
    found = []
    for journal, executor in zip(journals, (BackgroundExecutor(), hpstage.InlineExecutor()), strict=True):
        trainable = Tapes(Tape()) if bundled else Tape()
        result = search(trainable, executor, store=journal, algorithm=algorithm)
        validate(result.plan)
        found.append(result)
    background, at_once = (states_of(journal) for journal in journals)
    shared = background.keys() & at_once.keys()
    assert len(shared) >= 10
    assert {key: background[key] for key in shared} == {key: at_once[key] for key in shared}
    if algorithm.synchronous:
        assert [t.value for t in found[0].study.trials] == [t.value for t in found[1].study.trials]
        assert found[0].savings.steps_unique == found[1].savings.steps_unique


@pytest.mark.ci
@pytest.mark.parametrize("at", [9, pytest.param(20, marks=pytest.mark.slow)])
def test_an_interrupted_search_with_background_writes_resumes_with_unchanged_values(at: int, tmp_path: Path) -> None:
    blown = Tapes(Tape())
    blown.touch = Fuse(at).touch
    options: dict[str, Any] = {"store": tmp_path / "store", "storage": f"sqlite:///{tmp_path}/study.db"}
    with pytest.raises(KeyboardInterrupt):
        search(blown, BackgroundExecutor(), **options)
    result = search(Tapes(Tape()), BackgroundExecutor(), **options)
    validate(result.plan)
    expected = search(Tape(), hpstage.InlineExecutor(), store=MemoryJournal())
    assert [trial.value for trial in result.study.trials] == [trial.value for trial in expected.study.trials]


KILLED = """
    import os, signal, sys, threading
    from pathlib import Path

    from hpstage.checkpoints import FolderCheckpoints, LiveCache
    from hpstage.checkpoints import format as files
    from hpstage.execution.bundle import Bundle
    from hpstage.execution.control import Control
    from hpstage.plan.messages import BoundaryReached
    from hpstage.testing.chains import chain, key
    from tests.unit.execution.background import WORKER
    from tests.unit.execution.test_saving import Sums, WAIT

    folder, where = Path(sys.argv[1]), sys.argv[2]
    trained_on = threading.Event()

    def die():
        assert trained_on.wait(WAIT)
        os.kill(os.getpid(), signal.SIGKILL)

    class Dying(FolderCheckpoints):
        def save(self, of, state, *, step, parent):
            if step == 6 and where == "before":
                die()
            if step == 6 and where == "while":
                write = files.encode_manifest
                files.encode_manifest = lambda manifest: die()
            kept = super().save(of, state, step=step, parent=parent)
            if step == 6:
                die()
            return kept

    def show(report):
        if isinstance(report, BoundaryReached):
            print(report.reached.step, report.reached.kept.digest, flush=True)

    bundle = Bundle(Sums({9: trained_on.set}), Dying(folder, "w"), LiveCache(), worker=WORKER, on_report=show)
    bundle.start(WORKER, chain("c", 12, 3, 6, 8), Control())
    while bundle:
        show(bundle.run())
"""


@pytest.mark.ci
@pytest.mark.parametrize("where", ["before", "while", "after"])
def test_a_process_killed_while_it_writes_has_reported_only_states_that_exist(where: str, tmp_path: Path) -> None:
    script = textwrap.dedent(KILLED)
    ran = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path), where],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert ran.returncode == -signal.SIGKILL, ran.stderr
    shown = dict(line.split() for line in ran.stdout.splitlines())
    assert set(shown) == {"3"}
    store = FolderCheckpoints(tmp_path, "w")  # sweeps what the dead writer has left
    assert set(store.keys()) == ({key(3), key(6)} if where == "after" else {key(3)})
    assert digest(store.load(key(3))) == shown["3"]
    assert list((tmp_path / ".tmp").glob("*")) == []
