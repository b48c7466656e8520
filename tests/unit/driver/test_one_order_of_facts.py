"""The law of the journal: a plan is the fold of its journal, whoever folds it, and nothing is folded before it is
written."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpstage import schedule as s
from hpstage.checkpoints.eviction import Eviction
from hpstage.errors import InternalError, UsageError
from hpstage.plan.facts import (
    ChainId,
    DriverId,
    DriverLeft,
    NodeId,
    StateKey,
    StateReached,
    TrialAdded,
    TrialId,
    WorkerId,
)
from hpstage.plan.log import open_plan
from hpstage.plan.nodes import Node, State
from hpstage.store.memory import MemoryJournal
from tests.unit.checkpoints.test_eviction import Shelf
from tests.unit.driver.test_several_drivers import Study, searches
from tests.unit.searches import WORKLOAD

_DERIVED = {"_history", "_trail", "_tree", "milestones", "branch_points"}
"""Fields that a plan derives from the others, which decide whether two plans are equal."""


def portrait(value: Any) -> Any:
    """A plan, field by field, as values that can be compared."""
    match value:
        case State():
            return (value.node.id, value.step, *fields(value, but={"node", "step"}))
        case Node():
            parent = None if value.parent is None else value.parent.id
            return (value.id, parent, *fields(value, but={"parent", "_children"} | _DERIVED))
        case Mapping():
            return {key: portrait(found) for key, found in value.items()}
        case list() | tuple():
            return [portrait(found) for found in value]
        case _ if type(value).__module__.startswith("hpstage.plan") and not hasattr(value, "__struct_fields__"):
            return fields(value)
    return value


def fields(value: Any, but: set[str] = _DERIVED) -> list[tuple[str, Any]]:
    slots = (name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ()))
    names = [*slots, *getattr(value, "__dict__", ())]
    return [(name, reference(name, getattr(value, name))) for name in sorted(names) if name not in but]


def reference(name: str, value: Any) -> Any:
    """Nodes, states and trials within others, by their names."""
    if name in ("last", "maker"):
        return value.id
    if name == "reached":
        return None if value is None else value.ref
    if name == "kept" and isinstance(value, dict):
        return {key: state.ref for key, state in value.items()}
    return portrait(value)


class Interleaved(MemoryJournal):
    """Lets something happen before appends that were decided on."""

    happens: Callable[[], None] = staticmethod(lambda: None)
    refused = 0

    def append(self, records, **options):
        self.happens()
        position = super().append(records, **options)
        self.refused += position is None
        return position


@pytest.mark.ci
@given(st.lists(searches(), min_size=2, max_size=3), st.integers(), st.integers(0, 6))
def test_plans_of_interleaved_drivers_equal_the_plan_read_from_the_journal_in_every_field(wishes, seed, budget):
    choose = random.Random(seed)
    journal, shelf = Interleaved(), Shelf()
    studies = [
        Study(
            f"s{number}",
            journal,
            shelf.keys,
            every=choose.choice([1, 2, 10**9]),
            eviction=Eviction(shelf, choose.choice([budget, None])),
        )
        for number in range(len(wishes))
    ]
    under_way: list[Study] = []

    def turn(study: Study) -> None:
        under_way.append(study)
        study.turn()
        under_way.remove(study)

    def interrupt() -> None:
        idle = [study for study in studies if study not in under_way]
        if under_way and idle and choose.random() < 0.3:
            turn(choose.choice(idle))

    journal.happens = interrupt
    wanted = {study.name: list(zip(*wish, strict=True)) for study, wish in zip(studies, wishes, strict=True)}
    for _ in range(3000):
        if not any(wanted.values()) and all(study.done for study in studies):
            break
        study = choose.choice(studies)
        if wanted[study.name] and choose.random() < 0.5:
            added, stop = wanted[study.name].pop()
            mine = TrialAdded(TrialId(f"{study.name}/{added.trial}"), added.schedules, added.steps)
            study.driver.add([mine])
            study.driver.ask(mine.trial, stop)  # not written yet
            study.requests += 1
        else:
            turn(study)
        if choose.random() < 0.1:
            compare(studies, journal, everybody=False)
    else:
        raise AssertionError("the drivers hang")
    last = studies.pop()
    last.driver.finish()
    last.driver.leave()
    compare(studies, journal)
    for study in (last, *studies):
        study.driver.eviction.close()


def compare(studies: list[Study], journal: MemoryJournal, *, everybody: bool = True) -> None:
    stranger = open_plan(journal, WORKLOAD, {})
    expected = portrait(stranger)
    for study in studies:
        if everybody:
            study.driver.log.write()
            study.driver.log.catch_up()
        if study.plan.cursor == stranger.cursor:
            assert portrait(study.plan) == expected
            for driver in stranger.drivers:
                wanted = [state.ref for state in stranger.open_targets.wanted_by(driver)]
                assert [state.ref for state in study.plan.open_targets.wanted_by(driver)] == wanted


def test_appends_of_drivers_that_interrupt_each_other_are_sometimes_refused() -> None:
    """Else it would show little."""
    refused = 0
    for seed in range(5):
        choose = random.Random(seed)
        journal, kept = Interleaved(), set[StateKey]()
        studies = [Study(f"s{number}", journal, kept) for number in range(2)]
        for number, study in enumerate(studies):
            study.ask([TrialAdded(TrialId("0"), {"a": s.constant(number)}, 8)], [8])
        inside: list[Study] = []

        def interrupt(studies: list[Study] = studies, inside: list[Study] = inside) -> None:
            for study in studies:
                if inside and study not in inside:
                    inside.append(study)
                    study.turn()
                    inside.remove(study)

        journal.happens = interrupt
        while not all(study.done for study in studies):
            study = choose.choice(studies)
            inside.append(study)
            study.turn()
            inside.remove(study)
        refused += journal.refused
    assert refused >= 5


@pytest.mark.parametrize(
    ("fact", "error"),
    [
        (StateReached(ChainId("c"), WorkerId("w"), NodeId(0), 4, 2, 0.0, 1.0), InternalError),
        (StateReached(ChainId("c"), WorkerId("w"), NodeId(7), 0, 2, 0.0, 1.0), InternalError),
        (TrialAdded(TrialId("s/0"), {"a": s.constant(2)}, 8), UsageError),
    ],
)
def test_a_fact_that_contradicts_the_plan_is_not_written(fact, error) -> None:
    study = Study("s", MemoryJournal(), set())
    study.ask([TrialAdded(TrialId("0"), {"a": s.constant(1)}, 8)], [8])
    journal = study.driver.log.journal
    records, before = journal.read(), portrait(study.plan)
    with pytest.raises(error):
        study.driver.log.write([fact])
    assert journal.read() == records and portrait(study.plan) == before
    while not study.done:
        study.turn()


def test_requested_steps_enter_the_plan_only_when_they_are_written_to_the_journal() -> None:
    study = Study("s", MemoryJournal(), set())
    added = TrialAdded(TrialId("s/0"), {"a": s.constant(1)}, 8)
    study.driver.add([added])
    study.driver.ask(added.trial, 8)
    assert portrait(study.plan) == portrait(open_plan(study.driver.log.journal, WORKLOAD, {}))
    assert not study.plan.trials[added.trial].targets
    study.driver.log.write([DriverLeft(DriverId("nobody"), 0.0, "gone")])
    assert study.plan.trials[added.trial].targets == (8,)
