"""``hpstage plan`` and ``hpstage.preflight``: what they say before a search is what the search then does."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from random import Random
from typing import Any

import optuna
import pytest
from typer.testing import CliRunner

import hpstage
from hpstage import schedule as s
from hpstage.algos import FullTraining, Hyperband, MedianStopping, OptunaPruner, SuccessiveHalving
from hpstage.cli.app import app
from hpstage.cli.naming import algorithm_named, named
from hpstage.errors import StoreError, UsageError
from hpstage.execution.simulated import SimulatedExecutor
from hpstage.plan.step_times import StepTimes
from hpstage.rehearsal.costs import Timing, by_values, costs_of_plan, measured
from hpstage.rehearsal.rehearse import most_needed
from hpstage.rehearsal.samplers import values_met
from hpstage.schedule.space import describe
from hpstage.store import MemoryJournal
from hpstage.testing.toys import Tape
from tests.unit.searches import histories, trial

STEPS = 120


@pytest.fixture(autouse=True)
def quiet_optuna():
    verbosity = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    yield
    optuna.logging.set_verbosity(verbosity)


def space(trial):
    drops = [trial.suggest_categorical("first", [10, 30, 60]), trial.suggest_categorical("second", [80, 100])]
    return {
        "lr": s.multistep(trial.suggest_categorical("lr", [0.2, 0.1, 0.05]), milestones=drops, gamma=0.2),
        "momentum": 0.9,
        "batch_size": s.piecewise({0: 64, trial.suggest_categorical("grow", [20, 40, 80]): 256}),
    }


def random(seed=0):
    return optuna.samplers.RandomSampler(seed=seed)


def search(executor, sampler, *, algorithm=None, metric="value", n_trials=48, store=None, trainable=None):
    """The search that a preflight tells of, on real code paths only."""
    return hpstage.optimize(
        optuna.create_study(sampler=sampler),
        Tape() if trainable is None else trainable,
        space,
        metric=metric,
        steps=STEPS,
        n_trials=n_trials,
        algorithm=algorithm,
        executor=executor,
        store=MemoryJournal() if store is None else store,
    )


# --- steps ------------------------------------------------------------------------------------------------


def partial_grid():
    grid = {"lr": [0.2, 0.05], "first": [10, 30, 60], "second": [80, 100], "grow": [20, 80]}
    return optuna.samplers.GridSampler(grid, seed=1)


@pytest.mark.parametrize("make", [random, lambda: random(7), partial_grid])
def test_full_training_trains_what_was_said(make):
    said = hpstage.preflight(space, steps=STEPS, n_trials=20, sampler=make(), workers=(1, 3))
    done = search(hpstage.InlineExecutor(), make(), metric="score", n_trials=20).savings
    assert said.exact and said.rehearsals == 1
    for name in ("trials", "steps_asked", "steps_unique", "merge_rate"):
        spread = getattr(said, name)
        assert spread.low == spread.median == spread.high == getattr(done, name), name
    assert "No decision depends on metrics" in str(said)


def test_the_demo_is_counted_as_by_its_distinct_prefixes():
    pytest.importorskip("sklearn")
    demo = Path(__file__).parents[3] / "scripts" / "demo_digits.py"
    its_space = named(f"{demo}:space", "the space")
    steps, n_trials = named(f"{demo}:STEPS", "the steps"), named(f"{demo}:N_TRIALS", "the trials")
    study = optuna.create_study(sampler=random())
    trials = [trial(number, describe(its_space, study.ask(), steps).schedules, steps) for number in range(n_trials)]
    said = hpstage.preflight(its_space, steps=steps, n_trials=n_trials, workers=(2,))
    assert said.steps_asked.median == steps * n_trials
    assert said.steps_unique.median == len(histories(trials, [steps] * n_trials))
    halving = SuccessiveHalving(15, 4, tree_aware=False)
    said = hpstage.preflight(its_space, steps=steps, n_trials=n_trials, workers=(2,), algorithm=halving)
    # How far trials go is a matter of counts; which of them do, and so what they share, is one of values.
    assert said.steps_asked.low == said.steps_asked.high == 48 * 15 + 12 * 45 + 3 * 60
    assert said.steps_unique.low <= 490 <= said.steps_unique.high  # as the README's demo trained
    assert not said.exact and said.steps_unique.low < said.steps_unique.high


def test_a_grid_is_named_and_counted_to_its_end():
    said = hpstage.preflight(space, steps=STEPS, sampler="grid", workers=(2,))
    assert said.trials.median == 3 * 3 * 2 * 3
    # lr x first drop x second drop x growth, as one counts them by hand: 3 roots, each with 3 x 3 beginnings.
    points = [
        {"lr": lr, "first": first, "second": second, "grow": grow}
        for lr in (0.2, 0.1, 0.05)
        for first in (10, 30, 60)
        for second in (80, 100)
        for grow in (20, 40, 80)
    ]
    trials = [
        trial(i, describe(space, optuna.trial.FixedTrial(point, i), STEPS).schedules, STEPS)
        for i, point in enumerate(points)
    ]
    assert said.steps_unique.median == len(histories(trials, [STEPS] * len(points)))


@pytest.mark.parametrize(
    "algorithm", [SuccessiveHalving(15, 4), SuccessiveHalving(15, 4, tree_aware=False), MedianStopping(30, 30)]
)
def test_where_metrics_decide_a_search_lies_within_the_range(algorithm):
    said = hpstage.preflight(space, steps=STEPS, n_trials=48, algorithm=algorithm, workers=(2,), rehearsals=15)
    done = search(hpstage.InlineExecutor(), random(), algorithm=algorithm, metric="score").savings
    assert not said.exact
    assert said.steps_unique.low <= done.steps_unique <= said.steps_unique.high
    assert said.merge_rate.low <= done.merge_rate <= said.merge_rate.high
    assert "rehearsals with random ones" in str(said)


def test_a_sampler_that_learns_is_not_told_exactly():
    said = hpstage.preflight(space, steps=20, n_trials=15, sampler="tpe", workers=(1,), rehearsals=3)
    assert not said.exact and said.sampler == "TPESampler" and said.trials.median == 15


def test_what_a_stage_tree_sampler_shares_is_counted():
    def late(trial):
        return {
            "lr": trial.suggest_float("lr", 0.1, 0.2),
            "drop": s.piecewise({0: 1, 50: trial.suggest_float("d", 0, 1)}),
        }

    sampler = hpstage.optuna.StageTreeSampler(random())
    said = hpstage.preflight(late, steps=60, n_trials=30, sampler=sampler, workers=(2,), rehearsals=3)
    assert not said.exact and said.merge_rate.low > 1.0
    assert said.sampler == "StageTreeSampler over RandomSampler"


@pytest.mark.parametrize("algorithm", [Hyperband(5, 3), OptunaPruner(10, 10), FullTraining()])
def test_the_same_question_has_the_same_answer_and_leaves_the_sampler_as_it_was(algorithm):
    def ask(sampler):
        return hpstage.preflight(
            space, steps=60, n_trials=12, sampler=sampler, algorithm=algorithm, workers=(2,), rehearsals=3
        )

    sampler = random()
    assert ask(sampler) == ask(sampler) == ask("random")


# --- seconds ----------------------------------------------------------------------------------------------


def true_seconds(values):
    return 0.05 if values["batch_size"] == 64 else 0.03


def truth(workers, measure=None):
    """Workers whose costs the preflight is not told of."""
    more = {} if measure is None else {"measure": measure}
    return SimulatedExecutor(
        workers,
        step_seconds=true_seconds,
        evaluate_seconds=0.02,
        load_seconds=0.01,
        save_seconds=0.004,
        state_bytes=5000,
        **more,
    )


@pytest.fixture
def costs():
    """As measured in a search of other trials."""
    return costs_of_plan(search(truth(2), random(99), n_trials=6).plan)


def test_costs_are_learnt_from_a_plan(costs):
    assert costs.evaluate_seconds == pytest.approx(0.02) and costs.save_seconds == pytest.approx(0.004)
    assert costs.checkpoint_bytes == 5000 and 0 < costs.load_seconds <= 0.01
    for batch in (64, 256):
        values = {"lr": 0.1, "momentum": 0.9, "batch_size": batch}
        assert costs.step_seconds(values) == pytest.approx(true_seconds(values), rel=0.1)


def test_makespan_of_full_training_is_told_within_fifteen_percent(costs):
    said = asked_with(costs, FullTraining(), workers=(1, 2, 4))
    for fleet in said.fleets:
        executor = truth(fleet.workers)
        done = search(executor, random()).savings
        assert fleet.makespan.median == pytest.approx(executor.clock(), rel=0.15)
        assert fleet.worker_seconds.median == pytest.approx(done.worker_seconds, rel=0.15)
        assert fleet.lower_bound.median <= fleet.makespan.median
        assert fleet.lower_bound.median == pytest.approx(done.lower_bound_seconds, rel=0.15)


def test_makespan_of_halving_is_told_within_fifteen_percent_of_the_usual_search(costs):
    """The metrics decide, so it is told as a range, and compared with searches that differ in their metrics alone."""
    halving = SuccessiveHalving(15, 4, tree_aware=False)
    for fleet in asked_with(costs, halving, workers=(1, 3)).fleets:
        took = []
        for salt in range(9):
            executor = truth(fleet.workers, lambda key, step, salt=salt: {"value": int(key[3 * salt :][:6], 16) - step})
            search(executor, random(), algorithm=halving)
            took.append(executor.clock())
        assert fleet.makespan.median == pytest.approx(statistics.median(took), rel=0.15)
        assert 0.85 * fleet.makespan.low <= min(took) and max(took) <= 1.15 * fleet.makespan.high


def asked_with(costs, algorithm, workers):
    return hpstage.preflight(
        space,
        steps=STEPS,
        n_trials=48,
        algorithm=algorithm,
        workers=workers,
        step_seconds=costs.step_seconds,
        evaluate_seconds=costs.evaluate_seconds,
        load_seconds=costs.load_seconds,
        save_seconds=costs.save_seconds,
    )


def test_without_sharing_no_schedule_is_shorter_than_was_said():
    said = hpstage.preflight(space, steps=STEPS, n_trials=10, workers=(1, 3), step_seconds=true_seconds)
    for fleet in said.fleets:
        executor = SimulatedExecutor(fleet.workers, step_seconds=true_seconds)
        hpstage.optimize(
            optuna.create_study(sampler=random()),
            Tape(),
            space,
            metric="value",
            steps=STEPS,
            n_trials=10,
            executor=executor,
            store=MemoryJournal(),
            sharing=False,
        )
        assert fleet.alone_bound.median <= executor.clock() * (1 + 1e-9)
        assert fleet.alone_bound.median == pytest.approx(executor.clock(), rel=0.25)


def test_effects_of_values_are_told_apart():
    batches, rates = {64: 1.0, 256: 0.5}, {0.1: 1.0, 0.2: 1.0, 0.3: 1.0}
    timings = [
        Timing({"batch": batch, "lr": lr, "drop": drop}, 100, 100 * 0.04 * scale * (3.0 if drop else 1.0))
        for batch, scale in batches.items()
        for lr in rates
        for drop in (True, False)
        if (batch, lr) != (256, 0.3)
    ]
    seconds = by_values(timings)
    assert seconds({"batch": 256, "lr": 0.3, "drop": True}) == pytest.approx(0.06, rel=0.1)  # never measured together
    ratio = seconds({"batch": 64, "lr": 0.7, "drop": False}) / seconds({"batch": 256, "lr": 0.7, "drop": False})
    assert ratio == pytest.approx(2.0, rel=0.1)
    told = sum(timing.steps * seconds(timing.values) for timing in timings)
    assert told == pytest.approx(sum(timing.seconds for timing in timings))


def test_a_busy_machine_is_not_taken_for_an_effect():
    """While the rates 0.2 and 0.4 were trained, for short, something else ran on the machine."""
    timings = [Timing({"batch": 64, "lr": lr}, steps, steps * seconds) for lr, steps, seconds in _BUSY]
    timings += [Timing({"batch": 256, "lr": lr}, steps, steps * seconds / 2) for lr, steps, seconds in _BUSY[:4]]
    seconds = by_values(timings)
    assert len({seconds({"batch": 64, "lr": lr}) for lr, _, _ in _BUSY}) == 1
    assert seconds({"batch": 64, "lr": 0.1}) / seconds({"batch": 256, "lr": 0.1}) == pytest.approx(2.0, rel=0.2)


_BUSY = [(0.1, 40, 0.10), (0.05, 40, 0.11), (0.01, 70, 0.09), (0.01, 30, 0.12), (0.2, 5, 0.3), (0.4, 5, 0.25)]


@pytest.mark.parametrize("seed", range(5))
def test_timings_that_are_far_off_move_no_estimate(seed):
    """Every eighth stage was trained while its host was paged out, or slept."""
    drawn = Random(seed)
    timings = []
    for number in range(40):
        values = {"batch": drawn.choice([64, 256]), "lr": drawn.uniform(0.01, 0.1), "depth": drawn.choice([2, 3, 4])}
        true = 0.04 * (0.5 if values["batch"] == 256 else 1.0) * drawn.uniform(0.9, 1.1)
        timings.append(Timing(values, 50, 50 * true * (drawn.uniform(20, 500) if number % 8 == 0 else 1.0)))
    seconds = by_values(timings)
    for batch, true in ((64, 0.04), (256, 0.02)):
        for depth in (2, 3, 4):
            assert seconds({"batch": batch, "lr": 0.05, "depth": depth}) == pytest.approx(true, rel=0.15)


class Uneven(Tape):
    """A large batch takes many times as long."""

    def train(self, step, hp):
        super().train(step, hp)
        sum(range(200_000 if hp["batch_size"] == 256 else 2_000))


def test_a_few_steps_are_measured_under_the_values_that_trials_meet():
    samples = values_met(space, STEPS, sampler=random(), most=6)
    assert len(samples) == 6 and {sample["batch_size"] for sample in samples} == {64, 256}
    costs = measured(Uneven(), samples)
    small, large = (costs.step_seconds({"lr": 0.1, "momentum": 0.9, "batch_size": batch}) for batch in (64, 256))
    assert large > 5 * small > 0
    assert costs.evaluate_seconds > 0 and costs.save_seconds > 0 and costs.load_seconds > 0
    assert costs.checkpoint_bytes > 0


# --- checkpoints ------------------------------------------------------------------------------------------


def test_the_most_checkpoints_that_are_needed_at_one_time():
    """Two trials that part halfway, on one worker: the trunk's state and the end of whichever is not told yet."""

    def fork(trial):
        return {"lr": s.piecewise({0: 1, 50: trial.suggest_categorical("late", [2, 3])})}

    def run(space):
        return hpstage.optimize(
            optuna.create_study(sampler=optuna.samplers.GridSampler({"late": [2, 3]}, seed=0)),
            Tape(),
            space,
            metric="value",
            steps=100,
            executor=SimulatedExecutor(1),
            store=MemoryJournal(),
            checkpoint_every=100,
        )

    result = run(fork)
    assert result.savings.kept == 3
    assert most_needed(result) == 2
    said = hpstage.preflight(fork, steps=100, sampler="grid", workers=(1,), checkpoint_bytes=1000)
    assert said.checkpoints.median == 3 and said.checkpoints_needed.median == 2
    assert "3, 3.0 kB" in str(said) and "2, 2.0 kB" in str(said)


