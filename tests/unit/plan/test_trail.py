"""Keys of states along a branch: the same in whatever order they are computed and wherever the branch was cut."""

from __future__ import annotations

import random

import pytest

from hpstage import schedule as s
from hpstage.plan.facts import StateKey
from hpstage.plan.keys import ValueHistory
from hpstage.plan.trail import Trail
from hpstage.schedule import Form

BEGUN = ValueHistory.new(StateKey("w" * 32), ["lr", "momentum"]).changed(0, [("lr", 0.5), ("momentum", 0.9)])
STEPS = 300


def forms(lr: s.Schedule) -> dict[str, Form]:
    named = {"lr": lr, "momentum": s.constant(0.9)}
    return {name: next(iter(schedule.pieces()))[2] for name, schedule in named.items()}


@pytest.mark.parametrize("lr", [s.constant(0.5), s.cosine(0.5, 500), s.step(0.5, 7)], ids=["flat", "curve", "stairs"])
def test_keys_of_states_depend_on_neither_the_order_of_calls_nor_where_the_branch_was_cut(lr: s.Schedule) -> None:
    whole = Trail(BEGUN, 0, forms(lr))
    names = {step: whole.key(step) for step in range(1, STEPS)}
    assert len(set(names.values())) == len(names)
    order = [*names, *names]
    random.Random(1).shuffle(order)
    for cut in (0, 1, 5, 64, 65, 130):
        part = Trail(whole.history_before(cut + 1), cut, forms(lr))
        assert all(part.key(step) == names[step] for step in order if step > cut)
