"""The Snapshots port: a place for what was folded from a journal, so that readers need not fold all of it again."""

from __future__ import annotations

from abc import ABC, abstractmethod


class Snapshots(ABC):
    """A place for one snapshot, opaque bytes of up to some hundred MB, next to a journal.

    The journal is the record, a snapshot only saves time: whoever reads one checks it, and folds the journal if it is
    of no use. So a store need not prevent that a late writer replaces a newer snapshot.

    Obligations. *Whole*: what is read is what one call has written, never parts of several; a writer that dies leaves
    the snapshot as it was, and nothing that stays for ever. *Dispensable*: a snapshot may be lost at any time, and a
    call may write nothing while another writes. *Aside*: neither call keeps appends and reads of the journal waiting.
    *Safe* as the :class:`Journal` is. Failures are :class:`StoreError`.
    """

    @abstractmethod
    def write_snapshot(self, content: bytes) -> None:
        """Replace the snapshot."""

    @abstractmethod
    def read_snapshot(self) -> bytes | None:
        """Return the snapshot; ``None`` if there is none."""
