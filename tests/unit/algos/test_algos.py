"""Searches by themselves: under the port's contract, and against the papers' rules, implemented a second time."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import optuna
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpstage.algorithm import Action, Algorithm, Ask, Finish, Search, Setting
from hpstage.algos import (
    ASHA,
    FullTraining,
    Hyperband,
    MedianStopping,
    OptunaPruner,
    PopulationBasedTraining,
    SuccessiveHalving,
)
from hpstage.errors import UsageError
from hpstage.testing import AlgorithmContract
from hpstage.testing.play import Value, play

STEPS = 9
ALGORITHMS: list[Algorithm] = [
    FullTraining(window=3),
    SuccessiveHalving(1, 3),
    SuccessiveHalving(2, 2),
    ASHA(1, 3, window=1),
    ASHA(2, 2, window=4),
    ASHA(1, 3, "stopping", window=1),
    ASHA(2, 2, "stopping", window=4),
    ASHA(9, 2),
    Hyperband(1, 3),
    Hyperband(2, 2),
    Hyperband(1, 3, "asynchronous", window=1),
    Hyperband(2, 2, "asynchronous", window=4),
    MedianStopping(interval=2, grace=2, min_trials=1, window=3),
    MedianStopping(interval=1, grace=1, min_trials=2, window=1),
    OptunaPruner(window=1),
    OptunaPruner(interval=2, grace=3, window=4),
    PopulationBasedTraining(3),
    PopulationBasedTraining(2, 0.5, seed=1),
    *(
        replace(aware, tree_aware=False)
        for aware in (SuccessiveHalving(1, 3), ASHA(1, 3, window=2), Hyperband(1, 3), MedianStopping(2, 2, 1, 3))
    ),
]


def setting(n_trials: int | None, *, steps: int = STEPS, maximize: bool = False, adaptive: bool = False) -> Setting:
    return Setting(steps=steps, n_trials=n_trials, maximize=maximize, adaptive=adaptive)


@st.composite
def tables(draw: st.DrawFn, trials: int, steps: int = STEPS, values: Sequence[float] = range(-2, 3)) -> Value:
    """Few values, so that they tie often."""
    table = draw(st.lists(st.sampled_from(values), min_size=trials * steps, max_size=trials * steps))
    return lambda index, step: float(table[index * steps + step - 1])


def failures(trials: int) -> st.SearchStrategy[frozenset[tuple[int, int]]]:
    return st.frozensets(st.tuples(st.integers(0, trials - 1), st.integers(1, STEPS)), max_size=trials * 4)


def orders() -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(0, 30), max_size=200)


class TestAlgorithms(AlgorithmContract):
    @pytest.fixture(params=ALGORITHMS, ids=repr)
    def algorithm(self, request: pytest.FixtureRequest) -> Algorithm:
        algorithm: Algorithm = request.param
        return algorithm


# --- ASHA -------------------------------------------------------------------------------------------------


def asha_of_the_paper(
    rungs: int, eta: int, workers: int, n: int, loss: Callable[[int, int], float], order: Sequence[int]
) -> list[tuple[int, int]]:
    """Algorithm 2 with ``workers`` that ask for jobs, until there are none; jobs as (trial, rung)."""
    results: list[dict[int, float]] = [{} for _ in range(rungs)]
    promoted: list[set[int]] = [set() for _ in range(rungs)]
    jobs: list[tuple[int, int]] = []
    running: list[tuple[int, int]] = []
    new = iter(range(n))
    turns = iter(order)

    def get_job() -> tuple[int, int] | None:
        for k in reversed(range(rungs - 1)):
            candidates = sorted(results[k], key=lambda t: (results[k][t], t))[: len(results[k]) // eta]
            for trial in candidates:
                if trial not in promoted[k]:
                    promoted[k].add(trial)
                    return trial, k + 1
        trial = next(new, None)
        return None if trial is None else (trial, 0)

    while True:
        while len(running) < workers and (job := get_job()) is not None:
            running.append(job)
            jobs.append(job)
        if not running:
            return jobs
        trial, k = running.pop(next(turns, 0) % len(running))
        results[k][trial] = loss(trial, k)


@given(data=st.data())
def test_asha_promotes_as_the_papers_algorithm_does(data):
    n, workers, eta = data.draw(st.integers(1, 60)), data.draw(st.integers(1, 8)), data.draw(st.sampled_from([2, 3, 4]))
    steps = eta**3
    rungs = [1, eta, eta**2, eta**3]
    loss = data.draw(tables(n, 4))
    order = data.draw(orders())
    expected = asha_of_the_paper(4, eta, workers, n, lambda trial, k: loss(trial, k + 1), order)
    played = play(
        ASHA(1, eta, window=workers),
        setting(n, steps=steps),
        lambda index, step: loss(index, rungs.index(step) + 1),
        order=order,
    )
    requests = [(index, rungs.index(step)) for index, step in played.requested]
    assert requests[: len(expected)] == expected
    # Not in the paper: the best of the highest rung continues if no trial came to the end.
    rest = requests[len(expected) :]
    top = max(k for _, k in expected)
    assert rest == ([] if top == 3 else [(rest[0][0], k) for k in range(top + 1, 4)])


def test_asha_interleaves_rungs_with_one_worker():
    """The setting of the paper's illustration: r = 1, R = 9, eta = 3, nine trials; worked out by hand."""
    losses = [0.2, 0.9, 0.8, 0.7, 0.6, 0.3, 0.5, 0.1, 0.4]
    played = play(ASHA(1, 3, window=1), setting(9, steps=9), lambda index, step: losses[index])
    assert played.requested == [
        *[(0, 1), (1, 1), (2, 1)],
        (0, 3),  # the best of three
        *[(3, 1), (4, 1), (5, 1)],
        (5, 3),  # the best two of six are trials 0 and 5
        *[(6, 1), (7, 1)],
        (7, 3),  # the best two of eight are trials 7 and 0
        (7, 9),  # the best of the three of rung 1, before anything is proposed
        (8, 1),  # the best three of nine, 7, 0 and 5, were all promoted
    ]
    assert played.ends == dict.fromkeys(range(9), "pruned") | {7: "complete"}


