"""What cannot be trained as part of a stack."""

from __future__ import annotations

from hpstage.errors import UsageError


class NotStackable(UsageError):
    """A model, an optimizer or a step that cannot be trained together with its siblings. The message names why."""
