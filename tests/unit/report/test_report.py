"""The report of a plan: its figures against the study's and against each other, its page against hostile names."""

from __future__ import annotations

import json
import math
import re
from dataclasses import fields
from fractions import Fraction
from pathlib import Path

import msgspec
import optuna
import pytest
from hypothesis import given
from hypothesis import strategies as st

import hpstage
from hpstage import schedule as s
from hpstage.accounting.book import undominated
from hpstage.accounting.failures import failures_of
from hpstage.accounting.savings import Savings
from hpstage.accounting.tables import cell
from hpstage.algos import FullTraining, PopulationBasedTraining
from hpstage.errors import StoreError, UsageError
from hpstage.errors.text import duration
from hpstage.execution.simulated import SimulatedExecutor
from hpstage.plan.facts import (
    ChainId,
    ForkVerified,
    NodeId,
    SearchStarted,
    StageFailed,
    StateDiffers,
    StateReached,
    TargetAsked,
    TrialAdded,
    TrialEnded,
    TrialId,
    TrialProposed,
    UserFailure,
    WorkerId,
)
from hpstage.plan.log import open_plan, read_facts
from hpstage.report import open_book, write_report
from hpstage.search.results.result import Result
from hpstage.store.memory import MemoryJournal
from hpstage.testing.toys import Tape
from tests.records import separated
from tests.unit.reports import HOSTILE, Page, cut, read, search, space, write
from tests.unit.searches import WORKLOAD, Search, histories, trial

pytestmark = pytest.mark.sampled(10)

optuna.logging.set_verbosity(optuna.logging.ERROR)

STUDIES = ("early", "later")
PARTS = ("train_seconds", "load_seconds", "evaluate_seconds", "save_seconds")


@pytest.fixture(scope="module")
def journal() -> MemoryJournal:
    """Of two studies on one plan."""
    journal = MemoryJournal()
    early, later = STUDIES
    search(journal, name=early)
    search(journal, name=later, seed=1, algorithm=FullTraining())
    return journal


@pytest.fixture(scope="module")
def reported(tmp_path_factory: pytest.TempPathFactory) -> tuple[Result, Path]:
    """A search, and the page of its report."""
    result = search()
    return result, result.write_report(tmp_path_factory.mktemp("reported") / "new" / "folder")


@pytest.fixture(scope="module")
def places(journal: MemoryJournal, tmp_path_factory: pytest.TempPathFactory) -> dict[str | None, Path]:
    """Reports of two studies on one plan, and of the plan."""
    folder = tmp_path_factory.mktemp("places")
    return {study: write_report(folder / (study or "plan"), journal, study=study).parent for study in (*STUDIES, None)}


def exact(rows: list[dict[str, str]], *names: str) -> Fraction:
    return sum((Fraction(float(row[name])) for row in rows for name in names), Fraction(0))


def check_balance(folder: Path) -> None:
    """The tables and the figures of a page agree, to the last bit."""
    trials, stages, workers = (read(folder / f"{name}.csv") for name in ("trials", "stages", "workers"))
    saved = json.loads((folder / "savings.json").read_text())
    assert exact(trials, "seconds_used") == exact(stages, *PARTS) + exact(workers, "wasted_seconds")
    assert exact(trials, "seconds_used") + exact(trials, "seconds_saved") == exact(trials, "seconds_alone")
    assert exact(trials, "seconds_used") == saved["worker_seconds"]
    assert exact(trials, "seconds_alone") == saved["worker_seconds_alone"]
    assert exact(trials, "seconds_saved") == saved["saved_seconds"]
    assert [exact(stages, part) for part in PARTS] == [saved[part] for part in PARTS]
    assert exact(workers, "wasted_seconds") == saved["wasted_seconds"]
    steps = sum(int(row["stop"]) - int(row["start"]) for row in stages)
    assert steps == sum(int(row["steps"]) for row in workers) == saved["steps_trained"]
    assert sum(int(row["steps_asked"]) for row in trials) == saved["steps_asked"]
    assert len(trials) == saved["trials"]


