"""Arguments, names, numbers and spaces of all kinds: refused by name before anything is trained, or as they are."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy
import optuna
import pytest

import hpstage
from hpstage import schedule as s
from hpstage.algos import SuccessiveHalving
from hpstage.errors import UsageError
from hpstage.plan.facts import SearchStarted
from hpstage.store import MemoryJournal
from hpstage.testing.toys import Tape
from tests.unit.search.tapes import check_values, search, space

pytestmark = pytest.mark.sampled(8)

optuna.logging.set_verbosity(optuna.logging.ERROR)


@pytest.fixture
def no_log() -> Iterator[None]:
    """Nothing is logged: Optuna's log would hold a name that is no Unicode, and so would the test's report, which
    pytest-xdist could not send."""
    logging.disable()
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize(
    ("option", "match"),
    [
        (
            {"n_workers": 2},
            r"optimize\(\) got an unexpected .* 'n_workers'; n_workers: .*hpstage\.local_cluster\(n_workers=4\)",
        ),
        ({"n_jobs": 2}, r"optimize\(\) got an unexpected .* 'n_jobs'; n_jobs: .*hpstage\.local_cluster\(n_workers=4\)"),
        ({"gc_after_trial": True}, r"optimize\(\) got an unexpected .* 'gc_after_trial'; gc_after_trial: leave it out"),
        ({"n_job": 2}, r"optimize\(\) got an unexpected keyword argument 'n_job'$"),
    ],
    ids=str,
)
def test_an_argument_of_optuna_optimize_is_named_with_its_replacement(option: dict[str, Any], match: str) -> None:
    with pytest.raises(TypeError, match=match):
        hpstage.optimize(optuna.create_study(), Tape(), lambda trial: {"a": 1}, metric="score", steps=2, **option)


@pytest.mark.parametrize("option", ["executor", "store", "checkpoints"])
def test_an_argument_with_more_digits_than_python_prints_is_refused_by_name(option: str) -> None:
    with pytest.raises(UsageError, match=f"{option}.*<int>"):
        hpstage.optimize(
            optuna.create_study(),
            Tape(),
            lambda trial: {"a": 1},
            metric="score",
            steps=2,
            n_trials=1,
            **{"executor": hpstage.InlineExecutor(), option: 10**5000},  # type: ignore[arg-type]
        )


def test_a_pair_of_betas_is_refused_with_advice_to_use_two_hyperparameters() -> None:
    with pytest.raises(UsageError, match=r"hyperparameter 'betas': .* 'beta1' and 'beta2'"):
        hpstage.optimize(
            optuna.create_study(), Tape(), lambda trial: {"betas": (0.9, 0.98)}, metric="score", steps=2, n_trials=1
        )


@pytest.mark.usefixtures("no_log")
@pytest.mark.parametrize("what", ["study_name", "metric"])
def test_study_and_metric_names_that_are_not_valid_unicode_are_refused(what: str) -> None:
    bad = "\udcff"  # what a byte that is no UTF-8 becomes on a command line
    study = optuna.create_study(study_name=bad if what != "metric" else "study")
    with pytest.raises(UsageError, match=rf"{what} is '\\udcff'; give another, which is valid Unicode"):
        hpstage.optimize(
            study,
            Tape(),
            space,
            metric=bad if what == "metric" else "score",
            steps=8,
            n_trials=1,
            executor=hpstage.InlineExecutor(),
            store=MemoryJournal(),
        )


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"catch": ("ValueError",)}, "catch is ('ValueError',); give classes of exceptions"),
        ({"catch": 5}, "catch is 5; give classes"),
        ({"callbacks": [5]}, "callbacks is [5]; give functions of the study and a trial"),
        ({"metric": None}, "metric is None; give the name"),
        ({"store": 5}, "store is 5; give a folder or a URL, or a Journal, or None"),
        ({"store": b"plan"}, "store is b'plan'"),
        ({"checkpoints": 5}, "checkpoints is 5; give a folder or a URL, or a CheckpointStore, or None"),
        ({"store": "nosuch://plan"}, "there is no store of the kind nosuch://"),
        ({"store": "redis://127.0.0.1:1"}, "give checkpoints=, a location that all of them can reach"),
        *(
            ({switch: wrong}, f"{switch} is {wrong!r}; give True or False")
            for switch in ("extend", "sharing")
            for wrong in (0, 1, None, "", "abc", [], numpy.False_)
        ),
        *(
            ({name: wrong}, f"{name} is {wrong!r}; give a whole number of at least {least}")
            for name, least in {"steps": 1, "n_trials": 0, "evaluate_every": 1, "checkpoint_every": 1}.items()
            for wrong in (numpy.int64(least - 1), numpy.float64(5), numpy.True_)
        ),
        ({"timeout": numpy.float32("nan")}, "give a number of seconds above 0"),
        ({"checkpoint_budget": numpy.int64(-1)}, "give bytes: a whole number, or a text"),
    ],
)
def test_invalid_arguments_are_named_before_workers_are_started(option: dict[str, Any], message: str) -> None:
    executor = hpstage.InlineExecutor()
    executor.open = None  # type: ignore[assignment, method-assign]  # were it called, this would be a TypeError
    with pytest.raises(UsageError, match=re.escape(message)):
        search(executor=executor, **option)


def test_numpy_integers_are_accepted_and_recorded_as_python_integers() -> None:
    """Nothing that is recorded shows which were given, so that either resumes the other's search."""

    def started(kind: Callable[[int], Any]) -> SearchStarted:
        counts = {"steps": 8, "n_trials": 4, "evaluate_every": 4, "checkpoint_every": 3, "checkpoint_budget": 10**6}
        result = search(
            algorithm=SuccessiveHalving(min_steps=kind(2), reduction_factor=kind(2)),
            timeout=numpy.float32(600),
            **{name: kind(number) for name, number in counts.items()},
        )
        [fact] = [fact for fact in result.journal if isinstance(fact, SearchStarted)]
        return msgspec.structs.replace(fact, study="", identity="", at=0.0)

    assert started(numpy.int64) == started(numpy.int32) == started(int)


