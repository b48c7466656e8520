"""Runs of Weights & Biases, written to a folder, from which ``wandb sync`` uploads them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import xxhash

from hpstage.report.trackers.runs import TrialRun, plain_name


def export(runs: Iterable[TrialRun], folder: Path) -> Iterator[TrialRun]:
    """Write an offline run for each trial below ``folder/wandb``, in a project for each study, and yield the run.
    Nothing is sent. Runs have ids of their own, so that those of a later export replace these when they are uploaded.

    Raises:
        ImportError: wandb is not installed.
        OSError: the folder cannot be written to.
    """
    import wandb

    folder.mkdir(parents=True, exist_ok=True)
    for run in runs:
        made: Any = wandb.init(
            mode="offline",
            dir=str(folder),
            project=plain_name(run.study),
            name=run.number,
            id=xxhash.xxh3_64_hexdigest(f"{run.plan}/{run.id}".encode()),
            config=dict(run.params),
            tags=[run.state],
            reinit="create_new",
            settings=wandb.Settings(
                silent=True, console="off", disable_git=True, save_code=False, x_disable_stats=True, x_disable_meta=True
            ),
        )
        for step, values in run.rows:
            made.log(dict(values), step=step)
        made.summary.update({**run.metrics, "hpstage steps": run.steps})
        made.finish(exit_code=1 if run.state == "fail" else 0)
        yield run
