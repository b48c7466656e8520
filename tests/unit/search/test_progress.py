"""What a running search shows: the numbers, the time left, and the words."""

from __future__ import annotations

import io
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.trial import TrialState
from rich.cells import cell_len
from rich.console import Console

import hpstage
from hpstage import schedule as s
from hpstage.accounting.savings import merged
from hpstage.algos import FullTraining, MedianStopping, SuccessiveHalving
from hpstage.execution.simulated import SimulatedExecutor
from hpstage.search import call as front_door
from hpstage.search.progress import Progress, ProgressView, line
from hpstage.search.progress.displays import LINE_SECONDS, LineDisplay, Rendered
from hpstage.search.progress.view import Display
from hpstage.store import MemoryJournal
from hpstage.testing.toys import Failing, Tape

pytestmark = pytest.mark.sampled(8)

optuna.logging.set_verbosity(optuna.logging.ERROR)

VIEW = ProgressView(
    study="digits",
    complete=28,
    pruned=2,
    failed=1,
    n_trials=48,
    metric="accuracy",
    best=0.99721,
    stages_done=45,
    stages_left=12,
    steps_trained=1200,
    steps_left=300,
    running=2,
    workers=2,
    merge_rate=2.94,
    used_seconds=27.6,
    saved_seconds=55.3,
    elapsed=83.2,
    seconds_left=3655.0,
)
HOSTILE = ProgressView(
    study="<script>alert(1)</script> $x_{ [bold]\x1b[31m\n\u202e",
    complete=0,
    pruned=0,
    failed=0,
    n_trials=None,
    metric="学習率[/]\x07",
    best=-math.inf,
    stages_done=0,
    stages_left=0,
    running=0,
    workers=1,
    merge_rate=1.0,
    used_seconds=0.0,
    saved_seconds=-0.01,
    elapsed=0.0,
    seconds_left=None,
)


class Views(Display):
    """Keeps what it is shown."""

    def __init__(self) -> None:
        self.all: list[ProgressView] = []

    def begin(self, view: ProgressView) -> None:
        self.all.append(view)

    def write(self, text: str) -> None:
        raise AssertionError("there is nothing to write")

    show = end = begin


def grid(trial: optuna.Trial) -> dict[str, object]:
    return {
        "a": s.piecewise({0: trial.suggest_int("a", 1, 2), 40: trial.suggest_int("a late", 1, 4)}),
        "b": s.piecewise({0: 1, 60: trial.suggest_int("b", 1, 4), 80: trial.suggest_int("b late", 1, 4)}),
    }


def searched(
    monkeypatch: pytest.MonkeyPatch, executor: hpstage.Executor, study: optuna.Study, **options: object
) -> tuple[list[ProgressView], hpstage.Result]:
    """All that a search shows, its times on the executor's clock."""
    views = Views()
    monkeypatch.setattr(
        front_door,
        "Progress",
        lambda _, study, page, **options: Progress(views, study, page, clock=executor.clock, **options),
    )
    settings: dict[str, object] = {"metric": "value", "steps": 100, "n_trials": 64, "store": MemoryJournal()}
    space = options.pop("space", grid)
    result = hpstage.optimize(study, Failing(), space, executor=executor, **(settings | options))  # type: ignore[arg-type]
    return views.all, result


def test_the_progress_line_uses_the_singular_for_a_count_of_one() -> None:
    one = replace(VIEW, steps_trained=1, stages_done=1, complete=1, pruned=0, failed=0, n_trials=None, over=True)
    assert line(one).startswith("digits: 1 trial; 1 complete; best accuracy 0.99721; 1 step trained, 1 stage done; ")


# --- the time left ------------------------------------------------------------------------------------------


