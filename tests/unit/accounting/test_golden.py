"""The figures of recorded journals are those that they were."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.unit.accounting.figures import figures_of
from tests.unit.accounting.record import RECORDINGS, golden, recorded


@pytest.mark.parametrize("name", [recording.__name__ for recording in RECORDINGS])
def test_the_figures_of_a_recorded_journal_are_those_that_they_were(name: str) -> None:
    assert _flat(figures_of(recorded(name))) == _flat(golden(name))


def _flat(figures: Any, path: str = "") -> dict[str, str]:
    """Return each figure by its path, so that a difference names it."""
    if isinstance(figures, dict):
        return {name: told for key, value in figures.items() for name, told in _flat(value, f"{path}/{key}").items()}
    return {path: json.dumps(figures)}
