"""Where the schedules of a trial change side by side: as at each single step, however they are cut."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from hpstage import schedule as s
from hpstage.schedule import Schedule
from hpstage.schedule.scalars import distinct
from hpstage.schedule.trial import pieces

STEPS = 12
VALUES = st.sampled_from([True, False, 0, 1, 0.5, "adam", None])


@st.composite
def piecewise(draw: st.DrawFn, joints: list[int]) -> Schedule:
    return s.piecewise({step: draw(VALUES) for step in [0, *joints]})


@st.composite
def side_by_side(draw: st.DrawFn) -> list[Schedule]:
    """Schedules of which some change at the same steps, some elsewhere, some vary, and some continue beyond the end."""
    joints = st.lists(st.integers(1, STEPS + 3), max_size=4, unique=True).map(sorted)
    shared = draw(joints)
    several = st.one_of(
        piecewise(shared), piecewise(shared), joints.flatmap(piecewise), st.just(s.linear(0.1, 0.9, 20))
    )
    found = draw(st.lists(several, min_size=1, max_size=3))
    return [schedule.until(STEPS) if draw(st.booleans()) else schedule for schedule in found]


@given(side_by_side())
@example([s.piecewise({0: 1, 4: True, 8: 1}), s.piecewise({0: 0.5, 4: 0.25, 8: 0.5})])
@example([s.piecewise({0: 1, 12: 2}), s.piecewise({0: 2, 12: 1})])
def test_pieces_of_several_schedules_give_their_values_at_every_step(schedules: list[Schedule]) -> None:
    given_values, at = [], 0
    for start, stop, values, forms in pieces(schedules, STEPS):
        assert start == at < stop
        for step in range(start, stop):
            given_values.append(values if forms is None else tuple([distinct(form.value(step)) for form in forms]))
        at = stop
    assert at == STEPS
    assert given_values == [tuple([distinct(schedule.value(step)) for schedule in schedules]) for step in range(STEPS)]
