"""A short soak; ``scripts/chaos.py`` runs as long as one likes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.injector import KINDS, impossible
from tests.faults.site import Site
from tests.faults.soak import Soak
from tests.faults.storage import DISKS

pytestmark = [pytest.mark.redis, pytest.mark.slow]


@pytest.mark.parametrize("seed", [1, 2])
def test_random_faults_do_not_change_the_results_of_studies(redis_program: str, tmp_path: Path, seed: int) -> None:
    kinds = set(KINDS) - impossible().keys()
    with Site(tmp_path / "soak", workers=3, space=32 << 20 if kinds.intersection(DISKS) else 0) as site:
        outcome = Soak(site, seed=seed, kinds=kinds).run(30.0)
    assert not outcome.violations, "\n".join([*outcome.story, *outcome.violations])
    assert outcome.rounds >= 1 and sum(outcome.faults.values()) >= 8
    # What is trained again hangs on what breaks when; all of it in vain would be no recovery.
    assert outcome.steps_unique <= outcome.steps_trained < 2 * outcome.steps_unique
