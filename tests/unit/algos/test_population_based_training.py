"""Population-based training against the paper's rules implemented again."""

from __future__ import annotations

import math
import random
import subprocess
import sys
from collections import Counter, deque
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

import optuna
import pytest
from hypothesis import given
from hypothesis import strategies as st
from optuna.distributions import BaseDistribution, FloatDistribution

from hpstage.algorithm import Action, Ask, Finish, Fork, Setting, Trials
from hpstage.algos import PopulationBasedTraining
from hpstage.errors import UsageError
from hpstage.testing.play import Played, Proposed, Value, play

optuna.logging.set_verbosity(optuna.logging.ERROR)


def setting(n_trials: int | None = 10, steps: int = 9, maximize: bool = False) -> Setting:
    return Setting(steps=steps, n_trials=n_trials, maximize=maximize, adaptive=False)


def values(seed: int, distinct: int = 5) -> Value:
    """Few values, so that they tie often, infinite ones among them."""
    table = [*(float(n) for n in range(distinct - 2)), math.inf, -math.inf]
    return lambda index, step: random.Random(f"{seed}/{index}/{step}").choice(table)


def generations_of_the_paper(
    played: Played, n: int, quantile: Decimal, rounds: list[int], maximize: bool, value: Value, failing: frozenset[Any]
) -> tuple[list[tuple[int, int]], dict[int, str]]:
    """The population's life with donors and parameters as they were drawn in ``played``, whose legality is checked.

    Each agent looks whether it is in the bottom quantile of all; if so, it takes the place of one in the top quantile.
    """
    share = math.ceil(n * quantile)
    k = share if 2 * share <= n else n // 2
    population = list(range(n))
    requests, ends = [], {}
    forks = iter(played.forks)
    for number, step in enumerate(rounds):
        requests += [(agent, step) for agent in population if agent not in ends]
        ends |= {agent: "failed" for agent in population if (agent, step) in failing and agent not in ends}
        alive = [agent for agent in population if agent not in ends]
        if not alive:
            break
        if number == len(rounds) - 1:
            ends |= dict.fromkeys(alive, "complete")
            break
        score = {agent: value(agent, step) * (1 if maximize else -1) for agent in alive}

        def better(agent: int, score: dict[int, float] = score) -> int:
            return sum(score[o] > score[agent] or (score[o] == score[agent] and o < agent) for o in score)

        top = [agent for agent in alive if better(agent) < k]
        following = []
        for agent in population:
            if agent in alive and better(agent) < n - k:
                following.append(agent)
                continue
            if agent in alive:
                ends[agent] = "pruned"
            index, fork = next(forks)
            assert fork.donor in top and fork.step == step
            assert set(fork.params) == set(played.params[fork.donor])
            following.append(index)
        population = following
    assert next(forks, None) is None
    return requests, ends


@given(data=st.data())
def test_each_round_replaces_the_worst_trials_by_forks_of_the_best_as_the_paper_says(data):
    n, interval = data.draw(st.integers(2, 24)), data.draw(st.integers(1, 8))
    quantile = data.draw(st.sampled_from(["0.01", "0.07", "0.2", "0.25", "0.3", "0.5"]))
    maximize, seed = data.draw(st.booleans()), data.draw(st.integers(0, 99))
    value = values(seed, data.draw(st.sampled_from([3, 60])))
    targets = st.tuples(st.integers(0, 60), st.integers(1, 9))
    failing = data.draw(st.frozensets(targets, max_size=60))
    algorithm = PopulationBasedTraining(interval, quantile=float(quantile), seed=seed)
    rounds = [step for step in range(1, 9) if step % interval == 0] + [9]
    assert algorithm.rounds(9) == rounds
    played = play(algorithm, setting(n, maximize=maximize), value, failing=failing)
    requests, ends = generations_of_the_paper(played, n, Decimal(quantile), rounds, maximize, value, failing=failing)
    assert (played.requested, played.ends) == (requests, ends)


