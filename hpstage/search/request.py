"""The arguments of ``optimize``, checked before any worker is started."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, get_args

import optuna

from hpstage.algorithm import Algorithm, Setting, Trials
from hpstage.algos import FullTraining, OptunaPruner
from hpstage.errors import UsageError
from hpstage.optuna.ledger import samplers
from hpstage.optuna.private import startup_trials
from hpstage.plan.messages import Auditing, Verify
from hpstage.schedule.space import Space, points_of
from hpstage.search.costs import COSTS
from hpstage.search.decisions import Observed
from hpstage.search.session import Callback
from hpstage.training.adapter import noisy_of
from hpstage.training.lent import see_free

# Samplers whose proposals do not depend on results.
BLIND = (
    optuna.samplers.RandomSampler,
    optuna.samplers.GridSampler,
    optuna.samplers.BruteForceSampler,
    optuna.samplers.QMCSampler,
)


def in_tuple(values: object) -> tuple[Any, ...]:
    """Return an argument that is one value or several as a tuple."""
    return tuple(values) if isinstance(values, Iterable) and not isinstance(values, str | type) else (values,)


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
    timeout: float | None
    algorithm: Algorithm
    callbacks: tuple[Callback, ...]
    catch: tuple[type[Exception], ...]
    extend: bool
    sharing: bool
    evaluate_every: int | None
    checkpoint_every: int | None
    checkpoint_budget: int | None  # bytes
    verify: Verify
    audit: Auditing
    audit_budget: float
    workers: int = 1  # how many there are, once they are open

    def __post_init__(self) -> None:
        if isinstance(self.trainable, type):
            name = self.trainable.__name__
            raise UsageError(f"{name} is a class: pass an instance of it, {name}(...)")
        see_free(self.trainable)
        if self.verify not in get_args(Verify):
            raise UsageError(f"verify is {self.verify!r}; give one of {', '.join(map(repr, get_args(Verify)))}")
        if self.audit not in get_args(Auditing):
            raise UsageError(f"audit is {self.audit!r}; give one of {', '.join(map(repr, get_args(Auditing)))}")
        _check_share("audit_budget", self.audit_budget)
        _check_study(self.study, self.metrics)
        if not callable(self.space):
            kind = type(self.space).__name__
            raise UsageError(f"space is a {kind}; give a function of an optuna.Trial that returns a dict")
        for name in ("steps", "n_trials", "evaluate_every", "checkpoint_every"):
            if (count := getattr(self, name)) is not None or name == "steps":
                object.__setattr__(self, name, whole(name, count))
        if self.timeout is not None:
            if not (isinstance(self.timeout, Real) and self.timeout > 0):
                raise UsageError(f"timeout is {self.timeout!r}; it must be a number of seconds above zero, or None")
            object.__setattr__(self, "timeout", float(self.timeout))
        for name in ("extend", "sharing"):
            if not isinstance(switch := getattr(self, name), bool):
                raise UsageError(f"{name} is {switch!r}; give True or False")
        for caught in self.catch:
            if not (isinstance(caught, type) and issubclass(caught, Exception)):
                raise UsageError(f"catch has {caught!r}; give classes of exceptions, such as (ValueError,)")
        for callback in self.callbacks:
            if not callable(callback):
                raise UsageError(f"callbacks has {callback!r}; give functions of the study and a trial")
        _check_algorithm(self.algorithm, len(self.metrics))
        if self.evaluate_every is not None and isinstance(self.algorithm, OptunaPruner):
            raise UsageError(
                "evaluate_every adds intermediate values, by which the study's pruner would decide otherwise; "
                "OptunaPruner(interval=...) says how often trials are evaluated"
            )
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
        )

    def remarks(self) -> Iterator[str]:
        """Yield what the user probably did not mean."""
        pruner, algorithm = self.study.pruner, type(self.algorithm).__name__
        default = optuna.pruners.MedianPruner()
        is_default = isinstance(pruner, optuna.pruners.NopPruner) or (
            type(pruner) is type(default) and vars(pruner) == vars(default)
        )
        if not is_default and not isinstance(self.algorithm, OptunaPruner):
            yield (
                f"{algorithm} does not ask the study's {type(pruner).__name__}; algorithm=OptunaPruner(interval=...) "
                "does"
            )
        setting, sampler = self.setting, samplers(self.study)[-1]
        if not setting.adaptive or self.n_trials is None or not isinstance(self.algorithm, FullTraining):
            return
        if startup_trials(sampler) < self.n_trials <= self.algorithm.start(setting, Trials()).room():
            yield (
                f"all {self.n_trials} trials are proposed before the first has a value, so that "
                f"{type(sampler).__name__} learns from none: FullTraining(window=...) says how many are open at a time"
            )


def _check_study(study: object, metrics: tuple[object, ...]) -> None:
    if not isinstance(study, optuna.Study):
        raise UsageError(f"study is a {type(study).__name__}; give an optuna.Study (optuna.create_study(...))")
    for metric in metrics:
        if not isinstance(metric, str) or not metric:
            raise UsageError(f"metric is {metric!r}; give the name of one of the numbers that evaluate() returns")
        if metric.startswith("hpstage:") and (metric not in COSTS or metric == metrics[0]):
            raise UsageError(
                f"metric is {', '.join(map(repr, metrics))}; the first is one that evaluate() returns, and costs that "
                f"hpstage measures ({', '.join(COSTS)}) may follow"
            )
    for what, name in (("the study's name", study.study_name), *(("metric", name) for name in metrics)):
        if any("\ud800" <= c <= "\udfff" for c in str(name)):
            raise UsageError(f"{what} is {name!r}, which is not valid Unicode and cannot be stored; give another")
    if len(metrics) != len(study.directions):
        raise UsageError(
            f"the study has {len(study.directions)} objective{'s' * (len(study.directions) > 1)}, but metric names "
            f"{len(metrics)}; give one name per direction, in their order"
        )


def whole(name: str, value: object) -> int:
    """Return the argument ``name``, one of NumPy's whole numbers as well, as an ``int`` above zero.

    Raises:
        UsageError: it is none.
    """
    if isinstance(value, bool) or not isinstance(value, Integral) or value < 1:
        raise UsageError(f"{name} is {value!r}; it must be a whole number above zero")
    return int(value)


def _check_share(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, Real) or not 0 <= float(value) < math.inf:
        raise UsageError(f"{name} is {value!r}; give a number that is zero or above, such as 0.05 for 5 %")


def _check_algorithm(algorithm: object, objectives: int) -> None:
    if isinstance(algorithm, type):
        raise UsageError(f"algorithm is the class {algorithm.__name__}; give an instance: {algorithm.__name__}(...)")
    if not isinstance(algorithm, Algorithm):
        raise UsageError(f"algorithm is {algorithm!r}; give an instance of one from hpstage.algos")
    if objectives > 1 and not algorithm.multi_objective:
        raise UsageError(
            f"{type(algorithm).__name__} compares trials by one value, but the study has {objectives} objectives; "
            f"use FullTraining, or a study with one direction"
        )
