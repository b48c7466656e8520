"""Chains and searches of this process whose states are written while training continues, as on Dask."""

from __future__ import annotations

from pathlib import Path
from queue import SimpleQueue

from hpstage.checkpoints import CheckpointStore, LiveCache
from hpstage.execution.bundle import Bundle
from hpstage.execution.control import Control
from hpstage.execution.inline import InlineExecutor
from hpstage.plan.facts import WorkerId
from hpstage.plan.messages import Chain, ChainEnded, ChainReport, Report
from hpstage.trainable import Trainable

WORKER = WorkerId("w")


class Played:
    """Chains run one after the other. States are written at once, or in the ``background``."""

    def __init__(
        self, trainable: Trainable, store: CheckpointStore, *, background: bool, live: LiveCache | None = None
    ) -> None:
        self.reports: SimpleQueue[ChainReport] = SimpleQueue()
        given = self.reports.put if background else None
        self.bundle = Bundle(trainable, store, LiveCache() if live is None else live, worker=WORKER, on_report=given)
        self.control = Control()

    def run(self, chain: Chain) -> list[ChainReport]:
        """Return a chain's reports, in the order in which they were given."""
        self.control = Control()
        self.bundle.start(WORKER, chain, self.control)
        while self.bundle:
            report = self.bundle.run()
            if report is not None:
                self.reports.put(report)
        reports = self.given()
        assert isinstance(reports[-1], ChainEnded)
        return reports

    def given(self) -> list[ChainReport]:
        """Return the reports that were given since the last call."""
        return [self.reports.get() for _ in range(self.reports.qsize())]


class BackgroundExecutor(InlineExecutor):
    """An InlineExecutor that writes states while it trains."""

    def use(self, checkpoints: CheckpointStore) -> None:
        self._late: SimpleQueue[Report] = SimpleQueue()
        assert self._trainable is not None
        self._bundle = Bundle(
            self._trainable,
            checkpoints,
            LiveCache(),
            worker=WorkerId("inline"),
            clock=self.clock,
            on_report=self._late.put,
        )

    def wait(self, timeout: float | None) -> list[Report]:
        late = self._take()
        if late:
            return late
        reports = super().wait(timeout)
        return [*self._take(), *reports]  # earlier reports of the same chain come first

    def _take(self) -> list[Report]:
        return [self._late.get() for _ in range(self._late.qsize())]


def files_of(folder: Path) -> list[str]:
    """Return what is left in a folder of checkpoints by those who are writing."""
    return sorted(path.name for path in (folder / ".tmp").glob("*"))
