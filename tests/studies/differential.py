"""Studies for comparison with Optuna's own loop: spaces, samplers, pruners, and one search run by either."""

from __future__ import annotations

import math
import random
import uuid
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import optuna
from optuna import samplers as of
from optuna.distributions import BaseDistribution
from optuna.pruners import (
    BasePruner,
    HyperbandPruner,
    MedianPruner,
    NopPruner,
    PatientPruner,
    PercentilePruner,
    SuccessiveHalvingPruner,
    ThresholdPruner,
    WilcoxonPruner,
)
from optuna.samplers import BaseSampler
from optuna.storages import BaseStorage, JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial, Trial, create_trial

import hpstage
from hpstage.algos import FullTraining, OptunaPruner
from hpstage.store import MemoryJournal

STEPS, GRACE, TRIALS = 6, 2, 12
KINDS = ("grid", "conditional", "enqueue", "constraints", "objectives", "failing", "nan", "measured")
Values = dict[str, Any]

# --- spaces -----------------------------------------------------------------------------------------------


def suggest(kind: str, trial: Trial, finite: bool) -> Values:
    """Return a trial's values. ``finite``: for samplers that list all points."""
    if kind == "grid":
        rate = trial.suggest_categorical("rate", [0.1, 0.4])
        return {"rate": rate, "depth": trial.suggest_int("depth", 1, 5, step=2), "drop": drop(trial, True)}
    rate = trial.suggest_float("rate", 0.1, 0.7, step=0.3) if finite else trial.suggest_float("rate", 0.01, 1, log=True)
    values = {"rate": rate, "drop": drop(trial, finite)}
    if kind == "conditional":
        values["model"] = trial.suggest_categorical("model", ["tree", "net"])
        if values["model"] == "net":
            return values | {"depth": trial.suggest_int("depth", 1, 5, step=2)}
        return values | {"leaf": trial.suggest_int("leaf", 1, 9, step=4)}
    values["depth"] = trial.suggest_int("depth", 1, 5, step=2)
    if kind == "constraints":
        trial.set_user_attr("note", f"{values['depth']} layers")
        if hasattr(trial, "set_constraint"):  # since Optuna 5
            trial.set_constraint("depth", values["depth"] - 4)
    if kind == "failing" and values["depth"] == 5 and values["drop"] < 0.4:
        raise optuna.TrialPruned("of no use")
    return values


def drop(trial: Trial, finite: bool) -> float:
    return trial.suggest_float("drop", 0.0, 0.8, step=0.4) if finite else trial.suggest_float("drop", 0.0, 0.8)


GRID = {"rate": [0.1, 0.4], "drop": [0.0, 0.4, 0.8], "depth": [1, 3, 5]}
CONDITIONS = {"model": ["tree", "net"], "leaf": [1, 9]}


def prepare(kind: str, study: optuna.Study) -> None:
    """Queue trials, and add one of another study, before the first call."""
    if kind != "enqueue":
        return
    study.enqueue_trial({"rate": 0.4, "drop": 0.4, "depth": 3}, user_attrs={"loss": -1.0, "by": "hand"})
    study.enqueue_trial({"depth": 5})
    study.enqueue_trial({"rate": 0.4, "drop": 0.4, "depth": 3})
    study.enqueue_trial({"rate": 0.1, "unknown": 1})
    params = {"rate": 0.4, "drop": 0.8}
    trial = optuna.trial.FixedTrial({**params, "depth": 1})
    suggest(kind, trial, finite=isinstance(study.sampler, LISTING))  # type: ignore[arg-type]
    study.add_trial(create_trial(params=trial.params, distributions=trial.distributions, value=1.5))


# --- the objective ----------------------------------------------------------------------------------------


class Unstable(Exception):
    pass


def metrics(values: Mapping[str, Any], steps: int) -> dict[str, float]:
    """What training for so many steps gives: a learning curve with noise."""
    numbers = sorted((name, value + 0.0) for name, value in values.items() if name != "model")
    noise = random.Random(f"{numbers}/{steps}").gauss(0, 0.15)  # 1 and 1.0 are one value
    depth, drop = values.get("depth", 2), values["drop"]
    level = abs(math.log10(values["rate"]) + 0.7) + (drop - 0.3) ** 2 + 0.1 * depth + 0.05 * values.get("leaf", 0)
    return {"loss": level * (0.5 + 1 / steps) + noise, "size": depth * (1 - drop)}


