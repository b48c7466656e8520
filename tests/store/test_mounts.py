"""SQLite on a network file system is refused, and on nothing else."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpstage.errors import StoreError
from hpstage.store import SQLiteJournal
from hpstage.store.mounts import Mount, mount_of, network_mount

MOUNTINFO = r"""
22 27 0:21 / /proc rw,relatime - proc proc rw
27 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw
60 27 0:50 / /home rw,relatime shared:2 master:7 - nfs4 head:/export/home rw,vers=4.2
61 60 0:51 / /home/me/scratch rw - xfs /dev/nvme0n1 rw
62 27 0:52 / /mnt/team\040share rw - cifs //server/share rw
63 27 0:53 / /mnt/remote rw - fuse.sshfs me@host:/data rw
64 27 0:54 / /mnt/plain rw - fuse.encfs encfs rw
65 27 0:55 / /data rw - lustre mgs@tcp:/data rw
66 27 0:56 / /over rw - ext4 /dev/vdb rw
67 27 0:57 / /over rw - nfs head:/over rw
"""


@pytest.mark.parametrize(
    ("path", "mount", "network"),
    [
        ("/var/tmp/plan", Mount("/", "ext4"), False),
        ("/home", Mount("/home", "nfs4"), True),
        ("/home/me/plan", Mount("/home", "nfs4"), True),
        ("/home/me/scratch/plan", Mount("/home/me/scratch", "xfs"), False),
        ("/homes/me", Mount("/", "ext4"), False),
        ("/mnt/team share/plan", Mount("/mnt/team share", "cifs"), True),
        ("/mnt/remote/plan", Mount("/mnt/remote", "fuse.sshfs"), True),
        ("/mnt/plain/plan", Mount("/mnt/plain", "fuse.encfs"), False),
        ("/data/plan", Mount("/data", "lustre"), True),
        ("/over/plan", Mount("/over", "nfs"), True),
    ],
)
def test_the_mount_of_a_path_is_the_nearest_mount_above_it(path: str, mount: Mount, network: bool) -> None:
    assert mount_of(path, MOUNTINFO) == mount
    assert mount.is_network == network


@pytest.mark.parametrize(
    "kind",
    ["nfs", "smb3", "gpfs", "beegfs", "ceph", "9p", "fuse.s3fs", "fuse.glusterfs", "fuse.rclone", "fuse.gcsfuse"],
)
def test_network_file_systems_are_recognised(kind: str) -> None:
    assert Mount("/", kind).is_network


@pytest.mark.parametrize(
    "kind", ["ext4", "xfs", "btrfs", "zfs", "tmpfs", "overlay", "fuseblk", "fuse.mergerfs", "apfs"]
)
def test_local_file_systems_are_not_taken_for_network_file_systems(kind: str) -> None:
    assert not Mount("/", kind).is_network


@pytest.mark.skipif(not Path("/proc/self/mountinfo").exists(), reason="needs Linux's list of mounts")
def test_the_mount_of_a_path_on_this_host_is_found(tmp_path: Path) -> None:
    mount = mount_of(os.path.realpath(tmp_path), Path("/proc/self/mountinfo").read_text())
    assert mount is not None and os.path.ismount(mount.point)
    assert os.stat(mount.point).st_dev == os.stat(tmp_path).st_dev


@pytest.fixture
def dead_sshfs(tmp_path: Path) -> Iterator[Path]:
    """A folder that the kernel says is of sshfs, and whose server is gone: every access fails."""
    point = tmp_path / "remote"
    point.mkdir()
    if os.geteuid() != 0 or not os.path.exists("/dev/fuse"):
        pytest.skip("needs root and FUSE to mount")
    device = os.open("/dev/fuse", os.O_RDWR)
    options = f"fd={device},rootmode=40000,user_id=0,group_id=0"
    words = ["mount", "-i", "-t", "fuse.sshfs", "-o", options, "me@host:/data", point]
    try:
        done = subprocess.run(words, capture_output=True, text=True, pass_fds=[device])
    except FileNotFoundError:
        pytest.skip("there is no mount")
    finally:
        os.close(device)
    if done.returncode:
        pytest.skip(f"cannot mount: {done.stderr.strip()}")
    yield point
    subprocess.run(["umount", "-l", point], check=True)


def test_a_sqlite_journal_on_a_network_file_system_is_refused_with_a_remedy(
    dead_sshfs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = network_mount(dead_sshfs / "plan")
    assert found == Mount(str(dead_sshfs), "fuse.sshfs")
    for read_only in (False, True):
        with pytest.raises(StoreError, match=rf"on {dead_sshfs}, a network file system \(fuse.sshfs\).*checkpoints="):
            SQLiteJournal(dead_sshfs / "plan" / "plan.sqlite", read_only=read_only)
    monkeypatch.setenv("HPSTAGE_SQLITE_ON_NETWORK", "1")
    with pytest.raises(StoreError, match="cannot make the folder"):  # it is tried now
        SQLiteJournal(dead_sshfs / "plan" / "plan.sqlite")


def test_a_sqlite_journal_behind_a_link_to_a_network_file_system_is_refused(dead_sshfs: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(dead_sshfs)
    with pytest.raises(StoreError, match="network file system"):
        SQLiteJournal(tmp_path / "link" / "plan.sqlite")
