"""The laws of schedules, held against their values written out step by step."""

from __future__ import annotations

from itertools import pairwise

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpstage import schedule as s
from hpstage.errors import ScheduleError
from hpstage.schedule import Form, Scalar, Schedule
from hpstage.schedule.segments import Segment, _is_normal, _normal

HORIZON = 40

rates = st.sampled_from([0, 1, 0.1, 0.05, 1e-3, 2.5, -0.5])
counts = st.integers(1, 12)
scalars = st.sampled_from([0, 1, 2, True, False, None, "a", "b", 0.1, 1.0])

open_ones = st.one_of(
    scalars.map(s.constant),
    st.builds(s.multistep, rates, st.lists(st.integers(0, 30), max_size=4), st.sampled_from([0.1, 0.5, 1])),
    st.builds(s.step, rates, counts, st.sampled_from([0.1, 0.5, 1])),
    st.builds(s.exponential, rates, st.sampled_from([0.9, 0.5, 1])),
    st.builds(s.linear, rates, st.sampled_from([0, 0.1, 1]), st.sampled_from([0, 1]), counts),
    st.builds(s.polynomial, rates, counts, st.sampled_from([0, 0.5, 1, 2])),
    st.builds(s.cosine, rates, counts, rates),
    st.builds(s.cosine_restarts, rates, counts, st.integers(1, 3), rates),
)
bounded_ones = st.one_of(
    st.builds(s.onecycle, rates, counts, st.sampled_from([0, 0.3, 1]), st.sampled_from(["cos", "linear"])),
    st.builds(
        lambda rate, rise, hold, fall, form: s.wsd(rate, rise + hold + fall, warmup=rise, decay=fall, decay_form=form),
        rates,
        st.integers(0, 5),
        st.integers(0, 5),
        st.integers(0, 5),
        st.sampled_from(["linear", "cosine", "1-sqrt"]),
    ),
    st.lists(scalars, max_size=12).map(s.sampled),
    st.builds(lambda one, steps: one.until(steps), open_ones, st.integers(0, 12)),
)
schedules = st.builds(
    lambda first, second, rest: first.then(second).then(rest),
    bounded_ones,
    bounded_ones,
    st.one_of(bounded_ones, open_ones),
)


def reach(schedule: Schedule) -> int:
    return HORIZON if schedule.length is None else schedule.length


def spelled(values: list[Scalar]) -> list[tuple[str, Scalar]]:
    """Values with their types: Python holds True == 1."""
    return [(type(value).__name__, value) for value in values]


def written_out(schedule: Schedule) -> list[tuple[str, Scalar]]:
    return spelled(list(schedule.values(reach(schedule))))


# --- cutting and joining ----------------------------------------------------------------------------------


@given(schedules, st.data())
def test_a_schedule_cut_anywhere_and_rejoined_is_the_same_schedule(schedule: Schedule, data: st.DataObject) -> None:
    at = data.draw(st.integers(0, reach(schedule)))
    rejoined = schedule.until(at).then(schedule.since(at))
    assert rejoined == schedule
    assert hash(rejoined) == hash(schedule)
    assert written_out(rejoined) == written_out(schedule)


@given(schedules, st.data())
def test_cutting_a_schedule_keeps_every_value_bit_for_bit(schedule: Schedule, data: st.DataObject) -> None:
    at = data.draw(st.integers(0, reach(schedule)))
    whole = written_out(schedule)
    assert written_out(schedule.until(at)) == whole[:at]
    rest = schedule.since(at)
    assert written_out(rest)[: len(whole) - at] == whole[at:]
    assert rest.length == (None if schedule.length is None else schedule.length - at)


@given(bounded_ones, schedules)
def test_joined_schedules_have_the_values_of_the_first_then_those_of_the_second(
    first: Schedule, second: Schedule
) -> None:
    assert (
        written_out(first.then(second))[: reach(first) + reach(second)]
        == (written_out(first) + written_out(second))[: reach(first.then(second))]
    )


