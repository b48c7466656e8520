"""Copying checkpoints and logs from one store to another, each checked where it arrives."""

from __future__ import annotations

from hpstage.checkpoints.stage_log import StageLog, encode
from hpstage.checkpoints.store import CheckpointStore
from hpstage.errors import CheckpointCorrupt, CheckpointMissing, UsageError
from hpstage.plan.facts import StateKey


def copy_checkpoint(key: StateKey, source: CheckpointStore, target: CheckpointStore) -> bool:
    """Copy a checkpoint, unless the target has it; return whether it was copied. Every byte in the target is verified.

    Raises:
        CheckpointMissing, CheckpointCorrupt: the checkpoint in the source is missing or damaged.
        UsageError: the target has another state of the same key.
    """
    manifest = source.manifest(key)
    found = _digest(key, target)
    if found is None:
        target.save(key, source.load(key), step=manifest.step, parent=manifest.parent)
        found = _digest(key, target)
    elif found == manifest.digest:
        return False
    if found != manifest.digest:
        raise UsageError(f"{target.location(key)} holds another state under the same key; copy to an empty store")
    return True


def copy_log(key: StateKey, source: CheckpointStore, target: CheckpointStore) -> bool:
    """Copy the log of the steps before a state, unless the target has it. Return whether the target has it afterwards,
    since some stores keep no logs.

    Raises:
        CheckpointMissing, CheckpointCorrupt: the log in the source is missing or damaged.
    """
    log = _bytes(key, source.load_log(key))
    if _log(key, target) != log:
        target.save_log(key, source.load_log(key))
    return _log(key, target) == log


def _digest(key: StateKey, store: CheckpointStore) -> str | None:
    """Return the digest of a sound checkpoint, if there is one."""
    try:
        store.verify(key)
        return store.manifest(key).digest
    except (CheckpointMissing, CheckpointCorrupt):
        return None


def _log(key: StateKey, store: CheckpointStore) -> bytes | None:
    try:
        return _bytes(key, store.load_log(key))
    except (CheckpointMissing, CheckpointCorrupt):
        return None


def _bytes(key: StateKey, log: StageLog) -> bytes:
    """Return a log in a form in which NaN equals NaN."""
    return encode(log, key, "")
