"""Runs of MLflow: in a database of its own within a folder, or on a tracking server."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from hpstage.errors import UsageError
from hpstage.report.trackers.runs import TrialRun, plain_name

_METRICS, _PARAMS = 1000, 100  # of a request
_VALUE = 500  # characters of a parameter's value, which every server takes
_NAME = 200  # characters of a name, the same
_ALLOWED = "-. /:"  # in names, besides letters, digits and "_"
_STATES = {"complete": "FINISHED", "pruned": "FINISHED", "fail": "FAILED", "running": "RUNNING"}


def export(runs: Iterable[TrialRun], folder: Path | None) -> Iterator[TrialRun]:
    """Make an experiment of each study, with a run for each of its trials, and yield the run. A run of an earlier
    export is deleted.

    Args:
        folder: where the database ``mlflow.db`` is; ``None`` for the server that ``MLFLOW_TRACKING_URI`` names.

    Raises:
        ImportError: mlflow is not installed.
        OSError: the folder cannot be written to.
        UsageError: the server cannot be reached, or refuses.
    """
    from mlflow.exceptions import MlflowException

    uri = None
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        uri = f"sqlite:///{folder.absolute() / 'mlflow.db'}"
    try:
        yield from _export(runs, uri, None if folder is None else (folder.absolute() / "artifacts").as_uri())
    except MlflowException as error:
        raise UsageError(f"MLflow refuses: {' '.join(str(error).split())[:500]}") from error


def _export(runs: Iterable[TrialRun], uri: str | None, artifacts: str | None) -> Iterator[TrialRun]:
    from mlflow import MlflowClient
    from mlflow.entities import Metric, Param

    client: Any = MlflowClient(tracking_uri=uri)
    experiments: dict[str, str] = {}
    for run in runs:
        if run.study not in experiments:
            experiments[run.study] = _experiment(client, run.study, artifacts)
        experiment = experiments[run.study]
        for old in client.search_runs([experiment], f"tags.`hpstage.trial` = '{plain_name(run.plan + '/' + run.id)}'"):
            client.delete_run(old.info.run_id)
        now = int(1000 * time.time())
        tags = {
            "hpstage.trial": plain_name(run.plan + "/" + run.id),
            "hpstage.state": run.state,
            "hpstage.steps": str(run.steps),
        }
        made = client.create_run(experiment, tags=tags, run_name=run.number).info.run_id
        params = [Param(plain(name), str(value)[:_VALUE]) for name, value in run.params.items()]
        metrics = [Metric(plain(name), value, now, step) for step, values in run.rows for name, value in values.items()]
        for start in range(0, len(params), _PARAMS):
            client.log_batch(made, params=params[start : start + _PARAMS])
        for start in range(0, len(metrics), _METRICS):
            client.log_batch(made, metrics=metrics[start : start + _METRICS])
        client.set_terminated(made, _STATES[run.state])
        yield run


def _experiment(client: Any, study: str, artifacts: str | None) -> str:
    name = plain(study)
    known = client.get_experiment_by_name(name)
    found: str = client.create_experiment(name, artifact_location=artifacts) if known is None else known.experiment_id
    return found


def plain(name: str) -> str:
    """Return a name that MLflow takes for an experiment, a parameter or a metric."""
    return plain_name(name, _ALLOWED, _NAME)