class Interruption:
    """Interrupts once, at a place: in the first trial that gets there, from that of a number on."""

    def __init__(self, place: str = "", number: int = 0) -> None:
        self.place, self.number = place, number
        self.now = -1

    def reach(self, place: str, number: int | None = None) -> None:
        self.now = self.now if number is None else number
        if place == self.place and self.now >= self.number:
            self.place = ""
            raise KeyboardInterrupt


class Curve:
    """Training whose metrics are a formula of its values and the number of steps."""

    interruption = Interruption()
    stateless = ("interruption",)

    def setup(self, hp: Mapping[str, Any]) -> None:
        self.values = dict(hp)
        self.steps = 0

    def train(self, step: int, hp: Mapping[str, Any]) -> None:
        type(self).interruption.reach("train")
        self.steps = step + 1

    def evaluate(self) -> dict[str, float]:
        return metrics(self.values, self.steps)

    def state_dict(self) -> Values:
        return {"values": self.values, "steps": self.steps}

    def load_state_dict(self, state: Values) -> None:
        self.values, self.steps = dict(state["values"]), state["steps"]


class Noisy(Curve):
    """A metric that is NaN now and then: on the way, or at the end."""

    def evaluate(self) -> dict[str, float]:
        found = super().evaluate()
        if random.Random(f"{found['loss']:.9f}").random() < 0.3:
            found["loss"] = math.nan
        return found


class Fragile(Curve):
    """A trial of one layer fails in training, or ends with NaN, or prunes itself."""

    def train(self, step: int, hp: Mapping[str, Any]) -> None:
        super().train(step, hp)
        if hp["depth"] == 1 and step == 3:
            if hp["drop"] > 0.6:
                raise Unstable("too much is dropped")
            if hp["drop"] > 0.35:
                raise optuna.TrialPruned("diverged")

    def evaluate(self) -> dict[str, float]:
        found = super().evaluate()
        if self.values["depth"] == 1 and self.steps == STEPS:
            found["loss"] = math.nan
        return found


def constraints(trial: FrozenTrial) -> Sequence[float]:
    return (trial.user_attrs["size"] - 2.0,)


# --- samplers and pruners ---------------------------------------------------------------------------------


