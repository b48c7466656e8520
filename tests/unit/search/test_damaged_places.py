"""Damaged stores, failing disks and spoilt checkpoints: named, with nothing lost and nothing guessed."""

from __future__ import annotations

import json
import resource
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import optuna
import pytest

import hpstage
from hpstage.algos import SuccessiveHalving
from hpstage.checkpoints import CheckpointStore, FolderCheckpoints
from hpstage.errors import CheckpointError, CheckpointFull, StateError, StoreError
from hpstage.plan.facts import Kept, StateKey
from hpstage.store import MemoryJournal, SQLiteJournal
from hpstage.testing.toys import Tape
from tests.unit.search.tapes import GRID, check_values, search, space

pytestmark = [pytest.mark.sampled(4), pytest.mark.usefixtures("own_files")]

optuna.logging.set_verbosity(optuna.logging.ERROR)


# --- stores -----------------------------------------------------------------------------------------------


def rewrite(folder: Path, position: int, record: bytes) -> None:
    with sqlite3.connect(folder / "plan.sqlite") as connection:
        connection.execute("UPDATE log SET record = ? WHERE position = ?", (record, position))
    connection.close()


def test_a_store_of_a_newer_format_is_refused_with_the_remedy(tmp_path):
    search(store=tmp_path)
    journal = SQLiteJournal(tmp_path / "plan.sqlite")
    header = json.loads(journal.read(0, 1)[0])
    journal.close()
    rewrite(tmp_path, 0, json.dumps(header | {"format": 99, "novelty": [1]}).encode())
    with pytest.raises(StoreError, match=r"by a newer hpstage \(format 99,.*upgrade"):
        search(store=tmp_path)


@pytest.mark.ci
@pytest.mark.parametrize("position", [0, 3])
@pytest.mark.parametrize("garbage", [b"", b"\xff\x00", b"{}", b"[1]", b'{"type":"Wish"}', b'{"type":"StateReached"}'])
def test_an_unreadable_record_in_the_journal_raises_a_store_error(tmp_path, position, garbage):
    search(store=tmp_path)
    rewrite(tmp_path, position, garbage)
    with pytest.raises(StoreError, match="choose another store"):
        search(store=tmp_path)


@pytest.mark.ci
@pytest.mark.parametrize(
    "change",
    [{"node": 12345}, {"step": 0}, {"metrics": {"score": "high"}}, {"kept": {"key": "k", "bytes": 1, "digest": "d"}}],
    ids=lambda change: next(iter(change)),
)
def test_a_record_that_contradicts_the_journal_is_named_by_its_position(tmp_path, change):
    search(store=tmp_path)
    journal = SQLiteJournal(tmp_path / "plan.sqlite")
    records = [json.loads(record) for record in journal.read()]
    journal.close()
    position = next(i for i, r in enumerate(records) if isinstance(r, dict) and r["type"] == "StateReached")
    rewrite(tmp_path, position, json.dumps(records[position] | change).encode())
    with pytest.raises(StoreError, match=f"record {position} of the journal"):
        search(store=tmp_path)


def test_a_store_file_that_is_not_a_journal_is_refused_and_left_unchanged(tmp_path):
    (tmp_path / "plan.sqlite").write_bytes(b"my thesis " * 1000)
    with pytest.raises(StoreError, match="not a journal of hpstage"):
        search(store=tmp_path)
    assert (tmp_path / "plan.sqlite").read_bytes() == b"my thesis " * 1000


@pytest.mark.parametrize("option", ["store", "checkpoints"])
def test_a_store_or_checkpoint_folder_that_is_a_file_or_below_a_file_is_refused(tmp_path, option):
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises((StoreError, CheckpointError), match="file"):
            search(**{option: path})


# --- checkpoints ------------------------------------------------------------------------------------------


class Failing(CheckpointStore):
    """A store whose ``fails_at``-th save finds the disk full."""

    def __init__(self, inner: CheckpointStore, fails_at: int) -> None:
        self.inner, self.left = inner, fails_at

    def save(self, key: StateKey, state: object, *, step: int, parent: StateKey | None) -> Kept:
        self.left -= 1
        if self.left == 0:
            raise CheckpointFull("cannot write: the disk is full")
        return self.inner.save(key, state, step=step, parent=parent)

    def load(self, key: StateKey) -> object:
        return self.inner.load(key)

    def manifest(self, key: StateKey) -> Any:
        return self.inner.manifest(key)

    def delete(self, key: StateKey) -> None:
        self.inner.delete(key)

    def keys(self) -> Iterator[StateKey]:
        return self.inner.keys()


