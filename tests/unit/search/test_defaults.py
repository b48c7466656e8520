"""`defaults` of a trainable: a hyperparameter that comes later continues what was trained without it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.samplers import BaseSampler, RandomSampler
from optuna.trial import TrialState

import hpstage
from hpstage import schedule as s
from hpstage.algos import PopulationBasedTraining
from hpstage.errors import UsageError
from hpstage.optuna import StageTreeSampler
from hpstage.training.identity.code_identity import code_identity

pytestmark = pytest.mark.sampled(10)

STEPS = 20


class Mine:
    """As of the first day; what it seems to be later is up to ``Later``."""

    version = "1"

    def setup(self, hp: Mapping[str, Any]) -> None:
        self.x, self.seen = 0.0, set(hp)

    def train(self, step: int, hp: Mapping[str, Any]) -> None:
        self.x -= hp["lr"] * (self.x - 3) + hp.get("decay", 0.0) * self.x
        assert set(hp) == self.seen

    def evaluate(self) -> dict[str, float]:
        return {"error": (self.x - 3) ** 2, "names": len(self.seen)}

    def state_dict(self) -> object:
        return {"x": self.x, "seen": sorted(self.seen)}

    def load_state_dict(self, state: Any) -> None:
        self.x = state["x"]


def later(**attributes: Any) -> Mine:
    return type("Mine", (Mine,), {"__module__": __name__, "__qualname__": "Mine", **attributes})()


def first_day(trial: optuna.Trial) -> dict[str, Any]:
    rate = trial.suggest_categorical("lr", [0.1, 0.2])
    return {"lr": s.multistep(rate, [trial.suggest_int("drop", 5, 15, step=5)], 0.1)}


def with_decay(trial: optuna.Trial) -> dict[str, Any]:
    begin, decay = trial.suggest_int("begin", 10, 15, step=5), trial.suggest_categorical("decay", [0.0, 0.1])
    return {**first_day(trial), "decay": s.piecewise({0: 0.0, begin: decay})}


def left_out(trial: optuna.Trial) -> dict[str, Any]:
    described = with_decay(trial)
    return described if trial.params["decay"] else {"lr": described["lr"]}


def search(store: Path, trainable: object, space: Any, name: str = "study", **options: Any) -> hpstage.Result:
    study = optuna.create_study(
        study_name=name,
        sampler=RandomSampler(seed=0),
        storage=f"sqlite:///{store.parent / 'studies.db'}",
        load_if_exists=True,
    )
    options = {"metric": "error", "steps": STEPS, "n_trials": 8, "executor": hpstage.InlineExecutor()} | options
    return hpstage.optimize(study, trainable, space, store=store, **options)


def alone(result: hpstage.Result, number: int) -> float:
    subject, schedules = Mine(), result.trial(number).schedules
    subject.setup({name: schedule.value(0) for name, schedule in schedules.items()})
    for step in range(STEPS):
        subject.train(step, {name: schedule.value(step) for name, schedule in schedules.items()})
    return subject.evaluate()["error"]


@pytest.mark.ci
@pytest.mark.parametrize("space", [with_decay, left_out], ids=lambda space: space.__name__)
def test_a_new_hyperparameter_with_a_default_reuses_steps_trained_without_the_hyperparameter(
    space: Any, tmp_path: Path
) -> None:
    first = search(tmp_path / "store", Mine(), first_day, "monday", n_trials=24)
    assert first.savings.steps_unique == first.savings.steps_trained
    result = search(tmp_path / "store", later(defaults={"decay": 0.0}), space, "wednesday")
    steps = [trial.params["begin"] for trial in result.study.trials if trial.params["decay"]]
    assert steps and result.savings.steps_trained <= sum(STEPS - begin for begin in steps)
    for trial in result.study.trials:
        assert trial.value == alone(result, trial.number)
        assert set(result.trial(trial.number).schedules) == {"lr", "decay"}
    again = search(tmp_path / "store", later(defaults={"decay": 0.0}), first_day, "thursday", n_trials=24)
    assert again.savings.steps_trained == 0


@pytest.mark.ci
def test_a_training_function_may_have_defaults_as_an_attribute(tmp_path: Path) -> None:
    def train(run: hpstage.Run) -> None:
        mine = Mine()
        mine.setup(run.hp)
        run.attach(mine=mine)
        for step in run.steps():
            mine.train(step, run.hp)
            if run.wants_report:
                run.report(**mine.evaluate())

    train.version = "1"  # type: ignore[attr-defined]
    search(tmp_path / "store", train, first_day, "monday", n_trials=24)
    before = code_identity(train)
    train.defaults = {"decay": 0.0}  # type: ignore[attr-defined]
    assert code_identity(train) == before
    result = search(tmp_path / "store", train, left_out, "wednesday")
    steps = [trial.params["begin"] for trial in result.study.trials if trial.params["decay"]]
    assert result.savings.steps_trained <= sum(STEPS - begin for begin in steps)


def test_a_fork_that_leaves_a_default_value_continues_from_its_donor_trial(tmp_path: Path) -> None:
    def space(trial: optuna.Trial) -> dict[str, Any]:
        decay = trial.suggest_categorical("decay", [0.0, 0.05, 0.1])
        return {"lr": trial.suggest_float("lr", 0.05, 0.2), **({"decay": decay} if decay else {})}

    result = search(
        tmp_path / "store",
        later(defaults={"decay": 0.0}),
        space,
        algorithm=PopulationBasedTraining(interval=5, quantile=0.4, seed=1),
        n_trials=12,
    )
    complete = [trial for trial in result.study.trials if trial.state == TrialState.COMPLETE]
    assert {trial.params["decay"] for trial in complete} > {0.0}
    assert all(trial.value == alone(result, trial.number) for trial in complete)
    begun = [node for node in result.plan.nodes if node.parent is None]
    assert len(begun) <= 12 < len(result.study.trials), "no fork begins from scratch"


def test_following_the_error_of_then_adds_a_new_hyperparameter_to_a_trained_trial(tmp_path: Path) -> None:
    won = search(tmp_path / "store", Mine(), first_day, "monday", n_trials=1).trial(0)
    with pytest.raises(
        UsageError, match=r"set defaults = \{'decay': OLD\} on .* 'decay': s.piecewise\(\{0: OLD, 20: NEW\}\)\}"
    ):
        won.then({"decay": 0.1})
    longer = {**won.then({"lr": 0.1}), "decay": s.piecewise({0: 0.0, STEPS: 0.1})}
    options: dict[str, Any] = {"n_trials": 1, "steps": STEPS + 5}
    further = search(tmp_path / "store", later(defaults={"decay": 0.0}), lambda trial: longer, "wednesday", **options)
    assert further.savings.steps_trained == 5


def test_an_interrupted_search_continues_with_a_new_default(tmp_path: Path) -> None:
    def stop(study: optuna.Study, trial: optuna.trial.FrozenTrial) -> None:
        if trial.number == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        search(tmp_path / "store", Mine(), first_day, callbacks=[stop])
    result = search(tmp_path / "store", later(defaults={"decay": 0.0}), first_day)
    assert [trial.number for trial in result.study.trials] == [*range(8)]
    assert all(trial.value == alone(result, trial.number) for trial in result.study.trials)


def test_a_finished_search_can_be_extended_with_a_new_default(tmp_path: Path) -> None:
    search(tmp_path / "store", Mine(), first_day, steps=10)
    result = search(tmp_path / "store", later(defaults={"decay": 0.0}), with_decay_of_zero, steps=STEPS, extend=True)
    assert all(trial.value == alone(result, trial.number) for trial in result.study.trials[-8:])


def with_decay_of_zero(trial: optuna.Trial) -> dict[str, Any]:
    return {**first_day(trial), "decay": s.piecewise({0: 0.0, 12: 0.1})}


def test_a_changed_default_is_refused_and_the_store_keeps_its_states(tmp_path: Path) -> None:
    first = search(tmp_path / "store", later(defaults={"decay": 0.0}), first_day, "monday")
    with pytest.raises(UsageError, match=r"`defaults` gives 'decay' the value 0.5.*trained with 0: keep that default"):
        search(tmp_path / "store", later(defaults={"decay": 0.5}), first_day, "tuesday")
    again = search(tmp_path / "store", later(defaults={"decay": 0.0}), first_day, "wednesday")
    assert again.savings.steps_trained == 0 < first.savings.steps_trained


@pytest.mark.parametrize(
    ("defaults", "why"),
    [
        ({"decay": [0.0]}, r"\[0.0\] \(list\) cannot be a hyperparameter's value"),
        ({"decay": float("nan")}, "nan cannot be a hyperparameter's value; it must be finite"),
        ({3: 0.0}, "3 is not a name of a hyperparameter"),
        ({"seed": 3}, "a trial without 'seed' has a default for it already; let the space return another value"),
        ({"batch_size": 3}, "a trial without 'batch_size' has a default"),
        ({"steps": 8}, "'steps' is not a name of a hyperparameter"),
    ],
)
def test_an_invalid_default_is_refused_before_training(defaults: Any, why: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=rf"defaults of Mine: {why}.*rename the attribute"):
        search(tmp_path / "store", later(defaults=defaults), first_day)
    assert not (tmp_path / "store").exists()


class Own(Mine):
    """Has a dict of that name of its own, which its code reads."""

    version = None  # type: ignore[assignment]

    def __init__(self, **defaults: Any) -> None:
        self.defaults = defaults

    def setup(self, hp: Mapping[str, Any]) -> None:
        super().setup(hp)
        self.x = self.defaults.get("start", 0.0)


def test_a_defaults_attribute_that_training_code_reads_is_part_of_the_key(tmp_path: Path, caplog: Any) -> None:
    values = set()
    for number, own in enumerate((Own(width=[64]), Own(width=[64], start=1.0), Own(start=1.0))):
        result = search(tmp_path / f"store{number}", own, first_day, str(number))
        assert set(result.trial(0).schedules) == {"lr"}
        values.add(result.best_value)
    assert len(values) == 2
    assert len({repr(code_identity(own)) for own in (Own(a=1), Own(a=2), Own())}) == 3
    assert "its own code reads it" in caplog.text


def test_a_search_without_defaults_warns_of_defaults_set_by_another_search(tmp_path: Path, caplog: Any) -> None:
    search(tmp_path / "store", later(defaults={"decay": 0.0}), first_day, "monday")
    assert "Another search" not in caplog.text
    again = search(tmp_path / "store", Mine(), first_day, "tuesday")
    assert again.savings.steps_trained == 0
    assert "Another search on this store has set defaults for 'decay'" in caplog.text


def test_a_defaults_attribute_that_is_not_a_dict_is_part_of_the_key() -> None:
    one, two = later(defaults=(1, 2)), later(defaults=(1, 3))
    assert code_identity(type(one)()) == code_identity(type(two)())  # with a version stated, code does not count
    one, two = later(version=None, defaults=(1, 2)), later(version=None, defaults=(1, 3))
    assert code_identity(one) != code_identity(two)
    one, two = later(version=None, defaults={"decay": 0.0}), later(version=None, defaults={"decay": 0.5})
    assert code_identity(one) == code_identity(two)


def test_a_stage_tree_sampler_uses_the_default_of_a_hyperparameter_that_the_space_leaves_out(tmp_path: Path) -> None:
    def written(trial: optuna.Trial) -> dict[str, Any]:
        rate, decay = trial.suggest_float("lr", 0.1, 0.2), trial.suggest_categorical("decay", [0.0, 0.1])
        drop = trial.suggest_float("drop", 0.1, 0.9)
        return {"lr": s.piecewise({0: rate, 15: rate * drop}), "decay": s.piecewise({0: 0.0, 10: decay})}

    def shortened(trial: optuna.Trial) -> dict[str, Any]:
        described = written(trial)
        return described if trial.params["decay"] else {"lr": described["lr"]}

    found = []
    for name, space in (("written", written), ("shortened", shortened)):
        sampler: BaseSampler = StageTreeSampler(RandomSampler(seed=1), radius=0.5)
        study = optuna.create_study(study_name=name, sampler=sampler)
        options: dict[str, Any] = {"metric": "error", "steps": STEPS, "executor": hpstage.InlineExecutor()}
        hpstage.optimize(study, later(defaults={"decay": 0.0}), space, n_trials=20, store=tmp_path / name, **options)
        found.append([trial.params for trial in study.trials])
    assert found[0] == found[1]
    assert len({params["lr"] for params in found[0]}) < 20