@pytest.mark.ci
@pytest.mark.parametrize("workers", [1, 2, 7, 32])
@pytest.mark.parametrize("step_seconds", [0.01, lambda hp: 30.0 + hp["b"]])
@pytest.mark.parametrize("sampler", ["random", "grid"])
@pytest.mark.one_in(4)
def test_the_time_left_is_estimated_within_a_quarter_halfway_through_full_training(
    monkeypatch, workers, step_seconds, sampler
):
    executor = SimulatedExecutor(workers, step_seconds=step_seconds, evaluate_seconds=0.02, save_seconds=0.01)
    space = {"a": [1, 2], "a late": [1, 2, 3, 4], "b": [1, 2, 3, 4], "b late": [1, 2, 3, 4]}
    samplers = {"random": optuna.samplers.RandomSampler(seed=0), "grid": optuna.samplers.GridSampler(space, seed=0)}
    views, _ = searched(monkeypatch, executor, optuna.create_study(sampler=samplers[sampler]))
    assert half_time_error(views) == pytest.approx(1.0, rel=0.25)


@pytest.mark.ci
@pytest.mark.parametrize("workers", [1, 4])
@pytest.mark.parametrize("algorithm", [FullTraining(window=8), SuccessiveHalving(10), MedianStopping(20, grace=20)])
def test_the_time_left_is_estimated_within_a_factor_of_three_halfway_through_adaptive_searches(
    monkeypatch, workers, algorithm
):
    executor = SimulatedExecutor(workers, evaluate_seconds=0.02, save_seconds=0.01)
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    views, _ = searched(monkeypatch, executor, study, algorithm=algorithm)
    assert 1 / 3 < half_time_error(views) < 3


def half_time_error(views: list[ProgressView]) -> float:
    """Estimated / true time left, half-way."""
    end = views[-1].elapsed
    half = min(views, key=lambda view: abs(view.elapsed - end / 2))
    assert half.seconds_left is not None
    return half.seconds_left / (end - half.elapsed)


def test_the_time_left_does_not_exceed_the_timeout(monkeypatch):
    views = Views()
    executor = SimulatedExecutor(1, step_seconds=1000.0)
    monkeypatch.setattr("hpstage.search.progress.progress._INTERVAL", 0.0)
    monkeypatch.setattr(
        front_door, "Progress", lambda _, study, page, **options: Progress(views, study, page, **options)
    )
    hpstage.optimize(
        optuna.create_study(), Failing(), grid, metric="value", steps=100, n_trials=3, timeout=3600,
        executor=executor, store=MemoryJournal(),
    )  # fmt: skip
    assert any(view.seconds_left is not None for view in views.all)
    assert all(view.seconds_left <= 3600 for view in views.all if view.seconds_left is not None)


def test_no_time_left_is_shown_before_a_step_was_measured(monkeypatch):
    views, _ = searched(monkeypatch, SimulatedExecutor(2), optuna.create_study())
    measured = [view for view in views if view.used_seconds > 0]
    assert views[0].seconds_left is None and "- left" in line(views[0])
    assert all((view.seconds_left is None) == (view.used_seconds == 0) for view in views[:-1])
    assert measured


def test_a_search_without_n_trials_shows_no_time_left(monkeypatch):
    def stop(study: optuna.Study, trial: optuna.trial.FrozenTrial) -> None:
        if trial.number == 20:
            study.stop()

    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    views, _ = searched(monkeypatch, SimulatedExecutor(2), study, n_trials=None, callbacks=[stop])
    assert views[0].n_trials is None
    assert {view.seconds_left for view in views if view.finished < 20} == {None}


# --- the numbers --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", [FullTraining(), SuccessiveHalving(2)])
def test_the_last_progress_view_agrees_with_study_and_result(monkeypatch, algorithm):
    study = optuna.create_study(direction="maximize", sampler=optuna.samplers.RandomSampler(seed=1))

    def space(trial: optuna.Trial) -> dict[str, object]:
        return {"a": s.piecewise({0: trial.suggest_int("a", 1, 3), 4: trial.suggest_int("late", 4, 7)})}

    views, result = searched(
        monkeypatch, hpstage.InlineExecutor(), study, space=space, steps=8, n_trials=20, metric="score",
        algorithm=algorithm,
    )  # fmt: skip
    last, states = views[-1], [trial.state for trial in study.trials]
    assert last.over and last.n_trials == 20 and last.finished == 20
    assert last.complete == states.count(TrialState.COMPLETE) > 0
    assert last.pruned == states.count(TrialState.PRUNED)
    assert last.failed == states.count(TrialState.FAIL) > 0
    assert last.best == study.best_value
    assert last.saved_seconds == result.savings.saved_seconds
    assert last.used_seconds == result.savings.worker_seconds
    assert last.merge_rate == result.savings.merge_rate
    assert last.stages_left == 0


