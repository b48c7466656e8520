"""A set that is put back gives its members in the order in which it gave them before."""

from __future__ import annotations

import pytest

from hpstage.training.capture.containers import Unordered


@pytest.mark.parametrize("size", [0, 3, 9])
def test_a_set_is_restored_in_its_order_after_members_were_popped(size: int) -> None:
    """A trial would otherwise begin with the place where another has stopped to take members out."""
    kept, nothing = set(range(size)), frozenset[str]()
    before = Unordered().read(kept, nothing)
    kept.update(range(size + 5))
    for _ in range(4):
        kept.pop()

    Unordered().write(kept, before, nothing)
    assert kept == set(range(size))
    kept.update(range(size, 12))
    assert [kept.pop() for _ in range(12)] == list(range(12))


def test_an_emptied_set_is_restored_with_its_pop_position() -> None:
    kept, nothing = set(range(6)), frozenset[str]()
    while kept:
        kept.pop()
    before = Unordered().read(kept, nothing)
    kept.update(range(3))
    kept.pop()

    Unordered().write(kept, before, nothing)
    assert Unordered().same(Unordered().read(kept, nothing), before)
