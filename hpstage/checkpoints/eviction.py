"""Eviction: keeps the checkpoints of a plan within a budget of bytes, while searches run on it.

What goes is decided by :mod:`hpstage.checkpoints.retention`. That it goes is written first, on the condition that
nothing was written that is not known here: a driver that wants to start from the same state either was first, and then
the state is needed, or finds it lost. Only then is the checkpoint removed. Who dies in between leaves a checkpoint that
no record names, and ``hpstage gc`` removes it. Removing takes a tenth of a second on an object store: a few threads do
it, a batch at a time. Before each, the plan is looked at again, for a state that went may be trained and saved anew.
What a running chain comes to, waits for it; and this driver's own chains wait for what is being removed on their way.
That another driver begins, trains and saves a state within the time that its removal takes is left to chance: the state
is then missing where it is loaded next, and is trained once more.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from itertools import islice
from typing import NamedTuple, Protocol

from hpstage.checkpoints.needed import kept_states
from hpstage.checkpoints.retention import Retention, decide
from hpstage.errors import CheckpointError, UsageError
from hpstage.plan.facts import ChainId, StateKey, StateLost, StateRef
from hpstage.plan.log import Log
from hpstage.plan.plan import SearchPlan

logger = logging.getLogger("hpstage")

# What is decided down to, as a share of the budget: so that each decision frees much and there are few.
_DOWN_TO = 0.9
# Checkpoints removed at once, and by how many threads.
_BATCH = 16
_THREADS = 4
# After a decision that could not keep the budget, facts until the next; or as many as there are kept states.
_PATIENCE = 16


class Removes(Protocol):
    """The part of a checkpoint store that is needed here."""

    def delete(self, key: StateKey) -> None: ...


class _Removal(NamedTuple):
    """A checkpoint that a thread is removing."""

    ref: StateRef
    done: Future[None]


class Eviction:
    """Removes checkpoints that are not needed.

    Args:
        checkpoints: where they are removed.
        budget: bytes that all together may take; None: as many as the disk holds.
    """

    def __init__(self, checkpoints: Removes, budget: int | None = None, *, batch: int = _BATCH) -> None:
        self._checkpoints = checkpoints
        self._budget = budget
        self._batch = batch
        self._again = 0  # the position of the journal at which a budget that could not be kept is looked at again
        self._pending: dict[StateKey, StateRef] = {}  # written off and to be removed, in order
        self._removing: dict[StateKey, _Removal] = {}
        self._pool: ThreadPoolExecutor | None = None
        self._excused: set[ChainId] = set()
        self._warned = False
        self.removed = 0  # checkpoints
        self.failed = 0  # that could not be removed

    def keep(self, log: Log) -> None:
        """Evict what is over the budget, and go on removing; returns at once. O(1) but for one decision in as many
        facts as a tenth of the budget holds checkpoints."""
        plan = log.plan
        if self._budget is not None and plan.kept_bytes > self._budget and plan.position >= self._again:
            decision = self.evict(log, int(self._budget * _DOWN_TO), "checkpoints took more than their budget")
            if decision.remaining > self._budget:
                self._again = plan.position + max(_PATIENCE, len(plan.kept))
                self._warn(decision.remaining)
        if self._pending or self._removing:
            self._remove(plan)

    def make_room(self, log: Log, chains: Iterable[ChainId]) -> bool:
        """These chains found the disk full: remove what is not needed, up to half of what is kept.

        Is there more room now than when they failed?
        """
        if self._excused.issuperset(chains):
            return True  # they were under way when room was made
        before = self.removed
        self.evict(log, log.plan.kept_bytes // 2, "the disk is full")
        self.finish(log)
        if self.removed == before:
            return False
        self._excused = set(log.plan.chains)
        logger.warning("The disk is full; %d checkpoints that nothing needs were removed.", self.removed - before)
        return True

    def settle(self, log: Log) -> None:
        """The search is over, and little is needed: keep the budget, and remove what is still to be removed."""
        self._again = 0
        self.keep(log)
        self.finish(log)

    def evict(self, log: Log, budget: int, why: str) -> Retention:
        """Write off what is to go so that the rest takes no more than ``budget`` bytes."""
        plan = log.plan
        while True:
            decision = decide(kept_states(plan), budget)
            refs = {key: plan.kept[key].ref for key in decision.delete}
            if not refs or log.commit([StateLost(ref.node, ref.step, "evicted", why) for ref in refs.values()]):
                self._pending |= refs
                return decision

    def finish(self, log: Log) -> None:
        """Remove all that is to be removed, but for what a running chain will keep again; waits for it."""
        self._remove(log.plan)
        while self._removing:
            wait([removal.done for removal in self._removing.values()])
            self._remove(log.plan)

    def clear_the_way(self, plan: SearchPlan) -> None:
        """Wait until nothing is being removed that a chain under way may save anew."""
        wait([removal.done for removal in self._removing.values() if plan.will_keep(removal.ref)])

    @property
    def waiting(self) -> int:
        """Checkpoints that are written off and not removed yet."""
        return len(self._pending) + len(self._removing)

    def close(self) -> None:
        """End the threads. What was not removed yet stays on the storage, named by no record."""
        if self._pool is not None:
            self._pool.shutdown(wait=True)
            self._pool = None

    def _remove(self, plan: SearchPlan) -> None:
        """Take in what was removed, and hand over the next batch."""
        for key, removal in [(key, removal) for key, removal in self._removing.items() if removal.done.done()]:
            del self._removing[key]
            try:
                removal.done.result()
                self.removed += 1
            except CheckpointError as error:
                self.failed += 1
                logger.warning("A checkpoint could not be removed (%s); `hpstage gc` removes it later.", error)
        if self._removing:
            return
        for key, ref in list(islice(self._pending.items(), 2 * self._batch)):
            if key in plan.kept:
                del self._pending[key]  # it was saved again before it was removed
            elif not plan.will_keep(ref) and len(self._removing) < self._batch:
                del self._pending[key]
                if self._pool is None:
                    self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="hpstage-eviction")
                self._removing[key] = _Removal(ref, self._pool.submit(self._checkpoints.delete, key))

    def _warn(self, remaining: int) -> None:
        if not self._warned:
            self._warned = True
            logger.warning(
                "Checkpoints that are still needed take %s bytes, more than checkpoint_budget (%s); the search goes "
                "on, and removes what is not needed any more.",
                f"{remaining:,}",
                f"{self._budget:,}",
            )


def budget_bytes(size: object, name: str) -> int:
    """The bytes of ``20_000_000_000`` or ``"20 GB"``. Raises :class:`UsageError` that calls it ``name``."""
    found: object = None
    if isinstance(size, int) and not isinstance(size, bool):
        found = size
    elif isinstance(size, str) and size.strip()[:1].isdigit():
        from dask.utils import parse_bytes

        try:
            found = parse_bytes(size)
        except (ValueError, OverflowError):
            found = None
    if not isinstance(found, int) or found < 0:
        raise UsageError(f"{name} is {size!r}; give bytes: a whole number, or a text such as '20 GB' or '500 MiB'")
    return found
