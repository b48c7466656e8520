"""Training without a search: given configurations are trained as trials of a study that is stored only in the plan."""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping, Sequence
from types import FunctionType
from typing import TYPE_CHECKING, Any, get_args, overload

from hpstage.checkpoints import CheckpointStore
from hpstage.cluster.main_guard import refuse_while_imported
from hpstage.errors import ScheduleError, UsageError
from hpstage.errors.arguments import (
    METRIC,
    checked,
    in_tuple,
    one_of,
    optional,
    text,
    whole,
)
from hpstage.execution.trying_out import evaluate_untrained
from hpstage.executor import Executor
from hpstage.optuna.ledger import Callback
from hpstage.plan.messages import Auditing
from hpstage.schedule import Plateau, Scalar, Schedule, as_schedule
from hpstage.schedule.space import RESERVED, unreached
from hpstage.search.dry_run import warn_of_unreached
from hpstage.search.given import Direction, Given, in_memory
from hpstage.search.request import KINDS, Request
from hpstage.search.results.branching import RUNS, Configuration
from hpstage.search.results.trial import TrainedTrial
from hpstage.search.run import searched
from hpstage.search.session import missing_metric
from hpstage.search.signals import Interruption
from hpstage.store import Journal
from hpstage.training.identity import threads
from hpstage.training.randomness import generators_restored
from hpstage.training.trainables import as_trainable

if TYPE_CHECKING:
    from distributed import Client
    from distributed.deploy import Cluster

Values = Mapping[str, Schedule | Plateau | Scalar]

_FALLS = ("loss", "error", "perplexity", "mse", "mae", "nll")
"""A metric with one of these in its name is minimized by default."""
_NAME = text("a name")


@overload
def train(
    trainable: object,
    hp: Values,
    *,
    steps: int,
    metric: str | None = None,
    direction: Direction | None = None,
    study: str = RUNS,
    store: str | os.PathLike[str] | Journal | None = None,
    checkpoints: str | os.PathLike[str] | CheckpointStore | None = None,
    executor: Executor | Client | Cluster | None = None,
    evaluate_every: int | None = None,
    checkpoint_every: int | None = None,
    checkpoint_budget: int | str | None = None,
    audit: Auditing = "idle",
    environment: str | None = None,
    callbacks: Sequence[Callback] | Callback | None = None,
    show_progress_bar: bool = False,
) -> TrainedTrial: ...
@overload
def train(
    trainable: object,
    hp: Sequence[Values],
    *,
    steps: int,
    metric: str | None = None,
    direction: Direction | None = None,
    study: str = RUNS,
    store: str | os.PathLike[str] | Journal | None = None,
    checkpoints: str | os.PathLike[str] | CheckpointStore | None = None,
    executor: Executor | Client | Cluster | None = None,
    evaluate_every: int | None = None,
    checkpoint_every: int | None = None,
    checkpoint_budget: int | str | None = None,
    audit: Auditing = "idle",
    environment: str | None = None,
    callbacks: Sequence[Callback] | Callback | None = None,
    show_progress_bar: bool = False,
) -> list[TrainedTrial]: ...
@checked(
    steps=whole(),
    metric=optional(METRIC),
    direction=optional(one_of(*get_args(Direction))),
    study=_NAME,
    **KINDS,
)
def train(
    trainable: object,
    hp: Values | Sequence[Values],
    *,
    steps: int,
    metric: str | None = None,
    direction: Direction | None = None,
    study: str = RUNS,
    store: str | os.PathLike[str] | Journal | None = None,
    checkpoints: str | os.PathLike[str] | CheckpointStore | None = None,
    executor: Executor | Client | Cluster | None = None,
    evaluate_every: int | None = None,
    checkpoint_every: int | None = None,
    checkpoint_budget: int | str | None = None,
    audit: Auditing = "idle",
    environment: str | None = None,
    callbacks: Sequence[Callback] | Callback | None = None,
    show_progress_bar: bool = False,
) -> TrainedTrial | list[TrainedTrial]:
    """Train one configuration, or several, without a search.

    Each run is a trial of the study ``"runs"`` on the store. It is shown like the trials of a search, can be branched
    at any step (:meth:`TrainedTrial.branch`), and no search on the store trains its steps again. The same call made
    again continues an interrupted run (Ctrl-C, a kill), returns a finished one, and trains a failed one again. The
    study is on the store only; no Optuna storage is needed.

    Args:
        trainable, store, checkpoints, executor: as for :func:`hpstage.optimize`.
        hp: schedules or plain values of the hyperparameters by name; or a list of such dicts, whose common steps are
            trained once.
        steps: the number of steps. Longer schedules are cut.
        metric: the metric by which runs are compared, by ``"best"`` and by ``s.plateau`` if it names none. By default
            the first one that ``evaluate`` returns for the untrained model, which is built in this process for that.
        direction: whether smaller or larger values of the metric are better; by default ``"minimize"`` if its name
            contains loss, error, perplexity, mse, mae or nll.
        study: the study's name. Only one process at a time trains the runs of a study: give another name to train
            concurrently on the same store.
        evaluate_every, checkpoint_every, checkpoint_budget: as for :func:`hpstage.optimize`.
        audit, environment, callbacks, show_progress_bar: as for :func:`hpstage.optimize`.

    Returns:
        The trained run; a list of them for a list.

    Raises:
        TrainingError: the user's code raised an exception.
        KeyboardInterrupt: Ctrl-C; everything reached is kept.
        UsageError: an argument is invalid, or another process trains runs of the study. The other errors are those of
            :func:`hpstage.optimize`.
    """
    several = [hp] if isinstance(hp, Mapping) else list(hp) if isinstance(hp, list | tuple) else []
    if not several:
        raise UsageError("hp is neither a dict of hyperparameters nor a list of them; give {'lr': 0.1, ...}")
    configurations = [_configuration(one, steps) for one in several]
    refuse_while_imported()
    changes: dict[str, int] = {}
    for one in several:
        changes |= unreached({n: as_schedule(v) for n, v in one.items() if not isinstance(v, Plateau)}, steps)
    warn_of_unreached(changes, steps)
    metric = _first_metric(trainable, configurations[0]) if metric is None else metric
    falls = any(part in metric.lower() for part in _FALLS)
    trained = train_all(
        trainable,
        configurations,
        metrics=(metric,),
        directions=(direction or ("minimize" if falls else "maximize"),),
        study=study,
        store=store,
        checkpoints=checkpoints,
        executor=executor,
        evaluate_every=evaluate_every,
        checkpoint_every=checkpoint_every,
        checkpoint_budget=checkpoint_budget,
        audit=audit,
        environment=environment,
        callbacks=callbacks,
        show_progress_bar=show_progress_bar,
    )
    for one in trained:
        if one.metrics and not any(metric in values for values in one.metrics.values()):  # trained earlier, for another
            raise UsageError(missing_metric(metric, one.metrics[max(one.metrics)]))
    return trained[0] if isinstance(hp, Mapping) else trained


