"""The contract of step backends, for hpstage's own and for a plugin's that trains several models at a time."""

from __future__ import annotations

import math
import shutil
from pathlib import Path

import pytest

from hpstage.errors import UsageError
from hpstage.execution.bundle import slots_in
from hpstage.execution.inline import InlineExecutor
from hpstage.plan.facts import StateReached
from hpstage.plan.step_times import among
from hpstage.search.numerics import fastest, slots_by
from hpstage.store import MemoryJournal
from hpstage.testing import StepBackendContract
from hpstage.torch.backends.backend import StepBackend
from hpstage.torch.backends.stacked_backend import StackedBackend
from hpstage.training.trainables import as_trainable
from tests.torch.backends.forking import by, hp_at
from tests.torch.backends.odd_programs import Tiny
from tests.torch.backends.searches import search

pytestmark = pytest.mark.sampled(10)


class Batched(StackedBackend):
    numerics = "batched-v1"
    begins = 0.0


class Lonely(StepBackend):
    """Claims to train several models at once, but is not a StackedBackend."""

    numerics = "lonely-v1"
    several = True

    def train(self, model: object, optimizer: object, batch: object) -> None:
        raise AssertionError("it is refused")


def install(backend: type[StepBackend], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Install a distribution with a step backend."""
    name = backend.__name__.lower()
    about = folder / name / f"{name}-1.0.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(f"[hpstage.step_backends]\n{name} = {__name__}:{backend.__name__}\n")
    monkeypatch.syspath_prepend(str(about.parent))


@pytest.fixture(autouse=True)
def _installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(Batched, tmp_path, monkeypatch)


class TestEager(StepBackendContract):
    numerics = "eager"


@pytest.mark.ci
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a compiler")
class TestCompiled(StepBackendContract):
    numerics = "compiled"


class TestGraphed(StepBackendContract):
    numerics = "graphed"


class TestStacked(StepBackendContract):
    numerics = "stacked"


class TestBatched(StepBackendContract):
    numerics = "batched"


def subject(numerics: str) -> Tiny:
    found = by(numerics, Tiny)()
    found.max_stacked = 2
    return found


def test_a_plugin_backend_that_trains_several_models_has_slots() -> None:
    assert slots_in(as_trainable(subject("batched"))) == 2


@pytest.mark.ci
def test_auto_measures_all_backends_that_train_several_models() -> None:
    found = as_trainable(subject("auto")).measure_backends(hp_at(0), math.inf)
    times = among(found)
    assert times.keys() == {"batched", "stacked"}
    assert [width for width, _ in times["batched"].seconds] == [1, 2]
    assert {"batched begins", "stacked begins"} <= found.keys()
    assert fastest({"eager": 2.0, "eager begins": 0.0, "batched": 1.0, "batched begins": 0.0}, 10) == "batched"


def test_workers_have_slots_only_if_the_chosen_backend_trains_several_models() -> None:
    executor = InlineExecutor()
    executor.open(subject("batched"), None)
    assert {name: slots_by(name, executor) for name in ("", "batched", "stacked", "eager")} == {
        "": 2,
        "batched": 2,
        "stacked": 2,
        "eager": 1,
    }


def test_a_plugin_backend_trains_chains_of_a_search_concurrently() -> None:
    ours, theirs = (search(numerics, MemoryJournal()) for numerics in ("batched", "stacked"))
    assert any(fact.workers < 1 for fact in ours.journal if isinstance(fact, StateReached))
    assert [trial.value for trial in ours.study.trials] == [trial.value for trial in theirs.study.trials]


def test_a_backend_that_claims_several_models_without_being_a_stacked_backend_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(Lonely, tmp_path, monkeypatch)
    with pytest.raises(UsageError, match=r"'lonely'.*is not a subclass of .*StackedBackend"):
        as_trainable(subject("lonely"))
