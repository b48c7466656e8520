"""Tree-aware algorithms: trials that are one state at a step are one candidate there."""

from __future__ import annotations

import random
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpstage.algorithm import Algorithm, Ask, Finish, Trials
from hpstage.algos import ASHA, Hyperband, MedianStopping, SuccessiveHalving
from hpstage.testing.play import Value, play
from tests.unit.algos.test_algos import STEPS, failures, mean, orders, setting, tables

Target = tuple[int, int]

HALVING = SuccessiveHalving(1, 3)
SYNCHRONOUS: list[Algorithm] = [
    HALVING,
    SuccessiveHalving(2, 2),
    Hyperband(1, 3),
    Hyperband(2, 2),
    MedianStopping(interval=2, grace=2, min_trials=1, window=3),
    MedianStopping(min_trials=2, window=1),
]
ALGORITHMS: list[Algorithm] = [
    *SYNCHRONOUS,
    ASHA(1, 3, window=1),
    ASHA(2, 2, window=4),
    ASHA(1, 3, "stopping", window=1),
    ASHA(2, 2, "stopping", window=4),
    Hyperband(1, 3, "asynchronous", window=1),
    Hyperband(2, 2, "asynchronous", window=4),
]


class Lines(Trials):
    """Trials that train on the given values, one for each step: they are one while these are equal."""

    def __init__(self, *lines: Sequence[object]) -> None:
        self.lines = [tuple(line) for line in lines]

    def prefix(self, index: int, step: int) -> Hashable:
        return self.lines[index][:step]


class Distinct(Trials):
    """Trials that have nothing in common, under other names than the port's."""

    def prefix(self, index: int, step: int) -> Hashable:
        return f"trial {index} at {step}"


@dataclass
class Tree:
    """Random trials with common beginnings; their values, and whether they fail, are those of their states."""

    trials: Lines
    salt: int
    failing_share: float = 0.0

    def __len__(self) -> int:
        return len(self.trials.lines)

    def __repr__(self) -> str:
        return f"Tree({self.trials.lines}, {self.salt}, {self.failing_share})"

    def value(self, index: int, step: int) -> float:
        """Few values, so that they tie often."""
        return float(self._of_state("value", index, step).randint(-2, 2))

    def failing(self, steps: int = STEPS) -> frozenset[Target]:
        targets = ((index, step) for index in range(len(self)) for step in range(1, steps + 1))
        return frozenset(t for t in targets if self._of_state("failure", *t).random() < self.failing_share)

    def times(self, count: int) -> Tree:
        """Every trial ``count`` times in a row."""
        return replace(self, trials=Lines(*(line for line in self.trials.lines for _ in range(count))))

    def _of_state(self, what: str, index: int, step: int) -> random.Random:
        return random.Random(f"{what} {self.salt} {self.trials.prefix(index, step)}")


@st.composite
def trees(draw: st.DrawFn, most: int = 40, steps: int = STEPS, shares: Sequence[float] = (0.0, 0.2, 0.5, 0.8)) -> Tree:
    starts = [start for start in (1, 2, 3, 5, 9) if start <= steps]
    ends = [*starts[1:], steps + 1]
    parts = st.tuples(*(st.sampled_from("aab") for _ in starts))
    lines = [
        "".join(letter * (end - start) for letter, start, end in zip(part, starts, ends, strict=True))
        for part in draw(st.lists(parts, min_size=1, max_size=most))
    ]
    return Tree(Lines(*lines), draw(st.integers(0, 10**6)), draw(st.sampled_from(shares)))


