"""Savings by cause: they sum to the last bit, and steps are those that a count by brute force finds."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import optuna
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import hpstage
from hpstage import schedule as s
from hpstage.accounting.account import Account, new_account
from hpstage.accounting.book import Book, open_book
from hpstage.accounting.causes import Causes, causes_of
from hpstage.accounting.savings import answered_steps
from hpstage.algos import FullTraining, SuccessiveHalving
from hpstage.execution.simulated import SimulatedExecutor
from hpstage.execution.simulated_cluster import SimulatedCluster
from hpstage.plan.facts import Fact, StateReached, TargetAsked, TrialAdded, TrialId
from hpstage.plan.log import read_facts
from hpstage.plan.step_times import StepTimes
from hpstage.store.memory import MemoryJournal
from hpstage.testing.toys import Failing
from tests.unit.searches import Search, searches, trial

optuna.logging.set_verbosity(optuna.logging.ERROR)

SIDE_BY_SIDE: dict[str, Any] = {"step_times": StepTimes(((1, 1.0), (3, 1.5)))}
SEVERAL: dict[str, Any] = {"virtual_nodes": 2, "speedup": lambda workers: workers**0.75}
SECONDS = st.floats(1e-3, 1e4, allow_nan=False)


def check_identities(found: Causes) -> None:
    exact = {name: Fraction(getattr(found, name)) for name in Causes.__slots__}
    assert exact["full"] - exact["early_stopping"] == exact["alone"]
    down = sum(exact[name] for name in ("shared_prefix", "other_study", "fused", "live"))
    up = sum(exact[name] for name in ("exchange", "from_disk", "save", "wasted", "again", "unanswered", "estimates"))
    assert exact["alone"] - down + up == exact["used"]
    assert sum(exact[name] for name in ("train", "evaluate", "load", "save", "wasted")) == exact["used"]
    assert exact["from_disk"] - exact["live"] == exact["load"]
    assert all(value >= 0 for name, value in exact.items() if name not in ("estimates", "live", "from_disk"))


def books(journal: MemoryJournal) -> tuple[Book, list[Book]]:
    """The plan's book, and those of its studies."""
    whole = open_book(journal)
    studies = dict.fromkeys(whole.account.plan.study_of(id) for id in whole.trials)
    return whole, [Book(whole.account, study) for study in studies]


def shared_steps(journal: MemoryJournal) -> dict[TrialId, list[int]]:
    """By brute force: of the steps requested of each trial, how many a trial of the same study had requested, and how
    many one of another study. A step is known by all values up to it."""
    added: dict[TrialId, TrialAdded] = {}
    first: dict[tuple[object, ...], TrialId] = {}
    shared: dict[TrialId, list[int]] = {}
    done: dict[TrialId, int] = {}
    for fact in read_facts(journal):
        if isinstance(fact, TrialAdded):
            added.setdefault(fact.trial, fact)
            shared.setdefault(fact.trial, [0, 0])
        elif isinstance(fact, TargetAsked):
            schedules = added[fact.trial].schedules
            line = tuple(tuple(schedules[name].value(at) for name in sorted(schedules)) for at in range(fact.step))
            for length in range(done.get(fact.trial, 0) + 1, fact.step + 1):
                requester = first.setdefault(line[:length], fact.trial)
                if requester != fact.trial:
                    shared[fact.trial][requester.split("/")[0] != fact.trial.split("/")[0]] += 1
            done[fact.trial] = max(done.get(fact.trial, 0), fact.step)
    return shared


def steps_again(journal: MemoryJournal) -> int:
    reached = [fact for fact in read_facts(journal) if isinstance(fact, StateReached)]
    trained = [(fact.node, step) for fact in reached for step in range(fact.start, fact.step)]
    return len(trained) - len(set(trained))


