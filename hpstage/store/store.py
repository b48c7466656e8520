"""The Store port: a journal, leases and a snapshot in one place, so that writes can depend on the leases held."""

from __future__ import annotations

from hpstage.store.journal import Journal
from hpstage.store.leases import Leases
from hpstage.store.snapshots import Snapshots


class Store(Journal, Leases, Snapshots):
    """A log of facts, the leases of its writers, and a snapshot of its fold. ``fences`` of ``append`` are leases of the
    same store."""
