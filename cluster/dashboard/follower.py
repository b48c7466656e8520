"""The driver's part of the dashboard page: it sends new records of the journal, and the time left."""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from collections.abc import Callable

from distributed import Client

from hpstage.errors import HistoryChanged, StoreError
from hpstage.store import Cursor, Journal
from hpstage.store.opening import address_of

logger = logging.getLogger("hpstage")

PAGE = "hpstage"
"""Name of the page on the dashboard."""
HANDLER = "hpstage_facts"
"""Name of the scheduler's handler for records."""
INSTALLED = "hpstage-dashboard"
"""Key in the scheduler's metadata: ``"page"`` if it has the page, ``"metrics"`` if it has only metrics. Drivers check
it first, since each call of a missing handler would leave a warning in the scheduler's log."""

NO_MORE = -1
"""The scheduler's answer for a plan that cannot be shown."""

_LOOK = 0.25
"""Seconds between two checks of the journal while somebody looks at the page."""
_LOOK_UNWATCHED = 1.0
"""Seconds between two checks of the journal while nobody looks at the page."""
_AGAIN = 3.0
"""Seconds between two checks whether there is a page, and between two messages to it without new records, which show
whether the scheduler was restarted."""
RECORDS = 200
"""Maximum number of records in a message. Folding them blocks the scheduler for 2 to 10 ms."""
OLD = 30.0
"""Seconds after which an estimate of the time left is no longer shown."""
_PATIENCE = 3.0
"""Maximum seconds to wait for the scheduler's answer."""


class Follower:
    """Keeps the page of a cluster's dashboard up to date with a journal, in a separate thread.

    Nothing in a search waits for it. If there is no page, or it cannot be reached, the follower tries again later. The
    page answers with the position of the next record that it needs: several followers of a plan send each record once
    or twice, and a page that has lost all records is sent all of them again.

    Args:
        client: returns the current connection to the scheduler; ``None`` if there is none.
    """

    def __init__(self, journal: Journal, client: Callable[[], Client | None]) -> None:
        self._journal = journal
        self._client = client
        self._plan = ""
        self._wanted = Cursor()
        self._found: Client | None = None  # the connection on which a page was found
        self._next_look = 0.0
        self._next_offer = 0.0
        self._watched = False
        self._estimate: tuple[str, float | None, float] | None = None  # study, its end, and when that was estimated
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hpstage-dashboard", daemon=True)
        self._thread.start()

    @property
    def is_watched(self) -> bool:
        """Whether somebody looked at the page, according to its last answer."""
        return self._watched

    def show(self, study: str, seconds_left: float | None) -> None:
        """Set the estimate of a study's time left. It is sent with the next records, or within seconds if there are
        none; this returns at once."""
        now = time.monotonic()
        self._estimate = study, None if seconds_left is None else now + seconds_left, now

    def close(self) -> None:
        """Send the records written so far, waiting only a few seconds, and stop."""
        self._closing.set()
        self._thread.join(2 * _PATIENCE)

    def _run(self) -> None:
        last = False
        while not last and self._wanted.position != NO_MORE:
            last = self._closing.wait(_LOOK if self._watched else _LOOK_UNWATCHED)
            try:
                while self._send(at_once=last):
                    pass
            except StoreError:
                logger.debug("The store cannot be read for the dashboard page; trying again.", exc_info=True)
            except Exception:  # errors on the way to the page must not affect the search
                logger.debug("The dashboard page cannot be reached; trying again.", exc_info=True)
                self._found, self._watched = None, False

    def _send(self, *, at_once: bool) -> bool:
        """Send the next records that the page needs; return whether there may be more."""
        client = self._client()
        if client is None or not self._is_installed(client, at_once=at_once):
            return False
        self._plan = self._plan or self._name()
        discard = False
        try:
            records, _ = self._journal.read_on(self._wanted, RECORDS)
        except HistoryChanged:
            discard, self._plan, self._wanted = True, self._name(), Cursor()
            records, _ = self._journal.read_on(self._wanted, RECORDS)
        if not self._plan or (not records and time.monotonic() < self._next_offer):
            return False
        self._next_offer = time.monotonic() + _AGAIN

        first = self._wanted.position
        left = self._time_left()

        async def offered() -> tuple[int, bytes, bool]:
            answer: tuple[int, bytes, bool] = await getattr(client.scheduler, HANDLER)(
                plan=self._plan, first=first, records=records, anew=discard, store=address_of(self._journal), left=left
            )
            return answer

        position, hash, self._watched = client.sync(offered, callback_timeout=_PATIENCE)
        wanted = Cursor(position, hash)
        progress = wanted != self._wanted
        self._wanted = wanted
        return progress and wanted.position != NO_MORE

    def _time_left(self) -> tuple[str, float | None] | None:
        """Return the study and the seconds until its end; ``None`` if nothing was estimated or nobody looks."""
        if self._estimate is None or not self._watched:
            return None
        (study, end, made), now = self._estimate, time.monotonic()
        return study, None if end is None or now - made > OLD else max(0.0, end - now)

    def _is_installed(self, client: Client, *, at_once: bool) -> bool:
        if client is self._found:
            return True
        if not at_once and time.monotonic() < self._next_look:
            return False
        self._next_look = time.monotonic() + _AGAIN
        if client.get_metadata([INSTALLED], False):
            self._found = client
            return True
        return False

    def _name(self) -> str:
        """Return a name that identifies the plan, wherever its journal is stored. The first record is the same for all
        plans of a workload; the second contains a driver or a search with its starting time."""
        first = self._journal.read(0, 2)
        return hashlib.blake2b(b"\n".join(first), digest_size=16).hexdigest() if len(first) == 2 else ""
