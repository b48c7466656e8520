"""Records the journals of small searches of every kind, from which the golden figures are computed.

Run ``python -m tests.unit.accounting.record`` to record those that are missing, and the figures of all. A journal stays
as it is: what it holds depends on clocks and on the scheduler, and the figures are functions of it alone.
"""

from __future__ import annotations

import gzip
import json
import platform
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import optuna

import hpstage
from hpstage import schedule as s
from hpstage.algos import ASHA, FullTraining, Hyperband, PopulationBasedTraining, SuccessiveHalving
from hpstage.execution.simulated_cluster import Disruptions, Scaling, SimulatedCluster
from hpstage.plan.facts import (
    DriverJoined,
    Fact,
    InputsRead,
    PlanCreated,
    StageFailed,
    StateLost,
    TrialProposed,
    UserFailure,
)
from hpstage.plan.log import encode, read_facts
from hpstage.plan.step_times import StepTimes
from hpstage.schedule import Scalar
from hpstage.store import MemoryJournal
from hpstage.testing.toys import Failing, Tape
from tests.simulated_audits import AuditingExecutor

FOLDER = Path(__file__).parent / "recorded"


def space(trial: optuna.Trial) -> dict[str, object]:
    return {
        "a": s.piecewise({0: trial.suggest_int("a", 1, 2), 8: trial.suggest_int("late", 1, 3)}),
        "b": s.piecewise({0: 1, 12: trial.suggest_int("b", 1, 3)}),
    }


def fails(trial: optuna.Trial) -> dict[str, object]:
    return {"a": s.piecewise({0: 1, 6: trial.suggest_categorical("late", [1, "train", "evaluate"])})}


def rejects(trial: optuna.Trial) -> dict[str, object]:
    if trial.suggest_int("layers", 1, 3) == 3:
        raise optuna.TrialPruned("too deep")
    return space(trial)


class Stumbling(Tape):
    """Raises where a value says so."""

    version = "stumbling"

    def train(self, step: int, hp: Mapping[str, Scalar]) -> None:
        if hp["a"] == "train":
            raise RuntimeError("cannot train this")
        super().train(step, hp)

    def evaluate(self) -> Mapping[str, float]:
        if self.hp["a"] == "evaluate":
            raise RuntimeError("cannot evaluate this")
        return super().evaluate()

    def setup(self, hp: Mapping[str, Scalar]) -> None:
        self.hp = hp
        super().setup(hp)


class Ending(Tape):
    """Ends its training itself."""

    version = "ending"

    def train(self, step: int, hp: Mapping[str, Scalar]) -> None:
        if step == 10 and hp["b"] == 2:
            raise hpstage.StopTraining("long enough")
        super().train(step, hp)


class Bumpy(Tape):
    version = "bumpy"

    def evaluate(self) -> Mapping[str, float]:
        return {"score": self.score, "loss": int(self.digest[:4], 16) / 2**16}


def on_plateaus(trial: optuna.Trial) -> dict[str, object]:
    plateau = s.plateau(0.5, factor=0.5, patience=trial.suggest_int("patience", 0, 2), metric="loss", every=2)
    return {"lr": s.constant(0.25).until(2).then(plateau), "a": trial.suggest_int("a", 1, 2)}


class Recording:
    """A journal, and the searches that write to it."""

    def __init__(self) -> None:
        self.journal = MemoryJournal()
        self.kept: set[Any] = set()
        self.studies: dict[str, optuna.Study] = {}

    def search(
        self, name: str = "study", space: Callable[..., Any] = space, trainable: Any = None, **options: Any
    ) -> Any:
        study = self.studies.get(name)
        if study is None:
            directions = options.pop("directions", ["maximize"])
            study = self.studies[name] = optuna.create_study(
                study_name=name, directions=directions, sampler=optuna.samplers.RandomSampler(seed=len(name))
            )
        settings: dict[str, Any] = {"metric": "score", "steps": 16, "n_trials": 8, "store": self.journal}
        settings |= {"executor": hpstage.InlineExecutor(), "checkpoint_every": 4} | options
        hpstage.optimize(study, trainable or Tape(), space, **settings)

    def simulate(self, name: str = "study", *, workers: Any = 3, simulated: Any = None, **options: Any) -> None:
        given = {"evaluate_seconds": 0.5, "load_seconds": 0.25, "save_seconds": 0.125, "state_bytes": 100}
        executor = AuditingExecutor(workers, kept=self.kept, **given | (simulated or {}))
        self.search(name, trainable=Failing(), **{"metric": "value", "executor": executor} | options)


def inline(to: Recording) -> None:
    to.search()


def halving(to: Recording) -> None:
    to.search(algorithm=SuccessiveHalving(2, 2))


def hyperband(to: Recording) -> None:
    to.search(algorithm=Hyperband(2, 2), n_trials=10)


def several_studies(to: Recording) -> None:
    to.search("one")
    to.search("another", algorithm=ASHA(2, 2))
    to.search("third", directions=["minimize"], steps=20)


def failures(to: Recording) -> None:
    to.search(space=fails, trainable=Stumbling(), catch=(RuntimeError,), n_trials=6)


