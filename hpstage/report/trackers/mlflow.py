"""Runs of MLflow, in a database within a folder or on a tracking server."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hpstage.errors import UsageError
from hpstage.report.trackers.runs import Row, TrialRun, plain_name

_METRICS, _PARAMS = 1000, 100  # maximum numbers in a request
_VALUE = 500  # maximum number of characters of a parameter's value that every server accepts
_NAME = 200  # maximum number of characters of a name that every server accepts
_ALLOWED = "-. /:"  # in names, besides letters, digits and "_"
_STATES = {"complete": "FINISHED", "pruned": "FINISHED", "fail": "FAILED", "running": "RUNNING"}


class MLflow:
    """Writes an experiment for each study, with a run for each of its trials. A run of an earlier export is deleted.

    Args:
        folder: folder of the database ``mlflow.db``; ``None`` for a server.
        uri: URI of the server; by default ``MLFLOW_TRACKING_URI``.

    Raises:
        ImportError: mlflow is not installed.
        OSError: the folder cannot be written to.
        UsageError: the server cannot be reached, or reports an error.
    """

    def __init__(self, folder: Path | None, uri: str | None = None) -> None:
        from mlflow import MlflowClient

        self._artifacts: str | None = None
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            uri = f"sqlite:///{folder.absolute() / 'mlflow.db'}"
            self._artifacts = (folder.absolute() / "artifacts").as_uri()
        with _refusals():
            self._client: Any = MlflowClient(tracking_uri=uri)
        self._experiments: dict[str, str] = {}

    def start(self, run: TrialRun) -> _Writer:
        from mlflow.entities import Param

        trial = plain_name(run.plan + "/" + run.id)
        with _refusals():
            if run.study not in self._experiments:
                self._experiments[run.study] = self._experiment(run.study)
            experiment = self._experiments[run.study]
            for old in self._client.search_runs([experiment], f"tags.`hpstage.trial` = '{trial}'"):
                self._client.delete_run(old.info.run_id)
            tags = {"hpstage.trial": trial, "hpstage.state": run.state, "hpstage.steps": str(run.steps)}
            made = self._client.create_run(experiment, tags=tags, run_name=run.number).info.run_id
            params = [Param(plain(name), str(value)[:_VALUE]) for name, value in run.params.items()]
            for start in range(0, len(params), _PARAMS):
                self._client.log_batch(made, params=params[start : start + _PARAMS])
        return _Writer(self._client, made)

    def _experiment(self, study: str) -> str:
        name = plain(study)
        known = self._client.get_experiment_by_name(name)
        if known is not None:
            return str(known.experiment_id)
        return str(self._client.create_experiment(name, artifact_location=self._artifacts))


class _Writer:
    def __init__(self, client: Any, run: str) -> None:
        self._client = client
        self._run = run

    def log(self, rows: Iterable[Row]) -> None:
        from mlflow.entities import Metric

        now = int(1000 * time.time())
        metrics = [Metric(plain(name), value, now, step) for step, values in rows for name, value in values.items()]
        with _refusals():
            for start in range(0, len(metrics), _METRICS):
                self._client.log_batch(self._run, metrics=metrics[start : start + _METRICS])

    def end(self, run: TrialRun) -> None:
        with _refusals():
            self._client.set_tag(self._run, "hpstage.state", run.state)
            self._client.set_tag(self._run, "hpstage.steps", str(run.steps))
            self._client.set_terminated(self._run, _STATES[run.state])


@contextmanager
def _refusals() -> Iterator[None]:
    from mlflow.exceptions import MlflowException

    try:
        yield
    except MlflowException as error:
        raise UsageError(f"MLflow refuses: {' '.join(str(error).split())[:500]}") from error


def plain(name: str) -> str:
    """Return a name that MLflow accepts for an experiment, a parameter or a metric."""
    return plain_name(name, _ALLOWED, _NAME)
