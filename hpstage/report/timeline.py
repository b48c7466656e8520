"""The worker timeline: what each worker did, when."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from hpstage.events import ChainLost, Fact, StateReached, WorkerId
from hpstage.report import style
from hpstage.report.book import Book

TRAIN, EVALUATE, LOAD, SAVE, WASTED = "train", "evaluate", "load", "save", "thrown away"

_COLOURS = {
    TRAIN: style.BLUE,
    EVALUATE: style.ORANGE,
    LOAD: style.GREEN,
    SAVE: style.PURPLE,
    WASTED: style.INK,
}
# Every other stage of a worker is drawn in this, so that neighbours can be told apart without an outline, which would
# swallow the short ones.
_OTHER_TRAIN = "#3A95CC"

_ROW = 0.34  # inches per worker
_LABELLED = 48  # workers; more are drawn without their names
_NAME = 34  # characters of a worker's name


@dataclass(frozen=True, slots=True)
class Bar:
    """A worker did ``activity`` from ``began`` on for ``seconds``. ``stage`` counts the worker's reports."""

    worker: WorkerId
    activity: str
    began: float
    seconds: float
    stage: int


def bars(facts: Iterable[Fact]) -> Iterator[Bar]:
    """The bars of a search, on the clock of its workers. What took no time has none."""
    stages: dict[WorkerId, int] = {}
    for fact in facts:
        match fact:
            case StateReached():
                # In the order in which they are done; ``at`` is the end of the last.
                parts = [
                    (LOAD, fact.load_seconds),
                    (TRAIN, fact.train_seconds),
                    (EVALUATE, fact.evaluate_seconds),
                    (SAVE, fact.save_seconds),
                ]
            case ChainLost():
                parts = [(WASTED, fact.seconds)]
            case _:
                continue
        stage = stages[fact.worker] = stages.get(fact.worker, 0) + 1
        at = fact.at - sum(seconds for _, seconds in parts)
        for activity, seconds in parts:
            if seconds > 0:
                yield Bar(fact.worker, activity, at, seconds, stage)
            at += seconds


def draw_timeline(book: Book) -> Figure:
    """One row per worker, in the order in which they began; x in seconds since the first began."""
    facts: list[StateReached | ChainLost] = [charge.fact for charge in book.charges]
    facts += [waste.fact for waste in book.wastes]
    facts.sort(key=lambda fact: fact.at)
    drawn = list(bars(facts))
    if not drawn:
        return style.nothing("Nothing was trained: there is no timeline.")
    first = min(bar.began for bar in drawn)
    span = max(bar.began + bar.seconds for bar in drawn) - first
    workers = list(dict.fromkeys(bar.worker for bar in sorted(drawn, key=lambda bar: bar.began)))
    rows = {worker: row for row, worker in enumerate(workers)}
    figure, axes = style.figure(min(14.0, 1.3 + _ROW * max(2, len(workers))))
    axes.add_collection(
        PolyCollection([_box(0.0, span, row) for row in rows.values()], facecolors=style.TRACK, edgecolors="none")
    )
    colours = [_OTHER_TRAIN if bar.activity == TRAIN and bar.stage % 2 else _COLOURS[bar.activity] for bar in drawn]
    boxes = [_box(bar.began - first, bar.seconds, rows[bar.worker]) for bar in drawn]
    axes.add_collection(PolyCollection(boxes, facecolors=colours, edgecolors="none"))

    busy = dict.fromkeys(workers, 0.0)
    for bar in drawn:
        busy[bar.worker] += bar.seconds
    share = sum(busy.values()) / (span * len(workers))
    axes.set_title(
        f"Workers: {len(workers)}, busy {min(1.0, share):.0%} of {span:,.1f} s",
        loc="left",
        fontsize=10,
        color=style.INK,
    )
    axes.set_xlim(0.0, span)
    axes.set_ylim(len(workers) - 0.4, -0.6)
    axes.set_xlabel("seconds since the first stage began", fontsize=style.SMALL, color=style.INK)
    if len(workers) <= _LABELLED:
        labels = [f"{_short(worker)}  {min(1.0, busy[worker] / span):.0%}" for worker in workers]
        axes.set_yticks(range(len(workers)), labels=labels, parse_math=False)
        axes.tick_params(axis="y", length=0)
    else:
        axes.set_yticks([])
        axes.set_ylabel(f"{len(workers)} workers", fontsize=style.SMALL, color=style.INK)
    seen = {bar.activity for bar in drawn}
    handles = [Patch(color=colour, label=activity) for activity, colour in _COLOURS.items() if activity in seen]
    handles.append(Patch(color=style.TRACK, label="idle"))
    axes.legend(
        handles=handles,
        loc="lower right",
        bbox_to_anchor=(1.0, 1.0),
        borderaxespad=0.2,
        ncols=len(handles),
        frameon=False,
        fontsize=style.SMALL,
    )
    return figure


def _box(began: float, seconds: float, row: int) -> list[tuple[float, float]]:
    left, right, top, bottom = began, began + seconds, row - 0.36, row + 0.36
    return [(left, top), (right, top), (right, bottom), (left, bottom)]


def _short(worker: WorkerId) -> str:
    return worker if len(worker) <= _NAME else f"{worker[: _NAME - 1]}…"
