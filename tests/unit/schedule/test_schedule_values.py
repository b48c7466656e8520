"""What a value may be, what a schedule refuses, and what a hostile store cannot make of it."""

from __future__ import annotations

import enum
import math
import pickle
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpstage import schedule as s
from hpstage.errors import ScheduleError
from hpstage.schedule import Schedule


class Mixture(enum.StrEnum):
    NEWS = "news"


class Depth(enum.IntEnum):
    DEEP = 50


# --- values -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("written", "spelled"),
    [
        (1.0, 1),
        (-0.0, 0),
        (0.5, 0.5),
        (True, True),
        (None, None),
        ("flip", "flip"),
        ("größe", "größe"),
        (2**63, 2**63),
        (float(2**60), 2**60),
        (1e300, 1e300),
        (5e-324, 5e-324),
        (np.float64(2.0), 2),
        (np.float32(0.5), 0.5),
        (np.int8(3), 3),
        (np.bool_(True), True),
        (np.str_("flip"), "flip"),
        (np.array(4.0), 4),
        (Mixture.NEWS, "news"),
        (Depth.DEEP, 50),
    ],
)
def test_a_value_is_converted_to_its_canonical_python_value(written: object, spelled: object) -> None:
    value = s.canonical(written)
    assert value == spelled
    assert type(value) is type(spelled)


@given(st.one_of(st.floats(allow_nan=False, allow_infinity=False), st.integers(-(2**63), 2**64 - 1), st.booleans()))
def test_a_canonical_value_equals_its_source_and_survives_json(value: float) -> None:
    plain = s.canonical(value)
    assert plain == value
    assert s.canonical(plain) is plain
    assert type(plain) is not float or not plain.is_integer() or abs(plain) >= 2**63
    back = msgspec.json.decode(msgspec.json.encode(s.Constant(value)), type=s.Constant).scalar
    assert back == plain
    assert type(back) is type(plain)


@pytest.mark.parametrize(
    "value",
    [math.nan, math.inf, -math.inf, np.float32("nan"), [1], (1,), {}, b"x", 1j, object, 2**64, -(2**63) - 1],
)
def test_a_value_that_is_not_a_finite_json_scalar_is_named_in_the_error(value: object) -> None:
    with pytest.raises(ScheduleError) as caught:
        s.canonical(value)
    named = "the class object" if value is object else repr(value).removeprefix("np.float32(").removesuffix(")")
    assert named in str(caught.value)


@pytest.mark.parametrize("value", ["\ud800", np.array([1.0]), Ellipsis])
def test_a_constant_schedule_of_a_value_that_json_cannot_hold_is_refused(value: object) -> None:
    with pytest.raises(ScheduleError):
        s.constant(value)  # type: ignore[arg-type]


def test_booleans_do_not_equal_numbers_in_schedules() -> None:
    assert not s.same(True, 1)
    assert not s.same(0, False)
    assert s.same(True, True)
    assert s.same(1, 1.0)
    assert s.Constant(True) != s.Constant(1)
    assert s.Sampled((True, 2)) != s.Sampled((1, 2))


def test_whole_values_of_a_multistep_schedule_are_integers() -> None:
    batch_size = s.multistep(32, [1, 2], gamma=2)
    assert [type(value) for value in batch_size.values(3)] == [int, int, int]
    assert list(batch_size.values(3)) == [32, 64, 128]


def test_a_schedule_may_have_strings_as_values() -> None:
    mixture = s.piecewise({0: "web", 3: "books"})
    assert list(mixture.values(5)) == ["web", "web", "web", "books", "books"]


# --- what the constructors mean ---------------------------------------------------------------------------


def test_a_wsd_warmup_starts_above_zero_and_ends_at_the_peak_value() -> None:
    values = list(s.wsd(0.8, 10, warmup=4, decay=4).values(10))
    assert values == pytest.approx([0.2, 0.4, 0.6, 0.8, 0.8, 0.8, 0.8, 0.6, 0.4, 0.2])
    assert values[3:7] == [0.8] * 4