@pytest.mark.ci
def test_a_search_that_was_refused_before_its_first_trial_is_in_no_report(tmp_path: Path) -> None:
    """A misspelt metric would be that of the tree and of all pictures, and the search one that has not ended."""
    journal = MemoryJournal()

    def searched(name: str, metric: str) -> None:
        study = optuna.create_study(study_name=name, sampler=optuna.samplers.RandomSampler(seed=0))
        executor = hpstage.InlineExecutor()
        hpstage.optimize(study, Tape(), space, metric=metric, steps=8, n_trials=2, executor=executor, store=journal)

    searched("digits", "score")
    with pytest.raises(UsageError, match="metric='acc' was requested"):
        searched("misspelt", "acc")
    book = open_book(journal)
    assert (book.studies, book.metric) == (["digits"], "score")
    assert book.best is not None
    page = Page(write_report(tmp_path, journal))
    assert "misspelt" not in page.text
    assert "not ended" not in page.text


@pytest.mark.ci
def test_the_report_of_a_plan_with_one_study_has_the_figures_of_the_search_result(
    reported: tuple[Result, Path], tmp_path: Path
) -> None:
    result, reported_by_result = reported
    journal = MemoryJournal()
    write(journal, *result.journal)
    mine = open_book(journal).savings
    reports = sum(isinstance(fact, StateReached) for fact in result.journal)
    for field in fields(Savings):
        said, expected = getattr(mine, field.name), getattr(result.savings, field.name)
        if field.name == "makespan":
            assert said == expected >= mine.lower_bound_seconds > 0
        elif "seconds" in field.name or field.name == "cost_weighted_merge_rate":
            assert said == pytest.approx(expected, abs=reports * 2.0**-20, rel=0), field.name
        else:
            assert said == expected, field.name
    assert mine.paid_seconds > mine.worker_seconds
    reported_by_journal = write_report(tmp_path, journal)
    for page in (reported_by_journal, reported_by_result):
        check_balance(page.parent)
        shown = Page(page)
        assert shown.row("Trials")[0] == "24"
        assert shown.row("Steps requested")[0] == f"{result.savings.steps_asked:,}"
        assert shown.row("Unique steps among them")[0] == f"{result.savings.steps_unique:,}"
        assert shown.row("Steps trained")[0] == f"{result.savings.steps_trained:,}"
        assert shown.row("Merge rate")[0] == f"{result.savings.merge_rate:.2f}"
        assert shown.row("Busy worker time")[0] == duration(result.savings.worker_seconds)
        assert shown.row("Allocated worker time")[1].endswith("% busy")
        assert shown.row("Saved")[0] == duration(result.savings.saved_seconds)
        assert shown.row("Makespan")[1].startswith("on 3 workers, ")
    assert reported_by_journal.read_bytes() == reported_by_result.read_bytes()


def test_the_makespan_lasts_from_the_start_of_the_first_stage_to_the_last_report() -> None:
    run = Search(SimulatedExecutor(1, step_seconds=2.0, evaluate_seconds=1.0, load_seconds=0.5, save_seconds=0.25))
    run.run([trial(0, {"a": s.constant(1)}, 8)], [8])
    saved = open_book(run.journal).savings
    assert saved.makespan == saved.worker_seconds == 8 * 2.0 + 1.0 + 0.25
    assert saved.lower_bound_seconds == saved.critical_path_seconds == 17.0
    assert (saved.workers, saved.saved_seconds) == (1, -0.25)


def test_the_trials_table_of_the_report_equals_the_trials_of_the_optuna_study(reported: tuple[Result, Path]) -> None:
    result, page = reported
    rows = read(page.with_name("trials.csv"))
    expected = result.study.trials
    assert [int(row["number"]) for row in rows] == [t.number for t in expected]
    assert [row["state"] for row in rows] == [t.state.name for t in expected]
    assert [float(row["value"]) if row["value"] else None for row in rows] == [t.value for t in expected]
    for name in ("lr", "first", "grow", "gamma"):
        assert [float(row[f"params_{name}"]) for row in rows] == [t.params[name] for t in expected]


