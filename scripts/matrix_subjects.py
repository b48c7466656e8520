"""What ``matrix_inputs.py`` calls: every public callable and every command, up to where training would begin."""

from __future__ import annotations

import inspect
import os
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import optuna

import hpstage
from hpstage import algos
from hpstage import schedule as s
from hpstage.optuna import StageTreeSampler
from hpstage.store import MemoryJournal


class Reached(BaseException):
    """Here training, workers or servers would be started: the arguments were accepted."""


class Counting:
    """A trainable of the simplest kind."""

    version = data_version = "1"

    def setup(self, hp: Mapping[str, Any]) -> None:
        self.x = 0.0

    def train(self, step: int, hp: Mapping[str, Any]) -> None:
        raise Reached

    def evaluate(self) -> dict[str, float]:
        return {"loss": self.x}

    def state_dict(self) -> dict[str, float]:
        return {"x": self.x}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.x = state["x"]


class Trains(Counting):
    """One that is trained."""

    version = "2"

    def train(self, step: int, hp: Mapping[str, Any]) -> None:
        self.x += hp["lr"]


def space(trial: optuna.Trial) -> dict[str, Any]:
    return {"lr": trial.suggest_categorical("lr", [0.1, 0.2])}


@dataclass(frozen=True)
class Subject:
    """A public callable: ``call(name, value)`` calls it with one argument replaced."""

    name: str
    of: Any
    call: Callable[[str, Any], object]
    names: tuple[str, ...]
    annotations: Mapping[str, str]


# --- what is called ---------------------------------------------------------------------------------------


def optimize(**given: Any) -> object:
    stop_at_workers()
    study = optuna.create_study(directions=["minimize"], sampler=optuna.samplers.RandomSampler(seed=0))
    options = {"metric": "loss", "steps": 4, "n_trials": 3, "executor": hpstage.InlineExecutor()}
    options |= {"store": MemoryJournal(), "study": study, "trainable": Counting(), "space": space} | given
    return hpstage.optimize(**options)


def preflight(**given: Any) -> object:
    options = {"space": space, "steps": 4, "n_trials": 3, "step_seconds": 1.0, "rehearsals": 1, "workers": (2,)} | given
    return hpstage.preflight(**options)


def check(**given: Any) -> object:
    from hpstage.checking import conduct

    class Children:
        def __init__(self, *args: object) -> None:
            raise Reached

    conduct.Children = Children  # type: ignore[assignment, misc]
    return hpstage.check(**{"trainable": Counting(), "space": space, "steps": 4} | given)


@cache
def trained() -> str:
    """Return a folder with a store, in which one trial was trained."""

    folder = tempfile.mkdtemp()
    optimize(trainable=Trains(), store=folder)
    return folder


def stop_at_workers() -> None:
    from hpstage.cluster import launch

    class TrainingCluster:
        def __init__(self, *args: object, **options: object) -> None:
            raise Reached

    launch.TrainingCluster = TrainingCluster  # type: ignore[assignment, misc]


def local_cluster(**given: Any) -> object:
    stop_at_workers()
    return hpstage.local_cluster(**given)


def dask_executor(**given: Any) -> object:
    from hpstage.cluster import DaskExecutor

    stop_at_workers()
    executor = DaskExecutor(**given)
    try:
        return executor.open(Counting(), None)
    finally:
        executor.close()


ALGORITHMS: dict[type, dict[str, Any]] = {
    algos.FullTraining: {},
    algos.SuccessiveHalving: {"reduction_factor": 2},
    algos.ASHA: {"reduction_factor": 2},
    algos.Hyperband: {"reduction_factor": 2},
    algos.MedianStopping: {},
    algos.OptunaPruner: {},
    algos.PopulationBasedTraining: {"interval": 2},
}
SCHEDULES: dict[str, dict[str, Any]] = {
    "constant": {"value": 0.1},
    "piecewise": {"pieces": {0: 0.1, 2: 0.2}},
    "sampled": {"source": [0.1, 0.2]},
    "multistep": {"value": 0.1, "milestones": [2]},
    "step": {"value": 0.1, "step_size": 2},
    "exponential": {"value": 0.1, "gamma": 0.9},
    "linear": {"value": 0.1},
    "polynomial": {"value": 0.1, "power": 2.0},
    "cosine": {"value": 0.1, "T_max": 4},
    "cosine_restarts": {"value": 0.1, "T_0": 2},
    "onecycle": {"max_value": 0.1, "total_steps": 4},
    "wsd": {"value": 0.1, "steps": 8, "warmup": 2, "decay": 2},
    "wsd_sweep": {"peak": 0.1, "horizons": [8], "warmup": 2},
    "plateau": {"value": 0.1},
}