def test_asha_ends_with_a_complete_trial_where_a_rung_is_too_small_to_promote():
    played = play(ASHA(1, 3), setting(2), lambda index, step: float(-index))
    assert played.requested == [(0, 1), (1, 1), (1, 3), (1, 9)]
    assert played.ends == {0: "pruned", 1: "complete"}


def test_asha_trains_the_second_best_trial_to_the_end_if_the_best_trial_fails():
    played = play(ASHA(1, 3), setting(2), lambda index, step: float(-index), failing=frozenset({(1, 9)}))
    assert played.requested == [(0, 1), (1, 1), (1, 3), (1, 9), (0, 3), (0, 9)]
    assert played.ends == {0: "complete", 1: "failed"}


@given(
    st.integers(2, 4),
    st.integers(1, 8),
    st.permutations(list(range(40))),
    st.permutations(list(range(40))),
    st.booleans(),
    orders(),
)
@settings(max_examples=10)
def test_the_stopping_variant_of_asha_prunes_as_optunas_successive_halving_pruner(
    eta, window, first, second, maximize, order
):
    steps = eta**2

    def value(index: int, step: int) -> float:
        return float((first if step == 1 else second)[index])

    played = play(
        ASHA(1, eta, "stopping", window=window), setting(40, steps=steps, maximize=maximize), value, order=order
    )
    study = optuna.create_study(
        direction="maximize" if maximize else "minimize",
        pruner=optuna.pruners.SuccessiveHalvingPruner(min_resource=1, reduction_factor=eta, min_early_stopping_rate=0),
    )
    trials = [study.ask() for _ in range(40)]
    for index, step in played.reported:
        if step < steps:
            trials[index].report(value(index, step), step)
            goes_on = not trials[index].should_prune()
            assert goes_on == (played.reached()[index] > step)


# --- Hyperband --------------------------------------------------------------------------------------------

TABLE_1 = {  # of the journal: R = 81, eta = 3; per bracket n_i and r_i
    4: [(81, 1), (27, 3), (9, 9), (3, 27), (1, 81)],
    3: [(34, 3), (11, 9), (3, 27), (1, 81)],
    2: [(15, 9), (5, 27), (1, 81)],
    1: [(8, 27), (2, 81)],
    0: [(5, 81)],
}


def test_brackets_of_hyperband_equal_those_of_the_published_table():
    brackets = Hyperband(1, 3).brackets(81)
    assert [(b.n_trials, b.rungs[0], len(b.rungs)) for b in brackets] == [
        (TABLE_1[s][0][0], TABLE_1[s][0][1], s + 1) for s in (4, 3, 2, 1, 0)
    ]
    assert Hyperband(1, 3).trials_per_cycle(81) == 143


