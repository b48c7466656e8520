"""Opening the journal and the checkpoints that ``store=`` and ``checkpoints=`` name."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from hpstage.checkpoints import CheckpointStore, open_checkpoints
from hpstage.errors import StoreError, UsageError
from hpstage.errors.arguments import PLACE
from hpstage.plan.facts import PlanCreated, StateKey
from hpstage.plan.log import open_existing_plan, read_header
from hpstage.plan.plan import SearchPlan
from hpstage.store import Journal, SQLiteJournal, plugins
from hpstage.store.redaction import shown

DEFAULT_ROOT = ".hpstage"
_FILE = "plan.sqlite"


@dataclass(slots=True)
class Places:
    """An opened journal and checkpoint store. ``folder`` is the folder that holds the journal, if there is one."""

    journal: Journal
    checkpoints: CheckpointStore
    folder: Path | None
    lasting: bool = True
    """Whether the checkpoints stay when the call has ended."""


def check_places(store: object, checkpoints: object) -> None:
    """Check the arguments of :func:`open_places`. Nothing is opened.

    Raises:
        UsageError: one is of no kind that can be opened, or a plan on a server has no location for its checkpoints.
    """
    for name, place, port in (("store", store, Journal), ("checkpoints", checkpoints, CheckpointStore)):
        if place is not None and not isinstance(place, str | os.PathLike | port):
            raise UsageError(f"{name} is {place!r}; give a folder, a URL, a {port.__name__}, or None")
    if isinstance(store, str | os.PathLike) and _opener(store) is not None and checkpoints is None:
        raise UsageError(
            f"a plan at {_scheme(store)}:// is shared by processes and hosts: say with checkpoints= where all of them "
            f"reach its checkpoints (a folder, or a URL such as s3://bucket/folder)"
        )


def open_places(
    store: str | os.PathLike[str] | Journal | None,
    checkpoints: str | os.PathLike[str] | CheckpointStore | None,
    *,
    name: str,
    workload: StateKey,
    closing: ExitStack,
) -> Places:
    """Open ``store`` and ``checkpoints``; ``closing`` closes whatever is opened here.

    ``store`` is a folder, a URL such as a Redis server's (plugins define the schemes), a :class:`Journal`, or ``None``:
    a separate folder per workload below ``.hpstage``, so that an edited trainable begins another plan. In the same way,
    a server holds a plan for each workload, unless the URL names one (Redis: by ``?prefix=...``). ``checkpoints`` is a
    folder, a URL of any scheme that a plugin or fsspec supports, a :class:`CheckpointStore`, or ``None``: a folder
    beside the journal (for a journal opened by the caller, a temporary one).

    Raises:
        UsageError: an invalid URL, or a plan on a server without a location for its checkpoints.
        StoreError: the store cannot be opened.
        CheckpointError: checkpoints cannot be written to their location.
    """
    check_places(store, checkpoints)
    folder: Path | None = None
    if isinstance(store, Journal):
        journal = store
    else:
        journal, folder = open_or_make(store, name, workload, closing)
    if isinstance(checkpoints, CheckpointStore):
        checkpoints.identity()  # binds it, and its copies in other processes, to this place
        return Places(journal, checkpoints, folder)
    if checkpoints is not None:
        kept = open_checkpoints(checkpoints, workload)
    elif folder is not None:
        kept = open_checkpoints(folder / "checkpoints", workload)
    else:
        kept = open_checkpoints(closing.enter_context(tempfile.TemporaryDirectory(prefix="hpstage-")), workload)
    kept.check()
    kept.identity()
    return Places(journal, kept, folder, lasting=checkpoints is not None or folder is not None)


def open_or_make(
    store: str | os.PathLike[str] | None, name: str, workload: StateKey, closing: ExitStack
) -> tuple[Journal, Path | None]:
    """Open the journal that :func:`open_places` would open, which may be empty, and return it with its folder.

    Raises as :func:`open_places` does.
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


def is_on_server(store: str | os.PathLike[str]) -> bool:
    """Whether a store is a plan on a server, not a folder.

    Raises:
        UsageError: a URL of a scheme that no plugin opens.
    """
    return _opener(store) is not None


