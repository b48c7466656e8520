"""Folding pauses the garbage collector, and leaves it as it was."""

from __future__ import annotations

import gc

import pytest

from hpstage.errors import StoreError
from hpstage.plan.facts import Fact, StateKey, TargetAsked, TrialAdded, TrialId
from hpstage.plan.log import encode, fold_all, open_plan
from hpstage.schedule import constant
from hpstage.store.memory import MemoryJournal


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("damaged", [True, False])
def test_the_garbage_collector_is_paused_while_a_journal_is_read_and_then_restored(
    enabled: bool, damaged: bool
) -> None:
    journal = MemoryJournal()
    plan = open_plan(journal, StateKey("0" * 32), {})
    facts = [TrialAdded(TrialId("t"), {"a": constant(1)}, 8), TargetAsked(TrialId("no" if damaged else "t"), 8)]
    journal.append([encode(fact) for fact in facts])
    seen: list[bool] = []

    def fold(fact: Fact) -> None:
        seen.append(gc.isenabled())
        plan.apply(fact)

    before = gc.isenabled()
    (gc.enable if enabled else gc.disable)()
    try:
        if damaged:
            with pytest.raises(StoreError, match="record 2"):
                fold_all(journal, plan, fold)
        else:
            fold_all(journal, plan, fold)
        assert gc.isenabled() is enabled
    finally:
        (gc.enable if before else gc.disable)()
    assert seen == [False] * (1 if damaged else 2)
