"""``hpstage tree``: the search plan as text."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer

from hpstage.cli.terminal import echo
from hpstage.errors import UsageError
from hpstage.plan.facts import NodeId
from hpstage.report.account import Account, new_account
from hpstage.report.book import Book, open_book
from hpstage.report.files import replacing
from hpstage.report.lanes import Lane
from hpstage.report.tree.branches import State, changes, states
from hpstage.store.opening import open_journal
from hpstage.text import clean, count_of

_LINES = 200
_KEPT = 4  # kept steps of a line
_KINDS = ("png", "svg", "pdf")
_INDENT = 40  # columns; what is deeper is not moved further


def tree(
    store: Annotated[str, typer.Argument(help="The plan: a folder, or redis://host:6379?prefix=NAME.")],
    depth: Annotated[int | None, typer.Option(min=1, help="Levels of the tree that are shown; 1: the roots.")] = None,
    study: Annotated[str | None, typer.Option(help="Only what this study's trials pass.")] = None,
    lines: Annotated[int, typer.Option(min=1, help="Nodes that are shown at most, those nearest the root first.")] = (
        _LINES
    ),
    picture: Annotated[Path | None, typer.Option(help="Draw the tree into this file (.png, .svg or .pdf) instead.")] = (
        None
    ),
) -> None:
    """Show the tree of a plan: where trials train as one, where they part, and how far each line is.

    A line is a node: its steps, what changes with respect to the line above, its state (waiting, running, done,
    failed; dropped: nobody waits for the rest of it any more), where checkpoints are kept, and the trials through it.
    The plan is not changed. A picture shows all of the tree, as the one of hpstage report does: --depth and --lines
    are for the text.

    Examples:

    \b
    hpstage tree .hpstage/Digits-1f2e3d4c5b6a
    hpstage tree STORE --study digits --depth 3
    hpstage tree STORE --picture tree.svg
    """
    if picture is not None:
        _draw(store, study, picture)
        return
    with ExitStack() as closing:
        journal = open_journal(store, closing=closing, read_only=True)
        account = new_account(journal)
        account.catch_up(journal)
    for line in draw(account, _lanes(account, study), depth=depth, lines=lines):
        echo(line)


def _draw(store: str, study: str | None, path: Path) -> None:
    kind = path.suffix.lower().removeprefix(".")
    if kind not in _KINDS:
        raise UsageError(
            f"--picture {clean(path)}: give a name that ends in {', '.join(f'.{kind}' for kind in _KINDS)}"
        )
    from hpstage.report import draw_stage_tree, save

    book = open_book(store, study)
    try:
        with replacing(path) as aside:
            save(draw_stage_tree(book), aside, format=kind)
    except OSError as error:
        raise UsageError(f"cannot write {clean(path)}: {error.strerror or error}; give another file") from error
    echo(clean(path))


def _lanes(account: Account, study: str | None) -> dict[NodeId, Lane]:
    """The lanes of the tree that the trials pass; of one ``study``, if it is given.

    Raises:
        UsageError: the plan has no trial of the study.
    """
    book = Book(account, study)
    if study is not None and not book.trials:
        known = dict.fromkeys(map(account.plan.study_of, account.plan.trials))
        there = ", ".join(clean(name) for name in list(known)[:20]) or "none"
        raise UsageError(f"the plan has no trial of study {clean(study)!r}; there are: {there}")
    return book.lanes


def draw(account: Account, lanes: dict[NodeId, Lane], *, depth: int | None, lines: int) -> Iterator[str]:
    """The lines of the tree. What there is no room for is counted where it hangs, and at the end."""
    if not lanes:
        yield "No trial was asked for: there is no tree."
        return
    shown = _choose(lanes, depth, lines)
    below = dict.fromkeys(lanes, 0)  # nodes beneath each that are left out
    for id, lane in reversed(lanes.items()):  # children before their parents
        if lane.node.parent is not None:
            below[lane.node.parent.id] += below[id] + (id not in shown)
    progress = states(account, lanes)
    roots = [lanes[id] for id in sorted(shown, reverse=True) if lanes[id].node.parent is None]
    waiting = [(lane, 0) for lane in roots]
    while waiting:
        lane, level = waiting.pop()
        children = [child for child in lane.children if child.node.id in shown]
        hidden = below[lane.node.id] if len(children) < len(lane.children) else 0
        yield f"{' ' * min(_INDENT, 2 * level)}{_describe(lane, progress, hidden)}"
        children.sort(key=lambda child: (-child.node.start, -child.node.id))
        # Where a line only goes on, it is not moved: a trial of a hundred changes stays on the screen.
        goes_on = len(lane.children) == 1 and lane.children[0].node.start == lane.reach
        inner = level if goes_on else level + 1
        waiting += [(child, inner) for child in children]
    if len(shown) < len(lanes):
        yield f"... {count_of(len(lanes) - len(shown), 'node')} left out (--lines, --depth, --study)"


def _choose(lanes: dict[NodeId, Lane], depth: int | None, lines: int) -> set[NodeId]:
    """What is shown: nearest the root first, then where most trials pass."""
    queue = [(0, -lane.trials, lane.node.id) for lane in lanes.values() if lane.node.parent is None]
    heapq.heapify(queue)
    shown: set[NodeId] = set()
    while queue and len(shown) < lines:
        level, _, id = heapq.heappop(queue)
        shown.add(id)
        if depth is None or level + 1 < depth:
            for child in lanes[id].children:
                heapq.heappush(queue, (level + 1, -child.trials, child.node.id))
    return shown


def _describe(lane: Lane, progress: dict[NodeId, State], hidden: int) -> str:
    node = lane.node
    parts = [f"#{node.id}", f"{node.start:,}-{lane.reach:,}", changes(node), progress[node.id]]
    kept = sorted(step for step, state in node.states.items() if state.kept is not None)
    if kept:
        steps = ", ".join(f"{step:,}" for step in kept[-_KEPT:])
        parts.append(f"kept at {steps}" + (f" and {len(kept) - _KEPT:,} more" if len(kept) > _KEPT else ""))
    parts.append(count_of(lane.trials, "trial"))
    if hidden:
        parts.append(f"(+ {count_of(hidden, 'node')} below)")
    return "  ".join(parts)
