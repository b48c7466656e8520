"""preflight: estimate steps, cost and checkpoints of a search before anything is trained.

The search is rehearsed with the real sampler, algorithm, driver and scheduler, on workers with a virtual clock. Metrics
are random, unless an earlier plan has measured them. If the search depends on metrics (its algorithm stops trials
early, or its sampler learns), it is rehearsed several times with different metrics, and its figures are ranges.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import cast

import optuna

from hpstage.algorithm import Algorithm
from hpstage.algos import FullTraining
from hpstage.errors import UsageError
from hpstage.errors.arguments import (
    CATCH,
    SEED,
    SPACE,
    checked,
    either,
    function,
    in_tuple,
    instance,
    number,
    optional,
    seconds,
    several,
    text,
    whole,
)
from hpstage.errors.text import aligned, count_of, duration, folded, rate, size, table, worker_hours
from hpstage.execution.simulated_cluster import Disruptions
from hpstage.optuna.ledger import samplers
from hpstage.optuna.stand_in import quiet_optuna
from hpstage.plan.step_times import StepTimes
from hpstage.rehearsal.costs import Costs, StepSeconds
from hpstage.rehearsal.rehearse import FleetCost, Rehearsal, Rehearsed, cheapest
from hpstage.rehearsal.samplers import SamplerName, named_sampler
from hpstage.rehearsal.stand_in_metrics import Precedent
from hpstage.schedule import Scalar
from hpstage.schedule.space import Space, longest, points_of
from hpstage.search.request import ALGORITHM, BLIND

# Samplers that stop once they have proposed everything.
_ENDING = (optuna.samplers.GridSampler, optuna.samplers.BruteForceSampler)
_count = "{:,.0f}".format


@dataclass(frozen=True, slots=True)
class Spread:
    """The spread of a figure over all rehearsals."""

    median: float
    low: float
    high: float

    def text(self, style: Callable[[float], str]) -> str:
        # Sums of the same terms in another order differ in their last bits, which could decide a printed digit.
        median, low, high = (style(round(value, 9)) for value in (self.median, self.low, self.high))
        return median if low == high else f"{median} ({low} to {high})"


@dataclass(frozen=True, slots=True)
class Fleet:
    """The search on a given number of workers. Seconds are wall-clock time, except ``worker_seconds``."""

    workers: int
    makespan: Spread
    lower_bound: Spread
    """Lower bound on any schedule of the same work on such workers (:mod:`hpstage.accounting.bound`)."""
    alone_bound: Spread
    """Lower bound without sharing: on any schedule that trains every step of each trial."""
    worker_seconds: Spread


@dataclass(frozen=True, slots=True)
class Preflight:
    """Estimated cost of a search. Times are in seconds if ``timed``, else in steps."""

    algorithm: str
    sampler: str
    exact: bool
    """Whether no decision depends on metrics, so that all figures counted in steps are exact."""
    rehearsals: int
    """Number of rehearsals with different metrics, over which the ranges are taken."""
    measured: Spread
    """Number of evaluations whose metrics were measured on an earlier plan."""
    drawn: Spread
    """Number of evaluations whose metrics were drawn at random."""
    timed: bool
    trials: Spread
    steps_asked: Spread
    """Sum of the steps that the algorithm requests of each trial."""
    steps_unique: Spread
    """Unique steps among them."""
    steps_trained: Spread
    merge_rate: Spread
    cost_weighted_merge_rate: Spread
    worker_seconds_alone: Spread
    worker_seconds: Spread
    saved_seconds: Spread
    fused_seconds: Spread
    """Part of ``saved_seconds``: seconds saved by training siblings as one."""
    checkpoints: Spread
    """Total number of checkpoints kept."""
    checkpoints_needed: Spread
    """Maximum number of checkpoints that are needed or being written at the same time: the minimum under any
    ``checkpoint_budget``."""
    checkpoint_bytes: int
    """Size of each checkpoint; 0 if it was not given."""
    shared_bytes: int
    """Bytes of the parts that checkpoints share; each part is stored once."""
    fleets: tuple[Fleet, ...]
    gpu_price: float | None
    """Price per worker-hour."""
    deadline: float | None
    """Maximum makespan in seconds."""
    fixed: FleetCost | None
    """The smallest fleet with a fixed number of workers that meets the deadline in every rehearsal."""
    elastic: FleetCost | None
    """The smallest fleet that meets the deadline in every rehearsal and whose number of workers follows the demand, up
    to its ``workers``."""

    def as_dict(self) -> dict[str, object]:
        """Return all figures, for JSON."""
        return asdict(self)

    def as_text(self, width: int | None = None) -> str:
        """Return the figures as a terminal of ``width`` columns shows them."""
        rows = [
            ("trials", self.trials.text(_count)),
            ("steps requested", self.steps_asked.text(_count)),
            ("unique steps", self.steps_unique.text(_count)),
            ("merge rate", self.merge_rate.text(rate)),
        ]
        if self.steps_trained != self.steps_unique:
            rows.insert(3, ("steps trained", self.steps_trained.text(_count)))
        if (by_cost := self.cost_weighted_merge_rate.text(rate)) != rows[-1][1]:
            rows.append(("by cost", by_cost))
        if self.timed:
            rows += [
                ("GPU-hours", self.worker_seconds.text(worker_hours)),
                ("without sharing", self.worker_seconds_alone.text(worker_hours)),
                ("saved", self.saved_seconds.text(worker_hours)),
            ]
            if self.fused_seconds.high:
                rows.append(("saved by fusing siblings", self.fused_seconds.text(worker_hours)))
        rows += [
            ("checkpoints kept", self._checkpoints(self.checkpoints)),
            ("needed at most", self._checkpoints(self.checkpoints_needed)),
        ]
        notes = (folded(note, width) for note in self._notes())
        return "\n".join([aligned(rows, width=width), "", self._table(width), "", *notes])

    __str__ = as_text

    def _checkpoints(self, number: Spread) -> str:
        each = self.checkpoint_bytes
        if not each:
            return number.text(_count)
        return f"{number.text(_count)}, {number.text(lambda count: size(count * each + self.shared_bytes))}"

    def _table(self, width: int | None) -> str:
        style = duration if self.timed else _count
        cells = [["GPUs", "makespan", "lower bound", "makespan / bound", "without sharing, at least"]]
        cells[0] += ["cost"] if self.gpu_price is not None else []
        for fleet in self.fleets:
            over = fleet.makespan.median / fleet.lower_bound.median if fleet.lower_bound.median else 1.0
            spreads = fleet.makespan, fleet.lower_bound, fleet.alone_bound
            makespan, bound, alone = (spread.text(style) for spread in spreads)
            cells.append([f"{fleet.workers}", makespan, bound, f"{over:.2f}", alone])
            if self.gpu_price is not None:
                cells[-1].append(self._price(fleet.workers * fleet.makespan.median))
        return table(cells, left=0, width=width)

    def _price(self, seconds: float) -> str:
        return "" if self.gpu_price is None else f"{self.gpu_price * seconds / 3600:,.2f}"

    def _deadline(self) -> Iterator[str]:
        if self.deadline is None:
            return
        within = duration(self.deadline)
        for kind, fleet in (("fixed", self.fixed), ("elastic", self.elastic)):
            if fleet is None:
                yield f"No {kind} fleet finishes within {within}: more workers are not faster."
                continue
            cost = f", for {self._price(fleet.paid_seconds)}" if self.gpu_price is not None else ""
            most = "at most " if kind == "elastic" else ""
            yield (
                f"Cheapest {kind} fleet within {within}: {most}{count_of(fleet.workers, 'GPU')}, in "
                f"{duration(fleet.makespan)}: {worker_hours(fleet.paid_seconds)} allocated{cost}."
            )

    def _notes(self) -> Iterator[str]:
        yield from self._deadline()
        if not self.exact and not self.drawn.high:
            yield (
                f"{self.algorithm} with {self.sampler} decides by metrics. All of them were measured before: steps and "
                f"merge rate are exact, for a search on a new store."
            )
        elif self.exact:
            yield "No decision depends on metrics: steps and merge rate are exact."
        else:
            known = f", except {self.measured.text(_count)} that were measured before" if self.measured.high else ""
            yield (
                f"{self.algorithm} with {self.sampler} decides by metrics, which are not known yet{known}. Figures are "
                f"the median (minimum to maximum) of {self.rehearsals} rehearsals with random metrics. Real metrics "
                f"vary less from step to step."
            )
        if not self.timed:
            yield "Times are in steps: seconds per step were not given."


FLEETS = several(whole(most=65_536), "whole numbers from 1 to 65,536, such as (1, 2, 4, 8)", least=1, single=False)
"""Numbers of workers to rehearse a search on."""
_SAFETY = 60.0
"""Seconds of training between states that the scheduler keeps in case of a crash."""
_STATES = 1_000_000
"""Maximum number of states to keep; rehearsing this many takes minutes."""


@checked(
    space=SPACE,
    steps=optional(whole()),
    n_trials=optional(whole(most=100_000)),
    sampler=either(text("the name of one of Optuna's samplers"), instance(optuna.samplers.BaseSampler, "the sampler")),
    seed=SEED,
    algorithm=optional(ALGORITHM),
    catch=CATCH,
    workers=FLEETS,
    step_seconds=optional(either(seconds(above=0), function("a function of the values at a step"))),
    evaluate_seconds=seconds(least=0),
    load_seconds=seconds(least=0),
    save_seconds=seconds(least=0),
    checkpoint_bytes=whole(0),
    shared_bytes=whole(0),
    checkpoint_every=optional(whole()),
    rehearsals=whole(most=10_000),
    precedent=optional(instance(Precedent, "a hpstage.rehearsal.stand_in_metrics.Precedent")),
    step_times=optional(instance(StepTimes, "the step_times of a plan")),
    virtual_nodes=whole(most=65_536),
    deadline=optional(seconds(above=0)),
    gpu_price=optional(number(above=0, most=1e9)),
    start_seconds=seconds(least=0),
    disruptions=optional(instance(Disruptions, "a hpstage.execution.simulated_cluster.Disruptions")),
)
def preflight(
    space: Space,
    *,
    steps: int | None = None,
    n_trials: int | None = None,
    sampler: SamplerName | optuna.samplers.BaseSampler = "random",
    seed: int = 0,
    algorithm: Algorithm | None = None,
    catch: Iterable[type[Exception]] | type[Exception] = (Exception,),
    workers: Sequence[int] = (1, 2, 4, 8),
    step_seconds: float | StepSeconds | None = None,
    evaluate_seconds: float = 0.0,
    load_seconds: float = 0.0,
    save_seconds: float = 0.0,
    checkpoint_bytes: int = 0,
    shared_bytes: int = 0,
    checkpoint_every: int | None = None,
    rehearsals: int = 9,
    precedent: Precedent | None = None,
    step_times: StepTimes | None = None,
    virtual_nodes: int = 1,
    deadline: float | None = None,
    gpu_price: float | None = None,
    start_seconds: float = 60.0,
    disruptions: Disruptions | None = None,
) -> Preflight:
    """Estimate the steps and the cost of a search, without training anything.

    Args:
        space, steps, n_trials, algorithm, catch, checkpoint_every: as for :func:`hpstage.optimize`.
        sampler: one of Optuna's, which is not modified, or a name (``"random"``, ``"tpe"``, ``"grid"``, ...).
        seed: seed of a sampler given by name.
        workers: numbers of workers, with a rehearsal for each.
        step_seconds: seconds per step, or a function of the hyperparameter values at that step. If it is not given,
            times are in steps, and the checkpoints that a search saves about once a minute are left out.
        evaluate_seconds, load_seconds, save_seconds: seconds per evaluation, and to load or save a checkpoint.
        checkpoint_bytes: size of each checkpoint.
        shared_bytes: size of the parts that checkpoints share, such as a frozen backbone; each part is stored once.
        rehearsals: number of rehearsals with different random metrics, if the search depends on metrics.
        precedent: an earlier plan, whose measured metrics are used instead of random ones. Its steps still count as not
            trained: the figures are those of a search on a new store.
        virtual_nodes: maximum number of workers that train a chain together when they would be idle; each doubling is
            assumed to be 1.8 times as fast.
        step_times: time of a step of several siblings that a worker trains as one, if it does, as a multiple of a
            single trial's step.
        deadline: seconds; find the cheapest fixed fleet that meets it, and the cheapest elastic one, whose number of
            workers follows the demand, as with ``cluster.adapt``.
        gpu_price: price per worker-hour.
        start_seconds: seconds to start a worker of an elastic fleet; they count as allocated.
        disruptions: slow workers, and preemptible workers that are lost; each rehearsal has another seed.

    Raises:
        UsageError: an argument is invalid; the message names it.
    """
    algorithm = FullTraining() if algorithm is None else algorithm
    if step_seconds is None:
        given = {"evaluate_seconds": evaluate_seconds, "load_seconds": load_seconds, "save_seconds": save_seconds}
        others = {"deadline": deadline, "gpu_price": gpu_price, "disruptions": disruptions}
        if name := next((name for name, value in {**given, **others}.items() if value), ""):
            raise UsageError(f"{name} needs step_seconds; without it, times are in steps")
    elif callable(step_seconds):
        step_seconds = _checked(step_seconds)
    steps = longest(space, steps)
    if checkpoint_every is None and step_seconds is None:
        checkpoint_every = steps
    if checkpoint_every is not None or not callable(step_seconds):
        kept_every = checkpoint_every or max(1.0, _SAFETY / cast("float", step_seconds))
        _check_states(n_trials or len(points_of(space)) or 1, steps, kept_every)
    costs = Costs(
        step_seconds=1.0 if step_seconds is None else step_seconds,
        evaluate_seconds=evaluate_seconds,
        load_seconds=load_seconds,
        save_seconds=save_seconds,
        checkpoint_bytes=checkpoint_bytes,
        step_times=step_times,
        virtual_nodes=virtual_nodes,
    )
    catch = in_tuple(catch)
    own = named_sampler(sampler, space, steps, seed, catch=catch) if isinstance(sampler, str) else sampler
    with quiet_optuna():
        chain = samplers(optuna.create_study(sampler=own))
        search = Rehearsed(
            space=space,
            steps=steps,
            n_trials=n_trials,
            sampler=own,
            algorithm=algorithm,
            catch=catch,
            costs=costs,
            checkpoint_every=checkpoint_every,
            precedent=precedent,
            disruptions=disruptions,
        )
        rehearsed = _Rehearsals(search, chain, rehearsals)
        runs = [rehearsed.on(count) for count in workers]
        fixed, elastic = (None, None) if deadline is None else rehearsed.cheapest(runs, deadline, start_seconds)
    return Preflight(
        **_figures([run for group in runs for run in group]),
        algorithm=repr(algorithm),
        sampler=" over ".join(type(one).__name__ for one in chain),
        exact=rehearsed.exact and not any(run.observes for group in runs for run in group),
        rehearsals=max(map(len, runs)),
        timed=step_seconds is not None,
        checkpoint_bytes=checkpoint_bytes,
        shared_bytes=shared_bytes,
        fleets=tuple(_fleet(group) for group in runs),
        gpu_price=gpu_price,
        deadline=deadline,
        fixed=fixed,
        elastic=elastic,
    )


class _Rehearsals:
    """Rehearses a search on fleets. If metrics or chance change its figures, it is rehearsed ``most`` times on each
    fleet, else once.

    Args:
        chain: the sampler, and the samplers that it calls.

    Raises:
        UsageError: ``n_trials`` is missing, and the sampler does not stop by itself.
    """

    def __init__(self, search: Rehearsed, chain: Sequence[optuna.samplers.BaseSampler], most: int) -> None:
        listed = bool(points_of(search.space))
        if search.n_trials is None and not listed and not isinstance(chain[-1], _ENDING):
            raise UsageError(f"{type(search.sampler).__name__} does not stop by itself; give n_trials")
        self._search = search
        self._most = most
        blind = listed or (len(chain) == 1 and isinstance(search.sampler, BLIND))
        self.exact = blind and isinstance(search.algorithm, FullTraining)
        """Whether neither the sampler nor the algorithm decides by metrics; a schedule may still depend on them."""

    def on(self, workers: int, start_seconds: float | None = None) -> list[Rehearsal]:
        """Rehearse on a fixed fleet of ``workers``; with ``start_seconds``, on an elastic fleet of at most ``workers``,
        which take ``start_seconds`` to start."""
        done: list[Rehearsal] = []
        for values in range(self._most):
            done.append(self._search.on(workers, values, start_seconds=start_seconds))
            same = (self.exact and not done[-1].observes) or not done[-1].drawn
            if same and self._search.disruptions is None:
                break
        return done

    def cheapest(
        self, runs: Iterable[list[Rehearsal]], deadline: float, start_seconds: float
    ) -> tuple[FleetCost | None, FleetCost | None]:
        """Return the cheapest fixed and the cheapest elastic fleet that meet the deadline; ``None`` if no fleet does.

        Args:
            runs: the rehearsals done on fixed fleets.
        """
        known = {group[0].workers: group for group in runs}
        fixed = cheapest(lambda count: known.get(count) or self.on(count), deadline, max(known))
        first = max(known) if fixed is None else fixed.workers
        return fixed, cheapest(lambda count: self.on(count, start_seconds), deadline, first)


def _figures(runs: Sequence[Rehearsal]) -> dict[str, Spread]:
    """Return the figures that do not depend on the fleet, by their names in :class:`Preflight`."""
    own = {"measured": [run.measured for run in runs], "drawn": [run.drawn for run in runs]}
    own |= {"checkpoints": [run.savings.kept for run in runs], "checkpoints_needed": [run.needed for run in runs]}
    summed = {name: [getattr(run.savings, name) for run in runs] for name in _SUMMED}
    return {name: _spread(values) for name, values in (own | summed).items()}


_SUMMED = (
    *("trials", "steps_asked", "steps_unique", "steps_trained", "merge_rate", "cost_weighted_merge_rate"),
    *("worker_seconds_alone", "worker_seconds", "saved_seconds", "fused_seconds"),
)
"""Figures of a search's savings."""