# --- the command ------------------------------------------------------------------------------------------

SCRIPT = """
from hpstage import schedule as s
from hpstage.testing.toys import Tape

def space(trial):
    drop = trial.suggest_categorical("drop", [10, 20])
    return {"lr": s.multistep(trial.suggest_categorical("lr", [0.1, 0.2]), milestones=[drop]), "momentum": 0.9}

steps = 7
"""


@pytest.fixture
def script(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    path = tmp_path / f"search_{tmp_path.name}.py"
    path.write_text(SCRIPT)
    return path


def command(*words):
    return CliRunner().invoke(app, ["plan", *map(str, words)])


def test_the_command_says_what_the_function_says(script, tmp_path):
    found = command(
        f"{script}:space", "--steps", 40, "--n-trials", 12, "--algorithm", "SuccessiveHalving(10, 2)", "--gpus", "1,2",
        "--step-seconds", 0.5, "--checkpoint-bytes", "200 kB", "--json", tmp_path / "figures.json",
    )  # fmt: skip
    assert found.exit_code == 0, found.output
    said = hpstage.preflight(
        named(f"{script}:space", "the space"),
        steps=40,
        n_trials=12,
        algorithm=SuccessiveHalving(10, 2),
        workers=(1, 2),
        step_seconds=0.5,
        checkpoint_bytes=200_000,
    )
    assert found.output.rstrip("\n") == str(said)
    assert json.loads((tmp_path / "figures.json").read_text()) == json.loads(json.dumps(said.as_dict()))


def test_the_command_takes_seconds_from_a_store(script, tmp_path):
    study = optuna.create_study(sampler=random())
    executor = SimulatedExecutor(2, step_seconds=3.0, state_bytes=1_000_000)
    hpstage.optimize(
        study,
        Tape(),
        named(f"{script}:space", "the space"),
        metric="value",
        steps=40,
        n_trials=4,
        executor=executor,
        store=tmp_path / "store",
    )
    found = command(f"{script}:space", "--steps", 40, "--n-trials", 1, "--gpus", 1, "--store", tmp_path / "store")
    assert found.exit_code == 0, found.output
    assert "2.0 min" in found.output and "1.0 MB" in found.output  # 40 steps of 3 s


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--seed", -1], "seed is -1; give a whole number from 0"),
        (["--seed", 2**32], "seed is 4294967296; give a whole number from 0"),
        (["--json", "no/such/folder/figures.json"], "--json no/such/folder/figures.json cannot be written: No such"),
    ],
)
def test_the_command_names_what_it_cannot_use(script, words, complaint):
    found = command(f"{script}:space", "--steps", 40, "--n-trials", 4, *words)
    assert isinstance(found.exception, UsageError) and str(found.exception).startswith(complaint)


