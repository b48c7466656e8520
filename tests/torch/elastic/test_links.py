"""Only processes of a gang get into it: of others nothing is decoded, and they keep nobody out."""

from __future__ import annotations

import os
import pickle
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from pathlib import Path

import pytest

from hpstage.errors import GangApart, TrainingError
from hpstage.torch.elastic import encoding, gang, group, links
from hpstage.torch.elastic.encoding import decode_failure, encode_failure
from hpstage.torch.elastic.group import Meeting, Message
from hpstage.torch.elastic.links import _GREETED, _GREETING, _SIGNATURE, _signature, follow, new_key


class Bomb:
    """Pickled, it makes a file where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (str(self.path),)


def greeting(key: bytes, own: int, other: int) -> bytes:
    signed = _GREETING.pack(own, other, 1, b"n" * 32)
    return signed + _signature(key, b"greets", signed)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def connected(stack: ExitStack, meeting: Meeting) -> socket.socket:
    host, _, port = meeting.place.rpartition(":")
    return stack.enter_context(closing(socket.create_connection((host, int(port)), 60)))


def forms(meeting: Meeting) -> None:
    """Both processes of a gang, here threads, meet and hear each other."""

    def one(rank: int) -> list[bytes]:
        with closing(meeting if rank == 0 else Meeting.find(meeting.address, 60)) as place:
            formed = place.form(rank, 2, 60)
        try:
            return [message.text for message in formed.gather(Message(1, str(rank).encode()))]
        finally:
            formed.part()

    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(one, range(2))) == [[b"0", b"1"]] * 2


def test_unauthenticated_connections_are_closed_and_the_gang_meets(stack: ExitStack, tmp_path: Path) -> None:
    meeting = Meeting.open("127.0.0.1")
    key = bytes.fromhex(meeting.address.partition("/")[2])
    messages = [
        b"",
        pickle.dumps(Bomb(tmp_path / "injected")) * 9,
        b"\0" * _GREETED,
        os.urandom(1 << 16),
        greeting(new_key(), 1, 0),  # of another gang
        greeting(key, 1, 1),  # to another process
        greeting(key, 7, 0),  # of a number that is none
        greeting(key, 0, 0),
        greeting(key, 1, 0)[:-1] + b"\0",
    ]
    strangers = [connected(stack, meeting) for _ in messages]
    for stranger, words in zip(strangers, messages, strict=True):
        stranger.sendall(words)
    forms(meeting)
    for stranger, words in zip(strangers, messages, strict=True):
        with suppress(ConnectionResetError):  # with bytes that nobody has read
            assert stranger.recv(1) == b"", words
    assert not (tmp_path / "injected").exists()


def test_silent_connections_do_not_prevent_a_gang_from_meeting(stack: ExitStack) -> None:
    meeting = Meeting.open("127.0.0.1")
    for _ in range(100):
        connected(stack, meeting)
    forms(meeting)


@pytest.mark.parametrize("answer", [b"\0" * (_SIGNATURE + 4), b"\xff" * (1 << 21), b""])
def test_a_follower_refuses_a_leader_with_a_false_signature(answer: bytes) -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as server, ThreadPoolExecutor(1) as threads:

        def lie() -> None:
            follower, _ = server.accept()
            with follower:
                follower.recv(_GREETED)
                try:
                    follower.sendall(answer)
                except OSError:
                    return  # it has hung up

        lying = threads.submit(lie)
        address = f"127.0.0.1:{server.getsockname()[1]}/{new_key().hex()}"
        with closing(Meeting.find(address, 60)) as meeting, pytest.raises(GangApart):
            meeting.form(1, 2, 60)
        lying.result(60)


def test_a_gang_does_not_form_if_a_process_dies_before_the_first_step() -> None:
    with closing(Meeting.open("127.0.0.1")) as meeting, ThreadPoolExecutor(1) as threads:

        def die() -> None:
            with closing(Meeting.find(meeting.address, 60)) as found:
                follow(found._connection.dup(), found._key, 1, 2, time.monotonic() + 60).close()

        dying = threads.submit(die)
        with pytest.raises(GangApart, match="before its first step: one of its processes is gone"):
            meeting.form(0, 2, 60)
        dying.result(60)


def test_each_gang_has_its_own_key() -> None:
    first, second = Meeting.open("127.0.0.1"), Meeting.open("127.0.0.1")
    with closing(first), closing(second):
        assert first.address.partition("/")[2] != second.address.partition("/")[2]
        assert first.address.partition("/")[2] not in first.place


class Plain(Exception):
    pass


class Rich(Exception):
    def __init__(self, code: int) -> None:
        super().__init__(f"code {code}")
        self.code = code

    def __str__(self) -> str:
        return f"of code {self.code}"


@pytest.mark.parametrize(
    "error", [ValueError("x"), KeyError("x"), StopIteration(), OSError(2, "no file"), Plain(1, "a")]
)
def test_an_exception_with_plain_arguments_arrives_with_its_type_and_arguments(error: Exception) -> None:
    found = decode_failure(encode_failure(error, 3))
    assert (type(found), str(found), found.args) == (type(error), str(error), error.args)
    assert "virtual node 3" in found.__notes__[0]


@pytest.mark.parametrize("error", [Rich(7), ValueError(b"bytes"), ValueError(Plain())])
def test_an_exception_that_cannot_be_rebuilt_arrives_as_text(error: Exception) -> None:
    found = decode_failure(encode_failure(error, 3))
    assert type(found) is TrainingError
    assert str(found) == f"{type(error).__name__}: {error}"


def test_modules_of_a_gang_do_not_import_pickle() -> None:
    for module in (encoding, gang, group, links):
        assert not {"pickle", "torch.load"} & vars(module).keys()
