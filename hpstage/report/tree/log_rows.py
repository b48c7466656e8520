"""Logs of branches for the drawer of the tree: curves of few points, and the ends of printed outputs."""

from __future__ import annotations

import math

from hpstage.accounting.book import Book
from hpstage.errors import CheckpointError
from hpstage.report.names import plain
from hpstage.report.tree.rows import LogRow, sampled, utf8
from hpstage.report.trial_log import broken_off_steps, joined, loaded, node_log_keys

_NAMES = 8  # of curves, on a branch
_OUTPUT = 4_000  # characters of a branch's output, the last ones
_READ = 4_000  # logs that are read: those of the branches that have failed, then of those with the most trials
_CHARACTERS = 2_000_000  # in all


def logs_of(book: Book) -> dict[int, LogRow]:
    """Return the rows of the branches that have logged or printed anything, by the index of the branch: its place among
    ``book.branches``."""
    found: dict[int, LogRow] = {}
    plan, checkpoints = book.account.plan, book.checkpoints
    if checkpoints is None:
        return found
    try:
        there = checkpoints.logs()
    except CheckpointError:
        return found  # a report is of the journal; it may be read where its checkpoints cannot
    broken_off, spent, read = broken_off_steps(plan), 0, 0
    nodes = [(branch.node, branch.trials) for branch in book.branches.values()] if there else []
    for index in sorted(range(len(nodes)), key=lambda i: (nodes[i][0].id not in broken_off, -nodes[i][1], i)):
        node = nodes[index][0]
        keys = [key for key in node_log_keys(plan, node, broken_off.get(node.id, ())) if key in there]
        read += len(keys)
        if not keys:
            continue
        if read > _READ or spent > _CHARACTERS:
            break
        log = joined(loaded(checkpoints, keys))
        curves = {
            plain(name, 80): sampled([point for point in values.items() if math.isfinite(point[1])])
            for name, values in list(log.values.items())[:_NAMES]
        }
        row = LogRow({name: points for name, points in curves.items() if points}, utf8(log.output[-_OUTPUT:]))
        found[index] = row
        spent += len(row.output) + 16 * sum(map(len, row.curves.values()))
    return found