@pytest.mark.parametrize(
    ("n", "quantile", "replaced"),
    [(2, 0.2, 1), (3, 0.5, 1), (10, 0.2, 2), (11, 0.2, 3), (10, 0.25, 3), (100, 0.07, 7), (4, 0.5, 2)],
)
def test_the_quantile_decides_how_many_trials_are_replaced_in_a_round(n, quantile, replaced):
    played = play(PopulationBasedTraining(3, quantile=quantile), setting(n, steps=6), lambda index, step: index)
    assert len(played.forks) == replaced
    assert {index for index, end in played.ends.items() if end == "pruned"} == set(range(n - replaced, n))
    assert {fork.donor for _, fork in played.forks} <= set(range(replaced))


def test_trials_with_equal_values_are_ranked_by_their_number():
    played = play(PopulationBasedTraining(3), setting(5, steps=6), lambda index, step: 1.0)
    assert [index for index, end in played.ends.items() if end == "pruned"] == [4]
    assert [fork.donor for _, fork in played.forks] == [0]


def test_a_fork_takes_the_position_of_the_trial_that_it_replaces():
    order = [4, 0, 3, 1, 2]  # of the first round: trial 1 is the best, trial 0 the worst
    played = play(PopulationBasedTraining(3), setting(5), lambda index, step: order[index] if step == 3 else index)
    assert played.requested == [
        *[(0, 3), (1, 3), (2, 3), (3, 3), (4, 3)],
        *[(5, 6), (1, 6), (2, 6), (3, 6), (4, 6)],
        *[(6, 9), (1, 9), (2, 9), (3, 9), (4, 9)],  # trial 5, the worst at step 6, gives its place on
    ]
    assert [(index, fork.donor, fork.step) for index, fork in played.forks] == [(5, 1, 3), (6, 1, 6)]


def test_a_failed_trial_is_replaced_before_the_worst_trial():
    failing = frozenset({(1, 3)})
    played = play(PopulationBasedTraining(3), setting(5), lambda index, step: index, failing=failing)
    assert played.ends == {1: "failed", 5: "pruned"} | dict.fromkeys((0, 2, 3, 4, 6), "complete")
    assert [(index, fork.donor, fork.step) for index, fork in played.forks] == [(5, 0, 3), (6, 0, 6)]


def test_all_failed_trials_are_replaced_even_if_they_exceed_the_quantile():
    failing = frozenset({(1, 3), (2, 3), (4, 3)})
    played = play(PopulationBasedTraining(3), setting(5), lambda index, step: index, failing=failing)
    assert [(fork.donor, fork.step) for _, fork in played.forks] == [(0, 3), (0, 3), (0, 3), (0, 6)]
    assert sum(end == "complete" for end in played.ends.values()) == 5


def test_the_search_ends_when_all_trials_of_the_population_have_failed():
    everything = frozenset((index, 6) for index in range(20))
    played = play(PopulationBasedTraining(3), setting(5), lambda index, step: index, failing=everything)
    assert [step for _, step in played.requested] == [3] * 5 + [6] * 5
    assert Counter(played.ends.values()) == {"failed": 5, "pruned": 1}


@pytest.mark.parametrize("most", [0, 1, 2, 7])
def test_a_study_stopped_early_completes_a_population_of_the_trials_proposed_so_far(most):
    played = play(PopulationBasedTraining(3), setting(10), lambda index, step: index, most=most)
    assert sum(end == "complete" for end in played.ends.values()) == most
    assert len(played.forks) == {0: 0, 1: 0, 2: 2, 7: 4}[most]