@settings(max_examples=20)
@given(
    st.lists(searches(), min_size=1, max_size=3),
    st.data(),
    st.tuples(SECONDS, SECONDS, SECONDS, SECONDS),
    st.lists(st.floats(0.1, 2e4), max_size=2),
    st.booleans(),
    st.sampled_from([{}, SIDE_BY_SIDE, SEVERAL]),
)
def test_causes_of_savings_sum_to_busy_seconds_and_count_steps_shared_between_trials(
    rounds: list[list[TrialAdded]],
    data: st.DataObject,
    costs: tuple[float, float, float, float],
    deaths: list[float],
    lossy: bool,
    together: dict[str, Any],
) -> None:
    step, evaluate, load, save = costs
    cluster = SimulatedCluster(2, slots=3 if together is SIDE_BY_SIDE else 1)
    executor = SimulatedExecutor(
        cluster, step_seconds=step, evaluate_seconds=evaluate, load_seconds=load, save_seconds=save, **together
    )
    for after in deaths:
        executor.cluster.kill(executor.cluster.join(0.0), after)
    run = Search(executor, checkpoint_every=3, max_losses=99)
    for number, trials in enumerate(rounds):
        mine = [TrialAdded(TrialId(f"study {number}/{i}"), t.schedules, t.steps) for i, t in enumerate(trials)]
        run.run(mine, [data.draw(st.integers(1, added.steps)) for added in mine], validate=False)
        if lossy:
            executor.kept.clear()
    whole, parts = books(run.journal)
    expected = shared_steps(run.journal)
    found = [causes_of(book) for book in parts]
    for book, mine in zip([whole, *parts], [causes_of(whole), *found], strict=True):
        check_identities(mine)
        assert mine.prefix_steps == sum(expected[id][0] for id in book.trials)
        assert mine.other_steps == sum(expected[id][1] for id in book.trials)
    total = causes_of(whole)
    assert total.again_steps == steps_again(run.journal)
    for name in Causes.__slots__:
        if name != "idle":  # a worker that one study left to another was not idle
            assert sum(Fraction(getattr(mine, name)) for mine in found) == Fraction(getattr(total, name)), name


@settings(max_examples=12)
@given(st.lists(searches(), min_size=1, max_size=2), st.data())
def test_no_seconds_are_attributed_to_estimates_if_all_steps_take_equally_long_without_losses(
    rounds: list[list[TrialAdded]], data: st.DataObject
) -> None:
    run = Search(SimulatedExecutor(2, step_seconds=2.0, evaluate_seconds=1.0, load_seconds=4.0, save_seconds=0.5))
    for number, trials in enumerate(rounds):
        mine = [TrialAdded(TrialId(f"study {number}/{i}"), t.schedules, t.steps) for i, t in enumerate(trials)]
        run.run(mine, [data.draw(st.integers(1, added.steps)) for added in mine], validate=False)
    found = causes_of(open_book(run.journal))
    assert found.estimates == found.unanswered == found.wasted == found.fused == found.exchange == 0.0
    assert found.again == 2.0 * found.again_steps
    assert found.early_stopping == 0.0  # no study says that a trial is over


def unanswered_steps(account: Account, facts: list[Fact]) -> int:
    """By brute force: steps that were trained, though the first trial that requested them has no result there."""
    trials = account.plan.trials
    first: dict[tuple[int, int], TrialId] = {}
    trained: set[tuple[int, int]] = set()
    for fact in facts:
        if isinstance(fact, TargetAsked):
            for node, start, stop in trials[fact.trial].path_to(fact.step):
                for step in range(start, stop):
                    first.setdefault((node.id, step), fact.trial)
        elif isinstance(fact, StateReached):
            trained |= {(fact.node, step) for step in range(fact.start, fact.step)}
    results = {id: max(answered_steps(trial), default=0) for id, trial in trials.items()}
    return sum(step >= results[first[node, step]] for node, step in trained if (node, step) in first)