@checked(study=_NAME, **KINDS)
def train_all(
    trainable: object,
    configurations: Sequence[Configuration],
    *,
    metrics: tuple[str, ...],
    directions: tuple[Direction, ...],
    study: str,
    store: str | os.PathLike[str] | Journal | None,
    checkpoints: str | os.PathLike[str] | CheckpointStore | None,
    executor: Executor | Client | Cluster | None,
    evaluate_every: int | None = None,
    checkpoint_every: int | None = None,
    checkpoint_budget: Any = None,
    audit: Auditing = "idle",
    environment: str | None = None,
    callbacks: Sequence[Callback] | Callback | None = None,
    show_progress_bar: bool = False,
) -> list[TrainedTrial]:
    """Train configurations; return the trial of each. The arguments are those of :func:`train`, for several metrics."""
    given = Given(configurations)
    request = Request(
        study=in_memory(study, directions),
        trainable=trainable,
        space=given,
        metrics=metrics,
        steps=max(one.steps for one in configurations),
        n_trials=len(configurations),
        executor=executor,
        store=store,
        checkpoints=checkpoints,
        callbacks=in_tuple(callbacks or ()),
        show_progress_bar=show_progress_bar,
        evaluate_every=evaluate_every,
        checkpoint_every=checkpoint_every,
        checkpoint_budget=checkpoint_budget,
        audit=audit,
        environment=environment,
    )
    result = searched(request, Interruption("the same call continues"), train_all)
    return [result.trial(id) for id in given.trials]


def _configuration(hp: Values, steps: int) -> Configuration:
    if not isinstance(hp, Mapping):
        raise UsageError(f"a configuration is {hp!r}; give a dict of hyperparameters, {{'lr': 0.1, ...}}")
    if not hp:
        raise UsageError("there are no hyperparameters; give at least one, {'lr': 0.1}, or --set lr=0.1")
    schedules: dict[str, Schedule | Plateau] = {}
    for name, value in hp.items():
        if name in RESERVED:
            raise UsageError(f"hyperparameter {name!r}: the name has another meaning here; give another")
        try:
            schedules[name] = (value if isinstance(value, Plateau) else as_schedule(value)).until(steps)
        except ScheduleError as error:
            raise ScheduleError(f"hyperparameter {name!r}: {error}") from None
    return Configuration(schedules, steps)


def _first_metric(trainable: Any, one: Configuration) -> str:
    """Return the first metric of the untrained model, which a copy of the trainable builds in this process."""
    values = {name: value.until(1) for name, value in one.schedules.items()}
    initial = {name: value.value if isinstance(value, Plateau) else value.value(0) for name, value in values.items()}
    with generators_restored(), threads.restored():
        adapter: Any = as_trainable(trainable if isinstance(trainable, FunctionType) else copy.deepcopy(trainable))
        try:
            found, why = evaluate_untrained(adapter, initial), None
        except UsageError:
            raise
        except Exception as error:
            found, why = {}, error
        finally:
            adapter.close()
    if not found:
        raised = "" if why is None else f", since it raised {type(why).__name__}: {why}"
        raise UsageError(
            f"the untrained model gives no metric{raised}; give metric=, a name that evaluate() returns or that "
            f"run.report() receives"
        ) from why
    return next(iter(found))