def test_the_merge_rate_shown_is_that_of_the_whole_plan_until_a_later_call_ends(monkeypatch):
    study, journal = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0)), MemoryJournal()
    kept: set[object] = set()
    for _ in range(2):
        views, result = searched(monkeypatch, SimulatedExecutor(2, kept=kept), study, store=journal)
    assert views[-2].merge_rate == merged(result.plan).rate
    assert views[-1].merge_rate == result.savings.merge_rate


@pytest.mark.ci
@pytest.mark.parametrize("workers", [1, 5])
def test_the_trained_steps_shown_never_decrease_and_end_at_the_steps_of_the_result(monkeypatch, workers):
    executor = SimulatedExecutor(workers, step_seconds=lambda hp: 1.0 + 5 * (hp["b"] % 2), save_seconds=0.01)
    views, result = searched(monkeypatch, executor, optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0)))
    steps = [view.steps_trained for view in views[:-1]]
    assert steps == sorted(steps) and steps[-1] > 0
    assert all(view.steps_left >= 0 for view in views)
    assert views[-1].steps_trained == result.savings.steps_trained


def test_saved_time_is_shown_before_the_first_trial_finishes(monkeypatch):
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    executor = SimulatedExecutor(2)  # neither loading nor evaluating takes time: sharing is all there is to count
    views, result = searched(monkeypatch, executor, study, algorithm=SuccessiveHalving(50, 2))
    early = [view.saved_seconds for view in views if not view.finished]
    assert early[0] <= 0.0 < early[-1]  # as everywhere, what is used counts from the start, and so before any result
    assert views[-2].saved_seconds == pytest.approx(result.savings.saved_seconds)


def test_the_best_value_is_shown_with_its_step_until_a_trial_is_complete(monkeypatch):
    study = optuna.create_study(direction="maximize", sampler=optuna.samplers.RandomSampler(seed=0))
    executor = SimulatedExecutor(1, measure=lambda key, step: {"value": step + 0.5})
    views, _ = searched(monkeypatch, executor, study, algorithm=SuccessiveHalving(10))
    early = [view for view in views if view.best is not None and not view.complete]
    assert {(view.best, view.best_step) for view in early} >= {(10.5, 10), (40.5, 40)}
    assert any("best value 10.5 at step 10;" in line(view) for view in early)
    assert (views[-1].best, views[-1].best_step) == (study.best_value, None)


@pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning")
def test_the_best_value_shown_is_that_of_a_feasible_trial(monkeypatch):
    study = optuna.create_study(direction="maximize", sampler=optuna.samplers.RandomSampler(seed=0))
    views, _ = searched(
        monkeypatch, SimulatedExecutor(1), study, constraints=lambda metrics: {"value": metrics["value"] - 0.5}
    )
    assert max(trial.value for trial in study.trials) > 0.5 >= study.best_value
    assert views[-1].best == study.best_value


def test_progress_of_a_resumed_search_counts_trials_steps_and_stages_of_the_earlier_call(monkeypatch):
    study, journal = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0)), MemoryJournal()

    def interrupt(study: optuna.Study, trial: optuna.trial.FrozenTrial) -> None:
        if trial.number == 9:
            raise KeyboardInterrupt

    kept: set[object] = set()
    with pytest.raises(KeyboardInterrupt):
        searched(monkeypatch, SimulatedExecutor(2, kept=kept), study, store=journal, callbacks=[interrupt])
    views, _ = searched(monkeypatch, SimulatedExecutor(2, kept=kept), study, store=journal)
    assert views[0].finished >= 9 and views[0].n_trials == 64
    assert views[0].best is not None
    assert views[0].steps_trained > 0 < views[0].stages_done
    assert views[-1].finished == 64 and views[-1].stages_done > views[0].stages_done


