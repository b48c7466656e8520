"""Checkpoints of states by key: the port, its implementations for folders and URLs, and a worker's live cache."""

from hpstage.checkpoints.folder import FolderCheckpoints
from hpstage.checkpoints.live import LiveCache
from hpstage.checkpoints.opening import open_checkpoints
from hpstage.checkpoints.store import CheckpointStore, Manifest, Usage
from hpstage.checkpoints.url import UrlCheckpoints

__all__ = [
    "CheckpointStore",
    "FolderCheckpoints",
    "LiveCache",
    "Manifest",
    "UrlCheckpoints",
    "Usage",
    "open_checkpoints",
]


def __dir__() -> list[str]:
    return __all__
