"""The report of a search: its rows against the plan, its page against hostile names, its pictures against nothing."""

from __future__ import annotations

import csv
import html
import json
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import optuna
import pytest

import hpstage
from hpstage import schedule as s
from hpstage.accounts import Totals
from hpstage.algos import FullTraining, SuccessiveHalving
from hpstage.events import NodeId, StageFailed, TargetAsked, TrialId, UserFailure
from hpstage.plan import SearchPlan
from hpstage.report.rows import search_of, stage_rows, trial_rows
from hpstage.result import Result, savings
from hpstage.simulate import SimulatedExecutor
from hpstage.store.memory import MemoryJournal
from tests.pure.searches import WORKLOAD, histories, trial

HOSTILE = "<script>alert('x')</script> & $\\frac{$"


def space(trial: optuna.Trial) -> dict[str, s.Schedule | float]:
    lr = trial.suggest_categorical("lr", [0.2, 0.1])
    first = trial.suggest_categorical("first", [4, 8, 20])
    grow = trial.suggest_categorical("grow", [6, 16])
    return {
        "lr": s.multistep(lr, milestones=[first, 24], gamma=trial.suggest_categorical("gamma", [0.1, 0.3])),
        "batch_size": s.piecewise({0: 64, grow: 128}),
    }


def search(
    journal: MemoryJournal | None = None,
    *,
    name: str = "study",
    n_trials: int = 24,
    metric: str = "value",
    seed: int = 0,
    load_seconds: float = 0.2,
) -> Result:
    """A search on three simulated workers, where everything takes its time."""
    study = optuna.create_study(study_name=name, direction="maximize", sampler=optuna.samplers.RandomSampler(seed=seed))
    return hpstage.optimize(
        study,
        object(),
        space,
        metric=metric,
        steps=32,
        n_trials=n_trials,
        algorithm=SuccessiveHalving(min_steps=8, reduction_factor=2),
        executor=SimulatedExecutor(
            3,
            step_seconds=lambda hp: 0.1 * 64 / float(hp["batch_size"] or 1),
            evaluate_seconds=0.3,
            load_seconds=load_seconds,
            save_seconds=0.1,
            measure=lambda key, step: {metric: int(key, 16) / 16 ** len(key)},
        ),
        store=MemoryJournal() if journal is None else journal,
    )


def handmade(plan: SearchPlan, **changes: object) -> Result:
    """The result of a search that no simulated worker would come to."""
    saved = savings(plan, Totals(), list(plan.trials), failed=0, whole=True, makespan=0.0, workers=0)
    result = Result(optuna.create_study(study_name="handmade"), saved, None, plan, ())
    return replace(result, **changes)  # type: ignore[arg-type]


