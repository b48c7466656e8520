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
"""Widths in inches of pictures that lie side by side on a page, and of all on a phone. Text is as large as in those of
:data:`WIDTH`."""


@dataclass(frozen=True, slots=True)
class Picture:
    """``name`` is the file's name without ``.svg``; ``width`` in inches, except on a phone."""

    name: str
    title: str
    caption: str
    draw: Callable[[Book], Figure]
    width: float = HALF


PICTURES = (
    Picture(
        "savings",
        "Savings by cause",
        "From the time of all requested steps without sharing to the time that workers spent; below, on what. Thrown "
        "away is training that was lost with its worker, stopped, or repeated to verify a fork.",
        draw_savings,
    ),
    Picture(
        "stage_tree",
        "Stage tree",
        "Each line is trained once, for all trials on it: the wider, the more. Labels show what changes where "
        "branches diverge; at the ends of lines are the trials with their metric, and the number of those left out.",
        draw_stage_tree,
        width=WIDTH,
    ),
    Picture(
        "metrics",
        "Metric",
        "The values measured on each branch of the tree, and between a branch and those that fork from it.",
        draw_metrics,
    ),
    Picture(
        "parameters",
        "Parameters",
        "How much each parameter decides whether a trial is among the better ones (Optuna's PED-ANOVA); below, a line "
        "for each completed trial, through its parameters to its value: greener is better.",
        draw_parameters,
    ),
    Picture(
        "timeline",
        "Worker timeline",
        "What each worker did, and its share of busy time. Successive stages of training alternate between two blues; "
        "what was thrown away was lost with its worker, stopped, or repeated to verify a fork.",
        draw_timeline,
    ),
    Picture(
        "merge_rate",
        "Merge rate",
        "Requested steps over unique steps in the course of the search; below, the steps themselves.",
        draw_merge_rate,
    ),
)
