"""``hpstage plan``: what a search would train, take and keep, before anything is trained."""

from __future__ import annotations

import json
import math
import re
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hpstage.cli.naming import algorithm_named, space_named, trainable_named
from hpstage.cli.terminal import columns, echo
from hpstage.errors import UsageError
from hpstage.errors.arguments import seconds
from hpstage.schedule.space import longest
from hpstage.text import clean

if TYPE_CHECKING:
    from hpstage.execution.simulated_cluster import Disruptions
    from hpstage.rehearsal.costs import Costs
    from hpstage.rehearsal.stand_in_metrics import Precedent


def plan(
    space: Annotated[str, typer.Argument(help="The search space: MODULE:NAME, or path/to/script.py:NAME.")],
    steps: Annotated[int | None, typer.Option(help="Steps of a full trial; a sweep knows them.")] = None,
    n_trials: Annotated[int | None, typer.Option(help="How many trials; a grid has an end of its own.")] = None,
    sampler: Annotated[str, typer.Option(help="One of Optuna's: random, tpe, grid, bruteforce, cmaes, ...")] = "random",
    seed: Annotated[int, typer.Option(help="The sampler's.")] = 0,
    algorithm: Annotated[
        str, typer.Option(help="One of hpstage.algos, or of a plugin, with its arguments: 'SuccessiveHalving(15, 4)'.")
    ] = "FullTraining()",
    gpus: Annotated[str, typer.Option(help="Numbers of workers to try.")] = "1,2,4,8",
    step_seconds: Annotated[float | None, typer.Option(help="Seconds per step; else times are in steps.")] = None,
    evaluate_seconds: Annotated[float | None, typer.Option(help="Seconds per evaluation.")] = None,
    load_seconds: Annotated[float | None, typer.Option(help="Seconds until a checkpoint is loaded.")] = None,
    save_seconds: Annotated[float | None, typer.Option(help="Seconds until a checkpoint is written.")] = None,
    checkpoint_bytes: Annotated[str | None, typer.Option(help="What a checkpoint takes, such as '200 MB'.")] = None,
    checkpoint_every: Annotated[int | None, typer.Option(help="As for optimize().")] = None,
    virtual_nodes: Annotated[
        int | None, typer.Option(min=1, help="The most workers that train a trial together, as in TorchTrainable.")
    ] = None,
    store: Annotated[
        str | None, typer.Option(help="A plan that was trained before, to take all these from: a folder or a URL.")
    ] = None,
    checkpoints: Annotated[str | None, typer.Option(help="Of --store, if not in its folder.")] = None,
    metric: Annotated[
        str | None,
        typer.Option(help="By which the algorithm decides, of --store.  [default: that of its latest search]"),
    ] = None,
    trainable: Annotated[
        str | None, typer.Option(help="What to take them from by a few steps in this process: MODULE:NAME.")
    ] = None,
    deadline: Annotated[
        str | None, typer.Option(help="Find the cheapest fleets that make it, fixed and elastic: 90min, 8h, 2d.")
    ] = None,
    gpu_price: Annotated[float | None, typer.Option(help="Of a GPU for an hour.")] = None,
    start_seconds: Annotated[float, typer.Option(help="What starting a worker of an elastic fleet takes.")] = 60.0,
    lifetime: Annotated[
        str | None, typer.Option(help="How long a preemptible GPU is there on average until it is taken away: 4h.")
    ] = None,
    notice: Annotated[str, typer.Option(help="How long before that it is told: 2min.")] = "0",
    slow: Annotated[float, typer.Option(help="The share of GPUs that are three times as slow.")] = 0.0,
    rehearsals: Annotated[int, typer.Option(help="Sets of random metrics, if the search decides by metrics.")] = 9,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write all figures to this file.")] = None,
) -> None:
    """Say what a search would train and take.

    Trials, steps with and without sharing, GPU-hours, the makespan on so many GPUs, checkpoints. Nothing is trained,
    but a few steps with --trainable.

    Given figures go before those of --store or --trainable. Metrics that were measured on --store are taken from there,
    and are random else: so on the store of a search, the plan of another algorithm is what that would have taken. The
    module that holds the space is imported; of the
    algorithm, plain values are read and nothing is run.
    """
    from hpstage.checkpoints.eviction import BYTES
    from hpstage.rehearsal.preflight import preflight
    from hpstage.rehearsal.samplers import named_sampler, values_met

    if store is not None and trainable is not None:
        raise UsageError("--store and --trainable both tell what steps take; give one of them")
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
        raise UsageError("--metric names one that was measured on a --store; give that, too")
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
        try:
            json_file.write_text(json.dumps(found.as_dict(), indent=2) + "\n")
        except OSError as error:
            raise UsageError(
                f"--json {clean(json_file)} cannot be written: {error.strerror or error}; give another file"
            ) from error


def _first(*figures: Any) -> Any:
    """The first that is there; the last, if none is."""
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

    told = _seconds("--notice", notice)
    if lifetime is None and told:
        raise UsageError("--notice is of preemptible GPUs; say with --lifetime how long they are there")
    if lifetime is None and not slow:
        return None
    there = math.inf if lifetime is None else _seconds("--lifetime", lifetime)
    return Disruptions(slow=slow, lifetime_seconds=there, notice_seconds=told, replace_seconds=start_seconds)


def _seconds(option: str, text: str) -> float:
    found = re.fullmatch(r"([0-9.]+) *(s|min|h|d)", text.strip())
    try:
        time = float(found[1]) * {"s": 1, "min": 60, "h": 3600, "d": 86400}[found[2]] if found else float(text)
    except ValueError:
        raise UsageError(f"{option} {text!r}: give a time, such as 45min, 8h or 2d") from None
    return seconds(least=0).of(option, time)  # type: ignore[no-any-return]


def _of_store(store: str, checkpoints: str | None, metric: str | None) -> tuple[Costs, Precedent | None]:
    """Costs, and what was measured of the metric; by default that of the latest search, if it was measured."""
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
        told = [
            direction
            for started in searches
            for other, direction in zip(started.metric, started.directions, strict=False)
            if other == name
        ]
        precedent = None if name is None else Precedent(trained, name, maximize=told[-1:] == ["maximize"])
        return costs_of_plan(trained), precedent
