"""Group: the processes of a gang, and the messages between them."""

from __future__ import annotations

import json
import socket
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from hpstage.errors import GangApart, GangLost
from hpstage.errors.text import first_line
from hpstage.torch.elastic.links import Links, follow, lead, new_key
from hpstage.torch.elastic.shared_memory import Memory, Reader

_HEADER = struct.Struct("<qqqqq")
_SHORT = 512
"""Bytes of the first message of each round. Texts that do not fit are sent in a second message."""
_ROOM = _SHORT - _HEADER.size
_FAREWELL = 10.0
"""Seconds that a process waits until the others have read its last message."""
_REMEDY = (
    "Open the ports between the hosts of workers; where a host has several interfaces, start its workers with the "
    "--host or --interface by which the others reach it"
)


class Message(NamedTuple):
    """A process's message to all others in a round: a kind, a text, and the number of bytes for one of them."""

    kind: int
    text: bytes = b""
    size: int = 0


@contextmanager
def unbegun() -> Iterator[None]:
    """Raise :class:`GangApart` where a process is lost in the block, in which nothing has been trained yet."""
    try:
        yield
    except GangLost as error:
        cause = first_line(error.__cause__ or error)
        raise GangApart(
            f"a gang was dissolved before its first step: one of its processes is gone ({cause})"
        ) from error


class Meeting:
    """The meeting point of a gang's processes: the leader listens, and the others connect to it.

    Attributes:
        address: ``"host:port/key"``; whoever has it can join the gang.
        place: ``"host:port"``, for messages.
    """

    def __init__(self, connection: socket.socket, place: str, key: bytes) -> None:
        self._connection = connection
        self._key = key
        self.place = place
        self.address = f"{place}/{key.hex()}"

    @classmethod
    def open(cls, host: str) -> Meeting:
        """Listen on an interface of this host.

        Raises:
            GangApart: this process cannot listen there, for example if the host has no such interface.
        """
        try:
            family, *_ = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
            listener = socket.create_server((host, 0), family=family)
        except OSError as error:
            raise GangApart(f"this process cannot listen on {host} for a gang: {error}. {_REMEDY}") from error
        port = listener.getsockname()[1]
        return cls(listener, f"[{host}]:{port}" if ":" in host else f"{host}:{port}", new_key())

    @classmethod
    def find(cls, address: str, timeout: float) -> Meeting:
        """Connect to the process that listens at ``address``.

        Raises:
            GangApart: it cannot be reached within ``timeout`` seconds.
        """
        place, _, key = address.rpartition("/")
        host, _, port = place.rpartition(":")
        host = host.strip("[]")
        try:
            # One attempt is enough, since a leader listens before it says where.
            connection = socket.create_connection((host, int(port)), timeout)
        except OSError as error:
            raise GangApart(
                f"the leader of a gang cannot be reached at {host}, port {port}, from {socket.gethostname()}: "
                f"{error}. {_REMEDY}"
            ) from error
        return cls(connection, place, bytes.fromhex(key))

    def form(self, rank: int, size: int, timeout: float, in_vain: Callable[[], bool] = lambda: False) -> Group:
        """Wait until all processes have connected, and return their group.

        Args:
            in_vain: returns whether to stop waiting.

        Raises:
            GangApart: some did not come within ``timeout`` seconds, cannot be reached, or are already gone.
        """
        deadline = time.monotonic() + timeout
        apart = f"a gang of {size} processes did not meet at {self.place} within {timeout:g} seconds: "
        try:
            if rank:
                links = follow(self._connection.dup(), self._key, rank, size, deadline)
            else:
                formed, missing = lead(self._connection, self._key, size, deadline, in_vain)
                if formed is None and in_vain():
                    raise GangApart(f"a gang of {size} processes was dissolved before all had come to {self.place}")
                if formed is None:
                    who = f"of processes 0 to {size - 1}, {', '.join(map(str, missing))} did not come"
                    raise GangApart(f"{apart}{who}. {_REMEDY}")
                links = formed
        except OSError as error:
            raise GangApart(f"{apart}{first_line(error)}. {_REMEDY}") from error
        group = Group(links, rank, size)
        with unbegun():
            group.see_memory()
        return group

    def close(self) -> None:
        """Stop waiting for processes. Idempotent."""
        self._connection.close()


