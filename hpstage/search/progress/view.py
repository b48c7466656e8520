"""The displayed state of a running search, and its wording. Pure."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from hpstage.errors.text import clean, clock, count_of, duration, rate, time_left


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgressView:
    """A running search at one moment. Names are as typed by users."""

    study: str
    complete: int
    pruned: int
    failed: int
    paused: int = 0
    """Trials that have a result, and for which nothing more is requested now."""
    queued: int = 0
    """Trials whose first step is not trained yet, or that are still to be proposed, as far as their number is known."""
    n_trials: int | None
    """Total number of trials that will end, as far as known; ``None`` if no number was given."""
    metric: str | None
    """The metric's name; ``None`` with several objectives."""
    best: float | None
    """The study's best value, or the best at any step before a trial is complete; ``None`` if there is none yet or with
    several objectives."""
    best_step: int | None = None
    """The step of that value, if no trial is complete."""
    stages_done: int
    """Number of stages trained since the search began. It never falls: if trials request further steps of a node,
    another stage begins."""
    stages_left: int
    """Number of nodes that have requested steps left to train."""
    steps_trained: int = 0
    """Steps trained since the search began: those that workers have reported, and an estimate of those since."""
    steps_left: int = 0
    """Requested steps left to train."""
    running: int
    workers: int
    merge_rate: float | None
    """Requested steps / unique steps; ``None`` if nothing could be shared yet."""
    used_seconds: float
    """Worker seconds."""
    saved_seconds: float
    """Worker seconds that sharing has saved the trials, up to their last results."""
    elapsed: float
    """Seconds since the call began."""
    seconds_left: float | None
    """Estimate; ``None`` if nothing was measured yet, or the number of trials is unknown."""
    over: bool = False
    open: int = 0
    """Unfinished trials of a search that is over, which its next call continues."""

    @property
    def finished(self) -> int:
        return self.complete + self.pruned + self.failed

    @property
    def active(self) -> int:
        """Trials that are neither finished, paused nor queued, as far as their number is known."""
        return max(0, (self.n_trials or 0) - self.finished - self.paused - self.queued)


def trials(view: ProgressView) -> str:
    if view.n_trials is None:
        return count_of(view.finished, "trial")
    return f"{view.finished:,}/{view.n_trials:,} trials"


def items(view: ProgressView) -> list[str]:
    """Return everything but the number of trials in words, one string per item, the most important first."""
    states = [("complete", view.complete), ("pruned", view.pruned), ("failed", view.failed)]
    if view.over:
        states.append(("open", view.open))
    else:
        states += [("running", view.active), ("paused", view.paused), ("queued", view.queued)]
    found = [", ".join(f"{count:,} {state}" for state, count in states if count) or "0 complete"]
    if view.metric is not None:
        at = "" if view.best_step is None else f" at step {view.best_step:,}"
        found.append(f"best {clean(view.metric)} {'-' if view.best is None else f'{view.best:.6g}'}{at}")
    if view.over:
        found.append(f"{count_of(view.steps_trained, 'step')} trained, {count_of(view.stages_done, 'stage')} done")
    else:
        found.append(f"steps {view.steps_trained:,} trained, {view.steps_left:,} left")
        found.append(f"stages {view.stages_done:,} done, {view.stages_left:,} left")
        found.append(f"{view.running} of {view.workers} worker{'' if view.workers == 1 else 's'} busy")
    if view.merge_rate is not None:
        found.append(f"merge rate {rate(view.merge_rate)}")
    used = f"worker time {duration(view.used_seconds)} used"
    # If trials share no steps, the savings are negative: saving states takes time.
    saved = view.merge_rate is not None and view.saved_seconds > 0
    found.append(f"{used}, {duration(view.saved_seconds)} saved" if saved else used)
    return found


def times(view: ProgressView) -> str:
    if view.over:
        return f"{clock(view.elapsed)} elapsed"
    left = "- left" if view.seconds_left is None else time_left(view.seconds_left)
    return f"{clock(view.elapsed)} elapsed, {left}"


def line(view: ProgressView) -> str:
    """Return the view as one line of a log."""
    return f"{clean(view.study)}: {'; '.join([trials(view), *items(view), times(view)])}"


class Display(ABC):
    """Shows views of a running search."""

    @abstractmethod
    def begin(self, view: ProgressView) -> None:
        """Show the first view."""

    @abstractmethod
    def write(self, text: str) -> None:
        """Show a permanent line of text; not allowed after the last view."""

    @abstractmethod
    def show(self, view: ProgressView) -> None: ...

    @abstractmethod
    def end(self, view: ProgressView) -> None:
        """Show the last view, which stays, and release all resources. Called once if :meth:`begin` was."""
