"""The data frames of a plan: what they sum to, and what they say of trials, states and workers."""

from __future__ import annotations

import math
import warnings
from fractions import Fraction

import optuna
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import hpstage
from hpstage import schedule as s
from hpstage.accounting.account import new_account
from hpstage.accounting.payments import rounded
from hpstage.accounting.savings import merged
from hpstage.algos import FullTraining, PopulationBasedTraining, SuccessiveHalving
from hpstage.execution.simulated import SimulatedExecutor
from hpstage.plan.facts import ChainId, NodeId, StageFailed, StateLost, StateReached, TrialAdded, UserFailure, WorkerId
from hpstage.plan.log import open_plan
from hpstage.report import Frames, frames
from hpstage.store.memory import MemoryJournal
from tests.records import separated
from tests.unit.searches import WORKLOAD, Search, searches, trial

optuna.logging.set_verbosity(optuna.logging.ERROR)

PARTS = ["train_seconds", "load_seconds", "evaluate_seconds", "save_seconds"]
SECONDS = st.floats(1e-3, 1e4, allow_nan=False)


def total(column: pd.Series) -> Fraction:
    return sum((Fraction(float(value)) for value in column), Fraction(0))


def check_sums(found: Frames) -> None:
    """Nothing is lost and nothing counted twice, to the last bit and however it is grouped."""
    trials, stages, workers = found.trials, found.stages, found.workers
    assert (trials.seconds_used + trials.seconds_saved == trials.seconds_alone).all()
    assert total(trials.seconds_used) + total(trials.seconds_saved) == total(trials.seconds_alone)
    assert trials.seconds_used.sum() + trials.seconds_saved.sum() == trials.seconds_alone.sum()
    spent = sum((total(stages[part]) for part in PARTS), Fraction(0)) + total(workers.wasted_seconds)
    assert total(trials.seconds_used) == spent
    assert Fraction(float(trials.seconds_used.sum())) == spent


def search(
    name: str = "study", journal: MemoryJournal | None = None, *, direction: str = "maximize", **options: object
) -> tuple[hpstage.Result, MemoryJournal]:
    """A search on three simulated workers, where everything takes its time."""
    study = optuna.create_study(study_name=name, direction=direction, sampler=optuna.samplers.RandomSampler(seed=0))
    journal = MemoryJournal() if journal is None else journal
    executor = SimulatedExecutor(3, step_seconds=0.3, evaluate_seconds=0.7, load_seconds=0.1, save_seconds=0.2)
    settings = {"algorithm": SuccessiveHalving(min_steps=4, reduction_factor=2), "steps": 16, "n_trials": 12} | options
    result = hpstage.optimize(study, object(), space, metric="value", executor=executor, store=journal, **settings)  # type: ignore[arg-type]
    return result, journal


def space(trial: optuna.Trial) -> dict[str, object]:
    late = trial.suggest_categorical("late", [0.1, 0.2, 0.3])
    return {"lr": s.piecewise({0: trial.suggest_categorical("lr", [1.0, 2.0]), 6: late}), "name": "sgd"}


@pytest.mark.ci
@settings(max_examples=15)
@given(
    st.lists(searches(), min_size=1, max_size=3),
    st.data(),
    st.tuples(SECONDS, SECONDS, SECONDS, SECONDS),
    st.lists(st.floats(0.1, 2e4), max_size=2),
)
def test_busy_and_saved_seconds_of_trials_sum_exactly_to_the_seconds_without_sharing(
    rounds: list[list[TrialAdded]], data: st.DataObject, costs: tuple[float, float, float, float], deaths: list[float]
) -> None:
    step, evaluate, load, save = costs
    executor = SimulatedExecutor(2, step_seconds=step, evaluate_seconds=evaluate, load_seconds=load, save_seconds=save)
    for after in deaths:
        executor.cluster.kill(executor.cluster.join(0.0), after)
    run = Search(executor, checkpoint_every=3, max_losses=99)
    for number, trials in enumerate(rounds):
        mine = [TrialAdded(f"study {number}/{i}", t.schedules, t.steps) for i, t in enumerate(trials)]
        stops = [data.draw(st.integers(1, added.steps)) for added in mine]
        run.run(mine, stops, validate=False)
    found = frames(run.journal)
    check_sums(found)
    totals = run.plan.totals
    assert math.isclose(found.trials.seconds_used.sum(), totals.worker_seconds, rel_tol=1e-6, abs_tol=1e-3)
    assert found.workers.steps.sum() == (found.stages.stop - found.stages.start).sum() == totals.steps_trained
    assert found.trials.steps_asked.sum() - found.trials.steps_shared.sum() == merged(run.plan).steps_unique
    for study, mine in found.trials.groupby("study"):
        stages = found.stages[found.stages.study == study]
        wasted = total(mine.seconds_used) - sum((total(stages[part]) for part in PARTS), Fraction(0))
        assert 0 <= wasted <= total(found.workers.wasted_seconds)


