"""``hpstage plan``: estimates the cost of a search before running it."""

from __future__ import annotations

import json
import math
import re
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hpstage.cli import options
from hpstage.cli.naming import algorithm_named, space_named, trainable_named
from hpstage.cli.terminal import columns, echo
from hpstage.errors import UsageError
from hpstage.errors.arguments import seconds
from hpstage.report.files import refusing
from hpstage.schedule.space import longest

if TYPE_CHECKING:
    from hpstage.execution.simulated_cluster import Disruptions
    from hpstage.rehearsal.costs import Costs
    from hpstage.rehearsal.stand_in_metrics import Precedent


def plan(
    space: options.Space,
    steps: options.Steps = None,
    n_trials: Annotated[int | None, typer.Option(help="Number of trials; not needed for a grid or a sweep.")] = None,
    sampler: options.Sampler = "random",
    seed: options.Seed = 0,
    algorithm: options.Algorithm = "FullTraining()",
    gpus: Annotated[str, typer.Option(help="Numbers of GPUs (workers) to compare.")] = "1,2,4,8",
    step_seconds: Annotated[
        float | None, typer.Option(help="Seconds per step; if not given, times are in steps.")
    ] = None,
    evaluate_seconds: Annotated[float | None, typer.Option(help="Seconds per evaluation.")] = None,
    load_seconds: Annotated[float | None, typer.Option(help="Seconds to load a checkpoint.")] = None,
    save_seconds: Annotated[float | None, typer.Option(help="Seconds to write a checkpoint.")] = None,
    checkpoint_bytes: Annotated[str | None, typer.Option(help="Size of a checkpoint, such as '200 MB'.")] = None,
    checkpoint_every: options.CheckpointEvery = None,
    virtual_nodes: Annotated[
        int | None,
        typer.Option(min=1, help="Maximum number of workers that train a trial together, as in TorchTrainable."),
    ] = None,
    store: Annotated[
        str | None, typer.Option(help="Store of an earlier search, a folder or a URL; its measured costs are used.")
    ] = None,
    checkpoints: Annotated[
        str | None, typer.Option(help="Folder or URL of the checkpoints of --store, if they are not in it.")
    ] = None,
    metric: Annotated[
        str | None,
        typer.Option(help="Metric in --store to optimize.  [default: that of its latest search]"),
    ] = None,
    trainable: Annotated[
        str | None, typer.Option(help="Measure a few steps of this trainable here: MODULE:NAME.")
    ] = None,
    deadline: Annotated[
        str | None,
        typer.Option(
            help="Find the cheapest fixed and elastic fleets that finish within this time, such as 90min, 8h or 2d."
        ),
    ] = None,
    gpu_price: Annotated[float | None, typer.Option(help="Price per GPU-hour.")] = None,
    start_seconds: Annotated[float, typer.Option(help="Seconds to start a worker of an elastic fleet.")] = 60.0,
    lifetime: Annotated[str | None, typer.Option(help="Mean lifetime of a preemptible GPU, such as 4h.")] = None,
    notice: Annotated[
        str, typer.Option(help="Time between the notice and the loss of a preemptible GPU, such as 2min.")
    ] = "0",
    slow: Annotated[float, typer.Option(help="Share of GPUs that are three times as slow, such as 0.1.")] = 0.0,
    rehearsals: Annotated[
        int, typer.Option(help="Number of rehearsals with random metrics, if the search depends on metrics.")
    ] = 9,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write all figures to this file.")] = None,
) -> None:
    """Estimate the cost of a search before running it.

    It prints trials, steps with and without sharing, GPU-hours, the makespan by number of GPUs, and checkpoints.
    Nothing is trained, except a few steps with --trainable.

    Costs are those measured on --store or --trainable; options such as --step-seconds override them. If the search
    depends on metrics, those measured on --store are used, and random ones where none were measured. The estimate is
    exact for another algorithm, if --store has measured all the metrics that it needs. The module of the space is
    imported.
    """
    from hpstage.errors.arguments import BYTES
    from hpstage.rehearsal.preflight import preflight
    from hpstage.rehearsal.samplers import named_sampler, values_met

    if store is not None and trainable is not None:
        raise UsageError("--store and --trainable exclude each other; give one of them")
    described = algorithm_named(algorithm)
    fleets = _numbers(gpus)
    size = None if checkpoint_bytes is None else BYTES.of("--checkpoint-bytes", checkpoint_bytes)
    function = space_named(space)
    length = longest(function, steps)
    own = named_sampler(sampler, function, length, seed)
    known: Costs | None = None
    precedent: Precedent | None = None
    if store is not None:
        known, precedent = _of_store(store, checkpoints, metric)
    elif metric is not None:
        raise UsageError("--metric needs --store; give the store where it was measured")
    if trainable is not None:
        from hpstage.rehearsal.costs import measured

        known = measured(trainable_named(trainable), values_met(function, length, sampler=own, most=6))
    found = preflight(
        function,
        steps=length,
        n_trials=n_trials,
        sampler=own,
        algorithm=described,
        workers=fleets,
        step_seconds=_first(step_seconds, known and known.step_seconds, None),
        evaluate_seconds=_first(evaluate_seconds, known and known.evaluate_seconds, 0.0),
        load_seconds=_first(load_seconds, known and known.load_seconds, 0.0),
        save_seconds=_first(save_seconds, known and known.save_seconds, 0.0),
        checkpoint_bytes=_first(size, known and known.checkpoint_bytes, 0),
        shared_bytes=known.shared_bytes if known is not None and size is None else 0,
        checkpoint_every=checkpoint_every,
        rehearsals=rehearsals,
        precedent=precedent,
        step_times=None if known is None else known.step_times,
        virtual_nodes=_first(virtual_nodes, known and known.virtual_nodes, 1),
        deadline=None if deadline is None else _seconds("--deadline", deadline),
        gpu_price=gpu_price,
        start_seconds=start_seconds,
        disruptions=_disruptions(lifetime, notice, slow, start_seconds),
    )
    echo(found.as_text(columns()))
    if json_file is not None:
        with refusing(json_file, option="--json"):
            json_file.write_text(json.dumps(found.as_dict(), indent=2) + "\n")


