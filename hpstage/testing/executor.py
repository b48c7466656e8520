"""ExecutorContract: the obligations of every implementation of the Executor port."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec.structs import replace

from hpstage.checkpoints import FolderCheckpoints
from hpstage.errors import InternalError, UsageError
from hpstage.executor import Executor
from hpstage.plan.facts import ChainId, StateRef
from hpstage.plan.messages import (
    Amendment,
    BoundaryMissed,
    BoundaryReached,
    ChainEnded,
)
from hpstage.testing.chains import (
    NODE,
    boundary,
    chain,
    ended,
    key,
    outcome,
    reached,
    seen,
    stage,
    until,
    workers,
)
from hpstage.testing.executor_case import ENDLESS, Audits, Open, chain_of
from hpstage.testing.toys import Counter, Gate


class ExecutorContract(Audits):
    """Subclass it, name the subclass ``Test...`` and override the fixture ``make_executor``.

    ``class TestMyExecutor(ExecutorContract): ...``. Workers must be able to read the files of the tests. If opening an
    executor takes long, override the fixture ``executor`` to give all tests the same one, with new checkpoints for each
    test, and override ``everyone`` to return its workers.
    """

    # --- opening and closing ------------------------------------------------------------------------------

    def test_opening_an_executor_describes_its_workers_and_their_pool(
        self, make_executor: Callable[[], Executor], tmp_path: Path
    ) -> None:
        """The checkpoint store may be set later, since it may depend on the reported environment."""
        executor = make_executor()
        try:
            described = executor.open(Counter(), None).described
            assert described and all(isinstance(text, str) for pair in described.items() for text in pair)
            assert executor.pool == executor.pool != ""
            executor.use(FolderCheckpoints(tmp_path / "states", "w"))
            executor.start(self.first(executor), chain("c", 3))
            assert outcome(ended(executor, "c"), "c").outcome == "done"
        finally:
            executor.close()

    def test_an_object_that_cannot_be_trained_is_refused_when_the_executor_is_opened(self, open_executor: Open) -> None:
        if not self.trains:
            pytest.skip("this executor does not train")
        with pytest.raises(UsageError):
            open_executor(3)

    def test_every_worker_joins_once(self, open_executor: Open) -> None:
        executor = open_executor()
        assert len(set(workers(executor, self.n_workers))) == self.n_workers
        assert executor.wait(0.0) == []

    def test_trying_out_evaluates_untrained_and_leaves_no_trace(self, executor: Executor) -> None:
        metrics = executor.try_out({"x": 1.0})
        assert metrics is None or metrics["total"] == 0.0
        executor.start(self.first(executor), chain("c", 3))
        [last] = reached(ended(executor, "c"), "c")
        assert last.source == "fresh"
        self._check_total(last.metrics, 3.0)

    def test_closing_is_idempotent_before_opening_with_chains_that_run_and_afterwards(
        self, make_executor: Callable[[], Executor], open_executor: Open
    ) -> None:
        unopened = make_executor()
        unopened.close()
        unopened.close()
        executor = open_executor()
        executor.start(self.first(executor), chain("c", ENDLESS))
        executor.close()
        executor.close()

    def test_waking_lets_wait_return_though_there_is_nothing_to_report(self, executor: Executor) -> None:
        executor.wake()
        worker = self.first(executor)
        if self.within_wait and self.trains:
            executor.start(worker, chain("c", ENDLESS))
            executor.wake()
            assert executor.wait(None) == []

    # --- a chain's reports --------------------------------------------------------------------------------

    def test_a_chain_reports_its_boundaries_in_order_and_ends_once(self, executor: Executor) -> None:
        worker, before = self.first(executor), executor.clock()
        executor.start(worker, chain("c", 30, 10, 20))
        reports = ended(executor, "c")
        passed = reached(reports, "c")
        assert [(r.start, r.step, r.node, r.worker) for r in passed] == [
            (0, 10, NODE, worker),
            (10, 20, NODE, worker),
            (20, 30, NODE, worker),
        ]
        for r in passed:
            assert r.kept is not None and r.kept.key == key(r.step)
            self._check_total(r.metrics, r.step)
        end = outcome(reports, "c")
        assert (end.outcome, end.worker, end.node, end.step, end.wasted_steps) == ("done", worker, NODE, 30, 0)
        assert isinstance(reports[-1], ChainEnded)
        times = [before, *(r.at for r in passed), end.at, executor.clock()]
        assert times == sorted(times)
        assert executor.wait(0.0) == []

    def test_a_boundary_evaluates_and_saves_only_if_requested(self, executor: Executor) -> None:
        bare = replace(boundary(5), evaluate=False, keep=False)
        executor.start(self.first(executor), replace(chain("c", 10), boundaries=(bare, replace(bare, step=10))))
        reports = ended(executor, "c")
        assert outcome(reports, "c").outcome == "done", reports
        assert [(r.step, r.metrics, r.kept) for r in reached(reports, "c")] == [
            (5, None, None),
            (10, None, None),
        ]

    def test_chains_side_by_side_report_each_in_order(self, executor: Executor) -> None:
        everyone = self.everyone(executor)
        names = [f"c{number}" for number in range(len(everyone))]
        for worker, name in zip(everyone, names, strict=True):
            executor.start(worker, chain(name, 50, *range(10, 50, 10)))
        reports = ended(executor, *names)
        for worker, name in zip(everyone, names, strict=True):
            assert [(r.step, r.worker) for r in reached(reports, name)] == [
                (step, worker) for step in range(10, 51, 10)
            ]
            assert [report for report in reports if chain_of(report) == name][-1] == outcome(reports, name)

    def test_a_chain_continues_from_a_saved_state_whichever_worker_trained_it(self, executor: Executor) -> None:
        everyone = self.everyone(executor)
        executor.start(everyone[0], chain("a", 10))
        ended(executor, "a")
        for name, worker, sources in (("b", everyone[0], {"continued"}), ("c", everyone[-1], {"live", "disk"})):
            executor.start(worker, chain(name, 20, start=10))
            [last] = reached(ended(executor, name), name)
            assert last.start == 10
            assert last.source in sources
            self._check_total(last.metrics, 20.0)

    def test_a_kept_state_is_evaluated_without_training(self, executor: Executor) -> None:
        worker = self.first(executor)
        executor.start(worker, chain("a", 10))
        ended(executor, "a")
        again = replace(boundary(10), keep=False)
        executor.start(worker, replace(chain("b", 20, start=10), boundaries=(again, boundary(20))))
        passed = reached(ended(executor, "b"), "b")
        assert [(r.start, r.step) for r in passed] == [(10, 10), (10, 20)]
        self._check_total(passed[0].metrics, 10.0)

    def test_expecting_a_state_that_does_not_exist_fails_no_chain(self, executor: Executor) -> None:
        everyone = self.everyone(executor)
        executor.start(everyone[0], chain("a", 10))
        ended(executor, "a")
        for worker in everyone:
            executor.expect(worker, [key(7), key(10)])
        self.settle(executor)
        executor.start(everyone[-1], chain("b", 20, start=10))
        self._check_total(reached(ended(executor, "b"), "b")[-1].metrics, 20.0)
        executor.expect(everyone[-1], [])
        self._check_works(executor, everyone[-1])

    def test_a_chain_from_a_missing_state_ends_as_unreadable_and_its_worker_stays_usable(
        self, executor: Executor
    ) -> None:
        worker = self.first(executor)
        executor.start(worker, chain("lost", 20, start=10))
        reports = ended(executor, "lost")
        assert outcome(reports, "lost").outcome == "unreadable"
        assert reached(reports, "lost") == []
        self._check_works(executor, worker)

    def test_a_second_chain_on_a_busy_worker_is_refused(self, executor: Executor) -> None:
        worker = self.first(executor)
        executor.start(worker, chain("a", ENDLESS))
        with pytest.raises(InternalError, match="idle"):
            executor.start(worker, chain("b", 5))
        executor.stop(ChainId("a"))
        assert outcome(ended(executor, "a"), "a").outcome == "stopped"

    # --- orders to a chain that runs ----------------------------------------------------------------------

    def _let_go(self, gate: Gate, stop: int) -> None:
        """Release a chain that is held at step 5, one step at a time, so that pending orders arrive."""
        for step in range(6, stop) if not self.within_wait else ():
            gate.shut(step)
            gate.wait()
        gate.open()

    def test_a_running_chain_takes_amendments_in_the_order_in_which_they_were_given(
        self, held_at_5: Callable[[int], Executor], gate: Gate
    ) -> None:
        executor = held_at_5(10)
        for start in range(10, 100, 10):
            executor.amend(Amendment(ChainId("c"), (stage(start, start + 10),), (boundary(start + 10),)))
        executor.amend(Amendment(ChainId("c"), (), (boundary(3),)))
        self.settle(executor)
        self._let_go(gate, 10)
        reports = ended(executor, "c")
        assert [r.step for r in reached(reports, "c")] == list(range(10, 101, 10))
        assert [(r.node, r.step) for r in reports if isinstance(r, BoundaryMissed)] == [(NODE, 3)]
        assert outcome(reports, "c").outcome == "done"

    def test_the_end_of_a_running_chain_is_moved(self, held_at_5: Callable[[int], Executor], gate: Gate) -> None:
        executor = held_at_5(ENDLESS)
        executor.amend(Amendment(ChainId("c"), (), (boundary(20),), end=StateRef(NODE, 20)))
        self.settle(executor)
        self._let_go(gate, 20)
        reports = ended(executor, "c")
        assert [r.step for r in reached(reports, "c")] == [20]
        assert (outcome(reports, "c").outcome, outcome(reports, "c").step) == ("done", 20)

    def test_a_running_chain_stops_at_its_next_step_and_says_what_was_wasted(self, executor: Executor) -> None:
        worker = self.first(executor)
        executor.start(worker, chain("c", ENDLESS, 10))
        reports = until(executor, lambda received: bool(reached(received, "c")))
        executor.stop(ChainId("c"))
        end = outcome(reports + ended(executor, "c"), "c")
        assert end.outcome == "stopped"
        assert end.step is not None
        assert end.wasted_steps == end.step - 10
        self._check_works(executor, worker)

    def test_a_running_chain_saves_states_at_its_interval_and_the_state_at_which_it_is_stopped(
        self, executor: Executor
    ) -> None:
        """The chain itself chooses the states to save, since steps may be faster than messages."""
        worker = self.first(executor)
        executor.start(worker, replace(chain("c", ENDLESS), keep_every=50))
        reports = until(executor, lambda received: len(reached(received, "c")) >= 3)
        executor.stop(ChainId("c"), keep=True)
        reports += ended(executor, "c")
        end, passed = outcome(reports, "c"), reached(reports, "c")
        assert end.step is not None
        assert [r.step for r in passed] == sorted({*range(50, end.step + 1, 50), end.step})
        assert [r.kept.key for r in passed if r.kept is not None] == [seen().key(r.step) for r in passed]
        assert end.wasted_steps == 0
        executor.start(worker, replace(chain("d", end.step + 10, start=end.step), source=seen().key(end.step)))
        [last] = reached(ended(executor, "d"), "d")
        assert last.source == "continued"
        self._check_total(last.metrics, end.step + 10)

    def test_a_chain_that_is_stopped_keeps_its_state_if_the_driver_wants_it(self, executor: Executor) -> None:
        worker = self.first(executor)
        bare = replace(boundary(10), keep=False)
        executor.start(worker, replace(chain("c", ENDLESS), boundaries=(bare, boundary(ENDLESS))))
        reports = until(executor, lambda received: bool(reached(received, "c")))
        executor.stop(ChainId("c"), keep=True)
        reports += ended(executor, "c")
        end, last = outcome(reports, "c"), reached(reports, "c")[-1]
        assert end.outcome in ("stopped", "done")  # "done" if it has reached its end
        assert (end.step, end.wasted_steps) == (last.step, 0)
        assert last.kept is not None and last.kept.key == seen().key(last.step)
        executor.start(worker, replace(chain("d", last.step + 5, start=last.step), source=last.kept.key))
        [goal] = reached(ended(executor, "d"), "d")
        self._check_total(goal.metrics, last.step + 5)

    def test_an_order_that_overtakes_its_chain_is_carried_out(self, executor: Executor) -> None:
        worker = self.first(executor)
        for number in range(5):
            executor.start(worker, chain(f"c{number}", ENDLESS))
            executor.stop(ChainId(f"c{number}"))
            assert outcome(ended(executor, f"c{number}"), f"c{number}").outcome == "stopped"

    def test_orders_to_an_ended_or_unknown_chain_are_ignored(self, executor: Executor) -> None:
        worker = self.first(executor)
        executor.start(worker, chain("over", 3))
        ended(executor, "over")
        for name in ("over", "unknown"):
            executor.amend(Amendment(ChainId(name), (stage(3, 9),), (boundary(9),)))
            executor.stop(ChainId(name))
        executor.start(worker, chain("c", 6))
        reports = ended(executor, "c")
        assert [r.step for r in reached(reports, "c")] == [6]
        assert outcome(reports, "c").outcome == "done"
        assert {chain_of(report) for report in reports} == {"c"}

    # --- the user's code fails ----------------------------------------------------------------------------

    def test_an_error_in_training_ends_its_chain_with_the_traceback_after_what_was_reached(
        self, executor: Executor
    ) -> None:
        self._need_training()
        worker = self.first(executor)
        stages = (stage(0, 5), stage(5, 10, "boom"))
        executor.start(worker, replace(chain("bad", 10, 5), stages=stages))
        reports = ended(executor, "bad")
        end = outcome(reports, "bad")
        assert [r.step for r in reached(reports, "bad")] == [5]
        assert (end.outcome, end.node, end.step, end.wasted_steps) == ("failed", NODE, 5, 0)
        assert end.failure is not None
        assert end.failure.summary == "ArithmeticError: boom at step 5"
        assert "builtins.ArithmeticError" in end.failure.kinds
        assert "toys.py" in end.failure.traceback
        self._check_works(executor, worker)

    def test_an_error_in_setup_ends_its_chain(self, executor: Executor) -> None:
        self._need_training()
        worker = self.first(executor)
        executor.start(worker, chain("bad", 5, x="boom in setup"))
        reports = ended(executor, "bad")
        end = outcome(reports, "bad")
        assert end.outcome == "failed"
        assert end.failure is not None and end.failure.summary == "ArithmeticError: boom in setup"
        assert reached(reports, "bad") == []
        self._check_works(executor, worker)

    def test_an_error_in_evaluate_is_reported_at_its_boundary_and_training_continues(self, executor: Executor) -> None:
        self._need_training()
        executor.start(self.first(executor), chain("c", 10, 5, x="boom in evaluate"))
        reports = ended(executor, "c")
        failures = [r.failure for r in reports if isinstance(r, BoundaryReached)]
        assert [failure.summary for failure in failures if failure] == ["ArithmeticError: boom in evaluate"] * 2
        assert [(r.step, r.metrics, r.kept is None) for r in reached(reports, "c")] == [
            (5, None, False),
            (10, None, False),
        ]
        assert outcome(reports, "c").outcome == "done"

    def test_a_metric_that_is_nan_is_reported_as_nan(self, executor: Executor) -> None:
        self._need_training()
        executor.start(self.first(executor), chain("c", 3, x="nan"))
        [last] = reached(ended(executor, "c"), "c")
        assert last.metrics is not None and last.metrics["total"] == "nan"
