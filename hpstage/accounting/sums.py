"""Sums of steps and worker seconds over trials, and the merge rate. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Self

from hpstage.accounting.payments import rounded
from hpstage.plan.facts import ChainLost, StateReached


def merge_rate(requested: float, unique: float) -> float:
    """Return the merge rate of a search, a study (all its searches) or a plan (all its studies): steps requested over
    all trials / unique steps among them (arXiv 2006.11972, section 2). It is the factor by which less is trained than
    without sharing. By cost, both counts are seconds instead of steps."""
    return requested / unique if unique else 1.0


@dataclass(slots=True)
class Sums:
    """Sums over a study's trials, or over those of a plan.

    Training is counted where it is charged to one of the trials (:mod:`hpstage.accounting.payments`). Seconds are
    :func:`rounded`, so that the sums of studies add up to the plan's exactly.
    """

    steps_asked: int = 0
    steps_unique: int = 0
    """Unique steps among those requested."""
    steps_first: int = 0
    """Unique steps that no trial of any study had requested before."""
    steps_trained: int = 0
    steps_wasted: int = 0
    stages_done: int = 0
    """How often a node was trained to the farthest step requested of it. Never decreases: further requests of a node
    are further stages."""
    train_seconds: float = 0.0
    load_seconds: float = 0.0
    evaluate_seconds: float = 0.0
    save_seconds: float = 0.0
    wasted_seconds: float = 0.0
    fused_seconds: float = 0.0
    """Training time that workers saved by training several chains side by side."""
    exchange_seconds: float = 0.0
    """Additional training time because several workers trained a chain together."""
    frozen_batches: int = 0
    """For this and the next two, see :class:`hpstage.plan.facts.FrozenWork`."""
    frozen_skipped: int = 0
    frozen_seconds: float = 0.0
    answers: int = 0
    """Targets that have a result."""
    alone_train_seconds: float = 0.0
    """Estimated seconds of training up to those results, without sharing."""

    @property
    def worker_seconds(self) -> float:
        return self.train_seconds + self.load_seconds + self.evaluate_seconds + self.save_seconds + self.wasted_seconds

    @property
    def merge_rate(self) -> float:
        return merge_rate(self.steps_asked, self.steps_unique)

    def alone_seconds(self, evaluate_seconds: float) -> float:
        """Estimate worker seconds for the results without sharing (:func:`hpstage.accounting.savings.seconds_alone`).

        Args:
            evaluate_seconds: the plan's mean seconds of an evaluation.
        """
        return rounded(self.alone_train_seconds + self.answers * evaluate_seconds)

    def reach(self, fact: StateReached) -> float:
        """Add a reached state, and return its seconds."""
        self.steps_trained += fact.step - fact.start
        train = rounded(fact.train_seconds)
        self.train_seconds += train
        seconds = train
        if fact.alone_seconds is not None:
            self.fused_seconds += rounded(fact.fused_seconds)
            self.exchange_seconds += rounded(fact.exchange_seconds)
        if fact.frozen is not None:
            self.frozen_batches += fact.frozen.batches
            self.frozen_skipped += fact.frozen.skipped
            self.frozen_seconds += rounded(fact.frozen.seconds)
        if fact.evaluate_seconds:
            evaluate = rounded(fact.evaluate_seconds)
            self.evaluate_seconds += evaluate
            seconds += evaluate
        if fact.load_seconds or fact.save_seconds:  # often both are zero
            load, save = rounded(fact.load_seconds), rounded(fact.save_seconds)
            self.load_seconds += load
            self.save_seconds += save
            seconds += load + save
        return seconds

    def waste(self, fact: ChainLost) -> float:
        """Add discarded training, and return its seconds."""
        seconds = rounded(fact.seconds)
        self.steps_wasted += fact.steps
        self.wasted_seconds += seconds
        return seconds

    def since(self, before: Self) -> Self:
        """Return the difference from an earlier copy."""
        names = [each.name for each in fields(self)]
        return type(self)(*[getattr(self, name) - getattr(before, name) for name in names])


def summed(studies: Iterable[Sums]) -> Sums:
    """Return the sums of a plan from those of its studies, which may have unique steps in common."""
    found, names = Sums(), [each.name for each in fields(Sums)]
    for one in studies:
        for name in names:
            setattr(found, name, getattr(found, name) + getattr(one, name))
    found.steps_unique = found.steps_first
    return found


@dataclass(slots=True)
class Merged:
    """Training requested by a set of trials: the sum over trials, the unique steps, and how many of these are done."""

    steps_asked: int = 0
    steps_unique: int = 0
    steps_done: int = 0
    seconds_requested: float = 0.0
    seconds_unique: float = 0.0

    @property
    def rate(self) -> float:
        return merge_rate(self.steps_asked, self.steps_unique)

    @property
    def cost_weighted_rate(self) -> float:
        """The merge rate by measured seconds instead of steps."""
        return merge_rate(self.seconds_requested, self.seconds_unique)
