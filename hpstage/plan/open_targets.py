"""OpenTargets: which requested targets have no result yet, and which driver waits for each. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from hpstage.plan.facts import DriverId, TargetAsked, TrialId
from hpstage.plan.nodes import State


class OpenTargets:
    """The targets without a result, by the driver that requested them last, until it is gone."""

    def __init__(self) -> None:
        self.by_driver: dict[DriverId, dict[tuple[TrialId, int], State]] = {}

    def add(self, trial: TrialId, state: State, driver: DriverId) -> None:
        for others in self.by_driver.values():
            others.pop((trial, state.step), None)
        self.by_driver.setdefault(driver, {})[trial, state.step] = state

    def drop(self, state: State) -> None:
        """Remove all trials that wait for a state."""
        for trial, driver in self.waiting(state).items():
            del self.by_driver[driver][trial, state.step]

    def forget(self, driver: DriverId) -> None:
        """Remove the targets of a driver that is gone."""
        self.by_driver.pop(driver, None)

    def __contains__(self, fact: TargetAsked) -> bool:
        """Whether the driver waits for the target that it has requested."""
        return (fact.trial, fact.step) in self.by_driver.get(fact.driver, ())

    def waiting(self, state: State) -> dict[TrialId, DriverId]:
        """Return the trials that wait for a state's metrics, in the order of their first requests, and their
        drivers."""
        step = state.step
        return {
            trial: driver
            for trial in state.unanswered or ()
            for driver, targets in self.by_driver.items()
            if (trial, step) in targets
        }

    def wanted_by(self, driver: DriverId) -> list[State]:
        """Return the states that the driver waits for."""
        return list(dict.fromkeys(self.by_driver.get(driver, {}).values()))

    def wanted(self) -> Iterator[State]:
        """Yield the states that any driver waits for."""
        for targets in self.by_driver.values():
            yield from targets.values()