class Group:
    """The processes of a gang. All take part in every round, in the same order.

    Data for another process on the same host is read by that process in place, in shared memory; data for other hosts
    is sent.
    """

    def __init__(self, links: Links, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self._links: Links | None = links
        # Two, since others may still read what they were given in the last round. They are kept from step to step,
        # since getting memory from the system takes as long as filling it.
        self._own, self._next = Memory(), Memory()
        self._offered = self._received = torch.empty(0, dtype=torch.uint8)
        self._places: list[tuple[int, int]] = []  # by rank: file and serial number of the last offer
        self._readers: dict[int, Reader] = {}  # by rank
        self._read_by: set[int] = set()

    def see_memory(self) -> None:
        """Determine which processes can read each other's memory."""
        signatures = [message.text.decode() for message in self.gather(Message(0, self._own.sign().encode()))]
        readers = {rank: Reader(text) for rank, text in enumerate(signatures) if rank != self.rank}
        self._readers = {rank: reader for rank, reader in readers.items() if reader.can_read()}
        lists = self.gather(Message(0, json.dumps(list(self._readers)).encode()))
        self._read_by = {rank for rank, message in enumerate(lists) if self.rank in json.loads(message.text)}

    def gather(self, message: Message) -> list[Message]:
        """Send all processes a message; return those of all, by rank.

        Raises:
            GangLost: another process is gone. The group is closed.
        """
        length = len(message.text)
        first = bytearray(_SHORT)
        _HEADER.pack_into(first, 0, message.kind, length, message.size, self._own.fd, self._own.serial)
        if length <= _ROOM:
            first[_HEADER.size : _HEADER.size + length] = message.text
        firsts = self._all(first)
        headers = [_HEADER.unpack_from(other) for other in firsts]
        self._places = [(fd, serial) for *_, fd, serial in headers]
        longest = max(length for _, length, *_ in headers)
        rests = firsts
        if longest > _ROOM:
            rests = self._all(message.text.ljust(longest))
        return [
            Message(kind, (first_of[_HEADER.size :] if length <= _ROOM else rest_of)[:length], size)
            for (kind, length, size, *_), first_of, rest_of in zip(headers, firsts, rests, strict=True)
        ]

    def offer(self, data: Sequence[torch.Tensor]) -> int:
        """Prepare bytes for another process, and return how many there are. In the next round, each process announces
        to all others how many bytes it offers.

        Args:
            data: 1-dimensional uint8 tensors on one device.
        """
        size = sum(len(part) for part in data)
        self._own, self._next = self._next, self._own
        room = self._own.take(size)
        if data and data[0].device == room.device:
            torch.cat(list(data), out=room)
        elif data:
            room.copy_(torch.cat(list(data)))
        self._offered = room
        return size

    def swap(self, rank: int, size: int) -> torch.Tensor:
        """Exchange the offered bytes with another process, which makes the same call. Return the ``size`` bytes that
        the other process has offered; they are valid until the next call.

        Raises:
            GangLost: another process is gone. The group is closed.
        """
        reads = rank in self._readers and self._places[rank][0] >= 0
        is_read = rank in self._read_by and self._own.fd >= 0
        if not reads and size > len(self._received):
            self._received = torch.empty(size, dtype=torch.uint8)
        with self._open() as links:
            its = self._readers[rank].read(*self._places[rank], size) if reads else self._received[:size]
            out = {} if is_read else {rank: _bytes_of(self._offered)}
            links.move(out, {} if reads else {rank: _bytes_of(its)})
        return its

    def _all(self, own: bytes | bytearray) -> list[bytes]:
        """Send bytes to all others; return those of all processes, by rank. All send equally many."""
        gathered = {rank: bytearray(len(own)) for rank in range(self.size) if rank != self.rank}
        with self._open() as links:
            links.move(dict.fromkeys(gathered, memoryview(own)), {r: memoryview(room) for r, room in gathered.items()})
        return [bytes(gathered.get(rank, own)) for rank in range(self.size)]

    @contextmanager
    def _open(self) -> Iterator[Links]:
        if self._links is None:
            raise GangLost("the gang was closed after another of its processes was lost")
        try:
            yield self._links
        except OSError as error:
            self.close()
            raise GangLost(
                f"a process of a gang of {self.size} is gone, and the steps since the last checkpoint are lost: "
                f"{first_line(error)}"
            ) from error

    def part(self) -> None:
        """Close the group after its last round, once all have read the messages of that round."""
        if self._links is not None:
            self._links.end(_FAREWELL)
        self.close()

    def close(self) -> None:
        """Close all connections. Processes that still wait for this one then lose it. Idempotent."""
        if self._links is not None:
            self._links.close()
        self._links = None
        self._own.close()
        self._next.close()
        self._readers = {}


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    content: Any = tensor.numpy()
    return memoryview(content)
