"""``hpstage.open``: opens a store (``results/stored_plan.py``) whose trials can also be branched."""

from __future__ import annotations

import functools
import os
from dataclasses import replace

from hpstage.search.results import StoredPlan
from hpstage.search.results import open as open_store
from hpstage.search.results.branching import Lineage
from hpstage.search.train import train_all


@functools.wraps(open_store)
def open(store: str | os.PathLike[str], *, checkpoints: str | os.PathLike[str] | None = None) -> StoredPlan:
    opened = open_store(store, checkpoints=checkpoints)
    return replace(opened, lineage=Lineage(None, store, checkpoints, train_all))