def test_steps_are_charged_to_the_first_trial_that_requests_them_and_not_to_later_trials() -> None:
    run = Search(SimulatedExecutor(1, step_seconds=2.0, evaluate_seconds=1.0))
    one, two = (trial(i, {"a": s.piecewise({0: 1, 5: 2 + i})}, 8) for i in range(2))
    run.run([one], [8])
    run.run([two], [5])
    found = frames(run.journal).trials.set_index("trial")
    assert found.seconds_used.to_dict() == {
        "study/0": 17.0,
        "study/1": 1.0,
    }  # the evaluation that only the second wants
    assert found.seconds_alone.to_dict() == {"study/0": 17.0, "study/1": 11.0}
    assert found.steps_shared.to_dict() == {"study/0": 0, "study/1": 5}


def test_frames_agree_with_the_study_and_with_the_savings_of_the_result() -> None:
    result, journal = search()
    found = frames(journal)
    check_sums(found)
    expected = result.study.get_trials()
    assert found.trials.study.unique().tolist() == ["study"]
    assert found.trials.number.tolist() == [t.number for t in expected]
    assert found.trials.state.tolist() == [t.state.name for t in expected]
    assert found.trials.value.tolist() == [t.value for t in expected]
    for name in ("lr", "late"):
        assert found.trials[f"params_{name}"].tolist() == [t.params[name] for t in expected]
    assert found.trials.steps_shared.tolist() == [t.user_attrs["hpstage:steps_shared"] for t in expected]
    savings = result.savings
    assert found.trials.seconds_alone.sum() == pytest.approx(savings.worker_seconds_alone, abs=1e-3)
    assert found.trials.seconds_saved.sum() == pytest.approx(savings.saved_seconds, abs=1e-3)
    assert set(found.stages.hp_lr) <= {1.0, 2.0, 0.1, 0.2, 0.3} and set(found.stages.hp_name) == {"sgd"}
    plan = result.plan
    kept = found.states.dropna(subset="kept_bytes")
    assert set(kept.key) == set(plan.kept) and kept.kept_bytes.sum() == plan.kept_bytes
    assert result.best_value in set(found.states.metrics_value)
    assert found.events.position.tolist() == list(range(len(separated(journal))))
    assert found.events.type.value_counts()["TrialEnded"] == len(expected)


def test_a_second_study_with_the_trials_of_the_first_study_is_charged_no_seconds() -> None:
    _, journal = search("one", algorithm=FullTraining())
    result, _ = search("two", journal, algorithm=FullTraining())
    found = frames(journal)
    check_sums(found)
    assert result.savings.steps_trained == 0
    assert found.trials.groupby("study").seconds_used.sum()["two"] == 0.0
    assert set(found.stages.study) == {"one"}


def test_frames_name_the_donor_of_a_fork_and_the_trial_that_a_longer_trial_extends() -> None:
    result, journal = search(algorithm=PopulationBasedTraining(interval=4), n_trials=6)
    forks = frames(journal).trials.dropna(subset="donor")
    expected = {t.number: t.user_attrs for t in result.study.get_trials() if "hpstage:donor" in t.user_attrs}
    assert forks.number.tolist() == list(expected) != []
    assert forks.forked_at.tolist() == [attrs["hpstage:forked_at"] for attrs in expected.values()]

    result, journal = search(n_trials=4, algorithm=FullTraining(), steps=8)
    hpstage.optimize(
        result.study,
        object(),
        space,
        metric="value",
        steps=16,
        n_trials=1,
        extend=True,
        executor=SimulatedExecutor(1),
        store=journal,
    )
    found = frames(journal)
    check_sums(found)
    longer = found.trials.dropna(subset="extends")
    assert longer.extends.tolist() == ["study/0", "study/1", "study/2", "study/3"]


def test_frames_show_a_lost_checkpoint_and_a_killed_worker() -> None:
    executor = SimulatedExecutor(1, step_seconds=1.0)
    executor.cluster.kill(executor.cluster.join(0.0), 3.5)
    run = Search(executor, checkpoint_every=2)
    run.run([trial(i, {"a": s.constant(i + 1)}, 8) for i in range(2)], [8, 8])
    run.driver.log.write([StateLost(run.plan.nodes[0].id, 8, "evicted", "a test")])
    found = frames(run.journal)
    check_sums(found)
    died = found.workers.dropna(subset="outcome")
    assert died.outcome.tolist() == ["died"] and died.wasted_seconds.tolist() == [1.5]
    assert (died.end - died.start).tolist() == [3.5]
    lost = found.states.dropna(subset="lost_reason")
    assert lost[["node", "step", "lost_reason"]].values.tolist() == [[0, 8, "evicted: a test"]]
    assert lost.kept_bytes.isna().all()


