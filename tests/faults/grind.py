"""The trainable that is trained while faults occur: small, exact, and it logs its steps. Workers import it."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Mapping
from pathlib import Path

from hpstage.schedule import Scalar
from hpstage.testing.toys import Tape

# Rounds of the key derivation in a step: about half a millisecond of real work.
_ROUNDS = 300
_PAUSE = "pause-of-steps"
HUNGRY = "hungry"
"""A file that names the process which allocates far more than a step needs."""
_HUNGER = 256 << 20


class Grind(Tape):
    """A Tape whose steps are work, and which writes down in a file of its process each state that it has trained.

    Where the value ``poison`` is 1, the process dies in step ``deadly``, each time. Drivers of one plan must agree in
    all three: attributes count in a workload's identity. What a file ``pause-of-steps`` in the folder says goes first.
    """

    stateless = (_PAUSE, HUNGRY)

    def __init__(self, folder: str, pause: float = 0.0, deadly: int = -1) -> None:
        super().__init__()
        self.folder = folder
        self.pause = pause
        self.deadly = deadly

    def train(self, step: int, hp: Mapping[str, Scalar]) -> None:
        if step == self.deadly and hp["poison"] == 1:
            os.kill(os.getpid(), 9)
        file = Path(self.folder) / _PAUSE
        pause = file.read_text() if file.exists() else ""
        time.sleep(float(pause or self.pause))  # most of a step, so that two cores bear three workers
        hungry = Path(self.folder) / HUNGRY
        if hungry.exists() and hungry.read_text() == str(os.getpid()):
            bytearray(_HUNGER).replace(b"\0", b"\1")
        super().train(step, hp)
        self.digest = hashlib.pbkdf2_hmac("sha256", self.digest.encode(), b"%d" % step, _ROUNDS).hex()
        with open(Path(self.folder) / f"steps-{os.getpid()}", "a") as steps:
            steps.write(f"{self.digest[:16]}\n")