def test_shared_steps_of_a_trial_are_prefixes_that_an_earlier_trial_requested(reported: tuple[Result, Path]) -> None:
    result, page = reported
    rows = read(page.with_name("trials.csv"))
    prefixes = []
    for mine in result.plan.trials.values():
        prefixes.append(histories([trial(0, dict(mine.schedules), mine.steps)], [mine.requested]))
    for i, row in enumerate(rows):
        others = set().union(*prefixes[:i])
        assert int(row["steps_shared"]) == len(prefixes[i] & others)
        assert int(row["steps_asked"]) - int(row["steps_shared"]) == len(prefixes[i] - others)


@pytest.mark.ci
def test_reports_of_two_studies_on_one_plan_sum_to_the_report_of_the_plan(places: dict[str | None, Path]) -> None:
    for place in places.values():
        check_balance(place)
    for table in ("trials", "stages"):
        whole, early, later = (read(places[study] / f"{table}.csv") for study in (None, "early", "later"))
        assert sorted(map(str, [*early, *later])) == sorted(map(str, whole))
        assert {row["study"] for row in later} == {"later"}
    sums = {study: json.loads((place / "savings.json").read_text()) for study, place in places.items()}
    for name in ("trials", "steps_asked", "steps_trained", "worker_seconds", "worker_seconds_alone", "saved_seconds"):
        assert sums["early"][name] + sums["later"][name] == sums[None][name]
    # What the second study had not to train.
    assert sums["later"]["steps_trained"] < sums["later"]["steps_unique"]
    assert (sums["later"]["lower_bound_seconds"], sums[None]["lower_bound_seconds"]) == (None, None)

    page = Page(places[None] / "index.html")
    row = page.row("later")
    assert row[0] == "ended" and row[3] == f"{sums['later']['steps_asked']:,}"
    assert row[5] == f"{sums['later']['merge_rate']:.2f}"
    assert "2 studies on one plan" in page.texts
    alone = Page(places["later"] / "index.html")
    assert "later" in alone.texts and "early" not in alone.texts


@pytest.mark.ci
def test_the_states_table_of_a_study_has_only_states_on_the_paths_of_its_trials(
    journal: MemoryJournal, places: dict[str | None, Path]
) -> None:
    book = open_book(journal, "early")
    passed = {
        (node.id, step)
        for planned in book.trials.values()
        for node, _, stop in planned.path_to(planned.requested)
        for step in node.states
        if step <= stop
    }
    found = {(NodeId(int(row["node"])), int(row["step"])) for row in read(places["early"] / "states.csv")}
    assert found == passed < {(node.id, step) for node in book.account.plan.nodes for step in node.states}


@pytest.mark.ci
def test_the_report_of_a_result_covers_only_its_study_if_other_studies_share_the_plan(tmp_path: Path) -> None:
    journal = MemoryJournal()
    search(journal, name="other", n_trials=3)
    result = search(journal, name="mine", n_trials=5, seed=3)
    rows = read(result.write_report(tmp_path).with_name("trials.csv"))
    assert [row["trial"] for row in rows] == [f"mine/{i}" for i in range(5)]
    with pytest.raises(UsageError, match="no study 'third'; there are: 'other', 'mine'"):
        write_report(tmp_path, result, study="third")
    rows = read(write_report(tmp_path, result, study="other").with_name("trials.csv"))
    assert len(rows) == 3


def test_a_study_that_trains_nothing_new_has_a_report(tmp_path: Path) -> None:
    journal = MemoryJournal()
    search(journal, name="first")
    again = search(journal, name="again")
    page = again.write_report(tmp_path)
    assert "Nothing had to be trained" in Page(page).text
    assert read(tmp_path / "stages.csv") == read(tmp_path / "workers.csv") == []
    check_balance(tmp_path)
    rows = read(tmp_path / "trials.csv")
    assert sum(int(row["steps_shared"]) for row in rows) == again.savings.steps_asked > again.savings.steps_unique > 0