def test_the_command_takes_seconds_from_a_trainable(script):
    found = command(f"{script}:space", "--steps", 40, "--n-trials", 4, "--trainable", f"{script}:Tape")
    assert found.exit_code == 0, found.output
    assert "GPU-hours" in found.output


def test_nothing_of_the_algorithm_is_run(tmp_path):
    trap = tmp_path / "trap"
    for text in (
        f"__import__('pathlib').Path({str(trap)!r}).touch()",
        f"SuccessiveHalving(open({str(trap)!r}, 'w'))",
        f"SuccessiveHalving(min_steps=open({str(trap)!r}, 'w'))",
        "algos.SuccessiveHalving(1)",
        "Bracket(1)",
        "SuccessiveHalving(1",
        "SuccessiveHalving(1, surplus=2)",
        "Halving",
        "**{}",
        "SuccessiveHalving(*[1, 2])",
        "SuccessiveHalving(**{'min_steps': 2})",
        "",
    ):
        with pytest.raises(UsageError, match="--algorithm"):
            algorithm_named(text)
    assert not trap.exists()


def test_algorithms_are_named_with_their_arguments():
    assert algorithm_named("SuccessiveHalving(15, reduction_factor=2, tree_aware=False)") == SuccessiveHalving(
        15, 2, tree_aware=False
    )
    assert algorithm_named(" Hyperband ") == Hyperband()


