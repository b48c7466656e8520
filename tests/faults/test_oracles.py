"""The checks of the soak see what they are there to see: each is shown something that is amiss."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import msgspec
import optuna
import pytest

import hpstage
from hpstage.checkpoints import FolderCheckpoints
from hpstage.plan.facts import (
    ChainClosed,
    ChainId,
    ChainProlonged,
    ChainStarted,
    DriverId,
    DriverJoined,
    DriverLeft,
    Fact,
    Kept,
    NodeId,
    PlanCreated,
    Span,
    StageFailed,
    StateKey,
    StateLost,
    StateReached,
    TargetAsked,
    TrialId,
    UserFailure,
    WorkerId,
)
from hpstage.store import MemoryJournal, RedisJournal
from hpstage.testing.toys import Tape
from tests.faults import oracles, work
from tests.faults.redis_faults import evicted, in_common
from tests.faults.site import members
from tests.faults.spoiling import PACK_SPOILING, spoil_pack
from tests.redis_server import RedisServer

W = WorkerId("w")


def joined(driver: str) -> Fact:
    return DriverJoined(DriverId(driver), "pool", "host", 1, 0.0)


def left(driver: str, reason: str = "ended") -> Fact:
    return DriverLeft(DriverId(driver), 0.0, reason)  # type: ignore[arg-type]


def started(chain: str, node: int, start: int, stop: int) -> Fact:
    """By the driver that the chain's first letter names."""
    return ChainStarted(ChainId(chain), DriverId(chain[0]), W, (Span(NodeId(node), start, stop),), 0.0)


def reached(
    chain: str, node: int, start: int, step: int, *, digest: str = "", key: str = "", score: float = 1.0
) -> Fact:
    kept = Kept(StateKey(key or f"{node:016x}{step:016x}"), 1, digest) if digest else None
    metrics: dict[str, float | str] = {"score": score}
    return StateReached(ChainId(chain), W, NodeId(node), start, step, 0.0, 0.0, metrics=metrics, kept=kept)


def closed(chain: str) -> Fact:
    return ChainClosed(ChainId(chain), 0.0)


CREATED = PlanCreated(2, StateKey("workload"), {})
BEGUN: list[Fact] = [CREATED, joined("a"), joined("b"), started("a-1", 0, 0, 8), reached("a-1", 0, 0, 4, digest="d")]


def violations(*facts: Fact) -> list[str]:
    return oracles.check_journal([msgspec.json.encode(fact) for fact in (*BEGUN, *facts)])


def test_a_valid_journal_of_two_drivers_has_no_violations() -> None:
    assert not violations(
        started("b-1", 1, 4, 8),
        ChainProlonged(ChainId("a-1"), (Span(NodeId(0), 8, 12), Span(NodeId(2), 12, 16))),
        reached("a-1", 0, 4, 10),
        reached("a-1", 0, 10, 12),
        reached("a-1", 2, 12, 16),
        closed("a-1"),
        DriverJoined(DriverId("a"), "another pool", "host", 1, 0.0),
        left("b", "gone"),
        started("a-2", 1, 4, 8),
        reached("a-2", 1, 4, 8),
        StateLost(NodeId(0), 4, "unreadable", "spoilt"),
        started("a-3", 0, 0, 4),
        reached("a-3", 0, 0, 4, digest="d"),
        left("a"),
    )


@pytest.mark.ci
def test_the_journal_of_a_real_search_has_no_violations() -> None:
    journal = MemoryJournal()
    study = optuna.create_study(direction="maximize", sampler=work.sampler("halving", 3))
    options = {"metric": "score", "steps": work.STEPS, "n_trials": 6, "algorithm": work.algorithm("halving")}
    hpstage.optimize(
        study,
        Tape(),
        work.space(0),
        executor=hpstage.InlineExecutor(),
        store=journal,
        checkpoint_every=4,
        **options,  # type: ignore[arg-type]
    )
    records = journal.read()
    assert not oracles.check_journal(records) and not oracles.check_failures(records)
    assert oracles.Fold(records).counts["StateReached"] > 6