def test_the_report_shows_the_best_trial_with_its_parameters_and_schedules(reported: tuple[Result, Path]) -> None:
    result, page = reported[0], Page(reported[1])
    best = result.best_trial
    assert f"Trial {best.number}: value {best.value:.6g}" in page.text
    for name, value in best.params.items():
        assert page.row(name)[0] == f"{value:.6g}"
    lr, first = best.params["lr"], best.params["first"]
    *_, text = (row[1] for row in page.rows if row[0] == "lr" and len(row) == 2)
    assert text.startswith(f"steps 0 to {first}: {lr:.6g}steps {first} to 24: ")


@pytest.mark.ci
def test_forks_and_extended_trials_are_in_the_report(tmp_path: Path) -> None:
    journal = MemoryJournal()
    result = search(journal, algorithm=PopulationBasedTraining(interval=8), n_trials=6)
    page = Page(write_report(tmp_path, journal))
    check_balance(tmp_path)
    assert f"Trial {result.best_trial.number}: " in page.text
    schedules = result.schedules(result.best_trial)
    *_, text = (row[1] for row in page.rows if row[0] == "lr" and len(row) == 2)
    assert text.count("steps ") == sum(start < 32 for start, _, _ in schedules["lr"].pieces()) or "steps" not in text

    longer = search(journal, study=result.study, extend=True, n_trials=8, algorithm=FullTraining())
    write_report(tmp_path, journal)
    check_balance(tmp_path)
    assert len(read(tmp_path / "trials.csv")) == len(longer.study.trials)
    assert open_book(journal).savings.lower_bound_seconds is None  # two searches, with a pause between them


def test_the_report_of_two_objectives_shows_the_pareto_front_of_the_study(tmp_path: Path) -> None:
    study = optuna.create_study(study_name="two", directions=["maximize", "minimize"])
    hpstage.optimize(
        study,
        object(),
        space,
        metric=["a", "b"],
        steps=32,
        n_trials=20,
        executor=SimulatedExecutor(1, measure=lambda key, step: {"a": int(key[:2], 16), "b": int(key[2:4], 16)}),
        store=(journal := MemoryJournal()),
    )
    book = open_book(journal)
    assert {book.number(id) for id in book.front} == {t.number for t in study.best_trials}
    assert book.best is None
    page = Page(write_report(tmp_path, journal))
    for t in study.best_trials:
        assert page.row(str(t.number))[:2] == [f"{value:.6g}" for value in t.values]
    assert sum(row[0].isdigit() for row in page.rows) == len(study.best_trials) + len(study.trials)


POINTS = st.integers(1, 4).flatmap(lambda n: st.lists(st.tuples(*[st.sampled_from([0.0, 1.0, 2.0, math.inf])] * n)))


@given(POINTS)
def test_undominated_points_are_the_points_that_no_other_point_dominates(points: list[tuple[float, ...]]) -> None:
    def dominates(a: tuple[float, ...], b: tuple[float, ...]) -> bool:
        return a != b and all(x <= y for x, y in zip(a, b, strict=True))

    assert undominated(points) == sorted({b for b in points if not any(dominates(a, b) for a in points)})


def test_the_report_page_loads_no_external_resources(reported: tuple[Result, Path]) -> None:
    result, page = reported
    assert result.write_report(page.parent) == page, "the second replaces the first"
    assert page.parts[-3:] == ("new", "folder", "index.html")
    found = Page(page)
    pictures = [path.name for path in page.parent.glob("*.svg")]
    shown = [link for link in found.links if link.startswith("data:image/svg+xml;base64,")]
    assert len(shown) == 2 * (len(pictures) - 1) > 2, "each for wide and narrow windows, but the tree, which is shown"
    tables = {"trials.csv", "stages.csv", "states.csv", "workers.csv"}
    assert set(found.links) - set(shown) == {"stage_tree.svg", "savings.json", *tables}
    assert not {"link", "object", "base"} & set(found.tags) and found.tags.count("script") == 1, (
        "of the table of trials"
    )
    # The tree runs apart, in a frame that is part of the page (tests/unit/report/test_tree_embed.py).
    whole = page.read_text(encoding="utf-8")
    before, inside, after = re.split(
        r'<iframe title="Stage tree" sandbox="allow-scripts" [^>]*srcdoc="([^"]*)">', whole
    )
    assert inside and not any(word in before + after for word in ("url(", "@import", "<iframe"))
    assert {path.name for path in page.parent.iterdir()} == {"index.html", "savings.json", *tables, *pictures}


