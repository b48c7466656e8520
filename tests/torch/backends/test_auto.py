"""``numerics = "auto"``: measured once, before a plan is made, and the same ever after."""

from __future__ import annotations

import logging
import math
import shutil
from pathlib import Path

import pytest

from hpstage.cluster import DaskExecutor
from hpstage.errors import StoreError, UsageError
from hpstage.plan.log import read_header
from hpstage.plan.same_workload import NUMERICS
from hpstage.search.numerics import fastest
from hpstage.store import MemoryJournal, SQLiteJournal
from hpstage.torch.backends.measuring import measure
from hpstage.torch.backends.siblings import StackedLoop
from hpstage.torch.loop import TorchLoop
from tests.torch.backends.forking import by
from tests.torch.backends.odd_programs import Tiny
from tests.torch.backends.searches import search
from tests.torch.trainables import advance, fresh, hp_at

pytestmark = pytest.mark.sampled(4)

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a compiler")

BEGUN = {"eager begins": 0.0, "compiled begins": 10.0}


@pytest.mark.parametrize(
    ("seconds", "steps", "best"),
    [
        ({"eager": 0.010, "compiled": 0.004, **BEGUN}, 100_000, "compiled"),
        ({"eager": 0.010, "compiled": 0.004, **BEGUN}, 1_000, "eager"),  # compiling takes longer than it saves
        ({"eager": 0.010, "compiled": 0.0099, **BEGUN}, 10_000_000, "eager"),
        ({"eager": 0.004, "compiled": 0.010, **BEGUN}, 100_000, "eager"),
        ({"eager": 0.004, "eager begins": 0.0}, 100_000, "eager"),
        ({}, 100_000, "eager"),
    ],
)
def test_auto_chooses_the_compiled_backend_only_if_it_saves_enough_time(
    seconds: dict[str, float], steps: int, best: str
) -> None:
    assert fastest(seconds, steps) == best


def numerics_of(store: Path) -> str:
    journal = SQLiteJournal(store / "plan.sqlite", read_only=True)
    try:
        return read_header(journal).described[NUMERICS]
    finally:
        journal.close()


def measurements(caplog: pytest.LogCaptureFixture) -> int:
    return sum("measured" in record.getMessage() for record in caplog.records)


def test_auto_measures_backends_once_per_plan(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "hpstage"):
        first = search("auto", tmp_path)
        assert measurements(caplog) == 1
        chosen = numerics_of(tmp_path)
        assert chosen in ("eager-v1", "compiled-v2")
        again = search("auto", tmp_path)
        stated = search(chosen.partition("-")[0], tmp_path)
    assert measurements(caplog) == 1
    assert [result.savings.steps_trained for result in (first, again, stated)] == [6, 0, 0]
    assert [trial.value for trial in again.study.trials] == [trial.value for trial in first.study.trials]


@needs_compiler
@pytest.mark.parametrize("made_with", ["eager", pytest.param("compiled", marks=pytest.mark.ci)])
def test_auto_keeps_the_backend_of_an_existing_plan(
    made_with: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)  # the default store: a folder per workload
    search(made_with, None)
    with caplog.at_level(logging.WARNING, "hpstage"):
        search("auto", None)
    assert measurements(caplog) == 0
    [folder] = (tmp_path / ".hpstage").iterdir()
    assert numerics_of(folder) == {"eager": "eager-v1", "compiled": "compiled-v2"}[made_with]


@pytest.mark.slow
def test_auto_measures_once_on_dask_workers_and_a_later_inline_search_uses_that_choice(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "hpstage"):
        found = search("auto", tmp_path, DaskExecutor())
        assert measurements(caplog) == 1
        here = search("auto", tmp_path)  # in this process, which has not measured
    assert measurements(caplog) == 1
    assert [trial.value for trial in here.study.trials] == [trial.value for trial in found.study.trials]
    assert here.savings.steps_trained == 0


@needs_compiler
@pytest.mark.slow
def test_dask_workers_train_compiled_steps_with_the_values_of_an_inline_search(tmp_path: Path) -> None:
    expected = search("compiled", tmp_path / "here")
    search("compiled", tmp_path / "there", DaskExecutor())
    found = search("auto", tmp_path / "there", DaskExecutor())
    assert found.savings.steps_trained == 0
    assert [trial.value for trial in found.study.trials] == [trial.value for trial in expected.study.trials]
    assert numerics_of(tmp_path / "there") == "compiled-v2"


def test_auto_keeps_the_backend_recorded_in_a_memory_journal(caplog: pytest.LogCaptureFixture) -> None:
    journal = MemoryJournal()
    search("eager", journal)
    with caplog.at_level(logging.WARNING, "hpstage"):
        search("auto", journal)
    assert measurements(caplog) == 0


@pytest.mark.parametrize("made_with", ["eager", "stacked"])
def test_a_store_of_another_workload_is_refused_before_anything_is_measured(
    made_with: str, caplog: pytest.LogCaptureFixture
) -> None:
    journal = MemoryJournal()
    search(made_with, journal)
    with caplog.at_level(logging.WARNING, "hpstage"), pytest.raises(StoreError, match="another workload") as refused:
        search("auto", journal, version="2")
    assert "measured" not in caplog.text
    assert "numerics" not in str(refused.value)


@pytest.mark.ci
def test_measuring_backends_does_not_change_training() -> None:
    expected = advance(fresh(Tiny()), 0, 6).state_dict()
    trainable = TorchLoop(by("auto", Tiny)())
    found = trainable.measure_backends(hp_at(0), math.inf)
    assert {"eager", "eager begins"} <= found.keys()
    assert all(seconds >= 0 for seconds in found.values())
    trainable.train_by("eager")
    trainable.setup(hp_at(0))
    assert str(advance(trainable, 0, 6).state_dict()) == str(expected)


@pytest.mark.parametrize("name", ["compiled", "graphed"])
def test_a_backend_is_not_measured_if_its_startup_takes_longer_than_training(name: str) -> None:
    found = measure(TorchLoop(by("auto", Tiny)()), [name, "eager"], hp_at(0), steps=10)
    assert found.keys() == {"eager", "eager begins", f"{name} untried"}
    assert found[f"{name} untried"] == 10 * found["eager"]
    assert fastest(found, 10) == "eager"


@pytest.mark.ci
def test_stacking_is_not_measured_if_its_startup_takes_longer_than_training() -> None:
    subject = by("auto", Tiny)()
    subject.max_stacked = 4
    trainable = StackedLoop(subject)
    found = trainable.measure_backends(hp_at(0), 10)
    assert found["stacked untried"] == 10 * found["eager"]
    assert not any("at a time" in name for name in found)
    assert fastest(found, 10) == "eager"
    assert "stacked, 2 at a time" in trainable.measure_backends(hp_at(0), math.inf)


def test_auto_skips_a_backend_that_fails_and_logs_the_reason(caplog: pytest.LogCaptureFixture) -> None:
    class Failing(TorchLoop):
        def train(self, step: int, hp: object) -> None:
            if self._numerics == "graphed":
                raise UsageError("no graph here")
            super().train(step, hp)  # type: ignore[arg-type]

        def train_by(self, numerics: str) -> bool:
            self._numerics = numerics
            return False

    with caplog.at_level(logging.WARNING, "hpstage"):
        found = measure(Failing(Tiny()), ["graphed", "eager"], hp_at(0), math.inf)
    assert found.keys() == {"eager", "eager begins"}
    assert "numerics = 'graphed' is not considered: UsageError: no graph here" in caplog.text
