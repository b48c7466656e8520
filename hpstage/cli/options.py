"""Arguments and options that several commands share, each with one name, type and help."""

from __future__ import annotations

from contextlib import ExitStack
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, get_args

import typer

from hpstage.cli.naming import executor_named
from hpstage.errors import ClusterError, UsageError
from hpstage.errors.arguments import WORKERS, optional
from hpstage.store.redaction import redacted, shown

if TYPE_CHECKING:
    from hpstage.executor import Executor

_STORE = "The store: a folder, or redis://host:6379?prefix=NAME."

Store = Annotated[str, typer.Argument(metavar="STORE", help=_STORE)]
ListedStore = Annotated[str | None, typer.Argument(metavar="STORE", help=_STORE, show_default="list those in .hpstage")]
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
Steps = Annotated[int | None, typer.Option(help="Steps of a full trial; not needed for a sweep, which has its own.")]
Algorithm = Annotated[
    str,
    typer.Option(
        help="Algorithm of hpstage.algos or of a plugin, with its arguments, such as 'SuccessiveHalving(15, 4)'."
    ),
]


class Direction(StrEnum):
    MINIMIZE = "minimize"
    MAXIMIZE = "maximize"


def _samplers() -> list[str]:
    from hpstage.rehearsal import samplers

    return [*get_args(samplers.Sampler)]


def _backends() -> list[str]:
    from hpstage.store import plugins

    return plugins.names("hpstage.step_backends")


Sampler = Annotated[
    str,
    typer.Option(help="Sampler of Optuna: random, tpe, grid, bruteforce, cmaes, ...", autocompletion=_samplers),
]
Numerics = Annotated[
    str | None,
    typer.Option(help="Step backend of a TorchTrainable: eager, compiled, stacked, graphed.", autocompletion=_backends),
]
Seed = Annotated[int, typer.Option(help="Seed of the sampler.")]
Trial = Annotated[
    str | None,
    typer.Option(help="The trial: STUDY/NUMBER, or NUMBER.", show_default="the best trial of the study"),
]
StudyOfNumber = Annotated[
    str | None, typer.Option(help="Study of the trial, if the store has several and --trial does not name it.")
]
KeptCheckpoints = Annotated[
    str | None, typer.Option("--checkpoints", help="Folder or URL of the checkpoints, if they are not in STORE.")
]
Checkpoints = Annotated[
    str | None, typer.Option(help="Folder or URL for checkpoints that all workers reach; by default in the store.")
]
CheckpointBudget = Annotated[str | None, typer.Option(help="Maximum bytes of all checkpoints, such as '20 GB'.")]
CheckpointEvery = Annotated[int | None, typer.Option(help="Save a checkpoint at multiples of this number of steps.")]
EvaluateEvery = Annotated[
    int | None, typer.Option(help="Also evaluate each trial at multiples of this number of steps.")
]
Audit = Annotated[
    str,
    typer.Option(
        help="What to train again to verify exactness: idle (randomly drawn parts of the search, on idle workers), "
        "winner (the best trial), or off."
    ),
]
Environment = Annotated[
    str | None,
    typer.Option(
        help="Train only on devices with this in their names, such as A100; any: train on all devices, though the "
        "last bits of their results differ."
    ),
]
Scheduler = Annotated[
    str | None,
    typer.Option(help="Address of a Dask scheduler, such as tcp://head:8786; by default, a local cluster is started."),
]
Workers = Annotated[
    int | None, typer.Option(help="Number of workers of the local cluster; by default one per GPU, else one per core.")
]
NamedExecutor = Annotated[
    str | None,
    typer.Option(
        "--executor",
        help="Executor to use instead of Dask, with its arguments: 'InlineExecutor()' trains in this process.",
    ),
]
Findings = Annotated[Path | None, typer.Option("--json", help="Also write the findings to this file, as JSON.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="Show no progress.")]


def executor_of(named: str | None, scheduler: str | None, n_workers: int | None, closing: ExitStack) -> Executor:
    """Return the named executor, or one for the given scheduler, or one for a local cluster.

    Raises:
        UsageError: the options exclude one another, or the executor is unknown.
        ClusterError: no scheduler answers at the address.
    """
    from distributed import Client

    from hpstage.cluster import DaskExecutor

    if named is not None:
        if scheduler is not None or n_workers is not None:
            raise UsageError("--scheduler and --n-workers are for Dask; leave them out with --executor")
        return executor_named(named)
    optional(WORKERS).of("--n-workers", n_workers)
    if scheduler is None:
        return DaskExecutor(n_workers=n_workers)
    if n_workers is not None:
        raise UsageError("--n-workers is for a local cluster; leave it out with --scheduler")
    try:
        return DaskExecutor(closing.enter_context(Client(scheduler, set_as_default=False)))
    except (OSError, ValueError) as error:
        raise ClusterError(
            f"no scheduler answers at {shown(scheduler)} ({redacted(str(error), scheduler)}); start one, or fix the "
            f"address"
        ) from error
