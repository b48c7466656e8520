"""Gang: how a leader has followers train the same steps, and what happens when one of them fails."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NoReturn

from torch import Tensor

from hpstage.errors import GangApart, GangLost, UsageError
from hpstage.schedule import Scalar
from hpstage.torch.elastic.encoding import decode, decode_failure, encode, encode_failure
from hpstage.torch.elastic.group import Group, Message, unbegun
from hpstage.torch.elastic.reduction import Share, combine
from hpstage.torch.elastic.virtual_nodes import Failed


class _Kind(IntEnum):
    """The kind of a message. All rounds have the same format, so that a message of another round is not
    misinterpreted."""

    HELLO = 0  # from all: what they are about to train
    READY = 1  # from a follower: it waits for an order
    ORDER = 2  # from the leader: see Order
    STOP = 3  # from the leader: the gang is dissolved
    SHARE = 4  # from all: what their virtual nodes have computed
    FAILED = 5  # from any: the user's code has raised an exception in a virtual node
    LEFT = 6  # from any: it has left the step by an exception raised outside virtual nodes


@dataclass(frozen=True, slots=True)
class Order:
    """An order to train a step with these values. If ``hp`` is ``None``, an order to check whether the state can be
    captured."""

    step: int
    hp: dict[str, Scalar] | None = None


class LeaderLeft(Exception):
    """Raised in a follower if the leader has left the step, so that the follower's part in it does not matter."""


