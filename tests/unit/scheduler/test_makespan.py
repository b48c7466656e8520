"""The critical-path scheduler against the best schedule that an exhaustive search finds, on small random trees."""

from __future__ import annotations

import random
import statistics
from functools import cache

import pytest

from hpstage import schedule as s
from hpstage.accounting.bound import Work, lower_bound
from hpstage.execution.simulated import SimulatedExecutor
from hpstage.plan.facts import StateReached
from hpstage.plan.log import read_facts
from tests.unit.searches import Search, trial

Tree = list[tuple[int, int]]  # (parent or -1, steps) of each stage; parents come first


def random_tree(rng: random.Random, stages: int) -> Tree:
    tree: Tree = [(-1, rng.randint(1, 9))]
    for index in range(1, stages):
        tree.append((rng.randrange(-1, index), rng.randint(1, 9)))
    return tree


def optimum(tree: Tree, workers: int) -> int:
    """Shortest makespan of a schedule without preemption; leaving a worker idle on purpose is tried too."""
    children: dict[int, list[int]] = {}
    for index, (parent, _) in enumerate(tree):
        children.setdefault(parent, []).append(index)

    @cache
    def rest(ready: tuple[int, ...], running: tuple[tuple[int, int], ...]) -> int:
        """Makespan from now, with ``running`` as (seconds left, stage)."""
        best = 10**9
        if len(running) < workers:
            for stage in ready:
                left = tuple(other for other in ready if other != stage)
                best = min(best, rest(left, tuple(sorted((*running, (tree[stage][1], stage))))))
        if running:
            step = running[0][0]
            done = [stage for left, stage in running if left == step]
            onward = tuple((left - step, stage) for left, stage in running if left > step)
            opened = [child for stage in done for child in children.get(stage, [])]
            best = min(best, step + rest(tuple(sorted((*ready, *opened))), onward))
        return 0 if not running and not ready else best

    return rest(tuple(children[-1]), ())


def as_trials(tree: Tree):
    """One trial per leaf; on its way through the tree it takes each stage's number as its value."""
    parents = {parent for parent, _ in tree}
    trials, stops = [], []
    for leaf in range(len(tree)):
        if leaf in parents:
            continue
        branch = []
        at = leaf
        while at >= 0:
            branch.append(at)
            at = tree[at][0]
        pieces, step = {}, 0
        for stage in reversed(branch):
            pieces[step] = stage
            step += tree[stage][1]
        trials.append(trial(leaf, {"stage": s.piecewise(pieces)}, step))
        stops.append(step)
    return trials, stops


def makespan(tree: Tree, workers: int, **costs: float) -> float:
    executor = SimulatedExecutor(workers, **costs)
    search = Search(executor)
    trials, stops = as_trials(tree)
    search.run(trials, stops, validate=False)
    assert search.plan.totals.steps_trained == sum(steps for _, steps in tree)
    return executor.clock()


def bound(tree: Tree, workers: int) -> float:
    """No schedule is shorter, cut or not."""
    begins: list[int] = []
    for parent, _ in tree:
        begins.append(0 if parent < 0 else begins[parent] + tree[parent][1])
    return lower_bound(
        [Work(float(begin), steps, steps) for begin, (_, steps) in zip(begins, tree, strict=True)], workers
    )


def ratios(workers: int, count: int, seed: int) -> list[tuple[float, float]]:
    """Makespans over the stage-wise optimum, and over the bound."""
    rng = random.Random(seed)
    found = []
    for _ in range(count):
        tree = random_tree(rng, rng.randint(2, 7))
        took = makespan(tree, workers)
        found.append((took / optimum(tree, workers), took / bound(tree, workers)))
    return found


@pytest.mark.ci
def test_the_makespan_is_at_most_a_third_over_the_optimum_and_optimal_in_the_median():
    """The optimum trains each stage in one go; ours may cut one, and is then sometimes faster."""
    for workers in (2, 3):
        found = ratios(workers, 400, seed=workers)
        assert min(over_bound for _, over_bound in found) >= 1.0 - 1e-9
        assert max(over for over, _ in found) <= 4 / 3 + 1e-9
        assert statistics.median(over for over, _ in found) <= 1.0 + 1e-9
        assert statistics.median(over_bound for _, over_bound in found) <= 1.05


