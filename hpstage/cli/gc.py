"""``hpstage gc``: removes checkpoints that the plan does not record, or that exceed a budget. Checkpoints that are
still needed are never removed: :mod:`hpstage.checkpoints.evictable`."""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import Annotated

import typer

from hpstage.checkpoints import CheckpointStore
from hpstage.checkpoints.evictable import kept_states
from hpstage.checkpoints.eviction import Eviction
from hpstage.checkpoints.eviction_policy import choose_evictions
from hpstage.cli import options
from hpstage.cli.terminal import columns, echo
from hpstage.driver.driver_leases import DriverLeases
from hpstage.driver.places import open_existing
from hpstage.errors import CheckpointCorrupt, CheckpointError, CheckpointForeign, CheckpointMissing
from hpstage.errors.arguments import BYTES
from hpstage.errors.text import count_of, size, table
from hpstage.plan.facts import DriverId, DriverLeft, StateKey
from hpstage.plan.log import Log
from hpstage.report.trial_log import all_log_keys

# Number of checkpoints removed before checking again whether a driver has joined, and the threads that remove them.
_BATCH = 16
_THREADS = 4


def gc(
    store: options.Store,
    checkpoints: options.KeptCheckpoints = None,
    budget: Annotated[
        str | None,
        typer.Option(help="Maximum bytes to keep, such as '20 GB'; 0: keep only checkpoints that are still needed."),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what would be removed, and change nothing.")
    ] = False,
) -> None:
    """Remove checkpoints that nothing needs.

    It removes checkpoints that the plan does not record and leftovers of writers that died. With --budget, it removes
    further ones until the rest fits, beginning with those that are cheapest to train again. Checkpoints that are still
    needed stay. Searches may run at the same time.

    Do not run gc on a checkpoint folder that two plans share: it deletes the other plan's checkpoints.
    """
    most = None if budget is None else BYTES.of("--budget", budget)
    with ExitStack() as closing:
        plan, places = open_existing(store, checkpoints, closing=closing, read_only=dry_run)
        collection = Collection(Log(plan, places.journal, plan.apply), places.checkpoints, dry_run=dry_run)
        collection.collect(most)
        echo(collection.as_text(columns()))
        if collection.failed or collection.stuck.count:
            raise typer.Exit(1)


@dataclass(slots=True)
class _Heap:
    """A number of checkpoints, and their bytes."""

    count: int = 0
    bytes: int = 0

    def add(self, size: int) -> None:
        self.count += 1
        self.bytes += size


