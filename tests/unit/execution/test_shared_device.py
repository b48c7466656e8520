"""Memory of a GPU that several workers share: counted in a step, and refused where it does not hold them."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from hpstage.errors import UsageError
from hpstage.execution.shared_device import SHARERS, see_room
from hpstage.schedule import Scalar
from hpstage.testing.toys import Counter

GIB = 1 << 30


class Device:
    """A device of 10 GiB on which a step takes some."""

    def __init__(self, step: int) -> None:
        self.step, self.counted = step, 0

    def reset_peak(self) -> None:
        self.counted += 1

    def free_bytes(self) -> int:
        return 10 * GIB

    def taken_bytes(self) -> int:
        return self.step


class Steps(Counter):
    def __init__(self, error: Exception | None = None) -> None:
        super().__init__()
        self.steps, self.error = 0, error

    def train(self, step: int, hp: Mapping[str, Scalar]) -> None:
        self.steps += 1
        if self.error is not None:
            raise self.error
        super().train(step, hp)


class Stacked(Steps):
    slots = 2

    def members(self) -> list[Steps]:
        return [self, self]

    def train_together(self, steps: Mapping[int, tuple[int, Mapping[str, Scalar]]], most: int | None = None) -> None:
        self.together = steps

    def seconds(self) -> float:
        return 0.0


class OutOfMemoryError(RuntimeError):
    """Named as torch's is, which needs a GPU to be raised."""


def test_a_shared_device_with_enough_memory_is_tried_out_with_one_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SHARERS, "3")
    trainable, device = Steps(), Device(3 * GIB)
    see_room(trainable, {"x": 1}, device)
    assert (trainable.steps, device.counted) == (1, 1)


def test_a_worker_with_its_own_device_trains_no_step_to_measure_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SHARERS, raising=False)
    trainable = Steps()
    see_room(trainable, {"x": 1}, Device(20 * GIB))
    assert trainable.steps == 0


@pytest.mark.parametrize(
    ("trainable", "taken", "message"),
    [
        (Steps(), 3 * GIB, r"^4 workers on a GPU with 10\.\d GB free, .*3\.\d GB to train a step: at most 3 fit\."),
        (Steps(), 11 * GIB, "not even one fits.*smaller batches"),
        (Steps(OutOfMemoryError("CUDA out of memory")), 9 * GIB, r"9\.\d GB and more to train a step: not even one"),
        (Stacked(), 6 * GIB, "training 2 models together, .*at most 1 fit.*smaller max_stacked"),
    ],
)
def test_too_many_workers_on_a_device_are_refused_naming_the_largest_number_that_fits(
    trainable: Steps, taken: int, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SHARERS, "4")
    with pytest.raises(UsageError, match=message):
        see_room(trainable, {"x": 1}, Device(taken))


def test_memory_of_stacked_models_is_measured_in_one_step_of_all_models(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SHARERS, raising=False)
    trainable = Stacked()
    see_room(trainable, {"x": 1}, Device(9 * GIB))
    assert trainable.together == {0: (0, {"x": 1}), 1: (0, {"x": 1})}
    with pytest.raises(UsageError, match="1 worker on a GPU"):
        see_room(trainable, {"x": 1}, Device(11 * GIB))


def test_errors_other_than_out_of_memory_are_ignored_when_device_memory_is_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(SHARERS, "2")
    see_room(Steps(ValueError("no such label")), {"x": 1}, Device(GIB))
