"""Callbacks that write trials to a tracker while they train."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import optuna
import pytest

import hpstage
from hpstage.errors import UsageError
from hpstage.report.trackers.live import LiveCallback
from hpstage.report.trackers.runs import Row, TrialRun
from tests.dask.processes import until
from tests.unit.report.test_tree_logs import STEPS, Talking, space


class Kept:
    """A tracker that keeps what is written, and can refuse."""

    def __init__(self) -> None:
        self.rows: dict[str, list[Row]] = {}
        self.params: dict[str, Any] = {}
        self.metrics: dict[str, set[str]] = {}
        self.ends: list[tuple[str, str]] = []
        self.refuses = False

    def start(self, run: TrialRun) -> Writer:
        assert run.number not in self.rows, "a run is started once"
        self.rows[run.number] = []
        self.params[run.number] = dict(run.params)
        self.metrics[run.number] = set(run.metrics)
        return Writer(self, run.number)


class Writer:
    def __init__(self, kept: Kept, number: str) -> None:
        self.kept = kept
        self.number = number

    def log(self, rows: Iterable[Row]) -> None:
        if self.kept.refuses:
            raise ConnectionError("the server is gone")
        self.kept.rows[self.number].extend(rows)

    def end(self, run: TrialRun) -> None:
        assert run.number == self.number
        self.kept.ends.append((run.number, run.state))


class Following(LiveCallback):
    def __init__(self, *, every: float = 0.0) -> None:
        self.kept = Kept()
        super().__init__(every, "kept", lambda: self.kept)


@pytest.mark.ci
def test_tracker_rows_are_in_order_of_steps_even_if_earlier_states_are_evaluated_last(tmp_path: Path) -> None:
    """Weights & Biases drops what comes later of an earlier step, and TensorBoard draws back and forth."""
    search(tmp_path, Following(), checkpoint_every=10, name="kept")
    following = Following()
    result = search(tmp_path, following, evaluate_every=10)
    for number in (0, 1):
        rows = following.kept.rows[str(number)]
        assert [step for step, _ in rows] == sorted(step for step, _ in rows)
        assert [step for step, values in rows if "total" in values] == [10, 20, 30, 40, 50, 60]
        assert same(values_in(rows), of(result.trial(number)))


class Gated(Talking):
    """Waits before its last step for a file."""

    def __init__(self, gate: str) -> None:
        self.gate = gate

    def train(self, step: int, hp: Any) -> None:
        super().train(step, hp)
        if step == STEPS - 1:
            until(lambda: os.path.exists(self.gate), "the gate is opened")


def search(
    folder: Path, callback: Any, trainable: object = None, *, name: str = "live", **options: Any
) -> hpstage.Result:
    study = optuna.create_study(study_name=name, sampler=optuna.samplers.GridSampler({"gamma": [0.25, 0.5]}))
    arguments: dict[str, Any] = {
        "n_trials": 2,
        "metric": "total",
        "steps": STEPS,
        "executor": hpstage.InlineExecutor(),
        "store": folder,
        "callbacks": [callback],
    }
    return hpstage.optimize(study, trainable or Talking(), space, **{**arguments, **options})


def values_in(rows: Iterable[Row]) -> dict[str, dict[int, float]]:
    found: dict[str, dict[int, float]] = {}
    for step, values in rows:
        for name, value in values.items():
            assert step not in found.setdefault(name, {}), f"{name} of step {step} is written twice"
            found[name][step] = value
    return found


def of(trial: Any) -> dict[str, dict[int, float]]:
    """What a run is to have, from the trial itself."""
    curves = {name: dict(values) for name, values in trial.log().values.items()}
    for step, metrics in trial.metrics.items():
        for name, value in metrics.items():
            curves.setdefault(name, {})[step] = value
    return curves


def same(found: dict[str, dict[int, float]], wanted: dict[str, dict[int, float]]) -> bool:
    return repr({name: sorted(found[name].items()) for name in sorted(found)}) == repr(
        {name: sorted(wanted[name].items()) for name in sorted(wanted)}
    )


@pytest.mark.ci
@pytest.mark.parametrize("every", [0.0, 1e6])
def test_tracker_runs_have_all_logged_and_measured_values_for_any_interval(tmp_path: Path, every: float) -> None:
    following = Following(every=every)
    result = search(tmp_path, following, evaluate_every=2)
    kept = following.kept
    assert sorted(kept.ends) == [("0", "complete"), ("1", "complete")]
    for number in (0, 1):
        assert same(values_in(kept.rows[str(number)]), of(result.trial(number)))
        assert kept.params[str(number)] == result.study.trials[number].params
        assert kept.metrics[str(number)] >= {"total"}


@pytest.mark.ci
def test_a_tracker_run_grows_while_its_trial_trains(tmp_path: Path) -> None:
    following = Following()
    early: list[dict[str, list[Row]]] = []

    def look() -> None:
        until(lambda: any(following.kept.rows.values()), "a row is written")
        early.append({number: list(rows) for number, rows in following.kept.rows.items()})
        (tmp_path / "gate").touch()

    looking = threading.Thread(target=look)
    looking.start()
    # Inline, the driver has its turn between stages: a trial that waits in its last step has evaluated before.
    result = search(tmp_path / "store", following, Gated(str(tmp_path / "gate")), evaluate_every=1)
    looking.join()
    [seen] = early
    assert sum(map(len, seen.values())) < sum(map(len, following.kept.rows.values()))
    assert same(values_in(following.kept.rows["0"]), of(result.trial(0)))


class Interrupted(Talking):
    """Ctrl-C in its last step."""

    def train(self, step: int, hp: Any) -> None:
        if step == STEPS - 1:
            raise KeyboardInterrupt
        super().train(step, hp)


@pytest.mark.ci
def test_an_interrupted_search_closes_its_tracker_runs(tmp_path: Path) -> None:
    following = Following()
    with pytest.raises(KeyboardInterrupt):
        search(tmp_path, following, Interrupted(), evaluate_every=1)
    assert following.kept.rows
    assert sorted(following.kept.ends) == [(number, "running") for number in sorted(following.kept.rows)]


def test_a_failing_tracker_is_no_longer_written_after_one_warning_and_the_search_continues(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    following = Following()
    following.kept.refuses = True
    with caplog.at_level(logging.WARNING, "hpstage"):
        result = search(tmp_path, following)
    assert len(result.study.trials) == 2
    found = [record.message for record in caplog.records if "no longer written" in record.message]
    assert len(found) == 1
    assert "ConnectionError: the server is gone" in found[0]


def test_a_single_run_and_its_branch_are_written_to_a_tracker(tmp_path: Path) -> None:
    first, second = Following(), Following()
    run = hpstage.train(
        Talking(),
        {"rate": 0.5},
        steps=STEPS,
        metric="total",
        store=tmp_path,
        executor=hpstage.InlineExecutor(),
        callbacks=first,
    )
    branch = run.branch(at=2, rate=0.25, executor=hpstage.InlineExecutor(), callbacks=[second])
    assert not isinstance(branch, list)
    assert same(values_in(first.kept.rows["0"]), of(run))
    assert same(values_in(second.kept.rows["1"]), of(branch))
    assert second.kept.ends == [("1", "complete")]


@pytest.mark.parametrize("every", [-1.0, float("nan"), "5"])
def test_an_invalid_interval_of_a_tracker_callback_is_refused(every: Any) -> None:
    with pytest.raises(UsageError, match="every"):
        Following(every=every)


def test_tensorboard_has_the_runs_of_a_search(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="the extra tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    from hpstage.report import TensorBoardCallback

    result = search(tmp_path / "store", TensorBoardCallback(tmp_path / "runs", every=0.0))
    for number in (0, 1):
        events = EventAccumulator(str(tmp_path / "runs" / "live" / str(number)), size_guidance={"scalars": 0})
        events.Reload()
        found = {tag: {e.step: e.value for e in events.Scalars(tag)} for tag in events.Tags()["scalars"]}
        wanted = of(result.trial(number))
        assert {name: set(curve) for name, curve in found.items()} == {
            name: set(curve) for name, curve in wanted.items()
        }
        assert "_hparams_/session_start_info" in events.summary_metadata


@pytest.mark.filterwarnings("ignore::sqlalchemy.exc.SADeprecationWarning")
@pytest.mark.ci
def test_mlflow_has_the_runs_of_a_search(tmp_path: Path) -> None:
    pytest.importorskip("mlflow", reason="the extra mlflow is not installed")
    from mlflow import MlflowClient

    from hpstage.report import MLflowCallback
    from hpstage.report.trackers.mlflow import plain

    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    result = search(tmp_path / "store", MLflowCallback(uri, every=0.0))
    client = MlflowClient(tracking_uri=uri)
    experiment = client.get_experiment_by_name("live")
    assert experiment is not None
    for run in client.search_runs([experiment.experiment_id]):
        assert run.info.status == "FINISHED"
        curves = {
            name: {point.step: point.value for point in client.get_metric_history(run.info.run_id, name)}
            for name in run.data.metrics
        }
        wanted = of(result.trial(int(run.info.run_name)))
        assert same(curves, {plain(name): curve for name, curve in wanted.items()})


@pytest.mark.ci
def test_wandb_has_the_runs_of_a_search(tmp_path: Path) -> None:
    pytest.importorskip("wandb", reason="the extra wandb is not installed")
    from hpstage.report import WeightsAndBiasesCallback
    from tests.unit.report.test_trackers import kept_in

    callback = WeightsAndBiasesCallback("p", wandb_kwargs={"mode": "offline", "dir": str(tmp_path)}, every=0.0)
    result = search(tmp_path / "store", callback)
    files = list(tmp_path.glob("wandb/offline-run-*/*.wandb"))
    assert len(files) == 2
    for file in files:

        def whole(file: Path = file) -> bool:  # its service may write rows, or all, after the run was finished
            number, params, curves = kept_in(file)
            if not number:
                return False  # nor its first record
            return params == result.study.trials[int(number)].params and same(curves, of(result.trial(int(number))))

        until(whole, "the run has all rows", 60.0)


def test_a_tracker_callback_whose_package_is_not_installed_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    from hpstage.report import WeightsAndBiasesCallback

    for name in [name for name in sys.modules if name.partition(".")[0] == "wandb"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(UsageError, match=r'wandb is not installed: pip install "hpstage\[wandb\]"'):
        WeightsAndBiasesCallback("p")
