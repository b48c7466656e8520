"""``hpstage copy``: copies the plan of a store, with or without its checkpoints, to another store."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from hpstage.checkpoints import CheckpointStore, open_checkpoints
from hpstage.checkpoints.copying import copy_checkpoint, copy_log
from hpstage.cli import options
from hpstage.cli.studies import default_storage
from hpstage.cli.terminal import echo
from hpstage.driver.driver_leases import DriverLeases
from hpstage.errors import CheckpointCorrupt, CheckpointError, CheckpointMissing, UsageError
from hpstage.errors.arguments import PLACE, optional
from hpstage.errors.text import count_of
from hpstage.plan.facts import DriverId, StateKey
from hpstage.plan.log import open_existing_plan, read_header
from hpstage.plan.plan import SearchPlan
from hpstage.report.trial_log import all_log_keys
from hpstage.store import Journal
from hpstage.store.copying import common_end, copy_records
from hpstage.store.opening import address_of, is_on_server, open_journal, open_or_make
from hpstage.store.redaction import shown

# Number of threads that copy checkpoints of up to _SMALL bytes; larger ones are copied one at a time.
_THREADS = 4
_SMALL = 64 << 20
_SHOWN = 5


def copy(
    store: options.Store,
    destination: Annotated[
        str,
        typer.Argument(
            metavar="DESTINATION",
            help="A folder, or redis://host:6379; add ?prefix=NAME to name the plan there.",
        ),
    ],
    checkpoints: Annotated[
        str | None, typer.Option(help="Where the checkpoints of STORE are, if not in the folder: a folder or a URL.")
    ] = None,
    to_checkpoints: Annotated[
        str | None,
        typer.Option(
            help="Where to copy the checkpoints: a folder or a URL.", show_default="in the folder DESTINATION"
        ),
    ] = None,
    no_checkpoints: Annotated[
        bool, typer.Option("--no-checkpoints", help="Leave the checkpoints where they are.")
    ] = False,
) -> None:
    """Copy a store to another, with its checkpoints and logs.

    A search on DESTINATION continues from what was trained on STORE. Interrupt the command at any time, and run it
    again to resume: checkpoints that DESTINATION has are compared, and not copied again. Run it again later to copy
    what was recorded since. DESTINATION is refused if it holds another plan, or if a search has used it since.

    Searches may run on STORE concurrently: the plan is copied as it is when the command starts. The storage of the
    Optuna study is not part of a store, and is not copied.

    Examples:

    \b
    hpstage copy .hpstage/Digits-1f2e3d4c5b6a redis://head:6379 --to-checkpoints s3://bucket/digits
    hpstage copy "redis://head:6379?prefix=NAME" FOLDER --checkpoints s3://bucket/digits
    hpstage copy STORE "redis://head:6379?prefix=NAME" --no-checkpoints
    """
    place = _check(store, destination, checkpoints, to_checkpoints, no_checkpoints=no_checkpoints)
    name = shown(destination)
    with ExitStack() as closing:
        source = open_journal(store, closing=closing, read_only=True)
        plan = open_existing_plan(source)
        states = _States(plan, place)
        trainable = read_header(source).described.get("trainable", "").rpartition(".")[2]
        target, _ = open_or_make(destination, trainable, plan.workload, closing)
        begin, end = common_end(source, plan.cursor, target, name), plan.cursor
        if place is not None:
            # Before the records: whoever opens the destination finds all checkpoints that its records name.
            states.copy_to(to_checkpoints or str(Path(destination) / "checkpoints"))
        copy_records(source, begin, end, target, name)
        echo(
            f"{address_of(target)}: {count_of(end.position, 'record')} ({end.position - begin.position:,} copied now)"
            f"{states.as_text()}, equal to those of {shown(store)}"
        )
        left = checkpoints or (None if is_on_server(store) else f"{store}/checkpoints")
        for note in _notes(states, source, store, left):
            echo(note)


def _check(
    store: str, destination: str, checkpoints: str | None, to_checkpoints: str | None, *, no_checkpoints: bool
) -> str | None:
    """Check the arguments. Return the folder or URL of the checkpoints to copy, or ``None`` to copy none."""
    for option, place in (("--checkpoints", checkpoints), ("--to-checkpoints", to_checkpoints)):
        optional(PLACE).of(option, place)
    PLACE.of("STORE", store)
    PLACE.of("DESTINATION", destination)
    from_server, to_server = is_on_server(store), is_on_server(destination)
    if store == destination or (
        not from_server and not to_server and Path(store).resolve() == Path(destination).resolve()
    ):
        raise UsageError(f"{shown(destination)} is the store itself; give another destination")
    if not from_server and not to_server and Path(destination).resolve().is_relative_to(Path(store).resolve()):
        raise UsageError(f"{shown(destination)} is within the store; give another destination")
    if no_checkpoints:
        if to_checkpoints is not None:
            raise UsageError("--no-checkpoints and --to-checkpoints exclude each other; leave one of them out")
        return None
    if checkpoints is None and from_server:
        raise UsageError(
            "--checkpoints is missing: give the location of STORE's checkpoints (a folder or a URL), or leave them "
            "there with --no-checkpoints"
        )
    if to_checkpoints is None and to_server:
        raise UsageError(
            "--to-checkpoints is missing: give a location that all hosts of the server's searches reach (a folder or "
            "a URL such as s3://bucket/folder), or leave the checkpoints with --no-checkpoints"
        )
    own = checkpoints or str(Path(store) / "checkpoints")
    other = to_checkpoints or str(Path(destination) / "checkpoints")
    if _is_one_place(own, other):
        raise UsageError(
            f"{shown(other)} already holds the checkpoints of STORE. Give another --to-checkpoints, since gc of one "
            f"plan would delete the other plan's checkpoints there, or leave them with --no-checkpoints"
        )
    return own


def _is_one_place(a: str, b: str) -> bool:
    a, b = (place.removeprefix("file://").rstrip("/") for place in (a, b))
    with suppress(OSError):  # one of them does not exist, or is a URL
        return os.path.samefile(a, b)
    return a == b


@dataclass(slots=True)
class _States:
    """The checkpoints and logs of a plan that exist at ``place``, and the outcome of copying them.

    Args:
        place: the folder or URL of the checkpoints; ``None``: they are not copied.

    Raises:
        UsageError: the plan has checkpoints, but none of them is at ``place``.
    """

    plan: SearchPlan
    place: str | None
    source: CheckpointStore | None = field(default=None, init=False)
    keys: list[StateKey] = field(default_factory=list, init=False)
    copied: int = field(default=0, init=False)
    logs: int = field(default=0, init=False)
    damaged: list[CheckpointError] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        if self.place is None:
            return
        self.source = open_checkpoints(self.place, self.plan.workload, sweep=False)
        there = set(self.source.keys())
        self.keys = [key for key in self.plan.kept if key in there]
        if self.plan.kept and not self.keys:
            raise UsageError(
                f"none of the {count_of(len(self.plan.kept), 'checkpoint')} of this plan is in {shown(self.place)}; "
                f"give their location with --checkpoints, or leave them there with --no-checkpoints"
            )

    def copy_to(self, place: str) -> None:
        """Copy the checkpoints and logs that the destination lacks, and verify those that it has."""
        assert self.source is not None
        target = open_checkpoints(place, self.plan.workload)
        target.check()
        target.identity()
        copying = partial(_tried, copy_checkpoint, self.source, target)
        for part in self.source.parts().keys() & self.plan.parts.keys():  # first, since states name them
            copying(part)
        large = [key for key in self.keys if (kept := self.plan.kept[key].kept) is not None and kept.bytes > _SMALL]
        small = [key for key in self.keys if key not in {*large}]
        logs = self.source.logs().keys() & all_log_keys(self.plan)
        with ThreadPoolExecutor(_THREADS) as pool:
            found = [*pool.map(copying, small), *map(copying, large)]
            self.logs = sum(one is not None for one in pool.map(partial(_tried, copy_log, self.source, target), logs))
        self.copied = found.count(True)
        self.damaged = [one for one in found if isinstance(one, CheckpointError)]

    def as_text(self) -> str:
        if self.source is None:
            return ""
        whole = len(self.keys) - len(self.damaged)
        return f", {count_of(whole, 'checkpoint')} ({self.copied:,} copied now), {count_of(self.logs, 'log')}"


def _tried(
    copy_one: Callable[[StateKey, CheckpointStore, CheckpointStore], bool],
    source: CheckpointStore,
    target: CheckpointStore,
    key: StateKey,
) -> bool | CheckpointError:
    try:
        return copy_one(key, source, target)
    except (CheckpointMissing, CheckpointCorrupt) as error:
        return error


def _notes(states: _States, journal: Journal, store: str, left: str | None) -> Iterator[str]:
    """Yield further lines to print: what was not copied, and how to use the copy.

    Args:
        left: the folder or URL of the checkpoints of ``store``, if it is known.
    """
    plan = states.plan
    if states.source is None:
        stay = "where they are" if left is None else f"in {shown(left)}"
        yield (
            f"The checkpoints stay {stay}: give this location as --checkpoints when you use the copy. Do not run gc "
            f"on it: both plans use it."
        )
    elif lacking := len(plan.kept) - len(states.keys) + len(states.damaged):
        yield (
            f"Not copied, since missing or damaged: {count_of(lacking, 'checkpoint')}. Their steps are trained again "
            f"if needed."
        )
    for error in states.damaged[:_SHOWN]:
        yield f"  {error}"
    leases = DriverLeases(journal, DriverId(""))
    if any(not leases.seems_gone(driver) for driver in plan.drivers.values()):
        yield "A search is running on the store: run the same command again to copy what it records from now on."
    if Path(study := default_storage(store)).parent == Path(store) and Path(study).exists():
        yield f"The Optuna study stays in {shown(study)}: give this file as --storage when you use the copy."