@pytest.mark.ci
@pytest.mark.parametrize("algorithm", [FullTraining(), SuccessiveHalving(10, 2)])
def test_the_finished_stages_shown_never_decrease(monkeypatch, algorithm):
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    views, result = searched(monkeypatch, SimulatedExecutor(3), study, algorithm=algorithm)
    done = [view.stages_done for view in views]
    assert done == sorted(done) and views[-1].stages_left == 0
    assert done[-1] >= sum(node.trained > 0 for node in result.plan.nodes)


def test_the_last_progress_view_of_an_interrupted_search_counts_its_complete_trials(monkeypatch):
    views = Views()
    monkeypatch.setattr(front_door, "Progress", lambda _, study, page, **options: Progress(views, study))

    def interrupt(study: optuna.Study, trial: optuna.trial.FrozenTrial) -> None:
        if trial.number == 9:
            raise KeyboardInterrupt

    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    with pytest.raises(KeyboardInterrupt):
        hpstage.optimize(
            study, Failing(), grid, metric="value", steps=100, n_trials=64, executor=SimulatedExecutor(2),
            store=MemoryJournal(), callbacks=[interrupt],
        )  # fmt: skip
    complete = sum(trial.state == TrialState.COMPLETE for trial in study.trials)
    assert views.all[-1].over
    assert complete - 1 <= views.all[-1].complete <= complete


# --- the words ----------------------------------------------------------------------------------------------


def shown(view: ProgressView, width: int, encoding: str = "utf-8") -> list[str]:
    file = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    console = Console(file=file, width=width, force_terminal=True, color_system=None)
    with console.capture() as captured:
        console.print(Rendered(view))
    return captured.get().splitlines()


def test_the_progress_display_takes_six_lines_at_60_columns():
    assert shown(VIEW, 60) == [
        "digits  ━━━━━━━━━━━━━━━━━━━━━━━━╸               31/48 trials",
        "28 complete, 2 pruned, 1 failed, 17 running",
        "best accuracy 0.99721 · steps 1,200 trained, 300 left",
        "stages 45 done, 12 left · 2 of 2 workers busy",
        "merge rate 2.94 · worker time 27.6 s used, 55.3 s saved",
        "0:01:23 elapsed, about 61 min left",
    ]


def test_the_progress_bar_of_a_single_run_moves_with_its_steps():
    run = replace(VIEW, n_trials=1, complete=0, pruned=0, failed=0, queued=0)
    bars = [shown(replace(run, steps_trained=steps, steps_left=1500 - steps), 60)[0] for steps in (0, 750, 1499)]
    assert [bar.count("━") for bar in bars] == [0, 20, 39]
    assert "━" * 40 in shown(replace(run, complete=1, steps_trained=0, steps_left=0), 60)[0]


def test_the_progress_display_takes_three_lines_at_200_columns():
    assert shown(VIEW, 200) == [
        "digits  ━━━━━━━━━━━━━━━━━━━━━━━━━╸                31/48 trials",
        "28 complete, 2 pruned, 1 failed, 17 running · best accuracy 0.99721 · steps 1,200 trained, 300 left · "
        "stages 45 done, 12 left · 2 of 2 workers busy · merge rate 2.94",
        "worker time 27.6 s used, 55.3 s saved · 0:01:23 elapsed, about 61 min left",
    ]


@pytest.mark.parametrize("view", [VIEW, HOSTILE], ids=["plain", "hostile"])
@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_no_progress_line_exceeds_the_terminal_or_contains_control_characters(view, encoding):
    for width in range(1, 210):
        lines = shown(view, width, encoding)
        assert all(cell_len(text) <= width for text in lines)
        assert all(text.isprintable() for text in lines)
        assert encoding == "utf-8" or all(text.isascii() for text in lines)