@pytest.mark.ci
def test_a_search_on_a_full_disk_finishes_or_can_be_resumed_with_the_same_values(tmp_path):
    whole = search(store=MemoryJournal())
    for fails_at in range(1, 100):
        journal = MemoryJournal()
        failing = Failing(FolderCheckpoints(tmp_path / str(fails_at), "w"), fails_at)
        study = optuna.create_study(direction="maximize", sampler=optuna.samplers.GridSampler(GRID, seed=0))
        options: dict[str, Any] = {"metric": "score", "steps": 8, "n_trials": 8, "checkpoint_every": 3}
        options |= {"store": journal, "checkpoints": failing}
        message = ""
        try:
            hpstage.optimize(study, Tape(), space, executor=hpstage.InlineExecutor(), **options)
        except CheckpointError as error:
            message = str(error)
        if failing.left > 0:
            break
        if not message:
            assert any(b"the disk is full" in record for record in journal.read())
            assert [t.value for t in study.trials] == [t.value for t in whole.study.trials]
            continue
        assert "disk is full" in message
        result = hpstage.optimize(study, Tape(), space, executor=hpstage.InlineExecutor(), **options)
        assert [t.value for t in result.study.trials] == [t.value for t in whole.study.trials]
        assert result.plan.totals.steps_trained <= whole.plan.totals.steps_trained + 3
    assert fails_at > 8


@pytest.mark.skipif(sys.platform != "linux", reason="limits the size of files as Linux does")
def test_a_refused_checkpoint_write_raises_a_checkpoint_error_and_leaves_no_temporary_file(tmp_path):
    script = f"""
import resource, signal, sys
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
from hpstage.checkpoints import FolderCheckpoints
from hpstage.errors import StateError, CheckpointError
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, {resource.RLIM_INFINITY}))
store = FolderCheckpoints({str(tmp_path)!r}, "w")
store.save("small", b"x" * 1000, step=1, parent=None)
try:
    store.save("large", b"x" * 1_000_000, step=2, parent="small")
except CheckpointError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "large" in done.stdout
    assert list(FolderCheckpoints(tmp_path, "w").keys()) == ["small"]
    assert not any((tmp_path / ".tmp").glob("*"))


def spoil_by_truncating(folder: Path) -> None:
    for file in folder.iterdir():
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def spoil_by_flipping_a_bit(folder: Path) -> None:
    for file in folder.iterdir():
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 4
        file.write_bytes(content)


def spoil_by_deleting(folder: Path) -> None:
    for file in folder.iterdir():
        file.unlink()


@pytest.mark.ci
@pytest.mark.parametrize("spoil", [spoil_by_truncating, spoil_by_flipping_a_bit, spoil_by_deleting])
@pytest.mark.parametrize("which", [slice(None), slice(0, None, 2)], ids=["all", "half"])
@pytest.mark.ci_one_in(2)
def test_states_of_damaged_checkpoints_are_trained_again_to_the_same_values(tmp_path, spoil, which):
    search(store=tmp_path, algorithm=SuccessiveHalving(2, 2))
    folders = sorted(path.parent for path in (tmp_path / "checkpoints").glob("*/*/manifest.json"))
    assert len(folders) > 5
    for folder in folders[which]:
        spoil(folder)
    # All trials are trained to the end now: those that halving had stopped continue from damaged states.
    result = search(store=tmp_path)
    check_values(result)
    again = search(store=tmp_path)
    assert again.savings.steps_trained == 0


class Secretive(Tape):
    def state_dict(self) -> object:
        return {"inner": [super().state_dict(), lambda: None]}


def test_a_state_that_cannot_be_saved_ends_the_search_with_the_path_of_the_offending_value():
    with pytest.raises(StateError, match=r"state\['inner'\]\[1\] is a function"):
        search(Secretive(), n_trials=1)
