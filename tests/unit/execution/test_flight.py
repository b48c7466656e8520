"""A chain in flight: where it sets boundaries of its own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from hpstage.checkpoints import FolderCheckpoints, LiveCache
from hpstage.checkpoints.patient_store import PatientStore
from hpstage.execution import flight as module
from hpstage.execution.control import Control
from hpstage.execution.flight import Flight
from hpstage.execution.saving import Saves
from hpstage.testing.chains import boundary, chain

Take = Callable[..., Flight]


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time that flights read, as the only item."""
    now = [100.0]
    monkeypatch.setattr(module.time, "perf_counter", lambda: now[0])
    return now


@pytest.fixture
def take(tmp_path: Path, now: list[float]) -> Take:
    """Takes a flight of 10 steps, of which the states at 4 and at the end are requested."""

    def take(**options: Any) -> Flight:
        store = PatientStore(FolderCheckpoints(tmp_path / "states", "w"))
        return Flight(replace(chain("c", 10, 4), **options), Saves(store, LiveCache(), Control(), None))

    return take


def own_boundaries(flight: Flight) -> dict[int, bool]:
    """Return the steps of the boundaries that the chain has set itself, and whether each keeps the state."""
    requested = {boundary.step for boundary in flight.chain.boundaries}
    return {step: one.keep for step, one in flight.course.boundaries.items() if step not in requested}


def state_of(flight: Flight) -> dict[str, Any]:
    """Return all that a flight has, without what its steps are expected to change."""
    expected = {"course", "announced", "_turned_at"}
    return {name: value for name, value in vars(flight).items() if name not in expected}


@pytest.mark.parametrize(("step", "announced"), [(0, False), (2, False), (3, True), (4, False), (9, True)])
def test_a_step_announces_the_report_that_follows_it_and_changes_nothing_else(
    take: Take, step: int, announced: bool
) -> None:
    flight = take()
    flight.step = step
    flight.announced = not announced
    before, boundaries = state_of(flight), dict(flight.course.boundaries)
    assert flight.begin_step() is None  # type: ignore[func-returns-value]
    assert flight.announced is announced
    assert state_of(flight) == before and flight.course.boundaries == boundaries


def test_a_boundary_that_neither_evaluates_nor_keeps_announces_no_report(take: Take) -> None:
    quiet = replace(boundary(4), evaluate=False, keep=False)
    for seen, one in ((False, quiet), (True, replace(quiet, evaluate=True)), (True, replace(quiet, keep=True))):
        flight = take(boundaries=(one, boundary(10)))
        flight.step = 3
        flight.begin_step()
        assert flight.announced is seen


def test_a_chain_keeps_the_state_after_a_step_with_a_due_number_of_its_own(take: Take) -> None:
    flight = take(keep_every=2)
    for flight.step in range(10):
        flight.begin_step()
        assert flight.announced is (flight.step % 2 == 1)
    assert own_boundaries(flight) == {2: True, 6: True, 8: True}
    assert flight.course.boundaries[4] == boundary(4), "what is requested there stays"
    assert flight.kept == 0, "until the state is kept"


def test_a_chain_keeps_the_state_if_one_more_step_as_long_would_exceed_its_seconds(
    take: Take, now: list[float]
) -> None:
    flight = take(keep_seconds=5.0)
    for flight.step in range(3):  # at 100, 102 and 104 s: the third would end at 106 s
        flight.begin_step()
        now[0] += 2.0
    assert own_boundaries(flight) == {3: True} and flight.announced
    flight.step = 4
    flight.has_kept()
    flight.begin_step()
    assert not flight.announced and own_boundaries(flight) == {3: True}, "seconds count from the last state kept"


def test_a_chain_reports_its_first_step_without_keeping_it_if_it_is_timed(take: Take) -> None:
    flight = take(time_first=True)
    flight.begin_step()
    assert own_boundaries(flight) == {}, "before it has loaded or made its state there is nothing to report"
    flight.source = "fresh"
    flight.begin_step()
    assert own_boundaries(flight) == {1: False}
    assert not flight.announced, "of a report that neither evaluates nor keeps"
    flight.step = 1
    flight.has_reported()
    flight.begin_step()
    assert own_boundaries(flight) == {1: False}
    assert flight.chain.boundaries == (boundary(4), boundary(10)), "the chain itself stays as it was sent"
