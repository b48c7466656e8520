"""How often the driver finds out how many workers a search can use."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from hpstage.cluster import adaptive
from hpstage.cluster.adaptive import DemandFeed


@pytest.mark.parametrize(("takes", "looks"), [(0.0001, 100), (0.5, 4)], ids=["cheap", "expensive"])
def test_an_expensive_demand_estimate_is_made_less_often_than_a_cheap_one(
    takes: float, looks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In 100 seconds: once in a second, or at most 2 % of them."""
    now, reported = [0.0], []
    monkeypatch.setattr(adaptive, "time", SimpleNamespace(monotonic=lambda: now[0]))
    feed: Any = DemandFeed()
    feed._client, feed._report = SimpleNamespace(cluster=None), reported.append

    def demand(at: float, start_seconds: float) -> int:
        now[0] += takes
        return 3

    feed.follow(demand)
    while now[0] < 100:
        feed.look(now[0])
        now[0] += 0.1
    assert looks * 0.9 <= len(reported) <= looks and set(reported) == {3}
