"""The space of a call that trains given configurations as trials of a study that is stored only in the plan."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any, Literal

import optuna
from optuna.trial import FixedTrial, TrialState, create_trial

from hpstage.driver.driver import Driver
from hpstage.errors import UsageError
from hpstage.optuna.attributes import set_identity
from hpstage.optuna.stand_in import quiet_optuna
from hpstage.plan.facts import ForkedFrom, SearchEnded, TrialId, number_of
from hpstage.plan.nodes import PlannedTrial
from hpstage.plan.plan import SearchPlan
from hpstage.plan.searches import SearchRecord
from hpstage.schedule import Constant, Plateau, Scalar, Schedule
from hpstage.schedule.space import Described, describe
from hpstage.search.plateaus import Observed
from hpstage.search.results.branching import Configuration, missing

Direction = Literal["minimize", "maximize"]

logger = logging.getLogger("hpstage")


class Given:
    """The space of a call that trains given configurations, each as one trial of a study.

    The Optuna study is in memory; later calls and other processes find its trials in the plan. A configuration for
    which the plan already has a trial of the study, finished or not, gets that trial.
    """

    def __init__(self, configurations: Sequence[Configuration]) -> None:
        self.trials: list[TrialId] = []
        """The trial of each configuration, once :meth:`recall` has found or numbered it."""
        self._configurations = configurations
        self._indices = dict(enumerate(range(len(configurations))))  # the configuration's index, by trial number
        self._params = [{name: _shown(value) for name, value in one.schedules.items()} for one in configurations]

    def __call__(self, trial: Any) -> Mapping[str, Any]:
        index = self._indices.get(trial.number, 0)
        for name in self._params[index]:
            trial.suggest_categorical(name, list(dict.fromkeys(params.get(name) for params in self._params)))
        one = self._configurations[index]
        if one.branch_of is None:
            return _values(one)
        trial.set_user_attr("hpstage:branch_of", one.branch_of.donor)
        return {**_values(one), "keep_at": [one.branch_of.step] if one.branch_of.step else []}

    def branch_of(self, number: int) -> ForkedFrom | None:
        return self._configurations[self._indices[number]].branch_of

    def recall(self, study: optuna.Study, driver: Driver, name: str, observed: Observed) -> int:
        """Number the study's trials as in the plan, queue those that must be trained, and return their number.

        An interrupted search of the study is ended; its trials continue when their configurations are given again.

        Args:
            name: the study's name in the plan.
        """
        plan = driver.plan
        record = plan.searches.get(name)
        if self.trials:  # this process was declared dead, and rejoins the plan
            if study.get_trials(deepcopy=False, states=[TrialState.RUNNING]) and not self._is_of(record):
                raise UsageError(f"another process is training study {name!r}; repeat this call once it has ended")
            return len(self._indices)
        if record is not None and not record.ended:
            driver.log.write([SearchEnded(name, time.time())])
        there = {id: planned for id, planned in plan.trials.items() if plan.study_of(id) == name}
        used = max((number_of(id) for id in there), default=-1) + 1
        queued: dict[int, int] = {}  # the configuration's index, by trial number
        warnings: dict[str, None] = {}
        self.trials = []
        for index, one in enumerate(self._configurations):
            own = one.steps, one.schedules
            first = next(i for i, other in enumerate(self._configurations) if (other.steps, other.schedules) == own)
            if first < index:
                self.trials.append(self.trials[first])
                continue
            described = observed.by(_described(one), "a run")
            id = next((id for id, planned in there.items() if _is(planned, described, plan)), None)
            if id is None:
                id, used = TrialId(f"{name}/{used}"), used + 1
                if (branch := one.branch_of) is not None:
                    warnings[missing(plan.trials[branch.donor], branch.step)] = None
            if id not in plan.ended:
                queued[number_of(id)] = index
            self.trials.append(id)
        for text in filter(None, warnings):
            logger.warning("%s", text)
        self._indices = queued
        for number in range(used):
            params = {"fixed_params": self._params[queued[number]]} if number in queued else {}
            state = TrialState.WAITING if number in queued else TrialState.FAIL
            study.add_trial(create_trial(state=state, system_attrs=params))
        return len(queued)

    def _is_of(self, record: SearchRecord | None) -> bool:
        """Whether a search is the one of this call, and has not ended."""
        return (
            record is not None and not record.ended and {one.trial for one in record.proposed} <= {*self.trials, None}
        )


def in_memory(name: str, directions: Sequence[Direction]) -> optuna.Study:
    """Return a study in memory, whose trials are stored in the plan. A plan has one such study of each name."""
    sampler = optuna.samplers.RandomSampler(seed=0)  # all parameters are given
    with quiet_optuna():
        study = optuna.create_study(study_name=name, directions=directions, sampler=sampler)
    set_identity(study, blake2b(name.encode(), digest_size=16).hexdigest())  # the same in every process
    return study


def branch_of(space: object, number: int) -> ForkedFrom | None:
    """Return the trial and step that trial ``number`` branches from; ``None`` if a sampler proposed it."""
    return space.branch_of(number) if isinstance(space, Given) else None


def _described(one: Configuration) -> Described:
    return describe(lambda _: _values(one), FixedTrial({}), one.steps)


def _values(one: Configuration) -> dict[str, Schedule | Plateau | Scalar]:
    return {**one.schedules, "steps": one.steps}


def _is(planned: PlannedTrial, described: Described, plan: SearchPlan) -> bool:
    """Whether a trial of the plan is the described one, which then needs no new trial.

    A failed trial is trained again as a new trial. So is an unfinished trial with schedules that metrics decide: its
    schedules in the plan contain decisions, and the description does not.
    """
    ended = plan.ended.get(planned.id)
    if planned.steps != described.steps or planned.plateaus != described.plateaus:
        return False
    if (ended is None and planned.plateaus) or (ended is not None and ended.state == "FAIL"):
        return False
    own, plain = planned.schedules, described.schedules.keys() - described.plateaus.keys()
    return own.keys() == described.schedules.keys() and all(own[name] == described.schedules[name] for name in plain)


def _shown(value: Schedule | Plateau) -> Scalar:
    """Return a parameter of the study: the value of a constant, else the schedule in words."""
    if (
        isinstance(value, Schedule)
        and len(value.segments) == 1
        and isinstance(form := value.segments[0].form, Constant)
    ):
        return form.scalar
    return repr(value)
