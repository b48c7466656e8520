"""Where a search is remembered: the journal and the checkpoints behind ``store=`` and ``checkpoints=``."""

from __future__ import annotations

import os
import re
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from hpstage.checkpoints import CheckpointStore, FolderCheckpoints
from hpstage.errors import StoreError, UsageError
from hpstage.events import StateKey
from hpstage.store import Journal, SQLiteJournal

DEFAULT_ROOT = ".hpstage"


@dataclass(slots=True)
class Places:
    """An opened journal and checkpoint store. ``folder`` is where they lie, if it is one folder."""

    journal: Journal
    checkpoints: CheckpointStore
    folder: Path | None


def open_places(
    store: str | os.PathLike[str] | Journal | None,
    checkpoints: str | os.PathLike[str] | CheckpointStore | None,
    *,
    name: str,
    workload: StateKey,
    closing: ExitStack,
) -> Places:
    """Open what ``store`` and ``checkpoints`` name; what is opened here is closed by ``closing``.

    ``store`` is a folder, a :class:`Journal`, or ``None``: a folder of the workload's own below ``.hpstage``, so that
    an edited trainable begins another plan. ``checkpoints`` is a folder, a :class:`CheckpointStore`, or ``None``: a
    folder beside the journal (for a journal that is no folder, a temporary one).
    """
    folder: Path | None = None
    if isinstance(store, Journal):
        journal = store
    else:
        if store is None:
            safe = re.sub(r"[^A-Za-z0-9_.-]+", "-", name) or "plan"
            folder = Path(DEFAULT_ROOT) / f"{safe}-{workload[:12]}"
        else:
            folder = _folder("store", store)
        _make(folder)
        journal = SQLiteJournal(folder / "plan.sqlite")
        closing.callback(journal.close)
    if isinstance(checkpoints, CheckpointStore):
        return Places(journal, checkpoints, folder)
    if checkpoints is not None:
        place = _folder("checkpoints", checkpoints)
    elif folder is not None:
        place = folder / "checkpoints"
    else:
        place = Path(closing.enter_context(tempfile.TemporaryDirectory(prefix="hpstage-")))
    _make(place)
    return Places(journal, FolderCheckpoints(place.absolute(), workload), folder)


def _folder(what: str, value: str | os.PathLike[str]) -> Path:
    text = os.fspath(value)
    scheme = re.match(r"([a-z][a-z0-9+.-]+)://", text)
    if scheme:
        raise UsageError(
            f"{what}={text.split('@')[-1]!r}: {scheme[1]} is not supported yet; give a folder on a local disk"
        )
    return Path(text)


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StoreError(f"cannot make the folder {folder}: {error.strerror}; choose another with store=") from error
    if not os.access(folder, os.W_OK):
        raise StoreError(f"the folder {folder} is not writable; choose another with store=, or mend its permissions")