@pytest.mark.parametrize(
    ("form", "share"),
    [
        ("linear", lambda x: 1 - x),
        ("cosine", lambda x: (1 + math.cos(math.pi * x)) / 2),
        ("1-sqrt", lambda x: 1 - math.sqrt(x)),
    ],
)
def test_a_wsd_decay_starts_at_the_peak_and_reaches_the_final_value_one_step_after_its_last(
    form: str, share: Callable[[float], float]
) -> None:
    schedule = s.wsd(0.5, 30, warmup=0, decay=20, final=0.1, decay_form=form)  # type: ignore[arg-type]
    assert list(schedule.values(30))[10:] == pytest.approx([0.1 + 0.4 * share(t / 20) for t in range(20)])
    assert schedule.value(10) == 0.5
    assert schedule.form_at(29).value(30) == pytest.approx(0.1)


def test_wsd_schedules_of_two_lengths_are_equal_through_the_first_decay_step() -> None:
    early, late = s.wsd(0.1, 60, warmup=5, decay=20), s.wsd(0.1, 100, warmup=5, decay=20)
    assert early.until(41) == late.until(41)
    assert early.until(42) != late.until(42)


def test_wsd_warmups_of_equal_slope_have_equal_forms() -> None:
    low, high = s.wsd(0.125, 50, warmup=5, decay=0), s.wsd(0.25, 50, warmup=10, decay=0)
    assert low.until(5) == high.until(5)
    assert low.form_at(0) == high.form_at(0)


def test_each_piece_of_a_piecewise_schedule_counts_steps_from_its_start() -> None:
    schedule = s.piecewise({0: s.linear(1.0, 0.5, 1.0, 2), 3: s.exponential(0.5, 0.5), 5: 7})
    assert list(schedule.values(7)) == [0.5, 0.75, 1, 0.5, 0.25, 7, 7]


def test_a_sampled_schedule_calls_its_function_once_for_each_step() -> None:
    calls: list[int] = []

    def half(step: int) -> float:
        calls.append(step)
        return step / 2

    schedule = s.sampled(half, 4)
    assert calls == [0, 1, 2, 3]
    assert list(schedule.values(4)) == [0, 0.5, 1, 1.5]
    assert s.sampled([0, 0.5, 1, 1.5]) == schedule


def test_consecutive_equal_samples_become_constants() -> None:
    forms = [form for _, _, form in s.sampled([1, 1, 2, 3, "a", "a", "a", 5]).pieces()]
    assert forms == [s.Constant(1), s.Sampled((2, 3), origin=2), s.Constant("a"), s.Constant(5)]


def test_a_step_schedule_becomes_constants_if_it_has_few_stairs() -> None:
    assert not any(s.varies(form) for _, _, form in s.step(0.1, 30).until(300).pieces())
    assert len(s.step(0.1, 2).until(10_000).segments) == 1


def test_as_schedule_makes_plain_values_constant_and_keeps_schedules() -> None:
    schedule = s.cosine(0.1, 10)
    assert s.as_schedule(schedule) is schedule
    assert s.as_schedule("flip") == s.constant("flip")
    assert s.constant(1).until(3).then("flip").value(3) == "flip"


def test_schedules_can_be_pickled_and_hashed() -> None:
    schedule = s.wsd(0.1, 50, warmup=5, decay=5).then(s.sampled([1, 2, "a"]))
    assert pickle.loads(pickle.dumps(schedule)) == schedule  # noqa: S301  # our own bytes
    assert {s.constant(1), s.constant(1.0), s.multistep(1, [])} == {s.constant(1)}


# --- what is refused --------------------------------------------------------------------------------------


