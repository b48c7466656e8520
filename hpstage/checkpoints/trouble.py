"""Classification of storage errors: no room, or an unreachable place."""

from __future__ import annotations

import errno
import re

from hpstage.errors import CheckpointError, CheckpointFull, CheckpointUnreachable

_NO_ROOM = {errno.ENOSPC, errno.EDQUOT}
# How object stores report this, whose drivers have no error number for it: MinIO (XMinioStorageFull,
# XMinioAdminBucketQuotaExceeded), Ceph (QuotaExceeded), WebDAV (507 Insufficient Storage). "Quota exceeded" alone may
# be a quota of requests.
_NO_ROOM_TEXT = re.compile(r"QuotaExceeded\b|StorageFull\b|InsufficientStorage|Insufficient Storage|No space left")


def kind_of(error: OSError, text: str = "") -> type[CheckpointError]:
    """Return :class:`CheckpointFull` or :class:`CheckpointUnreachable`. ``text``: the message of the storage's
    driver."""
    if error.errno in _NO_ROOM or (error.errno is None and _NO_ROOM_TEXT.search(text)):
        return CheckpointFull
    return CheckpointUnreachable
