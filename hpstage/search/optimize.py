"""The front door: run an Optuna study on a stage tree."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import optuna

from hpstage.algorithm import Algorithm
from hpstage.algos import FullTraining
from hpstage.checkpoints import CheckpointStore
from hpstage.checkpoints.eviction import budget_bytes
from hpstage.executor import Executor
from hpstage.plan.messages import Verify
from hpstage.progress import open_display
from hpstage.schedule.space import Space
from hpstage.search.call import open_call
from hpstage.search.request import Request
from hpstage.search.result import Result
from hpstage.search.run import run
from hpstage.search.session import Callback
from hpstage.search.signals import Interruption
from hpstage.store import Journal

if TYPE_CHECKING:
    from distributed import Client


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
    request = Request(
        study=study,
        trainable=trainable,
        space=space,
        metrics=(metric,) if isinstance(metric, str) else tuple(metric),
        steps=steps,
        n_trials=n_trials,
        timeout=timeout,
        algorithm=FullTraining() if algorithm is None else algorithm,
        callbacks=tuple(callbacks or ()),
        catch=(catch,) if isinstance(catch, type) else tuple(catch),
        extend=extend,
        sharing=sharing,
        checkpoint_every=checkpoint_every,
        checkpoint_budget=None if checkpoint_budget is None else budget_bytes(checkpoint_budget, "checkpoint_budget"),
        verify=verify,
    )
    display = open_display(show_progress_bar)
    with (
        Interruption() as interruption,
        open_call(request, executor, store, checkpoints, display, interruption) as call,
    ):
        return run(call)
