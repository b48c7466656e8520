"""The messages that send a study's tree to a page: first the whole tree, then its changes in small batches. Pure."""

from __future__ import annotations

import time
from collections.abc import Iterator

from hpstage.accounting.branch_states import state_of
from hpstage.accounting.branches import points_of
from hpstage.cluster.dashboard.board import PlanView
from hpstage.cluster.dashboard.study import StudyView
from hpstage.cluster.dashboard.work import place_of
from hpstage.plan.facts import NodeId, StageFailed, TrialId
from hpstage.plan.nodes import Node
from hpstage.report.names import plain
from hpstage.report.tree.rows import ROOT, Header, Rows, Texts, branch_row, failure_row, trial_row

_AT_ONCE = 16  # number of rows between two checks of the time


class Feed:
    """Tracks which rows of one study were sent to one page, and which are still to be sent."""

    def __init__(self, view: PlanView, study: StudyView) -> None:
        self._view = view
        self._study = study
        self._branches: dict[NodeId, int] = {}
        self._trials: dict[TrialId, int] = {}
        self._failures: dict[tuple[NodeId, int, bool], tuple[int, StageFailed]] = {}
        self._failure_count = 0
        self._texts = Texts()
        self._header: Header | None = None
        self._ended = study.ended
        # Branches and trials to send: at first all, parents before children.
        self._wanted: dict[NodeId, None] = dict.fromkeys(study.branches)
        self._wanted_trials: dict[TrialId, None] = dict.fromkeys(study.trials)
        self._seen = study.branch_changes.position
        self._seen_trials = study.trial_changes.position
        self._seen_records = -1

    def is_of(self, view: PlanView, study: StudyView) -> bool:
        return self._view is view and self._study is study

    def rows(self, now: float, seconds: float) -> Rows | None:
        """Return rows that the page does not have yet; ``None`` if there are none.

        Args:
            now: the time on the workers' clock, to estimate the progress of running chains.
            seconds: time limit; the rows left are returned by the next call.
        """
        until = time.perf_counter() + seconds
        study, rows = self._study, Rows(reset=self._header is None)
        self._wanted |= dict.fromkeys(study.branch_changes.since(self._seen))
        self._wanted_trials |= dict.fromkeys(study.trial_changes.since(self._seen_trials))
        self._seen, self._seen_trials = study.branch_changes.position, study.trial_changes.position
        if self._ended != study.ended:
            self._ended = study.ended
            self._wanted |= dict.fromkeys(study.branches)
        self._add_branches(rows, until)
        self._add_trials(rows, until)
        if self._seen_records != self._view.position and not self._wanted:
            self._seen_records = self._view.position
            self._add_failures(rows)
        header = self._new_header(now)
        if header != self._header:
            self._header = rows.header = header
        return rows if rows.reset or rows != Rows() else None

    def _add_branches(self, rows: Rows, until: float) -> None:
        for count, id in enumerate(list(self._wanted), 1):
            self._add_branch(self._study.branches[id].node, rows)
            del self._wanted[id]
            if not count % _AT_ONCE and time.perf_counter() > until:
                return

    def _add_branch(self, node: Node, rows: Rows) -> int:
        """Add the row of a branch, and the rows of ancestors that the page does not have; return the branch's index."""
        parent = ROOT
        if node.parent is not None:
            known = self._branches.get(node.parent.id)
            parent = self._add_branch(node.parent, rows) if known is None else known
        index = self._branches.setdefault(node.id, len(self._branches))
        branch, study = self._study.branches[node.id], self._study
        points = points_of(branch, study.started.metric[0])
        state = state_of(self._view, branch, branch.pieces, "dropped" if study.ended else "waiting")
        rows.branches[index] = branch_row(self._view, branch, parent, state, points, maximize=study.maximize)
        return index

    def _add_trials(self, rows: Rows, until: float) -> None:
        if rows.branches and time.perf_counter() > until:
            return
        plan, study = self._view.plan, self._study
        for count, id in enumerate(list(self._wanted_trials), 1):
            trial, proposed, ended = plan.trials.get(id), plan.searches.proposed.get(id), plan.ended.get(id)
            leaf = None if trial is None or not trial.requested else trial.node_at(trial.requested)
            branch = ROOT
            if leaf is not None:
                known = self._branches.get(leaf.id)
                branch = self._add_branch(leaf, rows) if known is None else known
            number = plain(id.rpartition("/")[2], 12) if proposed is None else str(proposed.number)
            result = study.standings.results.get(id)
            value = None if result is None else result.value
            if ended is not None and ended.state == "COMPLETE" and ended.values:
                value = float(ended.values[0])
            index = self._trials.setdefault(id, len(self._trials))
            rows.trials[index] = trial_row(
                number, self._view.trials.get(id), branch, study.trials.get(id), value, proposed
            )
            del self._wanted_trials[id]
            if not count % _AT_ONCE and time.perf_counter() > until:
                return

    def _add_failures(self, rows: Rows) -> None:
        """Add new failures on the study's branches, and remove those that a later search has overcome."""
        there = {}
        for fact in failures_on(self._view, self._study):
            key = (fact.node, fact.step, fact.evaluating)
            there[key] = fact
            known = self._failures.get(key)
            if known is not None and known[1] is fact:
                continue
            index = self._failure_count if known is None else known[0]
            self._failure_count += known is None
            self._failures[key] = index, fact
            rows.failures[index] = failure_row(self._branches[fact.node], fact, self._texts, rows)
        for key in [key for key in self._failures if key not in there]:
            rows.gone.append(self._failures.pop(key)[0])

    def _new_header(self, now: float) -> Header:
        view, study = self._view, self._study
        best = study.standings.best(1)
        at = []
        for chain in view.plan.chains.values():
            place = place_of(view, chain, now)
            if place is not None and place.node.id in self._branches:
                at.append((self._branches[place.node.id], place.step, plain(chain.worker)))
        return Header(
            study=plain(study.name, 400),
            metric=plain(study.started.metric[0]),
            maximize=study.maximize,
            end=study.longest,
            best=self._trials.get(best[0].trial, ROOT) if best else ROOT,
            store=view.store,
            at=at,
        )


def failures_on(view: PlanView, study: StudyView) -> Iterator[StageFailed]:
    """Yield the exceptions in the user's code on the paths of a study's trials."""
    for node in dict.fromkeys(fact.node for fact in view.failures()):
        branch = study.branches.get(node)
        if branch is not None:
            yield from view.failed_on(node, branch.reach)
