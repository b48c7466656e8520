"""A figure has one value, wherever it is outputs: page, metrics, report, terminal, ``status --json`` and the result."""

from __future__ import annotations

import html
import json
import re
from pathlib import Path

import optuna
import pytest
from typer.testing import CliRunner

import hpstage
from hpstage import schedule as s
from hpstage.accounting.history import moments
from hpstage.algos import SuccessiveHalving
from hpstage.cli.app import app
from hpstage.cluster.dashboard.board import Board, Shown
from hpstage.cluster.dashboard.tiles import summary_html
from hpstage.errors.text import allocated_time, busy_share, duration, rate
from hpstage.execution.simulated import SimulatedExecutor
from hpstage.report import open_book, write_report
from hpstage.search import call as front_door
from hpstage.search.progress import Progress, ProgressView, line
from hpstage.search.progress.view import Display
from hpstage.store import MemoryJournal
from hpstage.store.opening import open_journal
from hpstage.testing.toys import Failing

pytestmark = pytest.mark.ci

STUDY = "digits"


class Views(Display):
    """Keeps what it is shown."""

    def __init__(self) -> None:
        self.all: list[ProgressView] = []

    def begin(self, view: ProgressView) -> None:
        self.all.append(view)

    def write(self, text: str) -> None: ...

    show = end = begin


def space(trial: optuna.Trial) -> dict[str, object]:
    return {
        "a": s.piecewise({0: trial.suggest_int("a", 1, 2), 40: trial.suggest_int("a late", 1, 4)}),
        "b": s.piecewise({0: 1, 60: trial.suggest_int("b", 1, 4)}),
    }


class Outputs:
    """All outputs about a finished study, the only one on its plan."""

    def __init__(self, folder: Path) -> None:
        patch, views = pytest.MonkeyPatch(), Views()
        # Steps of different cost: rates by steps and by cost differ.
        executor = SimulatedExecutor(
            3, step_seconds=lambda values: 40.0 * float(values["b"] or 1), evaluate_seconds=20.0, load_seconds=3.0,
            save_seconds=5.0,
        )  # fmt: skip
        patch.setattr(
            front_door,
            "Progress",
            lambda _, study, page, **options: Progress(views, study, page, clock=executor.clock, **options),
        )
        store = folder / "store"
        with patch.context():
            self.result = hpstage.optimize(
                optuna.create_study(study_name=STUDY, sampler=optuna.samplers.RandomSampler(seed=0)),
                Failing(),
                space,
                metric="value",
                steps=100,
                n_trials=40,
                algorithm=SuccessiveHalving(10, 3),
                executor=executor,
                store=store,
            )
        patch.undo()
        self.savings = self.result.savings
        self.terminal = line(views.all[-1])
        self.summary = str(self.savings)
        self.notebook = html.unescape(re.sub(r"<[^>]+>", " ", self.result._repr_html_()))
        shown = CliRunner().invoke(app, ["status", str(store)])
        assert shown.exit_code == 0, shown.output
        self.status = shown.output
        as_json = CliRunner().invoke(app, ["status", str(store), "--json"])
        assert as_json.exit_code == 0, as_json.output
        self.json = json.loads(as_json.output)
        self.page = write_report(folder / "report", store).read_text()
        self.figures = json.loads((folder / "report" / "savings.json").read_text())
        self.book = open_book(store)
        board = Board()
        journal = MemoryJournal()
        journal.append([bytes(record) for record in _records(store)])
        board.offer("plan", 0, journal.read(0))
        [view] = board.plans.values()
        self.shown = Shown("plan", view, view.studies[STUDY])

    def row(self, name: str) -> tuple[str, str]:
        """A row of the report's table: its figure and the note next to it."""
        found = re.search(rf'<th scope="row">{re.escape(name)}</th><td[^>]*>(.*?)</td><td>(.*?)</td>', self.page)
        assert found is not None, name
        return html.unescape(found[1]), html.unescape(found[2])


def _records(store: Path) -> list[bytes]:
    from contextlib import ExitStack

    with ExitStack() as closing:
        return list(open_journal(store, closing=closing, read_only=True).read())


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> Outputs:
    return Outputs(tmp_path_factory.mktemp("outputs"))


def test_all_outputs_show_the_same_step_counts(outputs: Outputs) -> None:
    savings, totals = outputs.savings, outputs.shown.study.totals
    assert savings.steps_asked > savings.steps_unique > 0
    (study,), plan = outputs.json["studies"], outputs.json["plan"]
    for name in ("steps_asked", "steps_unique"):
        value = getattr(savings, name)
        assert value == getattr(totals, name) == study[name] == plan[name] == outputs.figures[name]
    assert savings.steps_trained == totals.steps_trained == plan["steps_trained"] == outputs.figures["steps_trained"]
    assert outputs.row("Steps requested")[0] == f"{savings.steps_asked:,}"
    assert outputs.row("Unique steps among them")[0] == f"{savings.steps_unique:,}"
    assert outputs.row("Steps trained")[0] == f"{savings.steps_trained:,}"
    assert f"{savings.steps_asked:,} requested, {savings.steps_unique:,} unique" in " ".join(outputs.status.split())