@given(bounded_ones, bounded_ones, schedules)
def test_joining_schedules_is_associative(first: Schedule, second: Schedule, third: Schedule) -> None:
    assert first.then(second).then(third) == first.then(second.then(third))


@given(schedules, st.integers(0, 1000))
def test_a_form_is_unchanged_after_a_shift_forth_and_back(schedule: Schedule, by: int) -> None:
    for start, stop, form in schedule.pieces():
        assert form.shifted(by).shifted(-by) == form
        for step in range(start, min(stop or HORIZON, HORIZON)):
            assert s.same(form.shifted(by).value(step + by), form.value(step))


@given(schedules, st.integers(1, HORIZON))
def test_a_cut_keeps_the_form_of_segments_over_one_step_except_staircases(schedule: Schedule, at: int) -> None:
    at = min(at, reach(schedule))
    before = {start: form for start, _, form in schedule.pieces()}
    for start, stop, form in schedule.until(at).pieces():
        assert stop is not None
        if stop - start > 1 and start in before and not isinstance(before[start], s.Staircase):
            assert form == before[start]


# --- repr -------------------------------------------------------------------------------------------------


def evaluated(text: str) -> object:
    return eval(f"({text})", {name: getattr(s, name) for name in s.__all__})  # noqa: S307


@given(schedules)
def test_the_repr_of_a_schedule_evaluates_to_the_schedule(schedule: Schedule) -> None:
    assert evaluated(repr(schedule)) == schedule


reals = st.one_of(rates, st.floats(-1e6, 1e6), st.floats(1e-6, 1.0))
positive = st.one_of(st.sampled_from([25, 1e4, 0.5]), st.floats(1e-3, 1e6))
steps = st.integers(0, 1000)
constructed = st.one_of(
    st.builds(s.constant, st.one_of(scalars, reals)),
    st.builds(s.multistep, reals, st.lists(steps, max_size=6), st.one_of(st.just(1 / 3), st.floats(0, 2))),
    st.builds(s.step, reals, st.integers(1, 50), st.floats(0.1, 2)).map(lambda one: one.until(500)),
    st.builds(s.exponential, reals, st.floats(0, 1)),
    st.builds(s.linear, reals, reals, reals, st.integers(1, 1000)),
    st.builds(s.polynomial, reals, st.integers(1, 1000), st.one_of(st.just(1), st.floats(0, 5))),
    st.builds(s.cosine, reals, st.integers(1, 1000), reals),
    st.builds(s.cosine_restarts, reals, st.integers(1, 100), st.integers(1, 3), reals),
    st.builds(
        s.onecycle,
        *(reals, steps, st.floats(0, 1), st.sampled_from(["cos", "linear"]), positive, positive, st.booleans()),
    ),
    st.builds(
        lambda top, rise, hold, fall, end, form: s.wsd(
            top, rise + hold + fall, warmup=rise, decay=fall, final=end, decay_form=form
        ),
        *(st.floats(1e-6, 10), steps, steps, steps, st.floats(1e-9, 1)),
        st.sampled_from(["linear", "cosine", "1-sqrt", "exponential"]),
    ),
    st.dictionaries(steps, st.one_of(scalars, reals)).map(
        lambda given: s.piecewise({0: 1, **dict(sorted(given.items()))})
    ),
    st.lists(st.one_of(scalars, reals), max_size=12).map(s.sampled),
)


@given(constructed, steps, steps, constructed)
def test_the_repr_of_constructed_cut_and_joined_schedules_evaluates_to_them(
    one: Schedule, first: int, length: int, other: Schedule
) -> None:
    assert evaluated(repr(one)) == one
    if one.length is None or one.length >= first + length:
        part = one.since(first).until(length)
        assert evaluated(repr(part)) == part
        joined = part.then(other)
        assert evaluated(repr(joined)) == joined


@given(schedules, st.integers(0, 12), st.integers(0, 12))
def test_the_repr_of_a_section_of_a_schedule_evaluates_to_the_section(
    schedule: Schedule, first: int, length: int
) -> None:
    if schedule.length is None or schedule.length >= first + length:
        part = schedule.since(first).until(length)
        assert evaluated(repr(part)) == part


