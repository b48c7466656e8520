"""Call: what is opened for a call of ``optimize`` (workers, store, checkpoints), and its session and driver."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Set
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial

from hpstage.checkpoints.eviction import Eviction
from hpstage.driver.driver import Driver
from hpstage.driver.membership import Conduct, Workload, join_plan
from hpstage.driver.places import Places, check_places, header_in, open_places
from hpstage.errors import UsageError
from hpstage.errors.arguments import shown
from hpstage.execution.inline import InlineExecutor
from hpstage.executor import Environment, Executor
from hpstage.optuna.ledger import Ledger, samplers
from hpstage.optuna.patient_storage import fail_stale_trials, patient
from hpstage.optuna.stage_tree_sampler import StageTreeSampler
from hpstage.plan.devices import devices_of
from hpstage.plan.facts import SearchStarted, StateKey, WorkerId
from hpstage.plan.keys import workload_key
from hpstage.plan.plan import SearchPlan
from hpstage.schedule.space import Described
from hpstage.search.costs import COSTS, check_costs
from hpstage.search.earlier import continued
from hpstage.search.given import Given
from hpstage.search.numerics import choose, slots_by
from hpstage.search.progress import Progress
from hpstage.search.progress.view import Display
from hpstage.search.request import Request
from hpstage.search.session import Session, evaluated, missing_metric
from hpstage.search.signals import Interruption
from hpstage.search.trials import name_in
from hpstage.training.code.unread import may_report, unread
from hpstage.training.identity.code_identity import by_name, code_identity, origin_of
from hpstage.training.identity.environment import described_by, is_open

logger = logging.getLogger("hpstage")


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """The parts of a call that do not depend on the driver that carries it out."""

    request: Request
    executor: Executor
    places: Places
    ledger: Ledger
    eviction: Eviction
    progress: Progress
    interruption: Interruption
    deadline: float | None
    on_gpu: bool
    join: Callable[[Iterable[WorkerId]], AbstractContextManager[Driver]]
    """Join the plan, with workers that an earlier driver has left idle."""

    def session(self, driver: Driver) -> Session:
        request, study, observed = self.request, self.request.study, self.request.observed
        chain = samplers(study)
        for sampler in chain:
            if isinstance(sampler, StageTreeSampler):
                sampler.attach(request.space, request.steps, observed.defaults)
        name = name_in(driver.plan, self.ledger)
        n_trials = request.n_trials
        if isinstance(request.space, Given):
            n_trials = request.space.recall(study, driver, name, observed)
        started = SearchStarted(
            study=name,
            algorithm=repr(request.algorithm),
            metric=request.metrics,
            steps=request.steps,
            n_trials=n_trials,
            sampler=" over ".join(type(sampler).__qualname__ for sampler in chain),
            at=time.time(),
            extends=request.extend,
            identity=self.ledger.identity(),
            directions=tuple(direction.name.lower() for direction in study.directions),
            defaults=dict(observed.defaults),
            workers=request.workers,
        )
        if unstated := driver.plan.defaults.keys() - started.defaults.keys():
            logger.warning(
                "Another search on this store has set defaults for %s: every trial of this store uses them",
                ", ".join(sorted(map(repr, unstated))),
            )
        before = driver.plan.searches.get(started.study)
        started = continued(started, before, self.ledger)
        return Session(
            request,
            self.ledger,
            driver,
            started,
            before_first=partial(self._try_out, driver.plan),
            deadline=self.deadline,
            interruption=self.interruption,
            # A search that continues with another number of trials leaves its finished trials as they are.
            prolongs=request.extend or (before is not None and before.started.extends and not before.ended),
            on_change=lambda session: self._changed(session, driver),
        )

    def _changed(self, session: Session, driver: Driver) -> None:
        self.progress.update(session, driver)
        self.follow(session, driver)

    def follow(self, session: Session, driver: Driver, *, last: bool = False) -> None:
        """Update the callbacks that follow trials during training; ``last`` at the end of the call."""
        for follower in self.request.followers:
            ids = (trial.id for trial in session.trials)  # lazily: followers rarely read them
            follower.follow(driver.plan, ids, self.request.metrics, self.places.checkpoints, last=last)

    def _try_out(self, plan: SearchPlan, described: Described) -> Set[str]:
        """Check the hyperparameters and metrics of the first trial before any is trained. Return the names of the
        metrics, as far as they are known now."""
        initial = {name: schedule.value(0) for name, schedule in described.schedules.items()}
        for name, like in unread(self.request.trainable, initial).items():
            logger.warning(
                "No code of the trainable mentions the hyperparameter %r; did you mean %r? Trials that differ only in "
                "it are trained separately, with the same result",
                name,
                like,
            )
        requested = {*self.request.metrics, *(str(one.metric) for one in described.plateaus.values())} - {*COSTS}
        # Known metrics are not evaluated again, which may take as long as many steps. On a GPU, trying out is needed
        # anyway: it checks that the memory suffices.
        if not self.on_gpu and requested <= evaluated(plan):
            return evaluated(plan)
        found = self.executor.try_out(initial)
        if found is None:
            return requested
        for name in sorted(requested - found.keys()):
            if not may_report(self.request.trainable, name):
                raise UsageError(missing_metric(name, found))
        return found.keys() | requested


@contextmanager
def open_call(request: Request, display: Display | None, interruption: Interruption) -> Iterator[Call]:
    """Start the workers, and open the stores of the plan and its checkpoints."""
    store, checkpoints = request.store, request.checkpoints
    check_places(store, checkpoints)
    with ExitStack() as closing:
        if display is not None and not isinstance(request.executor, InlineExecutor):
            display.write("Setting up the workers")  # takes seconds
        workers = as_executor(request.executor)
        closing.callback(workers.close)
        request, environment = _start(workers, request)
        interruption.started(workers.wake)
        workload, conduct = _decided(environment, workers, request)
        places = open_places(store, checkpoints, name=request.name, workload=workload.key, closing=closing)
        workers.use(places.checkpoints)
        page = closing.enter_context(workers.show(places.journal))
        fail_stale_trials(request.study)
        closing.enter_context(patient(request.study))
        eviction = Eviction(places.checkpoints, request.checkpoint_budget)
        closing.callback(eviction.close)
        ledger = Ledger(request.study, request.constraints)
        deadline = None if request.timeout is None else time.monotonic() + request.timeout
        for follower in request.followers:
            closing.callback(follower.close)
        progress = Progress(
            display,
            request.study,
            page,
            address=None if display is None else workers.page,
            kept=places.folder if store is None else None,
            deadline=deadline,
        )
        yield Call(
            request=request,
            executor=workers,
            places=places,
            ledger=ledger,
            eviction=eviction,
            progress=closing.enter_context(progress),
            interruption=interruption,
            deadline=deadline,
            on_gpu=environment.described.get("device", "cpu") != "cpu",
            join=lambda idle: join_plan(
                places.journal,
                places.checkpoints,
                workers,
                workload,
                conduct,
                study=ledger.name,
                identity=ledger.identity(),
                eviction=eviction,
                workers=idle,
            ),
        )


def _start(workers: Executor, request: Request) -> tuple[Request, Environment]:
    """Start the workers, and log remarks about their environment. Return the request with the number of workers."""
    header = None if request.store is None else header_in(request.store, request.name, StateKey(""))
    workers.devices = devices_of(request.environment, None if header is None else header.described)
    environment = workers.open(request.trainable, None)
    request = replace(request, workers=max(1, workers.present or 1))
    check_costs(request.metrics, environment.described)
    for remark in environment.remarks:
        logger.info("%s", remark)
    for remark in (*environment.warnings, *request.remarks()):
        logger.warning("%s", remark)
    return request, environment


def _decided(environment: Environment, workers: Executor, request: Request) -> tuple[Workload, Conduct]:
    identity = environment.identity or code_identity(request.trainable)
    described = described_by(environment, identity, sharing=request.sharing)
    numerics = ""
    if is_open(described):
        numerics, described = choose(described, workers, request)
    # A non-deterministic environment means that the user allows equal steps to give different bits.
    exact = environment.described.get("deterministic") != "no"
    workload = Workload(
        key=workload_key(described),
        described=described,
        loaded=by_name(environment.loaded),
        origin=origin_of(request.trainable),
        sharing=request.sharing,
    )
    conduct = Conduct(
        checkpoint_every=request.checkpoint_every,
        verify=request.verify if exact else "off",
        audit=request.audit == "idle" and exact and not workers.devices.is_any,
        numerics=numerics,
        slots=slots_by(numerics, workers),
    )
    return workload, conduct


def as_executor(executor: object) -> Executor:
    """Return the executor for the argument ``executor=``."""
    if isinstance(executor, Executor):
        return executor
    if executor is None:
        from hpstage.cluster.fork_server import fork_server

        server = fork_server()  # imports torch while this process imports Dask
        from hpstage.cluster import DaskExecutor

        local = DaskExecutor()
        local.take(server)
        return local
    if isinstance(executor, type):
        raise UsageError(f"executor is the class {executor.__name__}; give an instance: {executor.__name__}()")
    from distributed import Client

    from hpstage.cluster import DaskExecutor
    from hpstage.cluster.place import Cluster

    if isinstance(executor, Client | Cluster):
        return DaskExecutor(executor)
    raise UsageError(
        f"executor cannot be {shown(executor)}; give hpstage.local_cluster(), a dask.distributed.Client, "
        f"an Executor such as InlineExecutor(), or None for a local cluster"
    )