class Climber(BaseSampler):
    """A user's own: now and then near the best trial, with a generator and a counter of its own."""

    def __init__(self, seed: int) -> None:
        self.rng, self.turn = random.Random(seed), 0

    def infer_relative_search_space(self, study: optuna.Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        return {}

    def sample_relative(self, study: optuna.Study, trial: FrozenTrial, search_space: Any) -> Values:
        return {}

    def sample_independent(self, study: Any, trial: Any, param_name: str, param_distribution: Any) -> Any:
        self.turn += 1
        done = [one for one in study.get_trials(deepcopy=False) if one.value is not None and param_name in one.params]
        if done and self.turn % 3:
            best = min(done, key=lambda one: one.value).params[param_name]
            if self.rng.random() < 0.5:
                return best
        drawn = of.RandomSampler(seed=self.rng.randrange(1 << 30))
        return drawn.sample_independent(study, trial, param_name, param_distribution)


class Noting(of.RandomSampler):
    """Notes on each trial what is never the same twice, as CmaEsSampler does with memory that is not initialized."""

    def before_trial(self, study: optuna.Study, trial: FrozenTrial) -> None:
        study._storage.set_trial_system_attr(trial._trial_id, "noted", uuid.uuid4().hex)


LISTING = (of.GridSampler, of.BruteForceSampler)
SAMPLERS: dict[str, Callable[[str], BaseSampler]] = {
    "random": lambda kind: of.RandomSampler(seed=1),
    "tpe": lambda kind: of.TPESampler(seed=1, n_startup_trials=4, **constrained(kind)),
    "tpe-multivariate": lambda kind: of.TPESampler(seed=1, n_startup_trials=4, multivariate=True, **constrained(kind)),
    "tpe-group": lambda kind: of.TPESampler(
        seed=1, n_startup_trials=4, multivariate=True, group=True, **constrained(kind)
    ),
    "tpe-liar": lambda kind: of.TPESampler(seed=1, n_startup_trials=4, constant_liar=True, **constrained(kind)),
    "tpe-default": lambda kind: of.TPESampler(seed=1, **constrained(kind)),
    "cmaes": lambda kind: of.CmaEsSampler(seed=1, n_startup_trials=2),
    "cmaes-margin": lambda kind: of.CmaEsSampler(seed=1, with_margin=True, popsize=4),
    "cmaes-pruned": lambda kind: of.CmaEsSampler(seed=1, consider_pruned_trials=True, popsize=4),
    "gp": lambda kind: of.GPSampler(seed=1, n_startup_trials=8, **constrained(kind)),
    "gp-deterministic": lambda kind: of.GPSampler(
        seed=1, n_startup_trials=8, deterministic_objective=True, **constrained(kind)
    ),
    "qmc-sobol": lambda kind: of.QMCSampler(seed=1, scramble=True),
    "qmc-halton": lambda kind: of.QMCSampler(seed=1, qmc_type="halton"),
    "grid": lambda kind: of.GridSampler(GRID | (CONDITIONS if kind == "conditional" else {}), seed=1),
    "brute-force": lambda kind: of.BruteForceSampler(seed=1),
    "nsga-ii": lambda kind: of.NSGAIISampler(seed=1, population_size=4, **constrained(kind)),
    "nsga-ii-sbx": lambda kind: of.NSGAIISampler(
        seed=1, population_size=4, crossover=of.nsgaii.SBXCrossover(), **constrained(kind)
    ),
    "nsga-iii": lambda kind: of.NSGAIIISampler(seed=1, population_size=4, **constrained(kind)),
    "partial-random": lambda kind: of.PartialFixedSampler({"drop": 0.4}, of.RandomSampler(seed=1)),
    "partial-tpe": lambda kind: of.PartialFixedSampler({"drop": 0.4}, SAMPLERS["tpe-multivariate"](kind)),
    "own": lambda kind: Climber(1),
    "noting": lambda kind: Noting(seed=1),
}


def constrained(kind: str) -> Values:
    return {"constraints_func": constraints} if kind == "constraints" else {}


PRUNERS: dict[str, Callable[[], BasePruner]] = {
    "median": lambda: MedianPruner(n_startup_trials=2, n_warmup_steps=1),
    "median-sparse": lambda: MedianPruner(n_startup_trials=1, interval_steps=2, n_min_trials=2),
    "percentile": lambda: PercentilePruner(30.0, n_startup_trials=2),
    "halving": lambda: SuccessiveHalvingPruner(min_resource=1, reduction_factor=2),
    "halving-auto": lambda: SuccessiveHalvingPruner(reduction_factor=3),
    "hyperband": lambda: HyperbandPruner(min_resource=1, max_resource=STEPS, reduction_factor=2),
    "patient": lambda: PatientPruner(MedianPruner(n_startup_trials=1), patience=1),
    "patient-alone": lambda: PatientPruner(None, patience=2),
    "threshold": lambda: ThresholdPruner(upper=2.0),
    "wilcoxon": lambda: WilcoxonPruner(p_threshold=0.3, n_startup_steps=2),
    "nop": NopPruner,
}


# --- one search -------------------------------------------------------------------------------------------


class Case:
    """A kind of space with a sampler and, if any, a pruner: the same study in either loop.

    Args:
        window: trials open at a time.
        interruption: of :meth:`in_hpstage`, in "train", "callback", or in the space: "before" or "after" it suggests.
    """

    def __init__(
        self,
        kind: str,
        sampler: str,
        pruner: str | None = None,
        *,
        window: int = 1,
        interruption: Interruption | None = None,
    ) -> None:
        self.kind, self.sampler, self.pruner, self.window = kind, sampler, pruner, window
        self.seen: list[tuple[object, ...]] = []  # by the callback
        self.finite = isinstance(self.make_sampler(), LISTING)
        self.names = ["loss", "size"] if kind == "objectives" else ["loss"]
        self.trainable = {"failing": Fragile, "nan": Noisy}.get(kind, Curve)
        self.interruption = interruption or Interruption()

    def make_sampler(self) -> BaseSampler:
        return SAMPLERS[self.sampler](self.kind)

    def study(self, storage: BaseStorage | None = None) -> optuna.Study:
        """Return a new study, or that of the storage, with a new sampler and pruner."""
        self.trainable.interruption = self.interruption  # not that of a case before, which it may not have reached
        pruner = PRUNERS[self.pruner]() if self.pruner else NopPruner()
        options: Values = {"study_name": "one", "storage": storage, "sampler": self.make_sampler(), "pruner": pruner}
        if storage is not None and optuna.get_all_study_names(storage):
            return optuna.load_study(**options)
        study = optuna.create_study(directions=["minimize", "maximize"][: len(self.names)], **options)
        prepare(self.kind, study)
        return study

    def in_optuna(self) -> optuna.Study:
        """Run Optuna's own loop: its ``optimize`` or, with several trials open, ``ask`` and ``tell`` in order."""
        study = self.study()
        if self.window == 1:
            study.optimize(
                lambda trial: self.objective(trial, suggest(self.kind, trial, self.finite)),
                n_trials=TRIALS,
                catch=(Unstable,),
                callbacks=[self.see],
            )
            return study
        waiting: deque[tuple[Trial, Values]] = deque()
        for number in range(TRIALS + self.window):
            if number >= self.window:
                trial, values = waiting.popleft()
                study.tell(trial, self.objective(trial, values))
            if number < TRIALS:
                trial = study.ask()
                waiting.append((trial, suggest(self.kind, trial, self.finite)))
        return study

    def objective(self, trial: Trial, values: Values) -> list[float]:
        """As Optuna's documentation writes one that may be pruned."""
        training = self.trainable()
        training.setup(values)
        for step in range(STEPS):
            training.train(step, values)
            if step + 1 < (GRACE if self.pruner else STEPS):
                continue
            found = training.evaluate()
            if math.isnan(found["loss"]) and not self.pruner:
                return [math.nan]
            for name, value in found.items():
                if not math.isnan(found["loss"]):
                    trial.set_user_attr(name, value)
            if len(self.names) == 1:
                trial.report(found["loss"], step + 1)
            if self.pruner and step + 1 < STEPS and trial.should_prune():
                self.constrain(trial, found)
                raise optuna.TrialPruned
        self.constrain(trial, found)
        return [found[name] for name in self.names]

    def constrain(self, trial: Trial, found: Mapping[str, float]) -> None:
        if self.kind == "measured" and hasattr(trial, "set_constraint"):  # since Optuna 5
            trial.set_constraint("size", found["size"] - 2.0)

    def in_hpstage(self, storage: BaseStorage | None = None, store: Path | None = None) -> optuna.Study:
        """Run the search, or resume it: the same call with the same arguments."""
        study = self.study(storage)

        def space(trial: Trial) -> Values:
            own = getattr(trial, "study", None) is study  # else it only looks at the space
            if own:
                self.interruption.reach("before", trial.number)
            values = suggest(self.kind, trial, self.finite)
            if own:
                self.interruption.reach("after", trial.number)
            return values

        def see(study: optuna.Study, trial: FrozenTrial) -> None:
            self.see(study, trial)
            self.interruption.reach("callback", trial.number)

        hpstage.optimize(
            study,
            self.trainable(),
            space,
            metric=self.names,
            steps=STEPS,
            n_trials=TRIALS,
            algorithm=OptunaPruner(grace=GRACE) if self.pruner else FullTraining(window=self.window),
            executor=hpstage.InlineExecutor(),
            store=MemoryJournal() if store is None else store,
            catch=(Unstable,),
            constraints=(lambda found: {"size": found["size"] - 2.0}) if self.kind == "measured" else None,
            callbacks=[see],
        )
        return study

    def see(self, study: optuna.Study, trial: FrozenTrial) -> None:
        self.seen.append((trial.number, [one.state for one in study.get_trials(deepcopy=False)]))


def record(study: optuna.Study) -> list[Values]:
    """Return all that means the same in either loop."""
    return [
        {
            "number": trial.number,
            "state": trial.state,
            "params": trial.params,
            "distributions": trial.distributions,
            "values": trial.values,
            "intermediate values": {step: repr(value) for step, value in trial.intermediate_values.items()},  # NaN too
            "constraints": getattr(trial, "constraints", trial.system_attrs.get("constraints")),
            "user attributes": {k: v for k, v in trial.user_attrs.items() if not k.startswith("hpstage:")},
            "queued with": trial.system_attrs.get("fixed_params"),
            "point of the grid": trial.system_attrs.get("grid_id"),
        }
        for trial in study.trials
    ]


def journal(folder: Path) -> JournalStorage:
    return JournalStorage(JournalFileBackend(str(folder / "optuna.log")))
