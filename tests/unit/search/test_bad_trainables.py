"""Trainables that cannot be trained, and metrics that are none: named, with the remedy, before others are trained."""

from __future__ import annotations

import math
import string
from typing import Any

import optuna
import pytest
from optuna.trial import TrialState

import hpstage
from hpstage.algorithm import Algorithm
from hpstage.algos import FullTraining, OptunaPruner, SuccessiveHalving
from hpstage.errors import TrainingError, UsageError
from hpstage.store import MemoryJournal
from hpstage.testing.toys import Tape
from tests.unit.search.tapes import search

pytestmark = pytest.mark.sampled(4)

optuna.logging.set_verbosity(optuna.logging.ERROR)


class Half:
    def setup(self, hp): ...
    def train(self, step, hp): ...


@pytest.mark.parametrize(
    ("trainable", "message"),
    [
        (Tape, "Tape is a class: pass an instance"),
        (Half(), "no evaluate and no state_dict and no load_state_dict"),
        (7, "int cannot be trained"),
        ("model", "str cannot be trained"),
        (lambda: None, "must take one argument"),
        (lambda run, more: None, "must take one argument"),
        (None.__class__, "is a class"),
    ],
)
def test_an_invalid_trainable_is_refused_with_the_remedy(trainable, message):
    with pytest.raises(UsageError, match=message):
        search(trainable)


def returning(what: object) -> Tape:
    class Returning(Tape):
        version = "returning"

        def evaluate(self):
            return what if self.score else {"score": 0.0}

    return Returning()


@pytest.mark.parametrize(
    ("what", "message"),
    [
        (None, "returned NoneType; return a dict"),
        (0.5, "returned float; return a dict"),
        ([("score", 1)], "returned list; return a dict"),
        ({"score": "0.5"}, "gave str for 'score'"),
        ({"score": [0.5]}, "gave list for 'score'"),
        ({"score": None}, "gave NoneType for 'score'"),
        ({"score": 10**400}, "gave a number for 'score' that is too large for a float"),
        ({"score": 1.0, "hpstage:steps": 7.0}, "names that begin with hpstage: are reserved"),
        ({1: 0.5}, "the metric 1; names of metrics are str"),
        ({"score": 1.0, "\udce9": 0.5}, r"the metric '\udce9'; names of metrics are str, of valid Unicode"),
    ],
)
def test_invalid_metrics_fail_their_trial_and_are_named(what, message):
    result = search(returning(what), n_trials=1)
    [trial] = result.study.trials
    assert trial.state == optuna.trial.TrialState.FAIL
    assert message in trial.user_attrs["hpstage:failure"]


class ReadsMore(Tape):
    version = "reads more"

    def __init__(self, at: str) -> None:
        super().__init__()
        self.at = at

    def setup(self, hp: Any) -> None:
        super().setup(hp)
        if self.at == "setup":
            assert hp["dropout"]

    def train(self, step: int, hp: Any) -> None:
        assert "dropout" not in hp and hp.get("dropout", 0.5) == 0.5
        if self.at == "train":
            assert hp["dropout"]
        super().train(step, hp)


def test_a_hyperparameter_missing_in_the_space_is_named_before_training_if_setup_reads_it() -> None:
    with pytest.raises(UsageError) as caught:
        search(ReadsMore("setup"))
    first, *traceback = str(caught.value).splitlines()
    assert first == (
        "training cannot begin: KeyError: 'dropout' (the space returns no hyperparameter 'dropout'; it has 'a', 'b')"
    )
    assert any('assert hp["dropout"]' in line for line in traceback)


def test_a_hyperparameter_missing_in_the_space_is_named_in_the_failure_if_a_step_reads_it() -> None:
    [trial] = search(ReadsMore("train"), n_trials=1).study.trials
    assert "the space returns no hyperparameter 'dropout'; it has 'a', 'b'" in trial.user_attrs["hpstage:failure"]


def test_a_hyperparameter_missing_in_the_space_is_named_if_a_training_function_reads_it() -> None:
    def train(run: hpstage.Run) -> None:
        run.attach()
        assert run.hp["dropout"]

    with pytest.raises(UsageError, match=r"^training cannot begin: .*the space returns no hyperparameter 'dropout'"):
        search(train)


def test_a_key_error_of_a_library_is_not_blamed_on_a_missing_hyperparameter() -> None:
    class OfALibrary(Tape):
        version = "of a library"

        def train(self, step: int, hp: Any) -> None:
            string.Template("$weight").substitute({})
            super().train(step, hp)

    [trial] = search(OfALibrary(), n_trials=1).study.trials
    failure = trial.user_attrs["hpstage:failure"]
    assert "KeyError: 'weight'" in failure and "hyperparameter" not in failure


