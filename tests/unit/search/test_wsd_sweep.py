"""Warm-up, stable, decay in one call: a trunk is trained once, a decay once, whatever is requested first."""

from __future__ import annotations

import logging
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.trial import TrialState

import hpstage
from hpstage import schedule as s
from hpstage.algos import SuccessiveHalving
from hpstage.checkpoints.evictable import kept_states
from hpstage.errors import ScheduleError, UsageError
from hpstage.execution.simulated import SimulatedExecutor
from hpstage.plan.facts import TrialAdded
from hpstage.store import MemoryJournal
from hpstage.testing.toys import Tape, alone
from tests.unit.search.test_resume import Fuse, Fused
from tests.unit.searches import Search, trial

pytestmark = pytest.mark.sampled(8)

HORIZONS = [40, 60, 80, 100, 120, 160]
FRACTION = 0.2
FORMS: list[Any] = ["linear", "1-sqrt"]


def sweep(**options: Any) -> s.WSDSweep:
    settings: dict[str, Any] = {"horizons": HORIZONS, "warmup": 10, "decay_fraction": FRACTION, "decay_form": FORMS}
    return s.wsd_sweep(options.pop("peak", 0.1), **settings | options)


def search(space: Any, store: Any, trainable: object = None, **options: Any) -> hpstage.Result:
    study = options.pop("study", None) or optuna.create_study(study_name="wsd")
    settings: dict[str, Any] = {"metric": "score", "executor": hpstage.InlineExecutor(), "store": store} | options
    return hpstage.optimize(study, trainable or Tape(), space, **settings)


def ordered(order: str) -> list[int]:
    horizons = sorted(HORIZONS, reverse=order == "descending")
    if order == "shuffled":
        random.Random(3).shuffle(horizons)
    return horizons


def closed_form(horizons: Sequence[int], forms: int) -> int:
    """S / p unique steps, less what the closed form counts for every decay: its first step, still at the full rate,
    is the trunk's."""
    total, longest, trials = forms * sum(horizons), max(horizons), forms * len(horizons)
    return round((1 - FRACTION) * longest + FRACTION * total) - (trials - 1)


def check_values(result: hpstage.Result) -> None:
    for done in result.study.trials:
        assert done.state == TrialState.COMPLETE
        horizon = done.params["horizon"]
        lr = s.wsd(
            done.params["peak"],
            horizon,
            warmup=10,
            decay=round(FRACTION * horizon),
            decay_form=done.params["decay_form"],
        )
        assert result.schedules(done)["lr"] == lr
        assert done.value == alone(result.schedules(done), horizon).score


@pytest.mark.parametrize("order", ["ascending", "descending", "shuffled"])
@pytest.mark.parametrize("sampler", [None, optuna.samplers.RandomSampler(seed=1)], ids=["tpe", "random"])
def test_a_wsd_sweep_of_six_horizons_and_two_decay_forms_trains_the_calculated_unique_steps(
    order: str, sampler: Any, tmp_path: Path
) -> None:
    study = optuna.create_study(sampler=sampler)
    result = search(sweep(horizons=ordered(order)), tmp_path, study=study)
    saved = result.savings
    assert saved.trials == len(study.trials) == 12
    assert saved.steps_asked == 2 * sum(HORIZONS)
    assert saved.steps_trained == saved.steps_unique == closed_form(HORIZONS, 2) == 341
    check_values(result)

    later = search(sweep(horizons=ordered(order)[:3], decay_form=[*FORMS, "cosine"]), tmp_path, study=study)
    decays = [round(FRACTION * horizon) for horizon in ordered(order)[:3]]
    assert later.savings.trials == 3 and len(study.trials) == 15
    assert later.savings.steps_trained == sum(decays) - 3  # their first steps are the trunk's
    check_values(later)