@pytest.mark.parametrize(
    ("facts", "text"),
    [
        ([started("b-1", 0, 6, 9)], r"chain b-1 claims \[6, 9\) of node 0, of which a-1 holds \[4, 8\)"),
        ([started("b-1", 1, 0, 4), ChainProlonged(ChainId("b-1"), (Span(NodeId(0), 4, 6),))], "of which a-1 holds"),
        ([left("a", "gone"), reached("a-1", 0, 4, 8)], "chain a-1, which is over"),
        ([left("a", "gone"), closed("a-1")], "chain a-1, which is over"),
        ([left("a", "gone"), started("a-2", 1, 4, 8)], "driver a, which had left"),
        ([left("a", "gone"), TargetAsked(TrialId("t"), 8, DriverId("a"))], "driver a, which had left"),
        ([left("a", "gone"), left("a", "ended")], "driver a, which had left"),
        ([started("c-1", 1, 4, 8)], "driver c, which never joined"),
        ([reached("a-1", 0, 4, 9)], r"reached \[4, 9\) of node 0; what it had left was \[\[0, 4, 8\]\]"),
        ([reached("a-1", 0, 0, 4)], r"reached \[0, 4\) of node 0"),
        ([reached("a-1", 1, 4, 8)], r"reached \[4, 8\) of node 1"),
        ([closed("a-1"), started("a-2", 0, 0, 4), reached("a-2", 0, 0, 4, digest="e")], "the digest e, and before"),
        ([closed("a-1"), started("a-2", 0, 0, 4), reached("a-2", 0, 0, 4, score=2.0)], "has the metrics"),
        ([started("a-1", 1, 4, 8)], "started twice"),
        ([joined("a")], "joined twice"),
        ([DriverJoined(DriverId("a"), "another pool", "host", 2, 0.0)], "joined twice"),
        ([left("b"), joined("b")], "joined twice"),
        ([StateLost(NodeId(0), 8, "unreadable", "spoilt")], "lost but not kept"),
        ([CREATED], "for the second time"),
    ],
)
def test_the_oracle_reports_an_inconsistent_journal(facts: list[Fact], text: str) -> None:
    assert re.search(text, "\n".join(violations(*facts)))


def test_the_oracle_reports_a_failed_stage() -> None:
    failed = StageFailed(NodeId(0), 4, False, UserFailure("worker lost", ""))
    assert oracles.check_failures([msgspec.json.encode(failed)]) == ["a stage failed: worker lost"]


def test_the_oracle_reports_an_acknowledged_record_that_is_moved_or_missing(tmp_path: Path) -> None:
    records = [b"zero", b"one", b"two"]
    acknowledged = [f"{position} {hashlib.sha256(record).hexdigest()}\n" for position, record in enumerate(records)]
    (tmp_path / "s.acknowledged-1").write_text("".join(acknowledged) + "3 half-of-a-line")
    assert not oracles.check_acknowledged(records, tmp_path)
    assert "record 2" in oracles.check_acknowledged(records[:2], tmp_path)[0]
    assert len(oracles.check_acknowledged([b"zero", b"two", b"one"], tmp_path)) == 2


def test_the_oracle_reports_a_trial_that_differs_from_the_undisturbed_study(tmp_path: Path) -> None:
    trial = [{"a": 1}, "COMPLETE", 2.0, {"4": 1.0}, None]
    found, expected = tmp_path / "found.json", tmp_path / "expected.json"
    expected.write_text(json.dumps([trial, trial]))
    found.write_text(json.dumps([trial, trial]))
    assert not oracles.check_study(found, expected)
    changes: list[tuple[int, object]] = [
        (0, {"a": 2}),
        (1, "PRUNED"),
        (2, 2.0000000000000004),
        (3, {"4": 1.5}),
        (4, "lost"),
    ]
    for place, value in changes:
        changed = [*trial[:place], value, *trial[place + 1 :]]
        found.write_text(json.dumps([trial, changed]))
        assert "trial 1" in oracles.check_study(found, expected)[0]
    found.write_text(json.dumps([trial]))
    assert "1 trials, and undisturbed 2" in oracles.check_study(found, expected)[0]