@pytest.mark.parametrize(
    ("words", "kind"),
    [
        (["{script}:nothing"], UsageError),
        (["{script}"], UsageError),
        (["{script}:steps"], UsageError),
        (["no_such_module_here:space"], UsageError),
        (["no/such/script.py:space"], UsageError),
        (["{script}:space", "--sampler", "best"], UsageError),
        (["{script}:space", "--gpus", "many"], UsageError),
        (["{script}:space", "--gpus", "0"], UsageError),
        (["{script}:space", "--step-seconds", "0"], UsageError),
        (["{script}:space", "--save-seconds", "1"], UsageError),
        (["{script}:space", "--checkpoint-bytes", "big"], UsageError),
        (["{script}:space", "--algorithm", "SuccessiveHalving(50)"], UsageError),
        (["{script}:space", "--store", "here", "--trainable", "{script}:Tape"], UsageError),
        (["{script}:space", "--store", "no/plan/here"], StoreError),
    ],
)
def test_what_cannot_be_is_refused(script, words, kind):
    found = command(*(word.format(script=script) for word in words), "--steps", 40, "--n-trials", 2)
    assert isinstance(found.exception, kind), found.output


def test_a_sampler_without_an_end_wants_a_number_of_trials():
    with pytest.raises(UsageError, match="n_trials"):
        hpstage.preflight(space, steps=STEPS)


