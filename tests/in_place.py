"""Searches that verify forks in their own process, as where it cannot be forked."""

from __future__ import annotations

import pytest

from hpstage.execution import untrained, verification


@pytest.fixture(autouse=True)
def _forks_are_verified_in_place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A search of a toy spends half of its time on forks of a process of tests, which is large: several per search.
    What is verified is the same. Tests marked ``forks`` verify in forks: those of what verification finds.
    """
    if request.node.get_closest_marker("forks") is None:
        for module in (untrained, verification):
            monkeypatch.setattr(module, "obstacle", lambda trainable: "a process of tests is large")
