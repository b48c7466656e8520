"""What a recorder keeps of what is logged and printed."""

from __future__ import annotations

import itertools
import math
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hpstage.checkpoints.stage_log import StageLog, decode, encode
from hpstage.errors import UsageError
from hpstage.plan.facts import StateKey
from hpstage.training.step_log import OUTPUT, POINTS, Recorder, log, recording


def recorded(values: dict[int, list[Any]], stop: int) -> StageLog | None:
    recorder = Recorder(0)
    for step, several in values.items():
        recorder.step = step
        with recording(recorder):
            for value in several:
                log("x", value)
    return recorder.take(stop)


def points(values: dict[int, list[Any]], stop: int = 1 << 30) -> dict[int, float]:
    taken = recorded(values, stop)
    assert taken is not None
    return dict(zip(taken.series["x"].steps, taken.series["x"].values, strict=True))


@pytest.mark.parametrize(
    "value",
    [
        *(2, 2.0, True + 1, Decimal(2), Fraction(2), np.float32(2), np.int64(2), np.array(2.0), np.array([2])),
        *(torch.tensor(2), torch.tensor([[2.0]]), torch.tensor(2.0, dtype=torch.bfloat16)),
        *(
            torch.tensor(2.0, requires_grad=True),
            torch.nn.Parameter(torch.tensor([2.0])),
            2 * torch.ones((), device="cpu"),
        ),
    ],
    ids=repr,
)
def test_a_logged_number_is_recorded_as_a_float(value: Any) -> None:
    assert points({5: [value]}) == {5: 2.0}


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("0.5", "str is not a number"),
        (None, "NoneType is not a number"),
        ([1.0], "list is not a number"),
        (1j, "complex is not a number"),
        (torch.ones(2), r"a tensor of shape \(2,\) and torch.float32 is not a number"),
        (torch.ones((), dtype=torch.complex64), "complex64 is not a number"),
        (torch.ones((), device="meta"), r"a tensor of shape \(\) and torch.float32 is not a number"),
        (np.ones(3), "ndarray is not a number"),
        (10**400, "int is not a number: int too large"),
    ],
    ids=repr,
)
def test_logging_a_value_that_is_not_a_number_is_refused_with_its_type(value: Any, message: str) -> None:
    with pytest.raises(UsageError, match=rf"log\('x', ...\): .*{message}"):
        points({0: [value]})


@pytest.mark.parametrize("name", ["", 3, None, "x" * 201, "half a pair \ud800"])
def test_logging_under_an_invalid_name_is_refused(name: Any) -> None:
    with recording(Recorder(0)), pytest.raises(UsageError, match="the name must be a string of 1 to 200 characters"):
        log(name, 1.0)


def test_logging_under_more_than_1000_names_is_refused() -> None:
    with recording(Recorder(0)):
        for step in range(1000):
            log(f"loss {step}", 1.0)
        with pytest.raises(UsageError, match="more than 1000 names"):
            log("loss 1000", 1.0)


def test_logged_tensors_and_arrays_are_copied_and_hold_no_autograd_graph() -> None:
    value, array, weight = torch.tensor(1.0), np.array(1.0), torch.tensor(1.0, requires_grad=True)
    recorder = Recorder(0)
    with recording(recorder):
        for name, logged in (("tensor", value), ("array", array), ("graph", weight * 1)):
            log(name, logged)
    value.fill_(9)
    array.fill(9)
    assert not any(isinstance(pending, torch.Tensor) for _, _, pending in recorder._pending)
    taken = recorder.take(1)
    assert taken is not None
    assert {name: series.values for name, series in taken.series.items()} == {
        "tensor": [1.0],
        "array": [1.0],
        "graph": [1.0],
    }


def test_values_logged_in_one_step_are_averaged() -> None:
    assert points({0: [1, 2, 6], 1: [5]}) == {0: 3.0, 1: 5.0}


def test_log_does_nothing_while_no_recorder_is_active() -> None:
    log("x", 1.0)
    log("x", "no number: nobody looks at it")
    assert Recorder(0).take(5) is None


def test_taking_a_log_removes_its_steps_from_the_recorder_and_leaves_later_steps() -> None:
    recorder = Recorder(0)
    for step in range(4):
        recorder.step = step
        recorder.log("x", step)
        recorder.write(f"{step}\n")
    first, last = recorder.take(3), recorder.take(4)
    assert first is not None
    assert last is not None
    assert (first.start, first.stop, first.series["x"].steps, first.output) == (0, 3, [0, 1, 2], "0\n1\n2\n")
    assert (last.start, last.stop, last.series["x"].steps, last.output) == (3, 4, [3], "3\n")
    assert recorder.take(4) is None


@settings(max_examples=20)
@given(st.integers(1, 9 * POINTS), st.integers(1, 7), st.sets(st.integers(0, 9 * POINTS), max_size=5))
def test_many_logged_values_are_thinned_evenly_but_non_finite_values_are_kept(
    count: int, every: int, strange: set[int]
) -> None:
    steps = range(0, count * every, every)
    logged = {step: [math.nan if step // every in strange else float(step)] for step in steps}
    found = points(logged)
    assert all(math.isnan(found[index * every]) for index in strange if index < count and index - 1 not in strange)
    finite = [step for step, value in found.items() if math.isfinite(value)]
    assert all(found[step] == step for step in finite)
    assert len(finite) <= POINTS
    if count <= POINTS:
        assert list(found) == list(steps)
    else:
        assert len(finite) > POINTS // 2 - 10
        gaps = {b - a for a, b in itertools.pairwise(finite)}
        assert max(gaps) <= min(gaps) * (1 + len(strange))


def test_memory_of_a_recorder_is_bounded_however_much_is_logged() -> None:
    recorder = Recorder(0)
    for step in range(50 * POINTS):
        recorder.step = step
        recorder.log("x", math.nan if step % 2 else 1.0)
        recorder.write("a line that is printed in every step\n")
    assert len(recorder._columns["x"]._points) <= 4 * POINTS
    assert sum(len(text) for _, text in recorder._output) <= OUTPUT
    taken = recorder.take(50 * POINTS)
    assert taken is not None
    assert len(taken.series["x"].steps) <= 2 * POINTS
    assert (len(taken.output), taken.left_out) == (OUTPUT, 50 * POINTS * 37 - OUTPUT)


@pytest.mark.ci
def test_recorded_output_keeps_its_end_and_the_last_state_of_progress_bars() -> None:
    recorder = Recorder(0)
    recorder.write("before\n")
    for percent in range(100):
        recorder.write(f"\r{percent} %")
    recorder.write("\nafter\r\n")
    taken = recorder.take(1)
    assert taken is not None
    assert taken.output == "before\n99 %\nafter\r\n"
    recorder.write("a" * 10 + "b" * OUTPUT)
    taken = recorder.take(2)
    assert taken is not None
    assert (taken.output, taken.left_out) == ("b" * OUTPUT, 10)


def test_recorded_output_escapes_file_names_that_are_not_utf8() -> None:
    recorder = Recorder(0)
    recorder.write("read caf\udce9.png\n")
    taken = recorder.take(1)
    assert taken is not None
    key = StateKey("0" * 32)
    assert decode(encode(taken, key, "workload"), key, "workload", "a file").output == "read caf\\udce9.png\n"