def failures_tried_again(to: Recording) -> None:
    for name in ("first", "second one"):
        to.search(name, space=fails, trainable=Stumbling(), catch=(RuntimeError,), n_trials=4)


def endings(to: Recording) -> None:
    to.search(trainable=Ending(), n_trials=10)


def rejections(to: Recording) -> None:
    to.search(space=rejects, n_trials=10)


def extended(to: Recording) -> None:
    to.search(n_trials=4)
    to.search(n_trials=4, steps=24, extend=True)


def called_twice(to: Recording) -> None:
    to.search(n_trials=4)
    to.search(n_trials=4)


def population(to: Recording) -> None:
    to.search(algorithm=PopulationBasedTraining(4), n_trials=4)


def plateaus(to: Recording) -> None:
    to.search(space=on_plateaus, trainable=Bumpy(), n_trials=6)


def several_objectives(to: Recording) -> None:
    to.search(trainable=Bumpy(), metric=("score", "loss"), directions=["maximize", "minimize"])


def without_sharing(to: Recording) -> None:
    to.search(sharing=False, n_trials=5)


def interrupted(to: Recording) -> None:
    def interrupt(study: optuna.Study, trial: optuna.trial.FrozenTrial) -> None:
        if trial.number == 3:
            raise KeyboardInterrupt

    try:
        to.simulate(callbacks=[interrupt])
    except KeyboardInterrupt:
        to.simulate(workers=2)


def gangs(to: Recording) -> None:
    options = {"virtual_nodes": 4, "speedup": lambda width: width**0.8}
    to.simulate(workers=4, simulated=options, n_trials=5, algorithm=SuccessiveHalving(4, 2))


def bundles(to: Recording) -> None:
    times = StepTimes(((1, 1.0), (3, 1.5)))
    to.simulate(workers=SimulatedCluster(2, slots=3), simulated={"step_times": times}, n_trials=12)


def audits(to: Recording) -> None:
    to.simulate(simulated={"audit_seconds": 0.5}, audit="idle", algorithm=FullTraining(), n_trials=10)


def elastic(to: Recording) -> None:
    to.simulate(workers=SimulatedCluster(1, scaling=Scaling(1, 6, 5.0)), n_trials=12)


def deaths(to: Recording) -> None:
    to.simulate(
        workers=SimulatedCluster(3, disruptions=Disruptions(lifetime_seconds=20.0, replace_seconds=5.0)), n_trials=12
    )


def simulated_studies(to: Recording) -> None:
    to.simulate("one", algorithm=SuccessiveHalving(4, 2))
    to.simulate("another", n_trials=6, steps=20)


RECORDINGS = (
    *(inline, halving, hyperband, several_studies, failures, failures_tried_again, endings, rejections, extended),
    *(called_twice, population, plateaus, several_objectives, without_sharing, interrupted, gangs, bundles, audits),
    *(elastic, deaths, simulated_studies),
)


def recorded(name: str) -> MemoryJournal:
    """Return a recorded journal."""
    journal = MemoryJournal()
    journal.append(gzip.decompress((FOLDER / f"{name}.jsonl.gz").read_bytes()).splitlines())
    return journal


def golden(name: str) -> dict[str, Any]:
    """Return the figures of a recorded journal."""
    found: dict[str, Any] = json.loads((FOLDER / f"{name}.json").read_text())
    return found


def _shortened(fact: Fact) -> Fact:
    """Return a fact without what is long or names this machine, and belongs to no figure."""
    match fact:
        case PlanCreated():
            described = {"sharing": fact.described["sharing"]} if "sharing" in fact.described else {}
            return msgspec.structs.replace(fact, described=described, loaded={}, origin="", folder="")
        case TrialProposed():
            rejected = None if fact.rejected is None else _failure(fact.rejected)
            return msgspec.structs.replace(fact, sampler={}, rejected=rejected)
        case StageFailed():
            return msgspec.structs.replace(fact, failure=_failure(fact.failure))
        case DriverJoined():
            return msgspec.structs.replace(fact, host="host", pid=1, checkpoints="", start="")
        case StateLost():
            return msgspec.structs.replace(fact, message="")
        case InputsRead():
            return msgspec.structs.replace(fact, inputs={})
    return fact


def _failure(failure: UserFailure) -> UserFailure:
    lines = re.findall(r'File ".*", line (\d+)', failure.traceback)
    return UserFailure(failure.summary, f'  File "training.py", line {lines[-1] if lines else 1}', failure.kinds)


def main() -> None:
    from tests.unit.accounting.figures import figures_of

    for recording in RECORDINGS:
        path = FOLDER / f"{recording.__name__}.jsonl.gz"
        if not path.exists():
            to = Recording()
            recording(to)
            host = platform.node().encode()
            records = [encode(_shortened(fact)).replace(host + b"/", b"host/") for fact in read_facts(to.journal)]
            path.write_bytes(gzip.compress(b"\n".join(records), mtime=0))
        figures = figures_of(recorded(recording.__name__))
        path.with_name(f"{recording.__name__}.json").write_text(json.dumps(figures, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
