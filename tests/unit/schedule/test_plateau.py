"""s.plateau against torch's ReduceLROnPlateau."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hpstage import schedule as s
from hpstage.errors import ScheduleError
from hpstage.schedule.plateau import Mode, ReduceOnPlateau

METRICS = st.lists(
    st.one_of(st.sampled_from([0.0, 1.0, 1.00005, 1.1, -1.0, math.nan, math.inf]), st.floats(-2, 2)), max_size=40
)


@given(
    metrics=METRICS,
    mode=st.sampled_from(["min", "max"]),
    threshold_mode=st.sampled_from(["rel", "abs"]),
    threshold=st.sampled_from([0.0, 1e-4, 0.3]),
    patience=st.integers(0, 4),
    cooldown=st.integers(0, 3),
    factor=st.sampled_from([0.1, 0.5, 0.99999999]),
    min_lr=st.sampled_from([0.0, 0.01]),
    start=st.integers(0, 3),
    every=st.integers(1, 3),
)
def test_plateau_values_equal_those_of_reduce_lr_on_plateau(
    metrics: list[float], mode: Mode, start: int, every: int, threshold_mode: Any, **options: Any
) -> None:
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.3)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, mode, threshold_mode=threshold_mode, **options)
    plateau = s.plateau(0.3, mode, threshold_mode=threshold_mode, every=every, metric="m", **options)
    reducer = ReduceOnPlateau(plateau.after(s.constant(7).until(start)))
    expected = [7.0] * start
    for seen, metric in enumerate(metrics, 1):
        lr = optimizer.param_groups[0]["lr"]
        expected += [lr] * every
        scheduler.step(metric)
        assert reducer.see(start + seen * every, metric) is (optimizer.param_groups[0]["lr"] != lr)
    expected.append(optimizer.param_groups[0]["lr"])
    assert list(reducer.schedule().values(len(expected))) == expected


def test_a_plateau_reads_the_metric_at_each_interval_but_not_at_the_end() -> None:
    assert list(s.plateau(0.1).looks(4)) == [1, 2, 3]
    after = s.linear(0.1, total_iters=5).until(5).then(s.plateau(0.1, every=2))
    assert after.start == 5
    assert list(after.looks(11)) == [7, 9]


def test_a_plateau_can_be_shortened_but_not_extended_or_followed() -> None:
    warm = s.linear(0.1, total_iters=5).until(5)
    plateau = warm.then(s.plateau(0.1).until(4))
    assert plateau.length == 9
    assert plateau.until(3) == warm.until(3)
    assert ReduceOnPlateau(plateau.until(7)).schedule() == warm.then(s.constant(0.1).until(2))
    with pytest.raises(ScheduleError, match=r"ends at step 9 and cannot be cut at step 10"):
        plateau.until(10)
    with pytest.raises(ScheduleError, match=r"nothing can follow s\.plateau"):
        plateau.until(9).then(s.constant(1))  # type: ignore[union-attr]
    with pytest.raises(ScheduleError, match=r"bound it with \.until"):
        s.constant(1).then(s.plateau(0.1))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"factor": 1.0}, "factor is 1.0; it must be below 1"),
        ({"mode": "up"}, "mode is 'up'"),
        ({"threshold_mode": "relative"}, "threshold_mode is 'relative'"),
        ({"patience": -1}, "patience is -1"),
        ({"every": 0}, "every is 0"),
        ({"metric": 3}, "metric is 3"),
        ({"value": "a"}, "value is 'a'"),
    ],
)
def test_invalid_plateau_arguments_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        s.plateau(**({"value": 0.1} | options))
