"""How many chains of a search will be ready at a time, as far as its space tells before anything is trained."""

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


def lines_at_a_time(request: Request) -> list[tuple[int, int]] | None:
    """Return pairs of a number of steps and of the lines that are trained over them, from the first step to the last.

    They are those of trials that a copy of the study's sampler proposes, as many as the algorithm has open at a time,
    which are stopped as early as it stops trials of random values. ``None``: how many trials there will be is not
    known.
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
        changes[node.start] += 1
        changes[reach[node.id]] -= 1
    places = sorted(changes)
    alive = accumulate(changes[place] for place in places)
    return [(stop - start, lines) for (start, stop), lines in zip(pairwise(places), alive, strict=False)]


def _drawn(request: Request, n_trials: int) -> int:
    return min(n_trials, request.algorithm.start(request.setting, Trials()).room(), _MOST)


def _reached(request: Request, count: int) -> list[int]:
    """Return how far the algorithm trains each of so many trials if their values are random; forks are left out."""
    search = request.algorithm.start(request.setting, Trials())
    reached, random, asked = [0] * count, Random(0), deque[Ask]()
    for index in range(count):
        while search.room() < 1 and asked:
            asked.extend(_told(search, asked.popleft(), reached, random))
        if search.room() < 1:
            break  # it waits for a fork
        asked.extend(action for action in search.added(index) if isinstance(action, Ask))
    while asked:
        asked.extend(_told(search, asked.popleft(), reached, random))
    return reached


def _told(search: Search, ask: Ask, reached: list[int], random: Random) -> list[Ask]:
    """Tell a random value of a target; return the targets that the algorithm asks for then."""
    reached[ask.index] = max(reached[ask.index], ask.step)
    return [action for action in search.reported(ask.index, ask.step, random.random()) if isinstance(action, Ask)]


def steps_in_all(request: Request, lines: list[tuple[int, int]]) -> float:
    """Return the number of steps of these lines, and of as many for each further trial."""
    assert request.n_trials is not None, "else there are no lines"
    in_these = sum(length * alive for length, alive in lines)
    return in_these * request.n_trials / max(1, _drawn(request, request.n_trials))


def expected_share(times: StepTimes, lines: list[tuple[int, int]], workers: int) -> float:
    """Return the mean of a chain's share of a worker's seconds, relative to those it takes alone, if the lines of each
    step are shared out to all workers, which train as many side by side as pays."""
    steps = seconds = 0.0
    for length, alive in lines:
        width = max(1, min(times.best, alive // workers))
        steps += length * alive
        seconds += length * alive * times.share(width)
    return seconds / steps if steps else 1.0
