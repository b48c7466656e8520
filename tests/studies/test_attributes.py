"""What a trial's user attributes say is of that trial, whichever way it came into the study."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import optuna
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from optuna import storages
from optuna.storages import BaseStorage, InMemoryStorage, JournalStorage, RDBStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import TrialState, create_trial

import hpstage
from hpstage import schedule as s
from hpstage.algorithm import Algorithm
from hpstage.algos import FullTraining, PopulationBasedTraining, SuccessiveHalving
from hpstage.schedule import Scalar
from hpstage.store import MemoryJournal

optuna.logging.set_verbosity(optuna.logging.ERROR)
pytestmark = [
    pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning"),
    pytest.mark.filterwarnings("ignore:.*constraints_func:FutureWarning"),
]

HALF = 4
# As it is called since Optuna 4.9, and before.
RETRY: Any = getattr(storages, "RetryHeartbeatStaleTrialCallback", None) or storages.RetryFailedTrialCallback


class Descent:
    """Fails at rate 0.3 in its second half, ends itself at 0.4, and is never evaluated at 0.5."""

    version = "1"

    def setup(self, hp: Mapping[str, Scalar]) -> None:
        self.x = 0.0

    def train(self, step: int, hp: Mapping[str, Scalar]) -> None:
        rate = float(hp["rate"])  # type: ignore[arg-type]
        if rate == 0.3 and step >= HALF:
            raise ArithmeticError("diverged")
        if rate == 0.5:
            raise optuna.TrialPruned("never")
        self.x -= rate * 2 * (self.x - 3)

    def evaluate(self) -> Mapping[str, float]:
        return {"error": (self.x - 3) ** 2, "x": self.x, **({"extra": 1.0} if self.x > 2 else {})}

    def state_dict(self) -> object:
        return self.x

    def load_state_dict(self, state: object) -> None:
        assert isinstance(state, float)
        self.x = state


RATES = [0.02, 0.1, 0.3, 0.4, 0.5]


def space(trial: optuna.Trial) -> dict[str, object]:
    rate = trial.suggest_categorical("rate", RATES)
    trial.set_user_attr("note", f"rate {rate}")
    return {"rate": s.piecewise({0: rate, 6: trial.suggest_categorical("late", [0.01, 0.02])})}


def search(study: optuna.Study, **options: Any) -> hpstage.Result:
    settings: dict[str, Any] = {"metric": "error", "steps": 8, "n_trials": 4, "executor": hpstage.InlineExecutor()}
    return hpstage.optimize(study, Descent(), space, **settings | options)


def storage_of(kind: str, folder: Path) -> BaseStorage:
    match kind:
        case "memory":
            return InMemoryStorage()
        case "journal":
            return JournalStorage(JournalFileBackend(str(folder / "study.log")))
        case _:
            return RDBStorage(f"sqlite:///{folder / 'study.db'}")


def check(result: hpstage.Result) -> None:
    of_search = [p for p in result.plan.searches[result.search].proposed if p.number is not None]
    for proposed in of_search:
        trial = result.study.trials[proposed.number or 0]
        failed = trial.state == TrialState.FAIL
        for name in ("hpstage:failure", "hpstage:traceback"):
            assert (trial.user_attrs.get(name) is not None) == failed, (trial.number, name)
        if proposed.trial not in result.plan.trials:
            continue
        by_step = result.trial(trial.number).metrics
        told = max((step for step in trial.intermediate_values), default=None)
        measured = {} if told is None else by_step[told]
        # A name that nobody has measured yet may as well be the user's.
        for name in {"error", "x", *measured}:
            shown = trial.user_attrs.get(name)
            assert shown == measured.get(name), (trial.number, trial.state, name)
        if trial.state != TrialState.WAITING:
            assert trial.user_attrs["note"] == f"rate {trial.params['rate']}"


STALE = {
    "x": 99.0,
    "error": 0.0,
    "extra": 7.0,
    "note": "of another",
    "hpstage:failure": "Error: of another",
    "hpstage:traceback": "of another",
    "hpstage:steps": 10**6,
    "hpstage:search": "another",
    "hpstage:ended": "of another",
    "hpstage:donor": 3,
}


def sampler(seed: int = 0) -> optuna.samplers.BaseSampler:
    def too_small(trial: optuna.trial.FrozenTrial) -> tuple[float]:
        return (2.5 - (trial.user_attrs.get("x") or 0.0),)

    return optuna.samplers.TPESampler(seed=seed, constraints_func=too_small)


@pytest.mark.parametrize("kind", ["memory", "journal", "database"])
@pytest.mark.parametrize("rate", RATES)
def test_a_queued_trial_brings_nothing_along_of_what_is_measured(tmp_path: Path, kind: str, rate: float) -> None:
    study = optuna.create_study(storage=storage_of(kind, tmp_path), sampler=sampler())
    study.enqueue_trial({"rate": rate}, user_attrs={**STALE, "mine": 5})
    study.add_trial(create_trial(state=TrialState.WAITING, user_attrs=STALE, system_attrs={"fixed_params": {}}))
    result = search(study, store=MemoryJournal())
    check(result)
    first = study.trials[0]
    assert first.user_attrs["mine"] == 5 and first.user_attrs.get("hpstage:donor") is None
    if first.state == TrialState.COMPLETE:
        found: Any = getattr(first, "constraints", None) or {"0": first.system_attrs["constraints"][0]}
        (constraint,) = found.values()
        assert math.isclose(constraint, 2.5 - first.user_attrs["x"])


@settings(max_examples=8)
@given(seed=st.integers(0, 10**6), after=st.integers(1, 6), data=st.data())
@pytest.mark.parametrize(
    "algorithm", [FullTraining(), SuccessiveHalving(2, 2), PopulationBasedTraining(3, 0.5)], ids=repr
)
def test_every_way_in(
    tmp_path_factory: pytest.TempPathFactory, algorithm: Algorithm, seed: int, after: int, data: st.DataObject
) -> None:
    """Queued, retried and copied trials, an interruption, a resumption and an extension, in one study."""

    def stop(study: optuna.Study, trial: optuna.trial.FrozenTrial) -> None:
        if sum(trial.state.is_finished() for trial in study.trials) >= before + after:
            raise KeyboardInterrupt

    journal = MemoryJournal()
    kind = data.draw(st.sampled_from(["memory", "journal", "database"]))
    old = optuna.create_study(study_name="old", sampler=sampler(seed))
    check(search(old, store=journal, algorithm=algorithm))
    storage = storage_of(kind, tmp_path_factory.mktemp("study"))
    optuna.copy_study(from_study_name="old", from_storage=old._storage, to_storage=storage, to_study_name="new")
    study = optuna.load_study(study_name="new", storage=storage, sampler=sampler(seed))
    for trial in data.draw(st.lists(st.sampled_from(old.trials), max_size=3)):
        if data.draw(st.booleans()):
            study.enqueue_trial(trial.params, user_attrs=trial.user_attrs)
        elif trial.state == TrialState.FAIL:
            RETRY()(study, trial)
        else:
            study.add_trial(create_trial(state=TrialState.WAITING, user_attrs=trial.user_attrs))
    before = sum(trial.state.is_finished() for trial in study.trials)
    options: dict[str, Any] = {"store": journal, "algorithm": algorithm}
    try:
        check(search(study, **options, callbacks=[stop]))
    except KeyboardInterrupt:
        study.sampler = sampler(seed)
        check(search(study, **options))
    if not algorithm.forks:
        check(search(study, **options, steps=12, extend=True))


def test_what_the_space_sets_under_the_name_of_a_metric_stays_and_is_said(caplog: pytest.LogCaptureFixture) -> None:
    def noting(trial: optuna.Trial) -> dict[str, object]:
        trial.set_user_attr("x", "mine")
        return {"rate": trial.suggest_categorical("rate", [0.02, 0.1])}

    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    study.enqueue_trial({"rate": 0.1}, user_attrs={"x": "mine"})
    result = hpstage.optimize(
        study, Descent(), noting, metric="error", steps=8, n_trials=3, executor=hpstage.InlineExecutor()
    )
    assert [trial.user_attrs["x"] for trial in study.trials] == ["mine"] * 3
    assert result.trial(0).metrics[8]["x"] > 0
    assert caplog.text.count("The space sets the user attribute 'x'") == 1
