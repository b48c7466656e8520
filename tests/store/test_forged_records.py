"""A journal in which somebody else has written is read as far as it makes sense, or refused with an error of ours."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import optuna
import pytest
import redis

import hpstage
from hpstage import schedule as s
from hpstage.accounting.tables import events, stages, states, trials, workers
from hpstage.algos import SuccessiveHalving
from hpstage.cli.status import status_of
from hpstage.errors import HpstageError, InternalError, StoreError
from hpstage.plan.log import open_existing_plan, read_facts
from hpstage.report import open_book
from hpstage.store import Journal, MemoryJournal, RedisJournal, SQLiteJournal
from hpstage.testing.toys import Tape
from tests.redis_server import RedisServer

pytestmark = pytest.mark.sampled(8)

VALUES: list[object] = [
    None, True, -1, 0, 1, 2**53, 2**63 - 1, 2**64, 10**30, 1e308, "", "x", "../../etc/passwd", "\x00", "\ud800",
    "\x1b[31m", "9" * 400, [], {}, [[]], {"a": 1}, [None], "nan", 10**12,
]  # fmt: skip


def search(journal: Journal, n_trials: int) -> None:
    def space(trial: optuna.Trial) -> dict[str, object]:
        drop = trial.suggest_categorical("drop", [2, 3])
        return {"a": s.multistep(trial.suggest_categorical("a", [1.0, 2.0]), milestones=[drop], gamma=0.5), "b": 1.0}

    hpstage.optimize(
        optuna.create_study(direction="maximize", study_name="forged", sampler=optuna.samplers.RandomSampler(seed=1)),
        Tape(), space, metric="score", steps=8, n_trials=n_trials, executor=hpstage.InlineExecutor(), store=journal,
        algorithm=SuccessiveHalving(min_steps=2, reduction_factor=2),
    )  # fmt: skip


@cache
def records() -> list[bytes]:
    journal = MemoryJournal()
    search(journal, 4)
    return journal.read()


def look(journal: Journal) -> None:
    """As all readers do."""
    open_existing_plan(journal)
    book = open_book(journal)
    for table in (trials, stages, states, workers):
        table(book)
    events(list(read_facts(journal)))
    status_of(book.account, journal)


def changed(drawn: random.Random, value: Any) -> Any:
    """Another value in place of this one, or of one in it."""
    if isinstance(value, dict) and value and drawn.random() < 0.85:
        name = drawn.choice(list(value))
        if drawn.random() < 0.1:
            return {other: its for other, its in value.items() if other != name}
        return {**value, name: changed(drawn, value[name])}
    if isinstance(value, list) and value and drawn.random() < 0.8:
        at = drawn.randrange(len(value))
        return [*value[:at], changed(drawn, value[at]), *value[at + drawn.choice([0, 1, 1]) :]]
    if isinstance(value, int | float) and drawn.random() < 0.5:
        return drawn.choice([value + 1, value - 1, -value, value * 10**9, 2**53 + value, 0])
    return drawn.choice(VALUES)


def forged(seed: int) -> list[bytes]:
    """The records, with one that is changed in place of it or somewhere else."""
    drawn, found = random.Random(seed), list(records())
    at = drawn.randrange(len(found))
    record = json.dumps(changed(drawn, json.loads(found[at]))).encode()
    if drawn.random() < 0.5:
        found[at] = record
    else:
        found.insert(drawn.randrange(1, len(found) + 1), record)
    return found


@pytest.mark.ci
@pytest.mark.parametrize("part", range(8))
@pytest.mark.parametrize("read", [look, lambda journal: search(journal, 5)], ids=["look", "search"])
@pytest.mark.ci_one_in(2)
def test_a_journal_with_a_forged_record_is_read_or_raises_an_hpstage_error(
    read: Callable[[Journal], None], part: int
) -> None:
    for seed in range(part * 10, part * 10 + 10):
        journal = MemoryJournal()
        journal.append(forged(seed))
        with suppress(HpstageError):
            try:
                read(journal)
            except InternalError as error:
                raise AssertionError(f"seed {seed}") from error


GARBAGE = [
    b"", b"\x00", b"\xff\xfe", b"null", b"[]", b"{}", b'"PlanCreated"', b'{"type": "PlanCreated"}', b"[" * 100_000,
    b'{"type": "builtins.eval"}', b"\x80\x04cos\nsystem\n(S'touch injected'\ntR.", b"1" * 10**6,
]  # fmt: skip


@pytest.mark.parametrize("which", range(len(GARBAGE)))
def test_an_unreadable_record_in_sqlite_is_named_by_its_number(tmp_path: Path, which: int) -> None:
    journal = SQLiteJournal(tmp_path / "plan.sqlite")
    journal.append([*records(), GARBAGE[which]])
    for read in (look, lambda journal: search(journal, 5)):
        with pytest.raises(StoreError, match=rf"record {len(records())} of the journal cannot be read"):
            read(journal)
    journal.close()


@pytest.mark.redis
def test_an_unreadable_record_on_redis_is_named_by_its_number(shared_redis: RedisServer) -> None:
    for number, garbage in enumerate(GARBAGE):
        journal = RedisJournal(shared_redis.url, prefix=f"forged-{number}")
        journal.append([*records(), garbage])
        with pytest.raises(StoreError, match=rf"record {len(records())} of the journal cannot be read"):
            look(journal)
        journal.close()


@pytest.mark.redis
def test_an_entry_of_another_program_in_the_redis_stream_is_refused(shared_redis: RedisServer) -> None:
    journal = RedisJournal(shared_redis.url, prefix="entry")
    journal.append(records())
    with redis.Redis.from_url(shared_redis.url) as client:
        [name] = [key for key in client.scan_iter("*entry*") if client.type(key) == b"stream"]
        client.xadd(name, {"anything": "else"})
    with pytest.raises(StoreError):
        look(journal)
    journal.close()
