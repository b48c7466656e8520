"""Training again what a search has trained, in this process and in a fresh one: equal, or the first difference."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import optuna
import pytest

import hpstage
from hpstage import schedule as s
from hpstage.checkpoints import FolderCheckpoints
from hpstage.cluster.fork_server import ForkServer, fork_server
from hpstage.cluster.fresh import FreshProcess
from hpstage.cluster.messages import Load
from hpstage.cluster.shipping import pack
from hpstage.errors import CheckpointMissing
from hpstage.execution.retraining import retrain
from hpstage.plan.facts import StateKey
from hpstage.plan.messages import Segment
from hpstage.plan.segments import segment_of
from hpstage.training.trainables import as_trainable
from tests.torch.trainables import CASES, Small, ordinary_loop

pytestmark = pytest.mark.sampled(4)

STEPS = 8


def space(trial: optuna.Trial) -> dict[str, Any]:
    drop = trial.suggest_categorical("drop", [3, 5])
    return {"lr": s.multistep(0.1, [drop], gamma=0.1), "momentum": 0.9, "batch_size": 8, "seed": 3}


def searched(trainable: object, store: Path, **options: Any) -> hpstage.Result:
    study = optuna.create_study(sampler=optuna.samplers.GridSampler({"drop": [3, 5]}, seed=0), study_name="small")
    return hpstage.optimize(
        study,
        trainable,
        space,
        metric="loss",
        steps=STEPS,
        n_trials=2,
        executor=hpstage.InlineExecutor(),
        store=store,
        **options,
    )


def segment(result: hpstage.Result, *, start: int = 0, captured: bool = True) -> Segment:
    planned = result.trial(1).planned
    source = planned.node_at(start).state(start) if start else None
    return segment_of(planned.node_at(planned.requested), planned.requested, source=source, captured=captured)


class Leaking(Small):
    """Every step counts for all trials of the process, in an object that nobody surveys."""

    def loss(self, model: Any, batch: Any) -> Any:
        return super().loss(model, batch) * (1 + len(os.environ.setdefault("HPSTAGE_TEST_LEAK", "")))

    def evaluate(self, model: Any) -> dict[str, float]:
        os.environ["HPSTAGE_TEST_LEAK"] = os.environ.get("HPSTAGE_TEST_LEAK", "") + "x"
        return super().evaluate(model)


@pytest.mark.ci
@pytest.mark.parametrize("captured", [True, False])
@pytest.mark.parametrize("name", sorted(CASES))
@pytest.mark.ci_one_in(2)
def test_retraining_a_trial_of_any_kind_of_trainable_gives_the_same_bits(
    name: str, captured: bool, tmp_path: Path
) -> None:
    result = searched(CASES[name](), tmp_path)
    assert result.checkpoints is not None
    again = retrain(as_trainable(CASES[name]()), result.checkpoints, segment(result, captured=captured))
    assert again.equal, again
    assert (again.steps, again.metrics) == (STEPS, len(result.trial(1).metrics[STEPS]))
    assert again.states >= 1


def test_retraining_a_segment_starts_from_its_checkpoint(tmp_path: Path) -> None:
    result = searched(Small(), tmp_path)
    assert result.checkpoints is not None
    part = segment(result, start=3)
    assert part.source is not None
    again = retrain(as_trainable(Small()), result.checkpoints, part)
    assert again.equal, again
    assert again.steps == STEPS - 3
    assert again.states >= 1


@pytest.mark.parametrize("captured", [True, False])
def test_retraining_names_the_first_tensor_that_an_earlier_trial_has_changed(
    captured: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HPSTAGE_TEST_LEAK", "")
    result = searched(Leaking(), tmp_path, verify="off")
    monkeypatch.setenv("HPSTAGE_TEST_LEAK", "")  # as in a fresh process
    assert result.checkpoints is not None
    again = retrain(as_trainable(Leaking()), result.checkpoints, segment(result, captured=captured))
    assert again.apart is not None
    assert "weight" in again.apart.what
    assert again.apart.before != again.apart.again


class Timed(Small):
    """A metric that is the time, and one that is another each time the process begins."""

    def evaluate(self, model: Any) -> dict[str, float]:
        return {**super().evaluate(model), "seconds": time.perf_counter(), "host": float(os.environ["HPSTAGE_TEST"])}


def test_retraining_compares_only_metrics_that_are_reproducible_in_one_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HPSTAGE_TEST", "1")
    result = searched(Timed(), tmp_path, verify="off")
    assert result.checkpoints is not None
    assert retrain(as_trainable(Timed()), result.checkpoints, segment(result)).equal
    monkeypatch.setenv("HPSTAGE_TEST", "2")
    again = retrain(as_trainable(Timed()), result.checkpoints, segment(result))
    assert again.apart is not None and again.apart.what == "the metric host"


def test_retraining_compares_a_missing_state_by_its_digest(tmp_path: Path) -> None:
    result = searched(Small(), tmp_path)
    elsewhere = FolderCheckpoints(tmp_path / "empty", "none")
    again = retrain(as_trainable(Small()), elsewhere, segment(result))
    assert again.equal
    assert again.states >= 1
    with pytest.raises(CheckpointMissing):
        elsewhere.load(StateKey("0" * 32))


def test_retraining_from_a_missing_checkpoint_reports_the_problem_unreadable(tmp_path: Path) -> None:
    result = searched(Small(), tmp_path)
    again = retrain(as_trainable(Small()), FolderCheckpoints(tmp_path / "empty", "none"), segment(result, start=3))
    assert again.problem is not None
    assert again.problem.kind == "unreadable"


class Failing(Small):
    def loss(self, model: Any, batch: Any) -> Any:
        if os.environ.get("HPSTAGE_TEST_FAIL"):
            raise FileNotFoundError("the data are gone")
        return super().loss(model, batch)


def test_retraining_reports_code_that_fails_with_its_traceback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = searched(Failing(), tmp_path)
    monkeypatch.setenv("HPSTAGE_TEST_FAIL", "1")
    assert result.checkpoints is not None
    again = retrain(as_trainable(Failing()), result.checkpoints, segment(result))
    assert again.problem is not None
    assert (again.problem.kind, again.problem.step) == ("failed", 0)
    assert "FileNotFoundError: the data are gone" in again.problem.text


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer | None]:
    started = fork_server()
    yield started
    if started is not None:
        started.close()


@pytest.mark.ci
def test_retraining_in_a_forked_or_spawned_process_gives_the_same_bits(
    server: ForkServer | None, tmp_path: Path
) -> None:
    result = searched(ordinary_loop, tmp_path)
    assert result.checkpoints is not None
    for forks in (server, None):
        process = FreshProcess(Load(pack(ordinary_loop, ()), {}), server=forks)
        process.start(segment(result), result.checkpoints)
        again = process.wait(120)
        assert again is not None
        assert again.equal, again
        process.kill()
        assert process.poll() == again


class Endless(Small):
    def loss(self, model: Any, batch: Any) -> Any:
        time.sleep(3600 if os.environ.get("HPSTAGE_TEST_ENDLESS") else 0)
        return super().loss(model, batch)


class Dying(Small):
    def loss(self, model: Any, batch: Any) -> Any:
        if os.environ.get("HPSTAGE_TEST_DIES"):
            os.write(1, b"before the end")
            os.kill(os.getpid(), signal.SIGKILL)
        return super().loss(model, batch)


@pytest.mark.ci
def test_a_retraining_process_that_is_killed_or_dies_reports_a_problem(
    server: ForkServer | None, tmp_path: Path
) -> None:
    result = searched(Endless(), tmp_path / "endless")
    assert result.checkpoints is not None
    endless = FreshProcess(Load(pack(Endless(), ()), {}), server=server, variables={"HPSTAGE_TEST_ENDLESS": "1"})
    endless.start(segment(result), result.checkpoints)
    assert endless.described() is not None
    assert endless.poll() is None
    endless.kill()
    ended = endless.poll()
    assert ended is not None
    assert ended.problem is not None
    result = searched(Dying(), tmp_path / "dying")
    assert result.checkpoints is not None
    dying = FreshProcess(Load(pack(Dying(), ()), {}), variables={"HPSTAGE_TEST_DIES": "1"})
    dying.start(segment(result), result.checkpoints)
    died = dying.wait(120)
    dying.kill()
    assert died is not None
    assert died.problem is not None
    assert "SIGKILL" in died.problem.text
    assert "before the end" in died.problem.text