@pytest.mark.parametrize(
    "text",
    [
        "constant('web')",
        "multistep(0.1, [30], gamma=0.1)",
        "multistep(0.05, [30, 60, 90], gamma=0.5).until(100)",
        "multistep(1.0, [30, 60], gamma=0.5)",
        "multistep(0.1, [30, 30, 60], gamma=0.3333333333333333)",
        "piecewise({0: 64, 70: 256})",
        "piecewise({0: 64, 70: 32})",
        "piecewise({0: True, 4: None}).until(9)",
        "linear(0.1, start_factor=0.1, total_iters=5).until(5).then(cosine(0.1, T_max=95)).until(100)",
        "linear(0.1, start_factor=1.0, end_factor=0.2, total_iters=9)",
        "linear(0.1, total_iters=100)",
        "linear(0.1, total_iters=100).until(37)",
        "linear(0.1, start_factor=0.1, total_iters=5).until(5).then(multistep(0.1, [30, 60], gamma=0.1))",
        "polynomial(0.1, total_iters=100)",
        "polynomial(0.1, total_iters=100).until(30)",
        "polynomial(0.1, total_iters=100, power=2.0).since(30)",
        "cosine(0.1, T_max=10, eta_min=0.01)",
        "cosine(0.1, T_max=10).until(3).then(cosine(0.05, T_max=10).since(3)).until(10)",
        "cosine_restarts(0.1, T_0=5)",
        "cosine_restarts(0.1, T_0=5, T_mult=2, eta_min=0.01)",
        "onecycle(0.1, 100)",
        "onecycle(0.1, 103).until(20)",
        "onecycle(0.1, 103).since(20)",
        "onecycle(0.1, 103).since(50)",
        "onecycle(0.1, 103).since(50).until(20)",
        "onecycle(0.1, 100, pct_start=0.0)",
        "onecycle(0.1, 100, pct_start=0.25, div_factor=10.0, final_div_factor=100.0, three_phase=True)",
        "onecycle(0.1, 100, anneal_strategy='linear')",
        "onecycle(0.1, 100, anneal_strategy='linear', three_phase=True)",
        "wsd(0.1, 100, warmup=10, decay=20)",
        "wsd(0.1, 100, warmup=10, decay=0)",
        "wsd(0.1, 100, warmup=0, decay=20, decay_form='cosine')",
        "wsd(0.1, 100, warmup=10, decay=20, decay_form='1-sqrt').since(5)",
        "wsd(0.1, 100, warmup=10, decay=20, final=0.001, decay_form='exponential')",
        "wsd(0.1, 50, warmup=10, decay=0).then(0.01)",
        "wsd_sweep(0.1, horizons=100, warmup=10)",
        "wsd_sweep([0.1, 1], horizons=[100, 200], warmup=5, decay_fraction=[0, 0.2], decay_form=['cosine', 'linear'])",
        "wsd_sweep(1, horizons=9, warmup=1, final=0.1, hp={'batch': 64, 'wd': cosine(0.1, T_max=9), 'seed': [0], "
        "'mix': ['a', 'b']}, decay_hp={'mix': ['a', 'c']}, keep_every=3, name='rate')",
        "polynomial(0.1, total_iters=7, power=2.0)",
        "exponential(0.1, gamma=0.99)",
        "step(0.1, step_size=10, gamma=0.5)",
        "step(0.1, step_size=10, gamma=0.5).until(80)",
        "constant(0.1).until(10).then(sampled([1, 2, 3])).then(cosine(1.0, T_max=3))",
        "sampled([1, 2, 3]).then(4)",
        "constant(0.1).until(3).then(exponential(0.1, gamma=0.9))",
        "plateau(0.1, mode='max', patience=3)",
        "linear(0.1, start_factor=0.5, total_iters=5).until(5).then(plateau(0.1, factor=0.5)).until(50)",
    ],
)
def test_the_repr_of_a_schedule_is_the_expression_that_built_it(text: str) -> None:
    assert repr(evaluated(text)) == text
    assert evaluated(repr(evaluated(text))) == evaluated(text)