def test_a_round_waits_for_the_whole_population_to_be_proposed():
    """The port does not say that all are proposed before the first reports."""
    trials = Proposed()
    search = PopulationBasedTraining(3).start(setting(3), trials)
    for index in range(2):
        trials.values[index] = {}
        assert search.added(index) == [Ask(index, 3)]
        assert search.reported(index, 3, float(index)) == []
    assert (search.room(), search.added(2)) == (1, [Ask(2, 3)])
    assert search.reported(2, 3, 2.0) == [Ask(0, 6), Ask(1, 6), Finish(2, "pruned"), Fork(0, 3, {})]


def test_forks_depend_on_the_seed_and_the_ranks_of_trials_but_not_on_their_values():
    def forks(seed: int, last: float, failing: frozenset[tuple[int, int]] = frozenset()) -> list[Fork]:
        played = play(
            PopulationBasedTraining(4, 0.5, seed=seed),
            setting(10, steps=8),
            lambda index, step: last if index == 9 else index,
            failing=failing,
        )
        return [fork for _, fork in played.forks]

    assert forks(0, 9.0) == forks(0, 900.0) == forks(0, 0.0, failing=frozenset({(9, 4)}))
    assert forks(0, 9.0) != forks(1, 9.0)
    assert len({repr(fork) for fork in forks(0, 9.0)}) == 5


@pytest.mark.ci
def test_donors_of_forks_are_drawn_uniformly_from_the_best_trials():
    seen: Counter[int] = Counter()
    for seed in range(400):
        played = play(PopulationBasedTraining(4, 0.5, seed=seed), setting(10, steps=8), lambda index, step: index)
        seen.update(fork.donor for _, fork in played.forks)
    assert set(seen) == set(range(5))
    expected = 400 * 5 / 5
    assert sum((count - expected) ** 2 / expected for count in seen.values()) < 18.5  # chi-square, 4 degrees, 0.1 %


def test_parameters_of_a_fork_are_those_of_its_donor_times_a_perturbation_factor():
    played = play(
        PopulationBasedTraining(1, 0.5, resample_probability=0.0), setting(20, steps=6), lambda index, step: index
    )
    for index, fork in played.forks:
        donor = played.params[fork.donor]
        assert played.params[index] == fork.params
        assert fork.params["lr"] in (donor["lr"] * 0.8, donor["lr"] * 1.2)
        assert fork.params["batch"] in (round(donor["batch"] * 0.8), round(donor["batch"] * 1.2))


# --- the paper's toy ----------------------------------------------------------------------------------------


class Quadratic(Trials):
    """Section 3 and figure 2: maximise 1.2 - |theta|**2, while training sees only 1.2 - h * theta**2."""

    START = (0.9, 0.9)

    def __init__(self) -> None:
        self.study = optuna.create_study()
        self.trials: list[optuna.Trial] = []
        self.lines: list[list[tuple[int, Mapping[str, float]]]] = []  # per trial: from which step on, which h

    def add(self, params: Mapping[str, float], line: list[tuple[int, Mapping[str, float]]], step: int) -> None:
        self.study.enqueue_trial(dict(params))
        self.trials.append(self.study.ask({"h0": FloatDistribution(0.0, 1.0), "h1": FloatDistribution(0.0, 1.0)}))
        self.lines.append([*line, (step, self.trials[-1].params)])

    def params(self, index: int) -> Mapping[str, tuple[Any, BaseDistribution]]:
        trial = self.trials[index]
        return {name: (value, trial.distributions[name]) for name, value in trial.params.items()}


def trained(theta: tuple[float, float], h: Mapping[str, float], steps: int) -> tuple[float, float]:
    for _ in range(steps):
        theta = (theta[0] * (1 - 0.02 * h["h0"]), theta[1] * (1 - 0.02 * h["h1"]))
    return theta


def true_score(theta: tuple[float, float]) -> float:
    return 1.2 - theta[0] ** 2 - theta[1] ** 2


