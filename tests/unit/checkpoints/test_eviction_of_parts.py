"""What states have in common is removed with the last of them, and not while a chain may save another."""

from __future__ import annotations

from hpstage import schedule as s
from hpstage.checkpoints.eviction import Eviction
from hpstage.plan.facts import ChainClosed, ChainId, ChainStarted, DriverId, Part, Span, StateKey, TrialId, WorkerId
from tests.unit.checkpoints.test_eviction import Shelf, kept_line
from tests.unit.searches import trial

PART = Part(StateKey("part-0"), 10)


def test_a_shared_part_of_checkpoints_is_removed_with_the_last_state_that_has_it() -> None:
    log, shelf = kept_line(4, parts=(PART,)), Shelf({PART.key})
    assert log.plan.kept_bytes == 4 + 10
    eviction = Eviction(shelf)
    eviction.evict(log, 11, "evicted")
    eviction.finish(log)
    assert (len(log.plan.kept), log.plan.kept_bytes, shelf.keys) == (1, 11, {PART.key})
    eviction.evict(log, 10, "evicted")
    eviction.finish(log)
    eviction.close()
    assert (log.plan.kept_bytes, shelf.keys, eviction.removed) == (0, set(), 4)


def test_a_shared_part_of_checkpoints_stays_while_a_running_chain_may_save_a_state_with_it() -> None:
    log, shelf = kept_line(2, parts=(PART,)), Shelf({PART.key})
    eviction = Eviction(shelf, 0)
    log.plan.apply(trial(1, {"a": s.constant(2)}, 4))
    begins = Span(log.plan.trials[TrialId("study/1")].node_at(1).id, 0, 4)
    log.plan.apply(ChainStarted(ChainId("d"), DriverId("d"), WorkerId("w"), (begins,), 9.0))
    eviction.enforce(log)
    eviction.finish(log)
    assert (log.plan.kept_bytes, shelf.keys) == (0, {PART.key})
    log.plan.apply(ChainClosed(ChainId("d"), 10.0))
    eviction.enforce(log)
    eviction.finish(log)
    eviction.close()
    assert shelf.keys == set()
