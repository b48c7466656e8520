"""A toy that is trained in bundles."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import hpstage
from hpstage.plan.facts import WorkerId
from hpstage.plan.messages import Chain, StepsMeasured
from hpstage.schedule import Scalar
from hpstage.testing.toys import Tape
from hpstage.trainable import Trainable
from hpstage.training.adapter import Adapter


class Unmeasured(hpstage.InlineExecutor):
    """Uses all slots, whether it pays or not: it reports at once that it does."""

    def start(self, worker: WorkerId, chain: Chain) -> None:
        super().start(worker, chain)
        if self.slots > 1 and not chain.step_times:
            self._events.append(StepsMeasured(chain.id, worker, ((1, 1.0), (self.slots, 1.1)), self.clock()))


class Slot:
    """A member whose steps were trained together before ``train`` is called for them."""

    def __init__(self, tape: Tape) -> None:
        self.tape = tape
        self.done: list[tuple[int, dict[str, Scalar], Exception | None]] = []
        self.setup, self.evaluate = tape.setup, tape.evaluate
        self.state_dict, self.load_state_dict = tape.state_dict, tape.load_state_dict

    def train(self, step: int, hp: Mapping[str, Scalar]) -> None:
        if not self.done:
            self.tape.train(step, hp)  # alone: it verifies a fork
            return
        before, values, error = self.done.pop()
        assert (step, dict(hp)) == (before, values)
        if error is not None:
            raise error


class Tapes(Adapter):
    """A bundle of tapes that counts how many were trained together.

    Args:
        each: what a chain adds to the seconds of a step, relative to what a step of any number takes besides.
    """

    def __init__(self, subject: Tape, count: int = 3, each: float = 0.1) -> None:
        self.each = each
        self.subject = subject
        self.touch: Callable[[], None] = bool
        self.together: Counter[int] = Counter()
        self.limits: set[int | None] = set()
        self.passed = 0.0
        self.slots = count
        self._slots = [Slot(type(subject)()) for _ in range(count)]

    def members(self) -> Sequence[Trainable]:
        return self._slots

    def seconds(self) -> float:
        return self.passed

    def train_together(
        self, steps: Mapping[int, tuple[int, Mapping[str, Scalar]]], most: int | None = None
    ) -> Mapping[int, int]:
        self.limits.add(most)
        indices = list(steps)
        groups = [indices[first : first + (most or len(steps))] for first in range(0, len(steps), most or len(steps))]
        for group in groups:
            self.together[len(group)] += 1
            self.passed += 0.1 * (1 + self.each * len(group))
        for index, (step, hp) in steps.items():
            self.touch()
            slot, error = self._slots[index], None
            try:
                slot.tape.train(step, hp)
            except Exception as raised:
                error = raised
            slot.done.append((step, dict(hp), error))
        return {index: len(group) for group in groups for index in group}

    def take_patches(self, patched: object) -> None:
        """Tapes call nothing of a library's."""

    def setup(self, hp: Mapping[str, Scalar]) -> None:
        self._slots[0].setup(hp)

    def train(self, step: int, hp: Mapping[str, Scalar]) -> None:
        self._slots[0].train(step, hp)

    def evaluate(self) -> Mapping[str, float]:
        return self._slots[0].evaluate()

    def state_dict(self) -> object:
        return self._slots[0].state_dict()

    def load_state_dict(self, state: object) -> None:
        self._slots[0].load_state_dict(state)
