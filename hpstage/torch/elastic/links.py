"""Links: connections between all processes of a gang, authenticated before anything from them is decoded.

Each gang has its own key, which its processes are given with its address. A process that connects first sends a
greeting of fixed length, signed with the key, and the listening process answers in the same way. All other connections
are closed.
"""

from __future__ import annotations

import hmac
import json
import secrets
import select
import selectors
import socket
import struct
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import cast

_GREETING = struct.Struct("!HHH32s")
"""Format of a greeting: the sender's number, the receiver's number, the port at which the sender listens, and a
nonce."""
_SIGNATURE = 32
_GREETED = _GREETING.size + _SIGNATURE
_LENGTH = struct.Struct("!I")
_LONGEST = 1 << 20
"""Maximum bytes of an answer to a greeting: it has the host and port of all processes of a gang."""
_STRANGERS = 64
"""Maximum number of connections without a greeting; beyond it, the oldest is closed."""
_GLANCE = 0.05
"""Seconds between two checks of whether to wait any longer."""

Place = tuple[str, int]
"""Host and port."""


def new_key() -> bytes:
    return secrets.token_bytes(32)


class Links:
    """The connections of one process to the others, by their numbers.

    Args:
        sockets: connected sockets by number; :meth:`close` closes them.
    """

    def __init__(self, sockets: Mapping[int, socket.socket]) -> None:
        self._sockets = dict(sockets)
        for link in sockets.values():
            link.setblocking(False)
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def move(self, out: Mapping[int, memoryview], into: Mapping[int, memoryview]) -> None:
        """Send bytes to others and receive as many as there is room for, all at the same time.

        Raises:
            OSError: another process is gone.
        """
        sending = {rank: data for rank, data in out.items() if len(data)}
        receiving = {rank: room for rank, room in into.items() if len(room)}
        while True:
            # Each socket is tried before waiting for it: short messages have mostly arrived.
            for rank, data in list(sending.items()):
                with suppress(BlockingIOError):
                    sending[rank] = data[self._sockets[rank].send(data) :]
            for rank, room in list(receiving.items()):
                with suppress(BlockingIOError):
                    count = self._sockets[rank].recv_into(room)
                    if not count:
                        raise ConnectionResetError("that process has closed its connection")
                    receiving[rank] = room[count:]
            sending = {rank: data for rank, data in sending.items() if len(data)}
            receiving = {rank: room for rank, room in receiving.items() if len(room)}
            if not sending and not receiving:
                return
            poll = select.poll()
            for rank in sending.keys() | receiving.keys():
                events = (select.POLLOUT if rank in sending else 0) | (select.POLLIN if rank in receiving else 0)
                poll.register(self._sockets[rank], events)
            poll.poll()

    def end(self, seconds: float) -> None:
        """Stop sending. Return once the others have stopped, too, and so have read everything, or after ``seconds``."""
        for link in self._sockets.values():
            with suppress(OSError):  # the other is gone
                link.shutdown(socket.SHUT_WR)
        deadline = time.monotonic() + seconds
        for link in self._sockets.values():
            link.settimeout(max(deadline - time.monotonic(), 0.001))
            with suppress(OSError):
                link.recv(1)

    def close(self) -> None:
        for link in self._sockets.values():
            link.close()


def lead(
    listener: socket.socket, key: bytes, size: int, deadline: float, in_vain: Callable[[], bool]
) -> tuple[Links | None, list[int]]:
    """Wait until all other processes of a gang have connected; return links to them. At the deadline, or if
    ``in_vain()``, return ``None`` and the numbers of the missing processes."""
    with ExitStack() as stack:
        come = _accept(stack, listener, key, 0, range(1, size), deadline, in_vain)
        missing = [rank for rank in range(1, size) if rank not in come]
        if missing:
            return None, missing
        places = [(link.getpeername()[0], port) for link, port, _ in (come[rank] for rank in range(1, size))]
        for link, _, nonce in come.values():
            _answer(link, key, nonce, places, deadline)
        stack.pop_all()
        return Links({rank: link for rank, (link, *_) in come.items()}), []


def follow(leader: socket.socket, key: bytes, rank: int, size: int, deadline: float) -> Links:
    """Join a gang as number ``rank``, over a connection to its leader; return once all are connected.

    Raises:
        OSError: not all are connected by the deadline, or the other end does not know the key.
    """
    with ExitStack() as stack:
        stack.enter_context(leader)
        host = leader.getsockname()[0]
        listener = stack.enter_context(socket.create_server((host, 0), family=leader.family, backlog=size))
        port = listener.getsockname()[1]
        links = {0: leader}
        places = _greet(leader, key, rank, 0, port, deadline)
        for other in range(1, rank):
            left = max(deadline - time.monotonic(), 0.001)
            links[other] = stack.enter_context(socket.create_connection(places[other - 1], left))
            _greet(links[other], key, rank, other, port, deadline)
        come = _accept(stack, listener, key, rank, range(rank + 1, size), deadline, lambda: False)
        if len(come) < size - rank - 1:
            raise TimeoutError("other processes did not connect")
        for other, (link, _, nonce) in come.items():
            _answer(link, key, nonce, [], deadline)
            links[other] = link
        stack.pop_all()
    listener.close()
    return Links(links)


