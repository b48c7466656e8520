"""Estimates how many chains of a search will be ready at a time, from its space, before anything is trained."""

from __future__ import annotations

from collections import Counter, deque
from itertools import accumulate, pairwise
from random import Random

from hpstage.algorithm import Ask, Search, Trials
from hpstage.plan.facts import StateKey, TrialAdded, TrialId
from hpstage.plan.plan import SearchPlan
from hpstage.plan.step_times import StepTimes
from hpstage.search.dry_run import drawn
from hpstage.search.request import Request

_MOST = 256
"""Trials that are drawn; with more, chains are ready for more workers."""


def branches_at_a_time(request: Request) -> list[tuple[int, int]] | None:
    """Return pairs of a number of steps and the number of branches trained over them, from the first step to the last.

    The branches are those of trials that a copy of the study's sampler proposes, as many as the algorithm has open at a
    time. They are stopped as early as the algorithm stops trials with random values. ``None``: the number of trials is
    not known.
    """
    if request.n_trials is None:
        return None
    plan = SearchPlan(StateKey("0" * 32), sharing=request.sharing)
    reach: Counter[int] = Counter()
    count = _drawn(request, request.n_trials)
    for number, (described, last) in enumerate(zip(drawn(request, count), _reached(request, count), strict=False)):
        trial = TrialId(f"drawn/{number}")
        plan.apply(TrialAdded(trial, described.schedules, described.steps))
        for node, _, stop in plan.trials[trial].path_to(min(described.steps, last or described.steps)):
            reach[node.id] = max(reach[node.id], stop)
    changes: Counter[int] = Counter()
    for node in plan.nodes:
        if node.id in reach:  # otherwise its trials are stopped before it
            changes[node.start] += 1
            changes[reach[node.id]] -= 1
    places = sorted(changes)
    alive = accumulate(changes[place] for place in places)
    return [(stop - start, branches) for (start, stop), branches in zip(pairwise(places), alive, strict=False)]


def _drawn(request: Request, n_trials: int) -> int:
    return min(n_trials, request.algorithm.start(request.setting, Trials()).room(), _MOST)


def _reached(request: Request, count: int) -> list[int]:
    """Return the last step to which the algorithm trains each of ``count`` trials with random values, without forks."""
    search = request.algorithm.start(request.setting, Trials())
    reached, random, requested = [0] * count, Random(0), deque[Ask]()
    for index in range(count):
        while search.room() < 1 and requested:
            requested.extend(_report(search, requested.popleft(), reached, random))
        if search.room() < 1:
            break  # it waits for a fork
        requested.extend(action for action in search.added(index) if isinstance(action, Ask))
    while requested:
        requested.extend(_report(search, requested.popleft(), reached, random))
    return reached


def _report(search: Search, ask: Ask, reached: list[int], random: Random) -> list[Ask]:
    """Report a random value for a target; return the targets that the algorithm requests in response."""
    reached[ask.index] = max(reached[ask.index], ask.step)
    return [action for action in search.reported(ask.index, ask.step, random.random()) if isinstance(action, Ask)]


def steps_in_all(request: Request, branches: list[tuple[int, int]]) -> float:
    """Return the number of steps of these branches, scaled up to all trials."""
    assert request.n_trials is not None, "else there are no branches"
    in_these = sum(length * alive for length, alive in branches)
    return in_these * request.n_trials / max(1, _drawn(request, request.n_trials))


def expected_share(times: StepTimes, branches: list[tuple[int, int]], workers: int) -> float:
    """Return a chain's mean share of a worker's seconds, relative to a chain that has a worker to itself. The branches
    of each step are spread over all workers, each of which trains as many side by side as pays."""
    steps = seconds = 0.0
    for length, alive in branches:
        width = max(1, min(times.best, alive // workers))
        steps += length * alive
        seconds += length * alive * times.share(width)
    return seconds / steps if steps else 1.0