@pytest.mark.ci
@pytest.mark.parametrize("order", ["ascending", "descending", "shuffled"])
def test_horizons_of_a_sweep_searched_one_by_one_train_the_same_steps_in_any_order(order: str, tmp_path: Path) -> None:
    """Each horizon has its own call and study. The sweep always has all horizons: they are known from the start."""
    trained = 0
    for horizon in ordered(order):
        whole = sweep()

        def one(trial: Any, whole: Any = whole, horizon: int = horizon) -> Any:
            point = next(p for p in whole.points if p["horizon"] == horizon and p["decay_form"] == FORMS[trial.number])
            trial.set_user_attr("point", point)
            return whole(optuna.trial.FixedTrial(point))

        study = optuna.create_study()
        trained += search(one, tmp_path, study=study, n_trials=2, steps=max(HORIZONS)).savings.steps_trained
    assert trained == closed_form(HORIZONS, 2)


def test_decays_of_horizons_added_later_branch_off_at_multiples_of_keep_every(tmp_path: Path) -> None:
    first = search(sweep(horizons=[160], keep_every=20), tmp_path)
    later = search(sweep(horizons=[75, 100], decay_form="linear"), tmp_path, study=optuna.create_study())
    trained = later.plan.totals.steps_trained - first.plan.totals.steps_trained
    assert trained == 15 + 20  # the decays: those of 75 and 100 begin at 60 and 80


def test_a_sweep_saves_only_states_on_its_trunk_and_never_evicts_them(tmp_path: Path) -> None:
    result = search(sweep(keep_every=50), tmp_path, checkpoint_every=10**6, checkpoint_budget=0)
    trunk = result.trial(10)
    assert trunk.schedules["lr"].length == 160
    begins = [round((1 - FRACTION) * horizon) + 1 for horizon in HORIZONS]
    assert [step for step in trunk.kept if step < 160] == sorted([*begins, 50, 100])
    needed = {state.key for state in kept_states(result.plan) if state.needed}
    assert {trunk.planned.node_at(step).states[step].kept.key for step in trunk.kept if step < 160} <= needed
    elsewhere = {
        state.step for state in result.plan.kept.values() if state.node is not trunk.planned.node_at(state.step)
    }
    assert elsewhere <= set(HORIZONS)


def test_decays_of_a_sweep_may_change_hyperparameters_and_each_seed_has_its_own_trunk(tmp_path: Path) -> None:
    space = sweep(
        horizons=[40, 80],
        decay_form="linear",
        hp={"mixture": 1, "seed": [0, 1], "wd": s.linear(1.0, 1.0, 0.5, 100)},
        decay_hp={"mixture": [1, 2]},
    )
    result = search(space, tmp_path)
    trunk, decays = 64, (8, 16)
    # Where the mixture changes, a decay has all of its steps; else its first is the trunk's.
    assert result.savings.steps_trained == 2 * (trunk + 1 + sum(decays) - 2 + sum(decays))
    for done in result.study.trials:
        schedules, horizon = result.schedules(done), done.params["horizon"]
        joint = horizon - decays[horizon > 40]
        assert schedules["mixture"] == s.constant(1).until(joint).then(
            s.constant(done.params["decay_mixture"]).until(horizon - joint)
        )
        assert schedules["seed"] == s.constant(done.params["seed"]).until(horizon)
        assert done.value == alone(schedules, horizon).score


def test_an_interrupted_sweep_resumes_and_a_complete_sweep_proposes_no_trial(tmp_path: Path) -> None:
    Fused.fuse = Fuse(100)
    study = optuna.create_study()
    with pytest.raises(KeyboardInterrupt):
        search(sweep(), tmp_path, Fused(), study=study)
    result = search(sweep(), tmp_path, Fused(), study=study)
    assert result.plan.totals.steps_trained == closed_form(HORIZONS, 2)
    check_values(result)
    assert len(study.trials) == 12
    again = search(sweep(), tmp_path, Fused(), study=study)
    assert again.savings.trials == again.savings.steps_trained == 0 and len(study.trials) == 12


