"""Chains trained side by side on the workers of a Dask cluster, which are killed, and which other runs want, too."""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import optuna
import pytest
from distributed import Client

import hpstage
from hpstage.cluster import DaskExecutor
from hpstage.plan.facts import ChainLost, ChainStarted
from hpstage.plan.log import read_facts
from hpstage.plan.messages import Verify
from hpstage.schedule import Scalar
from hpstage.store import MemoryJournal
from hpstage.testing.toys import Tape
from tests.bundled import Tapes
from tests.dask.studies import space
from tests.invariants import validate

TRIALS, STEPS = 12, 16


class Mortal(Tape):
    """Kills its process in its eleventh step, once."""

    version = "mortal"
    stateless = ("folder",)
    folder = Path()

    def train(self, step: int, hp: Mapping[str, Scalar]) -> None:
        with (self.folder / f"steps-{os.getpid()}").open("a") as file:
            file.write(".")
            steps = file.tell()
        marker = self.folder / "killed"
        if steps >= 11 and not marker.exists():
            marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        super().train(step, hp)


class MortalTapes(Tapes):
    def __init__(self, folder: Path) -> None:
        super().__init__(Mortal())
        for slot in self._slots:
            slot.tape.folder = folder


def search(
    trainable: object, executor: object, store: object, name: str = "study", verify: Verify = "first-fork"
) -> hpstage.Result:
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    study = optuna.create_study(study_name=name, direction="maximize", sampler=optuna.samplers.RandomSampler(seed=7))
    return hpstage.optimize(
        study,
        trainable,
        space,
        metric="score",
        steps=STEPS,
        n_trials=TRIALS,
        executor=executor,  # type: ignore[arg-type]
        store=store,  # type: ignore[arg-type]
        checkpoint_every=4,
        verify=verify,
    )


def values(result: hpstage.Result) -> list[float]:
    return [trial.value for trial in result.study.trials]


@pytest.fixture(scope="module")
def expected() -> list[float]:
    return values(search(Tape(), hpstage.InlineExecutor(), MemoryJournal()))


@pytest.mark.ci
@pytest.mark.usefixtures("nothing_ahead")
def test_a_worker_of_a_local_cluster_has_one_slot_for_each_member_of_the_trainable(
    expected: list[float],
) -> None:
    journal = MemoryJournal()
    result = search(Tapes(Tape()), DaskExecutor(n_workers=1, gpus=0), journal)
    assert values(result) == expected
    used = {fact.worker.partition("#")[2] for fact in read_facts(journal) if isinstance(fact, ChainStarted)}
    assert used == {"", "1", "2"}
    assert result.savings.workers == 1
    assert result.savings.steps_trained == result.savings.steps_unique


@pytest.mark.ci
def test_a_killed_training_process_costs_only_steps_since_the_last_boundary_of_each_chain(
    client: Client, expected: list[float], tmp_path: Path
) -> None:
    journal = MemoryJournal()
    result = search(MortalTapes(tmp_path), client, journal, verify="off")  # which would train steps, too
    validate(result.plan)
    assert values(result) == expected
    assert (tmp_path / "killed").exists()
    lost = Counter(
        fact.worker.partition("#")[0] for fact in read_facts(journal) if isinstance(fact, ChainLost) and fact.blames
    )
    assert len(lost) == 1 and max(lost.values()) <= 3
    trained = sum(path.stat().st_size for path in tmp_path.glob("steps-*"))
    assert trained <= result.savings.steps_unique + 3 * 4 + 1


@pytest.mark.ci
def test_two_searches_take_turns_on_a_worker_with_several_slots(client: Client, expected: list[float]) -> None:
    """While one run is open, another one is trained to its end on the same workers."""
    executor = DaskExecutor(client)
    executor.open(Tapes(Tape()), None)
    try:
        assert values(search(Tapes(Tape()), client, MemoryJournal(), "other")) == expected
    finally:
        executor.close()


@pytest.mark.ci
def test_a_worker_with_one_thread_has_one_slot(client_of_nannies: Client, expected: list[float]) -> None:
    client = client_of_nannies
    client.wait_for_workers(2, timeout=60)
    journal = MemoryJournal()
    assert values(search(Tapes(Tape()), client, journal)) == expected
    assert not any("#" in fact.worker for fact in read_facts(journal) if isinstance(fact, ChainStarted))
