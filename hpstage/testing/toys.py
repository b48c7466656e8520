"""Small exact trainables, with an oracle that trains a trial in a plain loop.

hpstage's own code is not part of a workload's identity. If a trainable here states a ``version``, a subclass must state
another one.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import time
from collections.abc import Mapping
from pathlib import Path

from hpstage.schedule import Scalar, Schedule


class Tape:
    """A trainable whose state is a running hash of the number and the values of every step: two states are equal only
    if all steps were."""

    version = "1"

    def __init__(self) -> None:
        self.digest = ""
        self.score = 0.0

    def setup(self, hp: Mapping[str, Scalar]) -> None:
        self.digest = _hash(["setup", sorted(hp.items())])
        self.score = 0.0

    def train(self, step: int, hp: Mapping[str, Scalar]) -> None:
        self.digest = _hash([self.digest, step, sorted(hp.items())])
        numbers = [value for value in hp.values() if isinstance(value, int | float)]
        self.score = 0.9 * self.score + sum(numbers) / (step + 1)

    def evaluate(self) -> Mapping[str, float]:
        return {"score": self.score, "hash": float(int(self.digest[:12], 16))}

    def state_dict(self) -> object:
        return {"digest": self.digest, "score": self.score}

    def load_state_dict(self, state: object) -> None:
        assert isinstance(state, dict)
        self.digest, self.score = state["digest"], state["score"]


def _hash(what: object) -> str:
    return hashlib.sha256(json.dumps(what).encode()).hexdigest()


def alone(schedules: Mapping[str, Schedule], stop: int) -> Tape:
    """Return the tape of a trial that is trained without hpstage's planning."""
    tape = Tape()
    tape.setup({name: schedule.value(0) for name, schedule in schedules.items()})
    for step in range(stop):
        tape.train(step, {name: schedule.value(step) for name, schedule in schedules.items()})
    return tape


class Failing(Tape):
    """A trainable that raises in training, evaluation or setup, if the hyperparameter ``a`` is 7, 5 or 13."""

    def setup(self, hp: Mapping[str, Scalar]) -> None:
        if hp.get("a") == 13:
            raise RuntimeError("setup fails under a=13")
        super().setup(hp)
        self.bad = False

    def train(self, step: int, hp: Mapping[str, Scalar]) -> None:
        if hp.get("a") == 7:
            raise ZeroDivisionError(f"the user's own error at step {step}")
        self.bad = hp.get("a") == 5
        super().train(step, hp)

    def evaluate(self) -> Mapping[str, float]:
        if self.bad:
            raise ValueError("evaluation fails under a=5")
        return super().evaluate()


class Gate:
    """A gate at which a :class:`Counter` waits. It is open at first.

    Args:
        folder: folder for the gate's files.
    """

    def __init__(self, folder: Path) -> None:
        self.shut_from = folder / "shut-from"
        self.reached = folder / "reached"

    def shut(self, step: int = 0) -> None:
        """Close the gate: no step from this one on is trained until the gate is opened."""
        self.reached.unlink(missing_ok=True)
        aside = self.shut_from.with_suffix(".part")
        aside.write_text(str(step))
        aside.rename(self.shut_from)

    def open(self) -> None:
        self.shut_from.unlink(missing_ok=True)

    def wait(self, seconds: float = 120.0) -> None:
        """Wait until a trainable waits at the gate."""
        deadline = time.monotonic() + seconds
        while not self.reached.exists():
            assert time.monotonic() < deadline, f"no trainable came to the gate in {seconds} s"
            time.sleep(0.005)

    def holds(self, step: int) -> bool:
        try:
            return step >= int(self.shut_from.read_text())
        except FileNotFoundError:
            return False


class Counter:
    """A trainable that adds up ``x``. Instead of a number, ``x`` may be a string: ``"boom"`` raises in training,
    ``"boom in setup"`` in setup, ``"boom in evaluate"`` in evaluation; ``"nan"`` makes the sum NaN.

    Args:
        gate: the gate at which training waits while it is closed.
    """

    def __init__(self, gate: Gate | None = None) -> None:
        self.gate = gate
        self.x: Scalar = None
        self.total = 0.0

    def setup(self, hp: Mapping[str, Scalar]) -> None:
        self.x, self.total = hp["x"], 0.0
        if self.x == "boom in setup":
            raise ArithmeticError("boom in setup")

    def train(self, step: int, hp: Mapping[str, Scalar]) -> None:
        while self.gate is not None and self.gate.holds(step):
            self.gate.reached.touch()
            time.sleep(0.005)
        if hp["x"] == "boom":
            raise ArithmeticError(f"boom at step {step}")
        if hp["x"] == "nan":
            self.total = math.nan
        elif isinstance(hp["x"], int | float):
            self.total += hp["x"]

    def evaluate(self) -> dict[str, float]:
        if self.x == "boom in evaluate":
            raise ArithmeticError("boom in evaluate")
        return {"total": self.total, "pid": float(os.getpid())}

    def state_dict(self) -> dict[str, float]:
        return {"total": self.total}

    def load_state_dict(self, state: object) -> None:
        assert isinstance(state, dict)
        self.total = state["total"]
