"""The rows of the stage tree of a book's trials. Pure."""

from __future__ import annotations

from hpstage.accounting.book import Book
from hpstage.accounting.failures import failures_of
from hpstage.report.names import plain, trial_name
from hpstage.report.tree.branches import states
from hpstage.report.tree.log_rows import logs_of
from hpstage.report.tree.rows import ROOT, Header, Rows, Texts, branch_row, failure_row, trial_row


def rows_of(book: Book) -> Rows:
    """Return all rows of a book's tree."""
    account, branches = book.account, book.branches
    plan, progress = account.plan, states(account, branches)
    place = {id: i for i, id in enumerate(branches)}  # parents before children
    rows = Rows()
    for id, branch in branches.items():
        above, points = branch.node.parent, book.measured[id].points
        parent = ROOT if above is None else place[above.id]
        rows.branches[place[id]] = branch_row(account, branch, parent, progress[id], points, maximize=book.maximize)
    for i, (name, trial) in enumerate(book.trials.items()):
        ended = plan.ended.get(name)
        rows.trials[i] = trial_row(
            trial_name(book, name),
            account.trials.get(name),
            place[trial.node_at(trial.requested).id] if trial.requested else ROOT,
            None if ended is None else ended.state,
            book.value_of(name),
            plan.searches.proposed.get(name),
        )
    for i, (name, proposed) in enumerate(book.rejected.items(), len(rows.trials)):
        rows.trials[i] = trial_row(trial_name(book, name), None, ROOT, "REJECTED", None, proposed)
    texts = Texts()
    for fact, _ in failures_of(book):
        if fact.node in place:
            rows.failures[len(rows.failures)] = failure_row(place[fact.node], fact, texts, rows)
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
