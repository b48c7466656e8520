"""A turn looks at the chains that have changed, and decides as if it looked at all of them."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpstage.execution.simulated import SimulatedExecutor
from hpstage.plan.facts import TrialAdded
from hpstage.plan.messages import Amendment, Chain
from hpstage.scheduler import preemption
from hpstage.scheduler.orders import Due, Orders
from tests.unit.searches import Search, searches


class All(Due):
    """Every chain is due in every turn."""

    def chains(self) -> list[Orders]:
        self.mark_all()
        return super().chains()


class Recording(SimulatedExecutor):
    """Records the orders to workers."""

    def __init__(self, workers: int, **options: Any) -> None:
        super().__init__(workers, **options)
        self.orders: list[Any] = []

    def start(self, worker: Any, chain: Chain) -> None:
        self.orders.append((worker, chain))
        super().start(worker, chain)

    def amend(self, amendment: Amendment) -> None:
        self.orders.append(amendment)
        super().amend(amendment)

    def stop(self, chain: Any, *, keep: bool = False) -> None:
        self.orders.append((chain, keep))
        super().stop(chain, keep=keep)

    def expect(self, worker: Any, keys: Any) -> None:
        self.orders.append((worker, keys))


@pytest.mark.ci
@given(
    trials=searches(steps=12, most=14),
    stops=st.lists(st.integers(1, 12), min_size=14, max_size=14),
    workers=st.integers(1, 6),
    uneven=st.booleans(),
    costs=st.sampled_from([(0.0, 0.0, 0.0), (0.3, 0.01, 0.02), (0.0, 0.5, 0.2)]),
    options=st.sampled_from([{"checkpoint_every": 3}, {"checkpoint_every": None, "checkpoint_seconds": 2.5}, {}]),
    later=st.integers(0, 14),
    dies=st.integers(0, 40),
    each_turn=st.sampled_from([1, 16]),
)
def test_checking_only_changed_chains_gives_the_same_orders_as_checking_all_chains(
    trials: list[TrialAdded],
    stops: list[int],
    workers: int,
    uneven: bool,
    costs: tuple[float, float, float],
    options: dict[str, Any],
    later: int,
    dies: int,
    each_turn: int,
) -> None:
    def orders(kind: type[Due]) -> list[Any]:
        evaluating, saving, loading = costs
        executor = Recording(
            workers,
            step_seconds=(lambda hp: 0.1 + float(hp["a"] or 0)) if uneven else 1.0,  # type: ignore[arg-type]
            evaluate_seconds=evaluating,
            save_seconds=saving,
            load_seconds=loading,
        )
        search = Search(executor, **options)
        search.scheduler._due = kind(search.scheduler._tree, search.scheduler._running)
        if dies and workers > 1:
            executor.cluster.kill(executor.cluster.join(0.0), float(dies))
        first, second = trials[:later], trials[later:]
        search.driver.add(trials)
        for trial, stop in zip(first, stops, strict=False):
            search.driver.ask(trial.trial, stop)
        count = len(search.driver.wait(0.5))
        for trial, stop in zip(second, stops[len(first) :], strict=False):
            search.driver.ask(trial.trial, stop)
        search.answers(len(trials) - count)
        return executor.orders

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(preemption, "_EACH_TURN", each_turn)  # 1: where to cut is looked at once in as many turns
        assert orders(Due) == orders(All)