class Gang:
    """The gang, from the view of one of its processes.

    In a step, all processes share what their nodes have computed, once for each batch. A process that leaves a step by
    an exception reports it in the next round, whatever the others do in that round. So all processes are in the same
    round at any time.

    Attributes:
        own: the virtual nodes that this process trains.
        waited: the seconds that this process has spent on sharing, in all.
    """

    def __init__(self, group: Group, nodes: int) -> None:
        self._group = group
        self.rank, self.size = group.rank, group.size
        share = nodes // group.size
        self.own = range(group.rank * share, (group.rank + 1) * share)
        self.waited = 0.0
        self._in_step = False

    def greet(self, who: str) -> None:
        """Compare what the processes are about to train.

        Raises:
            GangApart: they are about to train from different states, or one is gone.
        """
        with unbegun():
            texts = [message.text.decode() for message in self._group.gather(Message(_Kind.HELLO, who.encode()))]
        if len(set(texts)) > 1:
            self.close()
            raise GangApart(
                f"the processes of a gang are not in the same state: process 0 is at {texts[0]}, and process "
                f"{next(rank for rank, text in enumerate(texts) if text != texts[0])} at "
                f"{next(text for text in texts if text != texts[0])}"
            )

    # --- the leader ---------------------------------------------------------------------------------------

    def order(self, order: Order) -> None:
        """Order the followers to do the same as this process does next."""
        began = time.perf_counter()
        messages = self._group.gather(Message(_Kind.ORDER, json.dumps([order.step, order.hp]).encode()))
        self._see_ready(messages)
        self._in_step = True
        self.waited += time.perf_counter() - began

    def stop(self, word: str) -> None:
        """Dissolve the gang. A follower that is lost, or has failed, does not matter any more."""
        try:
            self._group.gather(Message(_Kind.STOP, word.encode()))
        except GangLost:
            return
        self._group.part()

    # --- a follower ---------------------------------------------------------------------------------------

    def obey(self) -> Order | str:
        """Return the leader's next order, or the leader's reason for dissolving the gang."""
        while True:
            messages = self._group.gather(Message(_Kind.READY))
            kind = _Kind(messages[0].kind)
            if kind is _Kind.STOP:
                self._group.part()
                return messages[0].text.decode()
            self._see_ready(messages)
            if kind is _Kind.ORDER:
                self._in_step = True
                return Order(*json.loads(messages[0].text))

    # --- all ----------------------------------------------------------------------------------------------

    def exchange(self, own: Share | Failed, parameters: Sequence[Tensor], buffers: Sequence[Tensor]) -> Share:
        """Return the combined share of all nodes.

        Raises:
            Exception: the exception of the user's code, from the first node in which it has raised one.
            LeaderLeft: the leader has left the step.
            GangLost: a process is gone, or a follower has failed where the leader has not.
        """
        began = time.perf_counter()
        # Neighbours combine their shares, then pairs of neighbours, and so on: each level of the tree is one round.
        distance = 1
        while distance < self.size:
            if not isinstance(own, Share):
                self._see_shared(self._group.gather(_failed(own)), own)
                break
            text, data = encode(own)
            messages = self._group.gather(Message(_Kind.SHARE, text, self._group.offer(data)))
            self._see_shared(messages, None)
            rank = self.rank ^ distance
            given = self._group.swap(rank, messages[rank].size)
            other = decode(messages[rank].text, given, own, parameters, buffers)
            try:
                own = combine(own, other) if rank > self.rank else combine(other, own, into_right=True)
            except UsageError as error:
                own = self.own.start, error
            distance *= 2
        if not isinstance(own, Share):
            raise own[1]
        self.waited += time.perf_counter() - began
        return own

    def agree(self, error: Exception | None) -> None:
        """Report to the others whether this process could do what was ordered.

        Raises:
            Exception: as :meth:`exchange` does.
        """
        failed = None if error is None else (self.own.start, error)
        self._see_shared(self._group.gather(Message(_Kind.SHARE) if failed is None else _failed(failed)), failed)

    def left(self, error: Exception) -> None:
        """Inform the others that this process has left the step by ``error``, unless they know or the step is over.

        Raises:
            GangLost: the leader has not left the step, so this process no longer belongs to the gang.
        """
        if not self._in_step:
            return
        self._in_step = False
        messages = self._group.gather(Message(_Kind.LEFT, f"{type(error).__name__}: {error}".encode()))
        kind = _Kind(messages[0].kind)
        if kind is _Kind.STOP:
            self._group.part()
        elif kind in (_Kind.LEFT, _Kind.FAILED):
            return
        self._lost(f"training has failed only in process {self.rank} of a gang: {type(error).__name__}: {error}")

    def end_step(self) -> None:
        """Record that this process has finished the step."""
        self._in_step = False

    def close(self) -> None:
        """Leave the gang at once; the other processes notice that this one is gone. Idempotent."""
        self._group.close()

    def _see_ready(self, messages: Sequence[Message]) -> None:
        """Raise :class:`GangLost` unless all followers wait for an order."""
        for rank, message in enumerate(messages[1:], start=1):
            if message.kind != _Kind.READY and messages[0].kind != _Kind.LEFT:
                self._lost(f"training has failed only in process {rank} of a gang: {message.text.decode()}")

    def _see_shared(self, messages: Sequence[Message], own: Failed | None) -> None:
        """Raise the exceptions that :meth:`exchange` documents."""
        kinds = [_Kind(message.kind) for message in messages]
        if set(kinds) == {_Kind.SHARE}:
            return
        self._in_step = False
        if kinds[0] is _Kind.LEFT:
            raise LeaderLeft
        alone = [rank for rank, kind in enumerate(kinds) if kind not in (_Kind.SHARE, _Kind.FAILED)]
        if alone and kinds[0] is not _Kind.FAILED:
            text = messages[alone[0]].text.decode(errors="replace")
            self._lost(f"training has failed only in process {alone[0]} of a gang: {text}")
        first = kinds.index(_Kind.FAILED)
        if first == self.rank and own is not None:
            raise own[1]
        raise decode_failure(messages[first].text)

    def _lost(self, text: str) -> NoReturn:
        self.close()
        self._in_step = False
        raise GangLost(text)


def _failed(failed: Failed) -> Message:
    node, error = failed
    return Message(_Kind.FAILED, encode_failure(error, node))