@dataclass(slots=True)
class Collection:
    """One run of the command: it removes checkpoints, counts them, and returns the counts as a table.

    Bytes of a checkpoint are those that the plan has recorded, as in ``hpstage status`` and in budgets. For checkpoints
    without a record, they are the bytes on the storage.

    Args:
        dry_run: change nothing, neither checkpoints nor the journal nor leases.
    """

    log: Log
    checkpoints: CheckpointStore
    dry_run: bool = False
    before: _Heap = field(default_factory=_Heap, init=False)
    after: _Heap = field(default_factory=_Heap, init=False)
    orphans: _Heap = field(default_factory=_Heap, init=False)
    evicted: _Heap = field(default_factory=_Heap, init=False)
    needed: _Heap = field(default_factory=_Heap, init=False)
    spared: _Heap = field(default_factory=_Heap, init=False)  # without a record, but a driver may be about to write it
    foreign: _Heap = field(default_factory=_Heap, init=False)
    damaged: _Heap = field(default_factory=_Heap, init=False)
    stuck: _Heap = field(default_factory=_Heap, init=False)
    logs: int = field(default=0, init=False)
    log_bytes: int = field(default=0, init=False)
    leftovers: int = field(default=0, init=False)
    dead_drivers: int = field(default=0, init=False)
    failed: int = field(default=0, init=False)
    waiting: int = field(default=0, init=False)
    unpublished: int = field(default=0, init=False)
    _sizes: dict[StateKey, int] = field(default_factory=dict, init=False)
    _freed: int = field(default=0, init=False)
    """In a dry run: bytes that evictions would free, with the parts that no other checkpoint shares."""

    def collect(self, budget: int | None) -> None:
        """Find and remove checkpoints. ``budget``: maximum bytes that remain; ``None``: keep all that are recorded."""
        self._sizes, self.before = self._listed()
        self._remove_dead_drivers()
        self._remove_orphans()
        self._remove_logs()
        if budget is not None:
            self._evict(budget)
        if self.dry_run:
            gone = self.orphans.count + self.evicted.count
            self.after = _Heap(self.before.count - gone, self.before.bytes - self.orphans.bytes - self._freed)
        else:
            self.leftovers = self.checkpoints.sweep()
            _, self.after = self._listed()
        self.unpublished = self.checkpoints.usage().unpublished
        for state in kept_states(self.log.plan, for_forks=budget is None or self._for_forks):
            if state.needed:
                self.needed.add(self._sizes.get(state.key, state.bytes))

    def _listed(self) -> tuple[dict[StateKey, int], _Heap]:
        """Return the bytes of each checkpoint on the storage, and the total with the parts that checkpoints share."""
        plan = self.log.plan
        sizes, parts = self.checkpoints.sizes(), self.checkpoints.parts()
        recorded = {key: state.kept.own for key, state in plan.kept.items() if state.kept is not None and key in sizes}
        sizes = {**sizes, **recorded}
        parts = {**parts, **{key: part.bytes for key, (part, _) in plan.parts.items() if key in parts}}
        return sizes, _Heap(len(sizes), sum(sizes.values()) + sum(parts.values()))

    def _remove_dead_drivers(self) -> None:
        """Remove drivers that died from the plan, as the next driver would."""
        plan = self.log.plan
        leases = DriverLeases(self.log.journal, DriverId(f"gc-{os.getpid():x}-{time.time_ns():x}"))
        for other in list(plan.drivers.values()):
            if leases.seems_gone(other) if self.dry_run else leases.is_gone(other, plan.searches.identities()):
                self.dead_drivers += 1
                left = DriverLeft(other.driver, time.time(), "gone")
                if self.dry_run:
                    plan.apply(left)
                else:
                    self.log.write([left])

    def _remove_orphans(self) -> None:
        """Remove checkpoints without a record, unless a driver is running: a worker may just have published them."""
        plan = self.log.plan
        unnamed = [key for key in self._sizes if key not in plan.kept]
        with ThreadPoolExecutor(_THREADS) as pool:
            for start in range(0, len(unnamed), _BATCH):
                if not self.dry_run:
                    self.log.catch_up()
                batch = [key for key in unnamed[start : start + _BATCH] if key not in plan.kept]
                for key, heap in zip(batch, pool.map(self._remove, batch), strict=True):
                    if heap is not None:
                        heap.add(self._sizes[key])
        self._remove_parts()

    def _remove_parts(self) -> None:
        loose = {key: own for key, own in self.checkpoints.parts().items() if key not in self.log.plan.parts}
        for key in self.checkpoints.keys() if loose else ():
            with suppress(CheckpointMissing, CheckpointCorrupt):
                for part in self.checkpoints.manifest(key).parts:
                    loose.pop(part.key, None)
        for key, own in loose.items():
            heap = self._remove(key)
            if heap is not None:
                heap.bytes += own

    def _remove_logs(self) -> None:
        """Remove logs of states without a record, unless a driver is running: they may belong to a running chain."""
        if self.log.plan.drivers:
            return
        named = all_log_keys(self.log.plan)
        for key, own in self.checkpoints.logs().items():
            if key in named:
                continue
            try:
                self.checkpoints.load_log(key)
                if not self.dry_run:
                    self.checkpoints.delete_log(key)
            except (CheckpointForeign, CheckpointCorrupt, CheckpointMissing):
                continue  # it belongs to another workload, or its origin is unknown
            except CheckpointError as error:
                typer.echo(f"hpstage: {error}", err=True)
                continue
            self.logs += 1
            self.log_bytes += own

    def _remove(self, key: StateKey) -> _Heap | None:
        """Remove a checkpoint without a record, if it is of this workload and no driver is running. Return the heap
        that counts it."""
        try:
            self.checkpoints.manifest(key)
            if self.log.plan.drivers:
                return self.spared
            if not self.dry_run:
                self.checkpoints.delete(key)
            return self.orphans
        except CheckpointForeign:
            return self.foreign
        except CheckpointCorrupt:
            return self.damaged
        except CheckpointMissing:  # removed since then
            return None
        except CheckpointError as error:
            typer.echo(f"hpstage: {error}", err=True)
            return self.stuck

    @property
    def _for_forks(self) -> bool:
        """Whether states that are kept for future trials stay: only while a search runs, which may propose such
        trials."""
        return bool(self.log.plan.drivers)

    def _evict(self, budget: int) -> None:
        if self.dry_run:
            states = [*kept_states(self.log.plan, for_forks=self._for_forks)]
            chosen = choose_evictions(states, budget)
            gone, self._freed = chosen.delete, choose_evictions(states, None).remaining - chosen.remaining
        else:
            eviction = Eviction(self.checkpoints)
            gone = eviction.evict(self.log, budget, "by hpstage gc", for_forks=self._for_forks).delete
            eviction.finish(self.log)
            eviction.close()
            self.failed = eviction.failed
            self.waiting = eviction.waiting
        for key in gone:
            self.evicted.add(self._sizes.get(key, 0))

    def as_text(self, width: int | None) -> str:
        """Return the counts as a terminal of ``width`` columns shows them."""
        removed = "would be removed" if self.dry_run else "removed"
        rows = [
            ("before", self.before.count, self.before.bytes),
            (f"{removed}: not recorded in the plan", self.orphans.count, self.orphans.bytes),
            (f"{removed}: over the budget", self.evicted.count, self.evicted.bytes),
            ("would stay" if self.dry_run else "after", self.after.count, self.after.bytes),
            ("of these, needed", self.needed.count, self.needed.bytes),
        ]
        for name, heap in (
            ("left: a running driver may record them", self.spared),
            ("left: of other workloads", self.foreign),
            ("left: damaged, of unknown origin", self.damaged),
            ("left: cannot be read or removed", self.stuck),
        ):
            if heap.count:
                rows.append((name, heap.count, heap.bytes))
        cells = [("", "checkpoints", "size"), *((name, f"{count:,}", size(own)) for name, count, own in rows)]
        notes = [
            (self.logs, f"{removed}: {count_of(self.logs, 'log')} not recorded in the plan ({size(self.log_bytes)})"),
            (self.leftovers, f"leftovers of dead writers removed: {self.leftovers}"),
            (self.unpublished, f"unpublished files of running or dead writers: {size(self.unpublished)}"),
            (self.dead_drivers, f"{removed} from the plan: {count_of(self.dead_drivers, 'dead driver')}"),
            (self.log.plan.drivers, f"running drivers: {len(self.log.plan.drivers)}"),
            (self.waiting, f"recorded as evicted, but a running chain may save them again: {self.waiting}"),
            (self.failed, f"recorded as evicted, but could not be removed: {self.failed}"),
            (self.dry_run, "Nothing was changed (--dry-run)."),
        ]
        return "\n".join([table(cells, width=width), *(text for said, text in notes if said)])
