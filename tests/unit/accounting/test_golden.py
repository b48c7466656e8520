"""The figures of recorded journals are those that they were."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.accounting.figures import figures_of
from tests.unit.accounting.record import RECORDINGS, golden, recorded


@pytest.mark.parametrize("name", [recording.__name__ for recording in RECORDINGS])
def test_figures_of_a_recorded_journal_equal_the_stored_figures(name: str) -> None:
    found, were = _flat(figures_of(recorded(name))), _flat(golden(name))
    differing = {path: (found.get(path), were.get(path)) for path in found | were if found.get(path) != were.get(path)}
    assert not differing


def _flat(figures: Any, path: str = "") -> dict[str, Any]:
    """Return each figure by its path, so that a difference names it. Sums may differ in the order of their parts."""
    if isinstance(figures, dict):
        return {name: its for key, value in figures.items() for name, its in _flat(value, f"{path}/{key}").items()}
    return {path: round(figures, 4) if isinstance(figures, float) else figures}
