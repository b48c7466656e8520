"""Tells a script that starts a search outside of ``if __name__ == "__main__":``, before it does."""

from __future__ import annotations

import ast
import inspect
import multiprocessing
import sys
from types import FrameType

from hpstage.errors import UsageError

_REMEDY = 'put what starts it under `if __name__ == "__main__":`'


def require_main_guard() -> None:
    """See that processes which are started to train, and so import the script, will not come to this call again.

    Raises:
        UsageError: they would.
        SystemExit: this is such a process. Whoever started it says more; its traceback would tell nobody anything.
    """
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        sys.exit(f"a training process has reached the start of the search; {_REMEDY}")
    line = _unguarded_line(inspect.currentframe())
    if line is not None:
        raise UsageError(
            f"training processes import your script, and so would reach line {line} of it, and start the search, "
            f"again; {_REMEDY}"
        )


def _unguarded_line(frame: FrameType | None) -> int | None:
    """The line of the script that is run now, if whoever imports the script runs it, too; ``None`` also in doubt."""
    main = sys.modules.get("__main__")
    path = getattr(main, "__file__", None)  # none: a console, `python -c`, a notebook: there is nothing to import
    package = getattr(getattr(main, "__spec__", None), "name", "")
    if path is None or package.endswith("__main__"):  # such a module is not imported by multiprocessing
        return None
    while frame is not None and not (frame.f_code.co_name == "<module>" and frame.f_globals is vars(main)):
        frame = frame.f_back
    if frame is None:
        return None
    try:
        with open(path, "rb") as file:
            statements = ast.parse(file.read()).body
    except (OSError, SyntaxError, ValueError):
        return None
    for statement in statements:
        if statement.lineno <= frame.f_lineno <= (statement.end_lineno or statement.lineno):
            return None if isinstance(statement, ast.If) else frame.f_lineno
        if isinstance(statement, ast.If) and "__name__" in ast.dump(statement.test):
            return None  # it may have left
    return None
