"""Tracebacks of errors that a command ends with: the user's frames first, those of hpstage and of libraries folded."""

from __future__ import annotations

import traceback

from hpstage.training.code.owner import is_users

_FIRST_LINE = "Traceback (most recent call last):"


def folded_traceback(error: BaseException) -> str:
    """Return the text of an error. Where it comes from the user's code, its frames begin with the first of the user's;
    where it does not, it has all of them."""
    shown = traceback.TracebackException.from_exception(error)
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    before = next((at for at, frame in enumerate(frames) if is_users(frame.f_globals.get("__name__", ""))), 0)
    shown.stack = traceback.StackSummary.from_list(shown.stack[before:])
    chained, first, own = "".join(shown.format()).rpartition(_FIRST_LINE)
    folded = f"\n  ({before} frames of hpstage and of libraries are not shown)" if before else ""
    return f"{chained}{first}{folded}{own}"
