"""Contract suites of the ports: whoever writes an implementation subclasses one in the tests and runs pytest."""

from __future__ import annotations

import pytest

# Before they are imported, so that their failed assertions tell what was compared.
pytest.register_assert_rewrite(
    "hpstage.testing.checkpoints", "hpstage.testing.journal", "hpstage.testing.leases", "hpstage.testing.store"
)

from hpstage.testing.checkpoints import CheckpointContract  # noqa: E402
from hpstage.testing.journal import JournalContract  # noqa: E402
from hpstage.testing.leases import LeasesContract  # noqa: E402
from hpstage.testing.store import StoreContract  # noqa: E402

__all__ = ["CheckpointContract", "JournalContract", "LeasesContract", "StoreContract"]
