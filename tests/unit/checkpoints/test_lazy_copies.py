"""Lazy copies have their memory in common until one is written to, in whatever way."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from hpstage.checkpoints import lazy_copies, leaves
from hpstage.checkpoints.state_tree import clone, digest, reread
from hpstage.torch.frozen import share

SIZE = 128


def made() -> Tensor:
    return torch.randn(SIZE, SIZE, generator=torch.Generator().manual_seed(0))


def by_numpy(tensor: Tensor) -> None:
    tensor.numpy()[0] = 7


def by_address(tensor: Tensor) -> None:
    import ctypes

    ctypes.memset(tensor.data_ptr(), 0, 64)


def by_dlpack(tensor: Tensor) -> None:
    torch.from_dlpack(tensor).fill_(7)  # type: ignore[attr-defined]


def by_storage(tensor: Tensor) -> None:
    tensor.untyped_storage().fill_(7)


def by_data(tensor: Tensor) -> None:
    tensor.data[0] = 7


def by_a_view(tensor: Tensor) -> None:
    tensor.t()[3].zero_()


def in_place(tensor: Tensor) -> None:
    tensor.mul_(2)


def by_an_optimizer(tensor: Tensor) -> None:
    parameter = nn.Parameter(tensor)
    parameter.grad = torch.ones_like(parameter)
    torch.optim.SGD([parameter], lr=1.0).step()


WAYS = [by_numpy, by_address, by_dlpack, by_storage, by_data, by_a_view, in_place, by_an_optimizer]


@pytest.mark.parametrize("write", WAYS)
@pytest.mark.parametrize("writer", [0, 1, 2])
def test_a_write_to_one_of_several_lazy_copies_changes_no_other_copy(
    write: Callable[[Tensor], None], writer: int
) -> None:
    first = made()
    assert lazy_copies.allow_copies(first)
    copies = [first, lazy_copies.clone(first), lazy_copies.clone(first)]
    assert len({lazy_copies.address_of(one) for one in copies}) == 1
    write(copies[writer])
    for index, one in enumerate(copies):
        assert torch.equal(one, made()) is (index != writer)


@pytest.mark.parametrize("write", WAYS)
def test_a_reread_state_shares_memory_with_frozen_tensors_until_they_are_written_to(
    write: Callable[[Tensor], None],
) -> None:
    frozen, trained = made(), made()
    assert lazy_copies.allow_copies(frozen)
    found: Any = reread({"frozen": frozen, "trained": trained})
    addresses = [lazy_copies.address_of(one) for one in (frozen, found["frozen"], trained, found["trained"])]
    assert addresses[0] == addresses[1] and addresses[2] != addresses[3]
    write(frozen)
    assert torch.equal(found["frozen"], made()) and torch.equal(found["trained"], made())


def test_a_conjugate_tensor_is_read_back_with_its_values() -> None:
    value = torch.randn(SIZE, SIZE, dtype=torch.complex64)
    assert lazy_copies.allow_copies(value)
    found: Any = reread(value.conj())
    assert torch.equal(found, value.conj()) and not found.is_conj()


@pytest.mark.parametrize("read", [digest, clone, lambda t: t.sum(), lambda t: nn.functional.linear(t, t), Tensor.clone])
def test_reading_a_lazy_copy_does_not_copy_its_memory(read: Callable[[Tensor], Any]) -> None:
    first = made()
    assert lazy_copies.allow_copies(first)
    other = lazy_copies.clone(first)
    read(other)
    assert lazy_copies.is_lazy(other)
    assert lazy_copies.address_of(other) == lazy_copies.address_of(first)


@pytest.mark.parametrize("view_of", [Tensor.numpy, np.from_dlpack, torch.from_dlpack])  # type: ignore[attr-defined]
@pytest.mark.parametrize("was_lazy", [False, True])
def test_a_tensor_with_a_numpy_or_dlpack_view_is_not_copied_lazily(
    view_of: Callable[[Tensor], Any], was_lazy: bool
) -> None:
    tensor = made()
    if was_lazy:
        assert lazy_copies.allow_copies(tensor)
    array = view_of(tensor)
    assert not lazy_copies.allow_copies(tensor)
    copy = lazy_copies.clone(tensor)
    if isinstance(array, np.ndarray) and not array.flags.writeable:
        pytest.skip("before NumPy 2.1 it cannot be written to")
    array[0] = 7
    assert torch.equal(copy, made())


def test_a_view_of_a_lazily_copied_tensor_keeps_sharing_memory_with_it() -> None:
    tensor, other = made(), made()
    assert lazy_copies.allow_copies(tensor)
    lazy_copies.clone(tensor)
    view = tensor.view(-1)
    share(tensor, other)
    tensor.zero_()
    assert not view.any()


def mapped(folder: Path) -> Tensor:
    torch.save(made(), folder / "x.pt")
    loaded: Tensor = torch.load(folder / "x.pt", mmap=True)
    return loaded


def quantised(folder: Path) -> Tensor:
    return torch.quantize_per_tensor(made(), 0.1, 0, torch.qint8)


OTHERS: list[Callable[[Path], Tensor]] = [
    mapped,
    quantised,
    lambda folder: made()[1:],
    lambda folder: torch.from_numpy(np.zeros((SIZE, SIZE))),
    lambda folder: torch.zeros(3),
    lambda folder: made().to_sparse(),
    lambda folder: torch.empty(SIZE, SIZE, device="meta"),
    lambda folder: nn.parameter.UninitializedParameter(),
    lambda folder: made().expand(4, SIZE, SIZE),
]


@pytest.mark.parametrize("make", OTHERS)
@pytest.mark.filterwarnings("ignore")
def test_mapped_quantised_sparse_small_or_partial_tensors_have_no_lazy_copies(
    make: Callable[[Path], Tensor], tmp_path: Path
) -> None:
    assert not lazy_copies.allow_copies(make(tmp_path))


@pytest.mark.parametrize(
    "turn", [lambda t: t, Tensor.t, lambda t: t.view(2, 64, 8, 16).to(memory_format=torch.channels_last)]
)
def test_a_clone_has_the_strides_and_bytes_of_the_original_tensor(turn: Callable[[Tensor], Tensor]) -> None:
    tensor = turn(made()).detach()
    lazy_copies.allow_copies(tensor)
    copy = clone({"x": tensor})["x"]  # type: ignore[index]
    assert copy.stride() == tensor.stride()
    assert digest(copy) == digest(tensor)
    assert leaves.same_bytes(copy, tensor)


def test_same_bytes_distinguishes_negative_zero_strides_and_dtype() -> None:
    one, other = torch.zeros(SIZE, SIZE), torch.zeros(SIZE, SIZE)
    assert leaves.same_bytes(one, other)
    other[3, 3] = -0.0
    assert not leaves.same_bytes(one, other)
    assert not leaves.same_bytes(one, one.t())
    assert not leaves.same_bytes(one, one.double())


def test_same_bytes_distinguishes_conjugate_and_negative_views_from_their_tensor() -> None:
    one = torch.randn(SIZE, dtype=torch.complex64)
    for tensor, view in ((one, one.conj()), (one.real.clone(), one.real.clone()._neg_view())):
        assert leaves.same_bytes(tensor, tensor.clone())
        assert not leaves.same_bytes(tensor, view) and not leaves.same_bytes(view, tensor)


def test_the_address_of_a_slice_of_a_tensor_is_that_of_its_first_element() -> None:
    whole = torch.randn(10, 4096)
    for part in (whole[3], whole[3:], whole.view(-1)[5:], whole[2].requires_grad_(), whole.view(torch.int16)[1]):
        assert lazy_copies.address_of(part) == part.data_ptr()


def test_each_row_of_a_tensor_has_its_own_digest_and_bytes() -> None:
    whole = torch.randn(10, 4096)
    for part in whole:
        assert digest(part) == digest(part.clone())
        assert bytes(leaves.content(leaves.describe("", part), part)) == part.numpy().tobytes()  # type: ignore[arg-type]
