"""Group: the processes of a gang, connected by torch.distributed's Gloo, and what they tell each other."""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Callable
from contextlib import closing, suppress
from datetime import timedelta
from typing import NamedTuple

import torch
from torch.distributed import PrefixStore, ProcessGroupGloo, TCPStore  # type: ignore[attr-defined]  # its stubs lag

from hpstage.errors import GangApart, GangLost

_HEAD = struct.Struct("<qqq")
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
    """What one process tells all others in a round: a kind, a short text, and bytes, a 1-dimensional uint8 tensor."""

    kind: int
    text: bytes = b""
    data: torch.Tensor = torch.empty(0, dtype=torch.uint8)


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
        return Group(gloo, self._store, rank, size)

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
    """The processes of a gang. All take part in every round, in the same order."""

    def __init__(self, gloo: ProcessGroupGloo, store: TCPStore, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self._gloo: ProcessGroupGloo | None = gloo
        self._store: TCPStore | None = store
        gloo.set_timeout(_PATIENCE)

    def gather(self, message: Message) -> list[Message]:
        """Tell all processes a message; return those of all, by rank.

        Raises:
            GangLost: another process is gone. The group is closed.
        """
        size, data = len(message.text), message.data.cpu()
        first, rest = bytearray(_SHORT), data
        _HEAD.pack_into(first, 0, message.kind, size, len(data))
        if size <= _ROOM:
            first[_HEAD.size : _HEAD.size + size] = message.text
        else:
            rest = torch.cat([data, _tensor(message.text)])
        firsts = [bytes(other.numpy()) for other in self._all(_tensor(first))]
        heads = [_HEAD.unpack_from(other) for other in firsts]
        longest = max(length + (size if size > _ROOM else 0) for _, size, length in heads)
        padded = torch.zeros(longest, dtype=torch.uint8)
        padded[: len(rest)] = rest
        rests = self._all(padded) if longest else [padded] * self.size
        messages = []
        for (kind, size, length), first_of, rest_of in zip(heads, firsts, rests, strict=True):
            if size <= _ROOM:
                text = first_of[_HEAD.size : _HEAD.size + size]
            else:
                text = bytes(rest_of[length : length + size].numpy())
            messages.append(Message(kind, text, rest_of[:length]))
        return messages

    def _all(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        if self._gloo is None:
            raise GangLost("the gang was closed after another of its processes was lost")
        gathered = [torch.empty_like(tensor) for _ in range(self.size)]
        try:
            self._gloo.allgather([gathered], [tensor]).wait()  # type: ignore[attr-defined]
        except RuntimeError as error:
            self.close()
            raise GangLost(
                f"a process of a gang of {self.size} is gone, and with it what they have trained since the last kept "
                f"state: {_first_line(error)}"
            ) from error
        return gathered

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


def _tensor(content: bytes | bytearray) -> torch.Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _remedy() -> str:
    return (
        f"Open the ports between the hosts of workers, or name the interface by which they reach each other in "
        f"{_INTERFACE} on each of them"
    )
