"""Detection of network file systems, where SQLite's locks and shared memory do not extend to other hosts."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

# Types of file systems shared by several hosts, as named by Linux.
_NETWORK = {
    "9p",
    "acfs",
    "afs",
    "beegfs",
    "ceph",
    "cifs",
    "coda",
    "gfs2",
    "glusterfs",
    "gpfs",
    "lustre",
    "ncpfs",
    "nfs",
    "nfs4",
    "ocfs2",
    "orangefs",
    "panfs",
    "pvfs2",
    "smb3",
    "smbfs",
    "wekafs",
}
# The same behind FUSE, where the type is "fuse.NAME" and a name may include a version. Other FUSE types are usually
# local (encrypted or merged folders, NTFS).
_NETWORK_FUSE = re.compile(
    r"fuse\.(sshfs|s3|goofys|mount-?s3|mountpoint|gcsfuse|blobfuse|rclone|juicefs|gluster|ceph|moosefs|mfs|lizardfs"
    r"|seaweedfs|weed|alluxio|davfs|webdav|curlftpfs|smb|cifs|nfs|beegfs|hdfs|fuse_dfs|cvmfs|afp)"
)


@dataclass(frozen=True, slots=True)
class Mount:
    """The mount point of a file system, and its type."""

    point: str
    type: str

    @property
    def is_network(self) -> bool:
        return self.type in _NETWORK or _NETWORK_FUSE.match(self.type) is not None


def mount_of(path: str, mountinfo: str) -> Mount | None:
    """Return the mount of an absolute path without links, from the text of ``/proc/self/mountinfo`` (proc(5))."""
    found: Mount | None = None
    for line in mountinfo.splitlines():
        before, separator, after = line.partition(" - ")
        fields = before.split(" ")
        if not separator or len(fields) < 5:
            continue
        point = re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), fields[4])
        below = path == point or path.startswith(point.rstrip("/") + "/")
        # Of two mounts at the same point, the later one hides the other.
        if below and (found is None or len(point) >= len(found.point)):
            found = Mount(point, after.split(" ")[0])
    return found


def network_mount(path: Path) -> Mount | None:
    """Return the network file system that a path is on, whether or not it exists; ``None`` if none is known.

    Without ``/proc`` (not on Linux) it cannot be determined.
    """
    try:
        mountinfo = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="surrogateescape")
    except OSError:
        return None
    mount = mount_of(os.path.realpath(path), mountinfo)
    return mount if mount is not None and mount.is_network else None