def _fleet(runs: Sequence[Rehearsal]) -> Fleet:
    return Fleet(
        workers=runs[0].workers,
        makespan=_spread(run.makespan for run in runs),
        lower_bound=_spread(run.lower_bound for run in runs),
        alone_bound=_spread(run.alone_bound for run in runs),
        worker_seconds=_spread(run.savings.worker_seconds for run in runs),
    )


def _spread(values: Iterable[float]) -> Spread:
    found = list(values)
    return Spread(statistics.median(found), min(found), max(found))


def _checked(step_seconds: StepSeconds) -> StepSeconds:
    """Return a function that calls the user's function and checks its results."""
    answer = seconds(least=0)

    def ask(values: Mapping[str, Scalar]) -> float:
        try:
            found = step_seconds(values)
        except Exception as error:
            raise UsageError(f"step_seconds({dict(values)}) raises {type(error).__name__}: {error}") from error
        return answer.of(f"step_seconds({dict(values)})", found)  # type: ignore[no-any-return]

    return ask


def _check_states(n_trials: int, steps: int, every: float) -> None:
    """Raise :class:`UsageError` if so many states are kept that rehearsing them takes hours."""
    if n_trials * steps / every > _STATES:
        raise UsageError(
            f"steps is {steps}: {n_trials:,} trials that keep a state every {every:,.0f} steps keep more than "
            f"{_STATES:,} states; give a larger checkpoint_every, or fewer n_trials"
        )
