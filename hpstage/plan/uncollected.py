"""Folding many facts without the cyclic garbage collector."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """Disable garbage collection in the block, which must run no code of the user's.

    A plan contains no garbage, and looking for it again and again takes as long as folding. What the block has made is
    then with the old objects: as young ones, all of it would be looked at once more at its end.
    """
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            if not gc.get_freeze_count():  # else what the user has frozen would thaw
                gc.freeze()
                gc.unfreeze()
            gc.enable()
