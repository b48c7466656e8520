"""Text about a branch of the stage tree: which hyperparameters change at its start. Pure."""

from __future__ import annotations

from hpstage.errors.text import clean, shortened
from hpstage.plan.nodes import Node
from hpstage.schedule.forms import Constant, Form

_VALUE = 40  # maximum number of characters of a value
_NAMES = 6  # maximum number of hyperparameters named


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
