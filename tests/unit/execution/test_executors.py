"""Executors of this process under the port's contract."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest

from hpstage.execution.bundle import slots_in
from hpstage.execution.inline import InlineExecutor
from hpstage.executor import Executor
from hpstage.testing import ExecutorContract
from tests.simulated_audits import AuditingExecutor


class TestInlineExecutor(ExecutorContract):
    within_wait = True

    @pytest.fixture
    def make_executor(self) -> Callable[[], Executor]:
        return InlineExecutor


class TestSimulatedExecutor(ExecutorContract):
    n_workers = 2
    trains = False
    within_wait = True

    @pytest.fixture
    def make_executor(self) -> Callable[[], Executor]:
        return lambda: AuditingExecutor(self.n_workers, audit_seconds=0.0)


def test_an_executor_with_the_deprecated_name_of_slots_works_with_a_warning() -> None:
    with pytest.warns(DeprecationWarning, match="Old.lanes is deprecated; use slots"):

        class Old(InlineExecutor):
            @property
            def lanes(self) -> int:
                return 3

    assert Old().slots == 3


def test_the_deprecated_name_of_slots_can_be_read() -> None:
    with pytest.warns(DeprecationWarning, match="AuditingExecutor.lanes is deprecated; use slots"):
        assert AuditingExecutor(2).lanes == 1


def test_a_bundle_with_the_deprecated_name_of_slots_works_with_a_warning() -> None:
    old = SimpleNamespace(lanes=3, members=list, train_together=dict, seconds=float)
    with pytest.warns(DeprecationWarning, match="SimpleNamespace.lanes is deprecated; use slots"):
        assert slots_in(old) == 3