def test_a_continuous_space_has_no_grid():
    with pytest.raises(UsageError, match="'lr' has no grid"):
        hpstage.preflight(lambda trial: {"lr": trial.suggest_float("lr", 0, 1)}, steps=2, sampler="grid")


def test_simulated_time_stands_still_for_who_does_not_wait():
    executor = SimulatedExecutor(1)
    late = executor.join(5.0)
    assert len(executor.wait(0.0)) == 1  # the worker that is there
    assert executor.wait(0.0) == [] and executor.clock() == 0.0
    [joined] = executor.wait(0.1)
    assert joined.worker == late and executor.clock() == 5.0


def test_siblings_trained_as_one_are_rehearsed_as_one() -> None:
    def space(trial: optuna.Trial) -> dict[str, object]:
        return {"a": s.constant(trial.suggest_categorical("a", [0, 1, 2, 3]))}

    grid = optuna.samplers.GridSampler({"a": [0, 1, 2, 3]}, seed=0)
    options: dict[str, Any] = {"steps": 100, "sampler": grid, "workers": (1,), "step_seconds": 2.0}
    alone = hpstage.preflight(space, **options)
    fused = hpstage.preflight(space, **options, step_times=StepTimes(((1, 1.0), (4, 2.0))))
    assert (alone.worker_seconds.median, alone.fused_seconds.median) == (800.0, 0.0)
    assert (fused.worker_seconds.median, fused.fused_seconds.median) == (400.0, 400.0)
    assert fused.fleets[0].makespan.median == pytest.approx(400.0)
    assert "of this by fusing" in str(fused) and "of this by fusing" not in str(alone)


def test_workers_that_would_be_idle_train_together():
    lone = [
        hpstage.preflight(
            lambda trial: {"lr": 0.1}, steps=100, n_trials=1, workers=(4,), step_seconds=10.0, virtual_nodes=n
        )
        for n in (1, 4)
    ]
    alone, together = (said.fleets[0].makespan.median for said in lone)
    assert alone == 1000.0
    assert together < 1000.0 / 3