@pytest.mark.parametrize(
    ("text", "shortest"),
    [
        ("linear(0.1, start_factor=1.0, end_factor=0.0, total_iters=9)", "polynomial(0.1, total_iters=9)"),
        (
            "linear(0.1, start_factor=0.0, end_factor=100, total_iters=5)",
            "linear(10.0, start_factor=0.0, total_iters=5)",
        ),
        ("constant(0.1).until(80).then(polynomial(0.1, 20)).until(100)", "wsd(0.1, 100, warmup=0, decay=20)"),
        ("wsd(0.1, 100, warmup=10, decay=20).since(85)", "polynomial(0.1, total_iters=20).since(5).until(15)"),
        ("wsd(0.1, 100, warmup=10, decay=20).until(90)", "wsd(0.1, 90, warmup=10, decay=10, final=0.05)"),
        ("step(0.1, step_size=30, gamma=0.1).until(90)", "multistep(0.1, [30, 60], gamma=0.1).until(90)"),
        ("piecewise({0: 1, 30: 0.5, 60: 0.25})", "multistep(1.0, [30, 60], gamma=0.5)"),
        ("sampled([1, 1, 2])", "piecewise({0: 1, 2: 2}).until(3)"),
    ],
)
def test_the_repr_of_a_schedule_that_several_expressions_make_is_a_short_one(text: str, shortest: str) -> None:
    assert repr(evaluated(text)) == shortest
    assert evaluated(shortest) == evaluated(text)


def test_the_repr_of_a_schedule_does_not_depend_on_where_a_linear_segment_was_cut() -> None:
    given = s.constant(0.001).until(20).then(s.linear(0.003, start_factor=0.1, total_iters=5)).until(40)
    (_, _, start), (_, _, line), (_, _, end) = given.pieces()
    cut = Schedule((Segment(start, 20), Segment(line, 6), Segment(end, 14)))
    assert cut == given
    assert repr(cut) == "constant(0.001).until(20).then(linear(0.003, start_factor=0.1, total_iters=5)).until(40)"


# --- reading ----------------------------------------------------------------------------------------------


@given(schedules)
def test_pieces_of_a_schedule_are_contiguous_and_neighbours_differ(schedule: Schedule) -> None:
    pieces = schedule.pieces()
    assert [start for start, _, _ in pieces[:1]] in ([], [0])
    for (_, stop, form), (start, _, following) in pairwise(pieces):
        assert stop == start
        assert form != following
    assert schedule.length == (pieces[-1][1] if pieces else 0)
    for start, stop, form in pieces:
        assert stop is None or start < stop
        assert schedule.form_at(start) is form
        if stop is not None and stop - start == 1:
            assert not s.varies(form)


@given(schedules)
def test_schedule_values_are_canonical_and_equal_those_read_step_by_step(schedule: Schedule) -> None:
    steps = reach(schedule)
    one_by_one = [schedule.value(step) for step in range(steps)]
    assert spelled(one_by_one) == written_out(schedule)
    assert spelled([s.canonical(value) for value in one_by_one]) == written_out(schedule)


@given(bounded_ones)
def test_a_schedule_has_no_value_past_its_end(schedule: Schedule) -> None:
    assert schedule.length is not None
    for step in (schedule.length, -1):
        with pytest.raises(ScheduleError, match=f"no step {step}"):
            schedule.value(step)
    with pytest.raises(ScheduleError, match="no step"):
        list(schedule.values(schedule.length + 1))
    with pytest.raises(ScheduleError, match="cannot be cut"):
        schedule.until(schedule.length + 1)
    with pytest.raises(ScheduleError, match="cannot be cut"):
        schedule.since(schedule.length + 1)


# --- equality ---------------------------------------------------------------------------------------------


@given(schedules.filter(lambda one: one.length is not None), schedules.filter(lambda one: one.length is not None))
def test_bounded_schedules_are_equal_exactly_when_their_values_are(a: Schedule, b: Schedule) -> None:
    assert (a == b) == (written_out(a) == written_out(b))
    assert a != b or hash(a) == hash(b)


