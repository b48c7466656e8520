"""Places of checkpoints that are not there, are others, or refuse: never taken for a loss, never written to."""

from __future__ import annotations

import errno
import os
import pickle
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from hpstage.checkpoints import CheckpointStore, FolderCheckpoints, UrlCheckpoints
from hpstage.checkpoints.formatted import kind_of
from hpstage.checkpoints.processes import host_digest
from hpstage.errors import CheckpointError, CheckpointFull, CheckpointMissing, CheckpointUnreachable
from hpstage.plan.facts import StateKey
from tests.store.url_checkpoints import memory

KEY = StateKey("0" * 31 + "a")
OTHER = StateKey("0" * 31 + "b")
CLOCK = Path(__file__).parents[1] / "faults" / "clock"


def copied(store: CheckpointStore) -> CheckpointStore:
    """As it comes to a worker."""
    copy: CheckpointStore = pickle.loads(pickle.dumps(store))  # noqa: S301  # made in the line itself
    return copy


@pytest.fixture
def mounted(tmp_path: Path) -> Path:
    """A mount point with a place mounted on it; a link, so that it can be unmounted and mounted."""
    (tmp_path / "disk").mkdir()
    (tmp_path / "empty").mkdir()
    (tmp_path / "mount").symlink_to("disk")
    return tmp_path / "mount"


def mount(point: Path, what: str | None) -> None:
    point.unlink()
    if what is not None:
        point.symlink_to(what)


@pytest.mark.parametrize("below", ["empty", None])
def test_a_missing_mount_raises_checkpoint_unreachable_and_nothing_is_written_below_it(
    mounted: Path, below: str | None
) -> None:
    driver = FolderCheckpoints(mounted / "checkpoints", "w")
    driver.identity()
    driver.save(KEY, {"a": 1}, step=1, parent=None)
    worker = copied(driver)
    mount(mounted, below)
    for call in (
        lambda: worker.load(KEY),
        lambda: worker.manifest(KEY),
        lambda: worker.verify(KEY),
        lambda: worker.save(OTHER, {"a": 2}, step=2, parent=None),
        worker.prove,
        worker.identity,
    ):
        with pytest.raises(CheckpointUnreachable, match=r"is not the place of the checkpoints here.*mounted"):
            call()
    assert os.listdir(mounted.parent / "empty") == [] and mounted.exists() == (below is not None)
    mount(mounted, "disk") if below else mounted.symlink_to("disk")
    assert worker.load(KEY) == {"a": 1}
    worker.save(OTHER, {"a": 2}, step=2, parent=None)
    with pytest.raises(CheckpointMissing):
        worker.load(StateKey("f" * 32))


def test_a_folder_that_is_not_the_drivers_checkpoint_folder_is_refused_under_the_same_path(mounted: Path) -> None:
    driver = FolderCheckpoints(mounted, "w")
    FolderCheckpoints(mounted.parent / "empty", "w").identity()
    driver.identity()
    mount(mounted, "empty")
    with pytest.raises(CheckpointUnreachable, match=f"{mounted} is a different place here than for the driver"):
        copied(driver).save(KEY, {"a": 1}, step=1, parent=None)
    assert not (mounted / KEY[:2]).exists()


def test_a_url_that_leads_to_other_checkpoints_than_the_drivers_is_refused(store: UrlCheckpoints) -> None:
    name = store.identity()
    assert name and UrlCheckpoints(store.url, "another").identity() == name == copied(store).identity()
    worker = copied(store)
    root = store.url.removeprefix("memory:/")
    memory.rm(root, recursive=True)
    for call in (worker.prove, lambda: worker.load(KEY), lambda: worker.manifest(KEY)):
        with pytest.raises(CheckpointUnreachable, match="is not the place of the checkpoints here"):
            call()
    assert UrlCheckpoints(store.url, "w").identity() != name
    with pytest.raises(CheckpointUnreachable, match="is a different place here"):
        worker.prove()


def test_a_worker_verifies_the_checkpoint_folder_by_opening_one_file(tmp_path: Path) -> None:
    driver = FolderCheckpoints(tmp_path, "w")
    driver.identity()
    script = f"""
import pickle, sys
worker = pickle.loads({pickle.dumps(driver)!r})
opened = []
sys.addaudithook(lambda name, arguments: opened.append(arguments[0]) if name in ("open", "os.listdir") else None)
worker.prove()
assert len([path for path in opened if not isinstance(path, int)]) == 1, opened
"""
    subprocess.run([sys.executable, "-c", script], check=True)


# --- what an error means ----------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_errors_of_a_full_disk_or_quota_are_classified_as_full(number: int) -> None:
    assert kind_of(OSError(number, "x")) is CheckpointFull


@pytest.mark.parametrize(
    "error",
    [
        *(OSError(number, "x") for number in (errno.EACCES, errno.EPERM, errno.EROFS, errno.EIO, errno.ESTALE)),
        *(OSError(number, "x") for number in (errno.ENOTCONN, errno.ETIMEDOUT, errno.EHOSTDOWN, errno.EFBIG)),
        TimeoutError("read timed out"),
        ConnectionResetError("reset"),
        PermissionError("Access Denied"),
        OSError("The provided token has expired"),
        OSError("Quota exceeded for quota metric 'Read requests' per minute"),
    ],
)
def test_other_storage_errors_than_a_full_disk_are_classified_as_unreachable(error: OSError) -> None:
    assert kind_of(error, str(error)) is CheckpointUnreachable


