"""Runs without a search: each is a trial trained from scratch, and no step is trained twice."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import optuna
import pytest

import hpstage
from hpstage import schedule as s
from hpstage.errors import TrainingError, UsageError
from hpstage.report import open_book, write_report
from hpstage.report.tree.book_rows import rows_of
from hpstage.testing.toys import Failing, Tape, alone
from tests.unit.reports import Page
from tests.unit.search.tape_runs import HP, STEPS, NeverSetUp, exact, inline, search, train, trained

optuna.logging.set_verbosity(optuna.logging.ERROR)
# --- runs -------------------------------------------------------------------------------------------------


def test_a_run_is_an_exact_trial_of_the_study_named_runs(tmp_path: Path) -> None:
    run = train(tmp_path)
    assert (run.id, run.study, run.planned.steps) == ("runs/0", "runs", STEPS)
    assert exact(run)
    assert hpstage.open(tmp_path).best_trial("runs").id == run.id


def test_training_the_same_run_again_trains_no_step_and_adds_no_trial(tmp_path: Path) -> None:
    run = train(tmp_path)
    again = train(tmp_path, {"wd": 0.25, "lr": s.cosine(0.5, T_max=STEPS).until(STEPS)})
    assert again.id == run.id
    assert hpstage.open(tmp_path).trials == ["runs/0"]
    assert trained(again) == STEPS


def test_runs_of_several_configurations_share_steps_and_equal_configurations_are_one_run(tmp_path: Path) -> None:
    late = {**HP, "wd": s.piecewise({0: 0.25, 6: 0.5})}
    runs = train(tmp_path, [HP, late, HP])
    assert [run.id for run in runs] == ["runs/0", "runs/1", "runs/0"]
    assert all(map(exact, runs))
    assert trained(runs[0]) == STEPS + 2


def test_searches_and_runs_on_one_store_reuse_the_steps_of_each_other(tmp_path: Path) -> None:
    train(tmp_path)
    result = search(tmp_path, lambda trial: {**HP, "wd": trial.suggest_categorical("wd", [0.25])}, n_trials=1)
    assert result.savings.steps_trained == 0
    assert train(tmp_path, HP, study="others").id == "others/0"
    assert trained(result.trial(0)) == STEPS


@pytest.mark.ci
def test_an_interrupted_run_can_be_continued_even_after_another_run(tmp_path: Path) -> None:
    class Stopped(Tape):
        stops = True

        def train(self, step: int, hp: Mapping[str, Any]) -> None:
            if step == 5 and type(self).stops:
                raise KeyboardInterrupt
            super().train(step, hp)

    with pytest.raises(KeyboardInterrupt):
        train(tmp_path, trainable=Stopped(), checkpoint_every=2)
    assert [row.state for row in rows_of(open_book(tmp_path)).branches.values()] == ["interrupted"]
    Stopped.stops = False
    other = train(tmp_path, {**HP, "wd": 0.5}, trainable=Stopped())
    run = train(tmp_path, trainable=Stopped(), checkpoint_every=2)
    assert (other.id, run.id) == ("runs/1", "runs/0")
    assert exact(run)
    assert trained(run) == 2 * STEPS  # of the first run, 4 or 5 steps before it was stopped


@pytest.mark.ci
def test_savings_of_a_run_are_shown_only_if_the_run_has_a_branch(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def shown() -> set[str]:
        page = Page(write_report(tmp_path / "report", tmp_path / "store"))
        return {"Merge rate", "Saved", "Worker time without sharing"} & ({row[0] for row in page.rows} | {*page.texts})

    run = train(tmp_path / "store", show_progress_bar=True)
    assert shown() == set()
    assert not {"merge rate", "saved", "without sharing"} & {
        name for name, _ in open_book(tmp_path / "store").savings.rows()
    }
    last = capsys.readouterr().err.splitlines()[-1]
    assert f"{STEPS} steps trained" in last and "saved" not in last and "merge rate" not in last
    run.branch(at=4, lr=0.1, **inline())
    assert shown() == {"Merge rate", "Saved", "Worker time without sharing"}


def test_the_error_of_an_interrupted_run_says_that_the_same_call_continues(tmp_path: Path) -> None:
    class Stopped(Tape):
        def train(self, step: int, hp: Mapping[str, Any]) -> None:
            if step == 5:
                signal.raise_signal(signal.SIGINT)
            super().train(step, hp)

    with pytest.raises(KeyboardInterrupt, match=r"all progress is kept: the same call continues$"):
        train(tmp_path, trainable=Stopped())


def test_a_failed_run_raises_the_error_and_is_trained_again_by_the_next_call(tmp_path: Path) -> None:
    class Repaired(Failing):
        fails = True

        def train(self, step: int, hp: Mapping[str, Any]) -> None:
            if step == 5 and type(self).fails:
                raise ZeroDivisionError("the user's own error")
            Tape.train(self, step, hp)

    with pytest.raises(TrainingError, match=r"^a trial failed: .*the user's own error"):
        train(tmp_path, trainable=Repaired(), checkpoint_every=2)
    failed = hpstage.open(tmp_path).trial("runs/0")
    with pytest.raises(UsageError, match=r"^trial runs/0 has no metrics; give the step of a saved state: \[2, 4"):
        failed.step()
    with pytest.raises(UsageError, match=r"^trial runs/0 has no value of 'score'$"):
        failed.step("best")
    Repaired.fails = False
    run = train(tmp_path, trainable=Repaired())
    assert run.id == "runs/1"
    assert run.metrics[STEPS] == alone(run.schedules, STEPS).evaluate()
    assert trained(run) == STEPS


def test_a_run_without_a_metric_uses_the_first_metric_of_the_untrained_model(tmp_path: Path) -> None:
    run = train(tmp_path, metric=None)
    started = run.plan.searches["runs"].started
    assert (started.metric, started.directions) == (("score",), ("maximize",))
    assert run.step("best") == STEPS


def test_a_metric_that_a_trained_run_lacks_is_refused_with_the_available_metrics(tmp_path: Path) -> None:
    train(tmp_path)
    with pytest.raises(UsageError, match="the trainable gives 'hash', 'score', but metric='scor' was requested"):
        train(tmp_path, metric="scor")


def test_the_error_of_a_run_without_a_metric_says_why_the_untrained_model_has_none(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no metric, since it raised ValueError: not before setup; give metric="):
        train(tmp_path, trainable=NeverSetUp(), metric=None)


@pytest.mark.parametrize("metric", ["val_loss", "rmse"])
def test_runs_minimize_metrics_named_like_losses_or_errors(metric: str, tmp_path: Path) -> None:
    class Named(Tape):
        def evaluate(self) -> Mapping[str, float]:
            return {metric: self.score}

    run = train(tmp_path, trainable=Named(), metric=None)
    assert run.plan.searches["runs"].started.directions == ("minimize",)


@pytest.mark.parametrize(
    ("hp", "steps", "message"),
    [
        ({"lr": s.linear(0.1).until(5)}, 8, "hyperparameter 'lr': the schedule ends at step 5"),
        ({"lr": [0.1, 0.2]}, 8, "hyperparameter 'lr': a list is not a value"),
        (3, 8, "give {'lr': 0.1"),
        ([], 8, "give {'lr': 0.1"),
        ([3], 8, "a configuration is 3"),
        ({}, 8, "there are no hyperparameters"),
        (HP, 0, "steps is 0"),
        ({"lr": 0.1, "steps": 3}, 8, "'steps': the name has another meaning"),
    ],
)
def test_an_invalid_configuration_of_a_run_is_refused(hp: object, steps: int, message: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=message):
        train(tmp_path, hp, steps)


@pytest.mark.ci
def test_a_run_uses_another_study_name_if_a_search_already_has_the_name_runs(tmp_path: Path) -> None:
    study = optuna.create_study(study_name="runs", direction="maximize")
    settings: dict[str, Any] = {"metric": "score", "steps": STEPS, "n_trials": 1, "store": tmp_path, **inline()}
    hpstage.optimize(study, Tape(), lambda trial: {**HP, "wd": 0.5}, **settings)
    run = train(tmp_path)
    assert run.id == train(tmp_path).id == f"{run.study}/0" != "runs/0"
    assert hpstage.open(tmp_path).trials == ["runs/0", run.id]


# --- differences ------------------------------------------------------------------------------------------


def test_a_diff_shows_at_which_step_and_in_which_schedules_two_trials_diverge(tmp_path: Path) -> None:
    run = train(tmp_path, checkpoint_every=2, evaluate_every=2)
    branch = run.branch(4, lr=0.03, evaluate_every=2, **inline())
    diff = run.diff(branch)
    assert (diff.trials, diff.step) == ((run.id, branch.id), 4)
    assert diff.schedules == {"lr": (run.schedules["lr"], branch.schedules["lr"])}
    assert diff.metrics.keys() == {2, 4, 6, 8}
    assert diff.metrics[4]["score"][0] == diff.metrics[4]["score"][1]
    assert diff.metrics[6]["score"] == (run.metrics[6]["score"], branch.metrics[6]["score"])
    assert diff.tensor is not None
    assert diff.tensor[0] == 6
    assert "the same for 4 steps" in repr(diff)
    assert "differs in their states at step 6: " in repr(diff)
    assert run.diff(run).step is None
    assert "the same for all 8 steps" in repr(run.diff(run))
    longer = run.extend(STEPS + 4, **inline())
    assert "the same for 8 steps; runs/2 has 4 more" in repr(run.diff(longer))
    assert repr(longer.diff(run)).startswith("runs/2 and runs/0: the same for 8 steps; runs/2 has 4 more")


def test_a_diff_does_not_list_equal_schedules_that_are_written_differently(tmp_path: Path) -> None:
    one, other = train(
        tmp_path, [{"a": s.multistep(1.0, [4]), "b": 1.0}, {"a": s.piecewise({0: 1.0, 4: 0.1}), "c": 1.0}]
    )
    diff = one.diff(other)
    assert diff.step == 0
    assert diff.schedules.keys() == {"b", "c"}
    assert diff.schedules["b"] == (s.constant(1.0).until(STEPS), None)