def test_the_progress_line_escapes_control_characters_in_names():
    text = line(HOSTILE)
    assert text.isprintable()
    assert text.startswith(
        r"<script>alert(1)</script> $x_{ [bold]\x1b[31m\n\u202e: 0 trials; 0 complete; best 学習率[/]\x07 -inf"
    )
    assert "worker time 0 s used" in text and "saved" not in text and "0:00:00 elapsed, - left" in text


def test_the_progress_line_in_a_log_contains_all_figures():
    assert line(VIEW) == (
        "digits: 31/48 trials; 28 complete, 2 pruned, 1 failed, 17 running; best accuracy 0.99721; "
        "steps 1,200 trained, 300 left; stages 45 done, 12 left; 2 of 2 workers busy; merge rate 2.94; "
        "worker time 27.6 s used, 55.3 s saved; 0:01:23 elapsed, about 61 min left"
    )


def test_no_setup_message_is_shown_with_the_inline_executor(capsys: pytest.CaptureFixture[str]) -> None:
    options: dict[str, Any] = {"metric": "score", "steps": 2, "n_trials": 1, "show_progress_bar": True}
    options |= {"executor": hpstage.InlineExecutor(), "store": MemoryJournal()}
    hpstage.optimize(optuna.create_study(), Tape(), lambda trial: {"a": 1}, **options)
    shown = capsys.readouterr().err
    assert "1/1 trials" in shown and "Setting up" not in shown


def test_the_last_progress_line_of_an_interrupted_search_counts_its_unfinished_trials():
    broken = replace(VIEW, over=True, complete=3, pruned=0, failed=0, open=4, saved_seconds=-8.0)
    assert line(broken).startswith("digits: 3/48 trials; 3 complete, 4 open; best")
    assert "saved" not in line(broken)
    assert "merge rate" not in line(replace(broken, merge_rate=None, saved_seconds=8.0))  # nothing could be shared
    assert "saved" not in line(replace(broken, merge_rate=None, saved_seconds=8.0))


def test_the_progress_line_counts_running_paused_and_queued_trials_until_the_search_ends():
    begun = replace(VIEW, complete=0, pruned=0, failed=0, queued=8, paused=3)
    assert line(begun).startswith("digits: 0/48 trials; 37 running, 3 paused, 8 queued; best")
    assert line(replace(begun, over=True)).startswith("digits: 0/48 trials; 0 complete; best")


def test_progress_is_logged_at_the_start_at_most_every_ten_seconds_and_at_the_end():
    now = 0.0
    stream = io.StringIO()
    display = LineDisplay(stream, clock=lambda: now)
    display.begin(VIEW)
    display.write("Watch it at http://näher")
    for tick in range(1, 5 * 35):
        now = tick / 5
        display.show(VIEW)
    display.end(VIEW)
    assert LINE_SECONDS == 10.0
    first, address, *others = stream.getvalue().splitlines()
    assert address == "Watch it at http://näher"
    assert [first, *others] == [line(VIEW)] * 5


@pytest.mark.ci
def test_a_notebook_shows_progress_in_one_updated_output(tmp_path: Path) -> None:
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    cell = nbformat.v4.new_code_cell(
        "import optuna, hpstage\n"
        "from hpstage.testing.toys import Tape\n"
        "study = optuna.create_study(study_name='<i>tape')\n"
        "result = hpstage.optimize(study, Tape(), lambda trial: {'a': trial.number, 'b': 1.0}, metric='score',\n"
        "    steps=8, n_trials=3, executor=hpstage.InlineExecutor(), store='store', show_progress_bar=True)"
    )
    notebook = nbformat.v4.new_notebook(cells=[cell])
    nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    [shown] = [output for output in cell.outputs if output.output_type == "display_data"]
    html = shown["data"]["text/html"]
    assert "&lt;i&gt;tape" in html and "<i>" not in html
    text = re.sub("<[^>]+>", "", html)
    assert "3/3 trials" in text and "3 complete" in text
    assert not [output for output in cell.outputs if "trials;" in output.get("text", "")]
