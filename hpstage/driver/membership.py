"""One process's membership in a plan: folding the journal, joining the other drivers, and leaving."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass

from hpstage.checkpoints import CheckpointStore
from hpstage.checkpoints.eviction import Eviction
from hpstage.driver.driver import Driver
from hpstage.driver.driver_leases import DriverLeases
from hpstage.driver.inputs import check_inputs
from hpstage.driver.snapshots import SnapshotWriter
from hpstage.driver.state_probe import StateProbe
from hpstage.errors import CheckpointError, HistoryChanged, LeaseLost, StoreError, UsageError
from hpstage.executor import Executor
from hpstage.plan.devices import are_any
from hpstage.plan.facts import DriverId, DriverJoined, StateKey, WorkerId
from hpstage.plan.log import open_plan
from hpstage.plan.messages import Verify
from hpstage.plan.plan import SearchPlan
from hpstage.scheduler.scheduler import Scheduler
from hpstage.store import Journal

logger = logging.getLogger("hpstage")


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """The workload of a plan; the fields are those of ``plan.log.open_plan``."""

    key: StateKey
    described: Mapping[str, str]
    loaded: Mapping[str, str]
    origin: tuple[str, str]
    sharing: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Conduct:
    """How a driver trains a plan; the fields are those of :class:`~hpstage.scheduler.scheduler.Scheduler`."""

    checkpoint_every: int | None
    verify: Verify
    audit: bool
    numerics: str
    slots: int


@contextmanager
def join_plan(
    journal: Journal,
    checkpoints: CheckpointStore,
    executor: Executor,
    workload: Workload,
    conduct: Conduct,
    *,
    study: str,
    identity: str,
    eviction: Eviction,
    workers: Iterable[WorkerId] = (),
) -> Iterator[Driver]:
    """Join the plan of ``journal`` with a new driver, which leaves at the end of the context.

    In order: fold the plan, compare the inputs that training reads, create the scheduler and the driver, and join the
    other drivers.

    Args:
        executor: opened, with ``checkpoints`` in use.
        study, identity: name and identity of the study, which one process drives at a time.
        eviction: the eviction of ``checkpoints``.
        workers: workers that an earlier driver has left idle.

    Raises:
        UsageError: another process drives the study, or others on the plan keep their checkpoints elsewhere.
        LeaseLost: this process was suspended for so long that others considered it dead. Later writes had no effect,
            and it may join again.
        StoreError: an input of training has changed since the plan's results were trained.
        HistoryChanged: the journal has lost records that this process has folded. It may also join again.
    """
    described = workload.described
    plan = open_plan(
        journal, workload.key, described, workload.loaded, origin=workload.origin, sharing=workload.sharing
    )
    check_inputs(plan, executor)
    me = DriverId(f"{os.getpid():x}-{time.time_ns():x}")
    leases = DriverLeases(journal, me)
    snapshots = SnapshotWriter(journal, plan)
    scheduler = Scheduler(
        plan,
        driver=me,
        pool=executor.pool,
        checkpoint_every=conduct.checkpoint_every,
        verify=conduct.verify,
        numerics=conduct.numerics,
        widest=executor.widest,
        slots=conduct.slots,
        audit=conduct.audit and executor.can_audit,
    )
    driver = Driver(
        plan,
        scheduler,
        executor,
        journal,
        leases=leases,
        eviction=eviction,
        exact=described.get("environment:deterministic") != "no" and not are_any(described),
        strict=conduct.verify != "off",
        probe=StateProbe(checkpoints),
        workers=workers,
        snapshots=snapshots,
    )
    with ExitStack() as leaving:
        leaving.callback(snapshots.close)
        leaving.callback(leases.close)
        place, others = checkpoints.identity(), list(plan.drivers.values())
        _compare_with_last(plan, place, checkpoints)
        driver.log.write([leases.enter(study, identity, executor.pool, place, others)])
        driver.remove_dead_drivers()
        _check_place(place, [other for other in others if other.driver in plan.drivers], driver)
        try:
            yield driver
        except (LeaseLost, HistoryChanged):
            raise  # the others consider it gone already, or may no longer know it
        except BaseException:
            executor.close()  # nothing may run here once the others know that this driver left
            with suppress(StoreError):  # if the store is gone, the lease expires
                driver.leave()
                driver.write_snapshot()
            raise
        driver.leave()
        driver.write_snapshot()


def _compare_with_last(plan: SearchPlan, place: str, checkpoints: CheckpointStore) -> None:
    """Warn if states were kept in another place. This may be intended: the folder was removed, or another was given."""
    if place and plan.place and place != plan.place and plan.kept and not _has_last(plan, checkpoints):
        logger.warning(
            "The %d checkpoints of this plan were saved in another location than %r; states that have no checkpoint "
            "here are trained again. If the location is not mounted, stop, and mount it first.",
            len(plan.kept),
            checkpoints,
        )


def _has_last(plan: SearchPlan, checkpoints: CheckpointStore) -> bool:
    """Whether these checkpoints have the state that was kept last, as a copy by ``hpstage copy`` does."""
    try:
        checkpoints.manifest(next(reversed(plan.kept)))
    except CheckpointError:
        return False
    return True


def _check_place(place: str, others: Iterable[DriverJoined], driver: Driver) -> None:
    """Check that all drivers use the same checkpoint location; otherwise each would consider the others' lost."""
    for other in others:
        if place and other.checkpoints and other.checkpoints != place:
            driver.leave()
            raise UsageError(
                f"process {other.pid} on {other.host.partition('/')[0]} works on this plan and keeps its checkpoints "
                f"in another place; give both processes the same place with checkpoints="
            )
