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
    pytest.mark.sampled(16),
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
        last = max((step for step in trial.intermediate_values), default=None)
        measured = {} if last is None else by_step[last]
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
@pytest.mark.ci_one_in(2)
def test_a_queued_trial_inherits_no_measured_attributes(tmp_path: Path, kind: str, rate: float) -> None:
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


@pytest.mark.ci
@settings(max_examples=8)
@given(seed=st.integers(0, 10**6), after=st.integers(1, 6), data=st.data())
@pytest.mark.parametrize(
    "algorithm", [FullTraining(), SuccessiveHalving(2, 2), PopulationBasedTraining(3, 0.5)], ids=repr
)
def test_user_attributes_of_trials_are_right_after_queueing_retrying_stopping_and_extending(
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


def test_a_user_attribute_set_by_the_space_wins_over_a_metric_of_the_same_name_with_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
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


def retried(study: optuna.Study, rate: float = 0.1, **options: Any) -> None:
    """Queue a trial of Optuna's own loop again, as for one whose process was lost."""
    values = {1: 77.0, 4: 88.0, 7: 99.0}
    known = optuna.trial.FixedTrial({"rate": rate, "late": 0.02})
    space(known)  # type: ignore[arg-type]
    lost = create_trial(
        state=TrialState.FAIL, params=known.params, distributions=known.distributions, intermediate_values=values
    )
    RETRY(**options)(study, lost)


@pytest.mark.parametrize("kind", ["memory", "journal", "database"])
def test_intermediate_values_inherited_by_a_retried_trial_are_replaced_by_its_own_values(
    tmp_path: Path, kind: str
) -> None:
    def stop(study: optuna.Study, trial: optuna.trial.FrozenTrial) -> None:
        raise KeyboardInterrupt

    study, journal = optuna.create_study(storage=storage_of(kind, tmp_path), sampler=sampler()), MemoryJournal()
    retried(study, inherit_intermediate_values=True)
    options: dict[str, Any] = {"store": journal, "algorithm": SuccessiveHalving(2, 2)}
    with pytest.raises(KeyboardInterrupt):
        search(study, **options, callbacks=[stop])
    result = search(study, **options)
    first = study.trials[0]
    assert first.params == {"rate": 0.1, "late": 0.02} and first.user_attrs["hpstage:steps"] <= 8
    values = {step: value for step, value in first.intermediate_values.items() if not math.isnan(value)}
    assert values == {step: found["error"] for step, found in result.trial(0).metrics.items()}
    if kind != "journal":  # which cannot remove any
        assert values == first.intermediate_values


def test_a_retried_trial_that_a_stop_leaves_untrained_waits_again() -> None:
    study, journal = optuna.create_study(sampler=sampler()), MemoryJournal()
    retried(study)
    retried(study, 0.02)
    search(study, store=journal, callbacks=[lambda study, trial: study.stop()])
    assert [trial.state for trial in study.trials[:2]] == [TrialState.COMPLETE, TrialState.WAITING]
    search(study, store=journal)
    assert study.trials[1].state == TrialState.COMPLETE and study.trials[1].params == {"rate": 0.02, "late": 0.02}


@pytest.mark.skipif(not hasattr(optuna.Trial, "set_constraint"), reason="since Optuna 5")
@pytest.mark.parametrize("kind", ["memory", "journal", "database"])
def test_an_extended_trial_keeps_the_constraints_and_artifacts_set_by_the_space(tmp_path: Path, kind: str) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "artifacts").mkdir()
    artifacts = optuna.artifacts.FileSystemArtifactStore(tmp_path / "artifacts")

    def constrained(trial: optuna.Trial) -> dict[str, object]:
        rate = trial.suggest_float("rate", 0.01, 0.1)
        if isinstance(trial, optuna.Trial):
            trial.set_constraint("rate", rate - 0.05)
            optuna.artifacts.upload_artifact(
                artifact_store=artifacts, file_path=str(tmp_path / "file"), study_or_trial=trial
            )
        return {"rate": rate}

    study = optuna.create_study(storage=storage_of(kind, tmp_path), sampler=optuna.samplers.RandomSampler(seed=0))
    options: dict[str, Any] = {"metric": "error", "n_trials": 4, "executor": hpstage.InlineExecutor()}
    for steps, name in ((4, "x"), (6, "error")):
        limits = {"constraints": lambda metrics, name=name: {name: metrics[name] - 3}}
        hpstage.optimize(
            study, Descent(), constrained, steps=steps, store=tmp_path / "plan", extend=steps > 4, **limits, **options
        )
    assert len(study.trials) == 8
    for before, after in zip(study.trials[:4], study.trials[4:], strict=True):
        assert before.params == after.params
        assert after.constraints == {"rate": before.params["rate"] - 0.05, "error": after.user_attrs["error"] - 3}
        files = [optuna.artifacts.get_all_artifact_meta(one, storage=study._storage) for one in (before, after)]
        assert files[0] == files[1] and len(files[0]) == 1


def test_a_queued_trial_whose_space_raises_inherits_no_measured_attributes() -> None:
    def raising(trial: optuna.Trial) -> dict[str, object]:
        if trial.number == 1:
            raise ZeroDivisionError
        return space(trial)

    study = optuna.create_study(sampler=sampler())
    for _ in range(2):
        study.enqueue_trial({"rate": 0.1}, user_attrs={**STALE, "mine": 5})
    with pytest.raises(ZeroDivisionError):
        hpstage.optimize(
            study,
            Descent(),
            raising,
            metric="error",
            steps=8,
            n_trials=2,
            catch=(),
            store=MemoryJournal(),
            executor=hpstage.InlineExecutor(),
        )
    assert study.trials[1].state == TrialState.FAIL
    assert study.trials[1].user_attrs.keys() & STALE.keys() == {
        "note",
        "extra",
        "hpstage:search",
    }  # nobody measured "extra"
