"""The arguments of ``optimize``, checked one by one and against each other before any worker is started."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, get_args

import optuna
from optuna.trial import TrialState

from hpstage.algorithm import Algorithm, Setting, Trials
from hpstage.algos import FullTraining, OptunaPruner
from hpstage.checkpoints import CheckpointStore
from hpstage.errors import UsageError
from hpstage.errors.arguments import (
    BYTES,
    PLACE,
    Kind,
    either,
    function,
    instance,
    one_of,
    optional,
    several,
    switch,
    text,
    whole,
)
from hpstage.executor import Executor
from hpstage.optuna.ledger import Callback, Constraints, samplers
from hpstage.optuna.private import startup_trials
from hpstage.plan.devices import ANY
from hpstage.plan.messages import Auditing, Verify
from hpstage.report.trackers.live import LiveCallback
from hpstage.schedule.space import Space, points_of
from hpstage.search.costs import COSTS
from hpstage.search.plateaus import Observed
from hpstage.store import Journal
from hpstage.training.adapter import defaults_of, noisy_of
from hpstage.training.borrowed import see_free

if TYPE_CHECKING:
    from distributed import Client
    from distributed.deploy import Cluster

# Samplers whose proposals do not depend on results.
BLIND = (
    optuna.samplers.RandomSampler,
    optuna.samplers.GridSampler,
    optuna.samplers.BruteForceSampler,
    optuna.samplers.QMCSampler,
)


KINDS: dict[str, Kind] = {
    "store": optional(either(PLACE, instance(Journal, "a Journal"))),
    "checkpoints": optional(either(PLACE, instance(CheckpointStore, "a CheckpointStore"))),
    "evaluate_every": optional(whole()),
    "checkpoint_every": optional(whole()),
    "checkpoint_budget": optional(BYTES),
    "audit": one_of(*get_args(Auditing)),
    "environment": optional(text("the name of a device, such as 'A100', or 'any'")),
    "callbacks": optional(several(function(""), "functions of the study and a trial")),
    "show_progress_bar": switch,
}
"""Valid values of the arguments that ``optimize`` and ``train`` have in common."""

ALGORITHM = instance(Algorithm, "an instance of one from hpstage.algos")


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """The arguments of a call, as documented by :func:`hpstage.optimize`.

    Raises:
        UsageError: an argument is invalid; it is named.
    """

    study: optuna.Study
    trainable: object
    space: Space
    metrics: tuple[str, ...]
    steps: int
    n_trials: int | None
    timeout: float | None = None
    algorithm: Algorithm = field(default_factory=FullTraining)
    executor: Executor | Client | Cluster | None = None
    store: str | os.PathLike[str] | Journal | None = None
    checkpoints: str | os.PathLike[str] | CheckpointStore | None = None
    callbacks: tuple[Callback, ...] = ()
    catch: tuple[type[Exception], ...] = ()
    constraints: Constraints | None = None
    show_progress_bar: bool = False
    extend: bool = False
    sharing: bool = True
    evaluate_every: int | None = None
    checkpoint_every: int | None = None
    checkpoint_budget: int | None = None  # bytes
    verify: Verify = "first-fork"
    audit: Auditing = "idle"
    audit_budget: float = 0.05
    environment: str | None = None
    space_works: bool = True  # whether it described or pruned a trial when it was tried out
    workers: int = 1  # number of workers, once the executor is open

    @property
    def name(self) -> str:
        """The trainable's name, after which folders and plans of its workload are named."""
        return getattr(self.trainable, "__name__", type(self.trainable).__name__)

    @property
    def followers(self) -> list[LiveCallback]:
        """The callbacks that follow trials while they train."""
        return [callback for callback in self.callbacks if isinstance(callback, LiveCallback)]

    def __post_init__(self) -> None:
        if isinstance(self.trainable, type):
            name = self.trainable.__name__
            raise UsageError(f"{name} is a class: pass an instance of it, {name}(...)")
        see_free(self.trainable)
        _check_study(self.study, self.metrics)
        if len(self.metrics) > 1 and not self.algorithm.multi_objective:
            raise UsageError(
                f"{type(self.algorithm).__name__} compares trials by one value, but the study has {len(self.metrics)} "
                f"objectives; use FullTraining, or a study with one direction"
            )
        if self.evaluate_every is not None and isinstance(self.algorithm, OptunaPruner):
            raise UsageError(
                "evaluate_every adds intermediate values, which would change the decisions of the study's pruner. "
                "Set how often trials are evaluated with OptunaPruner(interval=...)"
            )
        if self.environment == ANY and self.audit == "winner":
            raise UsageError(
                "audit='winner' compares bits, and environment='any' trains on devices that compute different ones; "
                "leave one of them out"
            )
        if self.n_trials != 0:  # else the search that is continued was checked
            self.algorithm.check(self.setting)

    @property
    def setting(self) -> Setting:
        return Setting(
            steps=self.steps,
            n_trials=self.n_trials,
            maximize=self.study.directions[0] == optuna.study.StudyDirection.MAXIMIZE,
            adaptive=not points_of(self.space) and not isinstance(samplers(self.study)[-1], BLIND),
            workers=self.workers,
        )

    @property
    def observed(self) -> Observed:
        return Observed(
            rising={
                name: direction == optuna.study.StudyDirection.MAXIMIZE
                for name, direction in zip(self.metrics, self.study.directions, strict=True)
            },
            noisy=noisy_of(self.trainable),
            forks=self.algorithm.forks,
            defaults=defaults_of(self.trainable),
        )

    def remarks(self) -> Iterator[str]:
        """Yield warnings about arguments that the user probably did not intend."""
        if getattr(self.trainable, "defaults", None) and not self.observed.defaults:
            yield (
                "`defaults` of the trainable is not a dict, or its own code reads it: it counts as code, and gives no "
                "hyperparameter a default. (Code reads hyperparameters and their defaults from hp.)"
            )
        pruner, algorithm = self.study.pruner, type(self.algorithm).__name__
        default = optuna.pruners.MedianPruner()
        is_default = isinstance(pruner, optuna.pruners.NopPruner) or (
            type(pruner) is type(default) and vars(pruner) == vars(default)
        )
        if not is_default and not isinstance(self.algorithm, OptunaPruner):
            yield (
                f"{algorithm} does not use the study's {type(pruner).__name__}; algorithm=OptunaPruner(interval=...) "
                "does"
            )
        if isinstance(self.algorithm, OptunaPruner) and self.algorithm.window < self.workers:
            yield (
                f"OptunaPruner(window={self.algorithm.window}) has fewer trials open at a time than there are workers "
                f"({self.workers}); OptunaPruner(window={self.workers}) uses all of them, but the pruner knows fewer "
                f"results when it decides"
            )
        setting, sampler = self.setting, samplers(self.study)[-1]
        if not setting.adaptive or self.n_trials is None or not isinstance(self.algorithm, FullTraining):
            return
        if self.study.get_trials(deepcopy=False, states=(TrialState.COMPLETE, TrialState.PRUNED)):
            return  # it learns from those
        if startup_trials(sampler) < self.n_trials <= self.algorithm.start(setting, Trials()).room():
            yield (
                f"all {self.n_trials} trials are proposed before the first has a value, so "
                f"{type(sampler).__name__} learns from none of them. With algorithm=FullTraining(window="
                f"{max(self.workers, self.n_trials // 4)}), which has fewer open at a time, it learns from those that "
                f"have ended"
            )


def _check_study(study: optuna.Study, metrics: tuple[str, ...]) -> None:
    for metric in metrics:
        if metric.startswith("hpstage:") and (metric not in COSTS or metric == metrics[0]):
            raise UsageError(
                f"metric is {', '.join(map(repr, metrics))}; the first must be one that evaluate() returns, and costs "
                f"that hpstage measures ({', '.join(COSTS)}) may follow"
            )
    text("another name").of("study_name", study.study_name)
    if len(metrics) != len(study.directions):
        raise UsageError(
            f"the study has {len(study.directions)} objective{'s' * (len(study.directions) > 1)}, but metric names "
            f"{len(metrics)}; give one name per direction, in their order"
        )