@pytest.mark.parametrize("seed", range(5))
def test_population_based_training_solves_the_papers_toy_and_its_winner_can_be_trained_again(seed):
    steps, trials = 400, Quadratic()
    search = PopulationBasedTraining(10, 0.5, seed=seed).start(setting(2, steps=steps, maximize=True), trials)
    thetas: dict[int, tuple[float, float]] = {}
    reached: dict[int, int] = {}
    requests: deque[tuple[int, int]] = deque()
    complete = []

    def perform(actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Ask():
                    requests.append((action.index, action.step))
                case Finish(index, "complete"):
                    complete.append(index)
                case Fork(donor, step, params):
                    index = len(trials.trials)
                    trials.add(params, trials.lines[donor], step)
                    thetas[index], reached[index] = thetas[donor], step
                    perform(search.forked(index, action))

    for index, h in enumerate([{"h0": 1.0, "h1": 0.0}, {"h0": 0.0, "h1": 1.0}]):
        trials.add(h, [], 0)
        thetas[index], reached[index] = Quadratic.START, 0
        perform(search.added(index))
    while requests:
        index, step = requests.popleft()
        thetas[index] = trained(thetas[index], trials.trials[index].params, step - reached[index])
        reached[index] = step
        perform(search.reported(index, step, true_score(thetas[index])))

    alone = [true_score(trained(Quadratic.START, trials.lines[index][0][1], steps)) for index in (0, 1)]
    assert max(alone) < 1.2 - 0.8  # each forgets one of the two
    winner = max(complete, key=lambda index: true_score(thetas[index]))
    assert true_score(thetas[winner]) > 1.15
    # Trained again, from its schedule alone.
    theta = Quadratic.START
    line = trials.lines[winner]
    assert len(line) > 2
    for (start, h), stop in zip(line, [start for start, _ in line[1:]] + [steps], strict=True):
        theta = trained(theta, h, stop - start)
    assert theta == thetas[winner]


# --- use ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("algorithm", "about", "message"),
    [
        (PopulationBasedTraining(0), setting(), "interval is 0; give a whole number of at least 1"),
        (PopulationBasedTraining(2.5), setting(), "interval is 2.5"),
        (PopulationBasedTraining(9), setting(), "interval is 9, but a trial has only 9 steps.*Lower interval"),
        (PopulationBasedTraining(1, seed=-1), setting(), "seed is -1"),
        (PopulationBasedTraining(1, 0), setting(), "quantile is 0; give a number above 0"),
        (PopulationBasedTraining(1, 0.6), setting(), "quantile is 0.6"),
        (PopulationBasedTraining(1, math.nan), setting(), "quantile is nan"),
        (PopulationBasedTraining(1, "0.2"), setting(), "quantile is '0.2'"),
        (
            PopulationBasedTraining(1, perturbation_factors=()),
            setting(),
            r"perturbation_factors is \(\); give positive",
        ),
        (PopulationBasedTraining(1, perturbation_factors=(0.8, 0)), setting(), r"perturbation_factors is \(0.8, 0\)"),
        (PopulationBasedTraining(1, perturbation_factors=(math.inf,)), setting(), "perturbation_factors is"),
        (PopulationBasedTraining(1, perturbation_factors=1.2), setting(), "perturbation_factors is 1.2"),
        (
            PopulationBasedTraining(1, resample_probability=1.1),
            setting(),
            "resample_probability is 1.1; give a number that is at most 1",
        ),
        (PopulationBasedTraining(1, resample_probability=None), setting(), "resample_probability is None"),
        (PopulationBasedTraining(1), setting(None), "n_trials is None; .* needs 2 or more"),
        (PopulationBasedTraining(1), setting(1), "n_trials is 1; .* needs 2 or more"),
    ],
    ids=repr,
)
def test_invalid_parameters_of_population_based_training_are_refused_with_a_remedy(algorithm, about, message):
    with pytest.raises(UsageError, match=message):
        algorithm.check(about)


def test_importing_hpstage_algos_loads_neither_optuna_nor_numpy():
    code = "import sys, hpstage.algos; sys.exit('optuna' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=300, check=False).returncode == 0
