"""Branches of any trial: each as that trial trained from scratch, and no step twice."""

from __future__ import annotations

import logging
import multiprocessing
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import optuna
import pytest

import hpstage
from hpstage import schedule as s
from hpstage.accounting.studies import run_rows
from hpstage.algos import PopulationBasedTraining, SuccessiveHalving
from hpstage.errors import ScheduleError, TrainingError, UsageError
from hpstage.report import frames
from hpstage.search.results.trial import TrainedTrial
from hpstage.store import MemoryJournal
from hpstage.testing.toys import Counter, Failing, Gate, Tape, alone
from tests.records import separated
from tests.redis_server import RedisServer
from tests.unit.search.tape_runs import HP, STEPS, exact, inline, search, train, trained

optuna.logging.set_verbosity(optuna.logging.ERROR)


@pytest.mark.ci
def test_a_branch_equals_a_trial_trained_from_scratch_and_trains_only_its_new_steps(tmp_path: Path) -> None:
    run = train(tmp_path, checkpoint_every=2)
    branch = run.branch(4, lr=0.03, **inline())
    assert branch.schedules == {"lr": run.schedules["lr"].until(4).then(0.03).until(STEPS), "wd": run.schedules["wd"]}
    assert exact(branch)
    assert trained(branch) == STEPS + 4
    assert 4 in branch.kept


def test_tables_and_runs_show_from_which_trial_a_branch_was_made(tmp_path: Path) -> None:
    run = train(tmp_path, checkpoint_every=2)
    branch = run.branch(4, lr=0.03, **inline())
    trials = frames(tmp_path).trials.set_index("trial")
    assert (trials.donor[branch.id], trials.forked_at[branch.id]) == (run.id, 4)
    assert trials.params_lr[branch.id] == repr(branch.schedules["lr"])
    rows = {row.trial: row for row in run_rows(branch.plan)}
    assert (rows[run.id].branches, rows[branch.id].branch_of) == (1, run.id)
    assert rows[run.id].best == ("score", run.metrics[STEPS]["score"], STEPS)
    assert rows[run.id].at == run_rows(run.plan)[0].at  # its state at step 4 is used later; the run has ended before


@pytest.mark.ci
def test_lists_of_values_make_one_branch_for_each_combination(tmp_path: Path) -> None:
    run = train(tmp_path, checkpoint_every=2)
    branches = run.branch(4, lr=[0.03, s.linear(0.03)], wd=[0.5, 1.0], **inline())
    assert [branch.planned.schedules["wd"].value(7) for branch in branches] == [0.5, 1.0, 0.5, 1.0]
    assert all(map(exact, branches))
    assert trained(run) == STEPS + 4 * 4
    assert len(run.branch(4, lr=[0.03], **inline())) == 1