# --- names, numbers and sizes -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["", " ", "лр", "学習率", "a\nb", "a/b", '"', "__proto__", "x" * 10_000, "\0", "self"])
def test_a_hyperparameter_may_have_any_text_as_its_name(tmp_path, name):
    result = search(make=lambda trial: {name: trial.suggest_categorical("a", [1, 2])}, store=tmp_path, n_trials=2)
    check_values(result)
    assert search(make=lambda trial: {name: 1}, store=tmp_path, n_trials=1).savings.steps_trained == 0


@pytest.mark.parametrize("value", [2**53, 2**53 + 1, 2**63, -(2**63) - 1, 1e308, 5e-324, -0.0])
def test_hyperparameter_values_are_exact_or_refused_if_they_do_not_fit_64_bits(tmp_path, value):
    def make(trial: optuna.Trial) -> dict[str, object]:
        return {"a": s.piecewise({0: 1, 3: value})}

    if isinstance(value, int) and not -(2**63) <= value < 2**64:
        with pytest.raises(UsageError, match="does not fit 64 bits"):
            search(make=make, store=tmp_path, n_trials=1)
        return
    check_values(search(make=make, store=tmp_path, n_trials=1))
    assert search(make=make, store=tmp_path, n_trials=1).savings.steps_trained == 0


def test_each_of_two_cosine_schedules_of_ten_thousand_steps_is_trained_once(tmp_path):
    def make(trial: optuna.Trial) -> dict[str, object]:
        return {"a": s.cosine(float(trial.suggest_categorical("a", [1, 2])), 10_000), "b": 1}

    result = search(make=make, steps=10_000, n_trials=4, checkpoint_every=None, store=tmp_path)
    assert result.savings.steps_trained == 20_000
    assert search(make=make, steps=10_000, n_trials=4, store=tmp_path).savings.steps_trained == 0


