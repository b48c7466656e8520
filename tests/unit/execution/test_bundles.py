"""Chains trained side by side by one worker end as they would one after the other."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.trial import TrialState

import hpstage
from hpstage import schedule as s
from hpstage.algorithm import Algorithm
from hpstage.algos import ASHA, FullTraining, SuccessiveHalving
from hpstage.plan.facts import (
    ChainClosed,
    ChainId,
    ChainStarted,
    Fact,
    StateReached,
    StepsTimed,
    TargetAsked,
    TrialAdded,
    TrialId,
    WorkerId,
)
from hpstage.plan.log import open_plan, read_facts
from hpstage.plan.messages import WorkerJoined, WorkerLeft, names_of
from hpstage.scheduler.scheduler import Scheduler
from hpstage.store import MemoryJournal
from hpstage.testing.toys import Failing, Tape, alone
from hpstage.trainable import Bundling
from tests.bundled import Tapes, Unmeasured
from tests.invariants import validate, validate_scheduler
from tests.unit.search.test_resume import Fuse
from tests.unit.searches import WORKLOAD

pytestmark = pytest.mark.sampled(4)

STEPS = 12


def space(trial: optuna.Trial) -> dict[str, Any]:
    first, late = trial.suggest_int("first", 1, 3), trial.suggest_int("late", 1, 3)
    return {"a": s.piecewise({0: first, 4: late}), "b": trial.suggest_int("b", 1, 2)}


def search(trainable: object, space: Any = space, **options: Any) -> hpstage.Result:
    study = options.pop("study", None) or optuna.create_study(
        study_name="study", direction="maximize", sampler=optuna.samplers.RandomSampler(seed=3)
    )
    settings: dict[str, Any] = {"metric": "score", "steps": STEPS, "n_trials": 12, "executor": Unmeasured()}
    return hpstage.optimize(study, trainable, space, **(settings | {"store": MemoryJournal()} | options))


def test_bundling_trainables_are_recognised_by_their_methods() -> None:
    assert isinstance(Tapes(Tape()), Bundling)
    assert not isinstance(Tape(), Bundling)


@pytest.mark.parametrize("algorithm", [FullTraining(), SuccessiveHalving(2, 2), ASHA(2, 2)], ids=repr)
def test_a_worker_with_several_slots_gives_the_values_of_a_worker_with_one_slot(algorithm: Algorithm) -> None:
    tapes = Tapes(Tape())
    bundled, single = search(tapes, algorithm=algorithm), search(Tape(), algorithm=algorithm)
    validate(bundled.plan)
    for trial in bundled.study.trials:
        planned = bundled.trial(trial).planned
        for step, value in trial.intermediate_values.items():
            assert value == alone(planned.schedules, step).score
    assert tapes.together[3] > 3
    savings = bundled.savings
    assert savings.steps_trained == savings.steps_unique == sum(size * n for size, n in tapes.together.items())
    if algorithm.synchronous:
        assert [trial.value for trial in bundled.study.trials] == [trial.value for trial in single.study.trials]
        assert savings.steps_trained == single.savings.steps_trained


def test_a_worker_with_several_slots_counts_as_one_worker() -> None:
    journal = MemoryJournal()
    result = search(Tapes(Tape()), store=journal)
    facts = list(read_facts(journal))
    assert {fact.worker for fact in facts if isinstance(fact, ChainStarted)} == {"inline", "inline#1", "inline#2"}
    assert result.savings.workers == 1
    # A state that one slot has kept is live for all.
    assert "disk" not in {fact.source for fact in facts if isinstance(fact, StateReached)}


def test_worker_seconds_of_trials_trained_together_do_not_exceed_the_makespan() -> None:
    result = search(Tapes(Tape()))
    savings = result.savings
    assert 0 < savings.worker_seconds <= savings.makespan


def test_a_failed_trial_does_not_fail_trials_that_are_trained_together_with_it() -> None:
    tapes = Tapes(Failing())
    result = search(tapes, lambda trial: {"a": s.piecewise({0: 1, 3: [2, 7, 3][trial.number]})}, n_trials=3)
    assert [trial.state for trial in result.study.trials] == [TrialState.COMPLETE, TrialState.FAIL, TrialState.COMPLETE]
    assert "the user's own error at step 3" in result.study.trials[1].user_attrs["hpstage:failure"]
    assert tapes.together[2] >= 8


def widths_of(facts: Iterable[Fact]) -> list[int | str]:
    """As how many chains there are whenever one begins, and ``"timed"`` where it is learnt up to how many that pays."""
    running: set[ChainId] = set()
    found: list[int | str] = []
    for fact in facts:
        match fact:
            case ChainStarted(chain):
                running.add(chain)
                found.append(len(running))
            case ChainClosed(chain):
                running.discard(chain)
            case StepsTimed():
                found.append("timed")
    return found


def test_a_worker_trains_more_chains_together_if_measured_step_times_show_a_gain() -> None:
    tapes, journal = Tapes(Tape(), each=0.1), MemoryJournal()
    result = search(tapes, executor=hpstage.InlineExecutor(), store=journal)
    begun = widths_of(read_facts(journal))
    assert max(begun[: begun.index("timed")]) == 2 and 3 in begun
    assert result.plan.step_times is not None
    assert [result.plan.step_times.slowness(width) for width in (1, 2, 3)] == pytest.approx([1.0, 1.2 / 1.1, 1.3 / 1.1])
    assert begun.count("timed") == 2
    assert [trial.value for trial in result.study.trials] == [trial.value for trial in search(Tape()).study.trials]


@pytest.mark.ci
def test_a_worker_trains_chains_one_by_one_if_two_together_are_measured_to_be_slower() -> None:
    tapes, journal = Tapes(Tape(), each=100.0), MemoryJournal()
    result = search(tapes, executor=hpstage.InlineExecutor(), store=journal)
    begun = widths_of(read_facts(journal))
    assert begun.count("timed") == 1 and begun.index("timed") <= 3
    assert {*begun[begun.index("timed") + 1 :]} == {1}  # one of the two was interrupted
    assert tapes.together.keys() == {1, 2} and tapes.together[2] == 6
    assert [trial.value for trial in result.study.trials] == [trial.value for trial in search(Tape()).study.trials]


def test_a_resumed_search_uses_the_step_times_measured_before(tmp_path: Path) -> None:
    study = optuna.create_study(direction="maximize", sampler=optuna.samplers.RandomSampler(seed=3))
    here: dict[str, Any] = {"study": study, "executor": hpstage.InlineExecutor(), "store": tmp_path / "store"}
    first, again = Tapes(Tape(), each=0.1), Tapes(Tape(), each=0.1)
    search(first, **here)
    result = search(again, **here | {"executor": hpstage.InlineExecutor()})
    assert sum(isinstance(fact, StepsTimed) for fact in result.journal) == 2
    assert (first.limits, again.limits) == ({1, 2, 3}, {3})  # nothing is compared again


@pytest.mark.parametrize("at", [1, 12, *(pytest.param(at, marks=pytest.mark.slow) for at in (5, 20, 33))])
def test_a_search_interrupted_while_trials_train_together_resumes_with_unchanged_values(
    at: int, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"store": tmp_path / "store"}
    storage = f"sqlite:///{tmp_path}/study.db"

    def once(tapes: Tapes) -> hpstage.Result:
        study = optuna.create_study(
            study_name="study",
            direction="maximize",
            sampler=optuna.samplers.RandomSampler(seed=3),
            storage=storage,
            load_if_exists=True,
        )
        return search(tapes, study=study, **options)

    tapes = Tapes(Tape())
    tapes.touch = Fuse(at).touch
    with pytest.raises(KeyboardInterrupt):
        once(tapes)
    result = once(Tapes(Tape()))
    validate(result.plan)
    expected = search(Tape())
    assert [trial.value for trial in result.study.trials] == [trial.value for trial in expected.study.trials]


def test_each_chain_of_a_worker_that_died_is_trained_next_on_a_worker_without_other_chains() -> None:
    """Otherwise its companions would be blamed with it."""
    plan = open_plan(MemoryJournal(), WORKLOAD, {})
    scheduler = Scheduler(plan, checkpoint_every=10**9)
    scheduler.fold(StepsTimed(((1, 1.0), (3, 1.5)), 0.0))
    for number in range(4):
        scheduler.fold(TrialAdded(TrialId(f"t/{number}"), {"a": s.constant(number)}, 8))
        scheduler.fold(TargetAsked(TrialId(f"t/{number}"), 8))

    def join(host: str, at: float) -> list[ChainStarted]:
        for slot in names_of(WorkerId(host), 3):
            scheduler.note(WorkerJoined(slot, at))
        claims = scheduler.propose()
        for claim in claims:
            scheduler.fold(claim)
        return [claim for claim in claims if isinstance(claim, ChainStarted)]

    assert len(join("a", 0.0)) == 3
    for slot in names_of(WorkerId("a"), 3):
        left = WorkerLeft(slot, 1.0)
        for fact in scheduler.decide(left):
            scheduler.fold(fact)
        scheduler.note(left)
    assert [claim.worker for claim in join("b", 2.0)] == ["b"]
    assert [claim.worker for claim in join("c", 3.0)] == ["c"]
    validate_scheduler(scheduler)
