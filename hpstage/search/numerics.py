"""Choosing the step backend of a search, where the trainable says ``numerics = "auto"``.

How many chains will be ready at a time is estimated from the space, before anything is trained.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Mapping
from itertools import accumulate, pairwise
from random import Random

import optuna

from hpstage.algorithm import Ask, Search, Trials
from hpstage.driver.places import header_in, made_with
from hpstage.executor import Executor
from hpstage.optuna.stand_in import described_trials, quiet_optuna
from hpstage.plan.facts import StateKey, TrialAdded, TrialId
from hpstage.plan.keys import workload_key
from hpstage.plan.plan import SearchPlan
from hpstage.plan.same_workload import NUMERICS
from hpstage.plan.step_times import UNTRIED, StepTimes, among
from hpstage.schedule import Scalar
from hpstage.search.dry_run import drawn
from hpstage.search.request import Request
from hpstage.training.identity.environment import candidates as candidates_of
from hpstage.training.randomness import generators_restored

logger = logging.getLogger("hpstage")

_GAIN = 0.95
"""A backend is preferred to eager if it takes at most this share of eager's time: smaller gains are within the error of
the measurement."""
_SHARE = 0.25
"""Share of the steps of all trials that one worker is assumed to train if nothing better is known: trials share steps,
and workers share trials."""


def choose(described: Mapping[str, str], executor: Executor, request: Request) -> tuple[str, dict[str, str]]:
    """Return the name of the step backend to use, and the description of the workload trained by it.

    If the store has a plan, its backend is used. Otherwise, the backends are measured on workers.

    Args:
        described: the workload, with all backends that can be chosen.

    Raises:
        TrainingError, UsageError: training fails at its first steps; the trainable's own errors are raised, too.
    """
    candidates = candidates_of(described)
    workloads = {backend: workload_key(fixed) for backend, fixed in candidates.items()}
    store, name = request.store, request.name
    chosen = made_with(store, name, workloads) or _of_another(request, candidates, workloads)
    if chosen is None:
        logger.warning("numerics = 'auto': a worker tries out every step backend, once per plan; this may take minutes")
        branches = branches_at_a_time(request)
        steps = _steps_of_a_worker(branches, executor, request)
        found = dict(executor.measure(_initial(request), steps) or {})
        times = among(found)
        for backend in sorted(times.keys() & candidates.keys()):
            found[backend] = _among_others(times[backend].foreseen(executor.slots), branches, executor)
        chosen = fastest(found, steps)
        _log_choice(chosen, found, steps)
        # Another process may have measured at the same time.
        chosen = made_with(store, name, workloads) or chosen
    return chosen, candidates[chosen]


def slots_by(numerics: str, executor: Executor) -> int:
    """Return the maximum number of chains that a worker trains side by side.

    Args:
        numerics: the step backend that the search has chosen; ``""``: the trainable's own choice.

    Raises:
        UsageError: the backend is of a plugin that is not installed here.
    """
    if numerics:
        from hpstage.torch.backends.lookup import backend_named  # heavy: torch

        if not backend_named(numerics).several:
            return 1
    return executor.slots


def _of_another(
    request: Request, candidates: Mapping[str, Mapping[str, str]], workloads: Mapping[str, StateKey]
) -> str | None:
    """Return a backend without measuring any if the store has a plan of another workload, since the store will be
    refused then. Return ``None`` if it has no plan."""
    header = header_in(request.store, request.name, next(iter(workloads.values())))
    if header is None:
        return None
    numerics = header.described.get(NUMERICS)
    return next((name for name, text in candidates.items() if text.get(NUMERICS) == numerics), next(iter(candidates)))


def _steps_of_a_worker(branches: list[tuple[int, int]] | None, executor: Executor, request: Request) -> float:
    """Return how many steps one worker is assumed to train, over which its start-up time is spread."""
    roughly = request.steps * max(1.0, _SHARE * (request.n_trials or 1))
    if branches is None or executor.present is None:
        return roughly
    return steps_in_all(request, branches) / max(1, executor.present)


def _among_others(times: StepTimes, branches: list[tuple[int, int]] | None, executor: Executor) -> float:
    """Return a worker's seconds for a step of a chain that is trained together with as many others as are expected to
    be ready, or by itself if that number is not known."""
    if branches is None or executor.present is None:
        return times.of(1)
    return times.of(1) * expected_share(times, branches, max(1, executor.present))


def _initial(request: Request) -> dict[str, Scalar]:
    """Return the values at step 0 of a trial of the space."""
    with quiet_optuna(), generators_restored():
        study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
        ((_, described),) = described_trials(study, request.space, request.steps, 1, catch=request.catch)
    return {name: schedule.value(0) for name, schedule in described.schedules.items()}


def fastest(found: Mapping[str, float], steps: float) -> str:
    """Return the step backend that takes the least time for ``steps`` steps.

    Args:
        found: as :meth:`hpstage.executor.Executor.measure` returns it; may be empty.
    """
    taken = {name: found[name] + found[f"{name} begins"] / steps for name in found if f"{name} begins" in found}
    best = min(taken, key=lambda name: taken[name], default="eager")
    return best if taken.get(best, 0.0) <= _GAIN * taken.get("eager", float("inf")) else "eager"


def _log_choice(chosen: str, found: Mapping[str, float], steps: float) -> None:
    measured = [
        f"{name} {1000 * found[name]:.3g} ms a step, and {found[f'{name} begins']:.1f} s to begin"
        for name in sorted(found)
        if f"{name} begins" in found
    ]
    measured += [
        f"{name.removesuffix(UNTRIED)} not tried, since those steps take no longer than {found[name]:.1f} s eagerly"
        for name in sorted(found)
        if name.endswith(UNTRIED)
    ]
    why = "since no worker could measure"
    if measured:
        why = f"measured: {'; '.join(measured)}; each worker is taken to train {steps:,.0f} steps"
    logger.warning("numerics = 'auto': this plan is trained by %r (%s)", chosen, why)


_MOST = 256
"""Upper bound on the number of trials that are drawn. With more trials, chains would be ready for more workers."""


def branches_at_a_time(request: Request) -> list[tuple[int, int]] | None:
    """Return how many branches are trained over which steps, as pairs of a number of steps and a number of branches,
    from the first step to the last. Return ``None`` if the number of trials is not known.

    The branches are those of as many trials as the algorithm has open at a time, proposed by a copy of the study's
    sampler. They stop where the algorithm stops trials with random values.
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
