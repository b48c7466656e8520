"""Orders that arrive while a chain is at a boundary: it obeys them there, and ends where it would have ended."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hpstage.checkpoints import FolderCheckpoints
from hpstage.execution.control import Control
from hpstage.plan.facts import ChainId, StateKey
from hpstage.plan.messages import Amendment, BoundaryReached, ChainEnded
from hpstage.testing.chains import chain
from hpstage.testing.toys import Counter
from hpstage.training.trainables import as_trainable
from tests.unit.execution.background import Played


class Ordered(Counter):
    """Gives an order when it is evaluated."""

    stateless = ("order",)

    def __init__(self, order: Callable[[], None]) -> None:
        super().__init__()
        self.order = order

    def evaluate(self) -> dict[str, float]:
        self.order()
        return super().evaluate()


ORDERS: dict[str, Callable[[Control], None]] = {
    "an amendment": lambda control: control.amend(Amendment(ChainId("c"), ())),
    "a pause": Control.pause,
    "a stop that keeps the state": lambda control: control.stop(keep=True),
    "a stop": Control.stop,
}


@pytest.mark.parametrize("order", ORDERS)
def test_a_pause_stop_or_amendment_at_the_last_boundary_of_a_chain_does_not_fail_the_chain(
    order: str, tmp_path: Path
) -> None:
    played: Any = None
    subject = Ordered(lambda: ORDERS[order](played.control))
    played = Played(as_trainable(subject), FolderCheckpoints(tmp_path, StateKey("w" * 32)), background=False)
    *reports, ended = played.run(chain("c", 3))
    assert isinstance(ended, ChainEnded) and ended.failure is None
    assert ended.outcome in ("done", "stopped") and ended.step == 3
    assert [report.reached.step for report in reports if isinstance(report, BoundaryReached)] == [3]
