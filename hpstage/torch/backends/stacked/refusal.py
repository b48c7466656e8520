"""The error for a step that cannot be trained as part of a stack."""

from __future__ import annotations

from hpstage.errors import UsageError


class NotStackable(UsageError):
    """A model, an optimizer or a step that cannot be trained together with its siblings. The message names why."""


class NeedsPython(NotStackable):
    """A step that no recording repeats, whatever the values of its tensors: ``update()`` itself can train it.

    Whoever trains by itself for that may decide so by this error: it does not depend on the other members.
    """

    member: object = None
    """The member whose step it is, if several were to be stacked."""
