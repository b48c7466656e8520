"""Detect scripts that start a search outside of ``if __name__ == "__main__":``."""

from __future__ import annotations

import ast
import inspect
import multiprocessing
import sys
from types import FrameType

from hpstage.errors import UsageError

_REMEDY = 'put the call that starts the search under `if __name__ == "__main__":`'


def require_main_guard() -> None:
    """Check that training processes, which import the script, will not reach this call again.

    Raises:
        UsageError: training processes would reach this call.
        SystemExit: this is a training process. It exits without a traceback; the process that started it reports more.
    """
    refuse_while_imported()
    line = _unguarded_line(inspect.currentframe())
    if line is not None:
        raise UsageError(
            f"training processes import your script, and would start the search again at line {line}; {_REMEDY}"
        )


def refuse_while_imported() -> None:
    """Exit if this is a training process that imports the script of a search: it must not start the search again."""
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        sys.exit(f"importing the script starts the search again; {_REMEDY}")


def _unguarded_line(frame: FrameType | None) -> int | None:
    """Return the current line of the script, if importing the script would also run it; ``None`` if not, or unsure."""
    main = sys.modules.get("__main__")
    path = getattr(main, "__file__", None)  # None in a console, `python -c` or a notebook, where no script is imported
    package = getattr(getattr(main, "__spec__", None), "name", "")
    if path is None or package.endswith("__main__"):  # multiprocessing does not import such a module
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
            return None  # it may exit if the script is imported
    return None
