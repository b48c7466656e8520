"""``hpstage tree``: shows the stage tree of a store as text, or draws it into a file."""

from __future__ import annotations

import heapq
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Group
from rich.text import Text
from rich.tree import Tree

from hpstage.accounting.book import Book, open_book
from hpstage.accounting.branch_states import BranchState, states
from hpstage.accounting.branches import TreeBranch
from hpstage.cli import options
from hpstage.cli.terminal import columns, echo, show
from hpstage.errors import UsageError
from hpstage.errors.text import clean, count_of, folded, shortened
from hpstage.plan.facts import NodeId
from hpstage.report.files import refusing, replacing
from hpstage.report.tree.branches import changes

_LINES = 200
_KINDS: dict[str, Literal["png", "svg", "pdf"]] = {".png": "png", ".svg": "svg", ".pdf": "pdf"}
_INDENT = 40  # maximum columns; deeper nodes are not indented further, and name their parent
_GUIDE = 4  # columns of rich's guides
_HANGING = " " * 4
_STYLES: dict[BranchState, str] = {
    "failed": "bold red", "running": "cyan", "waiting": "yellow", "interrupted": "yellow", "done": "green",
    "trained for another study": "green", "dropped": "dim",
}  # fmt: skip


def tree(
    store: options.Store,
    depth: Annotated[
        int | None, typer.Option(min=1, help="Maximum number of levels to show; 1: only the roots.")
    ] = None,
    study: Annotated[str | None, typer.Option(help="Show only nodes of this study's trials.")] = None,
    lines: Annotated[int, typer.Option(min=1, help="Maximum number of nodes to show, nearest the root first.")] = (
        _LINES
    ),
    picture: Annotated[Path | None, typer.Option(help="Draw the tree into this file (.png, .svg or .pdf) instead.")] = (
        None
    ),
) -> None:
    """Show the stage tree of a store.

    Each line shows a node: its steps, the hyperparameters that change there, its state (waiting, running, done,
    trained for another study, failed, interrupted; dropped: no trial needs its remaining steps), its checkpoints, the
    best value of the metric at or below it, and the number of trials through it. The store is not changed.

    --picture draws the whole tree, as in hpstage report; --depth and --lines apply only to the text.

    Examples:

    \b
    hpstage tree .hpstage/Digits-1f2e3d4c5b6a
    hpstage tree STORE --study digits --depth 3
    hpstage tree STORE --picture tree.svg
    """
    if picture is not None:
        _draw(store, study, picture)
        return
    show(draw(open_book(store, study), depth=depth, lines=lines, width=columns()))


def _draw(store: str, study: str | None, path: Path) -> None:
    kind = _KINDS.get(path.suffix.lower())
    if kind is None:
        raise UsageError(f"--picture {clean(path)}: give a name that ends in {', '.join(_KINDS)}")
    from hpstage.report import draw_stage_tree, save

    book = open_book(store, study)
    with refusing(path), replacing(path) as aside:
        save(draw_stage_tree(book), aside, format=kind)
    echo(clean(path))


def draw(book: Book, *, depth: int | None, lines: int, width: int | None) -> Tree | Text | Group:
    """Return the tree of the branches of the book's trials. Nodes that are left out are counted at their parent, and at
    the end."""
    branches = book.branches
    if not branches:
        return Text("No trial was requested: there is no tree.")
    shown = _choose(branches, depth, lines)
    below = dict.fromkeys(branches, 0)  # number of nodes left out beneath each
    for id, branch in reversed(branches.items()):  # children before their parents
        if branch.node.parent is not None:
            below[branch.node.parent.id] += below[id] + (id not in shown)
    progress = states(book.account, branches, book.study)
    deepest = _INDENT if width is None else min(_INDENT, width // 3)
    drawn = Tree("", hide_root=True, guide_style="dim")
    roots = [branches[id] for id in sorted(shown, reverse=True) if branches[id].node.parent is None]
    trunk = sum(branch.node.parent is None for branch in branches.values()) == 1
    waiting = [(branch, drawn, 0, trunk, False) for branch in roots]
    while waiting:
        branch, place, level, trunk, after = waiting.pop()
        children = [child for child in branch.children if child.node.id in shown]
        hidden = below[branch.node.id] if len(children) < len(branch.children) else 0
        room = None if width is None else width - _GUIDE * level
        own = place.add(_packed(_describe(book, branch, progress[branch.node.id], hidden, after=after), room))
        children.sort(key=lambda child: (-child.node.start, -child.node.id))
        # Lines are not indented before the first branch point: a trial with a hundred changes stays on the screen.
        trunk = trunk and len(branch.children) == 1 and branch.children[0].node.start == branch.reach
        cramped = not trunk and _GUIDE * (level + 1) > deepest
        inner = (place, level) if trunk or cramped else (own, level + 1)
        waiting += [(child, *inner, trunk, cramped) for child in children]
    notes = []
    if len(shown) < len(branches):
        notes.append(f"... {count_of(len(branches) - len(shown), 'node')} left out (--lines, --depth, --study)")
    if book.rejected:
        notes.append(f"{count_of(len(book.rejected), 'trial')} rejected by the space, and not trained")
    return Group(drawn, *map(Text, notes)) if notes else drawn


def _choose(branches: dict[NodeId, TreeBranch], depth: int | None, lines: int) -> set[NodeId]:
    """Return the branches to show: nearest to the root first, and of those at the same level, most trials first."""
    queue = [(0, -branch.trials, branch.node.id) for branch in branches.values() if branch.node.parent is None]
    heapq.heapify(queue)
    shown: set[NodeId] = set()
    while queue and len(shown) < lines:
        level, _, id = heapq.heappop(queue)
        shown.add(id)
        if depth is None or level + 1 < depth:
            for child in branches[id].children:
                heapq.heappush(queue, (level + 1, -child.trials, child.node.id))
    return shown


def _describe(book: Book, branch: TreeBranch, state: BranchState, hidden: int, *, after: bool) -> list[Text]:
    """Return the parts of a branch's line. ``after``: with the name of its parent."""
    node, metric, value = branch.node, book.metric, book.measured[branch.node.id].value
    words = [Text(f"#{node.id}", "dim"), Text(f"{node.start:,}-{branch.reach:,}")]
    if after and node.parent is not None:
        words.append(Text(f"after #{node.parent.id}", "dim"))
    if changed := changes(node):
        words.append(Text(changed))
    words.append(Text(state, _STYLES[state]))
    if metric is not None and value is not None:
        words.append(Text(f"{clean(shortened(metric))} {shortened(value)}", "bold"))
    kept = [step for step, state in node.states.items() if state.kept is not None]
    if kept:
        more = f" and {len(kept) - 1:,} more" if len(kept) > 1 else ""
        words.append(Text(f"checkpoint at {max(kept):,}{more}"))
    words.append(Text(count_of(branch.trials, "trial")))
    if hidden:
        words.append(Text(f"(+ {count_of(hidden, 'node')} below)", "dim"))
    return words


def _packed(parts: list[Text], width: int | None) -> Text:
    """Return the parts on as few lines as possible. Lines after the first are indented; words are not cut."""
    line, used = Text(), 0
    for part in parts:
        if width is not None and part.cell_len > width - len(_HANGING):
            part = Text(folded(part.plain, width - len(_HANGING)).replace("\n", f"\n{_HANGING}"), part.style)
        columns = part.cell_len
        if used and width is not None and used + 2 + columns > width:
            line.append(f"\n{_HANGING}")
        elif used:
            line.append("  ")
        line.append_text(part)
        used = len(line.plain) - line.plain.rfind("\n") - 1
    return line
