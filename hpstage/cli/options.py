"""Arguments and options that several commands have, each with one name, type and help."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hpstage.cli.naming import executor_named
from hpstage.errors import ClusterError, UsageError
from hpstage.errors.arguments import WORKERS, optional
from hpstage.store.redaction import redacted, shown

if TYPE_CHECKING:
    from hpstage.executor import Executor

_STORE = "The store: a folder, or redis://host:6379?prefix=NAME."

Store = Annotated[str, typer.Argument(metavar="STORE", help=_STORE)]
ListedStore = Annotated[str | None, typer.Argument(metavar="STORE", help=_STORE, show_default="list those here")]
NewStore = Annotated[
    str | None, typer.Argument(metavar="STORE", help=_STORE, show_default="one per workload in .hpstage")
]
Trainable = Annotated[
    str,
    typer.Argument(
        metavar="TRAINABLE", help="The trainable: MODULE:NAME, or path/to/script.py:NAME; a class is instantiated."
    ),
]
Space = Annotated[
    str, typer.Argument(metavar="SPACE", help="The search space: a function, MODULE:NAME or path/to/script.py:NAME.")
]
Steps = Annotated[int | None, typer.Option(help="Steps of a full trial; not needed for a sweep, which sets them.")]
Algorithm = Annotated[
    str, typer.Option(help="Algorithm of hpstage.algos or of a plugin, with its arguments: 'SuccessiveHalving(15, 4)'.")
]
Sampler = Annotated[str, typer.Option(help="Sampler of Optuna: random, tpe, grid, bruteforce, cmaes, ...")]
Seed = Annotated[int, typer.Option(help="Seed of the sampler.")]
Trial = Annotated[
    str | None,
    typer.Option(help="The trial: STUDY/NUMBER, or a number.", show_default="the best trial of the only study"),
]
StudyOfNumber = Annotated[str | None, typer.Option(help="Study of the trial given by a number, if there are several.")]
KeptCheckpoints = Annotated[
    str | None, typer.Option("--checkpoints", help="Where checkpoints are, if not in the folder: a folder or a URL.")
]
Checkpoints = Annotated[
    str | None, typer.Option(help="Checkpoints: a folder or URL that all workers reach; by default in the store.")
]
CheckpointBudget = Annotated[str | None, typer.Option(help="Maximum bytes of all checkpoints, such as '20 GB'.")]
CheckpointEvery = Annotated[int | None, typer.Option(help="Save a checkpoint every so many steps.")]
EvaluateEvery = Annotated[int | None, typer.Option(help="Evaluate each trial every so many steps, too.")]
Audit = Annotated[str, typer.Option(help="What to train again and compare: idle, winner or off.")]
Environment = Annotated[
    str | None,
    typer.Option(help="Workers to use, by the name of their device, such as A100; any: all, though bits differ."),
]
Scheduler = Annotated[
    str | None, typer.Option(help="Address of a Dask scheduler: tcp://head:8786; by default a local cluster.")
]
Workers = Annotated[
    int | None, typer.Option(help="Workers of the local cluster; by default one per GPU, else per core.")
]
NamedExecutor = Annotated[
    str | None,
    typer.Option("--executor", help="Another executor with its arguments: 'InlineExecutor()' trains in this process."),
]
Findings = Annotated[Path | None, typer.Option("--json", help="Write the findings to this file.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="Show no progress.")]


def executor_of(named: str | None, scheduler: str | None, n_workers: int | None, closing: ExitStack) -> Executor:
    """The named executor; else a local cluster, or the cluster of the given scheduler."""
    from distributed import Client

    from hpstage.cluster import DaskExecutor

    if named is not None:
        if scheduler is not None or n_workers is not None:
            raise UsageError("--executor excludes --scheduler and --n-workers, which are of Dask; leave them out")
        return executor_named(named)
    optional(WORKERS).of("--n-workers", n_workers)
    if scheduler is None:
        return DaskExecutor(n_workers=n_workers)
    if n_workers is not None:
        raise UsageError("--n-workers sizes the local cluster; leave it out with --scheduler")
    try:
        return DaskExecutor(closing.enter_context(Client(scheduler, set_as_default=False)))
    except (OSError, ValueError) as error:
        raise ClusterError(
            f"no scheduler answers at {shown(scheduler)} ({redacted(str(error), scheduler)}); start one, or fix the "
            f"address"
        ) from error