@settings(max_examples=8)
@given(st.lists(searches(), min_size=1, max_size=2), st.data())
def test_unanswered_training_counts_steps_whose_first_requesting_trial_has_no_result(
    rounds: list[list[TrialAdded]], data: st.DataObject
) -> None:
    run = Search(SimulatedExecutor(2, step_seconds=2.0, evaluate_seconds=1.0), checkpoint_every=3)
    for number, trials in enumerate(rounds):
        mine = [TrialAdded(TrialId(f"study {number}/{i}"), t.schedules, t.steps) for i, t in enumerate(trials)]
        run.run(mine, [data.draw(st.integers(1, added.steps)) for added in mine], validate=False)
    facts = list(read_facts(run.journal))
    account = new_account(run.journal)
    for position, fact in enumerate(facts, 1):
        account.fold(fact)
        if isinstance(fact, StateReached):
            assert causes_of(Book(account)).unanswered == 2.0 * unanswered_steps(account, facts[:position])


def test_steps_shared_with_another_study_are_counted_separately_from_steps_shared_within_a_study() -> None:
    run = Search(SimulatedExecutor(1, step_seconds=2.0, evaluate_seconds=1.0, save_seconds=0.25, load_seconds=1.0))
    first = trial(0, {"a": s.piecewise({0: 1, 5: 2})}, 8)
    run.run([first], [8])
    mine = [TrialAdded(TrialId(f"other/{i}"), {"a": s.piecewise({0: 1, 6: 3 + i, 7: 9})}, 8) for i in range(2)]
    run.run(mine, [6, 8])
    _, [one, two] = books(run.journal)
    found = causes_of(one)
    assert (found.alone, found.shared_prefix, found.other_study) == (17.0, 0.0, 0.0)
    assert found.used == 17.0 + found.save + found.load + found.again
    found = causes_of(two)
    # Five steps of each of the two were the first study's, and the sixth of the second trial the first trial's.
    assert (found.prefix_steps, found.other_steps) == (1, 10)
    assert (found.shared_prefix, found.other_study) == (2.0, 20.0)
    assert found.alone == 6 * 2.0 + 1.0 + 8 * 2.0 + 1.0


def test_an_evaluation_that_another_trial_requested_before_is_shared() -> None:
    run = Search(SimulatedExecutor(1, step_seconds=2.0, evaluate_seconds=8.0))
    pair = [trial(i, {"a": s.constant(1)}, 4) for i in range(2)]
    run.run(pair, [4, 4])
    found = causes_of(open_book(run.journal))
    assert (found.alone, found.shared_prefix, found.used, found.estimates) == (32.0, 16.0, 16.0, 0.0)


def space(trial: optuna.Trial) -> dict[str, object]:
    late = trial.suggest_categorical("late", [1, 3, 7])
    return {"a": s.piecewise({0: trial.suggest_categorical("early", [1, 2]), 6: late})}


def optimized(executor: object, trainable: object, **options: object) -> MemoryJournal:
    study = optuna.create_study(study_name="study", sampler=optuna.samplers.RandomSampler(seed=0))
    journal = MemoryJournal()
    settings = {"algorithm": SuccessiveHalving(min_steps=4, reduction_factor=2), "steps": 16, "n_trials": 12} | options
    hpstage.optimize(study, trainable, space, executor=executor, store=journal, **settings)  # type: ignore[arg-type]
    return journal


def test_early_stopping_counts_steps_never_requested_of_ended_trials() -> None:
    executor = SimulatedExecutor(2, step_seconds=0.5)
    book = open_book(optimized(executor, object(), metric="value"))
    found = causes_of(book)
    check_identities(found)
    never = sum(16 - planned.requested for planned in book.trials.values())
    assert found.early_steps == never > 0
    assert found.early_stopping == 0.5 * never
    assert found.full == 0.5 * 16 * 12


def test_a_trial_that_an_extended_trial_continues_does_not_count_as_stopped_early() -> None:
    study = optuna.create_study(study_name="study", sampler=optuna.samplers.RandomSampler(seed=0))
    journal = MemoryJournal()
    for steps, extend in ((10, False), (20, True)):
        hpstage.optimize(
            study,
            object(),
            space,
            metric="value",
            steps=steps,
            n_trials=4,
            extend=extend,
            algorithm=FullTraining(),
            executor=SimulatedExecutor(2, step_seconds=1.0),
            store=journal,
        )
    book = open_book(journal)
    assert len(book.trials) == len(study.trials) == 8
    found = causes_of(book)
    check_identities(found)
    assert found.early_steps == 0
    assert found.full == 4 * 10 + 4 * 20