@pytest.mark.ci
def test_text_typed_by_users_appears_unchanged_on_the_report_page(tmp_path: Path) -> None:
    study = optuna.create_study(study_name=HOSTILE, direction="minimize")

    def hostile(trial: optuna.Trial) -> dict[str, object]:
        return {HOSTILE: trial.suggest_categorical(HOSTILE, [f"{HOSTILE}{i}" for i in range(4)])}

    journal = MemoryJournal()
    executor = SimulatedExecutor(1, measure=lambda key, step: {HOSTILE: math.inf})
    options = {"metric": HOSTILE, "steps": 4, "n_trials": 3, "executor": executor, "store": journal}
    hpstage.optimize(study, object(), hostile, **options)  # type: ignore[arg-type]
    one = Page(write_report(tmp_path, journal))
    search(journal, name="other", n_trials=2)
    two = Page(write_report(tmp_path, journal))
    for page in (one, two):
        assert page.tags.count("script") == 1  # of the tables of trials
        assert HOSTILE in page.texts  # as a heading
        assert HOSTILE in {row[0] for row in page.rows}  # as a parameter's name
        assert any(cell.startswith(HOSTILE) and cell[-1].isdigit() for row in page.rows for cell in row[1:])
        assert f"{HOSTILE} inf" in page.text
    assert f"metric {HOSTILE} (minimize)" in one.text
    rows = read(tmp_path / "trials.csv")
    assert str(rows[0][cell(f"params_{HOSTILE}")]).startswith(str(cell(HOSTILE))) and rows[0]["value"] == "inf"


@pytest.mark.ci
@pytest.mark.parametrize("objectives", [1, 2])
def test_names_and_values_with_html_tags_appear_as_text_on_the_report_page(tmp_path: Path, objectives: int) -> None:
    def tag(what: str) -> str:
        return f"<b {what}> & \" '"

    study = tag("study")
    trials = [
        TrialAdded(TrialId(f"{study}/{tag(f'id {i}')}"), {tag("schedule"): s.piecewise({0: tag("one"), 4: i})}, 8)
        for i in range(3)
    ]
    started = SearchStarted(
        study,
        tag("algorithm"),
        tuple(tag(f"metric {i}") for i in range(objectives)),
        8,
        3,
        tag("sampler"),
        0.0,
        directions=("minimize",) * objectives,
    )
    run = Search(SimulatedExecutor(1))
    run.driver.log.write([started])
    params = {tag("parameter"): tag("value")}
    run.driver.add(trials, [TrialProposed(study, i, trials[i].trial, {}, params=params) for i in range(2)])
    worker = WorkerId(tag("worker"))
    run.driver.log.write(
        [
            *(TargetAsked(trial.trial, 8) for trial in trials),
            # Two that are equal: both are on the front. Of the third only the id is known.
            *(TrialEnded(study, trial.trial, "COMPLETE", (0.0,) * objectives, 8, 0.0) for trial in trials[:2]),
            StageFailed(NodeId(0), 4, True, UserFailure(tag("summary"), tag("traceback"))),
            StageFailed(NodeId(0), 2, False, UserFailure("", "")),
            StateDiffers(NodeId(0), 4, worker, 1.0, tag("leaf"), (tag("first"), tag("again"))),
            ForkVerified(ChainId("c"), worker, NodeId(0), 2, 2, 1.0, 1.0, difference=tag("difference")),
        ]
    )
    everywhere = {*started.metric, *params, *params.values(), study, tag("id 2"), tag("summary"), tag("traceback")}
    everywhere |= {tag("leaf"), tag("first"), tag("again"), tag("difference")}
    if objectives == 1:  # a front shows no schedules
        everywhere |= {tag("schedule"), tag("one")}
    one = Page(write_report(tmp_path, run.journal))
    write(run.journal, SearchStarted(tag("other"), "", ("x",), 8, 1, "", 1.0, directions=("minimize",)))
    two = Page(write_report(tmp_path, run.journal))
    for page, said in (
        (one, everywhere | {started.algorithm, started.sampler}),
        (two, everywhere | {tag("other"), f"{started.metric[0]} 0 (trial {tag('id 0')})"}),
    ):
        assert "b" not in page.tags
        assert {name for name in said if name not in page.text} == set()