@pytest.mark.parametrize(
    "text",
    [
        "An error occurred (XMinioStorageFull) when calling the PutObject operation: Storage is full",
        "XMinioAdminBucketQuotaExceeded: Bucket quota exceeded",
        "An error occurred (QuotaExceeded) when calling the CreateMultipartUpload operation: None",
        "507 Insufficient Storage",
        "No space left on device",
    ],
)
def test_messages_of_full_object_stores_are_classified_as_full(text: str) -> None:
    assert kind_of(OSError(text), text) is CheckpointFull


def test_checkpoints_in_a_folder_without_permission_are_unreachable_and_not_lost(
    open_folder: Path, unprivileged: Callable[[], AbstractContextManager[None]]
) -> None:
    store = FolderCheckpoints(open_folder / "checkpoints", "w")
    store.save(KEY, {"a": 1}, step=1, parent=None)
    store.path.chmod(0)
    with unprivileged():
        for call in (
            lambda: store.load(KEY),
            lambda: store.verify(KEY),
            lambda: store.save(OTHER, {"a": 2}, step=2, parent=None),
            lambda: store.delete(KEY),
            store.identity,
            store.check,
            store.sweep,
            store.usage,
            lambda: list(store.keys()),
        ):
            with pytest.raises(CheckpointUnreachable, match="Permission denied"):
                call()
        FolderCheckpoints(store.path, "w")
    store.path.chmod(0o755)
    assert store.load(KEY) == {"a": 1}


# --- file systems that can less ---------------------------------------------------------------------------

WITHOUT_LINKS = r"""
import ctypes, os, struct, sys, tempfile

# A seccomp filter by which the kernel refuses link(2) and linkat(2) with EPERM, as SMB, FAT and most of FUSE do; for
# this process and all that it starts.
numbers = {"x86_64": (86, 265), "aarch64": (37, 37)}[os.uname().machine]
LOAD, EQUAL, RETURN = 0x20, 0x15, 0x06
code = [(LOAD, 0, 0, 0)]
for number in numbers:
    code += [(EQUAL, 0, 1, number), (RETURN, 0, 0, 0x00050000 | 1)]
code.append((RETURN, 0, 0, 0x7FFF0000))
program = b"".join(struct.pack("HBBI", *line) for line in code)
buffer = ctypes.create_string_buffer(program)
class Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_void_p)]
libc = ctypes.CDLL(None, use_errno=True)
if libc.prctl(38, 1, 0, 0, 0) or libc.prctl(22, 2, ctypes.byref(Program(len(code), ctypes.addressof(buffer))), 0, 0):
    sys.exit(77)
with tempfile.TemporaryDirectory() as folder:
    open(folder + "/a", "w").close()
    try:
        os.link(folder + "/a", folder + "/b")
    except PermissionError:
        pass
    else:
        sys.exit("links are there")
import pytest
sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", *sys.argv[1:]]))
"""


@pytest.mark.ci
@pytest.mark.skipif(sys.platform != "linux", reason="refuses system calls as Linux does")
def test_folder_checkpoints_work_on_a_file_system_without_hard_links() -> None:
    here = Path(__file__).parent / "test_folder_checkpoints.py"
    # The pools of the other two take links for their semaphores.
    words = [str(here), "-k", "(Contract or TestFolderCheckpoints or one_identity) and not at_once and not whole"]
    done = subprocess.run([sys.executable, "-c", WITHOUT_LINKS, *words], capture_output=True, text=True)
    if done.returncode == 77:
        pytest.skip("no seccomp filters here")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "passed" in done.stdout


def test_check_refuses_a_file_system_that_cannot_rename_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")  # gcsfuse's answer

    store = FolderCheckpoints(tmp_path, "w")
    monkeypatch.setattr(os, "rename", refuse)
    with pytest.raises(CheckpointError, match=r"it cannot rename folders; .* its own URL"):
        store.check()


# --- whose clock? -----------------------------------------------------------------------------------------

SWEEP = """
import sys
from hpstage.checkpoints import FolderCheckpoints
print(FolderCheckpoints(sys.argv[1], "w", sweep=False).sweep())
"""


@pytest.mark.parametrize("hours", [-49, 0, 49])
def test_sweep_judges_the_age_of_writers_by_the_file_system_clock_and_not_the_host_clock(
    tmp_path: Path, hours: int
) -> None:
    def temporary(age_hours: float, host: str = "elsewhere", pid: int = 1) -> str:
        folder = tmp_path / ".tmp" / f"{host}-{pid}-{uuid.uuid4().hex}"
        folder.mkdir(parents=True)
        then = time.time() - age_hours * 3600
        os.utime(folder, (then, then))
        return folder.name

    spared = [temporary(0), temporary(23), temporary(0, host_digest(), os.getpid())]
    for _ in range(2):
        temporary(25)
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(CLOCK), os.environ.get("PYTHONPATH", "")]),
        "HPSTAGE_TEST_CLOCK": str(hours * 3600.0),
    }
    words = [sys.executable, "-c", SWEEP, str(tmp_path)]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["2"]
    assert sorted(os.listdir(tmp_path / ".tmp")) == sorted(spared)
