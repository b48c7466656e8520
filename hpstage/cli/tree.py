"""``hpstage tree``: the search plan as text."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import typer

from hpstage.cli.terminal import echo
from hpstage.errors import UsageError
from hpstage.plan.facts import NodeId
from hpstage.plan.nodes import Node
from hpstage.report.account import Account, keep, new_account
from hpstage.report.book import open_book
from hpstage.report.files import replacing
from hpstage.schedule.forms import Constant, Form
from hpstage.store.opening import open_journal
from hpstage.text import clean, count_of, shortened

_LINES = 200
_VALUE = 40  # characters of a value
_NAMES = 6  # hyper-parameters of a line
_KEPT = 4  # kept steps of a line
_KINDS = ("png", "svg", "pdf")
_INDENT = 40  # columns; what is deeper is not moved further

Progress = Literal["failed", "running", "waiting", "done", "dropped"]


@dataclass(slots=True)
class Branch:
    """A node as far as the trials that are shown go along it. ``below``: nodes beneath it that are left out."""

    node: Node
    reach: int
    trials: int = 0
    children: list[Branch] = field(default_factory=list)
    shown: bool = False
    below: int = 0


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
        keep(account)
    roots = branches(account, study)
    for line in draw(account, roots, depth=depth, lines=lines):
        echo(line)


def _draw(store: str, study: str | None, path: Path) -> None:
    kind = path.suffix.lower().removeprefix(".")
    if kind not in _KINDS:
        raise UsageError(
            f"--picture {clean(path)}: give a name that ends in {', '.join(f'.{kind}' for kind in _KINDS)}"
        )
    from hpstage.report import draw_stage_tree, save

    book = open_book(store, study)
    keep(book)
    try:
        with replacing(path) as aside:
            save(draw_stage_tree(book), aside, format=kind)
    except OSError as error:
        raise UsageError(f"cannot write {clean(path)}: {error.strerror or error}; give another file") from error
    echo(clean(path))


def branches(account: Account, study: str | None) -> list[Branch]:
    """The roots of the tree that the trials pass; of one ``study``, if it is given.

    Raises:
        UsageError: the plan has no trial of the study.
    """
    found: dict[NodeId, Branch] = {}
    known: dict[str, None] = {}
    for id, trial in account.plan.trials.items():
        name = account.plan.study_of(id)
        known[name] = None
        if study is not None and name != study:
            continue
        for node, _, stop in trial.legs(trial.asked):
            branch = found.setdefault(node.id, Branch(node, stop))
            branch.reach = max(branch.reach, stop)
            branch.trials += 1
    if study is not None and study not in known:
        there = ", ".join(clean(name) for name in list(known)[:20]) or "none"
        raise UsageError(f"the plan has no trial of study {clean(study)!r}; there are: {there}")
    roots = []
    for branch in found.values():
        parent = branch.node.parent
        if parent is None:
            roots.append(branch)
        else:
            found[parent.id].children.append(branch)
    return roots


def draw(account: Account, roots: list[Branch], *, depth: int | None, lines: int) -> Iterator[str]:
    """The lines of the tree. What there is no room for is counted where it hangs, and at the end."""
    if not roots:
        yield "No trial was asked for: there is no tree."
        return
    left_out = _choose(roots, depth, lines)
    progress = _progress(account)
    ordered = sorted(roots, key=lambda branch: branch.node.id)
    waiting = [(branch, 0) for branch in reversed(ordered) if branch.shown]
    while waiting:
        branch, level = waiting.pop()
        yield f"{' ' * min(_INDENT, 2 * level)}{_describe(account, branch, progress)}"
        shown = [child for child in branch.children if child.shown]
        shown.sort(key=lambda child: (-child.node.start, -child.node.id))
        # Where a line only goes on, it is not moved: a trial of a hundred changes stays on the screen.
        goes_on = len(branch.children) == 1 and branch.children[0].node.start == branch.reach
        inner = level if goes_on else level + 1
        waiting += [(child, inner) for child in shown]
    if left_out:
        yield f"... {count_of(left_out, 'node')} left out (--lines, --depth, --study)"


def _choose(roots: list[Branch], depth: int | None, lines: int) -> int:
    """Mark what is shown: nearest the root first, then where most trials pass. Returns how many are left out."""
    queue = [(0, -root.trials, root.node.id, root) for root in roots]
    heapq.heapify(queue)
    left_out = 0
    for _ in range(lines):
        if not queue:
            break
        level, _, _, branch = heapq.heappop(queue)
        branch.shown = True
        if depth is None or level + 1 < depth:
            for child in branch.children:
                heapq.heappush(queue, (level + 1, -child.trials, child.node.id, child))
    # Parents were created before their children.
    ordered: list[Branch] = []
    walk = list(roots)
    while walk:
        branch = walk.pop()
        ordered.append(branch)
        walk += branch.children
    for branch in reversed(ordered):
        branch.below = sum(child.below + (not child.shown) for child in branch.children)
        left_out += not branch.shown
    return left_out


def _progress(account: Account) -> dict[NodeId, Progress]:
    """What is being done about a node, or has gone wrong with it."""
    plan = account.plan
    found: dict[NodeId, Progress] = {}
    for state in plan.wanted():
        node: Node | None = state.node
        while node is not None and node.id not in found:
            found[node.id] = "waiting"
            node = node.parent
    for chain in plan.chains.values():
        for span in chain.ahead():
            found[span.node] = "running"
    for failure in account.failures():
        found[failure.node] = "failed"
    return found


def _describe(account: Account, branch: Branch, progress: dict[NodeId, Progress]) -> str:
    node = branch.node
    said = progress.get(node.id, "dropped")
    if said in ("waiting", "dropped") and account.trained.get(node.id, 0) >= branch.reach:
        said = "done"
    parts = [f"#{node.id}", f"{node.start:,}-{branch.reach:,}", _changes(node), said]
    kept = sorted(step for step, state in node.states.items() if state.kept is not None)
    if kept:
        steps = ", ".join(f"{step:,}" for step in kept[-_KEPT:])
        parts.append(f"kept at {steps}" + (f" and {len(kept) - _KEPT:,} more" if len(kept) > _KEPT else ""))
    parts.append(count_of(branch.trials, "trial"))
    if branch.below and not all(child.shown for child in branch.children):
        parts.append(f"(+ {count_of(branch.below, 'node')} below)")
    return "  ".join(parts)


def _changes(node: Node) -> str:
    """The forms under which the node trains; below a parent, those that are not the parent's."""
    parent = node.parent
    told = []
    for i, (name, form) in enumerate(zip(node.names, node.forms, strict=True)):
        before = None if parent is None else parent.forms[i]
        if before is None:
            told.append(f"{clean(name)} {_form(form, node.start)}")
        elif form is not before and form != before:
            told.append(f"{clean(name)} {_value(before.value(node.start - 1))} -> {_form(form, node.start)}")
    more = len(told) - _NAMES
    return ", ".join(told[:_NAMES]) + (f" and {more:,} more" if more > 0 else "")


def _form(form: Form, start: int) -> str:
    value = _value(form.value(start))
    return value if form.__class__ is Constant else f"{type(form).__name__.lower()} from {value}"


def _value(value: object) -> str:
    return shortened(clean(value) if isinstance(value, str) else value, _VALUE)
