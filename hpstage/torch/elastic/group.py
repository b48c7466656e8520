"""Group: the processes of a gang, connected by torch.distributed's Gloo, and what they tell each other."""

from __future__ import annotations

import json
import os
import socket
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from datetime import timedelta
from typing import Any, NamedTuple

import torch
from torch.distributed import PrefixStore, ProcessGroupGloo, TCPStore  # type: ignore[attr-defined]  # its stubs lag

from hpstage.errors import GangApart, GangLost
from hpstage.torch.elastic.shared_memory import Memory, Reader

_HEAD = struct.Struct("<qqqqq")
_SHORT = 512
"""Bytes of the first message of each round. What does not fit in is sent in a second one."""
_ROOM = _SHORT - _HEAD.size
_PATIENCE = timedelta(days=365)
"""A process waits for the next step while the leader evaluates or saves. One that dies closes its connections."""
_FAREWELL = 10.0
"""Seconds for which the leader waits until all have read its last message."""
_GLANCE = 0.005
"""Seconds between two looks of the leader at who has come."""
_INTERFACE = "GLOO_SOCKET_IFNAME"


class Message(NamedTuple):
    """What one process tells all others in a round: a kind, a text, and how many bytes it has for one of them."""

    kind: int
    text: bytes = b""
    size: int = 0


class Meeting:
    """A place where the processes of a gang meet: the leader listens, the others come.

    Attributes:
        address: ``"host:port"``, at which it can be joined.
    """

    def __init__(self, store: TCPStore, host: str, port: int, own_host: str) -> None:
        self._store = store
        self._own_host = own_host
        self.address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    @classmethod
    def open(cls, host: str) -> Meeting:
        """Listen on an interface of this host.

        Raises:
            GangApart: there is none of that name.
        """
        try:
            family, kind, *_, place = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
            listener = socket.socket(family, kind)
            with closing(listener):
                listener.bind(place)
                listener.listen()
                port = listener.getsockname()[1]
                store = TCPStore(
                    host, port, is_master=True, wait_for_workers=False, master_listen_fd=os.dup(listener.fileno())
                )
        except (OSError, RuntimeError) as error:
            raise GangApart(f"this process cannot listen on {host} for a gang: {error}. {_remedy()}") from error
        return cls(store, host, port, host)

    @classmethod
    def find(cls, address: str, timeout: float) -> Meeting:
        """Find the one that listens at ``address``.

        Raises:
            GangApart: it cannot be reached within ``timeout`` seconds.
        """
        host, _, port = address.rpartition(":")
        host = host.strip("[]")
        try:
            # Not by the store at once: it would write each attempt to the standard error. One attempt is enough,
            # since a leader listens before it says where.
            with closing(socket.create_connection((host, int(port)), timeout)) as probe:
                own_host = probe.getsockname()[0]
            store = TCPStore(
                host, int(port), is_master=False, wait_for_workers=False, timeout=timedelta(seconds=timeout)
            )
        except (OSError, RuntimeError) as error:
            raise GangApart(
                f"the leader of a gang cannot be reached at {host}, port {port}, from {socket.gethostname()}: "
                f"{error}. {_remedy()}"
            ) from error
        return cls(store, host, int(port), own_host)

    def form(self, rank: int, size: int, timeout: float, in_vain: Callable[[], bool] | None = None) -> Group:
        """Wait until all have come.

        Args:
            in_vain: whether to wait no longer.

        Raises:
            GangApart: some did not come within ``timeout`` seconds, or cannot be reached.
        """
        began = time.monotonic()
        try:
            self._store.set(f"here/{rank}", socket.gethostname())
            self._await_all(size, began + timeout, in_vain)
            interface = os.environ.get(_INTERFACE)
            options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
            options._devices = [
                ProcessGroupGloo.create_device(interface=interface.split(",")[0])
                if interface
                else ProcessGroupGloo.create_device(hostname=self._own_host)
            ]
            options._timeout = timedelta(seconds=max(1.0, timeout - (time.monotonic() - began)))
            options._threads = 1
            gloo = ProcessGroupGloo(PrefixStore("gang", self._store), rank, size, options)
        except RuntimeError as error:
            missing = [other for other in range(size) if not self._has_come(other)]
            who = f"{', '.join(map(str, missing))} did not come" if missing else "all came, but could not connect"
            raise GangApart(
                f"a gang of {size} processes did not meet at {self.address} within {timeout:g} seconds: of the numbers "
                f"0 to {size - 1}, {who} ({_first_line(error)}). {_remedy()}"
            ) from error
        group = Group(gloo, self._store, rank, size)
        group.see_memory()
        return group

    def _await_all(self, size: int, deadline: float, in_vain: Callable[[], bool] | None) -> None:
        here = [f"here/{other}" for other in range(size)]
        # Not by many short waits of the store: it would write each to the standard error.
        while in_vain is not None and time.monotonic() < deadline and not self._store.check(here):
            if in_vain():
                raise GangApart(f"a gang of {size} processes was dissolved before all had come to {self.address}")
            time.sleep(_GLANCE)
        self._store.wait(here, timedelta(seconds=max(deadline - time.monotonic(), _GLANCE)))

    def _has_come(self, rank: int) -> bool:
        try:
            return self._store.check([f"here/{rank}"])
        except RuntimeError:
            return False  # the store itself, which is the leader's, is gone


