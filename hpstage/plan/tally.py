"""Totals of one study (asked, charged, and estimated without sharing), updated with every fact. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from hpstage.plan.facts import NodeId, StateReached
from hpstage.plan.nodes import Node, PlannedTrial
from hpstage.plan.totals import Totals


@dataclass(slots=True)
class StudyTotals(Totals):
    """Sums over a study's trials. Unique steps are distinct within the study; training is counted where one of its
    trials paid for it (:mod:`hpstage.plan.payments`)."""

    charged_seconds: float = 0.0
    """Worker seconds charged to its trials, rounded so that the studies of a plan add up exactly."""
    steps_first: int = 0
    """Of the steps asked for, those that no trial of any study had asked for before."""
    answers: int = 0
    """Targets that have a result."""
    alone_train_seconds: float = 0.0
    """Estimated seconds of training up to those results, each trial trained alone."""

    def alone_seconds(self, plan: Totals) -> float:
        """Estimate worker seconds for the results, each trial alone (:func:`hpstage.plan.savings.seconds_alone`).

        Args:
            plan: the totals of the whole plan, which give the mean seconds of an evaluation.
        """
        return self.alone_train_seconds + self.answers * plan.average_evaluate_seconds


@dataclass(slots=True)
class Tally:
    """A study's totals, with the state needed to update them.

    Most nodes are used by one study alone. What is to be known of them is kept on the node for the study of the trial
    that made it, and here for other studies.
    """

    totals: StudyTotals = field(default_factory=StudyTotals)
    reach: dict[NodeId, int] = field(default_factory=dict)  # the farthest step asked for, unless it is the node's
    _answered: dict[NodeId, int] = field(default_factory=dict)  # steps of each trial up to its last result, summed

    def ask(self, node: Node, stop: int, maker: Tally) -> None:
        """Count the distinct steps of a target on a node, before its reach is extended.

        Args:
            maker: the tally of the study whose trial made the node.
        """
        fresh = stop - self.reach.get(node.id, node.reach if maker is self else node.start)
        if fresh > 0:
            self.totals.steps_unique += fresh
            if maker is not self or node.id in self.reach:
                self.reach[node.id] = stop
            if maker is not self and stop > node.reach:
                maker.reach.setdefault(node.id, node.reach)  # from now on, they differ

    def retract(self, node: Node, last: int, maker: Tally) -> None:
        """Take back the steps of a node beyond ``last``, where its training has ended, before its reach is."""
        beyond = self.reach.get(node.id, node.reach if maker is self else last) - last
        if beyond > 0:
            self.totals.steps_unique -= beyond
            if node.id in self.reach:
                self.reach[node.id] = last

    def answer(self, trial: PlannedTrial, step: int, pace: Callable[[Node], float]) -> None:
        """Count an answered target, once per target. O(segments).

        Args:
            pace: returns a node's seconds per step.
        """
        before = trial.answered
        self.totals.answers += 1
        if step <= before:
            return
        for node, start, stop in trial.path_to(step):
            if stop > before:
                steps = stop - max(start, before)
                if node.maker.study == trial.study:
                    node.answered += steps
                else:
                    self._answered[node.id] = self._answered.get(node.id, 0) + steps
                self.totals.alone_train_seconds += steps * pace(node)

    def repace(self, node: Node, fact: StateReached, maker: Tally) -> None:
        """Update estimates before folding ``fact``, which changes the seconds per step of a node trained before."""
        steps = node.answered if maker is self else self._answered.get(node.id)
        if steps:
            after = (node.seconds + fact.own_seconds) / (node.trained + fact.step - fact.start)
            self.totals.alone_train_seconds += steps * (after - node.seconds / node.trained)