def test_frames_have_a_column_for_each_objective_and_unfinished_trials_are_running() -> None:
    study = optuna.create_study(study_name="two", directions=["maximize", "minimize"])
    journal = MemoryJournal()
    hpstage.optimize(
        study,
        object(),
        space,
        metric=["a", "b"],
        steps=4,
        n_trials=3,
        executor=SimulatedExecutor(1, measure=lambda key, step: {"a": math.inf, "b": float(step)}),
        store=journal,
    )
    found = frames(journal).trials
    assert found.value.isna().all()
    assert found.values_0.tolist() == [math.inf] * 3 and found.values_1.tolist() == [4.0] * 3

    cut = MemoryJournal()
    ends = frames(journal).events.type.eq("TrialEnded").idxmax()
    cut.append(separated(journal).read(0, int(ends)))
    assert frames(cut).trials.state.tolist()[0] == "RUNNING"


def test_a_plan_without_trials_has_empty_frames_with_all_columns() -> None:
    journal = MemoryJournal()
    open_plan(journal, WORKLOAD, {})
    found = frames(journal)
    full = frames(search()[1])
    for name in ("trials", "stages", "states", "workers"):
        empty, filled = getattr(found, name), getattr(full, name)
        assert len(empty) == 0
        assert [c for c in filled.columns if not c.startswith(("hp_", "metrics_", "params_"))] == list(empty.columns)
        assert (filled[empty.columns].dtypes == empty.dtypes).all()
    assert found.events.type.tolist() == ["PlanCreated"]


def test_a_hyperparameter_with_values_of_several_types_is_one_column_that_parquet_can_hold(tmp_path) -> None:
    run = Search(SimulatedExecutor(1))
    values = [1, "one", 2.5, True]
    run.run(
        [
            trial(i, {"a": s.constant(value), "big": s.constant(2**64 - 1 if i else -1)}, 2)
            for i, value in enumerate(values)
        ],
        [2] * 4,
    )
    found = frames(run.journal).stages
    assert sorted(found.hp_a) == sorted(["1", '"one"', "2.5", "true"])
    assert set(found.hp_big) == {"-1", str(2**64 - 1)}
    found.to_parquet(tmp_path / "stages.parquet")


def test_parameters_that_json_cannot_represent_are_written_as_their_python_text() -> None:
    choices = [None, True, 1, 2.5, "text", math.inf, (1, 2), 2**70]
    study = optuna.create_study(study_name="odd", sampler=optuna.samplers.GridSampler({"x": range(len(choices))}))

    def odd(trial: optuna.Trial) -> dict[str, object]:
        number = trial.suggest_categorical("x", list(range(len(choices))))
        trial.suggest_categorical(f"only {number}", [choices[number]])
        return {"a": number}

    journal = MemoryJournal()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Choices for a categorical distribution")
        hpstage.optimize(
            study, object(), odd, metric="value", steps=2, n_trials=8, executor=SimulatedExecutor(1), store=journal
        )
    found = frames(journal).trials
    expected = {i: found[f"params_only {i}"].dropna().tolist() for i in range(len(choices))}
    assert expected == {0: [], 1: [True], 2: [1], 3: [2.5], 4: ["text"], 5: ["inf"], 6: ["(1, 2)"], 7: [str(2**70)]}
    assert sorted(found.params_x) == list(range(len(choices)))


def test_an_account_updated_record_by_record_equals_the_account_of_the_whole_journal() -> None:
    _, journal = search()
    whole, grown = new_account(journal), new_account(journal)
    whole.catch_up(journal)
    growing = MemoryJournal()
    for record in journal.read():
        growing.append([record])
        grown.catch_up(growing)
    assert grown.trials == whole.trials and any(row.charged_seconds for row in grown.trials.values())
    assert grown.whole() == whole.whole() and grown.plan.totals == whole.plan.totals
    assert whole.plan.position == grown.plan.position == len(journal)


@given(st.lists(st.floats(0, 1e9), max_size=20), st.randoms())
def test_rounded_seconds_have_the_same_sum_in_any_order(seconds: list[float], random) -> None:
    values = [rounded(value) for value in seconds[:4]]
    assert all(abs(a - b) <= 2.0**-21 for a, b in zip(values, seconds, strict=False))
    shuffled = random.sample(values, len(values))
    assert sum(shuffled) == sum(values) == float(sum(map(Fraction, values)))


def test_a_failure_counts_once_and_only_until_later_training_passes_its_step() -> None:
    run = Search(SimulatedExecutor(1))
    run.driver.add([trial(0, {"a": s.constant(1)}, 8)])
    failed = StageFailed(NodeId(0), 4, False, UserFailure("ValueError: x", ""))
    run.driver.log.write([failed, failed])
    account = new_account(run.journal)
    account.catch_up(run.journal)
    assert account.failures() == [failed]
    for start, stop, overcome in ((0, 4, False), (4, 8, True)):
        run.driver.log.write([StateReached(ChainId("c"), WorkerId("w"), NodeId(0), start, stop, 1.0, 1.0)])
        account.catch_up(run.journal)
        assert (account.failures() == []) == overcome
