"""The stage tree as it is sent to a browser: a row per branch, trial and failure, and a header. Pure.

A static page has all rows; a page of a server is sent changed rows repeatedly. ``branches.js`` orders, ranks and folds
them. Parents come before their children. All text of users is in JSON strings.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import msgspec

from hpstage.accounting import accounting
from hpstage.accounting.branches import TreeBranch
from hpstage.errors.text import clean, shortened
from hpstage.plan.facts import StageFailed, TrialProposed
from hpstage.plan.nodes import Node, State
from hpstage.report.names import plain
from hpstage.report.tree.branches import changes
from hpstage.schedule.forms import Constant

ROOT = -1
"""The parent index of a branch without a parent, and the branch index of a trial without a requested step."""

HEIGHT = 620
"""Maximum height of the figure in pixels. Rows that do not fit are scrolled to."""

# Maximum numbers of characters.
_NAME = 200  # of a hyperparameter's name
_VALUE = 120
_SUMMARY = 300
_TRACEBACK = 20_000  # from its end
# Maximum numbers of items.
_NAMES = 60  # hyperparameters of a branch or a trial
_POINTS = 8  # points of a varying hyperparameter on a branch
_CURVE = 24  # points of a curve on a branch

Values = dict[str, Any]
"""By hyperparameter: a value, or ``[[step, value], ...]`` if it varies along the branch."""


class BranchRow(msgspec.Struct, array_like=True):
    """A branch of the tree. ``front``: the step up to which it is trained; ``value``: the best metric on it;
    ``values``: the hyperparameters that vary or differ from the parent's; ``kept``: the last saved state; ``points``:
    the metric by step."""

    node: int
    parent: int
    start: int
    reach: int
    front: int
    trials: int
    value: float | None
    state: str
    label: str
    kept: str
    values: Values
    points: list[tuple[int, float]]


class TrialRow(msgspec.Struct, array_like=True):
    """A trial. ``branch``: index of the branch with its last requested step; ``value``: its objective, or its last
    metric; ``seconds``: worker seconds charged to it."""

    name: str
    branch: int
    requested: int
    state: str
    value: float | None
    params: dict[str, str]
    seconds: float


class FailureRow(msgspec.Struct, array_like=True):
    """An exception in the user's code. ``text``: the index of its traceback in ``Rows.texts``, which failures share."""

    branch: int
    step: int
    doing: str
    summary: str
    text: int


class LogRow(msgspec.Struct, array_like=True):
    """The log of a branch: points of curves by name, and the end of its printed output."""

    curves: dict[str, list[tuple[int, float]]]
    output: str


class Header(msgspec.Struct):
    """Properties of the whole tree. ``end``: the last step of the longest trial; ``best``: the index of the best trial;
    ``at``: the branch, step and worker of each chain that is being trained; ``store``: its address without secrets."""

    study: str
    metric: str
    maximize: bool
    end: int
    best: int
    store: str
    at: list[tuple[int, int, str]]


class Rows(msgspec.Struct):
    """Rows by index; ``logs`` by index of the branch. A row replaces an earlier row of the same index. ``reset``:
    discard all earlier rows, which are of another tree; ``gone``: indices of the failures that a later search has
    overcome."""

    reset: bool = False
    branches: dict[int, BranchRow] = {}
    trials: dict[int, TrialRow] = {}
    failures: dict[int, FailureRow] = {}
    texts: dict[int, str] = {}
    gone: list[int] = []
    logs: dict[int, LogRow] = {}
    header: Header | None = None

    def encoded(self) -> str:
        return msgspec.json.encode(self).decode()


def branch_row(
    account: accounting.Accounting, branch: TreeBranch, parent: int, state: str, points: list[tuple[int, float]],
    *, maximize: bool,
) -> BranchRow:  # fmt: skip
    node = branch.node
    front = min(branch.reach, account.front(node.id) or node.start)
    best = (max if maximize else min)((value for _, value in points), default=None)
    return BranchRow(
        node.id, parent, node.start, branch.reach, front, branch.trials, best, state, changes(node),
        _kept_state(node.states), _values_of(node, branch.reach), sampled(points),
    )  # fmt: skip


def _values_of(node: Node, reach: int) -> Values:
    """Return the hyperparameters of a branch that vary or differ from its parent's, up to step ``reach``."""
    parent, found = node.parent, {}
    for i, (name, form) in enumerate(zip(node.names[:_NAMES], node.forms, strict=False)):
        if form.__class__ is Constant:
            if parent is None or form != parent.forms[i]:
                found[plain(name, _NAME)] = _scalar(form.value(node.start))
            continue
        last = max(node.start, reach - 1)
        steps = sorted({node.start + round(k * (last - node.start) / (_POINTS - 1)) for k in range(_POINTS)})
        found[plain(name, _NAME)] = [[step, _scalar(form.value(step))] for step in steps]
    return found


def _scalar(value: object) -> object:
    if isinstance(value, float):
        return float(f"{value:.5g}") if math.isfinite(value) else str(value)
    return value if isinstance(value, bool | int) and abs(value) < 2**53 else shortened(clean(value), _VALUE)


def sampled(points: list[tuple[int, float]]) -> list[tuple[int, float]]:
    """Return evenly spaced points of a curve, including the first and the last."""
    last = len(points) - 1
    chosen = sorted({round(i * last / (_CURVE - 1)) for i in range(_CURVE)}) if points else []
    return [(points[i][0], float(f"{points[i][1]:.5g}")) for i in chosen]


def _kept_state(states: Mapping[int, State]) -> str:
    kept = [step for step, state in states.items() if state.kept is not None]
    if not kept:
        return ""
    state = states[max(kept)]
    assert state.kept is not None
    return f"step {max(kept):,}: {state.kept.key}"


def trial_row(
    name: str, trial: accounting.TrialRow | None, branch: int, state: str | None, value: float | None,
    proposed: TrialProposed | None,
) -> TrialRow:  # fmt: skip
    """Return the row of a trial. ``state``: its Optuna state; ``None`` if it is unfinished."""
    params = [] if proposed is None else list(proposed.params.items())[:_NAMES]
    shown = {plain(key, _NAME): shortened(clean(value) if isinstance(value, str) else value, _VALUE)
             for key, value in params}  # fmt: skip
    ended = "running" if state is None else "failed" if state == "FAIL" else state.lower()
    requested, seconds = (0, 0.0) if trial is None else (trial.requested, trial.charged_seconds)
    return TrialRow(name, branch, requested, ended, _finite(value), shown, round(seconds, 3))


def _finite(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else value


class Texts:
    """Distinct tracebacks: an error in the user's code often fails hundreds of trials with the same traceback."""

    def __init__(self) -> None:
        self._index: dict[str, int] = {}

    def add(self, text: str, found: dict[int, str]) -> int:
        """Return the index of a text; if it is new, add it to ``found``."""
        text = utf8(text[-_TRACEBACK:])
        index = self._index.get(text)
        if index is None:
            index = self._index[text] = len(self._index)
            found[index] = text
        return index


def failure_row(branch: int, fact: StageFailed, texts: Texts, rows: Rows) -> FailureRow:
    """Return the row of a failure. A new traceback is added to the texts of ``rows``."""
    doing, summary = "evaluating" if fact.evaluating else "training", shortened(utf8(fact.failure.summary), _SUMMARY)
    return FailureRow(branch, fact.step, doing, summary, texts.add(fact.failure.traceback, rows.texts))


def utf8(text: str) -> str:
    """Replace lone surrogates, which UTF-8 cannot encode."""
    return text.encode("utf-8", "replace").decode()
