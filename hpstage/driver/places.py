"""Opens a store: the journal and the checkpoints that ``store=`` and ``checkpoints=`` name, together."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

from hpstage.checkpoints import CheckpointStore, open_checkpoints
from hpstage.errors import HpstageError, UsageError
from hpstage.errors.arguments import PLACE, shown
from hpstage.plan.facts import PlanCreated, StateKey
from hpstage.plan.log import open_existing_plan, read_header
from hpstage.plan.plan import SearchPlan
from hpstage.store import Journal
from hpstage.store.opening import default_stores, find_journal, is_on_server, open_journal, open_or_make, scheme_of


@dataclass(slots=True)
class Places:
    """An opened journal and checkpoint store. ``folder`` is the folder that holds the journal, if there is one."""

    journal: Journal
    checkpoints: CheckpointStore
    folder: Path | None
    lasting: bool = True
    """Whether the checkpoints stay after the call."""


def check_places(store: object, checkpoints: object) -> None:
    """Check the arguments of :func:`open_places`. Nothing is opened.

    Raises:
        UsageError: an argument has another type, or a plan on a server has no location for its checkpoints.
    """
    for name, place, port in (("store", store, Journal), ("checkpoints", checkpoints, CheckpointStore)):
        if place is not None and not isinstance(place, str | os.PathLike | port):
            raise UsageError(f"{name} is {shown(place)}; give a folder, a URL, a {port.__name__}, or None")
    if isinstance(store, str | os.PathLike) and is_on_server(store) and checkpoints is None:
        raise UsageError(
            f"a plan at {scheme_of(store)}:// is shared by processes and hosts: give checkpoints=, a location that all "
            f"of them can reach (a folder, or a URL such as s3://bucket/folder)"
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
    next to the journal (for a journal opened by the caller, a temporary one).

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


def made_with(
    store: str | os.PathLike[str] | Journal | None, name: str, workloads: Mapping[str, StateKey]
) -> str | None:
    """Return the name of the workload that the plan in a store is for; ``None`` if there is no plan, or it is for a
    workload that is not given.

    Args:
        store, name: as for :func:`open_places`. Nothing is created there.
        workloads: the key of each workload, by the name to return. If several have a plan, the first counts.
    """
    for chosen, workload in workloads.items():
        header = header_in(store, name, workload)
        if header is not None and header.workload == workload:
            return chosen
    return None


def header_in(store: str | os.PathLike[str] | Journal | None, name: str, workload: StateKey) -> PlanCreated | None:
    """Return the first event of the plan that :func:`open_places` would open; ``None`` if there is none.

    Nothing is created there.
    """
    with ExitStack() as closing:
        journal = store if isinstance(store, Journal) else find_journal(store, name, workload, closing)
        return read_header(journal) if journal is not None and len(journal) else None


def default_plans() -> dict[str, tuple[Path, PlanCreated]]:
    """Return the folder and the first event of each readable plan in ``.hpstage``, by the plan's id."""
    found: dict[str, tuple[Path, PlanCreated]] = {}
    for folder in default_stores():
        with suppress(HpstageError), ExitStack() as closing:
            header = read_header(open_journal(folder, closing=closing, read_only=True))
            found[header.id] = folder, header
    return found


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
    folder = None if is_on_server(store) else Path(store)
    if folder is None and checkpoints is None:
        raise UsageError("checkpoints= is missing; give the location of this plan's checkpoints: a folder, or a URL")
    journal = open_journal(store, closing=closing, read_only=read_only)
    place = folder / "checkpoints" if checkpoints is None and folder is not None else checkpoints
    assert place is not None
    plan = open_existing_plan(journal)
    return plan, Places(journal, open_checkpoints(place, plan.workload, sweep=False), folder)
