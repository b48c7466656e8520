"""Runs as event files of TensorBoard."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from hpstage.report.trackers.runs import TrialRun, plain_name

EVENTS = "events.out.tfevents.*"


def export(runs: Iterable[TrialRun], folder: Path) -> Iterator[TrialRun]:
    """Write a folder ``<study>/<number>`` for each run, and yield the run. Event files of an earlier export are
    replaced. Parameters are hyperparameters of TensorBoard's plugin, metrics the values that it compares by.

    Raises:
        ImportError: tensorboard is not installed.
        OSError: the folder cannot be written to.
    """
    from torch.utils.tensorboard import SummaryWriter
    from torch.utils.tensorboard.summary import hparams

    for run in runs:
        path = folder / plain_name(run.study) / plain_name(run.number)
        path.mkdir(parents=True, exist_ok=True)
        for old in path.glob(EVENTS):
            old.unlink()
        writer: Any = SummaryWriter(str(path))
        try:
            params = {name: value if value is not None else "None" for name, value in run.params.items()}
            for summary in hparams(params, dict.fromkeys(run.metrics)):  # type: ignore[no-untyped-call]
                writer._get_file_writer().add_summary(summary)
            for step, values in run.rows:
                for name, value in values.items():
                    writer.add_scalar(name, value, step)
            writer.add_text("hpstage", f"trial {run.id}, {run.state} after {run.steps} steps", run.steps)
        finally:
            writer.close()
        yield run
