"""What is written can be read again: a record that could not be would make a store useless for good."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import numpy
import pytest

from hpstage.errors import StoreError
from hpstage.plan.facts import SearchStarted, StateKey
from hpstage.plan.log import Log, open_existing_plan, open_plan
from hpstage.store import MemoryJournal

STARTED = SearchStarted("study", "FullTraining()", ("loss",), 4, 3, "RandomSampler", 0.0)


@pytest.mark.parametrize(
    "change",
    [
        *({"extends": wrong} for wrong in (None, 0, "", [], {})),
        *({"steps": wrong} for wrong in (None, 1.5, numpy.int64(4), math.nan)),
        {"study": "\udcff"},
        {"metric": "loss"},
        {"at": math.nan},
    ],
    ids=repr,
)
def test_a_record_that_could_not_be_read_again_is_not_written(change: dict[str, Any]) -> None:
    journal = MemoryJournal()
    log = Log(plan := open_plan(journal, StateKey("w" * 32), {}), journal, plan.apply)
    before = journal.read()
    with pytest.raises(StoreError, match="SearchStarted cannot be stored, since it could not be read again"):
        log.commit([msgspec.structs.replace(STARTED, **change)])
    assert journal.read() == before
    assert log.commit([STARTED])
    assert open_existing_plan(journal).searches.keys() == {"study"}