def _first(*figures: Any) -> Any:
    """Return the first figure that is not ``None``, or the last one, if all are."""
    return next((figure for figure in figures if figure is not None), figures[-1])


def _numbers(text: str) -> tuple[int, ...]:
    try:
        numbers = tuple(int(part) for part in text.split(","))
    except ValueError:
        raise UsageError(f"--gpus {text!r}: give numbers of workers, such as 1,2,4,8") from None
    from hpstage.rehearsal.preflight import FLEETS

    return FLEETS.of("--gpus", numbers)  # type: ignore[no-any-return]


def _disruptions(lifetime: str | None, notice: str, slow: float, start_seconds: float) -> Disruptions | None:
    from hpstage.execution.simulated_cluster import Disruptions

    warned = _seconds("--notice", notice)
    if lifetime is None and warned:
        raise UsageError("--notice is only for preemptible GPUs; give their --lifetime as well")
    if lifetime is None and not slow:
        return None
    there = math.inf if lifetime is None else _seconds("--lifetime", lifetime)
    return Disruptions(slow=slow, lifetime_seconds=there, notice_seconds=warned, replace_seconds=start_seconds)


def _seconds(option: str, text: str) -> float:
    found = re.fullmatch(r"([0-9.]+) *(s|min|h|d)", text.strip())
    try:
        time = float(found[1]) * {"s": 1, "min": 60, "h": 3600, "d": 86400}[found[2]] if found else float(text)
    except ValueError:
        raise UsageError(f"{option} {text!r}: give a time, such as 45min, 8h or 2d") from None
    return seconds(least=0).of(option, time)  # type: ignore[no-any-return]


def _of_store(store: str, checkpoints: str | None, metric: str | None) -> tuple[Costs, Precedent | None]:
    """Return the costs that a store has measured, and its plan with the metric to optimize.

    Args:
        metric: name of the metric. ``None``: the metric of the latest search on the store. If it was not measured, no
            plan is returned.
    """
    from hpstage.driver.places import open_existing
    from hpstage.rehearsal.costs import costs_of_plan
    from hpstage.rehearsal.stand_in_metrics import Precedent, measured_on

    with ExitStack() as closing:
        trained, _ = open_existing(store, checkpoints, closing=closing, read_only=True)
        searches = [record.started for record in trained.searches.values()]
        latest = max(searches, key=lambda started: started.at, default=None)
        name = metric
        if metric is None and latest is not None and latest.metric[0] in measured_on(trained):
            name = latest.metric[0]
        given = [
            direction
            for started in searches
            for other, direction in zip(started.metric, started.directions, strict=False)
            if other == name
        ]
        precedent = None if name is None else Precedent(trained, name, maximize=given[-1:] == ["maximize"])
        return costs_of_plan(trained), precedent
