"""``hpstage train`` and ``hpstage branch``: train runs without a search, and branches of trials."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from hpstage.cli import options
from hpstage.cli.naming import recorded, send_along, trainable_named, trainable_of
from hpstage.cli.terminal import echo
from hpstage.errors.text import clean
from hpstage.plan.log import read_header
from hpstage.schedule.assignments import values_of
from hpstage.search.results.branching import RUNS, combinations
from hpstage.store.opening import open_journal
from hpstage.store.redaction import shown

if TYPE_CHECKING:
    from hpstage.plan.messages import Auditing
    from hpstage.search.given import Direction
    from hpstage.search.results import TrainedTrial

_Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        help="Hyperparameter as NAME=VALUE: lr=0.1, 'lr=cosine(0.1, 60)', lr=[0.1,0.05]. Repeat the option for each.",
    ),
]
_Study = Annotated[
    str, typer.Option(help="Study that the runs belong to; only one process at a time can train runs of a study.")
]


def train(
    trainable: options.Trainable,
    steps: Annotated[int, typer.Option(help="Number of steps.")],
    store: options.NewStore = None,
    given: _Set = None,
    metric: Annotated[
        str | None, typer.Option(help="Metric to compare runs by.", show_default="the first metric of evaluate()")
    ] = None,
    direction: Annotated[
        options.Direction | None,
        typer.Option(help="Direction of --metric.", show_default="minimize a loss or an error, maximize others"),
    ] = None,
    study_name: _Study = RUNS,
    checkpoints: options.Checkpoints = None,
    evaluate_every: options.EvaluateEvery = None,
    checkpoint_every: options.CheckpointEvery = None,
    checkpoint_budget: options.CheckpointBudget = None,
    audit: options.Audit = "idle",
    environment: options.Environment = None,
    scheduler: options.Scheduler = None,
    n_workers: options.Workers = None,
    executor: options.NamedExecutor = None,
    quiet: options.Quiet = False,
) -> None:
    """Train one configuration without a search.

    With lists of values, each combination is a run, and their common steps are trained once.

    Interrupt it with Ctrl-C at any time; run the same command again to resume. hpstage branch can continue the run from
    any step with other values, and searches on the same store reuse its steps. VALUE is a number, a word, or a schedule
    of hpstage.schedule; it is parsed, never executed.

    Exit status: 0 on success, 1 after an error, 130 after Ctrl-C.

    Examples:

    \b
    hpstage train search.py:Digits --set 'lr=cosine(0.1, 60)' --set momentum=0.9 --set batch_size=64 --steps 60
    hpstage train search.py:Digits STORE --set lr=[0.1,0.05] --set momentum=0.9 --set batch_size=64 --steps 60
    """
    from hpstage.search.train import train as train_runs

    subject = trainable_named(trainable)
    send_along(trainable)
    with ExitStack() as closing:
        trains = options.executor_of(executor, scheduler, n_workers, closing)
        _train(
            lambda: train_runs(
                subject,
                combinations(values_of(given or [])),
                steps=steps,
                metric=metric,
                direction=cast("Direction | None", direction and direction.value),
                study=study_name,
                store=store,
                checkpoints=checkpoints,
                executor=trains,
                evaluate_every=evaluate_every,
                checkpoint_every=checkpoint_every,
                checkpoint_budget=checkpoint_budget,
                audit=cast("Auditing", audit),
                environment=environment,
                show_progress_bar=not quiet,
            )
        )


def branch(
    store: options.Store,
    trial: Annotated[str, typer.Option(help="The trial: STUDY/NUMBER; or NUMBER, if the store has one study.")],
    at: Annotated[int, typer.Option(help="Step at which to branch; at the last step, the trial is extended.")],
    trainable: Annotated[
        str | None,
        typer.Argument(
            metavar="TRAINABLE",
            help="The trainable: MODULE:NAME, or path/to/script.py:NAME.",
            show_default="the one that the store has recorded",
        ),
    ] = None,
    given: _Set = None,
    steps: Annotated[
        int | None,
        typer.Option(help="Steps of the branch, including the common ones.", show_default="as many as the trial has"),
    ] = None,
    study_name: _Study = RUNS,
    checkpoints: options.Checkpoints = None,
    evaluate_every: options.EvaluateEvery = None,
    scheduler: options.Scheduler = None,
    n_workers: options.Workers = None,
    executor: options.NamedExecutor = None,
    quiet: options.Quiet = False,
) -> None:
    """Train a branch of a trial. It shares the trial's steps up to --at, and has other values after them.

    The common steps are not trained again. If there is no checkpoint at that step, training begins at the last
    checkpoint before it. Schedules given by --set count steps from the branch point. With lists of values, each
    combination is a branch.

    Exit status: 0 on success, 1 after an error, 130 after Ctrl-C.

    Examples:

    \b
    hpstage branch .hpstage/Digits-1f2e3d4c5b6a --trial digits/3 --at 20 --set lr=0.03
    hpstage branch STORE --trial runs/0 --at 20 --set 'lr=cosine(0.03, 60)' --set batch_size=256 --steps 80
    hpstage branch STORE search.py:Digits --trial 3 --at 60 --steps 120
    """
    from hpstage.search.open import open as open_store

    with ExitStack() as closing:
        chosen = open_store(store, checkpoints=checkpoints).trial(trial)
        header = read_header(open_journal(store, closing=closing, read_only=True))
        subject, _ = trainable_of(trainable or recorded(header), header.loaded, closing)
        trains = options.executor_of(executor, scheduler, n_workers, closing)
        _train(
            lambda: chosen.branch(
                at,
                values_of(given or []),
                steps=steps,
                trainable=subject,
                study=study_name,
                executor=trains,
                evaluate_every=evaluate_every,
                show_progress_bar=not quiet,
            )
        )


def _train(start: Callable[[], TrainedTrial | Sequence[TrainedTrial]]) -> None:
    try:
        found: Any = start()
    except KeyboardInterrupt:
        typer.echo("hpstage: interrupted; all progress is saved, and the same command resumes", err=True)
        raise typer.Exit(130) from None
    trials: Sequence[TrainedTrial] = found if isinstance(found, list) else [found]
    for trial in trials:
        step, metrics = max(trial.metrics.items(), default=(0, {}))
        values = ", ".join(f"{clean(name)} {value:.6g}" for name, value in metrics.items())
        echo(f"{clean(trial.id)}  {values} after {step:,} of {trial.planned.steps:,} steps")
    if (lineage := trials[0].lineage) is not None:
        echo(f"store  {clean(shown(str(lineage.store)))}")
