"""Failures by cause: one fault in the user's code often fails a thousand trials. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from hpstage.accounting.book import Book
from hpstage.errors.text import count_of
from hpstage.plan.facts import NodeId, StageFailed, TrialId, UserFailure

_LINE = re.compile(r'^ *File "(.*)", line (\d+)', re.MULTILINE)


@dataclass(slots=True)
class Cause:
    """Exceptions of one class that were raised by one line of code."""

    failures: list[StageFailed] = field(default_factory=list)
    trials: dict[TrialId, None] = field(default_factory=dict)
    """The trials that failed because of them, in order, as keys."""

    @property
    def steps(self) -> tuple[int, int]:
        """The first and the last step at which one of these exceptions was raised."""
        steps = [failure.step for failure in self.failures]
        return min(steps), max(steps)

    @property
    def messages(self) -> int:
        return len({failure.failure.summary for failure in self.failures})


def by_cause(failures: Iterable[tuple[StageFailed, Iterable[TrialId]]]) -> list[Cause]:
    """Return the causes of failures, those with the most failed trials first.

    Args:
        failures: exceptions with the trials that each has failed.
    """
    found: dict[tuple[object, ...], Cause] = {}
    for fact, trials in failures:
        cause = found.setdefault((fact.evaluating, *origin(fact.failure)), Cause())
        cause.failures.append(fact)
        cause.trials.update(dict.fromkeys(trials))
    return sorted(found.values(), key=lambda cause: len(cause.trials), reverse=True)


def origin(failure: UserFailure) -> tuple[str, ...]:
    """Return the exception's class and the line that raised it; without a traceback, its summary."""
    lines = _LINE.findall(failure.traceback)
    return (failure.summary.partition(":")[0], *lines[-1]) if lines else (failure.summary,)


def where(cause: Cause) -> str:
    """Return where the exceptions of a cause were raised."""
    first = cause.failures[0]
    doing = "evaluating" if first.evaluating else "training"
    if len(cause.failures) == 1:
        return f"{doing}, node {first.node}, step {first.step:,}"
    low, high = cause.steps
    steps = f"step {low:,}" if low == high else f"steps {low:,} to {high:,}"
    return f"{doing}, {count_of(len(cause.failures), 'time')}, {steps}"


def failures_of(book: Book) -> list[tuple[StageFailed, list[TrialId]]]:
    """Return the exceptions of the user's code on the paths of the book's trials, and the trials failed by each."""
    found: list[tuple[StageFailed, list[TrialId]]] = []
    by_node: dict[NodeId, list[tuple[StageFailed, list[TrialId]]]] = {}
    for fact in book.account.failures():
        if book.study is None or fact in book.account.failed_on(fact.node, book.reach.get(fact.node, 0)):
            found.append((fact, []))
            by_node.setdefault(fact.node, []).append(found[-1])
    for id, trial in book.trials.items():
        ended = book.account.plan.ended.get(id)
        if not by_node or (ended is not None and ended.state != "FAIL"):
            continue
        for node, start, stop in trial.path_to(trial.requested):
            for fact, trials in by_node.get(node.id, []):
                if fact.evaluating:
                    passes = start < fact.step <= stop and fact.step in trial.targets
                else:
                    passes = fact.step < stop
                if passes:
                    trials.append(id)
    return found


def failed_otherwise(book: Book, causes: Iterable[Cause]) -> list[TrialId]:
    """Return the failed trials that are in none of the causes, such as those whose metric is NaN."""
    known = {id for cause in causes for id in cause.trials}
    ended = book.account.plan.ended
    return [id for id in book.trials if id in ended and ended[id].state == "FAIL" and id not in known]