def measured(executor: SimulatedExecutor) -> Search:
    """A search that knows what a step and a save take."""
    search = Search(executor)
    search.run([trial(99, {"a": s.constant(99)}, 1)], [1])
    return search


def test_equal_chains_are_cut_so_that_all_workers_end_together():
    """What does not divide is shared out: 3 chains on 2 workers take 1.5 of their length, not 2."""
    for chains, workers in ((3, 2), (5, 2), (5, 3), (7, 4)):
        executor = SimulatedExecutor(workers, step_seconds=0.5, load_seconds=0.01, save_seconds=0.01)
        search = measured(executor)
        began = executor.clock()
        search.run([trial(i, {"a": s.constant(i)}, 60) for i in range(chains)], [60] * chains)
        assert executor.clock() - began <= 1.01 * 30 * chains / workers
        assert search.plan.totals.steps_trained == 1 + 60 * chains
        assert search.plan.totals.saves <= 1 + chains + 2 * workers


def test_no_chain_is_cut_if_switching_costs_more_than_it_saves():
    search = measured(SimulatedExecutor(2, load_seconds=10.0, save_seconds=10.0))
    search.run([trial(i, {"a": s.constant(i)}, 60) for i in range(3)], [60] * 3)
    assert search.plan.totals.saves == 1 + 3


def test_waiting_chains_rarely_replace_running_chains_and_all_workers_end_together():
    """Equal trials on two workers, which keep a state every 20 of 600 steps: to take turns would cost a load each time.
    The last ones do, so that both workers end together."""
    executor = SimulatedExecutor(2, load_seconds=1.0, save_seconds=1.0)
    search = Search(executor, checkpoint_every=20)
    search.run([trial(i, {"a": s.constant(i)}, 600) for i in range(13)], [600] * 13)
    totals = search.plan.totals
    assert totals.steps_trained == 13 * 600
    assert executor.clock() <= 1.01 * (totals.train_seconds + totals.save_seconds) / 2
    assert totals.loads <= 60  # of 390 states that are kept


def test_a_single_worker_is_never_idle():
    rng = random.Random(5)
    for _ in range(50):
        tree = random_tree(rng, 6)
        assert makespan(tree, 1) == sum(steps for _, steps in tree)


def test_the_makespan_is_the_critical_path_if_there_are_enough_workers():
    rng = random.Random(6)
    for _ in range(50):
        tree = random_tree(rng, 7)
        longest = max(stop for _, stop in zip(*as_trials(tree), strict=True))
        assert makespan(tree, 7) == longest


def test_the_load_time_of_a_chain_counts_in_full_if_the_chain_is_amended_while_loading():
    """While a fork is loaded, a trial arrives that puts a boundary on its way."""
    executor = SimulatedExecutor(1, load_seconds=5.0)
    search = Search(executor)
    search.run([trial(0, {"a": s.piecewise({0: 1, 4: 2})}, 6), trial(9, {"a": s.constant(7)}, 1)], [6, 1])
    began = executor.clock()
    search.driver.add([trial(1, {"a": s.piecewise({0: 1, 4: 3})}, 10)])
    search.driver.ask(trial(1, {}, 1).trial, 10)
    executor.cluster.join(1.0)  # something that happens while the chain loads
    assert search.driver.wait() == [] and executor.clock() == began + 1.0
    search.driver.add([trial(2, {"a": s.piecewise({0: 1, 4: 3, 7: 4})}, 10)])
    search.driver.ask(trial(2, {}, 1).trial, 10)
    search.answers(2)
    first = next(fact for fact in facts(search) if fact.node == 3 and fact.step == 7)
    assert first.at == began + 5.0 + 3


def facts(search: Search) -> list[StateReached]:
    return [fact for fact in read_facts(search.journal) if isinstance(fact, StateReached)]
