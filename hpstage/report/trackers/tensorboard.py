"""Runs as event files of TensorBoard."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from hpstage.report.trackers.runs import Row, TrialRun, plain_name

EVENTS = "events.out.tfevents.*"


class TensorBoard:
    """Writes a folder ``<study>/<number>`` for each run. Event files of an earlier run are replaced. Parameters and
    metrics also appear in TensorBoard's HParams plugin.

    Raises:
        ImportError: tensorboard is not installed.
        OSError: the folder cannot be written to.
    """

    def __init__(self, folder: Path) -> None:
        import torch.utils.tensorboard  # noqa: F401  only to see whether it is installed

        self._folder = folder

    def start(self, run: TrialRun) -> _Writer:
        path = self._folder / plain_name(run.study) / plain_name(run.number)
        path.mkdir(parents=True, exist_ok=True)
        for old in path.glob(EVENTS):
            old.unlink()
        return _Writer(path, run)


class _Writer:
    def __init__(self, path: Path, run: TrialRun) -> None:
        from torch.utils.tensorboard import writer
        from torch.utils.tensorboard.summary import hparams

        make: Any = writer.SummaryWriter
        self._writer = make(str(path))
        params = {name: value if value is not None else "None" for name, value in run.params.items()}
        for summary in hparams(params, dict.fromkeys(run.metrics)):  # type: ignore[no-untyped-call]
            self._writer._get_file_writer().add_summary(summary)

    def log(self, rows: Iterable[Row]) -> None:
        for step, values in rows:
            for name, value in values.items():
                self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def end(self, run: TrialRun) -> None:
        self._writer.add_text("hpstage", f"trial {run.id}, {run.state} after {run.steps} steps", run.steps)
        self._writer.close()