def test_a_sweep_with_changed_code_trains_its_points_again_in_the_same_study(tmp_path: Path) -> None:
    class Other(Tape):
        version = "2"

    study = optuna.create_study()
    for folder, trainable in (("one", Tape()), ("two", Other())):
        result = search(sweep(), tmp_path / folder, trainable, study=study)
        assert result.savings.steps_trained == 341
    assert len(study.trials) == 24


def test_changed_choices_of_a_sweep_are_refused_and_leave_the_study_unchanged(tmp_path: Path) -> None:
    study = optuna.create_study()
    search(sweep(hp={"mixture": ["web", "code"]}), tmp_path, study=study)
    with pytest.raises(UsageError, match=r"'mixture' is .* in the space\. Use another study"):
        search(sweep(hp={"mixture": ["web", "books"]}), tmp_path, study=study)
    assert len(study.trials) == 24 and {trial.state for trial in study.trials} == {TrialState.COMPLETE}
    other = search(sweep(hp={"mixture": ["web", "books"]}), tmp_path, study=optuna.create_study())
    assert other.savings.steps_trained == 341


def test_points_of_a_sweep_beyond_n_trials_wait_in_the_study_for_the_next_call(tmp_path: Path) -> None:
    study = optuna.create_study(sampler=hpstage.optuna.StageTreeSampler(optuna.samplers.TPESampler(seed=1)))
    search(sweep(), tmp_path, study=study, n_trials=5)
    assert [trial.state for trial in study.trials].count(TrialState.WAITING) == 7
    result = search(sweep(), tmp_path, study=study, extend=True)
    assert len(study.trials) == 12 and result.plan.totals.steps_trained == 341
    check_values(result)


