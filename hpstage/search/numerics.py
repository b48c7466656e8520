"""Choosing the step backend of a search, where the trainable says ``numerics = "auto"``."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import optuna

from hpstage.driver.places import header_in, made_with
from hpstage.executor import Executor
from hpstage.optuna.quiet import quiet_optuna
from hpstage.optuna.stand_in import described_trials
from hpstage.plan.facts import StateKey
from hpstage.plan.keys import workload_key
from hpstage.plan.same_workload import NUMERICS
from hpstage.plan.step_times import UNTRIED, StepTimes, among
from hpstage.schedule import Scalar
from hpstage.search.expected import branches_at_a_time, expected_share, steps_in_all
from hpstage.search.request import Request
from hpstage.training.identity.environment import candidates as candidates_of
from hpstage.training.randomness import generators_restored

logger = logging.getLogger("hpstage")

_GAIN = 0.95
"""Another backend than eager is chosen if it takes at most this share of the time: less is within what is measured."""
_SHARE = 0.25
"""Share of the steps of all trials that one worker is taken to train at most: trials share steps, and workers share
trials."""


def choose(described: Mapping[str, str], executor: Executor, request: Request) -> tuple[str, dict[str, str]]:
    """Return the name of a step backend, and the description of the workload trained by it.

    The one that the store's plan was made with wins; otherwise they are measured on a worker.

    Args:
        described: the workload, with all that can be chosen.

    Raises:
        TrainingError, UsageError: training fails at its first steps; the trainable's own errors are raised, too.
    """
    candidates = candidates_of(described)
    workloads = {backend: workload_key(fixed) for backend, fixed in candidates.items()}
    store, name = request.store, request.name
    chosen = made_with(store, name, workloads) or _of_another(request, candidates, workloads)
    if chosen is None:
        logger.warning(
            "numerics = 'auto': a worker tries out every step backend, once for a plan; this may take minutes"
        )
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
    """Return the most chains that a worker trains side by side.

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
    """Return the backend of a plan of another workload, with which the store will be refused: nothing need be measured
    for that. ``None`` if there is no plan."""
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
    be ready; with none, if that is not known."""
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
    """Return the step backend that takes the least time for so many steps.

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
