"""The front door: run an Optuna study on a stage tree."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import dropwhile
from typing import TYPE_CHECKING, get_args

import optuna

from hpstage.algorithm import Algorithm, Setting
from hpstage.algos import FullTraining
from hpstage.checkpoints import CheckpointStore
from hpstage.checkpoints.eviction import Eviction, budget_bytes
from hpstage.driver.driver import Driver
from hpstage.driver.membership import taking_part
from hpstage.errors import HistoryChanged, LeaseLost, UsageError
from hpstage.executor import Executor
from hpstage.optuna.ledger import Ledger, samplers
from hpstage.optuna.patience import patient
from hpstage.optuna.stage_tree_sampler import StageTreeSampler
from hpstage.plan.facts import SearchStarted, WorkerId
from hpstage.plan.keys import workload_key
from hpstage.plan.log import read_facts
from hpstage.plan.messages import Verify
from hpstage.plan.savings import savings
from hpstage.progress import Progress, open_display
from hpstage.report.whole import seconds_at_work
from hpstage.schedule import Scalar
from hpstage.schedule.space import Space
from hpstage.search.result import Result
from hpstage.search.session import Callback, Session, missing_metric
from hpstage.search.signals import Interruption
from hpstage.search.trials import Roster, name_in
from hpstage.store import Journal
from hpstage.store.opening import open_places
from hpstage.training.identity.workload import by_name, code_identity
from hpstage.training.lent import see_free

if TYPE_CHECKING:
    from distributed import Client

logger = logging.getLogger("hpstage")

# Samplers whose proposals do not depend on results.
_BLIND = (
    optuna.samplers.RandomSampler,
    optuna.samplers.GridSampler,
    optuna.samplers.BruteForceSampler,
    optuna.samplers.QMCSampler,
)


def optimize(
    study: optuna.Study,
    trainable: object,
    space: Space,
    *,
    metric: str | Sequence[str],
    steps: int,
    n_trials: int | None = None,
    timeout: float | None = None,
    algorithm: Algorithm | None = None,
    executor: Executor | Client | None = None,
    store: str | os.PathLike[str] | Journal | None = None,
    checkpoints: str | os.PathLike[str] | CheckpointStore | None = None,
    callbacks: Sequence[Callback] | None = None,
    catch: Iterable[type[Exception]] | type[Exception] = (Exception,),
    show_progress_bar: bool = False,
    extend: bool = False,
    sharing: bool = True,
    checkpoint_every: int | None = None,
    checkpoint_budget: int | str | None = None,
    verify: Verify = "first-fork",
) -> Result:
    """Search with ``study``'s sampler, training every stage once.

    The study proposes trials and keeps their results; hpstage trains them as a stage tree on ``executor``'s workers.
    A call that was interrupted (Ctrl-C, a kill, a power cut) goes on where it was when the same call is made again
    with a study in persistent storage; whatever was trained before, by any study on the same store, is not trained
    again.

    In the main thread, the first Ctrl-C or SIGTERM stops the search cleanly: no stage is started any more, those that
    run end with the step under way (training functions, which give their metrics when they are asked, with the step
    after it), their states are kept, and nothing is trained again when the search goes on. The second
    stops at once, and loses the steps since the last states that were kept. SIGTERM then ends the process, as it does
    by default. Signal handlers of your own are left alone.

    Args:
        study: an Optuna study. One with several objectives takes as many metrics, and full training.
        trainable: a ``TorchTrainable``, a function of one argument, or an object with ``setup``, ``train``,
            ``evaluate``, ``state_dict`` and ``load_state_dict``.
        space: maps an ``optuna.Trial`` to ``{hyper-parameter: schedule or value}``.
        metric: the name, among those that ``evaluate`` returns, of the study's objective; a list of names, in the
            order of the study's directions, where there are several.
        steps: steps of a full trial.
        n_trials: how many trials the sampler proposes in this call, those of an interrupted call that it continues
            included. Trials that an algorithm makes out of others (population based training) come in addition.
        timeout: seconds after which no stage is started any more; what runs comes to its end. Unfinished trials
            stay open, and the next call goes on with them.
        algorithm: how far each trial is trained; :class:`~hpstage.algos.FullTraining` by default.
        executor: where stages are trained: ``None`` for a local Dask cluster (one worker per GPU, else per core), a
            ``dask.distributed.Client`` (never closed), or an :class:`Executor`, such as ``InlineExecutor()``.
        store: where the plan is: a folder; ``redis://host:6379`` (``rediss://`` with TLS), by which hosts share plans,
            one for each workload unless ``?prefix=NAME`` names it; or a :class:`Journal`. By default a folder of the
            workload's own in ``.hpstage``.
        checkpoints: a folder, or a URL that fsspec knows (``s3://bucket/folder``), that every worker reaches; by
            default inside the store's folder.
        callbacks: called as ``callback(study, frozen_trial)`` after each trial; may call ``study.stop()``.
        catch: exceptions of the user's code that fail their trials only; others stop the study once running stages
            have ended. By default all are caught; Optuna's own default is ``()``.
        show_progress_bar: show on standard error how the search stands: on a terminal a few lines that stay below what
            is printed and logged; elsewhere (a file, a notebook, ``TERM=dumb``) a line at most every ten seconds.
        extend: go on with the study's last search, whether it ended or not, with more ``steps``, more ``n_trials`` or
            another ``algorithm``: its trials count among ``n_trials``, the algorithm is told again what is known of
            them, and what was kept is trained on. A finished trial that is trained on gains its longer result in a
            new trial of the study (Optuna's finished trials cannot be changed), with all its values and the user
            attribute ``hpstage:extends``. Forks of population based training are made again by it, and stay as they
            are under another algorithm. An asynchronous algorithm may go on a little each time.
        sharing: ``False`` trains every trial alone, for comparison.
        checkpoint_every: keeps every state whose step, counted from the beginning of training, is a multiple of this:
            10 keeps those at steps 10, 20, 30 and so on of every trial, wherever its schedules change. By default a
            state is kept at least after each minute of training. States that trials are known or likely to part
            from are kept in addition.
        checkpoint_budget: bytes that the checkpoints of the whole plan may take (``"20 GB"``); beyond that, those go
            whose training anew costs the fewest seconds per byte, and never one that is still needed. By default none
            goes, until the disk is full.
        verify: whether forks are verified: a few steps are trained straight through and from the kept state, and all
            that training can reach is compared. ``"first-fork"`` does so once for a workload, within its first steps
            (two of which are trained twice), once under each kind of values (a category, a switch, a number that is 0,
            1, between or beyond, a schedule that varies), and where an object with five methods begins to change
            something else;
            ``"all"`` for each chain of stages, too; ``"off"`` never. What was found not to be exact ends this call, and
            later ones on the store.
            :func:`hpstage.check` does more.

    Raises:
        UsageError: bad input, named, before anything is trained.
        StateError: training changes something that no state holds; it is named.
        StoreError: the store cannot be used or belongs to another workload.
        ClusterError: there are no workers, or they were all lost.
        CheckpointError: there was no room for a checkpoint, and no other could go; or no worker could use their
            place for the executor's ``worker_timeout``. Everything before is kept.
        TrainingError: an exception that ``catch`` does not name.
        KeyboardInterrupt: Ctrl-C; all that was reached is kept.
    """
    algorithm = FullTraining() if algorithm is None else algorithm
    metrics = (metric,) if isinstance(metric, str) else tuple(metric)
    if isinstance(trainable, type):
        raise UsageError(f"{trainable.__name__} is a class: pass an instance of it, {trainable.__name__}(...)")
    see_free(trainable)
    if verify not in get_args(Verify):
        raise UsageError(f"verify is {verify!r}; give one of {', '.join(map(repr, get_args(Verify)))}")
    setting = _checked(study, space, metrics, steps, n_trials, timeout, algorithm, checkpoint_every)
    budget = None if checkpoint_budget is None else budget_bytes(checkpoint_budget, "checkpoint_budget")
    display = open_display(show_progress_bar)
    with ExitStack() as closing:
        interruption = closing.enter_context(Interruption())
        if display is not None:
            display.tell("Setting up the workers")  # which takes seconds
        executor = _executor(executor)
        closing.callback(executor.close)
        environment = executor.open(trainable, None)
        interruption.started(executor.wake)
        for remark in environment.remarks:
            logger.info("%s", remark)
        for remark in environment.warnings:
            logger.warning("%s", remark)
        described = {**(environment.identity or code_identity(trainable)), "sharing": "on" if sharing else "off"}
        described |= {f"environment:{name}": text for name, text in environment.described.items()}
        if environment.described.get("deterministic") == "no":
            verify = "off"  # the user has said that equal steps may give other bits here
        workload = workload_key(described)
        places = open_places(store, checkpoints, name=_name(trainable), workload=workload, closing=closing)
        executor.use(places.checkpoints)
        closing.enter_context(executor.show(places.journal))
        closing.enter_context(patient(study))
        eviction = Eviction(places.checkpoints, budget)
        closing.callback(eviction.close)
        deadline = None if timeout is None else time.monotonic() + timeout
        page = None if display is None else executor.page
        call = _Call(
            ledger=Ledger(study),
            executor=executor,
            space=space,
            algorithm=algorithm,
            setting=setting,
            metrics=metrics,
            extend=extend,
            callbacks=tuple(callbacks or ()),
            catch=(catch,) if isinstance(catch, type) else tuple(catch),
            deadline=deadline,
            progress=closing.enter_context(Progress(display, study, page=page, deadline=deadline)),
            interruption=interruption,
        )
        began = time.monotonic()
        workers: list[WorkerId] = []
        while True:
            driver: Driver | None = None
            joined = taking_part(
                places.journal,
                places.checkpoints,
                executor,
                call.ledger,
                workload=workload,
                described=described,
                loaded=by_name(environment.loaded),
                sharing=sharing,
                checkpoint_every=checkpoint_every,
                verify=verify,
                eviction=eviction,
                workers=workers,
            )
            try:
                with joined as driver:
                    session = call.session(driver)
                    steps_before = driver.plan.tally(session.name).totals.steps_trained
                    with _in_optimize_loop(study):
                        session.run()
                    eviction.settle(driver.log)
                    interruption.check()
                break
            except LeaseLost:
                logger.warning(
                    "This process stood still, or was cut off from the store, for so long that others took its part "
                    "over. It joins them again and goes on where the search is now."
                )
            except HistoryChanged as error:
                logger.warning("%s. This process begins again by itself.", error)
            if driver is not None:
                workers = driver.abandon()
        plan, name = driver.plan, session.name
        facts = tuple(read_facts(places.journal))
        whole = plan.searches[name].before.steps_trained == steps_before
        makespan = time.monotonic() - began
        if not whole:  # all else counts from where the search began, in an earlier call
            started = plan.searches[name].started
            makespan = seconds_at_work(dropwhile(lambda fact: fact != started, facts))
        saved = savings(
            plan,
            name,
            [trial.id for trial in session.trials if trial.id in plan.trials],
            failed=session.failed,
            whole=whole,
            makespan=makespan,
            workers=driver.scheduler.most_workers,
        )
        call.progress.finish(session, driver)
        return Result(study, saved, places.folder, plan, facts, name)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Call:
    """What a call asks for, whatever the driver that carries it out."""

    ledger: Ledger
    executor: Executor
    space: Space
    algorithm: Algorithm
    setting: Setting
    metrics: tuple[str, ...]
    extend: bool
    callbacks: tuple[Callback, ...]
    catch: tuple[type[Exception], ...]
    deadline: float | None
    progress: Progress
    interruption: Interruption

    def session(self, driver: Driver) -> Session:
        study, setting = self.ledger.study, self.setting
        chain = samplers(study)
        for sampler in chain:
            if isinstance(sampler, StageTreeSampler):
                sampler.attach(self.space, setting.steps)
        started = SearchStarted(
            study=name_in(driver.plan, self.ledger),
            algorithm=repr(self.algorithm),
            metric=self.metrics,
            steps=setting.steps,
            n_trials=setting.n_trials,
            sampler=" over ".join(type(sampler).__qualname__ for sampler in chain),
            at=time.time(),
            extends=self.extend,
            identity=self.ledger.identity(),
            directions=tuple(direction.name.lower() for direction in study.directions),
        )
        return Session(
            self.ledger,
            driver,
            Roster(self.ledger, driver, started, self.space, before_first=self._try_out),
            self.algorithm,
            setting,
            started,
            callbacks=self.callbacks,
            catch=self.catch,
            deadline=self.deadline,
            interruption=self.interruption,
            on_change=lambda session: self.progress.update(session, driver),
        )

    def _try_out(self, initial: Mapping[str, Scalar]) -> None:
        found = self.executor.try_out(initial)
        for name in self.metrics:
            if found is not None and name not in found:
                raise UsageError(missing_metric(name, found))


class _in_optimize_loop:
    """Lets callbacks and samplers call ``study.stop()``, as they may within ``study.optimize``."""

    def __init__(self, study: optuna.Study) -> None:
        self._study = study

    def __enter__(self) -> None:
        if self._study._thread_local.in_optimize_loop:
            raise UsageError("optimize() was called from within a running study; nested searches are not possible")
        self._study._thread_local.in_optimize_loop = True
        self._study._stop_flag = False

    def __exit__(self, *error: object) -> None:
        self._study._thread_local.in_optimize_loop = False


def _checked(
    study: object,
    space: object,
    metrics: tuple[object, ...],
    steps: object,
    n_trials: object,
    timeout: object,
    algorithm: object,
    checkpoint_every: object,
) -> Setting:
    """Refuse what cannot be searched, before a worker is started."""
    if not isinstance(study, optuna.Study):
        raise UsageError(f"study is a {type(study).__name__}; give an optuna.Study (optuna.create_study(...))")
    if not callable(space):
        raise UsageError(f"space is a {type(space).__name__}; give a function of an optuna.Trial that returns a dict")
    for metric in metrics:
        if not isinstance(metric, str) or not metric:
            raise UsageError(f"metric is {metric!r}; give the name of one of the numbers that evaluate() returns")
    for what, name in (("the study's name", study.study_name), *(("metric", name) for name in metrics)):
        if any("\ud800" <= c <= "\udfff" for c in str(name)):
            raise UsageError(f"{what} is {name!r}, which is not valid Unicode and cannot be stored; give another")
    if len(metrics) != len(study.directions):
        raise UsageError(
            f"the study has {len(study.directions)} objective{'s' * (len(study.directions) > 1)}, but metric names "
            f"{len(metrics)}; give one name per direction, in their order"
        )
    counts = {
        "steps": (steps, False),
        "n_trials": (n_trials, True),
        "checkpoint_every": (checkpoint_every, True),
    }
    for name, (value, optional) in counts.items():
        if optional and value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise UsageError(f"{name} is {value!r}; it must be a whole number above zero")
    if timeout is not None and not (isinstance(timeout, int | float) and timeout > 0):
        raise UsageError(f"timeout is {timeout!r}; it must be a number of seconds above zero, or None")
    if isinstance(algorithm, type):
        raise UsageError(f"algorithm is the class {algorithm.__name__}; give an instance: {algorithm.__name__}(...)")
    if not isinstance(algorithm, Algorithm):
        raise UsageError(f"algorithm is {algorithm!r}; give an instance of one from hpstage.algos")
    if len(metrics) > 1 and not algorithm.multi_objective:
        raise UsageError(
            f"{type(algorithm).__name__} compares trials by one value, but the study has {len(metrics)} objectives; "
            f"use FullTraining, or a study with one direction"
        )
    assert isinstance(steps, int) and (n_trials is None or isinstance(n_trials, int))
    setting = Setting(
        steps=steps,
        n_trials=n_trials,
        maximize=study.directions[0] == optuna.study.StudyDirection.MAXIMIZE,
        adaptive=not isinstance(samplers(study)[-1], _BLIND),
    )
    algorithm.check(setting)
    return setting


def _executor(executor: object) -> Executor:
    """The executor that ``executor=`` names."""
    if isinstance(executor, Executor):
        return executor
    from hpstage.cluster import DaskExecutor

    if executor is None:
        return DaskExecutor()
    from distributed import Client

    if isinstance(executor, Client):
        return DaskExecutor(executor)
    if isinstance(executor, type):
        raise UsageError(f"executor is the class {executor.__name__}; give an instance: {executor.__name__}()")
    raise UsageError(
        f"executor is a {type(executor).__name__}; give a dask.distributed.Client, an Executor such as "
        f"InlineExecutor(), or None for a local cluster"
    )


def _name(trainable: object) -> str:
    return getattr(trainable, "__name__", type(trainable).__name__)
