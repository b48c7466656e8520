"""States kept under their keys: the port, its folder implementation, and the live cache of a worker."""

from hpstage.checkpoints.folder import FolderCheckpoints
from hpstage.checkpoints.live import LiveCache
from hpstage.checkpoints.store import CheckpointStore, Manifest

__all__ = ["CheckpointStore", "FolderCheckpoints", "LiveCache", "Manifest"]
