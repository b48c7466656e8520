"""What branches have logged and printed, as the drawer of the tree shows it: curves of few points, ends of outputs."""

from __future__ import annotations

import json
import math
from typing import Any

from hpstage.errors import CheckpointError
from hpstage.report.logs import broken_off_steps, joined, loaded, node_log_keys
from hpstage.report.tree.layout import Layout
from hpstage.text import shortened

_POINTS = 24  # of a curve, on a branch
_NAMES = 8  # of curves, on a branch
_OUTPUT = 4_000  # characters of a branch's output, the last ones
_READ = 4_000  # logs that are read: those of the branches that have failed, then of those with the most trials
_CHARACTERS = 2_000_000  # in all


def logs_of(layout: Layout) -> dict[str, list[Any]]:
    """Return, for the branches that have logged or printed anything, ``branch``, ``curves`` (JSON) and ``output``."""
    table: dict[str, list[Any]] = {"branch": [], "curves": [], "output": []}
    plan, checkpoints = layout.book.account.plan, layout.book.checkpoints
    if checkpoints is None:
        return table
    try:
        there = checkpoints.logs()
    except CheckpointError:
        return table  # a report is of the journal; it may be read where its checkpoints cannot
    broken_off, spent, read = broken_off_steps(plan), 0, 0
    nodes = [(branch.lane.node, branch.lane.trials) for branch in layout.branches] if there else []
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
            shortened(name, 80): _sampled([point for point in values.items() if math.isfinite(point[1])])
            for name, values in list(log.values.items())[:_NAMES]
        }
        row = index, json.dumps({name: points for name, points in curves.items() if points}), log.output[-_OUTPUT:]
        spent += len(row[1]) + len(row[2])
        for cells, value in zip(table.values(), row, strict=True):
            cells.append(value)
    return table


def _sampled(points: list[tuple[int, float]]) -> list[tuple[int, float]]:
    """Return some points of a curve, evenly, with its first and last one."""
    last = len(points) - 1
    chosen = sorted({round(i * last / (_POINTS - 1)) for i in range(_POINTS)}) if points else []
    return [(points[i][0], float(f"{points[i][1]:.5g}")) for i in chosen]
