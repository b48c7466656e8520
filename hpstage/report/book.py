"""What a report is about: the account of a plan, and whose trials in it are looked at. From the journal alone."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property

from hpstage.errors import UsageError
from hpstage.events import Fact, NodeId, SearchStarted, TrialId
from hpstage.locations import open_journal
from hpstage.nodes import PlannedTrial
from hpstage.report.account import Account, Charge, Waste, new_account
from hpstage.store import Journal


@dataclass(frozen=True)
class Book:
    """The pages of an account that tell of one study, or of all (``study=None``).

    A stage is a study's if one of its trials paid for it (:mod:`hpstage.report.account`): so the books of a plan's
    studies share nothing, and sum to the plan's.
    """

    account: Account
    study: str | None = None

    def is_mine(self, trial: TrialId) -> bool:
        return self.study is None or self.account.study_of(trial) == self.study

    @cached_property
    def trials(self) -> dict[TrialId, PlannedTrial]:
        """In the order in which they were added to the plan."""
        return {id: trial for id, trial in self.account.plan.trials.items() if self.is_mine(id)}

    @cached_property
    def charges(self) -> list[Charge]:
        """What workers reported, in the order of the journal."""
        return [charge for charge in self.account.charges if self.is_mine(charge.trial)]

    @cached_property
    def wastes(self) -> list[Waste]:
        return [waste for waste in self.account.wastes if self.is_mine(waste.trial)]

    @cached_property
    def alone(self) -> dict[TrialId, float]:
        """Seconds of a worker that each trial would have taken alone (:meth:`Account.alone`)."""
        return {id: self.account.alone(id) for id in self.trials}

    @cached_property
    def reach(self) -> dict[NodeId, int]:
        """The nodes that the trials pass, and the farthest step that they ask for on each."""
        found: dict[NodeId, int] = {}
        for trial in self.trials.values():
            for node, _, stop in trial.legs(trial.asked):
                if stop > found.get(node.id, 0):
                    found[node.id] = stop
        return found

    @property
    def started(self) -> SearchStarted | None:
        """The study's last search; of all studies the latest. ``None``: the plan was driven without a study."""
        searches = self.account.plan.searches
        if self.study is not None:
            return searches[self.study].started if self.study in searches else None
        return max((record.started for record in searches.values()), key=lambda started: started.at, default=None)

    @property
    def metric(self) -> str | None:
        """The first objective's."""
        return self.started.metric[0] if self.started is not None and self.started.metric else None

    @property
    def maximize(self) -> bool:
        return self.started is not None and self.started.directions[:1] == ("maximize",)

    @cached_property
    def best(self) -> TrialId | None:
        """The completed trial with the best value of the first objective, the earliest of equals; ``None`` where there
        is none, or where several studies (or several objectives) would have to be compared."""
        started = self.started
        if started is None or len(started.metric) != 1:
            return None
        if self.study is None and len(self.account.plan.searches) > 1:
            return None
        found: list[tuple[float, TrialId]] = []
        for id in self.trials:
            ended = self.account.plan.ended.get(id)
            if ended is not None and ended.state == "COMPLETE" and ended.values:
                value = float(ended.values[0])
                if not math.isnan(value):
                    found.append((-value if self.maximize else value, id))
        return min(found, key=lambda pair: pair[0])[1] if found else None

    def number(self, trial: TrialId) -> int | None:
        """The trial's number in its study."""
        proposed = self.account.proposed.get(trial)
        return None if proposed is None else proposed.number


def open_book(
    source: Journal | str | os.PathLike[str], study: str | None = None, *, seen: Callable[[Fact], object] | None = None
) -> Book:
    """The book of a plan as its journal tells it now.

    Args:
        source: an open journal, or a store as for ``optimize(store=...)``, which is opened, read, closed, and not
            changed.
        study: one of the plan's; all, if it is not given.
        seen: called with each fact of the journal, in order.

    Raises:
        UsageError: the plan has no such study, or the URL names no plan.
        StoreError: there is no plan, or it cannot be read.
    """
    with ExitStack() as closing:
        journal = source if isinstance(source, Journal) else open_journal(source, closing=closing, read_only=True)
        account = new_account(journal)
        account.catch_up(journal, seen)
    if study is not None and study not in account.plan.searches:
        studies = dict.fromkeys([*account.plan.searches, *map(account.study_of, account.plan.trials)])
        if study not in studies:
            raise UsageError(f"the plan has no study {study!r}; there are: {', '.join(map(repr, studies)) or 'none'}")
    return Book(account, study)