@pytest.mark.ci
def test_making_the_same_branch_again_trains_no_step(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = train(tmp_path)
    with caplog.at_level(logging.WARNING, "hpstage"):
        first = run.branch(4, lr=0.03, **inline())
        assert "trial runs/0 has no checkpoint at step 4: 4 steps are trained again, from the beginning" in caplog.text
        caplog.clear()
        again = run.branch(4, {"lr": 0.03}, **inline())
        assert not caplog.records
    assert again.id == first.id
    assert trained(run) == STEPS + STEPS


@pytest.mark.ci
def test_a_branch_between_checkpoints_warns_how_many_steps_are_trained_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = train(tmp_path, checkpoint_every=4)
    with caplog.at_level(logging.WARNING, "hpstage"):
        branch = run.branch(6, lr=0.03, **inline())
    assert "has no checkpoint at step 6: 2 steps are trained again, from its checkpoint at step 4" in caplog.text
    assert exact(branch)
    assert trained(run) == STEPS + 2 + 2


@pytest.mark.ci
def test_a_branch_at_step_0_trains_every_step_and_a_branch_at_the_end_extends_the_trial(tmp_path: Path) -> None:
    run = train(tmp_path)
    fresh = run.branch(0, lr=0.03, **inline())
    assert exact(fresh)
    assert trained(run) == 2 * STEPS
    longer = run.extend(STEPS + 4, wd=0.5, **inline())
    assert longer.schedules["lr"].value(STEPS + 3) == run.schedules["lr"].value(STEPS - 1)
    assert exact(longer)
    assert run.branch(STEPS, wd=0.5, steps=STEPS + 4, **inline()).id == longer.id
    assert trained(run) == 2 * STEPS + 4


@pytest.mark.ci
def test_a_branch_may_be_branched_again_with_fewer_steps(tmp_path: Path) -> None:
    run = train(tmp_path, checkpoint_every=1)
    second = run.branch(2, lr=0.03, **inline()).branch(4, wd=1.0, steps=6, **inline())
    assert second.planned.steps == 6
    assert exact(second)
    assert trained(run) == STEPS + 6 + 2 + 2  # the first branch has no checkpoint at its step 4


def test_a_branch_is_exact_even_if_the_checkpoint_of_its_trial_was_evicted(tmp_path: Path) -> None:
    run = train(tmp_path, checkpoint_every=2, checkpoint_budget=1)
    branch = run.branch(4, lr=0.03, **inline())
    assert exact(branch)


SPACES: dict[str, tuple[Callable[[optuna.Trial], Mapping[str, object]] | object, dict[str, Any]]] = {
    "plateau": (lambda trial: {"lr": s.plateau(1.0, metric="score", every=2, patience=0), "wd": 0.25}, {"n_trials": 1}),
    "wsd": (s.wsd_sweep(0.5, horizons=[6, 8], warmup=2, decay_fraction=0.25, hp={"wd": 0.1}), {"n_trials": None}),
    "pbt": (
        lambda trial: {"lr": trial.suggest_float("lr", 0.1, 1.0), "wd": trial.suggest_float("wd", 0.1, 1.0)},
        {"algorithm": PopulationBasedTraining(2), "n_trials": 4},
    ),
    "halving": (
        lambda trial: {"lr": trial.suggest_float("lr", 0.1, 1.0), "wd": 0.25},
        {"algorithm": SuccessiveHalving(min_steps=2, reduction_factor=2), "n_trials": 4},
    ),
}


@pytest.mark.ci
@pytest.mark.parametrize("kind", SPACES)
def test_every_trial_of_a_search_can_be_branched_whatever_the_kind_of_search(kind: str, tmp_path: Path) -> None:
    """Pruned ones as well, beyond where they were pruned: their other steps are trained."""
    space, options = SPACES[kind]
    result = search(tmp_path, space, **options)
    study = list(result.study.get_trials(deepcopy=False))
    for frozen in study:
        branch = result.branch(frozen, 5, wd=0.5, **inline())
        assert isinstance(branch, TrainedTrial)
        assert branch.schedules["wd"].value(5) == 0.5
        assert exact(branch)
    assert len(result.study.get_trials(deepcopy=False)) == len(study)


@pytest.mark.ci
def test_metrics_of_a_branch_decide_how_its_plateau_continues(tmp_path: Path) -> None:
    hp = {"lr": s.plateau(1.0, metric="score", mode="max", every=2, patience=0), "wd": 0.25}
    run = train(tmp_path, hp)
    branch = run.branch(3, wd=-9.0, **inline())
    assert branch.schedules["lr"] != run.schedules["lr"]
    assert branch.metrics == train(tmp_path / "alone", {**hp, "wd": s.piecewise({0: 0.25, 3: -9.0})}).metrics
    assert exact(run.branch(3, lr=0.5, **inline()))
    assert run.branch(3, wd=-9.0, **inline()).id == branch.id


@pytest.mark.ci
def test_an_interrupted_plateau_trial_can_be_branched_only_up_to_its_last_decided_step(tmp_path: Path) -> None:
    """Of a trial under a plateau that was interrupted: its value in steps to come is not known."""

    class Stopped(Tape):
        stops = True

        def train(self, step: int, hp: Mapping[str, Any]) -> None:
            if step == 5 and type(self).stops:
                raise KeyboardInterrupt
            super().train(step, hp)

    hp = {"lr": s.plateau(1.0, metric="score", mode="min", every=2, patience=0), "wd": 0.25}
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "one", hp, trainable=Stopped())
    Stopped.stops = False
    trunk = hpstage.open(tmp_path / "one").trial("runs/0")
    given: dict[str, Any] = {"trainable": Stopped(), **inline()}
    for at in (7, STEPS):
        remedy = r"branch it at step 6 or before, or train further first: trial.branch\(6, steps=9\), and branch that"
        with pytest.raises(UsageError, match=rf"metrics decide 'lr' of trial runs/0 after step 6, .*; {remedy}"):
            trunk.branch(at, lr=0.5, steps=STEPS + 2, **given)
        with pytest.raises(UsageError, match="metrics decide 'lr' of trial runs/0 after step 6"):
            trunk.then({"lr": 0.5}, at=at)
    assert hpstage.open(tmp_path / "one").trials == ["runs/0"]
    whole = train(tmp_path / "other", hp)
    assert len(whole.schedules["lr"].segments) == 3
    further = trunk.branch(6, steps=STEPS + 1, **given)
    for one in (trunk.branch(6, lr=0.5, **given), further.branch(7, lr=0.5, steps=STEPS, **given)):
        assert isinstance(one, TrainedTrial)
        at = 6 if one.id == "runs/2" else 7
        assert one.schedules["lr"] == whole.schedules["lr"].until(at).then(0.5).until(STEPS)
        assert exact(one)


