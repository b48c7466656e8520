"""Texts of stage trees that are not interactive: labels at branch points, and the trials at the end of each row.

All widths are in points. The functions return positions, and renderers draw there. The interactive tree has the same
texts, as far as there is room.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass

from hpstage.errors.text import count_of
from hpstage.plan.facts import TrialId
from hpstage.report.names import plain, trial_name
from hpstage.report.tree.layout import ROOT, Folded, Layout, Placed

_NAMED = 3  # maximum number of trials named at the end of a branch
_SHORTEST = 8  # minimum number of characters of a cut text
_FARTHEST = 40.0  # maximum points from a branch point to its label
_GAP = 3.0  # points around a text
_DOT = "  \N{MIDDLE DOT}  "  # between texts on a line
_MOST = 0.4  # maximum share of the width for a text
_TRIES = 8  # attempts to find the length of the axis
# Widths of characters, as multiples of the font size: those of matplotlib's font, which is wider than most.
_EM, _UPPER, _DOUBLE = 0.6, 0.7, 1.0
_WIDTHS = {c: em for em, some in ((0.33, " .,:;'|!ijlI"), (0.42, "frt()[]/-"), (0.9, "mwMW@%>=+→×")) for c in some}


@dataclass(frozen=True, slots=True)
class Note:
    """A text of a row. It begins ``right`` points to the right of ``step``. A label is above the row; a text at the
    row's end is on it."""

    step: int
    row: int
    right: float
    text: str
    above: int | None
    """The branch whose changes it shows; ``None`` at the end of a row."""


@dataclass(frozen=True, slots=True)
class Written:
    """All texts of a tree."""

    notes: list[Note]
    end: float
    """The step at the right end of the axis, which has room for all texts."""


def write(layout: Layout, shown: Placed, width: float, size: float) -> Written:
    """Return the texts of the rows of ``shown``, in a font of ``size`` points, on an axis from step 0 that is ``width``
    points wide."""
    branches = layout.branches
    labels: dict[int, list[tuple[int, int, str]]] = {row: [] for row in range(shown.count)}
    for i, row in shown.rows.items():
        labels[row].append((i, branches[i].branch.node.start, plain(branches[i].label, 200)))
    ends = {row: (step, _cut(text, _MOST * width, size)) for step, row, text in _ends(layout, shown)}
    end = float(max(laid.branch.reach for laid in branches))
    for _ in range(_TRIES):
        notes, beyond = _place(labels, ends, width, end, size)
        if beyond <= 0:
            break
        end *= width / max(0.1 * width, width - beyond)
    return Written(notes, end)


def _place(
    labels: dict[int, list[tuple[int, int, str]]],
    ends: dict[int, tuple[int, str]],
    width: float,
    end: float,
    size: float,
) -> tuple[list[Note], float]:
    """Return the notes on an axis with step ``end`` at ``width`` points, and by how many points they exceed it."""
    scale, beyond = width / end, 0.0
    notes = []
    for row, own in labels.items():
        free = 0.0  # points from step 0
        step, last = ends.get(row, (0, ""))
        before = []  # labels longer than their branch, which stand before its trials
        for place, (i, start, label) in enumerate(own):
            at = max(start * scale + _GAP, free)
            # The values at the start of a trial are less important than the next changes.
            room = own[1][1] * scale if start == 0 and place + 1 < len(own) else width
            text = _cut(label, min(room - at, _MOST * width), size)
            if last and room == width and at + _width(text, size) > step * scale:
                before.append(label)
                continue
            if at - start * scale < _FARTHEST:
                beyond = max(beyond, at + min(_width(label, size) if start else 0.0, _MOST * width) - width)
            if text and at - start * scale < _FARTHEST:
                notes.append(Note(start, row, at - start * scale, text, i))
                free = at + _width(text, size) + _GAP
        if row in ends:
            last = _DOT.join(filter(None, (_cut(_DOT.join(before), _MOST * width, size), last)))
            at = max(step * scale + _GAP, free)
            notes.append(Note(step, row, at - step * scale, last, None))
            beyond = max(beyond, at + _width(last, size) - width)
    return notes, beyond


def _ends(layout: Layout, shown: Placed) -> list[tuple[int, int, str]]:
    """Return step, row and text of each row's end: the trials that end there, and the number of folded branches."""
    book, branches = layout.book, layout.branches
    ending: dict[int, list[TrialId]] = {}
    for id, leaf in layout.leaves.items():
        ending.setdefault(leaf, []).append(id)
    folded = layout.folded(shown.rows)
    continued = {branches[i].parent for i, row in shown.rows.items() if shown.rows.get(branches[i].parent) == row}
    stubs = {stub.branch for stub in shown.stubs}
    found: list[tuple[int, int, str]] = []
    for i, row in shown.rows.items():
        parts = []
        trials = ending.get(i, [])
        if trials:
            names = [trial_name(book, id) for id in trials]
            parts.append(listed(names, _NAMED))
            values = {None if value is None else f"{value:.4g}" for value in map(layout.book.value_of, trials)}
            parts += [value for value in values if value is not None and len(values) == 1]
        if i in folded and i not in stubs:
            parts.append(_folded(folded[i]))
        if parts and i not in continued:
            found.append((branches[i].branch.reach, row, "  ".join(parts)))
    for stub in shown.stubs:
        start = 0 if stub.branch == ROOT else branches[stub.branch].branch.node.start
        found.append((start, stub.row, _folded(stub.folded)))
    return found


def _folded(count: Folded) -> str:
    branches = "branch" if count.nodes == 1 else "branches"
    return f"+ {count.nodes:,} {branches}, {count_of(count.trials, 'trial')}"


def listed(names: Sequence[str], most: int) -> str:
    """Return a list of trials such as ``trials 3, 12, 17 + 4``, with at most ``most`` names. Of successive trials of
    one study, the first is named with it: ``trials a/3, 12, b/0``."""
    more = f" + {len(names) - most:,}" if len(names) > most else ""
    studies = [name.rpartition("/")[0] for name in names[:most]]
    shown = [
        name.removeprefix(f"{study}/") if study == before else name
        for name, study, before in zip(names, studies, [None, *studies], strict=False)
    ]
    return f"trial{'' if len(names) == 1 else 's'} {', '.join(shown)}{more}"


def _width(text: str, size: float) -> float:
    """Return the approximate width of a text in points."""
    return size * sum(map(_em, text))


def _em(c: str) -> float:
    if c in _WIDTHS:
        return _WIDTHS[c]
    return _DOUBLE if unicodedata.east_asian_width(c) in "WF" else _UPPER if c.isupper() else _EM


def _cut(text: str, room: float, size: float) -> str:
    """Cut a text to ``room`` points; return ``""`` if there is too little room."""
    if _width(text, size) + _GAP <= room:
        return text
    kept, used = "", _GAP + size
    for c in text:
        used += size * _em(c)
        if used > room:
            break
        kept += c
    kept = kept.rstrip(" .,")
    return f"{kept}\N{HORIZONTAL ELLIPSIS}" if len(kept) >= _SHORTEST else ""
