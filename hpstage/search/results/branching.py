"""Branches of a trial: their branch points and schedules, and checks whether they are possible. Trains nothing."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

import msgspec

from hpstage.checkpoints import CheckpointStore
from hpstage.errors import ScheduleError, UsageError
from hpstage.errors.arguments import shown, whole
from hpstage.errors.text import nearest
from hpstage.plan.facts import ForkedFrom
from hpstage.plan.nodes import PlannedTrial
from hpstage.plan.plan import SearchPlan
from hpstage.schedule import Plateau, Schedule, as_schedule
from hpstage.schedule.plateau import ReduceOnPlateau
from hpstage.schedule.space import RESERVED
from hpstage.store import Journal
from hpstage.training.code.unread import read_at_first

RUNS = "runs"
"""The study of trials that belong to no search."""


@dataclass(frozen=True, slots=True)
class Configuration:
    """A run to be trained: schedules that all end at ``steps``, and the trial that it branches from, if any."""

    schedules: Mapping[str, Schedule | Plateau]
    steps: int
    branch_of: ForkedFrom | None = None


@dataclass(frozen=True, slots=True)
class Lineage:
    """The trainable and the store of trials, and the function that trains further trials there.

    ``train`` is :func:`hpstage.search.train.train_all`, passed in since that module imports this package.
    """

    trainable: object
    """``None`` if the plan was opened without it."""
    store: str | os.PathLike[str] | Journal
    checkpoints: str | os.PathLike[str] | CheckpointStore | None
    train: Callable[..., list[Any]]

    def of(self, trainable: object) -> object:
        """Return ``trainable``, or the one of the lineage if it is ``None``."""
        if trainable is None and self.trainable is None:
            raise UsageError("the store holds no training code; give it with trainable=, as in hpstage.optimize")
        return self.trainable if trainable is None else trainable


def together(changes: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a branch: those given in a dict and those given as keywords."""
    if changes is not None and not (isinstance(changes, Mapping) and all(isinstance(name, str) for name in changes)):
        raise UsageError(f"changes is {shown(changes)}; give a dict of values by name, {{'lr': 0.03}}, or lr=0.03")
    return {**(changes or {}), **values}


