"""The rows of the stage tree of a book's trials, and the logs of its branches for the drawer."""

from __future__ import annotations

import math

from hpstage.accounting.book import Book
from hpstage.accounting.branch_states import states
from hpstage.accounting.failures import failures_of
from hpstage.errors import CheckpointError
from hpstage.report.names import plain, trial_name
from hpstage.report.tree.rows import (
    ROOT,
    Header,
    LogRow,
    Rows,
    Texts,
    branch_row,
    failure_row,
    sampled,
    trial_row,
    utf8,
)
from hpstage.report.trial_log import broken_off_steps, joined, loaded, node_log_keys


def rows_of(book: Book) -> Rows:
    """Return all rows of a book's tree."""
    account, branches = book.account, book.branches
    plan, progress = account.plan, states(account, branches, book.study)
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


_NAMES = 8  # maximum number of curves of a branch
_OUTPUT = 4_000  # maximum number of characters of a branch's output, from its end
_READ = 4_000  # maximum number of logs read: first of branches that have failed, then of branches with the most trials
_CHARACTERS = 2_000_000  # maximum number of characters of all logs


def logs_of(book: Book) -> dict[int, LogRow]:
    """Return the logs of branches that have logged or printed anything, by the index of the branch in
    ``book.branches``."""
    found: dict[int, LogRow] = {}
    plan, checkpoints = book.account.plan, book.checkpoints
    if checkpoints is None:
        return found
    try:
        there = checkpoints.logs()
    except CheckpointError:
        return found  # a report needs only the journal, and may be written where checkpoints cannot be read
    broken_off, spent, read = broken_off_steps(plan), 0, 0
    nodes = [(branch.node, branch.trials) for branch in book.branches.values()] if there else []
    for index in sorted(range(len(nodes)), key=lambda i: (nodes[i][0].id not in broken_off, -nodes[i][1], i)):
        node = nodes[index][0]
        keys = [key for key in node_log_keys(plan, node, broken_off.get(node.id, ())) if key in there]
        read += len(keys)
        if not keys:
            continue
        if read > _READ or spent > _CHARACTERS:
            break
        log = joined(loaded(checkpoints, keys))
        curves = {
            plain(name, 80): sampled([point for point in values.items() if math.isfinite(point[1])])
            for name, values in list(log.values.items())[:_NAMES]
        }
        row = LogRow({name: points for name, points in curves.items() if points}, utf8(log.output[-_OUTPUT:]))
        found[index] = row
        spent += len(row.output) + 16 * sum(map(len, row.curves.values()))
    return found
