"""The parameters of a study's earlier trials, in columns, to find quickly the trials that start like a proposal."""

from __future__ import annotations

import threading
from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import optuna
from optuna.distributions import BaseDistribution, FloatDistribution, IntDistribution
from optuna.trial import FrozenTrial, TrialState

Numerical = FloatDistribution | IntDistribution
Floats = npt.NDArray[np.float64]


def scaled(distribution: Numerical, values: Floats) -> Floats:
    """Map values to the parameter's scale, logarithmic if it has ``log``: 0 at its low end, 1 at its high end."""
    low, high = float(distribution.low), float(distribution.high)
    if distribution.log:
        with np.errstate(divide="ignore", invalid="ignore"):  # values from another range may be zero or less
            return np.asarray(np.log(values / low) / np.log(high / low))
    return np.asarray((values - low) / (high - low))


def possible(distribution: Numerical, values: Floats) -> npt.NDArray[np.bool_]:
    """Return which of the values are in the distribution: within its range and, if it has steps, on its grid."""
    inside = (values >= distribution.low) & (values <= distribution.high)
    if distribution.step is not None:
        places = (values - distribution.low) / distribution.step
        inside &= np.abs(places - np.round(places)) < 1e-8  # Optuna's own tolerance
    return np.asarray(inside)


def _extends(trial: FrozenTrial, known: FrozenTrial) -> bool:
    """Whether ``trial`` was read from the storage no earlier than ``known``: parameters are only added to a trial."""
    return known.params.keys() <= trial.params.keys() and not known.state.is_finished()


@dataclass(frozen=True, slots=True)
class Wish:
    """One parameter of a proposal, and the maximum distance of a value that replaces the proposed one."""

    name: str
    distribution: BaseDistribution
    value: Any
    radius: float  # in the parameter's scale, in which its range has length 1; 0: equal values only


@dataclass(frozen=True, slots=True)
class Companion:
    """An earlier trial that is near in the first ``depth`` wishes, and the share of a trial saved by adopting them."""

    trial: FrozenTrial
    depth: int
    gain: float


class Companions:
    """The parameters of a study's trials as of the last :meth:`refresh`, without failed, waiting and forked ones.

    A row per trial and a column per parameter. Finding a companion takes a few passes over NumPy columns per wish.
    """

    def __init__(self) -> None:
        self._trials: list[FrozenTrial] = []
        self._columns: dict[str, Floats] = {}  # values as stored by Optuna; NaN where a trial has none
        self._numbers: npt.NDArray[np.int64] = np.zeros(0, np.int64)
        self._trained: Floats = np.zeros(0)  # number of steps that a trial was trained, or may still be
        self._open: list[int] = []  # rows of unfinished trials
        self._lock = threading.Lock()  # study.optimize(n_jobs=...) samples from several threads

    def refresh(self, study: optuna.Study) -> None:
        """Read new and changed trials: O(new and open trials), plus the storage's time to return its list."""
        trials = study.get_trials(deepcopy=False)
        with self._lock:
            before = len(self._trials)
            self._make_room(len(trials))
            # Another thread may have read a later list, and so more of a trial, or more trials.
            changed = [row for row in self._open if row < len(trials) and _extends(trials[row], self._trials[row])]
            for row in changed:
                self._trials[row] = trials[row]
            self._trials += trials[before:]
            changed += range(before, len(self._trials))
            for row in changed:
                self._read(row, self._trials[row])
            rows = [*self._open, *range(before, len(self._trials))]
            self._open = [row for row in rows if not self._trials[row].state.is_finished()]

    def _make_room(self, rows: int) -> None:
        more = 2 * rows - len(self._trained)
        if rows > len(self._trained):
            self._trained = np.append(self._trained, np.zeros(more))
            self._numbers = np.append(self._numbers, np.full(more, -1))
            self._columns = {name: np.append(column, np.full(more, np.nan)) for name, column in self._columns.items()}

    def _read(self, row: int, trial: FrozenTrial) -> None:
        self._numbers[row] = trial.number
        # A fork was trained under its donor's early parameters rather than its own.
        if trial.state in (TrialState.FAIL, TrialState.WAITING) or "hpstage:donor" in trial.user_attrs:
            self._trained[row] = 0
            return
        self._trained[row] = trial.last_step or 0 if trial.state == TrialState.PRUNED else np.inf
        for name, distribution in trial.distributions.items():
            if name not in self._columns:
                self._columns[name] = np.full(len(self._trained), np.nan)
            self._columns[name][row] = distribution.to_internal_repr(trial.params[name])

    def latest(self, names: Set[str]) -> FrozenTrial | None:
        """Return the latest trial that has all of these parameters; its ``params`` are in the order of suggestion."""
        return next((trial for trial in reversed(self._trials) if names <= trial.params.keys()), None)

    def find(
        self, number: int, wishes: Sequence[Wish], worth: Sequence[float], *, steps: int | None
    ) -> Companion | None:
        """Return the trial, other than ``number``, with the greatest gain; among equals the nearest, then the first.

        Args:
            wishes: a proposal's parameters, in the order in which they start to matter.
            worth: the share of a trial that is saved if the first 0, 1, 2, ... wishes are replaced by the values of an
                earlier trial. To save half of a trial, a value may be moved by half of its radius.
            steps: number of steps of a full trial. If known, a pruned trial gains at most the steps it was trained.
        """
        with self._lock:
            # Copies: another thread may read more of an unfinished trial at the same time.
            trials = self._trials.copy()
            rows = len(trials)
            trained, numbers = self._trained[:rows], self._numbers[:rows]
            known = {wish.name for wish in wishes} & self._columns.keys()
            columns = {name: self._columns[name][:rows].copy() for name in known}
        others = (trained > 0) & (numbers != number)
        near = others.copy()
        farthest, total = np.zeros(rows), np.zeros(rows)  # in radii, over the wishes so far
        depths, distance = np.zeros(rows, np.intp), np.zeros(rows)
        for depth, wish in enumerate(wishes, start=1):
            if wish.name not in columns:
                break
            values = columns[wish.name]
            value = np.asarray(wish.distribution.to_internal_repr(wish.value), np.float64)
            if wish.radius > 0:
                assert isinstance(wish.distribution, Numerical)
                away = np.abs(scaled(wish.distribution, values) - scaled(wish.distribution, value)) / wish.radius
                near &= (away <= 1) & possible(wish.distribution, values)
                farthest[near] = np.maximum(farthest[near], away[near])
                total[near] += away[near]
            else:
                near &= values == value
            if not near.any():
                break
            taken = near & (farthest <= worth[depth])
            depths[taken], distance[taken] = depth, total[taken]
        gain = np.asarray(worth, np.float64)[depths]
        if steps is not None:
            gain = np.minimum(gain, trained / steps)
        gain[~others] = 0.0
        if not rows or gain.max() <= 0:
            return None
        best = np.flatnonzero(gain == gain.max())
        row = int(best[np.argmin(distance[best])])
        return Companion(trials[row], int(depths[row]), float(gain[row]))
