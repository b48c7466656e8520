"""The rows of the stage tree of a book's trials. Pure."""

from __future__ import annotations

from hpstage.accounting.book import Book
from hpstage.accounting.failures import failures_of
from hpstage.report.names import plain, trial_name
from hpstage.report.tree.branches import changes, states
from hpstage.report.tree.log_rows import logs_of
from hpstage.report.tree.rows import (
    ROOT,
    BranchRow,
    Header,
    Rows,
    Texts,
    failure_row,
    finite,
    kept_state,
    sampled,
    trial_row,
    values_of,
)


def rows_of(book: Book) -> Rows:
    """Return all rows of a book's tree."""
    account, branches = book.account, book.branches
    plan, progress = account.plan, states(account, branches)
    place = {id: i for i, id in enumerate(branches)}  # parents before children
    rows = Rows()
    best = max if book.maximize else min
    for id, branch in branches.items():
        node = branch.node
        points = book.measured[id].points
        rows.branches[place[id]] = BranchRow(
            node.id,
            ROOT if node.parent is None else place[node.parent.id],
            node.start,
            branch.reach,
            min(branch.reach, account.front(id) or node.start),
            branch.trials,
            finite(best(value for _, value in points)) if points else None,
            progress[id],
            changes(node),
            kept_state(node.states),
            values_of(node, branch.reach),
            sampled(points),
        )
    for i, (name, trial) in enumerate(book.trials.items()):
        ended, proposed = plan.ended.get(name), plan.searches.proposed.get(name)
        rows.trials[i] = trial_row(
            trial_name(book, name),
            account.trials.get(name),
            place[trial.node_at(trial.requested).id] if trial.requested else ROOT,
            None if ended is None else ended.state,
            book.value_of(name),
            {} if proposed is None else proposed.params,
        )
    for i, (name, proposed) in enumerate(book.rejected.items(), len(rows.trials)):
        rows.trials[i] = trial_row(trial_name(book, name), None, ROOT, "REJECTED", None, proposed.params)
    texts = Texts()
    for fact, _ in failures_of(book):
        if fact.node in place:
            text = texts.add(fact.failure.traceback, rows.texts)
            rows.failures[len(rows.failures)] = failure_row(
                place[fact.node], fact.step, evaluating=fact.evaluating, summary=fact.failure.summary, text=text
            )
    rows.logs = logs_of(book)
    rows.header = Header(
        study=plain(book.studies[0], 400) if len(book.studies) == 1 else "",
        metric=plain(book.metric or ""),
        maximize=book.maximize,
        end=max((trial.steps for trial in book.trials.values()), default=1),
        best=ROOT if book.best is None else list(book.trials).index(book.best),
        store=book.store,
        at=[],
    )
    return rows
