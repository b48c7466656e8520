"""Step-by-step comparison of two records: the first step after which they differ, and the paths that differ."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from hpstage.execution.runs import Record
from hpstage.execution.snapshot import GENERATOR, SETTING, STATE, THREADS, Snapshot
from hpstage.training.capture.portrait import Difference, differences, follows, rank, shown
from hpstage.training.capture.stateless import LOCAL
from hpstage.training.identity.code_identity import drifts

METRIC = "the metric "
WORKLOAD = "the workload's "


@dataclass(frozen=True, slots=True)
class Apart:
    """The first difference between two records.

    Attributes:
        loaded: whether the difference exists right after the state is loaded.
        others: paths of other differences at that step.
        causes: paths among these whose differences do not follow from other differences.
        computed: variables of the user's modules, and attributes, whose values differ before the first step.
    """

    step: int
    path: str
    straight: str
    found: str
    loaded: bool
    others: tuple[str, ...]
    causes: tuple[str, ...] = ()
    computed: tuple[str, ...] = ()


def first_apart(straight: Record, other: Record, *, reports: bool = True, answered: bool = False) -> Apart | None:
    """Return the first difference of ``other``, a run of the same trial, from training straight through.

    Args:
        reports: whether reports were wanted after the same steps. If not, local variables may differ, since they hold
            measured values; so may generators, since measuring draws from them and they are keyed before the next step.
        answered: see :func:`hpstage.training.capture.portrait.differences`.
    """
    if straight.workload and other.workload:
        found = list(differences(straight.workload, other.workload))
        if found:
            (name, here, there), *rest = found
            others = tuple(WORKLOAD + name for name, _, _ in rest)
            computed = _computed(straight, other) if name in ("code", "attributes") else ()
            return Apart(0, WORKLOAD + name, here, there, False, others, computed=computed)
    at_once = _at_once(straight.snapshots.get(other.fork, {}), other.loaded)
    steps = sorted(straight.snapshots.keys() & other.snapshots.keys())
    for step in steps:
        found = sorted(
            _differences(straight.snapshots[step], other.snapshots[step], reports, answered and other.fork > 0),
            key=lambda difference: (difference[0] not in at_once, _rank(difference[0])),
        )
        if found:
            (path, here, there), *rest = found
            others = tuple(shown(path) for path, _, _ in rest)
            causes = dict.fromkeys(difference[0] for difference in rest if not follows(difference))
            for later in steps[steps.index(step) + 1 :]:
                paths = [path for path, _, _ in differences(straight.snapshots[later], other.snapshots[later])]
                if not all(path.startswith((LOCAL, STATE)) for path in paths):
                    break
                # As long as only local variables differ, training does not depend on them (e.g. on a clock).
                causes |= dict.fromkeys(path for path in paths if path.startswith(LOCAL))
            causes.pop(path, None)
            return Apart(step, shown(path), here, there, path in at_once, others, tuple(map(shown, causes)))
    for step in sorted(straight.metrics.keys() & other.metrics.keys()):
        found = list(differences(straight.metrics[step], other.metrics[step]))
        if found:
            (name, here, there), *rest = found
            return Apart(step, METRIC + name, here, there, False, tuple(METRIC + name for name, _, _ in rest))
    return None


def _computed(straight: Record, other: Record) -> tuple[str, ...]:
    """Return the variables and attributes that differ before the first step."""
    attributes = differences(straight.snapshots.get(0, {}), other.snapshots.get(0, {}))
    return (*drifts(straight.code, other.code), *(shown(path) for path, _, _ in attributes if path.startswith("self")))


def _at_once(straight: Snapshot, loaded: Snapshot) -> set[str]:
    """Return the paths that differ right after loading, except the state and generators, which are not recorded
    then."""
    if not loaded:
        return set()
    return {path for path, _, _ in differences(straight, loaded) if not path.startswith((STATE, GENERATOR))}


def _differences(straight: Snapshot, other: Snapshot, reports: bool, answered: bool) -> Iterator[Difference]:
    unlike = (THREADS in straight) != (THREADS in other)  # one of them has imported torch, which it does not train with
    both = straight.keys() & other.keys()
    for difference in differences(straight, other, answered=answered):
        path = difference[0]
        if unlike and path not in both and path.startswith((SETTING, GENERATOR)):
            continue
        if reports or not path.startswith((LOCAL, GENERATOR)):
            yield difference


def _rank(path: str) -> float:
    """Return the rank of a path, causes first: a state follows from the objects, use of generators from the steps."""
    if path.startswith(SETTING):
        return -1
    if path.startswith(STATE):
        return 3
    return 1.5 if path.startswith(GENERATOR) else rank(path)
