"""A driver of another version of hpstage, whose plans have another format:
``python -m tests.faults.another_version TASK.json``."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import msgspec

from hpstage.errors import CheckpointError, ClusterError, StoreError
from hpstage.plan import log
from tests.faults.driver import Task, search

REFUSED = 76
"""Exit code if it could not join the plan, and said why."""


def main() -> None:
    log.FORMAT += 1
    try:
        search(msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=Task))
    except (StoreError, CheckpointError, ClusterError):  # what it works with may be away as well
        logging.getLogger("tests.faults").exception("refused")
        sys.exit(REFUSED)


if __name__ == "__main__":
    main()
