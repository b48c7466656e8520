"""Trials as runs of trackers, read back by the trackers' own packages."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import optuna
import pytest
from typer.testing import CliRunner

import hpstage
from hpstage.cli.app import app
from hpstage.errors import UsageError
from hpstage.report.trackers.runs import TrialRun, plain_name, runs_of
from tests.unit.report.test_tree_embed import HOSTILE
from tests.unit.report.test_tree_logs import STEPS, Talking, space

Curves = Mapping[str, Mapping[int, float]]


class Evaluated(Talking):
    """Its metric has the name of something that it logs."""

    def train(self, step: int, hp: Any) -> None:
        super().train(step, hp)
        hpstage.log("total", step)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("talking")
    study = optuna.create_study(study_name=HOSTILE, sampler=optuna.samplers.GridSampler({"gamma": [0.25, 0.5]}))
    search(study, folder)
    return folder


def search(study: optuna.Study, folder: Path, **options: Any) -> hpstage.Result:
    return hpstage.optimize(
        study,
        Evaluated(),
        space,
        metric="total",
        steps=STEPS,
        n_trials=2,
        executor=hpstage.InlineExecutor(),
        store=folder,
        **options,
    )


def export(*arguments: str | Path) -> str:
    result = CliRunner().invoke(app, ["export", *map(str, arguments)], catch_exceptions=False)
    assert result.exit_code == 0
    return result.output


def runs(store: Path) -> list[TrialRun]:
    plan = hpstage.open(store)
    return list(runs_of(plan.plan, plan.checkpoints))


def expected(store: Path, number: int, named: Callable[[str], str] = str) -> Curves:
    """What a run is to have, from the trial itself."""
    trial = hpstage.open(store).trial(number, HOSTILE)
    logged = trial.log().values
    curves = {f"log/{name}" if name == "total" else name: dict(values) for name, values in logged.items()}
    curves["total"] = {step: metrics["total"] for step, metrics in trial.metrics.items()}
    return {named(name): values for name, values in curves.items()}


def single(value: float) -> float:
    """The value as a float of 32 bits."""
    found: float = struct.unpack("f", struct.pack("f", value))[0]
    return found


def equal(found: Curves, wanted: Curves) -> bool:
    return repr({name: sorted(found[name].items()) for name in sorted(found)}) == repr(
        {name: sorted(wanted[name].items()) for name in sorted(wanted)}
    )


def test_a_tracker_run_has_the_log_the_metrics_and_the_parameters_of_its_trial(store: Path) -> None:
    for number, run in enumerate(runs(store)):
        found: dict[str, dict[int, float]] = {}
        for step, values in run.rows:
            for name, value in values.items():
                found.setdefault(name, {})[step] = value
        assert equal(found, expected(store, number))
        assert (run.study, run.number, run.state, run.steps) == (HOSTILE, str(number), "complete", STEPS)
        assert run.params.keys() == {"gamma"}
        assert [step for step, _ in run.rows] == sorted({step for step, _ in run.rows})


def test_different_names_made_safe_for_paths_stay_different() -> None:
    assert plain_name("digits-2") == "digits-2"
    names = [plain_name(name) for name in ("a/b", "a b", "a_b", "..", ".", "", "x" * 200, "x" * 201)]
    assert len(set(names)) == len(names)
    assert all("/" not in name and name.strip(".") for name in names)


def test_tensorboard_reads_the_values_and_parameters_of_exported_trials(store: Path, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="the extra tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for _ in range(2):  # the second export replaces the first
        assert "2 trials" in export(store, "tensorboard", tmp_path / "runs")
    for number, run in enumerate(runs(store)):
        [folder] = (tmp_path / "runs").glob(f"*/{number}")
        events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
        events.Reload()
        tags = events.Tags()
        found = {tag: {event.step: event.value for event in events.Scalars(tag)} for tag in tags["scalars"]}
        wanted = {
            name: {step: single(value) for step, value in values.items()}
            for name, values in expected(store, number).items()
        }
        assert equal(found, wanted)
        plugin = events.SummaryMetadata("_hparams_/session_start_info").plugin_data
        assert plugin.plugin_name == "hparams"
        from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

        started = HParamsPluginData.FromString(plugin.content).session_start_info
        assert {name: value.number_value for name, value in started.hparams.items()} == dict(run.params)


# MLflow's tables, as SQLAlchemy sees them.
@pytest.mark.filterwarnings("ignore::sqlalchemy.exc.SADeprecationWarning")
@pytest.mark.ci
def test_mlflow_reads_the_values_and_parameters_of_exported_trials(store: Path, tmp_path: Path) -> None:
    pytest.importorskip("mlflow", reason="the extra mlflow is not installed")
    from mlflow import MlflowClient

    from hpstage.report.trackers.mlflow import plain

    for _ in range(2):
        assert "2 trials" in export(store, "mlflow", tmp_path / "runs")
    client = MlflowClient(tracking_uri=f"sqlite:///{tmp_path / 'runs' / 'mlflow.db'}")
    experiment = client.get_experiment_by_name(plain(HOSTILE))
    assert experiment is not None
    found = {run.info.run_name: run for run in client.search_runs([experiment.experiment_id])}
    assert found.keys() == {"0", "1"}
    for number, run in enumerate(runs(store)):
        kept = found[str(number)]
        assert kept.data.params == {name: str(value) for name, value in run.params.items()}
        assert kept.data.tags["hpstage.state"] == "complete"
        assert kept.info.status == "FINISHED"
        curves = {
            name: {point.step: point.value for point in client.get_metric_history(kept.info.run_id, name)}
            for name in kept.data.metrics
        }
        assert equal(curves, expected(store, number, plain))


@pytest.mark.ci
def test_wandb_reads_the_values_and_parameters_of_exported_trials(store: Path, tmp_path: Path) -> None:
    pytest.importorskip("wandb", reason="the extra wandb is not installed")
    export(store, "wandb", tmp_path / "runs")
    wanted = {run.number: run for run in runs(store)}
    files = list((tmp_path / "runs").glob("wandb/offline-run-*/*.wandb"))
    assert len(files) == len(wanted)
    for file in files:
        name, params, curves = kept_in(file)
        assert params == dict(wanted[name].params)
        assert equal(curves, expected(store, int(name)))


def records(content: bytes) -> Iterator[bytes]:
    """The records of a file of W&B's, a log of LevelDB's after seven bytes: in blocks of 32 KiB, in parts that are
    whole (1), first (2), in between (3) or last (4). The package, which writes it in Go, has no reader in Python."""
    at, record = 7, b""
    while at + 7 <= len(content):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
        length, kind = struct.unpack_from("<HB", content, at + 4)
        if not kind:
            return
        record += content[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            yield record
            record = b""


def kept_in(file: Path) -> tuple[str, dict[str, Any], dict[str, dict[int, float]]]:
    """The name of a run of Weights & Biases, its parameters, and its values by name and step."""
    from wandb.proto import wandb_internal_pb2

    name, params, curves = "", dict[str, Any](), dict[str, dict[int, float]]()
    for content in records(file.read_bytes()):
        record = wandb_internal_pb2.Record.FromString(content)
        if record.HasField("run") and record.run.display_name:
            name = record.run.display_name
            params |= {item.key: json.loads(item.value_json) for item in record.run.config.update}
        for item in record.history.item:
            key = item.key or ".".join(item.nested_key)
            if not key.startswith("_"):
                curves.setdefault(key, {})[record.history.step.num] = float(json.loads(item.value_json))
    params.pop("_wandb", None)
    return name, params, curves


@pytest.mark.parametrize("tracker", ["tensorboard", "mlflow", "wandb"])
def test_an_export_to_a_tracker_that_is_not_installed_is_refused_by_name(
    store: Path, tmp_path: Path, tracker: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import sys

    for name in [name for name in sys.modules if name.partition(".")[0] == tracker or "utils.tensorboard" in name]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, tracker, None)
    with pytest.raises(UsageError, match=rf'{tracker} is not installed: pip install "hpstage\[{tracker}\]"'):
        export(store, tracker, tmp_path / "runs")


def test_an_export_to_an_unwritable_folder_is_refused_by_name(store: Path, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="the extra tensorboard is not installed")
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match=r"cannot write to .*file"):
        export(store, "tensorboard", tmp_path / "file")


@pytest.mark.filterwarnings("ignore::FutureWarning")  # Optuna calls its callbacks for trackers deprecated
@pytest.mark.filterwarnings("ignore::sqlalchemy.exc.SADeprecationWarning")
@pytest.mark.ci
def test_optunas_own_callback_logs_each_trial_to_mlflow_as_it_ends(tmp_path: Path) -> None:
    pytest.importorskip("mlflow", reason="the extra mlflow is not installed")
    integration = pytest.importorskip("optuna_integration.mlflow", reason="optuna-integration is not installed")
    from mlflow import MlflowClient

    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    study = optuna.create_study(study_name="live", sampler=optuna.samplers.GridSampler({"gamma": [0.25, 0.5]}))
    search(study, tmp_path / "store", callbacks=[integration.MLflowCallback(tracking_uri=uri, metric_name="total")])
    client = MlflowClient(tracking_uri=uri)
    experiment = client.get_experiment_by_name("live")
    assert experiment is not None
    found = client.search_runs([experiment.experiment_id])
    assert {run.info.run_name: run.data.metrics["total"] for run in found} == {
        str(trial.number): trial.value for trial in study.trials
    }


@pytest.mark.ci
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_optunas_own_callback_logs_each_trial_to_wandb_as_it_ends(tmp_path: Path) -> None:
    wandb = pytest.importorskip("wandb", reason="the extra wandb is not installed")
    integration = pytest.importorskip("optuna_integration.wandb", reason="optuna-integration is not installed")
    study = optuna.create_study(study_name="live", sampler=optuna.samplers.GridSampler({"gamma": [0.25, 0.5]}))
    callback = integration.WeightsAndBiasesCallback(
        metric_name="total", wandb_kwargs={"mode": "offline", "dir": str(tmp_path)}
    )
    try:
        search(study, tmp_path / "store", callbacks=[callback])
    finally:
        wandb.finish()
    [file] = tmp_path.glob("wandb/offline-run-*/*.wandb")
    _, _, curves = kept_in(file)
    assert curves["total"] == {trial.number: trial.value for trial in study.trials}
