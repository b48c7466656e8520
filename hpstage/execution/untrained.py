"""A fork of this process that was made before anything was trained. Training in it starts as in a new process,
regardless of what training has left behind here. Forking is much faster than starting a process, and keeps code and
data."""

from __future__ import annotations

import logging
import os
import signal
from contextlib import suppress
from multiprocessing.connection import Connection, Pipe

import msgspec

from hpstage.checkpoints import FolderCheckpoints
from hpstage.execution.fork import Fork, forked, obstacle
from hpstage.execution.retraining import Retrained, retrain
from hpstage.plan.messages import Segment
from hpstage.trainable import Trainable

logger = logging.getLogger("hpstage")

_PATIENCE = 600.0
"""Training in a fork that takes longer than this many seconds is considered hung."""
_encode = msgspec.msgpack.Encoder().encode
_REQUESTS = msgspec.msgpack.Decoder(tuple[str, str, Segment])
_RESULTS = msgspec.msgpack.Decoder(Retrained | None)


class UntrainedFork:
    """Trains segments, one at a time, each in a fork of its own. It ends with the thread that made it.

    Use :meth:`made`, which returns ``None`` where this process cannot be forked.
    """

    def __init__(self, trainable: Trainable) -> None:
        self._channel, theirs = Pipe()

        def serve() -> None:
            self._channel.close()
            _serve(trainable, theirs)

        self._pid = forked(serve, theirs.fileno())
        theirs.close()
        self._training = False

    @staticmethod
    def made(trainable: Trainable) -> UntrainedFork | None:
        why = obstacle(trainable)
        if not why:
            try:
                return UntrainedFork(trainable)
            except OSError as error:
                why = str(error)
        logger.debug("steps are not trained again in a fork of the untrained process: %s", why)
        return None

    def begin(self, checkpoints: FolderCheckpoints, segment: Segment) -> None:
        """Start training a segment, whose states are in ``checkpoints``, and comparing.

        Raises:
            OSError: the fork has ended.
        """
        assert not self._training, "it trains one segment at a time"
        self._channel.send_bytes(_encode((str(checkpoints.path), checkpoints.workload, segment)))
        self._training = True

    def wait(self, timeout: float) -> Retrained | None:
        """Return the result of training; ``None`` if there is none within ``timeout`` seconds.

        Raises:
            ChildProcessError: training has ended without a result.
        """
        if not self._channel.poll(timeout):
            return None
        self._training = False
        try:
            result: Retrained | None = _RESULTS.decode(self._channel.recv_bytes())
        except (EOFError, OSError) as error:
            raise ChildProcessError("the fork has ended") from error
        if result is None:
            raise ChildProcessError("training has ended its process, or hangs")
        return result

    def close(self) -> None:
        """End the fork and its training. Idempotent."""
        if self._channel.closed:
            return
        self._channel.close()
        with suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGKILL)
        with suppress(ChildProcessError):  # the user's code has already waited for it
            os.waitpid(self._pid, 0)


def _serve(trainable: Trainable, channel: Connection) -> None:
    """Serve requests until the channel is closed. Train each one in a fork, so that nothing is trained in this
    process."""
    while True:
        try:
            folder, workload, segment = _REQUESTS.decode(channel.recv_bytes())
        except EOFError:
            return
        checkpoints = FolderCheckpoints(folder, workload, sweep=False)
        fork = Fork(lambda store=checkpoints, what=segment: _encode(retrain(trainable, store, what)))  # type: ignore[misc]
        try:
            answer = fork.wait(_PATIENCE) or _encode(None)
        except ChildProcessError:
            answer = _encode(None)
        fork.close(kill=True)
        channel.send_bytes(answer)
