"""Which files of tests a selection by markers needs not import."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

# Whatever further marks a test has, an expression of this form excludes it by one of these.
EXCLUDING = re.compile(r"not \w+(?: and not \w+)*")
# A statement continues in lines that are indented, and to its closing bracket.
MODULE_MARKS = re.compile(r"^pytestmark = (.*(?:\n[ \])].*)*)", re.MULTILINE)


def leaves_out(path: Path, config: pytest.Config) -> bool:
    """Whether ``-m`` excludes all tests of a file by a mark of the whole file; never for a file that is named."""
    excluded = excluded_marks(config.option.markexpr)
    if not excluded or path.suffix != ".py":
        return False
    named = (Path(config.invocation_params.dir, argument.partition("::")[0]) for argument in config.args)
    return bool(excluded & module_marks(path.read_text())) and path not in named


def excluded_marks(expression: str) -> set[str]:
    """The marks that an expression such as ``not slow and not gpu`` excludes, none for others."""
    return set(re.findall(r"not (\w+)", expression)) if EXCLUDING.fullmatch(expression) else set()


def module_marks(source: str) -> set[str]:
    """The marks that a file gives all its tests in ``pytestmark``, as far as they are written out."""
    statement = MODULE_MARKS.search(source)
    if statement is None:
        return set()
    value = ast.parse(statement[1], mode="eval").body
    marks = value.elts if isinstance(value, ast.List) else [value]
    names = [ast.unparse(mark.func if isinstance(mark, ast.Call) else mark) for mark in marks]
    return {name.removeprefix("pytest.mark.") for name in names if name.startswith("pytest.mark.")}
