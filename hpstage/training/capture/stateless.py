"""Paths as users name them: in messages, and in ``stateless``, which excludes what training does not depend on."""

from __future__ import annotations

import re

LOCAL = "local variable "
"""Path prefix of local variables of paused code, and of what they hold."""


MOST = 20
"""Changes that a message names."""


def to_exclude(*paths: str) -> str:
    """Return the line of code that excludes the first of these paths, or the smallest parts around that have a name."""
    names = dict.fromkeys(_name(path) for path in paths[:MOST])
    return f"`stateless = {tuple(names)!r}`"


def excluding(*paths: str) -> str:
    """Return the remedy for changes that do not matter."""
    return f"if training does not depend on it, name it in `stateless`: {to_exclude(*paths)}"


def root_of(path: str) -> str:
    """Return the variable that a path begins with."""
    return _bare(path).partition(".")[0].partition("[")[0]


def _name(path: str) -> str:
    name = re.sub(r"(\[[^]]*\])+$", "", _bare(path))
    attribute = name.removeprefix("self.")
    return attribute if "." not in attribute and not path.startswith(LOCAL) else name


def _bare(path: str) -> str:
    return unmarked(path.removeprefix(LOCAL))


def unmarked(path: str) -> str:
    """Return a path without the marks by which objects of the same path differ."""
    return re.sub(r"'+(?=\.|\[|$)", "", path) if "'" in path else path
