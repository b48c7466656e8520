"""The pictures of a report, in the order in which its page shows them. Each has a module that computes its content and
draws it with matplotlib.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from matplotlib.figure import Figure

from hpstage.accounting.book import Book
from hpstage.report.pictures.beside_alone import draw_beside_alone
from hpstage.report.pictures.merge_rate import draw_merge_rate
from hpstage.report.pictures.metrics import draw_metrics
from hpstage.report.pictures.parameters import draw_parameters
from hpstage.report.pictures.savings import draw_savings
from hpstage.report.pictures.stage_tree import draw_stage_tree
from hpstage.report.pictures.style import WIDTH, save
from hpstage.report.pictures.timeline import draw_timeline

__all__ = [
    "PICTURES",
    "Picture",
    "draw_beside_alone",
    "draw_merge_rate",
    "draw_metrics",
    "draw_parameters",
    "draw_savings",
    "draw_stage_tree",
    "draw_timeline",
    "save",
]


HALF, NARROW = 5.4, 3.7
"""Widths in inches: of pictures that are side by side on a page, and of all pictures on a phone. Fonts are as large as
in pictures of :data:`WIDTH`."""


@dataclass(frozen=True, slots=True)
class Picture:
    """A picture of the report. ``name``: the file's name without ``.svg``; ``width``: inches, except on a phone."""

    name: str
    title: str
    caption: str
    draw: Callable[[Book], Figure]
    width: float = HALF


PICTURES = (
    Picture(
        "savings",
        "Savings by cause",
        "Top: from the worker time of all requested steps without sharing to busy worker time. Below: workers' time by "
        "activity. Thrown away: training that was lost with its worker, stopped, or repeated to verify a fork.",
        draw_savings,
    ),
    Picture(
        "stage_tree",
        "Stage tree",
        "Each line is trained once, for all its trials; wider lines have more trials. Labels show the hyperparameters "
        "that change at a branch point. At the end of a line are its trials, their metric, and the number of branches "
        "and trials left out.",
        draw_stage_tree,
        width=WIDTH,
    ),
    Picture(
        "metrics",
        "Metric",
        "Values measured on each branch of the stage tree. A branch continues from the last value before it diverges.",
        draw_metrics,
    ),
    Picture(
        "parameters",
        "Parameters",
        "Top: how much each parameter decides whether a trial is among the better ones (Optuna's PED-ANOVA). Below: a "
        "line for each completed trial, through its parameters to its value; greener is better. Studies are drawn "
        "separately, at most three.",
        draw_parameters,
    ),
    Picture(
        "timeline",
        "Worker timeline",
        "Activities of each worker, and its share of busy time. Successive stages alternate between two blues. Thrown "
        "away: training that was lost with its worker, stopped, or repeated to verify a fork.",
        draw_timeline,
    ),
    Picture(
        "merge_rate",
        "Merge rate",
        "Top: requested steps divided by unique steps, during the search. Below: the numbers of steps.",
        draw_merge_rate,
    ),
)
