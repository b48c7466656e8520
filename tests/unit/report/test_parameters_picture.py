"""The picture of parameters: their importances, and the trials' values."""

from __future__ import annotations

import math

import optuna
import pytest
from matplotlib.collections import LineCollection

import hpstage
from hpstage.accounting.book import open_book
from hpstage.algos import FullTraining
from hpstage.report import (
    draw_parameters,
)
from hpstage.report.pictures import style
from hpstage.report.pictures.parameters import _Column, importances
from hpstage.store.memory import MemoryJournal
from hpstage.testing.toys import Tape
from tests.unit.pictures import HOSTILE, continuous, search, texts

pytestmark = pytest.mark.sampled(10)

optuna.logging.set_verbosity(optuna.logging.ERROR)


def test_the_parameter_that_decides_the_value_has_the_highest_importance() -> None:
    numbers = [(i % 7, i % 3, i) for i in range(40)]
    trials = [({"lr": 10.0**-a, "kind": "xyz"[b], "seed": c}, float(a) + 0.01 * b) for a, b, c in numbers]
    found = importances(trials, maximize=True)
    assert next(iter(found)) == "lr" and found["lr"] > 0.5
    assert sum(found.values()) == pytest.approx(1.0)
    assert found == importances(trials, maximize=True)


def test_parameter_importance_accepts_infinite_nan_none_and_boolean_categories() -> None:
    choices = [math.inf, math.nan, None, True, 1, "1"]
    trials = [({"clip": choices[i % 6]}, float(i % 6)) for i in range(24)]
    assert importances(trials, maximize=True) == {"clip": 1.0}
    assert len(_Column([params["clip"] for params, _ in trials]).ticks) == 5  # 1 and "1" have one text


def test_the_parameters_picture_draws_values_and_names_as_literal_text() -> None:
    run = hpstage.optimize(
        optuna.create_study(study_name="study", sampler=optuna.samplers.RandomSampler(seed=1)),
        Tape(),
        lambda trial: {
            "a": trial.suggest_categorical(HOSTILE, [1, 2, 3]) + trial.suggest_float("b", 1e-4, 1.0, log=True),
            "b": float(trial.suggest_categorical("kind", ["<i>x", "y"]) == "y"),
        },
        metric="score",
        steps=2,
        n_trials=12,
        executor=hpstage.InlineExecutor(),
        store=(journal := MemoryJournal()),
    )
    assert len(run.study.trials) == 12
    figure = draw_parameters(open_book(journal))
    above, below = figure.axes
    assert len(above.patches) == 3
    [lines] = [found for found in below.collections if len(found.get_paths()) == 12]
    assert all(-0.01 <= y <= 1.01 for path in lines.get_paths() for _, y in path.vertices)
    said = texts(figure)
    assert any("<i>x" in text for text in said) and not any("\x1b" in text for text in said)
    assert style.svg(figure)


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (math.inf, "No parameters can be compared: too few trials are complete."),
        (0.9, "Importances of parameters cannot be computed: all completed trials have the same value."),
    ],
)
def test_the_parameters_picture_compares_nothing_if_all_values_are_infinite_or_equal(value: float, shown: str) -> None:
    _, journal = search(measure=lambda key, step: {"value": value})
    assert texts(draw_parameters(open_book(journal))) == [shown]


def test_the_parameters_picture_compares_parameters_within_a_study() -> None:
    _, journal = search()
    search(journal, name="other", space=continuous, seed=3)
    search(journal, name="tiny", n_trials=2)
    figure = draw_parameters(open_book(journal))
    assert len(figure.axes) == 4  # two of each study with trials enough
    for own, (name, above, below) in zip(
        figure.subfigs, [("study", *figure.axes[:2]), ("other", *figure.axes[2:])], strict=True
    ):
        [whole, part] = (texts(one) for one in (draw_parameters(open_book(journal, name)), own))
        assert [f"{whole[-1]}: {name}" if text == whole[-1] else text for text in whole] == part
        assert {above.figure, below.figure} == {own}
    alone = draw_parameters(open_book(journal, "tiny"))
    assert texts(alone) == ["No parameters can be compared: too few trials are complete."]
    assert style.svg(figure, 3.7)


def test_the_parameters_picture_draws_trials_of_equal_value_in_one_colour() -> None:
    _, journal = search(measure=lambda key, step: {"value": float(key > "8")}, algorithm=FullTraining())
    [*_, below] = draw_parameters(book := open_book(journal)).axes
    lines = next(found for found in below.collections if isinstance(found, LineCollection))
    assert len(lines.get_colors()) == len(book.values) == 24 and len({*map(tuple, lines.get_colors())}) == 2
