"""Processes of a gang wait for each other as long as it takes, once they have met. Here they are threads of one."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import TypeVar

import pytest
import torch

from hpstage.torch.elastic.group import Group, Meeting, Message

T = TypeVar("T")


def in_group(size: int, do: Callable[[Group], T], timeout: float = 60.0) -> list[T]:
    """Return what each of a group does, by rank."""
    meeting = Meeting.open("127.0.0.1")

    def one(rank: int) -> T:
        with closing(meeting if rank == 0 else Meeting.find(meeting.address, timeout)) as place:
            group = place.form(rank, size, timeout)
        try:
            return do(group)
        finally:
            group.part()

    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(one, range(size)))


@pytest.mark.ci
def test_processes_of_a_gang_that_have_met_wait_longer_than_the_timeout_to_meet() -> None:
    def exchanged(group: Group) -> list[bytes]:
        if group.rank == 0:
            time.sleep(3.0)  # it evaluates, or writes a state
        group.gather(Message(1))
        return [message.text for message in group.gather(Message(1, str(group.rank).encode()))]

    assert in_group(2, exchanged, timeout=1.0) == [[b"0", b"1"]] * 2


def test_processes_of_a_gang_exchange_messages_of_any_length_with_all_and_in_pairs() -> None:
    def swapped(group: Group) -> list[bool]:
        found = []
        for turn in range(12):
            text = b"x" * (300 * turn * group.rank)
            size = (turn * 1000) * (1 + group.rank)
            group.offer([torch.full((size,), turn + group.rank, dtype=torch.uint8)])
            messages = group.gather(Message(turn, text, size))
            assert [message.text for message in messages] == [b"x" * (300 * turn * rank) for rank in range(4)]
            other = group.rank ^ (1 << turn % 2)
            its = group.swap(other, messages[other].size)
            found.append(its.tolist() == [turn + other] * (turn * 1000 * (1 + other)))
        return found

    assert in_group(4, swapped) == [[True] * 12] * 4
