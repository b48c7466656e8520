"""Small states and logs in packs: saved by several processes, deleted, damaged, compacted and killed in any order."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from hpstage.checkpoints import FolderCheckpoints, packs
from hpstage.checkpoints.packed_place import PackedPlace
from hpstage.checkpoints.packs import Packs
from hpstage.checkpoints.processes import host_digest
from hpstage.checkpoints.stage_log import StageLog
from hpstage.checkpoints.state_tree import digest
from hpstage.errors import CheckpointCorrupt, CheckpointError, CheckpointFull, CheckpointMissing, CheckpointUnreachable
from hpstage.plan.facts import StateKey

KEYS = [StateKey(f"{number:032x}") for number in range(8)]
LIMITS = {"_FULL": 6_000, "_SLACK": 500, "_SLIGHT": 3_000, "_MANY": 2}


def state_of(key: StateKey) -> dict[str, object]:
    return {"own": np.full(int(key, 16) * 20, 1.0), "magic": packs._MAGIC * 3, "key": key}


def ended() -> int:
    """Return the id of a process that has ended."""
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    return gone.pid


def files_in(path: Path) -> list[Path]:
    return sorted(file for file in path.rglob("*") if file.is_file())


@pytest.fixture
def _tight(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in LIMITS.items():
        monkeypatch.setattr(packs, name, value)


class Stores(RuleBasedStateMachine):
    """What :class:`FolderCheckpoints` do with packs, against a dict that keeps everything."""

    gone = 0

    def __init__(self) -> None:
        super().__init__()
        self.path = Path(tempfile.mkdtemp())
        self.stores = [FolderCheckpoints(self.path, "w") for _ in range(3)]
        self.kept: set[StateKey] = set()
        self.logs: dict[StateKey, StageLog] = {}
        Stores.gone = Stores.gone or ended()

    def teardown(self) -> None:
        shutil.rmtree(self.path)

    @rule(store=st.integers(0, 2), key=st.sampled_from(KEYS))
    def save(self, store: int, key: StateKey) -> None:
        kept = self.stores[store].save(key, state_of(key), step=0, parent=None)
        assert kept.digest == digest(state_of(key))
        self.kept.add(key)

    @rule(store=st.integers(0, 2), key=st.sampled_from(KEYS), size=st.integers(0, 300))
    def save_log(self, store: int, key: StateKey, size: int) -> None:
        self.logs[key] = StageLog(0, 1, output="x" * size)
        self.stores[store].save_log(key, self.logs[key])

    @rule(store=st.integers(0, 2), key=st.sampled_from(KEYS))
    def delete(self, store: int, key: StateKey) -> None:
        self.stores[store].delete(key)
        self.kept.discard(key)

    @rule(store=st.integers(0, 2), key=st.sampled_from(KEYS))
    def delete_log(self, store: int, key: StateKey) -> None:
        self.stores[store].delete_log(key)
        self.logs.pop(key, None)

    @rule(store=st.integers(0, 2), torn=st.integers(0, 200))
    def die(self, store: int, torn: int) -> None:
        """A process ends while it writes; another one takes its place."""
        own = self.stores[store]._packs._own
        self.stores[store] = FolderCheckpoints(self.path, "w", sweep=False)
        if own is not None:
            file = self.path / ".packs" / own
            with file.open("ab") as opened:
                opened.write(packs._encoded("f" * 32, b"y" * 200)[:torn])
            file.rename(file.with_name(f"{host_digest()}-{self.gone}-{own.rpartition('-')[2]}"))

    @rule(store=st.integers(0, 2))
    def sweep(self, store: int) -> None:
        assert self.stores[store].sweep() == 0

    @precondition(lambda self: self.kept)
    @rule(store=st.integers(0, 2), data=st.data())
    def unpack(self, store: int, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.kept)))
        folder = Path(self.stores[store].unpack(key))
        assert {file.name for file in folder.iterdir()} == {"manifest.json", "state.json", "state.safetensors"}

    @precondition(lambda self: self.kept)
    @rule(store=st.integers(0, 2), data=st.data())
    def damage(self, store: int, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.kept)))
        found = Packs(self.path / ".packs")
        found._refresh()
        for pack, offset in found._found(key):
            content = bytearray(pack.path.read_bytes())
            content[offset + data.draw(st.integers(0, pack.sizes[offset] - 1))] ^= 4
            pack.path.write_bytes(content)
            with suppress(CheckpointCorrupt, CheckpointMissing):
                assert digest(self.stores[store].load(key)) == digest(state_of(key))
        self.save(store, key)  # trained again

    @invariant()
    def all_is_there(self) -> None:
        for number, key in enumerate(sorted(self.kept)):
            assert digest(self.stores[number % 3].load(key)) == digest(state_of(key))
        for number, (key, log) in enumerate(self.logs.items()):
            assert self.stores[number % 3].load_log(key) == log
        for key in KEYS:
            if key not in self.kept:
                with pytest.raises(CheckpointMissing):
                    self.stores[0].load(key)
        assert list(self.stores[1].keys()) == sorted(self.kept)
        assert self.stores[2].sizes().keys() == self.kept
        assert self.stores[0].logs().keys() == self.logs.keys()
        usage = self.stores[1].usage()
        logs = sum(self.stores[1].logs().values())
        assert usage.bytes + usage.unpublished + logs == sum(file.stat().st_size for file in files_in(self.path))


@pytest.mark.ci
@pytest.mark.usefixtures("_tight")
class TestStores(Stores.TestCase):  # type: ignore[misc,name-defined]
    settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


class _Killed:
    """Lets a process be killed in a call of the system, before it or in the middle of a write."""

    def __init__(self, at: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.left = at
        for name in ("open", "write", "pwrite", "ftruncate", "close", "unlink", "mkdir", "rename"):
            monkeypatch.setattr(os, name, self.counted(name, getattr(os, name)))

    def counted(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def counting(*arguments: Any, **options: Any) -> Any:
            self.left -= 1
            if self.left < 0:
                if name == "write":
                    call(arguments[0], arguments[1][: len(arguments[1]) // 2])
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*arguments, **options)

        return counting


def _work(path: Path, log: int) -> None:
    """Save and delete, and write to ``log`` what was done."""
    store = FolderCheckpoints(path, "w")
    for number, key in enumerate(KEYS):
        store.save(key, state_of(key), step=0, parent=None)
        os.write(log, b"+%d" % number)
        if number % 3:
            os.write(log, b"?%d" % number)
            store.delete(key)
            os.write(log, b"-%d" % number)
    store.sweep()
    os.write(log, b"!0")


@pytest.mark.ci
@pytest.mark.usefixtures("_tight")
@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are forked")
def test_a_process_killed_in_any_system_call_loses_no_acknowledged_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for at in range(1_000):
        path = tmp_path / str(at)
        reading, writing = os.pipe()
        child = os.fork()
        if not child:
            with suppress(BaseException):
                _Killed(at, monkeypatch)
                _work(path, writing)
            os._exit(0)
        os.close(writing)
        os.waitpid(child, 0)
        with open(reading, "rb") as pipe:
            done = pipe.read().decode()
        last = {number: done[done.rindex(str(number)) - 1] for number in range(8) if str(number) in done}
        for store in (FolderCheckpoints(path, "w", sweep=False), FolderCheckpoints(path, "w")):
            for number, key in enumerate(KEYS):
                if last.get(number) in ("+", "!"):
                    assert digest(store.load(key)) == digest(state_of(key)), (at, done)
                if last.get(number) == "-":
                    assert key not in store.sizes(), (at, done)
        for key in store.sizes():
            store.verify(key)
            store.delete(key)
        store.sweep()
        assert store.usage().bytes == store.usage().unpublished == 0
        if "!" in done:
            assert at > 60
            return
    raise AssertionError("the work has no end")


def _churn(path: Path, rounds: int) -> None:
    for name, value in LIMITS.items():
        setattr(packs, name, value)
    store = FolderCheckpoints(path, "w")
    for number in range(rounds):
        key = KEYS[1 + number % 7]
        store.save(key, state_of(key), step=0, parent=None)
        store.delete(key)


def test_readers_can_load_a_state_while_its_pack_is_compacted(tmp_path: Path) -> None:
    store = FolderCheckpoints(tmp_path, "w")
    with get_context("forkserver").Pool(1) as pool:
        pool.apply(_saved, (tmp_path,))
        seen: set[Path | None] = set()
        churning = pool.apply_async(_churn, (tmp_path, 400))
        while not churning.ready():
            assert digest(FolderCheckpoints(tmp_path, "w", sweep=False).load(KEYS[0])) == digest(state_of(KEYS[0]))
            assert digest(store.load(KEYS[0])) == digest(state_of(KEYS[0]))
            seen.add(store._packs.path_of(KEYS[0]))
        churning.get()
    assert list(store.keys()) == [KEYS[0]]


def _saved(path: Path) -> None:
    FolderCheckpoints(path, "w").save(KEYS[0], state_of(KEYS[0]), step=0, parent=None)


@pytest.mark.ci
def test_a_thousand_small_states_and_logs_are_stored_in_at_most_three_files(tmp_path: Path) -> None:
    stores = [FolderCheckpoints(tmp_path, "w") for _ in range(3)]
    for number in range(1_000):
        key = StateKey(f"{number:032x}")
        stores[number % 3].save(key, {"w": np.full(100, number), "n": number}, step=1, parent=None)
        stores[number % 3].save_log(key, StageLog(0, 1, output=str(number)))
    assert len(files_in(tmp_path)) <= 3
    reader = FolderCheckpoints(tmp_path, "w")
    assert len(list(reader.keys())) == len(reader.logs()) == 1_000
    assert reader.load(StateKey(f"{999:032x}"))["n"] == 999  # type: ignore[index]
    for key in list(reader.keys()):
        stores[0].delete(key)
        stores[1].delete_log(key)
    for store in stores:
        store.sweep()
    assert files_in(tmp_path) == []


def test_the_space_of_states_deleted_from_a_live_workers_pack_is_reclaimed(tmp_path: Path) -> None:
    worker, driver = (FolderCheckpoints(tmp_path, "w") for _ in range(2))
    for number in range(1_000):
        key = StateKey(f"{number:032x}")
        worker.save(key, {"w": np.full(100, number)}, step=1, parent=None)
        if number > 9:
            driver.delete(StateKey(f"{number - 10:032x}"))
    assert len(list(worker.keys())) == 10
    usage = driver.usage()
    assert usage.bytes + usage.unpublished < 3 * packs._SLACK


def waste(store: FolderCheckpoints) -> None:
    for _ in range(5):
        store.save(KEYS[7], state_of(KEYS[7]), step=1, parent=None)
        store.delete(KEYS[7])


def test_a_live_writer_loses_no_states_if_its_pack_is_compacted_during_a_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer, sweeper = (FolderCheckpoints(tmp_path, "w") for _ in range(2))
    writer.save(KEYS[3], state_of(KEYS[3]), step=1, parent=None)
    waste(writer)
    write, unlink = os.write, Path.unlink

    def late(file: int, content: bytes) -> int:  # the pack is removed just before the write
        monkeypatch.undo()
        sweeper._packs.compact(lambda path: True)
        return write(file, content)

    def early(path: Path, missing_ok: bool = False) -> None:  # the write comes after the copies
        if path.parent.name == ".packs":
            monkeypatch.undo()
            writer.save(KEYS[5], state_of(KEYS[5]), step=1, parent=None)
        unlink(path, missing_ok=missing_ok)

    monkeypatch.setattr(os, "write", late)
    writer.save(KEYS[4], state_of(KEYS[4]), step=1, parent=None)
    waste(writer)
    removed = [*(tmp_path / ".packs").iterdir()]
    monkeypatch.setattr(Path, "unlink", early)
    sweeper._packs.compact(lambda path: True)
    assert not any(path.exists() for path in removed if path.name != sweeper._packs._own)
    assert list(FolderCheckpoints(tmp_path, "w").keys()) == KEYS[3:6]
    for key in KEYS[3:6]:
        assert digest(writer.load(key)) == digest(sweeper.load(key)) == digest(state_of(key))


def test_a_pack_entry_with_a_file_outside_the_checkpoint_is_refused(tmp_path: Path) -> None:
    store = FolderCheckpoints(tmp_path / "checkpoints", "w")
    store.save(KEYS[1], state_of(KEYS[1]), step=1, parent=None)
    entry = PackedPlace.of("", store._packs.read(KEYS[1]) or b"")
    entry.write("../../../outside", b"x")
    store._packs.write(KEYS[1], entry.entry())
    for refused in (store.load, store.unpack):
        with pytest.raises(CheckpointCorrupt, match="files that do not belong to a checkpoint"):
            refused(KEYS[1])
    store.save(KEYS[1], state_of(KEYS[1]), step=1, parent=None)
    assert digest(store.load(KEYS[1])) == digest(state_of(KEYS[1]))


def test_a_pack_is_unchanged_after_a_failed_save_on_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = FolderCheckpoints(tmp_path, "w")
    store.save(KEYS[1], state_of(KEYS[1]), step=1, parent=None)
    [pack] = files_in(tmp_path)
    before, write = pack.read_bytes(), os.write

    def fails(file: int, content: memoryview) -> int:
        if len(content) > 300:
            return write(file, content[:300])
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "write", fails)
        with pytest.raises(CheckpointFull):
            store.save(KEYS[2], state_of(KEYS[2]), step=1, parent=None)
    assert pack.read_bytes() == before
    store.save(KEYS[2], state_of(KEYS[2]), step=1, parent=None)
    assert list(store.keys()) == KEYS[1:3]


@pytest.mark.parametrize("grown", [False, True])
def test_a_pack_replaced_by_an_earlier_copy_is_read_again(tmp_path: Path, grown: bool) -> None:
    writer, reader, deleter = (FolderCheckpoints(tmp_path, "w") for _ in range(3))
    writer.save(KEYS[1], state_of(KEYS[1]), step=1, parent=None)
    [pack] = files_in(tmp_path)
    before = pack.read_bytes()
    for key in KEYS[2:6]:
        writer.save(key, state_of(key), step=1, parent=None)
    for store in (reader, deleter):
        assert list(store.keys()) == KEYS[1:6]
    pack.write_bytes(before)
    again = [*reversed(KEYS[2:6])][: 4 if grown else 2]
    for key in again:
        writer.save(key, state_of(key), step=1, parent=None)
    for store in (writer, reader):
        for key in (KEYS[1], *again):
            assert digest(store.load(key)) == digest(state_of(key))
    deleter.delete(KEYS[4])
    assert list(FolderCheckpoints(tmp_path, "w").keys()) == sorted({KEYS[1], *again} - {KEYS[4]})


def test_packs_in_a_read_only_folder_can_be_read_but_not_changed(
    open_folder: Path, unprivileged: Callable[[], Any]
) -> None:
    store = FolderCheckpoints(open_folder / "checkpoints", "w")
    store.save(KEYS[1], state_of(KEYS[1]), step=1, parent=None)
    for path in (open_folder, *open_folder.rglob("*")):
        path.chmod(0o555 if path.is_dir() else 0o444)
    with unprivileged():
        reader = FolderCheckpoints(store.path, "w")
        assert digest(reader.load(KEYS[1])) == digest(state_of(KEYS[1]))
        for refused in (reader.delete, reader.unpack):
            with pytest.raises(CheckpointUnreachable, match="Permission denied"):
                refused(KEYS[1])
    assert list(store.keys()) == [KEYS[1]]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are forked")
def test_a_forked_process_writes_to_a_pack_of_its_own(tmp_path: Path) -> None:
    store = FolderCheckpoints(tmp_path, "w")
    store.save(KEYS[1], state_of(KEYS[1]), step=1, parent=None)
    with store._packs._lock:  # held by another thread
        child = os.fork()
    if not child:
        with suppress(CheckpointError):
            store.save(KEYS[2], state_of(KEYS[2]), step=1, parent=None)
        os._exit(0)
    os.waitpid(child, 0)
    assert len(files_in(tmp_path)) == 2 and list(store.keys()) == KEYS[1:3]


def test_a_state_saved_after_its_pack_was_truncated_can_be_loaded(tmp_path: Path) -> None:
    """The reader would take the next entry for the rest of the torn one, once that is long enough."""
    store = FolderCheckpoints(tmp_path, "w")
    first, second, third = (StateKey(f"{number:032x}") for number in range(3))
    for key in (first, second):
        store.save(key, state_of(key), step=1, parent=None)
    [pack] = (tmp_path / ".packs").iterdir()
    os.truncate(pack, pack.stat().st_size - 40)
    store.save(third, {"x": bytes(100)}, step=1, parent=None)
    found = FolderCheckpoints(tmp_path, "w")
    assert set(found.keys()) == {first, third} and found.load(third) == {"x": bytes(100)}
