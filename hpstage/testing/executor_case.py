"""Shared parts of the tests of executors: opening executors, and observing their work."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import ClassVar

import pytest

from hpstage.checkpoints import FolderCheckpoints
from hpstage.executor import Executor
from hpstage.plan.facts import ChainId, WorkerId, to_numbers
from hpstage.plan.messages import Report
from hpstage.testing.chains import chain, ended, outcome, reached, until, workers
from hpstage.testing.toys import Counter, Gate

Open = Callable[..., Executor]
ENDLESS = 10**9
"""Steps of a chain that is not meant to reach its end."""


class ExecutorCase:
    """An executor under test, which the contract opens, and what the tests share."""

    n_workers: ClassVar[int] = 1
    """Number of workers at the beginning."""
    trains: ClassVar[bool] = True
    """Whether trainables are actually trained, and states actually saved."""
    within_wait: ClassVar[bool] = False
    """Whether chains train in the caller's thread while it waits, and pause in between."""

    @pytest.fixture
    def make_executor(self) -> Callable[[], Executor]:
        """A function that makes an executor, not yet opened; the suite closes it."""
        raise NotImplementedError("override the fixture make_executor")

    def settle(self, executor: Executor) -> None:
        """Wait until all orders have reached the workers; by default they arrive immediately."""

    def everyone(self, executor: Executor) -> list[WorkerId]:
        """The workers, once all have joined."""
        return workers(executor, self.n_workers)

    def first(self, executor: Executor) -> WorkerId:
        return self.everyone(executor)[0]

    @pytest.fixture
    def open_executor(self, make_executor: Callable[[], Executor], tmp_path: Path) -> Iterator[Open]:
        with ExitStack() as closing:

            def open_executor(trainable: object = None) -> Executor:
                executor = make_executor()
                closing.callback(executor.close)
                executor.open(
                    Counter() if trainable is None else trainable, FolderCheckpoints(tmp_path / "states", "w")
                )
                return executor

            yield open_executor

    @pytest.fixture
    def executor(self, open_executor: Open) -> Executor:
        return open_executor()

    @pytest.fixture
    def gate(self, tmp_path: Path) -> Gate:
        return Gate(tmp_path)

    @pytest.fixture
    def held_at_5(self, open_executor: Open, gate: Gate) -> Callable[[int], Executor]:
        """A function that starts the chain ``"c"`` of so many steps, and returns when it stands at step 5, reported.

        It continues when the gate is opened.
        """

        def start(steps: int) -> Executor:
            if not self.within_wait:
                gate.shut(5)
            executor = open_executor(Counter(gate))
            executor.start(self.first(executor), chain("c", steps, 5))
            until(executor, lambda reports: bool(reached(reports, "c")))
            if not self.within_wait:
                gate.wait()
            return executor

        return start

    def _need_training(self) -> None:
        if not self.trains:
            pytest.skip("nothing is trained here")

    def _check_total(self, metrics: dict[str, float | str] | None, total: float) -> None:
        assert metrics is not None
        if self.trains:
            assert to_numbers(metrics)["total"] == total

    def _check_works(self, executor: Executor, worker: WorkerId) -> None:
        executor.start(worker, chain("good", 5))
        reports = ended(executor, "good")
        assert outcome(reports, "good").outcome == "done"
        assert {chain_of(report) for report in reports} == {"good"}
        assert executor.wait(0.0) == []


def chain_of(report: Report) -> ChainId | None:
    return getattr(report, "chain", None)
