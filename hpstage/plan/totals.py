"""Sums over a plan: what was asked, trained and spent. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Totals:
    """Sums over all that happened: steps and seconds."""

    steps_asked: int = 0
    steps_unique: int = 0
    steps_trained: int = 0
    steps_wasted: int = 0
    train_seconds: float = 0.0
    load_seconds: float = 0.0
    evaluate_seconds: float = 0.0
    save_seconds: float = 0.0
    wasted_seconds: float = 0.0
    evaluations: int = 0
    saves: int = 0
    loads: int = 0
    sources: dict[str, int] = field(default_factory=dict)

    @property
    def worker_seconds(self) -> float:
        return self.train_seconds + self.load_seconds + self.evaluate_seconds + self.save_seconds + self.wasted_seconds


@dataclass(slots=True)
class Merged:
    """Training that a set of trials asks for: each trial alone (``asked``), and all of them together (``unique``)."""

    steps_asked: int = 0
    steps_unique: int = 0
    seconds_asked: float = 0.0
    seconds_unique: float = 0.0

    @property
    def rate(self) -> float:
        return self.steps_asked / self.steps_unique if self.steps_unique else 1.0

    @property
    def cost_weighted_rate(self) -> float:
        """The merge rate with measured seconds in place of steps."""
        return self.seconds_asked / self.seconds_unique if self.seconds_unique else 1.0
