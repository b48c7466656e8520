"""The Store port: a journal and leases in one place, so that writes can depend on the leases held."""

from __future__ import annotations

from hpstage.store.journal import Journal
from hpstage.store.leases import Leases


class Store(Journal, Leases):
    """A log of facts and the leases of its writers. ``fences`` of ``append`` are leases of the same store."""
