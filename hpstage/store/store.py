"""The Store port: a journal and leases in one place, so that what is written can depend on what is held."""

from __future__ import annotations

from hpstage.store.journal import Journal
from hpstage.store.leases import Leases


class Store(Journal, Leases):
    """A log of facts and the leases of those who write it. ``fences`` of ``append`` are leases of the same store."""
