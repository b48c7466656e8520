"""Programs are built where they pay, and members are divided into those that there are."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpstage.torch.backends.stacked.worth import ALONE, Form, Worth

NONE: frozenset[int] = frozenset()
BATCH = frozenset({3})


class Steps:
    """The steps of a worker. Programs take as long as ``cost`` says, and building one ``build`` seconds a member."""

    def __init__(self, cost: Callable[[int], float], build: float = 0.1, in_common: float = 0.0) -> None:
        self.cost, self.build = cost, build
        self.worth = Worth(lambda shared: in_common if shared else 0.0)
        self.worth.built(ALONE, 0.0)
        self.building = self.training = 0.0
        self.programs: list[Form] = []

    def train(self, width: int, steps: int = 1, shared: frozenset[int] = NONE) -> None:
        form = width, shared
        for _ in range(steps):
            for further in [] if form in self.worth else self.worth.pays(form, width):
                self.building += self.build * further[0]
                self.programs.append(further)
                self.worth.built(further, self.build * further[0])
            for part in self.worth.division(form, width):
                self.worth.took(part, self.cost(part[0]))
                self.training += self.cost(part[0])


def test_a_program_for_all_models_is_built_only_after_enough_steps() -> None:
    steps = Steps(lambda width: 0.001 * (1 + 0.2 * width))
    steps.train(8, 20)
    assert not steps.programs
    steps.train(8, 500)
    assert steps.programs == [(8, NONE)] == steps.worth.division((8, NONE), 8)
    steps.train(7, 200)
    assert {width for width, _ in steps.programs[1:]} == {2, 4}  # one of 7 is worth it later, if there are more steps


def test_a_stacked_program_that_saves_no_time_is_built_only_once() -> None:
    steps = Steps(lambda width: 0.001 * width)
    steps.train(2, 10_000)
    assert steps.programs == [(2, NONE)]
    steps.train(8, 10_000)
    steps.train(5, 10_000)
    assert steps.programs == [(2, NONE)]


def test_models_without_a_program_of_their_number_are_divided_into_powers_of_two() -> None:
    steps = Steps(lambda width: 0.001 * (1 + 0.5 * width))
    steps.train(4, 3000)
    steps.train(2, 3000)
    assert [*map(len, [steps.worth.division((7, NONE), 7)])] == [3]
    assert [width for width, _ in steps.worth.division((7, NONE), 7)] == [4, 2, 1]
    assert [width for width, _ in steps.worth.division((7, NONE), 3)] == [2, 2, 2, 1]


def test_a_program_for_shared_tensors_is_used_for_models_that_share_them() -> None:
    steps = Steps(lambda width: 0.001 * (1 + 0.5 * width))
    steps.worth.built((4, NONE), 0.4)
    steps.worth.built((4, BATCH), 0.4)
    assert steps.worth.division((4, BATCH), 4) == [(4, BATCH)]
    assert steps.worth.division((4, NONE), 4) == [(4, NONE)]
    assert steps.worth.division((4, BATCH | {5}), 4) == [(4, BATCH)]


@given(
    each=st.floats(0.05, 2.0),
    fixed=st.floats(0.0, 1.0),
    build=st.floats(0.01, 1.0),
    widths=st.lists(st.tuples(st.integers(1, 9), st.integers(1, 60), st.booleans()), max_size=12),
)
def test_building_programs_takes_at_most_a_fixed_multiple_of_the_training_time(
    each: float, fixed: float, build: float, widths: list[tuple[int, int, bool]]
) -> None:
    """Whatever is trained: before a program is built, steps have taken at least what it is taken to save of them."""
    steps = Steps(lambda width: 0.01 * (fixed + each * width), build, in_common=0.5)
    for width, count, common in widths:
        steps.train(width, count, BATCH if common else NONE)
    first = build * max((width for width, _ in steps.programs), default=0)
    assert steps.building <= 4 * (first + 4 * steps.training)
    assert len(set(steps.programs)) == len(steps.programs)
    for width, _, common in widths:
        division = steps.worth.division((width, BATCH if common else NONE), width)
        assert sum(members for members, _ in division) == width


@pytest.mark.parametrize("width", [2, 3, 8])
def test_no_program_is_built_before_a_step_has_run(width: int) -> None:
    worth = Worth(lambda shared: 0.0)
    worth.built(ALONE, 0.0)
    assert worth.pays((width, NONE), width) == []
    assert worth.division((width, NONE), width) == [ALONE] * width