def test_training_a_run_with_a_plateau_again_finds_the_same_run(tmp_path: Path) -> None:
    hp = {"lr": s.plateau(1.0, every=2, patience=0)}
    assert train(tmp_path, hp).id == train(tmp_path, hp).id == "runs/0"


@pytest.mark.parametrize(
    ("at", "values", "steps", "message"),
    [
        (
            9,
            {"lr": 0.1},
            None,
            "has 8 steps and cannot be branched at step 9; branch it at step 8 or before",
        ),
        (8, {"lr": 0.1}, None, "at its end needs steps beyond 8; give steps=9 or more"),
        (5, {"lr": 0.1}, 5, "at step 5 needs steps beyond 5"),
        (-1, {"lr": 0.1}, None, "at is -1"),
        (4.5, {"lr": 0.1}, None, "at is 4.5"),
        (4, {}, None, "without a change is that trial"),
        (4, {"rate": 0.1}, None, r"no hyperparameter 'rate'; it has lr, wd\. To add it, set defaults = {'rate': OLD}"),
        (
            4,
            {"seed": 1},
            None,
            "was trained without the hyperparameter 'seed', so its branches cannot change 'seed'; train a trial",
        ),
        (4, {"wdd": 0.1}, None, r"no hyperparameter 'wdd' \(did you mean 'wd'\?\); it has lr, wd$"),
        (4, {"lr": []}, None, "lr is an empty list"),
        (4, {"lr": object()}, None, "branch of trial runs/0 at step 4, hyperparameter 'lr'"),
        (4, {"lr": s.linear(0.1).until(3)}, None, "hyperparameter 'lr': the schedule ends at step 7"),
    ],
)
def test_an_invalid_branch_is_refused(
    at: Any, values: dict[str, Any], steps: int | None, message: str, tmp_path: Path
) -> None:
    run = train(tmp_path)
    with pytest.raises((UsageError, ScheduleError), match=message):
        run.branch(at, values, steps=steps, **inline())
    assert hpstage.open(tmp_path).trials == ["runs/0"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"changes": [1]}, "changes is .1.; give a dict of values by name, {'lr': 0.03}, or lr=0.03"),
        ({"changes": {3: 1}}, "changes is {3: 1}; give a dict"),
        ({"study": ""}, "study is ''; give a name"),
        ({"evaluate_every": 0}, "evaluate_every is 0; give a whole number of at least 1"),
        ({"callbacks": 3}, "callbacks is 3; give"),
        ({"show_progress_bar": "yes"}, "show_progress_bar is 'yes'; give"),
    ],
)
def test_invalid_arguments_of_branch_extend_and_diff_are_named(
    options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    run = train(tmp_path)
    for call in (lambda: run.branch(4, **options, lr=0.1, **inline()), lambda: run.extend(9, **options, **inline())):
        with pytest.raises(UsageError, match=message):
            call()
    with pytest.raises(UsageError, match=r"other is 3; give a trial"):
        run.diff(3)
    assert hpstage.open(tmp_path).trials == ["runs/0"]


def test_a_failed_trial_can_be_branched_only_before_its_failure(tmp_path: Path) -> None:
    space = {"a": s.piecewise({0: 1, 4: 7}), "b": 1.0}
    with pytest.raises(TrainingError):
        train(tmp_path, space, trainable=Failing(), checkpoint_every=2)
    failed = hpstage.open(tmp_path).trial("runs/0")
    with pytest.raises(UsageError, match=r"failed in step 4 \(.*own error.*\); branch it at step 4 or before"):
        failed.branch(5, a=1, trainable=Failing(), **inline())
    with pytest.raises(UsageError, match=r"failed in step 4 .*; branch it at step 4 or before"):
        failed.branch(STEPS + 1, a=1, trainable=Failing(), **inline())
    branch = failed.branch(4, a=1, trainable=Failing(), **inline())
    assert isinstance(branch, TrainedTrial)
    assert branch.metrics[STEPS] == alone(branch.schedules, STEPS).evaluate()


def test_a_trial_that_stopped_its_training_can_be_branched_only_before_the_stop(tmp_path: Path) -> None:
    class Ending(Tape):
        def train(self, step: int, hp: Mapping[str, Any]) -> None:
            super().train(step, hp)
            if step == 5 and hp["wd"] == 0.25:
                raise hpstage.StopTraining("good enough")

    run = train(tmp_path, trainable=Ending(), checkpoint_every=2)
    with pytest.raises(UsageError, match=r"ended its training after 6 steps \(.*good enough.*\); branch it at step 6"):
        run.branch(7, wd=1.0, **inline())
    assert run.branch(4, wd=1.0, **inline()).metrics.keys() >= {STEPS}


def test_branching_a_trial_of_an_opened_store_needs_the_trainable(tmp_path: Path) -> None:
    train(tmp_path)
    opened = hpstage.open(tmp_path).trial("runs/0")
    with pytest.raises(UsageError, match="holds no training code; give it with trainable="):
        opened.branch(4, lr=0.1)
    assert exact(opened.branch(4, lr=0.1, trainable=Tape(), **inline()))  # type: ignore[arg-type]


@pytest.mark.ci
def test_a_trial_in_a_memory_store_can_be_branched() -> None:
    run = train(MemoryJournal())
    assert (
        run.branch(4, lr=0.1, **inline()).metrics[STEPS]
        == alone(
            {"lr": run.schedules["lr"].until(4).then(0.1).until(STEPS), "wd": s.constant(0.25).until(STEPS)}, STEPS
        ).evaluate()
    )


# --- several processes ------------------------------------------------------------------------------------


class Waiting(Counter):
    stateless = ("shut-from", "reached")  # the gate's files


def _branch(folder: Path, study: str) -> None:
    trial = hpstage.open(folder / "store").trial("runs/0")
    trial.branch(4, x=2, study=study, trainable=Waiting(Gate(folder)), **inline())


def _open_once_both_wait(gate: Gate, store: Path) -> None:
    deadline = time.monotonic() + 60
    while "mine/0" not in hpstage.open(store).trials:
        assert time.monotonic() < deadline
    gate.open()


@pytest.mark.ci
@pytest.mark.parametrize(("donor", "at", "x", "total", "steps"), [("runs/0", 4, 2, 12, 0), ("runs/1", 7, 3, 13, 4)])
def test_two_processes_can_branch_at_once_only_under_different_study_names(
    donor: str, at: int, x: int, total: float, steps: int, tmp_path: Path
) -> None:
    """The second branches in the same way, or from the branch that the first is training: where that keeps no state,
    since an executor in the process takes no requests while it trains."""
    gate = Gate(tmp_path)
    run = train(tmp_path / "store", {"x": 1}, trainable=Waiting(gate), metric="total", checkpoint_every=4)
    gate.shut(6)
    other = multiprocessing.get_context("spawn").Process(target=_branch, args=(tmp_path, "runs"))
    other.start()
    try:
        gate.wait(60)
        with pytest.raises(UsageError, match=r"study 'runs' is being driven by another process .* another name"):
            run.branch(4, x=2, **inline())
        opening = threading.Thread(target=_open_once_both_wait, args=(gate, tmp_path / "store"))
        opening.start()
        trial = hpstage.open(tmp_path / "store").trial(donor)
        branch = trial.branch(at, x=x, study="mine", trainable=Waiting(gate), **inline())
        opening.join(60)
        other.join(60)
    finally:
        gate.open()
        other.kill()
    assert other.exitcode == 0
    assert isinstance(branch, TrainedTrial)
    assert (branch.id, branch.metrics[STEPS]["total"]) == ("mine/0", total)
    assert hpstage.open(tmp_path / "store").trials == ["runs/0", "runs/1", "mine/0"]
    assert trained(run) == STEPS + 4 + steps


@pytest.mark.parametrize("hp", [{"x": 1}, [{"x": 1}, {"x": s.piecewise({0: 1, 6: 2})}, {"x": 3}]], ids=["one", "three"])
def test_a_run_finishes_even_if_its_driver_was_declared_dead(hp: object, tmp_path: Path) -> None:
    gate, journal = Gate(tmp_path), MemoryJournal()
    gate.shut(5)

    def bury() -> None:
        gate.wait(60)
        [name] = [name for name in journal._leases if name.startswith("driver/")]
        held = journal.holder(name)
        assert held is not None
        journal.release(name, held.token)
        gate.open()

    burying = threading.Thread(target=bury)
    burying.start()
    found = train(journal, hp, trainable=Waiting(gate), metric="total")
    burying.join(60)
    runs = found if isinstance(found, list) else [found]
    assert sum(b'"DriverJoined"' in record for record in separated(journal).read()) == 2
    assert [(run.id, run.metrics[STEPS]["total"]) for run in runs] == [("runs/0", 8), ("runs/1", 10), ("runs/2", 24)][
        : len(runs)
    ]
    assert runs[0].plan.trials.keys() == {run.id for run in runs}
    assert not list(runs[0].plan.searches.open)


@pytest.mark.redis
def test_runs_on_redis_can_be_found_and_branched_after_the_store_is_opened(
    shared_redis: RedisServer, tmp_path: Path
) -> None:
    places: dict[str, Any] = {"store": f"{shared_redis.url}?prefix={uuid.uuid4().hex}", "checkpoints": str(tmp_path)}
    run = train(hp=HP, checkpoint_every=2, **places)
    assert train(hp=HP, **places).id == run.id == "runs/0"
    branch = hpstage.open(**places).trial("runs/0").branch(4, lr=0.03, trainable=Tape(), **inline())
    assert isinstance(branch, TrainedTrial)
    assert exact(branch)
    assert hpstage.open(**places).trials == ["runs/0", "runs/1"]


def test_a_search_over_branches_of_a_run_trains_only_the_new_steps(tmp_path: Path) -> None:
    run = train(tmp_path, checkpoint_every=2)

    def space(trial: optuna.Trial) -> dict[str, Any]:
        return run.then({"lr": s.linear(trial.suggest_float("lr", 0.01, 0.1))}, at=4)

    result = search(tmp_path, space, STEPS + 2)
    assert result.savings.steps_trained == 3 * (STEPS + 2 - 4)
    by_hand = run.branch(4, lr=s.linear(result.best_trial.params["lr"]), steps=STEPS + 2, **inline())
    assert by_hand.schedules == result.trial(result.best_trial).schedules
    assert exact(by_hand)
    assert trained(run) == STEPS + result.savings.steps_trained
    with pytest.raises(UsageError, match=f"at is {STEPS + 1}; give .*{STEPS}"):
        run.then({"lr": 0.1}, at=STEPS + 1)
