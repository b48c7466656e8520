"""The main entry point: run an Optuna study on a stage tree."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, cast, get_args

import optuna

from hpstage.algorithm import Algorithm
from hpstage.algos import FullTraining
from hpstage.checkpoints import CheckpointStore
from hpstage.cluster.main_guard import refuse_while_imported
from hpstage.errors.arguments import (
    CATCH,
    METRIC,
    SPACE,
    checked,
    function,
    in_tuple,
    instance,
    number,
    one_of,
    optional,
    seconds,
    several,
    switch,
    whole,
)
from hpstage.executor import Executor
from hpstage.optuna.ledger import Callback, Constraints
from hpstage.plan.messages import Auditing, Verify
from hpstage.schedule.space import Space, longest, points_of
from hpstage.search.request import ALGORITHM, KINDS, Request
from hpstage.search.results.result import Result
from hpstage.search.run import searched
from hpstage.search.signals import Interruption
from hpstage.search.train import train_all
from hpstage.store import Journal

if TYPE_CHECKING:
    from distributed import Client
    from distributed.deploy import Cluster


_WORKERS = (
    "trials are trained by as many workers as executor= has, such as hpstage.local_cluster(n_workers=4); by default "
    "one for each GPU, or core"
)
_ELSEWHERE = {
    "n_jobs": _WORKERS,
    "n_workers": _WORKERS,
    "gc_after_trial": "leave it out, since training runs in processes of its own",
}


@checked(
    _ELSEWHERE,
    study=instance(optuna.Study, "an optuna.Study (optuna.create_study(...))"),
    space=SPACE,
    metric=several(METRIC, METRIC.remedy),
    steps=optional(whole()),
    n_trials=optional(whole(0)),
    timeout=optional(seconds(above=0)),
    algorithm=optional(ALGORITHM),
    catch=CATCH,
    constraints=optional(function("a function of a dict of metrics")),
    extend=switch,
    sharing=switch,
    verify=one_of(*get_args(Verify)),
    audit_budget=number(least=0, most=1e6),
    **KINDS,
)
def optimize(
    study: optuna.Study,
    trainable: object,
    space: Space,
    *,
    metric: str | Sequence[str],
    steps: int | None = None,
    n_trials: int | None = None,
    timeout: float | None = None,
    algorithm: Algorithm | None = None,
    executor: Executor | Client | Cluster | None = None,
    store: str | os.PathLike[str] | Journal | None = None,
    checkpoints: str | os.PathLike[str] | CheckpointStore | None = None,
    callbacks: Sequence[Callback] | Callback | None = None,
    catch: Iterable[type[Exception]] | type[Exception] = (Exception,),
    constraints: Constraints | None = None,
    show_progress_bar: bool = False,
    extend: bool = False,
    sharing: bool = True,
    evaluate_every: int | None = None,
    checkpoint_every: int | None = None,
    checkpoint_budget: int | str | None = None,
    verify: Verify = "first-fork",
    audit: Auditing = "idle",
    audit_budget: float = 0.05,
    environment: str | None = None,
) -> Result:
    """Search with ``study``'s sampler, training every stage once.

    The study proposes trials and keeps their results; hpstage trains them as a stage tree on ``executor``'s workers.
    An interrupted call (Ctrl-C, a kill, a power cut) resumes where it was when the same call is made again with a
    study in persistent storage. Nothing that was trained before, by any study on the same store, is trained again.

    In the main thread, the first Ctrl-C or SIGTERM stops the search cleanly: no further stages are started, running
    stages end after the current step (training functions, which return their metrics on request, after the next one),
    their states are kept, and nothing is trained again when the search resumes. The second stops at once and loses
    the steps since the last saved states. SIGTERM then ends the process, as it does by default. User-defined signal
    handlers are left alone.

    Args:
        study: an Optuna study. One with several objectives requires as many metrics, and full training.
        trainable: a ``TorchTrainable``, a function of one argument, or an object with ``setup``, ``train``,
            ``evaluate``, ``state_dict`` and ``load_state_dict``.
        space: maps an ``optuna.Trial`` to ``{hyperparameter: schedule or value}``. A trial ends where its schedules
            end, or after as many steps as the space returns under the name ``"steps"``. Before workers are started, the
            space is also called for a few trials outside the study, to find contradictions. States after the steps that
            it returns under the name ``"keep_at"`` are kept for good. If a space lists its trials
            (:func:`hpstage.schedule.wsd_sweep`), those that the study does not have on the plan yet are proposed. A
            space may raise ``optuna.TrialPruned``, which prunes the trial, or an exception of ``catch``, which fails
            it; a space that raises for each of the first trials stops the study.
        metric: the name of the study's objective among the metrics that ``evaluate`` returns; for several objectives,
            a list of names in the order of the study's directions.
        steps: the most steps of a trial, and the length of those whose space and schedules set no other. Longer
            schedules are cut. Algorithms compare a shorter trial at steps beyond its end by its last value. A space
            that lists its trials needs no ``steps``.
        n_trials: number of trials that the sampler proposes in this call, including those of an interrupted call that
            this call resumes. If it is smaller than in the interrupted call, it is the number of trials that finish in
            this call, as in ``study.optimize``: the unfinished ones of the interrupted call, then new ones (with 0,
            only the unfinished ones). Trials forked by an algorithm (population based training) come in addition.
        timeout: seconds after which no stage is started; running stages are completed. The next call continues
            unfinished trials.
        algorithm: decides how far each trial is trained; :class:`~hpstage.algos.FullTraining` by default.
        executor: where stages are trained: ``None`` for a local Dask cluster of this call (one worker per GPU, else per
            core), :func:`hpstage.local_cluster` for one that is kept for further calls, a ``dask.distributed.Client``
            or cluster (never closed), or an :class:`Executor`, such as ``InlineExecutor()``.
        store: where the plan is stored: a folder; ``redis://host:6379`` (``rediss://`` with TLS), where hosts share
            plans, one per workload unless ``?prefix=NAME`` names it; or a :class:`Journal`. By default a folder per
            workload in ``.hpstage``.
        checkpoints: a folder or fsspec URL (``s3://bucket/folder``) that every worker can access; by default inside
            the store's folder.
        callbacks: called as ``callback(study, frozen_trial)`` after each trial; may call ``study.stop()``. Those of
            :mod:`hpstage.report` for TensorBoard, MLflow and Weights & Biases write trials there while they train.
        catch: exceptions of the user's code that fail only their trials; others stop the study once running stages
            have ended. By default all are caught; Optuna's own default is ``()``. An exception of hpstage itself, which
            refuses the training code, ends the search when it fails a second trial before any trial has a value, unless
            ``catch`` names it.
        constraints: a function that maps a trial's metrics after its last step, a dict, to a dict with a number for
            each constraint: the trial is feasible if none is above 0 or NaN. The numbers are set on the trial, as by
            ``trial.set_constraint`` at the end of an objective. Samplers that support constraints, ``study.best_trial``
            and the result's best trial respect them; before Optuna 5, samplers need ``constraints_func`` for that.
        show_progress_bar: show the progress of the search on standard error: on a terminal, a few lines that stay below
            printed and logged output; in a notebook, a few lines that are updated; elsewhere
            (a file, ``TERM=dumb``), a line at most every ten seconds.
        extend: continue the study's last search, whether it ended or not, with more ``steps``, more ``n_trials`` or
            another ``algorithm``: its trials count among ``n_trials``, their known values are replayed to the
            algorithm, and saved states are trained further. A finished trial that is trained further gets its longer
            result in a new trial of the study (Optuna's finished trials cannot be changed), with all its values and the
            user attribute ``hpstage:extends``. Population based training recreates its forks; another algorithm leaves
            them as they are. An asynchronous algorithm may train a little further each time.
        sharing: ``False`` trains every trial without sharing, for comparison.
        evaluate_every: also evaluate each trial after every multiple of this many steps, up to the step that the
            algorithm requests. This gives curves of all metrics: as intermediate values of the study's trials, in
            reports and by :meth:`Result.trial`. The algorithm does not receive them. (``OptunaPruner``, whose pruner
            would, has ``interval`` instead.) Nothing is retrained for it: steps that an earlier call, or another
            process, has trained past without saving their states are left out. Each of the evaluated states is saved;
            ``checkpoint_budget`` limits their bytes.
        checkpoint_every: keep every state whose step, counted from the start of training, is a multiple of this:
            10 keeps the states at steps 10, 20, 30 and so on of every trial, wherever its schedules change. By default
            a state is kept after each minute of training or more often. States at which trials are known or likely to
            branch are kept in addition.
        checkpoint_budget: bytes that the checkpoints of the whole plan may take (``"20 GB"``); beyond that, checkpoints
            whose retraining costs the fewest seconds per byte are evicted, but never one that is still needed. By
            default none is evicted until the disk is full.
        verify: which forks are verified: a few steps are trained both straight through and from the saved state, and
            everything that training can reach is compared. ``"first-fork"`` does so once per workload, within its first
            steps (two of which are trained twice); once for each kind of values (a category, a switch, a number that is
            0, 1, between or beyond, a schedule that varies); and when an object with five methods begins to change
            something new. ``"all"`` does so additionally for each chain of stages; ``"off"`` never. Inexact training
            ends this call, and later ones on the store. :func:`hpstage.check` does more.
        audit: which training is repeated and compared, to find differences of any cause. ``"idle"``: workers that have
            nothing to train choose saved states at random (late ones, and those under kinds of values not yet audited,
            more often) and repeat their training in a fresh process, from the saved state before; now and then they
            repeat a whole trial without sharing. An audit ends at once when its worker is needed. ``"winner"``: the
            best trial is trained again before this call returns. ``"off"``: no audits. A difference ends this call, and
            later ones on the store. See :attr:`Result.audit`. Executors that cannot audit (``InlineExecutor``) ignore
            ``"idle"``.
        audit_budget: time for audits after the last stage, as a share of the worker-seconds that this call has used:
            workers are held for it, to audit kinds of values that were not audited in idle time. 0: no such audits.
        environment: which workers train if they have several kinds of GPU or CPU, which compute different bits. By
            default all must have the same kind, unless one of them is the kind that the store's states were trained on.
            A text (``"A100"``) selects the workers whose device has it in its name. ``"any"`` trains on all workers: a
            trial's bits then depend on the other trials, nothing is audited, and a store of its own is needed.

    Raises:
        UsageError: invalid input, named, before anything is trained.
        StateError: training changes something that no state holds; it is named.
        StoreError: the store cannot be used or belongs to another workload.
        ClusterError: there are no workers, or all were lost.
        CheckpointError: there was no room for a checkpoint and no other could be evicted, or no worker could access the
            checkpoints for the executor's ``worker_timeout``. All progress is kept.
        TrainingError: the user's code raised an exception that ``catch`` does not include.
        KeyboardInterrupt: Ctrl-C; everything reached is kept.
    """
    refuse_while_imported()
    request = Request(
        study=study,
        trainable=trainable,
        space=space,
        metrics=in_tuple(metric),
        steps=longest(space, steps),
        n_trials=n_trials if n_trials is not None else len(points_of(space)) or None,
        timeout=timeout,
        algorithm=FullTraining() if algorithm is None else algorithm,
        executor=executor,
        store=store,
        checkpoints=checkpoints,
        callbacks=in_tuple(callbacks or ()),
        catch=in_tuple(catch),
        constraints=constraints,
        show_progress_bar=show_progress_bar,
        extend=extend,
        sharing=sharing,
        evaluate_every=evaluate_every,
        checkpoint_every=checkpoint_every,
        checkpoint_budget=cast("int | None", checkpoint_budget),
        verify=verify,
        audit=audit,
        audit_budget=audit_budget,
        environment=environment,
    )
    return searched(request, Interruption(), train_all)