@given(schedules.filter(lambda one: one.length is not None))
def test_a_bounded_schedule_equals_a_sampled_schedule_of_its_values(schedule: Schedule) -> None:
    assert schedule.length is not None
    table = s.sampled(schedule.value, schedule.length)
    assert table == schedule
    assert schedule == table
    assert hash(table) == hash(schedule)


@given(schedules, schedules)
def test_equal_schedules_have_equal_values_and_hashes(a: Schedule, b: Schedule) -> None:
    if a == b:
        assert written_out(a) == written_out(b)
        assert hash(a) == hash(b)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (s.constant(1), s.constant(1.0)),
        (s.constant(0), s.constant(-0.0)),
        (s.multistep(0.1, [30, 60]), s.multistep(0.1, [60, 30])),
        (s.multistep(0.1, [30], gamma=1), s.constant(0.1)),
        (s.multistep(0.1, []), s.constant(0.1)),
        (s.multistep(0.1, [60], gamma=0.1).until(50), s.multistep(0.1, [90], gamma=0.5).until(50)),
        (s.multistep(0.1, [50], gamma=0.1).until(50), s.constant(0.1).until(50)),
        (s.step(0.1, 30).until(90), s.multistep(0.1, [30, 60]).until(90)),
        (s.step(0.1, 1, 0.5), s.exponential(0.1, 0.5)),
        (s.step(0.1, 30, 1), s.constant(0.1)),
        (s.exponential(0.1, 1), s.constant(0.1)),
        (s.exponential(0, 0.5), s.constant(0)),
        (s.cosine(0.1, 10, eta_min=0.1), s.constant(0.1)),
        (s.cosine(0.1, 10).until(10), s.cosine_restarts(0.1, 10).until(10)),
        (s.linear(0.1, 1, 1, 10), s.constant(0.1)),
        (s.linear(0.1, 1, 0, 10), s.polynomial(0.1, 10)),
        (s.polynomial(0.1, 10, power=0), s.constant(0.1)),
        (s.piecewise({0: "a", 70: "a"}), s.constant("a")),
        (s.piecewise({0: 64, 70: 256}), s.constant(64).until(70).then(256)),
        (s.sampled([1, 1, 1]), s.constant(1).until(3)),
        (s.wsd(0.1, 50, warmup=0, decay=0), s.constant(0.1).until(50)),
        (s.wsd(0.1, 50, warmup=1, decay=0), s.constant(0.1).until(50)),
        (s.sampled([]), s.constant("a").until(0)),
    ],
)
def test_schedules_of_equal_values_are_equal_however_they_are_written(one: Schedule, other: Schedule) -> None:
    assert one == other
    assert other == one
    assert hash(one) == hash(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (s.constant(True), s.constant(1)),
        (s.constant(False), s.constant(0)),
        (s.constant(None), s.constant(False)),
        (s.constant("1"), s.constant(1)),
        (s.sampled([True, 2]), s.sampled([1, 2])),
        (s.sampled([1, True]), s.sampled([1, 1])),
        (s.constant(1), s.constant(1).until(10)),
        (s.constant(1).until(9), s.constant(1).until(10)),
        (s.multistep(0.1, [30]), s.multistep(0.1, [31])),
        (s.cosine(0.1, 10), s.cosine(0.1, 10).since(1)),
    ],
)
def test_schedules_of_different_values_or_lengths_are_not_equal(one: Schedule, other: Schedule) -> None:
    assert one != other
    assert other != one


def test_a_schedule_does_not_equal_a_plain_number() -> None:
    assert s.constant(1) != 1


# --- forms ------------------------------------------------------------------------------------------------