# --- laws -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=repr)
@given(data=st.data())
@settings(max_examples=10)
def test_a_tree_aware_algorithm_equals_the_plain_algorithm_if_no_trials_share_steps(algorithm, data):
    n = data.draw(st.integers(1, 40))
    value, failing, order = data.draw(tables(n)), data.draw(failures(n)), data.draw(orders())
    about = setting(n, maximize=data.draw(st.booleans()), adaptive=data.draw(st.booleans()))
    aware = play(algorithm, about, value, order=order, failing=failing, trials=Distinct())
    plain = play(replace(algorithm, tree_aware=False), about, value, order=order, failing=failing, trials=Distinct())
    assert aware == plain


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=repr)
@given(tree=trees(), order=orders())
@settings(max_examples=10)
def test_an_algorithm_without_tree_aware_ignores_shared_steps_of_trials(algorithm, tree, order):
    plain, about, failing = replace(algorithm, tree_aware=False), setting(len(tree)), tree.failing()
    sharing = play(plain, about, tree.value, order=order, failing=failing, trials=tree.trials)
    apart = play(plain, about, tree.value, order=order, failing=failing)
    assert replace(sharing, params=apart.params) == apart


@pytest.mark.parametrize(
    "algorithm",
    [
        SuccessiveHalving(1, 2),
        SuccessiveHalving(1, 3),
        SuccessiveHalving(2, 2),
        ASHA(1, 2, window=3),
        ASHA(1, 3, "stopping", window=2),
        MedianStopping(min_trials=2, window=3),
    ],
    ids=repr,
)
@given(tree=trees(most=25), times=st.integers(1, 4), maximize=st.booleans())
@settings(max_examples=20)
def test_a_tree_aware_algorithm_ends_copies_of_a_trial_at_the_step_of_the_original(algorithm, tree, times, maximize):
    """Reported in order, in windows that hold all copies: each does what its original does."""
    single = play(
        algorithm, setting(len(tree), maximize=maximize), tree.value, failing=tree.failing(), trials=tree.trials
    )
    many = tree.times(times)
    if not isinstance(algorithm, SuccessiveHalving):
        algorithm = replace(algorithm, window=algorithm.window * times)
    copied = play(
        algorithm, setting(len(many), maximize=maximize), many.value, failing=many.failing(), trials=many.trials
    )
    assert copied.ends == {index: single.ends[index // times] for index in range(len(many))}
    assert copied.reached() == {
        index: step for index in range(len(many)) if (step := single.reached().get(index // times)) is not None
    }


# --- successive halving and synchronous Hyperband ---------------------------------------------------------


def halving(members: Sequence[int], tree: Tree, rungs: Sequence[int], eta: int) -> dict[int, int]:
    """How far each member is trained, by states: a rung is a set of states, and all trials of the best are promoted."""
    failing = tree.failing(rungs[-1])
    furthest: dict[int, int] = {}
    field, lost = list(members), 0
    for step in rungs:
        furthest |= dict.fromkeys(field, step)
        first: dict[Hashable, int] = {}
        for index in field:
            first.setdefault(tree.trials.prefix(index, step), index)
        places = max(1, (len(first) + lost) // eta)
        healthy = {state: index for state, index in first.items() if (index, step) not in failing}
        best = sorted(healthy, key=lambda state: (tree.value(first[state], step), first[state]))[:places]
        lost = places - len(best)
        field = [index for index in field if tree.trials.prefix(index, step) in best]
    return furthest


@given(tree=trees(), rule=st.sampled_from([(1, 3), (2, 2), (1, 2), (2, 4)]))
def test_successive_halving_promotes_the_best_states_with_all_their_trials(tree, rule):
    algorithm = SuccessiveHalving(*rule)
    played = play(algorithm, setting(len(tree)), tree.value, failing=tree.failing(), trials=tree.trials)
    assert dict(played.requested) == halving(range(len(tree)), tree, algorithm.rungs(STEPS), rule[1])


@given(tree=trees(), rule=st.sampled_from([(1, 3), (2, 2)]))
def test_each_bracket_of_hyperband_promotes_the_best_states_of_its_trials(tree, rule):
    algorithm = Hyperband(*rule)
    played = play(algorithm, setting(len(tree)), tree.value, failing=tree.failing(), trials=tree.trials)
    expected: dict[int, int] = {}
    first = 0
    while first < len(tree):
        for bracket in algorithm.brackets(STEPS):
            members = range(first, min(first + bracket.n_trials, len(tree)))
            expected |= halving(members, tree, bracket.rungs, rule[1])
            first += bracket.n_trials
    assert dict(played.requested) == expected


@pytest.mark.ci
@given(data=st.data())
def test_successive_halving_promotes_the_published_number_of_distinct_trials_despite_failures(data):
    """``n // eta**k`` of n trials to rung k, at least one, and no more than there are: with failures on any rung."""
    n, eta = data.draw(st.integers(1, 100)), data.draw(st.sampled_from([2, 3]))
    algorithm = SuccessiveHalving(1, eta)
    fate, share = random.Random(data.draw(st.integers(0, 10**6))), data.draw(st.sampled_from([0.1, 0.5, 0.8]))
    targets = [(index, step) for index in range(n) for step in range(1, STEPS + 1)]
    failing = frozenset(target for target in targets if fate.random() < share)
    played = play(algorithm, setting(n), data.draw(tables(n)), failing=failing, trials=Distinct())
    rungs = algorithm.rungs(STEPS)
    for k, (low, high) in enumerate(pairwise(rungs)):
        reports = sum(step == low for _, step in played.reported)
        promoted = sum(step == high for _, step in played.requested)
        assert promoted == min(reports, max(1, n // eta ** (k + 1)))


# Nine trials in six states at step 1, of which the first is three trials, and the second two.
NINE = Lines("AAAAAAAAA", "AAAABBBBB", "ABBBBBBBB", "BAAAAAAAA", "BBBBBBBBB", *("CDEF"[i] * 9 for i in range(4)))
LOSSES = {"A": 0.1, "B": 0.2, "C": 0.3, "D": 0.4, "E": 0.5, "F": 0.6} | {"AAA": 0.1, "ABB": 0.3, "BAA": 0.2, "BBB": 0.4}


def loss(index: int, step: int) -> float:
    return LOSSES.get(NINE.lines[index][0] if step == 1 else "".join(map(str, NINE.lines[index][:3])), 0.0)


def test_successive_halving_promotes_different_states_instead_of_copies_of_one_state():
    """By hand: A and B of six candidates are promoted with five trials; of their four states at 3 one is promoted."""
    aware = play(HALVING, setting(9), loss, trials=NINE)
    assert [target for target in aware.requested if target[1] == 3] == [(0, 3), (1, 3), (2, 3), (3, 3), (4, 3)]
    assert [target for target in aware.requested if target[1] == 9] == [(0, 9), (1, 9)]  # they part at step 5
    plain = play(SuccessiveHalving(1, 3, tree_aware=False), setting(9), loss, trials=NINE)
    assert plain.requested[9:] == [(0, 3), (1, 3), (2, 3), (0, 9)]  # three places for state A


def test_a_failed_state_counts_as_a_candidate_but_is_not_promoted():
    failing = frozenset({(0, 1), (1, 1), (2, 1)})
    played = play(HALVING, setting(9), loss, failing=failing, trials=NINE)
    assert [index for index, step in played.requested if step == 3] == [3, 4, 5]  # B and C: two of six


def test_a_state_is_promoted_if_only_some_of_its_trials_failed():
    played = play(HALVING, setting(9), loss, failing=frozenset({(0, 1), (2, 1)}), trials=NINE)
    assert [index for index, step in played.requested if step == 3] == [1, 3, 4]


# --- ASHA and asynchronous Hyperband ----------------------------------------------------------------------


def promotions(
    brackets: Sequence[Sequence[int]],
    bracket_of: Callable[[int], int],
    eta: int,
    workers: int,
    tree: Tree,
    order: Sequence[int],
) -> list[Target]:
    """Algorithm 2 of the ASHA paper with states for configurations, in each of several brackets."""
    failing = tree.failing(brackets[0][-1])
    rungs: dict[tuple[int, int], list[int]] = {(b, step): [] for b, steps in enumerate(brackets) for step in steps}
    promoted: set[Target] = set()
    jobs: list[Target] = []
    running: list[Target] = []
    new = iter(range(len(tree)))
    turns = iter(order)

    def best_states(b: int, step: int) -> list[Hashable]:
        """``top_k(rung, |rung| / eta)``, the rung being a set of states."""
        first: dict[Hashable, int] = {}
        for index in rungs[b, step]:
            first.setdefault(tree.trials.prefix(index, step), index)
        ranked = sorted(first, key=lambda state: (tree.value(first[state], step), first[state]))
        return ranked[: len(ranked) // eta]

    def get_job() -> Target | None:
        for step in sorted({step for steps in brackets for step in steps[:-1]}, reverse=True):
            for b, steps in enumerate(brackets):
                if step not in steps:
                    continue
                for state in best_states(b, step):
                    for index in sorted(rungs[b, step]):
                        if tree.trials.prefix(index, step) == state and (index, step) not in promoted:
                            promoted.add((index, step))
                            return index, steps[steps.index(step) + 1]
        index = next(new, None)
        return None if index is None else (index, brackets[bracket_of(index)][0])

    while True:
        while len(running) < workers and (job := get_job()) is not None:
            running.append(job)
            jobs.append(job)
        if not running:
            return jobs
        index, step = running.pop(next(turns, 0) % len(running))
        if (index, step) not in failing:
            rungs[bracket_of(index), step].append(index)


@given(tree=trees(), rule=st.sampled_from([(1, 3), (2, 2), (1, 2)]), workers=st.integers(1, 8), order=orders())
def test_asha_promotes_the_trials_of_the_best_states_as_the_papers_algorithm_does(tree, rule, workers, order):
    algorithm = ASHA(*rule, window=workers)
    expected = promotions([algorithm.rungs(STEPS)], lambda index: 0, rule[1], workers, tree, order)
    played = play(algorithm, setting(len(tree)), tree.value, order=order, failing=tree.failing(), trials=tree.trials)
    assert played.requested[: len(expected)] == expected
    if any(target[1] == STEPS and target not in tree.failing() for target in expected):
        assert len(played.requested) == len(expected)


@given(tree=trees(), rule=st.sampled_from([(1, 3), (2, 2)]), workers=st.integers(1, 8), order=orders())
def test_asynchronous_hyperband_promotes_the_trials_of_the_best_states_of_each_bracket(tree, rule, workers, order):
    algorithm = Hyperband(*rule, "asynchronous", window=workers)
    brackets = algorithm.brackets(STEPS)
    dealt = [number for number, bracket in enumerate(brackets) for _ in range(bracket.n_trials)]
    rungs = [bracket.rungs for bracket in brackets]
    expected = promotions(rungs, lambda index: dealt[index % len(dealt)], rule[1], workers, tree, order)
    played = play(algorithm, setting(len(tree)), tree.value, order=order, failing=tree.failing(), trials=tree.trials)
    assert played.requested[: len(expected)] == expected
    if any(target[1] == STEPS and target not in tree.failing() for target in expected):
        assert len(played.requested) == len(expected)


def value_by(losses: dict[str, float], lines: Lines) -> Value:
    return lambda index, step: losses["".join(map(str, lines.prefix(index, step)))]


def test_asha_promotes_all_trials_of_the_best_state_also_those_proposed_later():
    lines = Lines("Aaaa", "Abbb", "Bbbb", "Accc")
    losses = {"A": 0.5, "B": 0.9, "Aa": 0.4, "Ab": 0.3, "Ac": 0.2, "Abbb": 0.3, "Accc": 0.2}
    played = play(ASHA(1, 2, window=1), setting(4, steps=4), value_by(losses, lines), trials=lines)
    assert played.requested == [
        *[(0, 1), (1, 1)],  # one state is not two to choose from
        (2, 1),
        *[(0, 2), (1, 2)],  # the best of two, one after the other
        (1, 4),  # they have parted: it is the best of two
        (3, 1),
        (3, 2),  # its state is still the best
        (3, 4),
    ]
    assert played.ends == {0: "pruned", 1: "complete", 2: "pruned", 3: "complete"}


def test_one_result_makes_asha_promote_as_many_trials_as_its_window_holds():
    search = ASHA(1, 2, window=3).start(setting(5, steps=2), Lines("Aa", "Ab", "Ac", "Ad", "Bb"))
    for index in range(5):  # proposed by a call that was interrupted: more than the window
        search.added(index)
    assert [action for index in range(4) for action in search.reported(index, 1, 0.1)] == []
    assert search.reported(4, 1, 0.2) == [Ask(0, 2), Ask(1, 2), Ask(2, 2)]
    assert search.reported(1, 2, 0.0) == [Finish(1, "complete"), Ask(3, 2)]


def test_the_first_of_two_brackets_that_can_promote_at_the_same_step_promotes_first():
    """Factor 2, four steps: trials 0 to 3 are compared at steps 1 and 2, trials 4 to 6 at step 2. By hand."""
    lines = Lines("Aaaa", "Aabb", "Abbb", "Bbbb", "Cccc", "Dddd")
    search = Hyperband(1, 2, "asynchronous", window=2).start(setting(6, steps=4), lines)
    for index in range(6):  # proposed by a call that was interrupted: more than the window
        search.added(index)
    for index, step in [(0, 1), (1, 1), (2, 1), (4, 2)]:
        assert search.reported(index, step, 0.1) == []
    assert search.reported(3, 1, 0.2) == [Ask(0, 2)]  # state A is the best of two; there is room for one trial
    assert search.reported(0, 2, 0.1) == [Ask(1, 2)]
    assert search.reported(1, 2, 0.1) == [Ask(2, 2)]
    assert search.reported(2, 2, 0.2) == [Ask(0, 4)]  # state Aa is the best of two: trials 0 and 1
    assert search.reported(5, 2, 0.2) == [Ask(1, 4)]  # and not trial 4, the best of two in the second bracket
    assert search.reported(0, 4, 0.0) == [Finish(0, "complete"), Ask(4, 4)]


def test_asha_does_not_promote_a_later_trial_of_a_promoted_state_that_is_no_longer_the_best():
    lines = Lines("Aa", "Bb", "Cc", "Ab")
    losses = {"A": 0.5, "B": 0.9, "C": 0.1, "Aa": 0.5, "Cc": 0.1}
    played = play(ASHA(1, 2, window=1), setting(4, steps=2), value_by(losses, lines), trials=lines)
    assert played.requested == [(0, 1), (1, 1), (0, 2), (2, 1), (2, 2), (3, 1)]  # one of three: C
    assert played.ends == {0: "complete", 1: "pruned", 2: "complete", 3: "pruned"}


def test_asha_promotes_the_best_state_of_the_highest_rung_if_no_rung_is_large_enough():
    lines = Lines("Aaa", "Abb", "Bbb")
    losses = {"A": 0.1, "B": 0.2, "Aa": 0.4, "Ab": 0.3, "Abb": 0.0}
    played = play(ASHA(1, 2, window=4), setting(2, steps=3), value_by(losses, lines), trials=lines)
    assert played.requested == [(0, 1), (1, 1), (0, 2), (1, 2), (1, 3)]  # no rung of one state promotes
    assert played.ends == {0: "pruned", 1: "complete"}


@given(tree=trees(), rule=st.sampled_from([(1, 3), (2, 2)]), window=st.integers(1, 8), order=orders())
def test_the_stopping_variant_of_asha_ranks_the_state_of_a_trial_among_all_reported_states(tree, rule, window, order):
    played = play(
        ASHA(*rule, "stopping", window=window), setting(len(tree)), tree.value, order=order, trials=tree.trials
    )
    rungs: dict[int, dict[Hashable, tuple[float, int]]] = {}
    for index, step in played.reported:
        if step == STEPS:
            continue
        rung, state = rungs.setdefault(step, {}), tree.trials.prefix(index, step)
        rung.setdefault(state, (tree.value(index, step), index))
        better = sum(other < rung[state] for other in rung.values())
        goes_on = better < max(1, len(rung) // rule[1])
        assert goes_on == (played.reached()[index] > step)


def test_the_stopping_variant_of_asha_does_not_prune_copies_of_the_best_trial():
    lines = Lines("Aa", "Aa", "Bb", "Bb", "Cc", "Dd")
    losses = {"A": 0.5, "B": 0.9, "C": 0.2, "D": 0.4, "Aa": 0.0, "Cc": 0.0, "Dd": 0.0}

    def complete(algorithm: ASHA) -> list[int]:
        played = play(algorithm, setting(6, steps=2), value_by(losses, lines), trials=lines)
        return [index for index, end in sorted(played.ends.items()) if end == "complete"]

    assert complete(ASHA(1, 2, "stopping", window=1)) == [0, 1, 4, 5]  # D is second of C, D, A, B
    # D is second of six, but so are three; the copy of A was second of two.
    assert complete(ASHA(1, 2, "stopping", window=1, tree_aware=False)) == [0, 4, 5]


# --- median stopping --------------------------------------------------------------------------------------


@given(data=st.data())
def test_median_stopping_compares_a_trial_with_other_states_each_counted_once(data):
    tree = data.draw(trees())
    grace, interval = data.draw(st.integers(1, 8)), data.draw(st.integers(1, 4))
    least, window, maximize = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 8)), data.draw(st.booleans())
    algorithm = MedianStopping(interval, grace, least, window)
    played = play(
        algorithm,
        setting(len(tree), maximize=maximize),
        tree.value,
        failing=tree.failing(),
        trials=tree.trials,
    )
    averages: dict[int, dict[Hashable, float]] = {}
    for index, step in played.reported:
        if step == STEPS:
            continue
        state = tree.trials.prefix(index, step)
        losses = [
            -tree.value(index, at) if maximize else tree.value(index, at)
            for at in algorithm.evaluations(STEPS)
            if at <= step
        ]
        others = sorted(average for other, average in averages.setdefault(step, {}).items() if other != state)
        averages[step][state] = mean(losses)
        middle = others[(len(others) - 1) // 2 : len(others) // 2 + 1]
        stopped = len(others) >= least and min(losses) > mean(middle)
        assert stopped == all(target[0] != index or target[1] <= step for target in played.requested)


def test_median_stopping_counts_copies_of_a_state_once():
    lines = Lines("Aa", "Aa", "Aa", "Bb")
    losses = {"A": 1.0, "B": 2.0, "Aa": 1.0, "Bb": 2.0}

    def ends(algorithm: MedianStopping) -> str:
        return play(algorithm, setting(4, steps=2), value_by(losses, lines), trials=lines).ends[3]

    assert ends(MedianStopping(min_trials=2, window=1)) == "complete"  # one other is not enough
    assert ends(MedianStopping(min_trials=2, window=1, tree_aware=False)) == "pruned"


def test_median_stopping_does_not_compare_a_trial_with_its_own_state():
    lines = Lines("Aa", "Ba", "Ca", "Cb")
    losses = {"A": 1.0, "B": 4.0, "C": 3.0, "Aa": 1.0, "Ba": 4.0, "Ca": 3.0, "Cb": 3.0}

    def ends(algorithm: MedianStopping) -> str:
        return play(algorithm, setting(4, steps=2), value_by(losses, lines), trials=lines).ends[3]

    # Others of the second C: 1 and 4, whose median is 2.5. With the first C among them it would be 3, and equal.
    assert ends(MedianStopping(min_trials=2, window=1)) == "pruned"
    assert ends(MedianStopping(min_trials=2, window=1, tree_aware=False)) == "complete"
