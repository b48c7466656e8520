"""Text about a branch of the stage tree: which hyperparameters change at its start, and its state. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from hpstage.accounting.accounting import Accounting
from hpstage.accounting.branches import TreeBranch
from hpstage.errors.text import clean, shortened
from hpstage.plan.facts import NodeId
from hpstage.plan.nodes import Node
from hpstage.schedule.forms import Constant, Form

_VALUE = 40  # maximum number of characters of a value
_NAMES = 6  # maximum number of hyperparameters named

State = Literal["failed", "running", "waiting", "interrupted", "done", "dropped"]
"""``interrupted``: an unfinished trial needs the rest of the branch, but its search is not running; ``dropped``: no
trial needs the rest of the branch."""


def changes(node: Node) -> str:
    """Return the hyperparameters of a root, or the hyperparameters of a child that change from its parent, as text."""
    parent = node.parent
    changed = []
    for i, (name, form) in enumerate(zip(node.names, node.forms, strict=True)):
        before = None if parent is None else parent.forms[i]
        if before is None:
            changed.append(f"{clean(name)} {_form(form, node.start)}")
        elif form is not before and form != before:
            last, first = _value(before.value(node.start - 1)), _form(form, node.start)
            changed.append(f"{clean(name)} {f'constant at {first}' if first == last else f'{last} → {first}'}")
    more = len(changed) - _NAMES
    return ", ".join(changed[:_NAMES]) + (f" and {more:,} more" if more > 0 else "")


def _form(form: Form, start: int) -> str:
    value = _value(form.value(start))
    return value if form.__class__ is Constant else f"{type(form).__name__.lower()} from {value}"


def _value(value: object) -> str:
    return shortened(clean(value) if isinstance(value, str) else value, _VALUE)


def states(account: Accounting, branches: Mapping[NodeId, TreeBranch]) -> dict[NodeId, State]:
    plan = account.plan
    found: dict[NodeId, State] = {}
    for wanted in plan.open_targets.wanted():
        node: Node | None = wanted.node
        while node is not None and node.id not in found:
            found[node.id] = "waiting"
            node = node.parent
    for name, trial in plan.trials.items():
        if name not in plan.ended:
            for passed, _, _ in trial.path_to(trial.requested):
                found.setdefault(passed.id, "interrupted")
    for chain in plan.chains.values():
        for span in chain.ahead():
            found[span.node] = "running"
    for failure in account.failures():
        found[failure.node] = "failed"
    progress: dict[NodeId, State] = {}
    for id, branch in branches.items():
        state = found.get(id, "dropped")
        done = state in ("waiting", "interrupted", "dropped") and account.front(id) >= branch.reach
        progress[id] = "done" if done else state
    return progress
