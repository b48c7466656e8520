"""``hpstage run``: runs a search from the command line."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from hpstage.cli import options
from hpstage.cli.naming import algorithm_named, send_along, space_named, trainable_named
from hpstage.cli.studies import default_storage, open_study
from hpstage.cli.terminal import columns, echo
from hpstage.errors.text import clean, count_of, folded
from hpstage.schedule.space import longest
from hpstage.store.redaction import shown

if TYPE_CHECKING:
    from optuna.trial import FrozenTrial

    from hpstage.plan.messages import Auditing
    from hpstage.search.results.result import Result


def run(
    trainable: options.Trainable,
    space: options.Space,
    metric: Annotated[
        list[str], typer.Option(help="Metric of evaluate() to optimize; repeat the option for each objective.")
    ],
    steps: options.Steps = None,
    direction: Annotated[
        list[options.Direction] | None, typer.Option(help="Needed for a new study, once for each --metric.")
    ] = None,
    n_trials: Annotated[
        int | None, typer.Option(help="Number of trials; by default, the search runs until --timeout or Ctrl-C.")
    ] = None,
    timeout: Annotated[float | None, typer.Option(help="Seconds after which no more stages are started.")] = None,
    algorithm: options.Algorithm = "FullTraining()",
    sampler: options.Sampler = "tpe",
    seed: options.Seed = 0,
    study_name: Annotated[
        str | None, typer.Option(help="Name of the study; by default the name of the trainable.")
    ] = None,
    storage: Annotated[
        str | None,
        typer.Option(
            help="Storage of the Optuna study: a file, redis:// or a database URL; by default optuna.log in the folder "
            "of --store, or in .hpstage."
        ),
    ] = None,
    store: Annotated[
        str | None,
        typer.Option(help="Store of the search plan: a folder or redis://; by default one per workload in .hpstage."),
    ] = None,
    checkpoints: options.Checkpoints = None,
    checkpoint_budget: options.CheckpointBudget = None,
    evaluate_every: options.EvaluateEvery = None,
    checkpoint_every: options.CheckpointEvery = None,
    audit: options.Audit = "idle",
    environment: options.Environment = None,
    scheduler: options.Scheduler = None,
    n_workers: options.Workers = None,
    executor: options.NamedExecutor = None,
    extend: Annotated[
        bool,
        typer.Option("--extend", help="Continue the last search with more steps, more trials or another algorithm."),
    ] = False,
    report: Annotated[Path | None, typer.Option(help="Write the report into this folder.")] = None,
    quiet: options.Quiet = False,
) -> None:
    """Run a search, and print the best trial and the savings.

    Interrupt it with Ctrl-C at any time; run the same command again to resume. A second Ctrl-C stops at once. After the
    end of a search, the same command adds as many trials again.

    Scripts are sent to the workers; modules that a script imports must be installed there. Arguments of the script
    itself stand at the end, after two dashes.

    Exit status: 0 on success, 1 after an error or if no trial has a value, 130 after Ctrl-C.

    Examples:

    \b
    hpstage run search.py:Digits search.py:space --metric accuracy --direction maximize --steps 120 --n-trials 48
    hpstage run search.py:Digits search.py:space --metric accuracy --direction maximize --steps 120 --n-trials 48 \\
        --algorithm 'SuccessiveHalving(15, 4)' --study-name digits --storage sqlite:///digits.db --report report
    hpstage run search.py:Digits search.py:space --metric accuracy --steps 240 --n-trials 48 --extend
    hpstage run package.module:trainable package.module:space --metric loss --direction minimize --steps 90 \\
        --n-trials 200 --scheduler tcp://head:8786 --store redis://head:6379 --checkpoints s3://bucket/folder
    """
    import optuna

    import hpstage
    import hpstage.cluster  # before the script: it may have the name of a module that hpstage.cluster imports
    from hpstage.rehearsal.samplers import named_sampler

    function = space_named(space)
    described = algorithm_named(algorithm)
    subject = trainable_named(trainable)
    send_along(trainable)
    named = study_name or trainable.rpartition(":")[2]
    place = storage or default_storage(store)
    where = f"{clean(named)} in {clean(shown(place))}"
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    length = longest(function, steps)
    chosen = named_sampler(sampler, function, length, seed)
    study = open_study(named, place, directions=direction or (), sampler=chosen)
    there = study.get_trials(deepcopy=False)
    if (before := len(there)) and not extend:
        if all(trial.state.is_finished() for trial in there):
            typer.echo(
                f"hpstage: the study has {count_of(before, 'trial')}; this command adds more, or resumes the last "
                f"search if it was interrupted (--extend continues a finished search)",
                err=True,
            )
        in_order = optuna.samplers.GridSampler, optuna.samplers.BruteForceSampler, optuna.samplers.QMCSampler
        if not isinstance(chosen, in_order):  # these resume their order; others would propose the same trials again
            study.sampler = named_sampler(sampler, function, length, (seed + before) % 2**32)
    with ExitStack() as closing:
        trains = options.executor_of(executor, scheduler, n_workers, closing)
        try:
            result = hpstage.optimize(
                study,
                subject,
                function,
                metric=metric,
                steps=length,
                n_trials=n_trials,
                timeout=timeout,
                algorithm=described,
                executor=trains,
                store=store,
                checkpoints=checkpoints,
                show_progress_bar=not quiet,
                extend=extend,
                evaluate_every=evaluate_every,
                checkpoint_every=checkpoint_every,
                checkpoint_budget=checkpoint_budget,
                audit=cast("Auditing", audit),
                environment=environment,
            )
        except KeyboardInterrupt:
            typer.echo(
                f"hpstage: interrupted; all progress is saved, and the same command resumes (study {where})", err=True
            )
            raise typer.Exit(130) from None
    echo(folded(as_text(result, metric), columns()))
    after = len(result.study.get_trials(deepcopy=False))
    more = f", which has {after:,} trials now" if after != result.savings.trials else ""
    echo(f"{'study':<22}  {where}{more}")
    if place_of := result.store or store:
        echo(f"{'store':<22}  {clean(shown(str(place_of)))}")
    if report is not None:
        echo(f"{'report':<22}  {clean(result.write_report(report))}")
    if not _best(result):
        raise typer.Exit(1)


def as_text(result: Result, metrics: Sequence[str]) -> str:
    """Return the best trial, or the trials of the Pareto front, and the savings as text."""
    trials = result.study.get_trials(deepcopy=False)
    lines = []
    for best in _best(result):
        values = ", ".join(f"{clean(name)} {value:.6g}" for name, value in zip(metrics, best.values, strict=True))
        elsewhere = (
            "" if result.trial_id(best.number) in result.plan.trials else " (trained on another store or by other code)"
        )
        lines.append(f"Best trial {best.number}: {values} with {clean(best.params)}{elsewhere}")
    lines = lines or ["No trial has ended with a value."]
    left = sum(not trial.state.is_finished() for trial in trials)
    if left:
        lines.append(f"{count_of(left, 'trial')} not finished yet: run the same command again to continue.")
    return "\n".join([*lines, "", str(result.savings)])


def _best(result: Result) -> Sequence[FrozenTrial]:
    from optuna.trial import TrialState

    trials = result.study.get_trials(deepcopy=False, states=[TrialState.COMPLETE])
    if not trials:
        return []
    return [result.best_trial] if len(result.study.directions) == 1 else result.best_trials