def read_schedule(schedule: str, /, **given: Any) -> object:
    """Make a schedule, and look at its first steps, as a search would."""
    made = getattr(s, schedule)(**{**SCHEDULES[schedule], **given})
    if isinstance(made, s.Schedule):
        return list(made.values(4 if made.length is None else min(made.length, 4)))
    if isinstance(made, s.WSDSweep):
        return made.points
    return made


def in_search(kind: type, /, **given: Any) -> object:
    return optimize(algorithm=kind(**{**ALGORITHMS[kind], **given}))


def with_sampler(**given: Any) -> object:
    sampler = StageTreeSampler(**{"base_sampler": optuna.samplers.RandomSampler(seed=0)} | given)
    return optimize(study=optuna.create_study(sampler=sampler))


def subject(name: str, of: Any, call: Callable[..., object], names: tuple[str, ...] = ()) -> Subject:
    parameters = inspect.signature(of).parameters
    annotations = {one: str(parameter.annotation) for one, parameter in parameters.items() if one != "self"}
    return Subject(name, of, lambda one, value: call(**{one: value}), names or tuple(annotations), annotations)


def subjects() -> Iterator[Subject]:
    from hpstage.cluster import DaskExecutor

    yield subject("optimize", hpstage.optimize, optimize)
    yield subject("preflight", hpstage.preflight, preflight)
    yield subject("check", hpstage.check, check)
    yield subject("open", hpstage.open, lambda **given: hpstage.open(**{"store": trained()} | given))
    yield subject("local_cluster", hpstage.local_cluster, local_cluster)
    yield subject("DaskExecutor", DaskExecutor, dask_executor)
    for kind in ALGORITHMS:
        yield subject(kind.__name__, kind, partial(in_search, kind))
    for name in SCHEDULES:
        one = subject(f"schedule.{name}", getattr(s, name), partial(read_schedule, name))
        counts = {of: re.sub(r"\bint\b", "Count", annotation) for of, annotation in one.annotations.items()}
        yield replace(one, annotations=counts)
    yield subject("StageTreeSampler", StageTreeSampler, with_sampler)


def options_of(command: str) -> list[tuple[str, str, str]]:
    """Return the arguments of a command that take a value: name, word (none if positional), type."""
    from hpstage.cli.app import app

    [function] = [one.callback for one in app.registered_commands if one.callback and one.callback.__name__ == command]
    found = []
    for name, parameter in inspect.signature(function).parameters.items():
        written = str(parameter.annotation)
        of = written.removeprefix("Annotated[").split(",")[0]
        if of in ("bool", "typer.Context"):
            continue
        word = re.search(r'typer.Option\([^)]*?"(--[a-z-]+)"', written)
        option = "" if "typer.Argument" in written else word[1] if word else f"--{name.replace('_', '-')}"
        found.append((name, option, of))
    return found


def commands() -> dict[str, list[str]]:
    """Return a command line for each command, that would be accepted."""
    Path("given.py").write_text(
        "import sys\n"
        f"sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "from matrix_subjects import Counting, Trains, space\n"
        "subject, trains = Counting(), Trains()\n"
    )
    store = trained()
    return {
        "plan": ["given.py:space", "--steps", "4", "--n-trials", "3", "--step-seconds", "1", "--gpus", "2"],
        "run": [
            *("given.py:subject", "given.py:space", "--metric", "loss", "--direction", "minimize", "--steps", "4"),
            *("--n-trials", "2", "--executor", "InlineExecutor()"),
        ],
        "check": ["given.py:subject", "given.py:space", "--steps", "4"],
        "audit": [store, "given.py:trains", "--trial", "0"],
        "gc": [store, "--budget", "1 GB", "--dry-run"],
        "status": [store],
        "tree": [store],
        "report": [store],
        "logs": [store],
        "export": [store, "tables", "out"],
        "deploy": [],
        "scheduler": [],
        "worker": ["tls://127.0.0.1:1"],
    }


@cache
def stopped(command: str) -> None:
    """Have a command stop where processes would be started."""
    from hpstage.checking import conduct
    from hpstage.cluster import supervision

    def reached(*args: object, **options: object) -> None:
        raise Reached

    if command == "scheduler":
        os.execve = reached  # type: ignore[assignment]
    supervision.Supervisor.__init__ = reached  # type: ignore[assignment, method-assign]
    if command == "check":
        conduct.Children.__init__ = reached  # type: ignore[assignment, method-assign]
    stop_at_workers()
