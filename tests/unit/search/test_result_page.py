"""What a notebook shows of a result."""

from __future__ import annotations

import optuna
import pytest

import hpstage
from hpstage.store import MemoryJournal
from hpstage.testing.toys import Tape


def searched(name: str, **options: object) -> hpstage.Result:
    study = optuna.create_study(study_name=name, sampler=optuna.samplers.RandomSampler(seed=0), **options)  # type: ignore[arg-type]
    return hpstage.optimize(
        study,
        Tape(),
        lambda trial: {"a": trial.suggest_int("a", 1, 3), "<b>": trial.suggest_categorical("kind", ["<i>", "<u>"])},
        metric="score" if len(study.directions) == 1 else ["score", "hash"],
        steps=4,
        n_trials=6,
        executor=hpstage.InlineExecutor(),
        store=MemoryJournal(),
    )


def test_the_html_of_a_result_shows_the_best_trial_and_the_merge_rate() -> None:
    result = searched("digits")
    html = result._repr_html_()
    assert f"Best trial {result.best_trial.number}: score <b>{result.best_value:.6g}</b>" in html
    assert "6 complete" in html and "merge rate" in html and len(html) < 5_000


def test_the_html_of_a_result_with_several_objectives_shows_the_best_trials() -> None:
    result = searched("digits", directions=["maximize", "minimize"])
    assert result._repr_html_().count("Best trial") == min(5, len(result.best_trials))


def test_the_html_of_a_result_escapes_names_and_values_of_the_user() -> None:
    html = searched("<script>alert(1)</script>")._repr_html_()
    assert "<script>" not in html and "<i>" not in html and "<u>" not in html


@pytest.mark.ci
def test_the_repr_of_a_result_takes_one_line() -> None:
    one, several = searched("digits"), searched("digits", directions=["maximize", "minimize"])
    merged = f"merge_rate={one.savings.merge_rate:.2f}, store='')"
    assert repr(one) == f"Result(study='digits', trials=6, best_value={one.best_value:.6g}, {merged}"
    assert repr(several) == f"Result(study='digits', trials=6, {merged}"
