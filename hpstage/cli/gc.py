"""``hpstage gc``: removes checkpoints that no record names, or that a budget has no room for. Which are never removed:
:mod:`hpstage.checkpoints.needed`."""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import Annotated

import typer

from hpstage.checkpoints import CheckpointStore
from hpstage.checkpoints.eviction import BYTES, Eviction
from hpstage.checkpoints.eviction_policy import choose_evictions
from hpstage.checkpoints.needed import kept_states
from hpstage.cli import options
from hpstage.cli.terminal import columns, echo
from hpstage.driver.driver_leases import DriverLeases
from hpstage.driver.places import open_existing
from hpstage.errors import CheckpointCorrupt, CheckpointError, CheckpointForeign, CheckpointMissing
from hpstage.errors.text import size, table
from hpstage.plan.facts import DriverId, DriverLeft, StateKey
from hpstage.plan.log import Log
from hpstage.report.trial_log import all_log_keys

# Checkpoints that are removed between two looks whether a driver has come, and by how many threads.
_BATCH = 16
_THREADS = 4


def gc(
    store: options.Store,
    checkpoints: options.KeptCheckpoints = None,
    budget: Annotated[
        str | None,
        typer.Option(help="Maximum bytes to keep, such as '20 GB'; 0: only checkpoints that are still needed."),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what would be removed, and change nothing.")
    ] = False,
) -> None:
    """Remove checkpoints that nothing needs.

    Those that no record of the plan names, leftovers of writers that died, and with --budget as many others as it
    takes, the cheapest to train again first. What is still needed stays. Searches may run at the same time.

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
    """Some checkpoints: how many, and their bytes."""

    count: int = 0
    bytes: int = 0

    def add(self, size: int) -> None:
        self.count += 1
        self.bytes += size


@dataclass(slots=True)
class Collection:
    """The results of one run of the command, and what it removes; as text, the table that it prints.

    Bytes are those that the plan has recorded, as in ``hpstage status`` and as budgets count them; of what no record
    names, those that it takes on its storage.

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
    spared: _Heap = field(default_factory=_Heap, init=False)  # that no record names, while a driver is at work
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

    def collect(self, budget: int | None) -> None:
        """Find and remove. ``budget``: the maximum bytes that remain; ``None``: all that a record names."""
        self._sizes, self.before = self._listed()
        self._remove_dead_drivers()
        self._remove_orphans()
        self._remove_logs()
        if budget is not None:
            self._evict(budget)
        if not self.dry_run:
            self.leftovers = self.checkpoints.sweep()
            _, self.after = self._listed()
        self.unpublished = self.checkpoints.usage().unpublished
        for state in kept_states(self.log.plan, for_forks=budget is None or self._for_forks):
            if state.needed:
                self.needed.add(self._sizes.get(state.key, state.bytes))

    def _listed(self) -> tuple[dict[StateKey, int], _Heap]:
        """Return the bytes of each checkpoint on the storage, and of all with the parts that they have in common."""
        plan = self.log.plan
        sizes, parts = self.checkpoints.sizes(), self.checkpoints.parts()
        recorded = {key: state.kept.own for key, state in plan.kept.items() if state.kept is not None and key in sizes}
        sizes = {**sizes, **recorded}
        parts = {**parts, **{key: part.bytes for key, (part, _) in plan.parts.items() if key in parts}}
        return sizes, _Heap(len(sizes), sum(sizes.values()) + sum(parts.values()))

    def _remove_dead_drivers(self) -> None:
        """Declare drivers dead that died, as the next driver would."""
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
        """Remove files that no record names. While a driver is running, such a file may be one that a worker has just
        published."""
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
        """Remove logs of states that no record names. While a driver is at work, they may be of a running chain."""
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
                continue  # of another workload, or of unknown origin
            except CheckpointError as error:
                typer.echo(f"hpstage: {error}", err=True)
                continue
            self.logs += 1
            self.log_bytes += own

    def _remove(self, key: StateKey) -> _Heap | None:
        """Remove an unnamed checkpoint, if it is of this workload and no driver is running. Return what counts it."""
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
        """Whether states stay that are kept for trials to come: while a search runs, which may propose them."""
        return bool(self.log.plan.drivers)

    def _evict(self, budget: int) -> None:
        if self.dry_run:
            gone = choose_evictions(kept_states(self.log.plan, for_forks=self._for_forks), budget).delete
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
        """Return what was done as a terminal of ``width`` columns shows it."""
        removed = "to remove" if self.dry_run else "removed"
        rows = [
            ("before", self.before.count, self.before.bytes),
            (f"{removed}: no record names them", self.orphans.count, self.orphans.bytes),
            (f"{removed}: over the budget", self.evicted.count, self.evicted.bytes),
        ]
        if not self.dry_run:
            rows.append(("after", self.after.count, self.after.bytes))
        rows.append(("still needed", self.needed.count, self.needed.bytes))
        for name, heap in (
            ("left: a driver is at work and may publish them", self.spared),
            ("left: of other workloads", self.foreign),
            ("left: damaged, of unknown origin", self.damaged),
            ("left: cannot be read or removed", self.stuck),
        ):
            if heap.count:
                rows.append((name, heap.count, heap.bytes))
        cells = [("", "checkpoints", "size"), *((name, f"{count:,}", size(own)) for name, count, own in rows)]
        notes = [
            (self.logs, f"{removed}, logs that no record names: {self.logs} ({size(self.log_bytes)})"),
            (self.leftovers, f"leftovers of dead writers removed: {self.leftovers}"),
            (self.unpublished, f"not published, of writers at work or dead: {size(self.unpublished)}"),
            (self.dead_drivers, f"dead drivers removed from the plan: {self.dead_drivers}"),
            (self.log.plan.drivers, f"drivers at work: {len(self.log.plan.drivers)}"),
            (self.waiting, f"written off, but a running chain may save them again: {self.waiting}"),
            (self.failed, f"written off, but could not be removed: {self.failed}"),
            (self.dry_run, "Nothing was changed (--dry-run)."),
        ]
        return "\n".join([table(cells, width=width), *(text for said, text in notes if said)])