def test_all_outputs_show_the_same_merge_rate_and_label_the_cost_weighted_rate(outputs: Outputs) -> None:
    savings = outputs.savings
    known = savings.merge_rate
    assert known > 1.2 and rate(known) != rate(savings.cost_weighted_merge_rate)
    assert known == outputs.shown.study.totals.merge_rate == outputs.json["studies"][0]["merge_rate"]
    assert (
        known == outputs.json["plan"]["merge_rate"] == outputs.figures["merge_rate"] == moments(outputs.book)[-1].rate
    )
    figure, note = outputs.row("Merge rate")
    assert figure == rate(known)
    assert f"{rate(savings.cost_weighted_merge_rate)} by measured seconds;" in note
    assert f"merge rate {rate(known)};" in outputs.terminal
    assert f"{rate(known)} (by cost {rate(savings.cost_weighted_merge_rate)})" in outputs.summary
    assert re.search(rf"merge rate +{re.escape(rate(known))}$", outputs.status, re.M)
    phrase = savings.less_training
    assert phrase.startswith(f"{rate(known)}× less training: ")
    assert phrase in html.unescape(outputs.page) and phrase in outputs.notebook
    figure, steps = phrase.removesuffix(" steps").split(" less training: ")
    assert figure in summary_html(outputs.shown) and steps.replace(" of", " unique of") in summary_html(outputs.shown)


def test_all_outputs_show_the_same_busy_unshared_and_saved_worker_time(outputs: Outputs) -> None:
    savings, shown = outputs.savings, outputs.shown
    (study,), plan = outputs.json["studies"], outputs.json["plan"]
    used, alone, saved = savings.worker_seconds, savings.worker_seconds_alone, savings.saved_seconds
    assert saved > 0
    for value, name, on_page in (
        (used, "seconds_used", shown.study.totals.worker_seconds),
        (alone, "seconds_alone", shown.view.alone_seconds(STUDY)),
        (saved, "seconds_saved", shown.seconds_saved),
    ):
        assert study[name] == pytest.approx(value, abs=1e-3) == plan[name] == pytest.approx(on_page, abs=1e-3)
    for name, value in (("worker_seconds", used), ("worker_seconds_alone", alone), ("saved_seconds", saved)):
        assert outputs.figures[name] == pytest.approx(value, abs=1e-3)
    assert outputs.row("Busy worker time")[0] == duration(used)
    assert outputs.row("Worker time without sharing")[0] == duration(alone)
    assert outputs.row("Saved")[0] == duration(saved)
    assert f"worker time {duration(used)} used, {duration(saved)} saved" in outputs.terminal
    assert duration(used) in outputs.summary and duration(saved) in outputs.summary
    assert duration(used) in outputs.status and f"{duration(saved)} of {duration(alone)}" in outputs.status


def test_all_outputs_show_the_same_allocated_worker_time(outputs: Outputs) -> None:
    savings = outputs.savings
    paid = savings.paid_seconds
    assert paid > savings.worker_seconds
    assert paid == outputs.json["plan"]["seconds_paid"] == outputs.json["studies"][0]["seconds_paid"]
    assert paid == outputs.figures["paid_seconds"] == outputs.book.savings.paid_seconds
    assert paid == outputs.shown.view.presence.seconds(STUDY)
    phrase = allocated_time(paid, savings.worker_seconds)
    assert phrase in outputs.summary and phrase in outputs.status
    assert outputs.row("Allocated worker time") == (duration(paid), busy_share(paid, savings.worker_seconds))


def test_all_outputs_show_the_same_trial_counts_and_best_value(outputs: Outputs) -> None:
    study = outputs.shown.study
    best = outputs.result.study.best_trial
    (row,) = outputs.json["studies"]
    assert study.standings.best(1)[0].value == row["best"][0]["value"] == best.value
    assert (
        f"{best.value:.6g}" in outputs.terminal
        and f"{best.value:.6g}" in outputs.page
        and f"{best.value:.6g}" in outputs.status
    )
    ends = {"COMPLETE": 0, "PRUNED": 0} | row["trials"]
    assert {end: study.trials_by_end[end] for end in ends} == ends
    assert f"{ends['COMPLETE']} complete, {ends['PRUNED']} pruned" in outputs.terminal
    assert outputs.row("Trials")[0] == str(outputs.savings.trials) == str(sum(ends.values()))


def test_status_shows_the_merge_rate_of_a_plan_separately_from_those_of_its_studies(tmp_path: Path) -> None:
    journal = MemoryJournal()
    for name in ("one", "two"):
        hpstage.optimize(
            optuna.create_study(study_name=name, sampler=optuna.samplers.RandomSampler(seed=0)), Failing(), space,
            metric="value", steps=80, n_trials=8, executor=SimulatedExecutor(2), store=journal,
        )  # fmt: skip
    from hpstage.accounting.account import new_account
    from hpstage.cli.status import as_text, status_of

    account = new_account(journal)
    account.catch_up(journal)
    found = status_of(account, journal)
    assert found.plan.merge_rate > max(study.merge_rate for study in found.studies)
    text = as_text(found)
    assert re.search(rf"merge rate, all studies +{rate(found.plan.merge_rate)}$", text, re.M)
