"""Training functions in which what is measured on request has an influence on training are refused or found."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import optuna
import pytest

import hpstage
from hpstage import schedule as s
from hpstage.errors import StateError
from hpstage.execution.verification import ForkVerification
from hpstage.training.run import Run
from tests.torch.loops import HP, anchor, begun, made, stepped


def halved_after_three_reports(run: Run) -> None:
    parts = begun(run)
    best, bad, scale = float("inf"), 0, 1.0
    for _ in run.steps():
        loss = stepped(run, parts, scale)
        if run.wants_report:
            value = loss.item()
            best, bad = (value, 0) if value < best else (best, bad + 1)
            if bad >= 3:
                scale, bad = scale * 0.5, 0
            run.report(loss=value)


def by_another_name(run: Run) -> None:
    parts = begun(run)
    extra = 0.0
    for _ in run.steps():
        wanted = run.wants_report
        loss = stepped(run, parts, extra)
        if wanted:
            extra = loss.item()
            run.report(loss=extra)


def unless_none_is_wanted(run: Run) -> None:
    parts = begun(run)
    extra = 0.0
    for _ in run.steps():
        loss = stepped(run, parts, extra)
        if not run.wants_report:
            continue
        extra = loss.item()
        run.report(loss=extra)


def by_one_of_two_conditions(run: Run) -> None:
    parts = begun(run)
    extra = 0.0
    for step in run.steps():
        loss = stepped(run, parts, extra)
        wanted = run.wants_report or step % 5 == 4
        if wanted:
            extra = loss.item()
            run.report(loss=extra)


def by_an_expression(run: Run) -> None:
    parts = begun(run)
    extra = 0.0
    for _ in run.steps():
        loss = stepped(run, parts, extra)
        extra = loss.item() if run.wants_report else extra
        run.report(loss=loss.item())


def by_a_value_or_none(run: Run) -> None:
    parts = begun(run)
    bad = 0
    for _ in run.steps():
        loss = stepped(run, parts, bad)
        value = loss.item() if run.wants_report else None
        bad = bad + (value > 0.5) if value is not None else bad
        run.report(loss=loss.item())


def counting(run: Run) -> None:
    parts = begun(run)
    reports = 0
    for _ in run.steps():
        loss = stepped(run, parts, reports)
        reports += run.wants_report
        run.report(loss=loss.item())


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (halved_after_three_reports, "scale"),
        (by_another_name, "extra"),
        (unless_none_is_wanted, "extra"),
        (by_one_of_two_conditions, "extra"),
        (by_an_expression, "extra"),
        (by_a_value_or_none, "bad"),
        (counting, "reports"),
    ],
)
def test_a_variable_that_reports_change_and_training_reads_is_refused_before_training(
    function: Callable[[Run], None], name: str
) -> None:
    with pytest.raises(StateError, match=rf"assigns {name} where run\.wants_report is true.*stateless = \('{name}',\)"):
        made(function).train(0, HP)


def left_by_patience(run: Run) -> None:
    parts = begun(run)
    bad = 0
    for _ in run.steps():
        loss = stepped(run, parts)
        if run.wants_report:
            bad += 1
            run.report(loss=loss.item())
            if bad > 5:
                break


def returning(run: Run) -> None:
    parts = begun(run)
    for _ in run.steps():
        loss = stepped(run, parts)
        if run.wants_report:
            run.report(loss=loss.item())
            if loss.item() < 0.01:
                return


def stopping(run: Run) -> None:
    parts = begun(run)
    for _ in run.steps():
        loss = stepped(run, parts)
        if run.wants_report:
            run.report(loss=loss.item())
            if loss.item() < 0.01:
                run.stop()


@pytest.mark.parametrize("function", [left_by_patience, returning, stopping])
def test_leaving_the_loop_early_only_where_a_report_is_wanted_is_refused(function: Callable[[Run], None]) -> None:
    with pytest.raises(StateError, match=r"leaves its loop where run\.wants_report is true.*decide in every step"):
        made(function).train(0, HP)


def reporting_the_best(run: Run) -> None:
    parts = begun(run)
    best = float("inf")
    for _ in run.steps():
        loss = stepped(run, parts)
        if run.wants_report:
            best = min(best, loss.item())
            run.report(loss=loss.item(), best=best)


def test_a_metric_that_depends_on_earlier_reports_is_refused() -> None:
    with pytest.raises(StateError, match=r"reports best, which also depends on.*stateless = \('best',\)"):
        made(reporting_the_best).train(0, HP)


def noting(run: Run) -> None:
    """What is noted for reports alone, what every step assigns first, and an end that every step decides."""
    parts = begun(run)
    best, history, done = float("inf"), [], False
    for _ in run.steps():
        value: Any = stepped(run, parts).item()
        done = value < 0.0
        if run.wants_report or done:
            value += 0.0
            best = min(best, value)
            history.append(value)
            assert best <= value, "an error ends training, too"
            run.report(loss=value)
        if done:
            break


def showing(run: Run) -> None:
    parts = begun(run)
    shown = ""
    for _ in run.steps():
        loss = stepped(run, parts)
        if run.wants_report:
            shown = f"{loss.item():.3f}"
            run.report(loss=loss.item())
        str(shown)


showing.stateless = ("shown",)  # type: ignore[attr-defined]


def giving_back(run: Run) -> Any:
    parts = begun(run)
    notes: list[float] = []
    for _ in run.steps():
        loss = stepped(run, parts)
        if run.wants_report:
            notes.append(loss.item())
            run.report(loss=loss.item())
    return notes


@pytest.mark.parametrize("function", [noting, showing, giving_back])
def test_a_variable_that_reports_change_is_allowed_if_training_does_not_depend_on_it(
    function: Callable[[Run], None],
) -> None:
    trainable = made(function)
    trainable.train(0, HP)
    trainable.close()


class Patience:
    def __init__(self) -> None:
        self.seen, self.scale = 0, 1.0

    def see(self, step: int) -> None:
        self.seen += step > 3
        self.scale = 1.0 if self.seen < 3 else 0.5


def by_an_object(run: Run) -> None:
    parts = begun(run)
    patience = Patience()
    for step in run.steps():
        loss = stepped(run, parts, patience.scale * anchor(parts[0], 0.0))
        if run.wants_report:
            patience.see(step)
            run.report(loss=loss.item())


def test_an_object_that_reports_change_and_other_steps_read_is_refused_at_its_first_change() -> None:
    trainable = made(by_an_object)
    for step in range(6):
        trainable.train(step, HP)  # a report is wanted after each
    with pytest.raises(StateError, match=r"changed patience\.scale in a step where run\.wants_report"):
        trainable.train(6, HP)


def by_a_function(run: Run) -> None:
    parts = begun(run)
    patience = Patience()
    for step in run.steps():
        loss = stepped(run, parts, scale_of(patience) * anchor(parts[0], 0.0))
        counted(run, patience, step, loss)


def scale_of(patience: Patience) -> float:
    return patience.scale


def counted(run: Run, patience: Patience, step: int, loss: Any) -> None:
    if run.wants_report:
        patience.see(step)
        run.report(loss=loss.item())


def searched(folder: Path, **options: Any) -> hpstage.Result:
    return hpstage.optimize(
        optuna.create_study(sampler=optuna.samplers.GridSampler({"at": [6, 8, 10]})),
        by_a_function,
        lambda trial: {"lr": s.multistep(0.1, [trial.suggest_int("at", 6, 10)]), "momentum": 0.9},
        metric="loss",
        steps=14,
        n_trials=3,
        store=folder,
        executor=hpstage.InlineExecutor(),
        **options,
    )


@pytest.mark.ci
@pytest.mark.forks
@pytest.mark.usefixtures("reruns_on_any_machine")
def test_a_rerun_without_intermediate_reports_finds_training_that_depends_on_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The verification of forks sees the steps next to a fork alone."""
    monkeypatch.setattr("hpstage.execution.rerun._SECONDS", 60.0)  # all of its steps, however slow the machine
    monkeypatch.setattr(ForkVerification, "_compare_measuring", lambda self, found: None)
    with pytest.raises(StateError, match=r"measuring changes training: after 14 steps.*with reports at other steps"):
        searched(tmp_path)


@pytest.mark.ci
def test_the_audit_of_a_whole_trial_finds_training_that_depends_on_intermediate_reports(tmp_path: Path) -> None:
    with pytest.raises(StateError, match=r"weight"):
        searched(tmp_path, verify="off", audit="winner")