@pytest.mark.parametrize("adaptive", [False, True])
def test_hyperband_trains_as_many_trials_to_each_rung_as_the_published_table_says(adaptive):
    played = play(
        Hyperband(1, 3), setting(286, steps=81, adaptive=adaptive), lambda index, step: float(index * step % 97)
    )
    first = 0
    for bracket in [*TABLE_1.values(), *TABLE_1.values()]:
        members = range(first, first + bracket[0][0])
        first = members.stop
        for count, step in bracket:
            assert sum(target == (index, step) for index in members for target in played.reported) == count
    assert first == 286


@given(data=st.data())
@settings(max_examples=20)
def test_each_bracket_of_hyperband_halves_as_algorithm_1_of_the_paper(data):
    eta, depth = data.draw(st.sampled_from([(2, 3), (3, 2), (4, 1)]))
    steps = eta**depth
    algorithm = Hyperband(1, eta)
    cycle = algorithm.trials_per_cycle(steps)
    value = data.draw(tables(cycle, steps))
    played = play(algorithm, setting(cycle, steps=steps, maximize=True), value)
    expected: dict[int, int] = {}
    first = 0
    for s in range(depth, -1, -1):
        n = -(-(depth + 1) * eta**s // (s + 1))
        field = list(range(first, first + n))
        first += n
        for i in range(s + 1):
            step = steps // eta ** (s - i)
            expected |= dict.fromkeys(field, step)
            field.sort(key=lambda index, step=step: (-value(index, step), index))
            field = field[: (n // eta**i) // eta]
    assert played.reached() == expected


def test_cycles_of_hyperband_run_one_after_another_only_if_the_sampler_learns_from_results():
    cycle = Hyperband(1, 3).trials_per_cycle(9)
    blind = play(Hyperband(1, 3), setting(2 * cycle), lambda index, step: float(index))
    assert blind.proposed_after == [0] * (2 * cycle)
    learning = play(Hyperband(1, 3), setting(2 * cycle, adaptive=True), lambda index, step: float(index))
    per_cycle = len(learning.reported) // 2
    assert learning.proposed_after == [0] * cycle + [per_cycle] * cycle
    assert sorted(learning.reported) == sorted(blind.reported)


def asynchronous_hyperband(
    steps: int, eta: int, workers: int, n: int, loss: Callable[[int, int], float], order: Sequence[int]
) -> list[tuple[int, int]]:
    """Algorithm 2 of the ASHA paper in each bracket of Hyperband, until there are no jobs; jobs as (trial, step)."""
    depth = next(k for k in range(20) if eta**k == steps)
    members = [[s] * -(-(depth + 1) * eta**s // (s + 1)) for s in range(depth, -1, -1)]
    cycle = [s for bracket in members for s in bracket]
    results: dict[tuple[int, int], dict[int, float]] = {}
    promoted: set[tuple[int, int]] = set()
    jobs: list[tuple[int, int]] = []
    running: list[tuple[int, int]] = []
    proposed = 0
    turns = iter(order)

    def get_job() -> tuple[int, int] | None:
        nonlocal proposed
        for k in range(depth - 1, -1, -1):
            for s in range(depth, -1, -1):
                rung = results.get((s, eta**k), {})
                for trial in sorted(rung, key=lambda t: (rung[t], t))[: len(rung) // eta]:
                    if (trial, eta**k) not in promoted:
                        promoted.add((trial, eta**k))
                        return trial, eta ** (k + 1)
        if proposed == n:
            return None
        proposed += 1
        return proposed - 1, eta ** (depth - cycle[(proposed - 1) % len(cycle)])

    while True:
        while len(running) < workers and (job := get_job()) is not None:
            running.append(job)
            jobs.append(job)
        if not running:
            return jobs
        trial, step = running.pop(next(turns, 0) % len(running))
        results.setdefault((cycle[trial % len(cycle)], step), {})[trial] = loss(trial, step)


@given(data=st.data())
def test_each_bracket_of_the_asynchronous_hyperband_promotes_as_asha(data):
    eta, steps = data.draw(st.sampled_from([(2, 8), (3, 9), (4, 16)]))
    n, workers = data.draw(st.integers(1, 60)), data.draw(st.integers(1, 8))
    loss, order = data.draw(tables(n, steps)), data.draw(orders())
    expected = asynchronous_hyperband(steps, eta, workers, n, loss, order)
    algorithm = Hyperband(1, eta, "asynchronous", window=workers)
    played = play(algorithm, setting(n, steps=steps), loss, order=order)
    assert played.requested[: len(expected)] == expected
    # Where nothing came to the end, something is taken there.
    assert (len(played.requested) == len(expected)) == any(step == steps for _, step in expected)


def test_asynchronous_hyperband_assigns_trials_to_brackets_as_the_published_table_says():
    played = play(Hyperband(1, 3, "asynchronous"), setting(286, steps=81), lambda index, step: float(index * step % 97))
    first_steps = [next(step for trial, step in played.requested if trial == index) for index in range(286)]
    expected = [step for (n, step), *_ in TABLE_1.values() for _ in range(n)]
    assert first_steps == 2 * expected


def test_asynchronous_hyperband_promotes_at_the_highest_step_of_all_brackets_first():
    """Factor 2, four steps: brackets of 4, 3 and 3 trials that begin at steps 1, 2 and 4. By hand, one worker."""
    losses = [0.5, 0.4, 0.9, 0.8, 0.3, 0.2, 0.7, 0.6, 0.6, 0.6]
    played = play(Hyperband(1, 2, "asynchronous", window=1), setting(10, steps=4), lambda index, step: losses[index])
    assert played.requested == [
        *[(0, 1), (1, 1)],
        (1, 2),  # the best of two
        *[(2, 1), (3, 1)],
        (0, 2),  # the best two of four are 1 and 0
        (1, 4),  # the best of two at step 2
        *[(4, 2), (5, 2)],
        (5, 4),  # the best of two at step 2 of its own bracket
        (6, 2),
        *[(7, 4), (8, 4), (9, 4)],
    ]
    assert [index for index, end in played.ends.items() if end == "complete"] == [1, 5, 7, 8, 9]


def test_a_resumed_asynchronous_hyperband_promotes_at_the_highest_step_of_all_brackets_first():
    losses = [0.5, 0.6, 0.8, 0.7, 0.3, 0.9, 0.4]
    algorithm = Hyperband(1, 2, "asynchronous", window=1)
    # All were proposed by a call that was interrupted: nothing is promoted until their results are reported.
    played = play(algorithm, setting(7, steps=4), lambda index, step: losses[index], ahead=7)
    assert played.requested[7:] == [(4, 4), (0, 2), (1, 2), (0, 4)]


def test_asynchronous_hyperband_trains_the_best_trial_to_the_end_if_no_trial_was_complete():
    losses = [0.5, 0.9, 0.8, 0.7, 0.4]
    algorithm = Hyperband(1, 2, "asynchronous", window=8)
    played = play(algorithm, setting(5, steps=4), lambda index, step: losses[index], failing=frozenset({(3, 1)}))
    # Trial 0 of the first bracket, the best of three, and trial 4 of the second wait at step 2, each alone there.
    assert played.requested == [(0, 1), (1, 1), (2, 1), (3, 1), (4, 2), (0, 2), (4, 4)]
    assert played.ends == {0: "pruned", 1: "pruned", 2: "pruned", 3: "failed", 4: "complete"}


# --- median stopping --------------------------------------------------------------------------------------


@given(data=st.data())
def test_median_stopping_prunes_exactly_the_trials_worse_than_the_median_of_running_averages(data):
    n, grace, interval = data.draw(st.integers(1, 25)), data.draw(st.integers(1, 8)), data.draw(st.integers(1, 9))
    least, window, maximize = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 8)), data.draw(st.booleans())
    values = data.draw(st.sampled_from([range(-2, 3), [-math.inf, -1, 0, 1, math.inf]]))
    value, failing = data.draw(tables(n, values=values)), data.draw(failures(n))
    algorithm = MedianStopping(interval, grace, least, window)
    played = play(algorithm, setting(n, maximize=maximize), value, failing=failing)
    averages: dict[int, list[float]] = {}
    histories: dict[int, list[float]] = {}  # less is better
    for position, (index, step) in enumerate(played.reported):
        assert step == STEPS or (step >= grace and (step - grace) % interval == 0)
        history = histories.setdefault(index, [])
        history.append(-value(index, step) if maximize else value(index, step))
        others = sorted(averages.setdefault(step, []))
        averages[step].append(mean(history))
        if step == STEPS:
            continue
        middle = others[(len(others) - 1) // 2 : len(others) // 2 + 1]
        stopped = len(others) >= least and min(history) > mean(middle)
        later = [requests for requests in played.requested if requests[0] == index and requests[1] > step]
        assert stopped == (not later), position


def mean(losses: Sequence[float]) -> float:
    """Of infinities of both signs, the bad ones count."""
    return math.inf if math.inf in losses else sum(losses) / len(losses)


def test_median_stopping_continues_a_trial_as_good_as_the_median():
    played = play(MedianStopping(3, 3, 1), setting(8), lambda index, step: 1.0)
    assert set(played.ends.values()) == {"complete"}


def test_median_stopping_prunes_no_trial_before_min_trials_have_reported():
    played = play(MedianStopping(1, 1, min_trials=5, window=1), setting(7), lambda index, step: float(index))
    assert played.ends == dict.fromkeys(range(5), "complete") | {5: "pruned", 6: "pruned"}


def test_median_stopping_ranks_a_trial_that_ever_reported_infinity_as_the_worst():
    """Both infinities in one curve have no mean. With the mean of trial 0 below 5, trial 3 would be stopped."""
    curves = [[math.inf, -math.inf, 0.0], [1.0, 1.0, 1.0], [5.0, 5.0, 5.0], [5.0, 5.0, 5.0]]
    algorithm = MedianStopping(min_trials=3, window=1)
    played = play(algorithm, setting(4, steps=3), lambda index, step: curves[index][step - 1])
    assert played.ends == dict.fromkeys(range(4), "complete")


# --- bad input --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("algorithm", "message"),
    [
        (SuccessiveHalving(2.5), "min_steps is 2.5; give a whole number of at least 1"),
        (ASHA(0), "min_steps is 0; give a whole number of at least 1"),
        (ASHA(10), "min_steps is 10, but a trial has 9 steps; lower min_steps"),
        (ASHA(1, 1), "reduction_factor is 1; give a whole number of at least 2"),
        (ASHA(1, 2.5), "reduction_factor is 2.5"),
        (ASHA(1, True), "reduction_factor is True"),
        (ASHA(variant="promote"), "variant is 'promote'; give one of 'promotion', 'stopping'"),
        (ASHA(window=0), "window is 0; give a whole number of at least 1"),
        (ASHA(window="16"), "window is '16'"),  # type: ignore[arg-type]
        (Hyperband(0), "min_steps is 0"),
        (Hyperband(10), "min_steps is 10, but a trial has 9 steps"),
        (Hyperband(1, 1), "reduction_factor is 1"),
        (Hyperband(1, "3"), "reduction_factor is '3'"),
        (Hyperband(variant="stopping"), "variant is 'stopping'; give one of 'synchronous', 'asynchronous'"),
        (Hyperband(window=0), "window is 0; give a whole number of at least 1"),
        (MedianStopping(0), "interval is 0"),
        (MedianStopping(0.5), "interval is 0.5"),
        (MedianStopping(grace=0), "grace is 0"),
        (MedianStopping(grace=9), "grace is 9, but a trial has only 9 steps: none could be stopped. Lower grace"),
        (MedianStopping(min_trials=0), "min_trials is 0"),
        (MedianStopping(window=-1), "window is -1"),
    ],
    ids=repr,
)
def test_invalid_parameters_of_an_algorithm_are_refused_with_a_remedy(algorithm, message):
    with pytest.raises(UsageError, match=message):
        algorithm.check(setting(8))


def test_a_plugin_with_the_deprecated_name_of_the_method_reported_works_with_a_warning() -> None:
    with pytest.warns(DeprecationWarning, match="Old.told is deprecated; use reported"):

        class Old(Search):
            def room(self) -> int:
                return 1

            def added(self, index: int) -> list[Action]:
                return [Ask(index, 2)]

            def told(self, index: int, step: int, value: float) -> list[Action]:
                return [Finish(index, "complete")]

            def failed(self, index: int) -> list[Action]:
                return []

    assert Old().reported(0, 2, 0.5) == [Finish(0, "complete")]


def test_the_deprecated_name_of_the_method_reported_can_be_called() -> None:
    class New(Search):
        def room(self) -> int:
            return 1

        def added(self, index: int) -> list[Action]:
            return []

        def reported(self, index: int, step: int, value: float) -> list[Action]:
            return [Finish(index, "complete")]

        def failed(self, index: int) -> list[Action]:
            return []

    with pytest.warns(DeprecationWarning, match="New.told is deprecated; use reported"):
        assert New().told(0, 2, 0.5) == [Finish(0, "complete")]
