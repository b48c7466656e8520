"""Opens the journal that ``store=`` names: a folder with SQLite, or a URL. With checkpoints: ``driver/places.py``."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path

from hpstage.errors import StoreError, UsageError
from hpstage.store import Journal, SQLiteJournal, plugins
from hpstage.store.redaction import shown

DEFAULT_ROOT = ".hpstage"
_FILE = "plan.sqlite"


def open_or_make(
    store: str | os.PathLike[str] | None, name: str, workload: str, closing: ExitStack
) -> tuple[Journal, Path | None]:
    """Open a workload's journal, creating it if there is none, and return it with its folder, if it is in one.

    Args:
        store: a folder, a URL, or ``None``: the workload's own folder in ``.hpstage``.
        name: name of the trainable, which becomes part of the name of the workload's own plan.

    Raises:
        UsageError: an invalid URL.
        StoreError: the store cannot be opened.
    """
    own = _own(name, workload)
    folder = None
    if (opener := _opener(store)) is not None:
        journal = opener(str(store), own)
    else:
        folder = Path(DEFAULT_ROOT) / own if store is None else Path(store)
        _make(folder)
        journal = SQLiteJournal(folder / _FILE)
    closing.callback(journal.close)
    return journal, folder


def find_journal(store: str | os.PathLike[str] | None, name: str, workload: str, closing: ExitStack) -> Journal | None:
    """Open the journal that :func:`open_or_make` would open, if it exists. Nothing is created."""
    own = _own(name, workload)
    if (opener := _opener(store)) is not None:
        with suppress(UsageError, StoreError):  # also where a store of a plugin does not exist
            journal = opener(str(store), own, read_only=True)
            closing.callback(journal.close)
            return journal
        return None
    folder = Path(DEFAULT_ROOT) / own if store is None else Path(store)
    return open_journal(folder, closing=closing, read_only=True) if _has_plan(folder) else None


def is_on_server(store: str | os.PathLike[str]) -> bool:
    """Whether a store is a plan on a server, not a folder.

    Raises:
        UsageError: a URL of a scheme that no plugin opens.
    """
    return _opener(store) is not None


def default_stores() -> list[Path]:
    """Return the stores of searches that were started in this folder without ``store=``, the last written first."""
    plans = Path(DEFAULT_ROOT).glob(f"*/{_FILE}")
    return [plan.parent for plan in sorted(plans, key=lambda plan: (-last_written(plan.parent), plan))]


def last_written(store: Path) -> float:
    """Return when the plan in a folder was last written. SQLite first writes into a file next to it."""
    files = (file for file in store.glob(f"{_FILE}*") if not file.name.endswith("-shm"))  # which readers write, too
    return max(file.stat().st_mtime for file in files)


def open_journal(store: str | os.PathLike[str], *, closing: ExitStack, read_only: bool = False) -> Journal:
    """Open the journal of an existing plan.

    Args:
        read_only: for readers that append nothing.

    Raises:
        UsageError: a URL that names no plan; its message lists the existing ones.
        StoreError: there is no plan, or it cannot be read.
    """
    opener = _opener(store)
    if opener is not None:
        journal = opener(os.fspath(store), None, read_only=read_only)
    else:
        folder = Path(store)
        if not _has_plan(folder):
            raise StoreError(
                f"there is no plan in {shown(str(folder))}: give a store, which is a folder with {_FILE}, or a Redis "
                f"server's URL; `hpstage status` lists those in {DEFAULT_ROOT}"
            )
        journal = SQLiteJournal(folder / _FILE, read_only=read_only)
    closing.callback(journal.close)
    return journal


def address_of(journal: Journal) -> str:
    """Return the address under which ``hpstage`` commands find a journal, without secrets; ``""`` if it has none."""
    return str(getattr(journal, "address", ""))


def _own(name: str, workload: str) -> str:
    """Return the name of a workload's own plan."""
    return f"{re.sub(r'[^A-Za-z0-9_.-]+', '-', name) or 'plan'}-{workload[:12]}"


def scheme_of(location: str | os.PathLike[str] | None) -> str | None:
    """Return the scheme of a URL, in lower case; ``None`` for a folder."""
    # At least two letters: "c:" is a drive.
    scheme = None if location is None else re.match(r"([A-Za-z][A-Za-z0-9+.-]+)://", os.fspath(location))
    return None if scheme is None else scheme[1].lower()


def _opener(store: str | os.PathLike[str] | None) -> Callable[..., Journal] | None:
    """Return the function that opens the store of a URL; ``None`` for a folder."""
    scheme = scheme_of(store)
    if scheme is None:
        return None
    known = plugins.names("hpstage.stores")
    if scheme not in known:
        raise UsageError(
            f"store: there is no store of the kind {scheme}://; give a folder on a local disk, or a URL of one of "
            f"{', '.join(f'{name}://' for name in known)}"
        )
    return plugins.opener("hpstage.stores", scheme, Journal)  # type: ignore[type-abstract]


def _has_plan(folder: Path) -> bool:
    try:
        return (folder / _FILE).is_file()
    except OSError as error:
        raise StoreError(f"{shown(str(folder))}: {error.strerror}; choose another with store=") from error


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StoreError(
            f"cannot make the folder {shown(str(folder))}: {error.strerror}; choose another with store="
        ) from error
    if not os.access(folder, os.W_OK):
        raise StoreError(
            f"the folder {shown(str(folder))} is not writable; choose another with store=, or fix its permissions"
        )