def read(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


class Links(HTMLParser):
    """What a page loads, and the tags that it has."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [value or "" for name, value in attrs if name in ("src", "href", "srcset", "data")]


@pytest.fixture(scope="module")
def result() -> Result:
    return search()


def test_stages_sum_to_the_totals_of_the_plan(result: Result, tmp_path: Path) -> None:
    rows = read(result.write_report(tmp_path).with_name("stages.csv"))
    totals = result.plan.totals
    assert sum(int(row["steps"]) for row in rows) == totals.steps_trained == result.savings.steps_trained
    for name in ("train_seconds", "load_seconds", "evaluate_seconds", "save_seconds"):
        total = 0.0
        for row in rows:  # as the plan sums: one by one, in the order of the journal
            total += float(row[name])
        assert total == getattr(totals, name)
    assert all(int(row["stop"]) - int(row["start"]) == int(row["steps"]) for row in rows)


def test_trials_sum_to_the_steps_asked_and_their_new_steps_to_the_unique_ones(result: Result, tmp_path: Path) -> None:
    rows = read(result.write_report(tmp_path).with_name("trials.csv"))
    assert len(rows) == 24
    assert sum(int(row["steps_asked"]) for row in rows) == result.plan.steps_asked
    assert sum(int(row["steps_new"]) for row in rows) == result.plan.steps_unique
    assert [float(row["value"]) for row in rows] == [trial.value for trial in result.study.trials]


def test_shared_steps_are_the_prefixes_that_another_trial_was_asked_for_before(result: Result) -> None:
    planned = list(result.plan.trials.values())
    prefixes = []
    for mine in planned:
        added = trial(0, dict(mine.schedules), mine.steps)
        prefixes.append(histories([added], [mine.asked]))
    for i, row in enumerate(trial_rows(result)):
        others = set().union(*prefixes[:i])
        assert row.steps_shared == len(prefixes[i] & others)
        assert row.steps_new == len(prefixes[i] - others)


def test_a_second_search_on_the_same_plan_reports_only_what_it_trained() -> None:
    journal = MemoryJournal()
    first = search(journal, name="first", n_trials=8)
    second = search(journal, name="second", seed=1)
    steps = sum(row.steps for row in stage_rows(second, search_of(second)))
    assert steps == second.savings.steps_trained > 0
    assert second.plan.totals.steps_trained == steps + first.savings.steps_trained


def test_a_search_that_trains_nothing_new_has_a_report(tmp_path: Path) -> None:
    journal = MemoryJournal()
    search(journal, name="first")
    again = search(journal, name="again")
    page = again.write_report(tmp_path).read_text(encoding="utf-8")
    assert "Nothing had to be trained" in page
    assert read(tmp_path / "stages.csv") == []
    rows = read(tmp_path / "trials.csv")
    assert sum(int(row["steps_shared"]) for row in rows) == again.savings.steps_asked > again.savings.steps_unique > 0
    assert all(row["steps_new"] == "0" for row in rows)


def test_the_page_needs_nothing_besides_itself(result: Result, tmp_path: Path) -> None:
    page = result.write_report(tmp_path)
    assert page == tmp_path / "index.html"
    found = Links(page.read_text(encoding="utf-8"))
    assert found.links.count("") == 0 and len(found.links) == 2
    assert all(link.startswith("data:image/png;base64,") for link in found.links)
    assert not {"script", "link", "iframe"} & set(found.tags)
    assert {path.name for path in tmp_path.iterdir()} == {
        "index.html",
        "savings.json",
        "trials.csv",
        "stages.csv",
        "timeline.png",
        "stage_tree.png",
    }
    assert json.loads((tmp_path / "savings.json").read_text()) == result.savings.as_dict()
    assert f"Trial {result.best_trial.number}" in page.read_text(encoding="utf-8")


def test_text_of_the_user_is_escaped_in_the_page_and_taken_literally_in_pictures(tmp_path: Path) -> None:
    result = search(name=HOSTILE, n_trials=4, metric=HOSTILE)
    page = result.write_report(tmp_path).read_text(encoding="utf-8")
    assert "<script" not in page and "script" not in Links(page).tags
    assert page.count(html.escape(HOSTILE)) >= 3  # title, heading, metric


def test_failures_are_shown_with_their_traceback_escaped(tmp_path: Path) -> None:
    plan = SearchPlan(WORKLOAD)
    added = trial(0, {"lr": s.constant(1.0)}, 4)
    failure = UserFailure(summary=f"ValueError: {HOSTILE}", traceback=f"Traceback: {HOSTILE}")
    facts = (added, StageFailed(NodeId(0), 2, False, failure))
    for fact in facts:
        plan.apply(fact)
    plan.apply(TargetAsked(TrialId("study/0"), 4))
    page = handmade(plan, journal=facts).write_report(tmp_path).read_text(encoding="utf-8")
    assert page.count(html.escape(HOSTILE)) == 2 and "<script" not in page
    assert "No trial has been completed." in page


def test_an_empty_search_has_a_report(tmp_path: Path) -> None:
    page = handmade(SearchPlan(WORKLOAD)).write_report(tmp_path / "new" / "folder").read_text(encoding="utf-8")
    assert "No trial has been completed." in page
    assert read(tmp_path / "new" / "folder" / "trials.csv") == []


def test_trials_that_the_plan_does_not_know_are_listed_without_steps(tmp_path: Path) -> None:
    study = optuna.create_study()
    study.optimize(lambda trial: trial.suggest_float("x", 0, 1), n_trials=2)
    handmade(SearchPlan(WORKLOAD), study=study).write_report(tmp_path)
    rows = read(tmp_path / "trials.csv")
    assert [(row["number"], row["steps_asked"]) for row in rows] == [("0", "0"), ("1", "0")]
    assert [float(row["params_x"]) for row in rows] == [trial.params["x"] for trial in study.trials]


def test_a_search_whose_every_value_is_equal_has_a_report(tmp_path: Path) -> None:
    study = optuna.create_study(study_name="flat", sampler=optuna.samplers.RandomSampler(seed=0))
    result = hpstage.optimize(
        study,
        object(),
        space,
        metric="loss",
        steps=32,
        n_trials=4,
        algorithm=FullTraining(),
        executor=SimulatedExecutor(1, measure=lambda key, step: {"loss": 0.0}),
        store=MemoryJournal(),
    )
    assert result.write_report(tmp_path).exists()
