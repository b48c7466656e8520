"""``hpstage plan``: what a search would train, take and keep, before anything is trained."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import json
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hpstage.errors import UsageError

if TYPE_CHECKING:
    from hpstage.algorithm import Algorithm
    from hpstage.costs import Costs
    from hpstage.stand_in_metrics import Precedent


def plan(
    space: Annotated[str, typer.Argument(help="The search space: MODULE:NAME, or path/to/script.py:NAME.")],
    steps: Annotated[int, typer.Option(help="Steps of a full trial.")],
    n_trials: Annotated[int | None, typer.Option(help="How many trials; a grid has an end of its own.")] = None,
    sampler: Annotated[str, typer.Option(help="One of Optuna's: random, tpe, grid, bruteforce, cmaes, ...")] = "random",
    seed: Annotated[int, typer.Option(help="The sampler's.")] = 0,
    algorithm: Annotated[
        str, typer.Option(help="One of hpstage.algos with its arguments: 'SuccessiveHalving(15, 4)'.")
    ] = "FullTraining()",
    gpus: Annotated[str, typer.Option(help="Numbers of workers to try.")] = "1,2,4,8",
    step_seconds: Annotated[float | None, typer.Option(help="Seconds per step; else times are in steps.")] = None,
    evaluate_seconds: Annotated[float | None, typer.Option(help="Seconds per evaluation.")] = None,
    load_seconds: Annotated[float | None, typer.Option(help="Seconds until a checkpoint is loaded.")] = None,
    save_seconds: Annotated[float | None, typer.Option(help="Seconds until a checkpoint is written.")] = None,
    checkpoint_bytes: Annotated[str | None, typer.Option(help="What a checkpoint takes, such as '200 MB'.")] = None,
    checkpoint_every: Annotated[int | None, typer.Option(help="As for optimize().")] = None,
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
    from hpstage.eviction import budget_bytes
    from hpstage.rehearsal import named_sampler, preflight, values_met

    if store is not None and trainable is not None:
        raise UsageError("--store and --trainable both tell what steps take; give one of them")
    described = algorithm_named(algorithm)
    fleets = _numbers(gpus)
    size = None if checkpoint_bytes is None else budget_bytes(checkpoint_bytes, "--checkpoint-bytes")
    function = named(space, "the space")
    if not callable(function):
        raise UsageError(f"{space} is a {type(function).__name__}; name a function of an optuna.Trial")
    own = named_sampler(sampler, function, steps, seed)
    known: Costs | None = None
    precedent: Precedent | None = None
    if store is not None:
        known, precedent = _of_store(store, checkpoints, metric)
    elif metric is not None:
        raise UsageError("--metric names one that was measured on a --store; give that, too")
    if trainable is not None:
        from hpstage.costs import measured

        subject = named(trainable, "the trainable")
        known = measured(
            subject() if isinstance(subject, type) else subject, values_met(function, steps, sampler=own, most=6)
        )
    found = preflight(
        function,
        steps=steps,
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
    )
    typer.echo(str(found))
    if json_file is not None:
        json_file.write_text(json.dumps(found.as_dict(), indent=2) + "\n")


def _first(*figures: Any) -> Any:
    """The first that is there; the last, if none is."""
    return next((figure for figure in figures if figure is not None), figures[-1])


def algorithm_named(text: str) -> Algorithm:
    """The algorithm that ``SuccessiveHalving(15, 4, tree_aware=False)`` describes; nothing but its class is called.

    Raises:
        UsageError: it is no name of ``hpstage.algos`` with plain values, or the algorithm refuses them.
    """
    from hpstage import algos
    from hpstage.algorithm import Algorithm

    kinds = {name: kind for name in algos.__all__ if issubclass(kind := getattr(algos, name), Algorithm)}
    try:
        expression = ast.parse(text.strip(), mode="eval").body
    except SyntaxError as error:
        raise UsageError(f"--algorithm {text!r} cannot be read: {error.msg}") from None
    call = expression if isinstance(expression, ast.Call) else ast.Call(expression, [], [])
    if not isinstance(call.func, ast.Name) or call.func.id not in kinds:
        raise UsageError(f"--algorithm {text!r}: give one of {', '.join(kinds)}, with its arguments in brackets")
    try:
        arguments = [ast.literal_eval(argument) for argument in call.args]
        named_arguments = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in call.keywords}
    except ValueError:
        raise UsageError(f"--algorithm {text!r}: arguments are plain values, such as 15 or 'asynchronous'") from None
    try:
        described: Algorithm = kinds[call.func.id](*arguments, **named_arguments)
    except TypeError as error:
        raise UsageError(f"--algorithm {text!r}: {error}") from None
    return described


def named(reference: str, what: str) -> Any:
    """What ``MODULE:NAME`` or ``path/to/script.py:NAME`` names; the module is imported as if it were run from here.

    Raises:
        UsageError: there is no such module or name.
    """
    module_name, colon, name = reference.rpartition(":")
    if not colon or not name:
        raise UsageError(f"{what} is {reference!r}; give MODULE:NAME, or path/to/script.py:NAME")
    module = _script(Path(module_name)) if module_name.endswith(".py") else _module(module_name)
    if not hasattr(module, name):
        raise UsageError(f"{what} is {reference!r}, but {module_name} has no {name}")
    return getattr(module, name)


def _script(path: Path) -> Any:
    path = path.resolve()
    if not path.is_file():
        raise UsageError(f"there is no file {path}")
    loaded = sys.modules.get(path.stem)
    if loaded is not None and getattr(loaded, "__file__", None) == str(path):
        return loaded
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    _import_from(path.parent)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # where classes of the script look for their module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[path.stem]
        raise
    return module


def _module(name: str) -> Any:
    _import_from(Path.cwd())
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # the module is there, and one that it imports is not
        raise UsageError(
            f"there is no module {name!r} here; a script is named by its path: path/to/{name}.py"
        ) from None


def _import_from(folder: Path) -> None:
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


def _numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise UsageError(f"--gpus {text!r}: give numbers of workers, such as 1,2,4,8") from None


def _of_store(store: str, checkpoints: str | None, metric: str | None) -> tuple[Costs, Precedent | None]:
    """Costs, and what was measured of the metric; by default that of the latest search."""
    from hpstage.costs import costs_of_plan
    from hpstage.locations import open_existing
    from hpstage.stand_in_metrics import Precedent

    with ExitStack() as closing:
        trained, _ = open_existing(store, checkpoints, closing=closing, sweep=False)
        searches = [record.started for record in trained.searches.values()]
        latest = max(searches, key=lambda started: started.at, default=None)
        name = metric if metric is not None else latest.metric[0] if latest is not None else None
        told = [
            direction
            for started in searches
            for other, direction in zip(started.metric, started.directions, strict=False)
            if other == name
        ]
        precedent = None if name is None else Precedent(trained, name, maximize=told[-1:] == ["maximize"])
        return costs_of_plan(trained), precedent