class Group:
    """The processes of a gang. All take part in every round, in the same order.

    What a process has for another one on its host, that one reads where it is; what it has for others is sent.
    """

    def __init__(self, gloo: ProcessGroupGloo, store: TCPStore, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self._gloo: ProcessGroupGloo | None = gloo
        self._store: TCPStore | None = store
        # Two, since others may still read what they were given in the last round. Kept from step to step: to get new
        # memory from the system takes as long as to fill it.
        self._own, self._next = Memory(), Memory()
        self._offered = self._received = torch.empty(0, dtype=torch.uint8)
        self._places: list[tuple[int, int]] = []  # by rank: the file of what was offered last, and its serial number
        self._readers: dict[int, Reader] = {}  # by rank
        self._read_by: set[int] = set()
        gloo.set_timeout(_PATIENCE)

    def see_memory(self) -> None:
        """Find out who can read whose memory."""
        signatures = [message.text.decode() for message in self.gather(Message(0, self._own.sign().encode()))]
        readers = {rank: Reader(text) for rank, text in enumerate(signatures) if rank != self.rank}
        self._readers = {rank: reader for rank, reader in readers.items() if reader.can_read()}
        told = self.gather(Message(0, json.dumps(list(self._readers)).encode()))
        self._read_by = {rank for rank, message in enumerate(told) if self.rank in json.loads(message.text)}

    def gather(self, message: Message) -> list[Message]:
        """Tell all processes a message; return those of all, by rank.

        Raises:
            GangLost: another process is gone. The group is closed.
        """
        length = len(message.text)
        first = bytearray(_SHORT)
        _HEAD.pack_into(first, 0, message.kind, length, message.size, self._own.fd, self._own.serial)
        if length <= _ROOM:
            first[_HEAD.size : _HEAD.size + length] = message.text
        firsts = [bytes(other.numpy()) for other in self._all(_tensor(first))]
        heads = [_HEAD.unpack_from(other) for other in firsts]
        self._places = [(fd, serial) for *_, fd, serial in heads]
        longest = max(length for _, length, *_ in heads)
        rests = firsts
        if longest > _ROOM:
            rests = [bytes(other.numpy()) for other in self._all(_tensor(message.text.ljust(longest)))]
        return [
            Message(kind, (first_of[_HEAD.size :] if length <= _ROOM else rest_of)[:length], size)
            for (kind, length, size, *_), first_of, rest_of in zip(heads, firsts, rests, strict=True)
        ]

    def offer(self, data: Sequence[torch.Tensor]) -> int:
        """Have bytes ready for another process; return how many. All are told so in the next round.

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
        """Give another process what it was offered, and return the ``size`` bytes that it has offered: until the next
        time. Both do so.

        Raises:
            GangLost: another process is gone. The group is closed.
        """
        reads = rank in self._readers and self._places[rank][0] >= 0
        is_read = rank in self._read_by and self._own.fd >= 0
        if not reads and size > len(self._received):
            self._received = torch.empty(size, dtype=torch.uint8)
        with self._open() as gloo:
            its = self._readers[rank].read(*self._places[rank], size) if reads else self._received[:size]
            works = [] if is_read or not len(self._offered) else [gloo.send([self._offered], rank, 0)]
            works += [] if reads or not size else [gloo.recv([its], rank, 0)]
            for work in works:
                work.wait(_PATIENCE)
        return its

    def _all(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        gathered = [tensor if rank == self.rank else torch.empty_like(tensor) for rank in range(self.size)]
        others = [rank for rank in range(self.size) if rank != self.rank]
        with self._open() as gloo:
            # Sooner there than by Gloo's own allgather, which has a thread of its own for it.
            works = [gloo.send([tensor], rank, 0) for rank in others]
            works += [gloo.recv([gathered[rank]], rank, 0) for rank in others]
            for work in works:
                work.wait(_PATIENCE)
        return gathered

    @contextmanager
    def _open(self) -> Iterator[Any]:
        if self._gloo is None:
            raise GangLost("the gang was closed after another of its processes was lost")
        try:
            yield self._gloo
        except (RuntimeError, OSError) as error:
            self.close()
            raise GangLost(
                f"a process of a gang of {self.size} is gone, and with it what they have trained since the last kept "
                f"state: {_first_line(error)}"
            ) from error

    def part(self) -> None:
        """Close the group after its last round. The leader waits for the others, so that they have read all of it."""
        store = self._store
        if store is not None:
            others = [f"done/{rank}" for rank in range(1, self.size)]
            with suppress(RuntimeError):  # one that died since does not matter any more
                if self.rank:
                    store.set(others[self.rank - 1], "")
                else:
                    store.wait(others, timedelta(seconds=_FAREWELL))
        self.close()

    def close(self) -> None:
        """Close all connections, by which the others lose this process if they still wait for it. Idempotent."""
        self._gloo = self._store = None
        self._own.close()
        self._next.close()
        self._readers = {}


def _tensor(content: bytes | bytearray) -> torch.Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _remedy() -> str:
    return (
        f"Open the ports between the hosts of workers, or name the interface by which they reach each other in "
        f"{_INTERFACE} on each of them"
    )
