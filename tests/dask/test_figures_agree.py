"""A figure has one value, wherever it is outputs: page, metrics, report, terminal, ``status --json`` and the result."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Callable
from pathlib import Path

import optuna
import pytest
from typer.testing import CliRunner

import hpstage
from hpstage import schedule as s
from hpstage.accounting.savings import Savings
from hpstage.algos import SuccessiveHalving
from hpstage.cli.app import app
from hpstage.cluster.dashboard.board import Board, Shown
from hpstage.cluster.dashboard.tiles import summary_html
from hpstage.errors.text import busy_share, duration, rate
from hpstage.execution.simulated import SimulatedExecutor
from hpstage.report import write_report
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
        shown = CliRunner().invoke(app, ["status", str(store)])
        assert shown.exit_code == 0, shown.output
        as_json = CliRunner().invoke(app, ["status", str(store), "--json"])
        assert as_json.exit_code == 0, as_json.output
        self.json = json.loads(as_json.output)
        page = write_report(folder / "report", store).read_text()
        cells = r'<th scope="row">(.*?)</th><td[^>]*>(.*?)</td><td>(.*?)</td>'
        rows = [html.unescape(" ".join(row)) for row in re.findall(cells, page)]
        self.figures = json.loads((folder / "report" / "savings.json").read_text())
        board = Board()
        journal = MemoryJournal()
        journal.append([bytes(record) for record in _records(store)])
        board.offer("plan", 0, journal.read(0))
        [view] = board.plans.values()
        self.shown = Shown("plan", view, view.studies[STUDY])
        self.texts = {
            "terminal": line(views.all[-1]),
            "summary": str(self.savings),
            "notebook": html.unescape(re.sub(r"<[^>]+>", " ", self.result._repr_html_())),
            "status": shown.output,
            "introduction": html.unescape(page),
            "report": " ".join(rows),
            "page": html.unescape(summary_html(self.shown)),
        }


def _records(store: Path) -> list[bytes]:
    from contextlib import ExitStack

    with ExitStack() as closing:
        return list(open_journal(store, closing=closing, read_only=True).read())


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> Outputs:
    return Outputs(tmp_path_factory.mktemp("outputs"))


TEXTS: dict[str, tuple[Callable[[Savings], str], str]] = {
    "steps requested": (lambda savings: f"{savings.steps_asked:,}", "report status page summary notebook"),
    "unique steps": (lambda savings: f"{savings.steps_unique:,}", "report status page summary notebook"),
    "steps trained": (lambda savings: f"{savings.steps_trained:,}", "report status page summary notebook terminal"),
    "merge rate": (lambda savings: rate(savings.merge_rate), "report status page summary notebook terminal"),
    "by cost": (lambda savings: rate(savings.cost_weighted_merge_rate), "report summary notebook"),
    "less training": (lambda savings: savings.less_training, "introduction notebook"),
    "busy": (lambda savings: duration(savings.worker_seconds), "report status page summary notebook terminal"),
    "without sharing": (lambda savings: duration(savings.worker_seconds_alone), "report status summary notebook"),
    "saved": (lambda savings: duration(savings.saved_seconds), "report status page summary notebook terminal"),
    "allocated": (lambda savings: duration(savings.paid_seconds), "report status summary notebook"),
    "share": (
        lambda savings: busy_share(savings.paid_seconds, savings.worker_seconds),
        "report status summary notebook",
    ),
}
"""Figures as they are written, and the outputs that show them."""


@pytest.mark.parametrize("figure", TEXTS)
def test_all_outputs_show_a_figure_of_accounting(outputs: Outputs, figure: str) -> None:
    text, names = TEXTS[figure]
    shown = text(outputs.savings)
    assert [name for name in names.split() if shown not in outputs.texts[name]] == [], shown


NUMBERS = {
    "steps_asked": "steps_asked",
    "steps_unique": "steps_unique",
    "merge_rate": "merge_rate",
    "seconds_used": "worker_seconds",
    "seconds_alone": "worker_seconds_alone",
    "seconds_saved": "saved_seconds",
    "seconds_paid": "paid_seconds",
}
"""Figures in the JSON of status, and the names of savings."""


@pytest.mark.parametrize("name", NUMBERS)
def test_all_json_has_a_figure_of_accounting(outputs: Outputs, name: str) -> None:
    value = getattr(outputs.savings, NUMBERS[name])
    (study,) = outputs.json["studies"]
    assert (study[name], outputs.json["plan"][name], outputs.figures[NUMBERS[name]]) == (value, value, value)


def test_all_outputs_show_the_same_best_value_and_numbers_of_trials_by_end(outputs: Outputs) -> None:
    texts, best = outputs.texts, f"{outputs.result.study.best_value:.6g}"
    assert [name for name in ("terminal", "status", "notebook", "introduction") if best not in texts[name]] == []
    assert f"{float(best):.5g}" in texts["page"]
    [study] = outputs.json["studies"]
    ends = study["trials"]
    assert outputs.savings.trials == sum(ends.values()) == 40
    assert f"{ends['COMPLETE']} complete, {ends['PRUNED']} pruned" in texts["terminal"]
    assert +outputs.shown.study.trials_by_end == ends


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
