"""What evaluation has changed: restored, and found by sums on a device, which is here the processor."""

from __future__ import annotations

import pytest
import torch

from hpstage.training.capture.guard import sums
from hpstage.training.capture.world import World

TENSORS = {
    "without dimensions": torch.tensor(3),
    "of one element": torch.tensor([3.0]),
    "with a gradient": torch.ones(2, 3, requires_grad=True),
    "of bits": torch.tensor([True, False, True]),
    "complex": torch.ones(2, dtype=torch.complex64),
    "of half precision": torch.ones(5, dtype=torch.bfloat16),
    "transposed": torch.arange(6.0).reshape(2, 3).T,
    "a part": torch.arange(10)[::3],
}


@pytest.mark.parametrize("values", TENSORS.values(), ids=TENSORS.keys())
def test_the_checksums_of_a_tensor_change_if_an_element_changes(values: torch.Tensor) -> None:
    other = values.detach().clone()
    assert sums(other) == sums(values)
    index = (-1,) * other.ndim
    other[index] = not other[index] if other.dtype is torch.bool else 7
    assert sums(other) != sums(values)


def test_the_checksums_of_a_tensor_depend_on_the_order_of_elements() -> None:
    assert sums(torch.tensor([1, 2])) != sums(torch.tensor([2, 1]))
    assert sums(torch.empty(0)) == sums(torch.empty(0, 3)) == (0, 0)


class Moving:
    def __init__(self) -> None:
        self.now, self.before = torch.zeros(2), torch.zeros(2)


def test_tensors_that_swap_attributes_in_training_are_restored_after_evaluation() -> None:
    subject = Moving()
    world = World((), lambda: [("self", subject)])
    world.reset()
    world.begin()
    for step in range(3):
        subject.before, subject.now = subject.now, subject.now + 1
        with world.kept("evaluation"):
            subject.now += 5
        assert subject.now.tolist() == [step + 1] * 2 and subject.before.tolist() == [step] * 2
