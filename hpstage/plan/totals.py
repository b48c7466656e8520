"""Sums over a plan or one of its studies: steps asked and trained, seconds spent. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Self

from hpstage.plan.facts import ChainLost, StateReached


def merge_rate(asked: float, distinct: float) -> float:
    """Return steps asked for over all trials / distinct steps among them (arXiv 2006.11972, section 2): how much less
    is trained than if each trial were trained alone. Of a search, of a study (all its searches) or of a plan (all its
    studies); by cost, seconds take the place of steps."""
    return asked / distinct if distinct else 1.0


@dataclass(slots=True)
class Totals:
    """Totals of steps and worker seconds."""

    steps_asked: int = 0
    steps_unique: int = 0
    """Distinct steps among those asked for."""
    steps_trained: int = 0
    steps_wasted: int = 0
    train_seconds: float = 0.0
    load_seconds: float = 0.0
    evaluate_seconds: float = 0.0
    save_seconds: float = 0.0
    wasted_seconds: float = 0.0
    fused_seconds: float = 0.0
    """What training would have taken beyond this if no worker had trained several chains side by side."""
    exchange_seconds: float = 0.0
    """What it took beyond that of single workers where several have trained a chain."""
    own_evaluate_seconds: float = 0.0
    """What evaluating would have taken one worker each time: of a gang, all workers wait."""
    evaluations: int = 0
    saves: int = 0
    loads: int = 0
    sources: dict[str, int] = field(default_factory=dict)

    @property
    def worker_seconds(self) -> float:
        return self.train_seconds + self.load_seconds + self.evaluate_seconds + self.save_seconds + self.wasted_seconds

    @property
    def merge_rate(self) -> float:
        return merge_rate(self.steps_asked, self.steps_unique)

    @property
    def average_step_seconds(self) -> float:
        """Seconds per step of a worker that trains nothing else, or 1.0 before any training."""
        alone = self.train_seconds + self.fused_seconds - self.exchange_seconds
        return alone / self.steps_trained if self.steps_trained else 1.0

    @property
    def average_evaluate_seconds(self) -> float:
        """Seconds per evaluation by one worker."""
        return self.own_evaluate_seconds / self.evaluations if self.evaluations else 0.0

    def reach(self, fact: StateReached) -> None:
        self.steps_trained += fact.step - fact.start
        self.train_seconds += fact.train_seconds
        self.fused_seconds += fact.fused_seconds
        self.exchange_seconds += fact.exchange_seconds
        self.load_seconds += fact.load_seconds
        if fact.source is not None:
            self.sources[fact.source] = self.sources.get(fact.source, 0) + 1
            self.loads += fact.source in ("live", "disk")
        if fact.metrics is not None:
            self.evaluations += 1
        self.evaluate_seconds += fact.evaluate_seconds
        self.own_evaluate_seconds += fact.evaluate_seconds / max(1.0, fact.workers)
        if fact.kept is not None:
            self.saves += 1
        self.save_seconds += fact.save_seconds

    def waste(self, fact: ChainLost) -> None:
        self.steps_wasted += fact.steps
        self.wasted_seconds += fact.seconds

    def copy(self) -> Self:
        return replace(self, sources=dict(self.sources))

    def since(self, before: Self) -> Self:
        """Return the difference from an earlier copy."""
        gone = {
            each.name: getattr(self, each.name) - getattr(before, each.name)
            for each in fields(self)
            if each.name != "sources"
        }
        sources = {name: count - before.sources.get(name, 0) for name, count in self.sources.items()}
        return replace(self, **gone, sources=sources)


@dataclass(slots=True)
class Merged:
    """Training that a set of trials asks for: the sum over trials (``asked``), and without repetitions (``unique``), of
    which some is ``done``."""

    steps_asked: int = 0
    steps_unique: int = 0
    steps_done: int = 0
    seconds_asked: float = 0.0
    seconds_unique: float = 0.0

    @property
    def rate(self) -> float:
        return merge_rate(self.steps_asked, self.steps_unique)

    @property
    def cost_weighted_rate(self) -> float:
        """The merge rate with measured seconds in place of steps."""
        return merge_rate(self.seconds_asked, self.seconds_unique)