def combinations(values: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return a dict for each combination of values, where a list stands for several values."""
    choices = [list(value) if isinstance(value, list | tuple) else [value] for value in values.values()]
    for name, several in zip(values, choices, strict=True):
        if not several:
            raise UsageError(f"{name} is an empty list; give at least one value")
    return [dict(zip(values, chosen, strict=True)) for chosen in product(*choices)]


def branches(
    planned: PlannedTrial, plan: SearchPlan, at: int, values: Mapping[str, Any], steps: int | None, trainable: object
) -> list[Configuration]:
    """Return the branches of a trial that begin after ``at`` steps, under the values of each combination.

    Raises:
        UsageError: the trial cannot be branched at this step, or with these values. The message names the trial, the
            value and the remedy.
    """
    at = whole(0).of("at", at)
    end = planned.steps if steps is None else whole().of("steps", steps)
    _check_step(planned, plan, at)
    if end <= at:
        where = "its end" if at == planned.steps else f"step {at}"
        raise UsageError(
            f"a branch of trial {planned.id} at {where} needs steps beyond {at}; give steps={at + 1} or more"
        )
    if not values and end == planned.steps:
        raise UsageError(f"a branch of trial {planned.id} without a change is that trial; give a value, or more steps")
    own = planned.schedules
    check_names(planned, own, values, at)
    found = []
    for chosen in combinations(values):
        schedules = {name: _unchanged(planned, name, schedule, end) for name, schedule in own.items()}
        for name, value in chosen.items():
            try:
                after = value if isinstance(value, Plateau) else as_schedule(value)
                schedules[name] = until(planned, plan, name, at).then(after).until(end)
            except ScheduleError as error:
                raise ScheduleError(
                    f"branch of trial {planned.id} at step {at}, hyperparameter {name!r}: {error}"
                ) from None
        if at:
            _check_effect(trainable, planned, at, [name for name in chosen if schedules[name] != own[name]])
        said = {name: repr(value) for name, value in chosen.items()}
        found.append(Configuration(schedules, end, ForkedFrom(planned.id, at, said)))
    return found


def check_names(planned: PlannedTrial, own: Mapping[str, Schedule], names: Mapping[str, Any], steps: int) -> None:
    """Raise :class:`UsageError` if the trial has no hyperparameter of one of the names."""
    for name in names:
        if name in RESERVED:
            raise UsageError(
                f"{name!r} is not a hyperparameter of trial {planned.id}; give a branch's length with steps="
            )
        if name not in own and name in ("seed", "batch_size"):  # a default cannot state the value that training used
            raise UsageError(
                f"trial {planned.id} was trained without the hyperparameter {name!r}, so its branches cannot change "
                f"{name!r}; train a trial that has it, and branch that trial"
            )
        if name not in own:
            near = nearest(name, own)
            meant = "" if near is None else f" (did you mean {near!r}?)"
            add = (
                f". To add it, set defaults = {{{name!r}: OLD}} on the trainable, OLD being its value so far, and "
                f"let a space return {{**trial.then({{...}}), {name!r}: s.piecewise({{0: OLD, {steps}: NEW}})}}"
            )
            raise UsageError(
                f"trial {planned.id} has no hyperparameter {name!r}{meant}; it has {', '.join(sorted(own))}"
                f"{add if near is None else ''}"
            )


def until(planned: PlannedTrial, plan: SearchPlan, name: str, at: int) -> Schedule:
    """Return a schedule of a trial up to ``at``, not beyond its end.

    Raises:
        UsageError: metrics decide the schedule, and have not yet decided it up to ``at``.
    """
    plateau = planned.plateaus.get(name)
    if plateau is None:
        return planned.schedules[name].until(at)
    reducer = ReduceOnPlateau(plateau)
    for look in plateau.looks(at):
        state = plan.known(planned.id, look)
        if state is None or state.metrics is None:
            further = at + 1 + (at + 1 == planned.steps)
            raise UsageError(
                f"metrics decide {name!r} of trial {planned.id} after step {look}, which is not trained yet; branch it "
                f"at step {look} or before, or train further first: trial.branch({look}, steps={further}), and branch "
                f"that"
            )
        reducer.see(look, state.metrics[plateau.metric or ""])
    return reducer.schedule().until(at)


def missing(planned: PlannedTrial, at: int) -> str:
    """Describe the steps before ``at`` that must be trained, since no later checkpoint is kept; ``""`` if there are
    none."""
    states = list(planned.states())
    kept = max((state.step for state in states if state.kept is not None and state.step <= at), default=0)
    if kept == at:
        return ""
    trained = max((state.step for state in states if state.is_known), default=0)
    again = " again" if trained > kept else ""
    source = f"from its checkpoint at step {kept}" if kept else "from the beginning (no earlier one is kept)"
    return f"trial {planned.id} has no checkpoint at step {at}: {at - kept} steps are trained{again}, {source}"


def _check_step(planned: PlannedTrial, plan: SearchPlan, at: int) -> None:
    upto = min(at, planned.steps)
    ending = plan.endings.ending(planned, upto)
    if ending is not None:
        raise UsageError(
            f"the code of trial {planned.id} ended its training after {ending.last} steps ({ending.message}); branch "
            f"it at step {ending.last} or before"
        )
    known = max((state.step for state in planned.states() if state.is_known), default=0)
    last = {node.id: stop for node, _, stop in planned.path_to(upto)}
    for failed in plan.failures:
        if not failed.evaluating and known <= failed.step < last.get(failed.node, 0):
            raise UsageError(
                f"trial {planned.id} failed in step {failed.step} ({failed.failure.summary}); branch it at step "
                f"{failed.step} or before"
            )
    if at > planned.steps:
        raise UsageError(
            f"trial {planned.id} has {planned.steps} steps and cannot be branched at step {at}; "
            f"branch it at step {planned.steps} or before, or extend it with at={planned.steps} and steps={at}"
        )


def _unchanged(planned: PlannedTrial, name: str, schedule: Schedule, end: int) -> Schedule | Plateau:
    """Return a schedule up to ``end``, continued with its last value unless metrics decide how it continues."""
    if (plateau := planned.plateaus.get(name)) is not None:
        return msgspec.structs.replace(plateau, length=None).until(end)
    return (schedule if end <= planned.steps else schedule.then(schedule.value(planned.steps - 1))).until(end)


def _check_effect(trainable: object, planned: PlannedTrial, at: int, changed: list[str]) -> None:
    initial = {name: schedule.value(0) for name, schedule in planned.schedules.items()}
    stated = getattr(trainable, "_unchangeable", None)  # of trainables that wrap another library
    for name in changed:
        why, remedy = "" if stated is None else stated(name, initial), "Branch at step 0, at=0"
        if not why and read_at_first(trainable, name):
            why = "the code reads it only where model or optimizer are made, at step 0"
            how = f"self.hparams.{name}" if hasattr(trainable, "datamodule") else f"hp[{name!r}]"
            remedy += f", or read {how} in each step"
        if why:
            raise UsageError(f"{name!r} cannot change at step {at} of trial {planned.id}: {why}. {remedy}")