@given(schedules, schedules, st.integers(0, HORIZON), st.integers(0, HORIZON))
def test_agreement_of_two_forms_is_the_first_step_at_which_their_values_differ(
    a: Schedule, b: Schedule, start: int, stop: int
) -> None:
    def first_difference(one: Form, other: Form) -> int:
        return next((t for t in range(start, stop) if not s.same(one.value(t), other.value(t))), stop)

    for _, _, one in a.pieces():
        for _, _, other in b.pieces():
            assert s.agreement(one, other, start, stop) == first_difference(one, other)
            assert s.agreement(one, one, start, stop) == stop


@given(schedules)
def test_a_form_keeps_its_value_until_the_step_that_holds_returns(schedule: Schedule) -> None:
    for start, stop, form in schedule.pieces():
        for step in range(start, min(stop or HORIZON, HORIZON)):
            assert form.holds(step) > step
            for held in range(step + 1, min(form.holds(step), HORIZON)):
                assert s.same(form.value(held), form.value(step))


def test_agreement_of_a_staircase_is_found_across_a_billion_steps() -> None:
    stairs = s.step(0.1, 1_000_000_000).segments[0].form
    assert s.agreement(stairs, s.Constant(0.1), 0, 2**50) == 1_000_000_000


def test_agreement_of_two_forms_ends_at_the_step_where_an_exponential_overflows() -> None:
    explosive = s.exponential(1.0, 1e300).until(2)
    form = explosive.form_at(1)
    assert s.agreement(form, s.Constant(1), 2, 9) == 2


def test_a_sampled_form_keeps_its_last_value_after_its_end() -> None:
    form = s.sampled([3, 2, 1]).segments[0].form
    assert s.agreement(form, s.Constant(1), 2, 2**50) == 2**50


@given(
    st.lists(scalars, min_size=1, max_size=8),
    st.integers(-9, 9),
    st.lists(st.integers(0, 9), max_size=3),
    st.one_of(st.none(), st.integers(0, 9)),
)
def test_normalizing_a_schedule_keeps_every_value(
    values: list[Scalar], origin: int, lengths: list[int], last: int | None
) -> None:
    # A table is the form that normalisation takes apart the most; windows reach past both of its ends.
    form = s.Sampled(tuple(values), origin=origin)
    schedule = Schedule(tuple(s.Segment(form, length) for length in [*lengths, last]))
    end = HORIZON if last is None else sum(lengths) + last
    assert schedule.length == (None if last is None else end)
    assert spelled(list(schedule.values(end))) == spelled([form.value(step) for step in range(end)])


@given(st.lists(st.tuples(st.sampled_from([0, 1, True, 1.5, "a", None]), st.none() | st.integers(0, 3)), max_size=5))
def test_segments_that_pass_the_quick_check_are_in_normal_form(written: list[tuple[Scalar, int | None]]) -> None:
    segments = tuple(s.Segment(s.Constant(scalar), length) for scalar, length in written)
    try:
        normal = _normal(segments)
    except ScheduleError:
        assert not _is_normal(segments)
    else:
        assert not _is_normal(segments) or spelled(normal) == spelled(segments)
        # All but those in which Python's equality of True and 1 makes another look necessary.
        one = any({str(a), str(b)} == {"True", "1"} for (a, _), (b, _) in pairwise(written))
        assert _is_normal(segments) or one or spelled(normal) != spelled(segments)


def test_a_linear_form_varies_and_a_constant_form_does_not() -> None:
    assert not s.varies(s.Constant("a"))
    assert s.varies(s.Linear(0.1, 0.1))


def test_cutting_a_long_schedule_costs_no_work_per_step() -> None:
    # Any work per step would outlast the test's time limit.
    for schedule in (
        s.cosine(0.1, 10**12),
        s.linear(0.1, total_iters=10**12),
        s.wsd(1, 10**12, warmup=9, decay=9),
    ):
        assert schedule.until(10**12).since(10**11).length == 9 * 10**11


# --- JSON -------------------------------------------------------------------------------------------------


@given(schedules)
def test_a_schedule_survives_a_round_trip_through_json(schedule: Schedule) -> None:
    back = msgspec.json.decode(msgspec.json.encode(schedule), type=Schedule)
    assert back == schedule
    assert back.segments == schedule.segments
    assert written_out(back) == written_out(schedule)
