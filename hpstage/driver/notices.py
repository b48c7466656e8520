"""Messages to the user about training: what workers have noticed, and hyperparameters without effect."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence

from hpstage.plan.facts import ForkVerified, Metrics, StateReached, to_numbers
from hpstage.plan.messages import BoundaryReached, Noticed, Report
from hpstage.plan.nodes import Node, PlannedTrial
from hpstage.plan.plan import SearchPlan
from hpstage.schedule import Scalar
from hpstage.schedule.scalars import same

_REMEMBERED = 10_000
# Minimum hex digits of marks: the marks of a single tensor have 16 bits, and soon agree by chance.
_LEAST = 8


class Notices:
    """Returns each notice once, whichever workers and trials it comes from."""

    def __init__(self, plan: SearchPlan) -> None:
        self._plan = plan
        self._logged: set[str] = set()
        self._effects = _Effects(plan)

    def of(self, report: Report) -> Iterator[str]:
        """Yield the notices of a report that are new."""
        if isinstance(report, ForkVerified):
            node, noticed = report.node, [Noticed(report.remark)] if report.remark else []
        elif isinstance(report, BoundaryReached):
            node, noticed = report.reached.node, list(report.noticed)
        else:
            return
        for notice in noticed:
            trial = self._plan.nodes[node].maker
            text = notice.text
            if notice.ends_at is not None:
                text = _of_length(trial.steps, notice.text, notice.ends_at, sizes=notice.sizes)
            cause = "length" if notice.ends_at is not None else text
            if text and cause not in self._logged:
                self._logged.add(cause)
                yield f"Trial {trial.id.rpartition('/')[2]}: {text}"
        if isinstance(report, BoundaryReached) and (missing := self._effects.missing(report.reached)):
            yield missing


def _of_length(steps: int, trainer: str, ends_at: int, *, sizes: bool) -> str:
    """Compare the length of a trial with where its trainer ends training."""
    if steps > ends_at:
        what = f"it has {steps} steps, but {trainer} ends training after {ends_at}"
    elif steps < ends_at and sizes:
        what = (
            f"it has {steps} steps, but a schedule is made for the {ends_at} steps of {trainer}: it does not reach "
            f"its end"
        )
    else:
        return ""
    return f"{what}. Set the same length in both, or let the space schedule the rate (s.onecycle, s.cosine, s.linear)"


class _Effects:
    """Compares the saved states. Two branches with different values and the same tensors, bit for bit, have not read
    the values in which they differ: most likely hyperparameters that are read only when the model is made."""

    def __init__(self, plan: SearchPlan) -> None:
        self._plan = plan
        # The latest nodes, by step, marks and metrics of a state.
        self._seen: dict[tuple[int, str, tuple[tuple[str, float], ...]], int] = {}
        self._logged: set[str] = set()

    def missing(self, reached: StateReached) -> str | None:
        """Return a message for the user if a state shows that hyperparameters have no effect, once for each."""
        # Without finite metrics, branches may agree only because all of their values are NaN.
        if reached.kept is None or len(reached.kept.marks) < _LEAST or not _finite(reached.metrics):
            return None
        # With the metrics: a hyperparameter that only evaluate() reads has an effect.
        place = reached.step, reached.kept.marks, tuple(sorted(to_numbers(reached.metrics or {}).items()))
        one, two = self._plan.nodes[self._seen.setdefault(place, reached.node)], self._plan.nodes[reached.node]
        if len(self._seen) > _REMEMBERED:
            del self._seen[next(iter(self._seen))]
        if one is two or one.names != two.names:
            return None
        names = _differing(one, two, reached.step)
        if self._logged.issuperset(names):
            return None
        self._logged.update(names)
        names_of_trials = {self._through(node, reached.step).id.rpartition("/")[2] for node in (one, two)}
        trials = sorted(names_of_trials, key=lambda name: (len(name), name))
        # Both nodes are of one trial if a plateau decides which values it gets.
        who = (
            f"trials {' and '.join(trials)} differ" if trials[1:] else f"two ways of training trial {trials[0]} differ"
        )
        which = f"Hyperparameters {', '.join(map(repr, names))}" if names[1:] else f"The hyperparameter {names[0]!r}"
        return (
            f"{which} had no effect on training so far: {who} in nothing else, and are "
            f"the same after {reached.step} steps, bit for bit. Code that makes the model or the optimizer reads only "
            f"values at step 0: read hp[{names[0]!r}] in each step (fields of an optimizer, such as lr, are set from "
            f"hyperparameters of the same name)"
        )

    def _through(self, node: Node, step: int) -> PlannedTrial:
        """Return the first trial whose path has the state at ``step`` of a node: the trial that made the node may
        branch off before. If no path has it, since a plateau has decided otherwise, return the trial that made the
        node."""
        trials = (trial for trial in self._plan.trials.values() if trial.steps >= step)
        return next((trial for trial in trials if trial.node_at(step) is node), node.maker)


def _finite(metrics: Metrics | None) -> bool:
    return metrics is not None and all(map(math.isfinite, to_numbers(metrics).values()))


def _differing(one: Node, two: Node, step: int) -> list[str]:
    """Return the hyperparameters in which the paths to two nodes have differed before a step."""
    lines = one.ancestry(), two.ancestry()
    starts = {node.start for line in lines for node in line if node.start < step} | {step - 1}
    values = [tuple(_values(line, at) for line in lines) for at in starts]
    return [name for name in one.names if any(not same(mine[name], other[name]) for mine, other in values)]


def _values(line: Sequence[Node], step: int) -> dict[str, Scalar]:
    return line[bisect_right(line, step, key=lambda node: node.start) - 1].hyperparameters(step)