def test_a_search_may_have_three_hundred_trials_of_one_step():
    study = optuna.create_study(direction="maximize", sampler=optuna.samplers.RandomSampler(seed=0))
    result = hpstage.optimize(
        study,
        Tape(),
        lambda trial: {"a": trial.suggest_int("a", 1, 100)},
        metric="score",
        steps=1,
        n_trials=300,
        executor=hpstage.InlineExecutor(),
        store=MemoryJournal(),
    )
    assert [trial.value for trial in study.trials] == [0.0 + trial.params["a"] for trial in study.trials]
    assert result.savings.steps_trained == len({trial.params["a"] for trial in study.trials})


def test_an_optuna_objective_as_trainable_fails_with_advice_to_suggest_in_the_space() -> None:
    def objective(trial: Any) -> float:
        return float(trial.suggest_float("x", 0.0, 1.0))

    [trial] = search(objective, n_trials=1).study.trials
    assert "is given a run, not a trial; suggest in space(trial)" in trial.user_attrs["hpstage:failure"]


def test_a_swapped_space_and_training_function_are_refused() -> None:
    def train(run):
        run.attach()
        for _ in run.steps():
            run.report(value=run.hp["a"])

    def space(trial):
        return {"a": trial.suggest_float("a", 0.0, 1.0)}

    study = optuna.create_study()
    with pytest.raises(UsageError, match=r"used .attach, which only a run has: are the arguments swapped\?"):
        hpstage.optimize(study, space, train, metric="value", steps=2, n_trials=1, executor=hpstage.InlineExecutor())
    assert not study.trials


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"audit": "always"}, "audit is 'always'; give one of 'idle', 'winner', 'off'"),
        ({"audit": True}, "audit is True; give one of"),
        ({"audit_budget": -0.1}, "audit_budget is -0.1; give a number that is at least 0"),
        ({"audit_budget": math.nan}, "audit_budget is nan; give a number"),
        ({"audit_budget": math.inf}, "audit_budget is inf; give a number"),
        ({"audit_budget": True}, "audit_budget is True; give a number"),
        ({"audit_budget": "5 %"}, "audit_budget is '5 %'; give a number"),
        ({"audit_budget": None}, "audit_budget is None; give a number"),
    ],
)
def test_invalid_audit_arguments_are_named_before_the_journal_is_written(given: dict[str, Any], message: str) -> None:
    journal = MemoryJournal()
    with pytest.raises(UsageError, match=re.escape(message)):
        search(store=journal, **given)
    assert len(journal) == 0


def test_a_search_succeeds_without_audits_on_an_executor_that_cannot_audit() -> None:
    result = search(audit="idle", audit_budget=0)
    check_values(result)
    assert str(result.audit).startswith("nothing was audited")
    assert not result.audit.figures and result.audit.line == ""


@pytest.mark.ci
@pytest.mark.parametrize("storage", [None, "sqlite:///{}/study.db"])
def test_changed_choices_of_a_parameter_are_refused_and_leave_no_trial(storage: str | None, tmp_path: Path) -> None:
    study = optuna.create_study(
        storage=storage and storage.format(tmp_path), sampler=optuna.samplers.RandomSampler(seed=0)
    )

    def search(space: Any) -> None:
        hpstage.optimize(
            study, Tape(), space, metric="score", steps=2, n_trials=2, executor=hpstage.InlineExecutor(), store=tmp_path
        )

    search(lambda trial: {"a": trial.suggest_categorical("a", [1, 2])})
    for wider in (
        lambda trial: {"a": trial.suggest_categorical("a", [1, 2, 3])},
        lambda trial: {"a": trial.suggest_int("a", 1, 3)},
    ):
        with pytest.raises(
            UsageError, match=r"'a' is .* in trial 0 of study .*, but .* in the space\. Use another study"
        ):
            search(wider)
    assert len(study.trials) == 2

    def later(trial: optuna.Trial) -> dict[str, object]:
        first = trial.suggest_categorical("b", ["x", "y"])
        return {
            "a": trial.suggest_categorical("a", [1, 2]) if trial.number < 4 else trial.suggest_int("a", 1, 2),
            "b": first,
        }

    search(later)
    with pytest.raises(UsageError, match=r"'a' is .* in the space"):
        search(later)
