"""Performs evictions while searches run: checkpoints beyond the budget are recorded as evicted, then removed.

A driver calls :meth:`Eviction.enforce` in each of its turns. :mod:`hpstage.checkpoints.evictable` decides which
checkpoints may be evicted, :mod:`hpstage.checkpoints.eviction_policy` chooses among them. The eviction is first written
to the journal, which accepts it only if no other driver has written what is unknown here: a driver that wants to start
from the same state either wrote first, so that the state is needed, or finds it lost. Only then is the checkpoint
removed. A process that dies in between leaves a checkpoint that no record names, which ``hpstage gc`` removes. Removing
takes a tenth of a second on an object store, so a few threads do it, a batch at a time. The plan is checked again
before each batch, since an evicted state may be trained and saved again. Checkpoints that a running chain will save are
not removed while it runs, and this driver's own chains wait for removals on their path. One race is accepted: another
driver may train and save a state while it is being removed. The state is then missing when it is next loaded, and is
trained once more.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from itertools import islice
from typing import NamedTuple

from hpstage.checkpoints.evictable import kept_states
from hpstage.checkpoints.eviction_policy import EvictionPlan, choose_evictions
from hpstage.checkpoints.store import CheckpointStore
from hpstage.errors import CheckpointError
from hpstage.plan.facts import ChainId, StateKey, StateLost, StateRef
from hpstage.plan.log import Log
from hpstage.plan.plan import SearchPlan

logger = logging.getLogger("hpstage")

# Evict down to this share of the budget, so that each decision frees much and few decisions are needed.
_DOWN_TO = 0.9
# Number of checkpoints removed at once, and of threads.
_BATCH = 16
_THREADS = 4
# After a decision that could not keep the budget, the next one follows after this many facts, or as many as there are
# checkpoints if that is more, or earlier once the checkpoints have grown by this share.
_PATIENCE = 16
_GROWTH = 0.05


class _Removal(NamedTuple):
    """A checkpoint being removed by a thread; without ``ref``, a part."""

    ref: StateRef | None
    done: Future[None]


class Eviction:
    """Removes checkpoints that are not needed.

    Args:
        checkpoints: the store from which they are removed.
        budget: maximum total bytes of all checkpoints; ``None``: limited by the disk only.
    """

    def __init__(self, checkpoints: CheckpointStore, budget: int | None = None, *, batch: int = _BATCH) -> None:
        self._checkpoints = checkpoints
        self._budget = budget
        self._batch = batch
        # Position of the journal and bytes of checkpoints at which a budget that could not be kept is checked again.
        self._again = self._grown = 0
        self._pending: dict[StateKey, StateRef] = {}  # evicted and still to be removed, in order
        self._removing: dict[StateKey, _Removal] = {}
        self._parts: set[StateKey] = set()  # parts of evicted states, to be removed once no state has them
        self._pool: ThreadPoolExecutor | None = None
        self._excused: set[ChainId] = set()
        self._warned = False
        self.removed = 0  # checkpoints
        self.failed = 0  # number that could not be removed

    def enforce(self, log: Log) -> None:
        """Evict so that what running chains will publish next fits into the budget, and continue removals, without
        blocking. O(running chains), except for a decision each time that the checkpoints have grown by a share of
        themselves, or as many facts were added as there are checkpoints."""
        plan = log.plan
        if self._budget is not None:
            room = max(0, self._budget - _on_their_way(plan))
            if plan.kept_bytes > room and (plan.kept_bytes > self._grown or plan.position >= self._again):
                decision = self.evict(log, int(room * _DOWN_TO), "checkpoints took more than their budget")
                self._grown = self._again = 0
                if decision.remaining > room:
                    self._again = plan.position + max(_PATIENCE, len(plan.kept))
                    self._grown = decision.remaining + int(_GROWTH * max(decision.remaining, self._budget))
                if decision.remaining > self._budget:
                    self._warn(decision.remaining)
        if self._pending or self._removing or self._parts:
            self._remove(plan)

    def make_room(self, log: Log, chains: Iterable[ChainId]) -> bool:
        """Remove checkpoints that are not needed, up to half of all bytes, after the given chains found the disk full.

        Returns whether there is more room now than when they failed.
        """
        if self._excused.issuperset(chains):
            return True  # they were already running when room was made
        before = self.removed
        self.evict(log, log.plan.kept_bytes // 2, "the disk is full")
        self.finish(log)
        if self.removed == before:
            return False
        self._excused = set(log.plan.chains)
        logger.warning("The disk is full; %d checkpoints that nothing needs were removed.", self.removed - before)
        return True

    def settle(self, log: Log) -> None:
        """Enforce the budget and finish all removals, when the search has ended and little is still needed."""
        self._again = self._grown = 0
        self.enforce(log)
        self.finish(log)

    def evict(self, log: Log, budget: int, why: str, *, for_forks: bool = True) -> EvictionPlan:
        """Evict checkpoints until the others take at most ``budget`` bytes; with ``for_forks``, keep those that future
        trials will fork."""
        plan = log.plan
        while True:
            decision = choose_evictions(kept_states(plan, for_forks=for_forks), budget)
            refs = {key: plan.kept[key].ref for key in decision.delete}
            parts = {
                part.key for state in map(plan.kept.get, refs) if state and state.kept for part in state.kept.parts
            }
            if not refs or log.commit([StateLost(ref.node, ref.step, "evicted", why) for ref in refs.values()]):
                self._pending |= refs
                self._parts |= parts
                return decision

    def finish(self, log: Log) -> None:
        """Remove all evicted states, except those that a running chain will save again, and wait until it is done."""
        self._remove(log.plan)
        while self._removing:
            wait([removal.done for removal in self._removing.values()])
            self._remove(log.plan)

    def wait_for_conflicts(self, plan: SearchPlan) -> None:
        """Wait until no removal is in progress that a running chain may save again."""
        wait([removal.done for removal in self._removing.values() if removal.ref and plan.will_keep(removal.ref)])

    @property
    def waiting(self) -> int:
        """Number of checkpoints that are evicted but not removed yet."""
        return len(self._pending) + len(self._removing)

    def close(self) -> None:
        """Stop the threads. Checkpoints not removed yet stay on the storage, named by no record."""
        if self._pool is not None:
            self._pool.shutdown(wait=True)
            self._pool = None

    def _remove(self, plan: SearchPlan) -> None:
        """Collect finished removals, and start the next batch."""
        for key, removal in [(key, removal) for key, removal in self._removing.items() if removal.done.done()]:
            del self._removing[key]
            try:
                removal.done.result()
                self.removed += removal.ref is not None
            except CheckpointError as error:
                self.failed += 1
                logger.warning("A checkpoint could not be removed (%s); `hpstage gc` removes it later.", error)
        if self._removing:
            return
        for key, ref in list(islice(self._pending.items(), 2 * self._batch)):
            if key in plan.kept:
                del self._pending[key]  # saved again before it was removed
            elif not plan.will_keep(ref) and len(self._removing) < self._batch:
                del self._pending[key]
                self._begin(key, ref)
        self._parts -= plan.parts.keys()
        for key in [key for key in self._parts if not _may_have(plan, key)]:
            self._parts.discard(key)
            self._begin(key, None)

    def _begin(self, key: StateKey, ref: StateRef | None) -> None:
        if self._pool is None:
            self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="hpstage-eviction")
        self._removing[key] = _Removal(ref, self._pool.submit(self._checkpoints.delete, key))

    def _warn(self, remaining: int) -> None:
        if not self._warned:
            self._warned = True
            logger.warning(
                "Checkpoints that are still needed take %s bytes, more than checkpoint_budget (%s). The search "
                "continues and removes what is no longer needed.",
                f"{remaining:,}",
                f"{self._budget:,}",
            )


def _may_have(plan: SearchPlan, part: StateKey) -> bool:
    """Whether a running chain may save a state with this part: its last state has the part, or is not known."""
    for chain in plan.chains.values():
        last = chain.reached or plan.source_of(chain)
        if last is None or last.kept is None or part in {one.key for one in last.kept.parts}:
            return True
    return False


def _on_their_way(plan: SearchPlan) -> int:
    """Return the bytes that running chains will probably publish next: each as many as its last state has."""
    total = 0
    for chain in plan.chains.values():
        if chain.continues:
            last = chain.reached or plan.source_of(chain)
            has = None if last is None else last.kept
            total += plan.kept_bytes // max(1, len(plan.kept)) if has is None else has.own
    return total
