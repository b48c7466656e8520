"""The trials of a plan in columns. Pure.

These are the lines to edit when the fields of :class:`PlannedTrial` change.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from hpstage.plan.facts import TrialId
from hpstage.plan.nodes import PlannedTrial
from hpstage.plan.plan import SearchPlan
from hpstage.plan.snapshot.columns import Texts, check_lengths, pick, some
from hpstage.schedule import Plateau


class TrialColumns(msgspec.Struct, array_like=True):
    """``last``: numbers of nodes. ``studies``: numbers of strings. ``targets``: steps requested, once for all trials
    with equal ones, and ``asked_for``: which of these each trial has. ``keep_at``, ``plateaus``: numbers of trials with
    what they have, where they have any."""

    ids: list[TrialId]
    steps: list[int]
    last: list[int]
    studies: list[int]
    targets: list[tuple[int, ...]]
    asked_for: list[int]
    asked: list[int]
    answered: list[int]
    keep_at: list[tuple[int, tuple[int, ...]]]
    plateaus: list[tuple[int, dict[str, Plateau]]]


def columns_of_trials(plan: SearchPlan, texts: Texts) -> TrialColumns:
    trials = plan.trials.values()
    targets: dict[tuple[int, ...], int] = {}
    indices = [targets.setdefault(trial.targets, len(targets)) for trial in trials]
    return TrialColumns(
        ids=[*plan.trials],
        steps=[trial.steps for trial in trials],
        last=[trial.last.id for trial in trials],
        studies=[texts[trial.study] for trial in trials],
        targets=[*targets],
        asked_for=indices,
        asked=[trial.requested for trial in trials],
        answered=[trial.answered for trial in trials],
        keep_at=[(number, trial.keep_at) for number, trial in enumerate(trials) if trial.keep_at],
        plateaus=[(number, dict(trial.plateaus)) for number, trial in enumerate(trials) if trial.plateaus],
    )


def new_trials(columns: TrialColumns, table: Sequence[str]) -> list[PlannedTrial]:
    """Return the trials, as far as they can be made before the nodes.

    Args:
        table: the strings.

    Raises:
        ValueError, IndexError: the columns contradict each other.
    """
    check_lengths(
        *(len(columns.ids), columns.steps, columns.last, columns.studies, columns.asked_for, columns.asked),
        columns.answered,
    )
    trials = [*map(PlannedTrial, columns.ids, columns.steps)]
    for trial, study, targets, requested, answered in zip(
        trials,
        pick(table, columns.studies),
        pick(columns.targets, columns.asked_for),
        columns.asked,
        columns.answered,
        strict=True,
    ):
        trial.study, trial.targets, trial.requested, trial.answered = study, targets, requested, answered
    for trial, steps in some(trials, columns.keep_at):
        trial.keep_at = steps
    for trial, plateaus in some(trials, columns.plateaus):
        trial.plateaus = plateaus
    return trials


def fill_trials(plan: SearchPlan, columns: TrialColumns, trials: Sequence[PlannedTrial]) -> None:
    """Add the trials to a plan that has the nodes. Raises as :func:`new_trials` does."""
    for trial, last in zip(trials, pick(plan.nodes, columns.last), strict=True):
        trial.last = last
    plan.trials = dict(zip(columns.ids, trials, strict=True))
    plan._targets = dict(zip(columns.targets, columns.targets, strict=True))
    if len(plan.trials) != len(trials):
        raise ValueError("two trials have one id")
