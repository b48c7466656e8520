"""What is written can be read again: a record that could not be would make a store useless for good."""

from __future__ import annotations

import math
import tomllib
from pathlib import Path
from typing import Any

import msgspec
import numpy
import optuna
import pytest

import hpstage
from hpstage.errors import StoreError
from hpstage.plan.checks import VERSION
from hpstage.plan.facts import DriverId, DriverJoined, NodeId, SearchStarted, StateKey, StateLost
from hpstage.plan.log import Facts, Log, encode, open_existing_plan, open_plan, read_facts
from hpstage.store import MemoryJournal
from hpstage.store.cursor import Cursor
from hpstage.testing.toys import Tape
from tests.records import separated

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


def test_facts_written_together_share_records_and_are_read_like_facts_in_separate_records() -> None:
    journal = MemoryJournal()
    log = Log(plan := open_plan(journal, StateKey("w" * 32), {}), journal, plan.apply)
    joined = [DriverJoined(DriverId(str(n)), "", "here", n, 0.0) for n in range(25)]
    log.note(joined[0])
    assert log.commit(joined[1:])
    assert len(journal) == 1 + 3 == plan.position, "ten facts a record at most"
    for store in (journal, separated(journal)):
        assert list(read_facts(store))[1:] == joined == list(Facts(store.read()))[1:]
        assert open_existing_plan(store).drivers == plan.drivers
    assert Facts(journal.read())[-1] == joined[-1]


class Counting(MemoryJournal):
    """Keeps how many facts were read at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.facts: list[int] = []

    def read_on(self, cursor: Cursor, limit: int | None = None) -> tuple[list[bytes], Cursor]:
        records, behind = super().read_on(cursor, limit)
        self.facts.append(len(Facts(records)))
        return records, behind


def test_a_long_journal_is_read_in_batches_of_at_most_10000_facts() -> None:
    """However many facts share a record."""
    journal = Counting()
    log = Log(plan := open_plan(journal, StateKey("w" * 32), {}), journal, plan.apply)
    assert log.commit([DriverJoined(DriverId(str(n)), "", "here", n, 0.0) for n in range(20_000)])
    journal.facts.clear()
    assert open_existing_plan(journal).drivers == plan.drivers
    assert sum(journal.facts) == 20_001
    assert max(journal.facts) <= 10_000


def test_errors_name_the_record_of_a_contradictory_fact_and_the_kind_of_an_unwritable_fact() -> None:
    journal = MemoryJournal()
    log = Log(plan := open_plan(journal, StateKey("w" * 32), {}), journal, plan.apply)
    with pytest.raises(StoreError, match="SearchStarted cannot be stored"):
        log.commit([DriverJoined(DriverId("d"), "", "here", 1, 0.0), msgspec.structs.replace(STARTED, steps=1.5)])
    assert len(journal) == 1 and not plan.drivers
    lost = StateLost(NodeId(7), 4, "evicted")
    journal.append([encode([STARTED, STARTED]), encode([STARTED, lost])])
    with pytest.raises(StoreError, match="record 2 of the journal contradicts"):
        open_existing_plan(journal)


class Later(msgspec.Struct, frozen=True, tag="SomethingLater"):
    value: int = 3


NEWER = [
    [encode(Later())],
    [encode([STARTED, Later()])],
    [msgspec.json.encode({**msgspec.to_builtins(STARTED), "colour": "red"})],
    [msgspec.json.encode({"type": "TargetAsked", "trial": "study/0", "step": 4})],  # of a trial that is not there
]


@pytest.mark.parametrize("records", NEWER, ids=["record", "joined", "field", "meaning"])
@pytest.mark.parametrize("version", ["99.10.2", hpstage.__version__, ""])
def test_a_store_written_by_a_newer_version_raises_with_the_advice_to_upgrade(
    records: list[bytes], version: str
) -> None:
    journal = MemoryJournal()
    open_plan(journal, StateKey("w" * 32), {})
    joined = (DriverJoined(DriverId(str(n)), "", "here", n, 0.0, version=old) for n, old in enumerate(("9.9", "0.1")))
    journal.append([encode(one) for one in joined] if version.startswith("99") else [])
    journal.append([encode(DriverJoined(DriverId("d"), "", "here", 1, 0.0, version=version)), *records])
    newer = r"written by a newer hpstage \(version 99.10.2; this is .*\): upgrade"
    with pytest.raises(StoreError, match=newer if version.startswith("99") else r"record 2 of the journal"):
        open_existing_plan(journal)


def test_a_search_records_the_version_of_hpstage_in_the_journal() -> None:
    journal = MemoryJournal()
    study = optuna.create_study()
    options: dict[str, Any] = {"executor": hpstage.InlineExecutor(), "store": journal}
    hpstage.optimize(study, Tape(), lambda trial: {"a": 1}, metric="score", steps=2, n_trials=1, **options)
    (joined,) = [fact for fact in read_facts(journal) if isinstance(fact, DriverJoined)]
    assert joined.version == hpstage.__version__


def test_the_version_in_pyproject_equals_the_version_of_the_package() -> None:
    stated = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())
    assert stated["project"]["version"] == hpstage.__version__ == VERSION
