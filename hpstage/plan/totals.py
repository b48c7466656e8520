"""Measured costs of steps, evaluations, loads and saves, the basis of estimates. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from hpstage.plan.facts import ChainLost, StateReached


@dataclass(slots=True)
class Totals:
    """All steps and worker seconds measured on a plan."""

    steps_trained: int = 0
    train_seconds: float = 0.0
    load_seconds: float = 0.0
    evaluate_seconds: float = 0.0
    save_seconds: float = 0.0
    wasted_seconds: float = 0.0
    own_seconds: float = 0.0
    """Training time at the pace of workers that train one chain at a time, each by itself."""
    own_evaluate_seconds: float = 0.0
    """Evaluation time of the one worker that evaluates. In a gang, the others wait."""
    evaluations: int = 0
    saves: int = 0
    loads: int = 0
    sources: dict[str, int] = field(default_factory=dict)

    @property
    def worker_seconds(self) -> float:
        return self.train_seconds + self.load_seconds + self.evaluate_seconds + self.save_seconds + self.wasted_seconds

    @property
    def average_step_seconds(self) -> float:
        """Seconds per step of a worker that trains nothing else, or 1.0 before any training."""
        return self.own_seconds / self.steps_trained if self.steps_trained else 1.0

    @property
    def average_evaluate_seconds(self) -> float:
        """Seconds per evaluation by one worker."""
        return self.own_evaluate_seconds / self.evaluations if self.evaluations else 0.0

    def reach(self, fact: StateReached) -> None:
        self.steps_trained += fact.step - fact.start
        self.train_seconds += fact.train_seconds
        self.own_seconds += fact.own_seconds
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
        self.wasted_seconds += fact.seconds