untyped: Any = s  # misused on purpose, past the type checker


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: untyped.multistep("0.1", [3]), "value is '0.1'; it must be a number"),
        (lambda: untyped.multistep(True, [3]), "value is True; it must be a number"),
        (lambda: untyped.multistep(0.1, [-3]), "milestones is -3; it must be a whole number"),
        (lambda: untyped.multistep(0.1, [2.5]), "milestones is 2.5; it must be a whole number"),
        (lambda: untyped.multistep(0.1, [3], gamma=math.nan), "gamma: nan"),
        (lambda: untyped.multistep(0.1, 3), "milestones is 3; give a list"),
        (lambda: untyped.multistep(1e300, [3], gamma=1e300), "inf"),
        (lambda: untyped.multistep(1.0, [3, 4], gamma=1e300), "is not finite"),
        (lambda: untyped.step(0.1, 0), "step_size is 0; .* at least 1"),
        (lambda: untyped.exponential(math.inf, 0.9), "value: inf"),
        (lambda: untyped.exponential(1.0, 10.0).until(400), r"no finite value at step 399; bound it .*\.until"),
        (lambda: untyped.linear(0.1, total_iters=0), "total_iters is 0"),
        (lambda: untyped.linear(0.1, start_factor=None), "start_factor is None"),
        (lambda: untyped.polynomial(0.1, total_iters=-1), "total_iters is -1"),
        (lambda: untyped.polynomial(0.1, power=-1), "power is -1; it must be at least 0"),
        (lambda: untyped.cosine(0.1, 0), "T_max is 0"),
        (lambda: untyped.cosine(0.1, 10, eta_min="low"), "eta_min is 'low'"),
        (lambda: untyped.cosine_restarts(0.1, 5, T_mult=0), "T_mult is 0"),
        (lambda: untyped.cosine_restarts(0.1, 5, T_mult=1.5), "T_mult is 1.5"),
        (lambda: untyped.onecycle(0.1, 10, pct_start=1.5), "pct_start is 1.5; it must be from 0 to 1"),
        (lambda: untyped.onecycle(0.1, 10, anneal_strategy="log"), "anneal_strategy is 'log'"),
        (lambda: untyped.onecycle(0.1, 10, div_factor=0), "div_factor"),
        (
            lambda: untyped.wsd(0.1, 10, warmup=6, decay=6),
            r"warmup \(6\) and decay \(6\) are longer than steps \(10\)",
        ),
        (lambda: untyped.wsd(0.1, 10, warmup=1, decay=1, decay_form="exp"), "decay_form is 'exp'"),
        (lambda: untyped.piecewise({}), "the first must start at step 0"),
        (lambda: untyped.piecewise({5: 1}), "the first must start at step 0"),
        (lambda: untyped.piecewise({0: 1, 9: 2, 4: 3}), "the starts must increase"),
        (
            lambda: untyped.piecewise({0: untyped.sampled([1, 2]), 5: 3}),
            r"has 2 steps, but the next starts at 5; start the next at 2",
        ),
        (lambda: untyped.sampled(lambda step: step), "steps is missing"),
        (lambda: untyped.sampled([1, 2], 3), "steps is 3, but the sequence has 2 values"),
        (lambda: untyped.sampled("abc"), "one value and not a sequence"),
        (lambda: untyped.sampled([1, math.nan]), "at step 1: nan"),
        (lambda: untyped.sampled(lambda step: [step], 2), "at step 0"),
        (
            lambda: untyped.constant(1).then(2),
            r"nothing can follow a schedule without an end; bound it with \.until\(step\)",
        ),
        (lambda: untyped.constant(1).until(3).until(4), r"ends at step 3 and cannot be cut at step 4; add \.then"),
        (lambda: untyped.constant(1).until(-1), "step is -1"),
        (lambda: untyped.constant(1).until(True), "step is True"),
        (lambda: untyped.constant(1).since(0.5), "step is 0.5"),
    ],
)
def test_an_invalid_schedule_argument_is_named_in_the_error(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        make()


def test_an_unbounded_exponential_raises_an_error_at_the_step_where_it_overflows() -> None:
    schedule = s.exponential(1.0, 10.0)
    assert schedule.value(10) == 10**10
    with pytest.raises(ScheduleError, match="no finite value at step 400"):
        schedule.value(400)


# --- what a store may hold --------------------------------------------------------------------------------


def written(*segments: str) -> bytes:
    return ('{"segments":[' + ",".join(segments) + "]}").encode()


@pytest.mark.parametrize(
    "segment",
    [
        '{"form":{"type":"constant","scalar":NaN}}',
        '{"form":{"type":"constant","scalar":1e999}}',
        '{"form":{"type":"constant","scalar":[1]}}',
        '{"form":{"type":"constant"}}',
        '{"form":{"type":"constant","scalar":1},"length":-1}',
        '{"form":{"type":"constant","scalar":1},"length":1.5}',
        '{"form":{"type":"constant","scalar":1},"length":true}',
        '{"form":{"type":"constant","scalar":1},"length":9007199254740993}',
        '{"form":{"type":"os.system","scalar":"true"}}',
        '{"form":{"type":"linear","base":"x","slope":1}}',
        '{"form":{"type":"linear","base":0,"slope":1,"origin":99999999999999999}}',
        '{"form":{"type":"linear","base":0,"slope":1e999}}',
        '{"form":{"type":"linear","base":1e308,"slope":1e308},"length":9}',
        '{"form":{"type":"exponential","base":1,"gamma":0,"origin":5}}',
        '{"form":{"type":"exponential","base":1,"gamma":10},"length":1000}',
        '{"form":{"type":"staircase","base":1,"gamma":0.1,"width":0}}',
        '{"form":{"type":"staircase","base":1,"gamma":0.1,"width":-3}}',
        '{"form":{"type":"cosine","base":1,"floor":0,"half":0}}',
        '{"form":{"type":"cosine","base":1e308,"floor":-1e308,"half":2}}',
        '{"form":{"type":"cosine-restarts","base":1,"floor":0,"first":5,"growth":0}}',
        '{"form":{"type":"polynomial","base":1,"change":1,"span":0,"power":1}}',
        '{"form":{"type":"polynomial","base":1,"change":1,"span":5,"power":-1}}',
        '{"form":{"type":"sampled","values":[]},"length":3}',
        '{"form":{"type":"sampled","values":[[1]]},"length":3}',
    ],
)
def test_json_that_is_not_a_valid_schedule_is_refused(segment: str) -> None:
    with pytest.raises(msgspec.DecodeError):
        msgspec.json.decode(written(segment), type=Schedule)


def test_only_the_last_segment_of_a_schedule_may_be_unbounded() -> None:
    one = '{"form":{"type":"constant","scalar":1}}'
    with pytest.raises(msgspec.ValidationError, match="only the last segment"):
        msgspec.json.decode(written(one, one), type=Schedule)


def test_a_schedule_read_from_json_is_normalized() -> None:
    read = msgspec.json.decode(
        written(
            '{"form":{"type":"constant","scalar":1.0},"length":2}',
            '{"form":{"type":"constant","scalar":5},"length":0}',
            '{"form":{"type":"linear","base":1,"slope":0},"length":2}',
            '{"form":{"type":"sampled","values":[1,1,1]},"length":1000000000000}',
        ),
        type=Schedule,
    )
    assert read.segments == (s.Segment(s.Constant(1), 1000000000004),)


def test_importing_hpstage_schedule_imports_no_heavy_package() -> None:
    heavy = "{'torch', 'numpy', 'dask', 'distributed', 'optuna', 'redis', 'matplotlib'}"
    code = f"import sys, hpstage.schedule; print(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("course", "remedy"),
    [([0.1, 0.01], "sampled"), ((1, 2), "sampled"), (lambda step: 0.1, "sampled"), ({0: 0.1, 5: 0.01}, "piecewise")],
)
def test_the_error_for_a_sequence_given_as_a_value_names_the_schedule_to_use(course: Any, remedy: str) -> None:
    with pytest.raises(ScheduleError, match=rf"is not a value; for values over steps, use hpstage.schedule.{remedy}\("):
        s.as_schedule(course)