def made_with(
    store: str | os.PathLike[str] | Journal | None, name: str, workloads: Mapping[str, StateKey]
) -> str | None:
    """Return which of several workloads the plan in a store is of; ``None`` if there is no plan, or it is of another.

    Args:
        store, name: as for :func:`open_places`. Nothing is made there.
        workloads: keys by the name to return. If there are plans of several, the first counts.
    """
    for chosen, workload in workloads.items():
        header = header_in(store, name, workload)
        if header is not None and header.workload == workload:
            return chosen
    return None


def header_in(store: str | os.PathLike[str] | Journal | None, name: str, workload: StateKey) -> PlanCreated | None:
    """Return the first event of the plan that :func:`open_places` would open; ``None`` if there is none.

    Nothing is made there.
    """
    with ExitStack() as closing:
        if isinstance(store, Journal):
            journal = store
        elif (opener := _opener(store)) is not None:
            journal = opener(str(store), _own(name, workload))
            closing.callback(journal.close)
        else:
            folder = Path(DEFAULT_ROOT) / _own(name, workload) if store is None else Path(store)
            if not _has_plan(folder):
                return None
            journal = open_journal(folder, closing=closing, read_only=True)
        return read_header(journal) if len(journal) else None


def open_existing(
    store: str | os.PathLike[str],
    checkpoints: str | os.PathLike[str] | None,
    *,
    closing: ExitStack,
    read_only: bool = False,
) -> tuple[SearchPlan, Places]:
    """Open an existing plan, given only its location; ``store`` and ``checkpoints`` as for :func:`open_places`.

    Args:
        read_only: for readers that append nothing.

    Raises:
        UsageError: a URL that names no plan (its message lists the existing ones), or a plan on a server without a
            location for its checkpoints.
        StoreError: there is no plan, or it cannot be read.
    """
    PLACE.of("store", store)
    folder = None if _opener(store) is not None else Path(store)
    if folder is None and checkpoints is None:
        raise UsageError("say with checkpoints= where the checkpoints of this plan are: a folder, or a URL")
    journal = open_journal(store, closing=closing, read_only=read_only)
    place = folder / "checkpoints" if checkpoints is None and folder is not None else checkpoints
    assert place is not None
    plan = open_existing_plan(journal)
    return plan, Places(journal, open_checkpoints(place, plan.workload, sweep=False), folder)


def default_stores() -> list[Path]:
    """Return the stores of searches from this folder that named none, the last written first."""
    plans = Path(DEFAULT_ROOT).glob(f"*/{_FILE}")
    return [plan.parent for plan in sorted(plans, key=lambda plan: (-_last_written(plan), plan))]


def _last_written(plan: Path) -> float:
    """Return when a plan was written last: SQLite writes into a file beside it first."""
    return max(file.stat().st_mtime for file in plan.parent.glob(f"{_FILE}*"))


def open_journal(store: str | os.PathLike[str], *, closing: ExitStack, read_only: bool = False) -> Journal:
    """Open the journal of an existing plan. Raises as :func:`open_existing` does.

    Args:
        read_only: for readers that append nothing.
    """
    opener = _opener(store)
    if opener is not None:
        journal = opener(os.fspath(store), None, read_only=read_only)
    else:
        folder = Path(store)
        if not _has_plan(folder):
            raise StoreError(
                f"there is no plan in {shown(str(folder))}: give a folder that holds {_FILE}, or a Redis server's URL"
            )
        journal = SQLiteJournal(folder / _FILE, read_only=read_only)
    closing.callback(journal.close)
    return journal


def address_of(journal: Journal) -> str:
    """Return the address under which ``hpstage`` commands find a journal, without secrets; ``""`` if it has none."""
    return str(getattr(journal, "address", ""))


def _own(name: str, workload: StateKey) -> str:
    """Return the name of a workload's own plan."""
    return f"{re.sub(r'[^A-Za-z0-9_.-]+', '-', name) or 'plan'}-{workload[:12]}"


def _scheme(location: str | os.PathLike[str] | None) -> str | None:
    # At least two letters: "c:" is a drive.
    scheme = None if location is None else re.match(r"([A-Za-z][A-Za-z0-9+.-]+)://", os.fspath(location))
    return None if scheme is None else scheme[1].lower()


def _opener(store: str | os.PathLike[str] | None) -> Callable[..., Journal] | None:
    """Return the function that opens the store of a URL; ``None`` for a folder."""
    scheme = _scheme(store)
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