def test_a_trial_that_failed_is_not_counted_as_stopped_early() -> None:
    book = open_book(optimized(hpstage.InlineExecutor(), Failing(), metric="score", algorithm=FullTraining()))
    failed = [id for id, ended in book.account.plan.ended.items() if ended.state == "FAIL"]
    found = causes_of(book)
    check_identities(found)
    assert 0 < len(failed) < 12
    assert found.early_stopping == found.early_steps == 0.0
    assert found.alone == found.full


def test_training_of_trials_without_a_result_counts_as_unanswered() -> None:
    study = optuna.create_study(study_name="study")
    journal = MemoryJournal()
    options = {"metric": "score", "steps": 8, "n_trials": 2, "algorithm": FullTraining(), "store": journal}
    doomed = {"a": s.piecewise({0: 1, 3: 7})}
    hpstage.optimize(study, Failing(), lambda trial: doomed, executor=hpstage.InlineExecutor(), **options)  # type: ignore[arg-type]
    found = causes_of(open_book(journal))
    check_identities(found)
    assert found.full == 0.0
    assert found.unanswered == found.train > 0.0


def test_continuing_from_a_live_state_saves_the_mean_seconds_of_a_load_from_disk() -> None:
    run = Search(SimulatedExecutor(1, step_seconds=1.0, load_seconds=4.0))
    one, two = (trial(i, {"a": s.piecewise({0: 1, 4: i + 2})}, 8) for i in range(2))
    run.run([one], [4])
    run.run([one], [8])  # where the worker stands
    run.run([two], [8])  # from disk
    book = open_book(run.journal)
    assert [charge.fact.source for charge in book.charges if charge.fact.source] == ["fresh", "continued", "disk"]
    found = causes_of(book)
    assert (found.from_disk, found.live, found.load) == (8.0, 4.0, 4.0)


def test_idle_seconds_are_those_between_the_stages_of_a_worker() -> None:
    executor = SimulatedExecutor(1, step_seconds=1.0)
    run = Search(executor)
    run.run([trial(0, {"a": s.constant(1)}, 4)], [4])
    executor.cluster.now += 10.0  # nothing is requested
    run.run([trial(1, {"a": s.constant(2)}, 4)], [4])
    found = causes_of(open_book(run.journal))
    assert found.idle == pytest.approx(10.0)
    assert found.used == 8.0


def test_all_causes_of_savings_are_zero_for_an_empty_plan() -> None:
    run = Search(SimulatedExecutor(1))
    run.driver.finish()
    found = causes_of(open_book(run.journal))
    assert {getattr(found, name) for name in Causes.__slots__} == {0}


def test_savings_of_stacked_training_and_costs_of_gangs_are_separate_causes() -> None:
    trials = [trial(number, {"a": s.constant(number)}, 10) for number in range(4)]
    stacked = Search(
        SimulatedExecutor(SimulatedCluster(1, slots=4), step_times=StepTimes(((1, 2.0), (4, 4.0)))), MemoryJournal()
    )
    stacked.run(trials, [10] * 4)
    found = causes_of(open_book(stacked.journal))
    # 4 x 10 steps of 1 s alone; side by side, a step of all takes 2 s.
    assert (found.alone, found.fused, found.exchange, found.used, found.estimates) == (40.0, 20.0, 0.0, 20.0, 0.0)
    executor = SimulatedExecutor(2, virtual_nodes=2, speedup=lambda workers: 1.0 if workers == 1 else 1.25)
    several = Search(executor)
    several.run(trials[:1], [10])
    found = causes_of(open_book(several.journal))
    assert (found.alone, found.fused, found.exchange, found.used, found.estimates) == (10.0, 0.0, 6.0, 16.0, 0.0)
