"""The study's parameters: their importances, and the values that the best trials have."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure

from hpstage.accounting.book import Book
from hpstage.errors.text import shortened
from hpstage.report.names import plain
from hpstage.report.pictures import style
from hpstage.report.pictures.stage_tree import colour_of

_MOST = 8  # maximum number of parameters drawn, the most important ones
_FEWEST = 4  # minimum number of trials for importances
_LINES = 1000  # maximum number of trials drawn, the best ones
_TICKS = 6  # maximum number of values of a parameter that are all labelled
_NAME = 18  # maximum number of characters of a name
_DECADES = 20.0  # numbers that differ by this factor are on a logarithmic scale
_STUDIES = 3  # maximum number of studies drawn
_HEIGHT, _BAR = 2.6, 0.2  # inches
_TITLE = "Importance of parameters, and the trials' values"
_TOO_FEW = "No parameters can be compared: too few trials are complete."

Scored = tuple[Mapping[str, Any], float]
"""The parameters of a trial, and its value."""


@style.in_our_style
def draw_parameters(book: Book) -> Figure:
    """Draw, for each study, the importances of parameters, and below them a line for each completed trial, through its
    parameters to its value, coloured by rank.

    Only parameters that all completed trials have, with different values, are considered; the most important are drawn.
    Of studies that can be drawn, these are the first three.
    """
    reasons: dict[str, None] = {}
    able: list[_Compared] = []
    for study in book.studies:
        one = _compared(Book(book.account, study))
        if isinstance(one, str):
            reasons[one] = None
        else:
            able.append(one)
        if len(able) == _STUDIES:
            break
    if not able:
        return style.nothing("\n".join(reasons) or _TOO_FEW)
    figure = style.blank(sum(one.height for one in able))
    parts = figure.subfigures(len(able), 1, squeeze=False, height_ratios=[one.height for one in able])
    for part, one in zip(parts.flat, able, strict=True):
        above, below = part.subplots(2, 1, height_ratios=[one.height - _HEIGHT, _HEIGHT])
        _bars(above, one.weights)
        style.title(above, _TITLE if len(book.studies) == 1 else f"{_TITLE}: {plain(one.study, _NAME)}")
        _lines(below, one.trials, list(one.weights), one.metric)
    return figure


@dataclass(frozen=True, slots=True)
class _Compared:
    """The completed trials of a study, the best last, and the importances of the parameters that are drawn."""

    study: str
    metric: str
    trials: Sequence[Scored]
    weights: Mapping[str, float]

    @property
    def height(self) -> float:
        return _HEIGHT + _BAR * len(self.weights)


def _compared(book: Book) -> _Compared | str:
    """Return what is drawn of a study, or why it cannot be."""
    proposed = book.account.plan.searches.proposed
    values = {id: one for id, (one, *_) in book.values.items() if id in proposed and math.isfinite(one)}
    trials = [(proposed[id].params, value) for id, value in values.items()]
    names = [name for name in (trials[0][0] if trials else ()) if all(name in params for params, _ in trials)]
    names = [name for name in names if len({str(params[name]) for params, _ in trials}) > 1]
    if len(trials) < _FEWEST:
        return _TOO_FEW
    if not names:
        return "No parameters differ among the completed trials."
    if len({value for _, value in trials}) == 1:
        return "Importances of parameters cannot be computed: all completed trials have the same value."
    weights = importances([({name: params[name] for name in names}, value) for params, value in trials], book.maximize)
    ranked = sorted(trials, key=lambda one: one[1] if book.maximize else -one[1])[-_LINES:]  # the best are on top
    return _Compared(str(book.study), book.metric or "value", ranked, dict(islice(weights.items(), _MOST)))


def importances(trials: Sequence[Scored], maximize: bool) -> dict[str, float]:
    """Return the importances of parameters, which add up to 1, the largest first.

    They are Optuna's, by PED-ANOVA (Watanabe, Bansal, Hutter, IJCAI 2023): how much a parameter decides whether a trial
    is among the better ones, within the values that were tried.

    Args:
        trials: all have the same parameters.
    """
    # Imported only here: pictures of a plan without results do not need Optuna.
    import optuna
    from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution

    from hpstage.optuna.stand_in import quiet_optuna

    spaces: dict[str, BaseDistribution] = {}
    numbers = set[str]()
    for name in trials[0][0]:
        values = [params[name] for params, _ in trials]
        scale = _scale(values)
        if scale is None:
            spaces[name] = CategoricalDistribution(sorted({*map(str, values)}))
        else:
            spaces[name] = FloatDistribution(min(values), max(values), log=scale is math.log)
            numbers.add(name)
    with quiet_optuna(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the evaluator is experimental
        study = optuna.create_study(direction="maximize" if maximize else "minimize")
        study.add_trials(
            [
                optuna.create_trial(
                    params={name: float(one) if name in numbers else str(one) for name, one in params.items()},
                    distributions=spaces,
                    value=value,
                )
                for params, value in trials
            ]
        )
        evaluator = optuna.importance.PedAnovaImportanceEvaluator()
        found = optuna.importance.get_param_importances(study, evaluator=evaluator)
    return dict(sorted(found.items(), key=lambda one: -one[1]))


def _scale(values: Sequence[Any]) -> Callable[[float], float] | None:
    """Return the scale of an axis for numbers; ``None`` if a value is not a finite number."""
    if not all(isinstance(value, int | float) and type(value) is not bool and math.isfinite(value) for value in values):
        return None
    low, high = float(min(values)), float(max(values))
    return math.log if low > 0 and high >= _DECADES * low else float


def _bars(axes: Axes, weights: Mapping[str, float]) -> None:
    style.tidy(axes)
    axes.barh(range(len(weights)), list(weights.values()), color=style.BLUE, height=0.6)
    for row, weight in enumerate(weights.values()):
        axes.text(weight, row, f" {weight:.2f}", va="center", fontsize=style.SMALL, color=style.INK)
    axes.set_yticks(range(len(weights)), labels=list(map(_named, weights)), parse_math=False)
    axes.tick_params(axis="y", length=0)
    axes.invert_yaxis()
    axes.set_xticks([])
    axes.spines["bottom"].set_visible(False)
    axes.set_xlim(0.0, 1.15 * max(weights.values()) or 1.0)


def _lines(axes: Axes, trials: Sequence[Scored], names: Sequence[str], metric: str) -> None:
    """Draw a line for each trial, the last on top."""
    style.tidy(axes)
    columns = [_Column([params[name] for params, _ in trials]) for name in names]
    columns.append(_Column([value for _, value in trials]))
    lines = [[(x, column.heights[i]) for x, column in enumerate(columns)] for i in range(len(trials))]
    rank = {value: i for i, (_, value) in enumerate(trials)}  # equal values have equal colours
    colours = [colour_of(rank[value] / (len(trials) - 1)) for _, value in trials]
    axes.add_collection(LineCollection(lines, colors=colours, linewidths=0.8, alpha=0.7))
    for x, column in enumerate(columns):
        axes.axvline(x, color=style.FAINT, linewidth=0.6, zorder=0)
        for height, text in column.ticks:
            axes.text(x, height, f" {text}", va="center", fontsize=style.TINY, color=style.INK, parse_math=False)
    axes.set_xticks(range(len(columns)), labels=list(map(_named, (*names, metric))), parse_math=False)
    axes.tick_params(axis="x", length=0)
    axes.set_yticks([])
    axes.spines["bottom"].set_visible(False)
    axes.set_xlim(-0.1, len(columns) - 0.5)
    axes.set_ylim(-0.06, 1.06)


class _Column:
    """The positions of a parameter's values, from 0 to 1, and the labels on its axis."""

    def __init__(self, values: Sequence[Any]) -> None:
        scale = _scale(values)
        ticks: list[tuple[Any, str]]
        if scale is None:
            order = sorted({*map(str, values)})
            places: dict[Any, float] = {text: i / max(1, len(order) - 1) for i, text in enumerate(order)}
            self.heights = [places[str(value)] for value in values]
            ticks = [(text, _named(text)) for text in order]
        else:
            low, high = scale(min(values)), scale(max(values))
            places = {value: (scale(value) - low) / (high - low or 1.0) for value in sorted({*values})}
            self.heights = [places[value] for value in values]
            ticks = [(value, f"{value:.4g}") for value in places]
        shown = ticks if len(ticks) <= _TICKS else [ticks[0], ticks[-1]]
        self.ticks = [(places[value], text) for value, text in shown]


def _named(text: str) -> str:
    return plain(shortened(text, _NAME))
