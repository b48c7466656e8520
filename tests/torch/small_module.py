"""With little in it, for code that may come by whatever its module names, which elsewhere is torch."""

from __future__ import annotations


def count_by_globals(kept: object, self: object) -> float:
    names = globals()
    names["made_by_name"] = names.get("made_by_name", 0) + 1
    return float(names["made_by_name"])
