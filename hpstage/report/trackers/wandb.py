"""Runs of Weights & Biases."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import xxhash

from hpstage.report.trackers.runs import Row, TrialRun, plain_name


class WeightsAndBiases:
    """Writes a run for each trial, by default in a project for each study. The id of a run is derived from its trial:
    a later export thus replaces the run when it is uploaded.

    Args:
        folder: runs are written to ``folder/wandb``; ``None`` for the current folder.
        settings: arguments of ``wandb.init``, such as ``project``, ``entity``, ``mode``.

    Raises:
        ImportError: wandb is not installed.
        OSError: the folder cannot be written to.
    """

    def __init__(self, folder: Path | None, settings: Mapping[str, Any]) -> None:
        import wandb

        self._init = wandb.init
        self._quiet = wandb.Settings(
            silent=True, console="off", disable_git=True, save_code=False, x_disable_stats=True, x_disable_meta=True
        )
        self._settings = settings
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            self._settings = {"dir": str(folder), **settings}

    def start(self, run: TrialRun) -> _Writer:
        settings = {"project": plain_name(run.study), "group": plain_name(run.study), **self._settings}
        return _Writer(
            self._init(
                name=run.number,
                id=xxhash.xxh3_64_hexdigest(f"{run.plan}/{run.id}".encode()),
                config=dict(run.params),
                resume="allow" if settings.get("mode") != "offline" else None,
                reinit="create_new",
                settings=self._quiet,
                **settings,
            )
        )


class _Writer:
    def __init__(self, run: Any) -> None:
        self._run = run
        self._first = int(run.step)  # a resumed run takes no earlier steps

    def log(self, rows: Iterable[Row]) -> None:
        for step, values in rows:
            if step >= self._first:
                self._run.log(dict(values), step=step)

    def end(self, run: TrialRun) -> None:
        self._run.log({}, commit=True)  # commits the last row
        self._run.tags = [*(self._run.tags or ()), run.state]
        self._run.summary.update({**run.metrics, "hpstage steps": run.steps})
        self._run.finish(exit_code=1 if run.state == "fail" else 0)