def test_the_oracle_reports_damaged_missing_swapped_and_half_written_checkpoints(tmp_path: Path) -> None:
    store = FolderCheckpoints(tmp_path, "workload")
    keys = [StateKey(f"{number:032x}") for number in range(4)]
    kept = [store.save(key, {"x": key}, step=4, parent=None) for key in keys]
    facts: list[Fact] = [
        CREATED,
        joined("a"),
        *(
            fact
            for number, one in enumerate(kept)
            for fact in (
                started(f"a-{number}", number, 0, 4),
                reached(f"a-{number}", number, 0, 4, digest=one.digest, key=one.key),
                closed(f"a-{number}"),
            )
        ),
    ]
    records = [msgspec.json.encode(fact) for fact in facts]
    assert not oracles.check_checkpoints(tmp_path, records, set())

    path = Path(store.unpack(keys[0]), "state.json")
    path.write_bytes(path.read_bytes()[:-1])
    assert f"{keys[0]} cannot be loaded" in oracles.check_checkpoints(tmp_path, records, set())[0]
    assert not oracles.check_checkpoints(tmp_path, records, {keys[0]})

    store.delete(keys[1])
    found = oracles.check_checkpoints(tmp_path, records, {keys[0]})
    assert found == [f"checkpoint {keys[1]} is kept, says the journal, and is not there"]

    store.delete(keys[2])
    store.save(keys[2], {"x": "another content"}, step=4, parent=None)
    found = oracles.check_checkpoints(tmp_path, records, {keys[0], keys[1]})
    assert len(found) == 1 and f"{keys[2]} has the digest" in found[0]

    store.delete(keys[2])
    with store._aside() as folder:
        folder.mkdir(parents=True)
        assert oracles.check_checkpoints(tmp_path, records, set(keys[:3])) == [f"{folder} was left behind"]


@pytest.mark.parametrize("how", PACK_SPOILING)
def test_spoiling_a_pack_names_every_entry_that_is_lost(how: str, tmp_path: Path) -> None:
    keys = {StateKey(f"{number:032x}") for number in range(6)}
    for seed in range(20):
        place = tmp_path / str(seed)
        store = FolderCheckpoints(place, "workload")
        for key in sorted(keys):
            store.save(key, {"x": key}, step=4, parent=None)
        [pack] = (place / ".packs").iterdir()
        lost = spoil_pack(pack, how, seed)
        there = set(FolderCheckpoints(place, "workload").keys())
        for key in keys - lost:
            assert key in there and store.load(key) == {"x": key}


def test_the_oracle_reports_a_lease_that_is_still_held(shared_redis: RedisServer) -> None:
    journal = RedisJournal(shared_redis.url, prefix="oracles")
    token = journal.acquire("driver/a", "a", 60.0)
    journal.acquire("driver/b", "b", 1e-6)  # has expired
    assert token is not None
    with shared_redis.client() as client:
        [found] = oracles.check_leases(client, "oracles")
        assert "driver/a is held by a" in found
        journal.release("driver/a", token)
        assert not oracles.check_leases(client, "oracles")
    journal.close()


def test_a_process_that_outlives_its_parent_is_found_by_its_group() -> None:
    waiting = "import sys; sys.stdin.read()"
    script = f"import subprocess, sys; print(subprocess.Popen([sys.executable, '-c', {waiting!r}], stdin=0).pid)"
    read, write = os.pipe()
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=read, stdout=subprocess.PIPE, start_new_session=True
    ) as parent:
        os.close(read)
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
    assert list(members(parent.pid)) == [child]
    os.close(write)  # it ends


def test_the_oracle_finds_evicted_states_whose_record_the_server_has_lost() -> None:
    facts = [*BEGUN, StateLost(NodeId(0), 4, "evicted")]
    records = [msgspec.json.encode(fact) for fact in facts]
    assert evicted(records, len(BEGUN)) == {f"{0:016x}{4:016x}"}
    assert evicted(records, len(facts)) == set()


def test_records_lost_by_the_server_are_found_by_content_and_not_by_count() -> None:
    """A driver may have written on before anybody looked."""
    before = [b"one", b"two", b"three", b"four"]
    assert in_common(before, before[:2]) == 2
    assert in_common(before, [b"one", b"two", b"new", b"newer", b"newest"]) == 2
    assert in_common(before, [*before, b"five"]) == 4
    assert in_common(before, []) == 0