def _signature(key: bytes, *parts: bytes) -> bytes:
    return hmac.digest(key, b"".join(parts), "sha256")


def _greet(link: socket.socket, key: bytes, own: int, other: int, port: int, deadline: float) -> list[Place]:
    """Greet the listening process; return the hosts and ports in its answer. Raise an error if it does not know the
    key."""
    nonce = secrets.token_bytes(32)
    greeting = _GREETING.pack(own, other, port, nonce)
    link.settimeout(max(deadline - time.monotonic(), 0.001))
    link.sendall(greeting + _signature(key, b"greets", greeting))
    signature = _received(link, _SIGNATURE)
    length = _received(link, _LENGTH.size)
    text = _received(link, min(_LENGTH.unpack(length)[0], _LONGEST))
    if not hmac.compare_digest(signature, _signature(key, b"answers", nonce, text)):
        raise ConnectionError("the process that answers there does not belong to this gang")
    return [(host, number) for host, number in json.loads(text)]


def _answer(link: socket.socket, key: bytes, nonce: bytes, places: Sequence[Place], deadline: float) -> None:
    text = json.dumps(places).encode()
    link.settimeout(max(deadline - time.monotonic(), 0.001))
    link.sendall(_signature(key, b"answers", nonce, text) + _LENGTH.pack(len(text)) + text)


def _received(link: socket.socket, count: int) -> bytes:
    parts = b""
    while len(parts) < count:
        part = link.recv(count - len(parts))
        if not part:
            raise ConnectionResetError("the connection was closed")
        parts += part
    return parts


def _accept(
    stack: ExitStack,
    listener: socket.socket,
    key: bytes,
    own: int,
    ranks: Collection[int],
    deadline: float,
    in_vain: Callable[[], bool],
) -> dict[int, tuple[socket.socket, int, bytes]]:
    """Accept connections until the processes ``ranks`` have all greeted. Return, for each, its connection (which
    ``stack`` will close), the port at which it listens and the nonce to answer with. Other connections are closed."""
    come: dict[int, tuple[socket.socket, int, bytes]] = {}
    for stranger, greeting in _greetings(listener, lambda: len(come) == len(ranks) or in_vain(), deadline):
        signed, signature = greeting[: _GREETING.size], greeting[_GREETING.size :]
        rank, other, port, nonce = _GREETING.unpack(signed)
        known = hmac.compare_digest(signature, _signature(key, b"greets", signed))
        if known and other == own and rank in ranks and rank not in come:
            come[rank] = stack.enter_context(stranger), port, nonce
        else:
            stranger.close()
    return come


def _greetings(
    listener: socket.socket, over: Callable[[], bool], deadline: float
) -> Iterator[tuple[socket.socket, bytes]]:
    """Yield each connection that has sent as many bytes as a greeting has, with these bytes."""
    strangers: dict[socket.socket, bytes] = {}
    listener.setblocking(False)
    with selectors.DefaultSelector() as selector, _closing(strangers):
        selector.register(listener, selectors.EVENT_READ)

        def forget(stranger: socket.socket) -> bytes:
            selector.unregister(stranger)
            return strangers.pop(stranger)

        while not over() and time.monotonic() < deadline:
            for entry, _ in selector.select(_GLANCE):
                if entry.fileobj is listener:
                    with suppress(OSError):  # it may have hung up before
                        stranger, _ = listener.accept()
                        stranger.setblocking(False)
                        strangers[stranger] = b""
                        selector.register(stranger, selectors.EVENT_READ)
                    if len(strangers) > _STRANGERS:
                        oldest = next(iter(strangers))
                        forget(oldest)
                        oldest.close()
                    continue
                stranger = cast(socket.socket, entry.fileobj)
                if stranger not in strangers:
                    continue  # closed just now
                part = b""
                with suppress(OSError):
                    part = stranger.recv(_GREETED - len(strangers[stranger]))
                strangers[stranger] += part
                if not part:
                    forget(stranger)
                    stranger.close()
                elif len(strangers[stranger]) == _GREETED:
                    yield stranger, forget(stranger)


@contextmanager
def _closing(strangers: Mapping[socket.socket, bytes]) -> Iterator[None]:
    try:
        yield
    finally:
        for stranger in strangers:
            stranger.close()
