"""A toy that is trained in bundles."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import hpstage
from hpstage.schedule import Scalar
from hpstage.testing.toys import Tape
from hpstage.trainable import Trainable
from hpstage.training.adapter import Adapter


class Unmeasured(hpstage.InlineExecutor):
    """Uses all slots, whether it pays or not."""

    def measure(self, initial: Mapping[str, Scalar], steps: float) -> None:
        return None


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
    """A bundle of tapes that counts how many were trained together."""

    def __init__(self, subject: Tape, count: int = 3) -> None:
        self.subject = subject
        self.touch: Callable[[], None] = bool
        self.together: Counter[int] = Counter()
        self.slots = count
        self._slots = [Slot(type(subject)()) for _ in range(count)]

    def members(self) -> Sequence[Trainable]:
        return self._slots

    def train_together(self, steps: Mapping[int, tuple[int, Mapping[str, Scalar]]]) -> Mapping[int, int]:
        self.together[len(steps)] += 1
        for index, (step, hp) in steps.items():
            self.touch()
            slot, error = self._slots[index], None
            try:
                slot.tape.train(step, hp)
            except Exception as raised:
                error = raised
            slot.done.append((step, dict(hp), error))
        return dict.fromkeys(steps, len(steps))

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