def test_a_dict_of_the_trainable_may_be_empty_until_training_fills_it() -> None:
    class Fills(Tape):
        version = "fills"
        seen: dict[str, float]

        def setup(self, hp: Any) -> None:
            super().setup(hp)
            self.seen = {}

        def train(self, step: int, hp: Any) -> None:
            super().train(step, hp)
            self.seen["last"] = hp["a"]

        def evaluate(self) -> Any:
            return {"score": self.seen["last"]}

        def state_dict(self) -> Any:
            return {"tape": super().state_dict(), "seen": dict(self.seen)}

        def load_state_dict(self, state: Any) -> None:
            super().load_state_dict(state["tape"])
            self.seen = dict(state["seen"])

    assert all(trial.state.name == "COMPLETE" for trial in search(Fills()).study.trials)


MANY = "many metrics"


@pytest.mark.ci
@pytest.mark.parametrize("what", [0.5, None, [("score", 1)], MANY])
def test_metrics_that_are_not_a_mapping_or_too_many_are_refused_before_training(what: object) -> None:
    returned = {f"m{number}": 0.5 for number in range(10**5)} if what == MANY else what

    class Wrong(Tape):
        version = "wrong"

        def train(self, step: int, hp: Any) -> None:
            raise AssertionError("trained")

        def evaluate(self) -> Any:
            return returned

    message = rf"evaluate\(\) returned {type(what).__name__}; return a dict .*, such as {{'accuracy': value}}$"
    if what == MANY:
        message = r"evaluate\(\) returned 100,000 metrics, more than 10,000: log values"
    with pytest.raises(UsageError, match=message):
        search(Wrong())


@pytest.mark.parametrize("value", [True, 3, math.inf, -math.inf])
def test_a_metric_may_be_a_boolean_an_integer_or_infinite(value):
    result = search(returning({"score": value}), n_trials=1)
    assert result.study.trials[0].value == value


def test_a_metric_may_be_a_tensor_of_one_number():
    torch = pytest.importorskip("torch")
    result = search(returning({"score": torch.tensor([0.5])}), n_trials=1)
    assert result.study.trials[0].value == 0.5


def test_a_metric_that_goes_missing_is_named_and_the_store_stays_usable():
    class Forgetful(Tape):
        version = "1"

        def evaluate(self):
            return {"other": 1.0} if self.score else {"other": 0.0, "score": 0.0}

    journal = MemoryJournal()
    with pytest.raises(UsageError, match="gives 'other', but metric='score' was requested"):
        search(Forgetful(), store=journal)
    assert search(Forgetful(), store=journal, metric="other").study.best_value == 1.0


@pytest.mark.parametrize("name", ["score", "train_score"])
def test_a_metric_may_be_missing_before_the_first_step(name):
    class Late(Tape):
        version = "3"

        def evaluate(self):
            return {"other": 1.0, **({name: 1.0} if self.score else {})}

        def name_of(self, part):
            return "score" if part is None else f"{part}_score"

    assert search(Late(), metric=name).study.best_value == 1.0
    with pytest.raises(UsageError, match="gives 'other', but metric='scor'"):
        search(Late(), metric="scor")


@pytest.mark.ci
@pytest.mark.parametrize("algorithm", [FullTraining(), SuccessiveHalving(2, 2), OptunaPruner()], ids=repr)
def test_trials_without_the_metric_fail_and_the_search_continues(algorithm: Algorithm) -> None:
    class Forgetful(Tape):
        version = "2"

        def evaluate(self):
            return {"other": 1.0, **({} if self.score == most else {"score": self.score})}

    most = max(trial.value for trial in search(steps=2).study.trials)
    study = search(Forgetful(), steps=2, algorithm=algorithm).study
    failed = [trial for trial in study.trials if trial.state == TrialState.FAIL]
    assert 0 < len(failed) < len(study.trials) == 8
    for trial in failed:
        assert "the trainable gives 'other', but metric='score' was" in trial.user_attrs["hpstage:failure"]


def test_a_failure_that_catch_does_not_name_stops_the_search_and_keeps_the_journal():
    journal = MemoryJournal()
    with pytest.raises(TrainingError, match="returned NoneType"):
        search(returning(None), store=journal, catch=())
    assert len(journal) > 3
