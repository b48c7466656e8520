"""What is trained on several hosts. Processes that train import this module, and so it imports little."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path

from hpstage.schedule import Scalar
from hpstage.testing.toys import Tape


class Watched(Tape):
    """A Tape that writes a line for each step it has trained into a file per host and process, and that can be held.

    A host whose file ``hold-HOST`` holds a number trains no step from that number on, until the file is gone or holds
    a greater one.
    """

    stateless = tuple(f"hold-w{number}" for number in range(10))  # they change when a step is trained, and nothing else

    def __init__(self, folder: Path | None = None, seconds: float = 0.0) -> None:
        super().__init__()
        self.folder = None if folder is None else str(folder)
        self.seconds = seconds

    def train(self, step: int, hp: Mapping[str, Scalar]) -> None:
        if self.folder is not None:
            name = f"{socket.gethostname()}-{os.getpid()}"
            held = Path(self.folder) / f"held-{name}-{step}"
            while _must_wait(Path(self.folder) / f"hold-{socket.gethostname()}", step):
                held.touch()
                time.sleep(0.01)
            held.unlink(missing_ok=True)
            time.sleep(self.seconds)  # stands for work
        super().train(step, hp)
        if self.folder is not None:
            with open(Path(self.folder) / f"steps-{name}", "a") as steps:
                steps.write(f"{self.digest[:16]}\n")


def _must_wait(file: Path, step: int) -> bool:
    try:
        return step >= int(file.read_text())
    except FileNotFoundError:
        return False
