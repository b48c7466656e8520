"""What is shown of a running search: a value, and the words for it. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from hpstage.text import clean, clock, hours


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgressView:
    """A running search at one moment. Names are as users typed them."""

    study: str
    complete: int
    pruned: int
    failed: int
    n_trials: int | None
    """Trials that are to come to an end in all, as far as it is known; ``None``: nobody has said how many."""
    metric: str | None
    """The metric's name; ``None`` where there are several objectives."""
    best: float | None
    """The study's best value, or before a trial is complete the best at any step; ``None``: nothing is known yet, or
    there are several objectives."""
    best_step: int | None = None
    """At which step that was, where no trial is complete."""
    stages_done: int
    """Nodes of the stage tree that were trained in this call and have nothing left."""
    stages_left: int
    """Nodes with something left to train, of what is asked for now."""
    running: int
    workers: int
    merge_rate: float
    """Steps asked for / distinct steps among them."""
    used_seconds: float
    """Of workers."""
    saved_seconds: float
    """Of workers: what sharing has saved the trials, as far as they have results."""
    elapsed: float
    """Seconds since the call began."""
    seconds_left: float | None
    """Estimated; ``None``: nothing was measured yet, or nobody has said how many trials there will be."""
    over: bool = False

    @property
    def finished(self) -> int:
        return self.complete + self.pruned + self.failed


def name(view: ProgressView) -> str:
    """The study's name, fit to be shown."""
    return clean(view.study)


def trials(view: ProgressView) -> str:
    if view.n_trials is None:
        return f"{view.finished:,} trials"
    return f"{view.finished:,}/{view.n_trials:,} trials"


def items(view: ProgressView) -> list[str]:
    """All but the number of trials, in words: one text for each thing, in the order of what is asked for most."""
    states = [("complete", view.complete), ("pruned", view.pruned), ("failed", view.failed)]
    found = [", ".join(f"{count:,} {state}" for state, count in states if count or state == "complete")]
    if view.metric is not None:
        at = "" if view.best_step is None else f" at step {view.best_step:,}"
        found.append(f"best {clean(view.metric)} {'-' if view.best is None else f'{view.best:.6g}'}{at}")
    if view.over:
        found.append(f"{view.stages_done:,} stages done")
    else:
        found.append(f"stages {view.stages_done:,} done, {view.stages_left:,} left")
        found.append(f"{view.running} of {view.workers} worker{'' if view.workers == 1 else 's'} busy")
    found.append(f"merge rate {view.merge_rate:.2f}")
    found.append(f"worker-hours {hours(view.used_seconds)} used, {hours(view.saved_seconds)} saved")
    return found


def times(view: ProgressView) -> str:
    if view.over:
        return f"{clock(view.elapsed)} elapsed"
    left = "-" if view.seconds_left is None else f"about {clock(view.seconds_left)}"
    return f"{clock(view.elapsed)} elapsed, {left} left"


def line(view: ProgressView) -> str:
    """The view as one line of a log."""
    return f"{name(view)}: {'; '.join([trials(view), *items(view), times(view)])}"