@pytest.mark.ci
def test_a_later_sweep_with_a_longer_horizon_gets_no_advice_to_use_extend(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    study = optuna.create_study()
    search(sweep(horizons=[40], decay_form="linear"), tmp_path, study=study)
    with caplog.at_level(logging.INFO, "hpstage"):
        result = search(sweep(horizons=[40, 80], decay_form="linear"), tmp_path, study=optuna.create_study())
        longer = search(sweep(horizons=[160], decay_form="linear"), tmp_path, study=study)
    assert result.savings.trials == 2
    assert longer.savings.trials == 1
    assert "extend=True" not in caplog.text


def test_a_sweep_can_be_pruned_by_successive_halving(tmp_path: Path) -> None:
    result = search(sweep(), tmp_path, algorithm=SuccessiveHalving(40, 2))
    states = [trial.state for trial in result.study.trials]
    assert len(states) == 12 and set(states) == {TrialState.COMPLETE, TrialState.PRUNED}


def test_check_accepts_a_sweep_as_space() -> None:
    report = hpstage.check(Tape(), sweep(), steps=4)
    assert report.ok, report


def test_preflight_of_a_sweep_is_exact() -> None:
    planned = hpstage.preflight(sweep())
    assert planned.exact and planned.trials.median == 12
    assert planned.steps_trained.median == 341 and planned.steps_asked.median == 2 * sum(HORIZONS)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"warmup": 33}, r"warmup \(33\) and decay \(8\) are longer than steps \(40\)"),
        ({"decay_form": "square"}, "decay_form is 'square'; give one of 'linear', 'cosine', '1-sqrt', 'expo"),
        (
            {"decay_form": "exponential"},
            "final is 0.0, which an exponential decay from 0.1 never reaches; .*final=0.01",
        ),
        ({"horizons": []}, "horizons is empty"),
        ({"horizons": [0]}, "horizons is 0"),
        ({"decay_fraction": 1.5}, "decay_fraction is 1.5; it must be from 0 to 1"),
        ({"hp": {"lr": 3}}, "hp has 'lr', which the sweep sets itself"),
        ({"hp": {"peak": 3}}, "hp has 'peak', which"),
        ({"hp": {"wd": s.onecycle(1, 50)}}, "'wd' ends at step 50, before the longest horizon, 160"),
        ({"decay_hp": {"mixture": 3}}, "decay_hp has 'mixture', but hp does not"),
        ({"hp": {"a": 1, "decay_a": [1, 2]}, "decay_hp": {"a": 2}}, "hp has 'decay_a', which is the parameter"),
        ({"keep_every": 0}, "keep_every is 0"),
        ({"peak": "high"}, "peak is 'high'"),
    ],
)
def test_the_error_of_an_invalid_sweep_names_the_argument(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        sweep(**options)


def test_a_search_without_steps_is_refused_unless_its_space_is_a_sweep() -> None:
    with pytest.raises(UsageError, match="steps is missing"):
        search(lambda trial: {"a": 1}, MemoryJournal(), n_trials=1)


def test_a_sweep_over_sets_has_each_point_once_even_with_a_decay_of_no_steps() -> None:
    space = s.wsd_sweep([0.1, 1], horizons={80, 40}, warmup=0, decay_fraction=[0, 0.5], decay_form={"linear", "cosine"})
    assert len(space.points) == 2 * 2 * (1 + 2)
    assert (
        space.points
        == s.wsd_sweep(
            [0.1, 1], horizons=[40, 80], warmup=0, decay_fraction=[0, 0.5], decay_form=["cosine", "linear"]
        ).points
    )


def test_an_exponential_wsd_decay_falls_by_the_same_factor_at_each_step() -> None:
    lr = s.wsd(0.1, 20, warmup=5, decay=10, final=0.001, decay_form="exponential")
    values = list(lr.values(20))
    assert values[9] == values[10] == 0.1
    assert values[15] == pytest.approx(0.01) and values[19] * (values[19] / values[18]) == pytest.approx(0.001)


# --- keep_at, of any space --------------------------------------------------------------------------------


def test_a_running_chain_saves_states_at_the_keep_at_steps_of_a_trial_added_later() -> None:
    """The trial is added while a chain passes by; another driver's fold of the journal has the same steps."""
    executor = SimulatedExecutor(1, step_seconds=1.0)
    run = Search(executor)
    first = trial(0, {"a": s.constant(1)}, 20)
    run.driver.add([first])
    run.driver.ask(first.trial, 20)
    run.driver.wait(0.0)
    added = TrialAdded(trial(1, {"a": s.constant(1)}, 16).trial, {"a": s.constant(1).until(16)}, 16, (7, 12, 16))
    run.driver.add([added])
    run.answers(1)
    node = run.plan.nodes[0]
    assert [step for step, state in sorted(node.states.items()) if state.kept] == [7, 12, 16, 20]
    assert run.plan.totals.steps_trained == 20
    again = Search(SimulatedExecutor(1), run.journal).plan
    assert list(again.nodes[0].keep_at) == [7, 12, 16] and again.trials[added.trial].keep_at == (7, 12, 16)


def test_keep_at_steps_save_states_and_train_no_further_step(tmp_path: Path) -> None:
    result = search(
        lambda trial: {"a": 1, "steps": [5, 9][trial.number % 2], "keep_at": [3, 7, 8, 40]},
        tmp_path,
        steps=9,
        n_trials=2,
    )
    assert result.savings.steps_trained == 9
    assert result.trial(1).kept == [3, 5, 7, 8, 9]


@pytest.mark.parametrize(
    ("keep_at", "message"),
    [(0.5, "0.5: this name is for steps"), ([0], "is 0; it must be"), ("all", "'all': this name")],
)
def test_an_invalid_keep_at_is_named(keep_at: object, message: str) -> None:
    with pytest.raises(UsageError, match=f"'keep_at'.*{message}"):
        search(lambda trial: {"a": 1, "keep_at": keep_at}, MemoryJournal(), steps=9, n_trials=2)
