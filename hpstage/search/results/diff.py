"""The differences between two trials: the step at which they diverge, their schedules, metrics and tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from hpstage.checkpoints import CheckpointStore
from hpstage.checkpoints.state_tree import differing, flatten
from hpstage.errors import CheckpointError
from hpstage.errors.text import table
from hpstage.plan.facts import StateKey, TrialId
from hpstage.plan.nodes import PlannedTrial, State
from hpstage.schedule import Schedule


@dataclass(frozen=True, slots=True, repr=False)
class TrialDiff:
    """The differences between two trials. Pairs are in the order of the two trials."""

    trials: tuple[TrialId, TrialId]
    steps: tuple[int, int]
    """Number of steps of each."""
    step: int | None
    """The first step, counted from 0, at which values differ, and so the number of common steps. ``None``: one trial
    has all the steps of the other."""
    schedules: dict[str, tuple[Schedule | None, Schedule | None]]
    """The schedules that differ, by name; ``None`` if a trial lacks it."""
    metrics: dict[int, dict[str, tuple[float | None, float | None]]]
    """The metrics of both, by the steps at which both have some."""
    tensor: tuple[int, str] | None
    """The first step at which both have checkpoints that differ, and the first tensor in these that differs."""

    def __repr__(self) -> str:
        one, other = self.trials
        common = f"the same for {self.step} steps"
        if self.step is None:
            shorter, longer = sorted(self.steps)
            beyond = f"{self.trials[self.steps.index(longer)]} has {longer - shorter} more"
            common = (
                f"the same for {shorter} steps; {beyond}" if longer > shorter else f"the same for all {longer} steps"
            )
        rows = [(name, f"{mine!r}", f"{theirs!r}") for name, (mine, theirs) in self.schedules.items()]
        rows += [
            (f"{name} at {step}", f"{mine}", f"{theirs}")
            for step, pairs in self.metrics.items()
            for name, (mine, theirs) in pairs.items()
        ]
        last = []
        if self.tensor is not None:
            name = self.tensor[1].removeprefix("captured.values.")
            last = [f"first tensor that differs in their states at step {self.tensor[0]}: {name}"]
        return "\n".join([f"{one} and {other}: {common}", table([("", one, other), *rows], left=3), *last])


def diff_of(one: PlannedTrial, other: PlannedTrial, names: Callable[[StateKey], list[str]]) -> TrialDiff:
    """Return how two trials differ.

    Args:
        names: returns the names of a checkpoint's leaves, as far as it can be read.
    """
    mine, theirs = one.schedules, other.schedules
    stop = min(one.steps, other.steps)
    diverge = {
        name: mine[name].agrees(theirs[name], stop) if name in mine and name in theirs else 0
        for name in {**mine, **theirs}
    }
    step = min(diverge.values(), default=stop)
    states = {state.step: state for state in other.states()}
    pairs = [(state, states[state.step]) for state in one.states() if state.step in states]
    return TrialDiff(
        trials=(one.id, other.id),
        steps=(one.steps, other.steps),
        step=step if step < stop else None,
        schedules={name: (mine.get(name), theirs.get(name)) for name, at in diverge.items() if at < stop},
        metrics={a.step: _pairs(a, b) for a, b in pairs if a.metrics is not None and b.metrics is not None},
        tensor=next(filter(None, (_first(a, b, names) for a, b in pairs)), None),
    )


def names_in(checkpoints: CheckpointStore | None) -> Callable[[StateKey], list[str]]:
    def names(key: StateKey) -> list[str]:
        try:
            return [] if checkpoints is None else [leaf.name for leaf in flatten(checkpoints.load(key)).leaves]
        except CheckpointError:
            return []

    return names


def _pairs(one: State, other: State) -> dict[str, tuple[float | None, float | None]]:
    mine, theirs = one.metrics or {}, other.metrics or {}
    return {name: (mine.get(name), theirs.get(name)) for name in {**mine, **theirs}}


def _first(one: State, other: State, names: Callable[[StateKey], list[str]]) -> tuple[int, str] | None:
    a, b = one.kept, other.kept
    if a is None or b is None or a.digest == b.digest:
        return None
    return one.step, differing(a.marks, b.marks, names(a.key)) or "the shapes or names of the tensors"