def test_failures_are_shown_with_their_trials_and_their_traceback(tmp_path: Path) -> None:
    run = Search(SimulatedExecutor(1))
    run.driver.add([trial(i, {"a": s.piecewise({0: 1, 4: i}), "b": s.constant(i // 2)}, 8) for i in range(4)])
    for i in range(4):
        run.driver.log.write([TargetAsked(TrialId(f"study/{i}"), 8)])
    path = run.plan.trials[TrialId("study/1")].last.ancestry()
    long = "first line\n" + "x" * 30_000 + HOSTILE
    raised = [
        StageFailed(path[0].id, 2, False, UserFailure(f"ValueError: {HOSTILE}", long)),
        StageFailed(path[-1].id, 8, True, UserFailure("E" * 1000, "")),
    ]
    run.driver.log.write([*raised, raised[0]])
    assert [sorted(trials) for _, trials in failures_of(open_book(run.journal))] == [
        ["study/0", "study/1"],
        ["study/1"],
    ]
    page = Page(write_report(tmp_path, run.journal))
    assert page.tags.count("script") == 1  # of the table of trials
    assert f"training, node 0, step 2 (trials 0, 1): ValueError: {HOSTILE}" in page.text
    assert f"evaluating, node {path[-1].id}, step 8 (trial 1): E" in page.text
    assert "first line" not in page.text and page.text.count(HOSTILE) == 2
    assert "E" * 301 not in page.text
    assert "Your code raised an exception 2 times" in page.text


def test_failures_of_one_cause_are_shown_once_with_their_number(tmp_path: Path) -> None:
    run = Search(SimulatedExecutor(1))
    run.driver.add([trial(i, {"a": s.constant(i)}, 8) for i in range(50)])
    failed = [StageFailed(NodeId(i), 2, False, UserFailure("ValueError: x", "")) for i in range(50)]
    run.driver.log.write([*(TargetAsked(TrialId(f"study/{i}"), 8) for i in range(50)), *failed])
    text = Page(write_report(tmp_path, run.journal)).text
    assert text.count("ValueError: x") == 1 and "Your code raised an exception 50 times, for one reason" in text
    assert "training, 50 times, step 2 (trials 0, " in text and " and 38 more): ValueError: x" in text


def test_failures_of_another_study_are_not_counted_for_a_study(tmp_path: Path) -> None:
    journal = MemoryJournal()
    search(journal, name="one", n_trials=3)
    book = open_book(journal)
    ended = book.account.plan.trials[TrialId("one/0")]
    write(journal, StageFailed(ended.last.id, 33, False, UserFailure("ValueError: beyond", "")))
    search(journal, name="two", n_trials=3)
    assert failures_of(open_book(journal, "two")) == []
    assert len(failures_of(open_book(journal))) == 1


def test_a_plan_without_trials_has_a_report(tmp_path: Path) -> None:
    journal = MemoryJournal()
    open_plan(journal, WORKLOAD, {})
    page = Page(write_report(tmp_path, journal))
    check_balance(tmp_path)
    assert "No trial has been requested." in page.text and "No trial has been completed." in page.text
    write(journal, SearchStarted("begun", "FullTraining()", ("loss",), 8, 4, "RandomSampler", 0.0))
    page = Page(write_report(tmp_path, journal, study="begun"))
    assert "The search has not ended. These are" in page.text
    write(journal, trial(0, {"a": s.constant(1)}, 8))
    assert "1 trial requested 0 steps; 0 were trained." in Page(write_report(tmp_path, journal)).text


def test_a_study_whose_search_has_not_ended_is_unfinished_in_the_table_of_studies(tmp_path: Path) -> None:
    journal = MemoryJournal()
    search(journal, name="one", n_trials=3)
    search(journal, name="two", n_trials=3)
    write(journal, SearchStarted("two", "FullTraining()", ("loss",), 8, 4, "RandomSampler", 0.0))
    page = Page(write_report(tmp_path, journal))
    assert [page.row(study)[0] for study in ("one", "two")] == ["ended", "unfinished"]


@pytest.mark.ci
def test_a_report_can_be_written_at_every_moment_of_a_search(tmp_path: Path) -> None:
    journal = MemoryJournal()
    search(journal, n_trials=8)
    for stop in range(1, len(separated(journal)) + 1, 46):
        before = cut(journal, stop)
        page = Page(write_report(tmp_path, before))
        check_balance(tmp_path)
        facts = list(read_facts(before))
        begun = any(isinstance(fact, SearchStarted) for fact in facts)
        assert ("The search has not ended" in page.text) == begun
        ended = [fact for fact in facts if isinstance(fact, TrialEnded) and fact.state == "COMPLETE"]
        assert ("No trial has been completed." in page.text) == (not ended)


def test_a_journal_without_directions_has_no_best_trial(tmp_path: Path) -> None:
    journal, old = MemoryJournal(), MemoryJournal()
    search(journal, n_trials=4)
    for fact in read_facts(journal):
        if isinstance(fact, SearchStarted):
            fact = msgspec.structs.replace(fact, directions=())
        write(old, fact)
    assert open_book(old).best is None
    page = Page(write_report(tmp_path, old))
    assert "did not record the direction" in page.text and "metric value, begun" in page.text


def test_a_trial_with_the_value_nan_is_never_the_best_trial() -> None:
    journal = MemoryJournal()
    search(journal, n_trials=8)
    spoilt = MemoryJournal()
    for fact in read_facts(journal):
        if isinstance(fact, TrialEnded) and fact.state == "COMPLETE":
            first = not any(isinstance(f, TrialEnded) and f.state == "COMPLETE" for f in read_facts(spoilt))
            fact = msgspec.structs.replace(fact, values=("nan",) if first else ("-inf",))
        write(spoilt, fact)
    book = open_book(spoilt)
    assert book.best is not None and book.values[book.best] == (-math.inf,)


def test_the_report_of_a_search_with_equal_values_lists_the_best_trial_once(tmp_path: Path) -> None:
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
    assert Page(result.write_report(tmp_path)).text.count("Trial 0: loss 0") == 1


@pytest.mark.ci
def test_seconds_lost_with_a_killed_worker_are_shown_as_thrown_away_in_the_report(tmp_path: Path) -> None:
    executor = SimulatedExecutor(1, step_seconds=1.0)
    executor.cluster.kill(executor.cluster.join(0.0), 3.5)
    run = Search(executor, checkpoint_every=2)
    run.run([trial(i, {"a": s.constant(i + 1)}, 8) for i in range(2)], [8, 8])
    page = Page(write_report(tmp_path, run.journal))
    check_balance(tmp_path)
    assert page.row("discarded")[0] == "1.5 s"
    assert [row["outcome"] for row in read(tmp_path / "workers.csv")].count("died") == 1


def test_a_report_with_an_unwritable_folder_or_an_unreadable_store_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="give another folder"):
        search(n_trials=2).write_report(tmp_path / "file")
    with pytest.raises(StoreError, match="there is no plan in"):
        write_report(tmp_path / "report", tmp_path / "nothing")
    assert not (tmp_path / "report").exists()


def test_a_worker_is_counted_even_if_the_journal_has_no_start_of_its_chain() -> None:
    run = Search(SimulatedExecutor(1))
    run.driver.add([trial(0, {"a": s.constant(1)}, 8)])
    run.driver.log.write([StateReached(ChainId("c"), WorkerId("w"), NodeId(0), 0, 4, 10.0, 4.0)])
    saved = open_book(run.journal).savings
    assert (saved.workers, saved.makespan, saved.steps_trained) == (1, 4.0, 4)
