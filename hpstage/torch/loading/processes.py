"""Torch's worker processes, kept from stage to stage: they load the batches ahead that training is expected to request.

One iterator of a DataLoader serves all stages of a process. Its sampler never ends: it yields requests, each for the
batch that is expected next. If training takes another batch (after a fork, or with another seed or batch size), the
sampler begins a new *course* of requests there, and processes skip requests of earlier courses.
"""

from __future__ import annotations

import logging
import pickle
import signal
import sys
import threading
import time
import traceback
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from multiprocessing.connection import wait
from operator import is_
from typing import Any, NoReturn

import cloudpickle
import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info

from hpstage.checkpoints.state_tree import digest
from hpstage.errors import StateError, TrainingError, UsageError
from hpstage.errors.text import how_it_ended
from hpstage.torch.loading.orders import Cut
from hpstage.torch.loading.samples import Samples
from hpstage.torch.loading.taken_over import Workers
from hpstage.training.capture.kinds import CACHE, VALUES
from hpstage.training.capture.portrait import texts_of
from hpstage.training.capture.survey import Record, Survey
from hpstage.training.capture.surveyor import Surveyor
from hpstage.training.capture.values import nbytes
from hpstage.training.identity import threads
from hpstage.training.sample_order import Indices, SampleOrder

logger = logging.getLogger("hpstage")

_ATTEMPTS = 3
"""Number of attempts to load a batch while processes die."""
_LOOK = 0.5
"""Seconds without a batch after which torch checks whether processes are alive (torch's default: 5)."""
_COMPARED = 1 << 24
"""Largest size in bytes of a tensor or array whose values are compared with those that processes have."""


@dataclass(frozen=True, slots=True)
class Request:
    """A request for a batch: ``count`` samples from position ``start``, as part of a ``course``."""

    course: int
    seed: int
    start: int
    count: int


class Died(Exception):
    """Processes have died or cannot be reached any more; the text describes how."""


class Processes:
    """Loads batches in worker processes, which are started when needed and ended by :meth:`close`.

    Not thread-safe: one thread at a time.

    Args:
        samples: makes batches.
        order: the order of samples.
        cut: how batches are expected to follow each other.
        workers: number and settings of the processes; ``count`` is at least 1.
    """

    def __init__(self, samples: Samples, order: SampleOrder, cut: Cut, workers: Workers) -> None:
        self.samples = samples
        self._workers = workers
        self._sent: _Sent | None = None
        self._requests = _Requests(order, cut)
        self._course = torch.zeros(1, dtype=torch.int64)
        self._batches: Any = None
        self._end: Callable[[], object] | None = None

    def take(self, seed: int, start: int, count: int, size: int) -> Any:
        """Return the batch of ``count`` samples from position ``start``; ``size`` is the batch size.

        Raises:
            TrainingError: processes die repeatedly, or the DataLoader's timeout has passed.
            Exception: raised by the user's code in a process; the traceback of that process is a note.
        """
        attempts = _ATTEMPTS
        while True:
            try:
                return self._take(seed, start, count, size)
            except Died as error:
                attempts -= 1
                if not attempts:
                    raise TrainingError(
                        f"processes that load data died {_ATTEMPTS} times in a row while they loaded the samples at "
                        f"positions {start} to {start + count - 1}: {error}. Lower num_workers or prefetch_factor if "
                        f"memory runs out; num_workers = 0 loads in the training process, where an error shows"
                    ) from error
                logger.warning("Processes that load data have died: %s. They are restarted; no sample is lost.", error)

    def _take(self, seed: int, start: int, count: int, size: int) -> Any:
        requests = self._requests
        coming = requests.coming
        if self._batches is None or (coming.seed, coming.start, coming.count) != (seed, start, count):
            self._course[0] = requests.turn(seed, start, count)
        requests.size = size
        if self._batches is None:
            self._start()
        while True:
            course, batch = self._answer()
            requests.sent.popleft()
            if course == requests.course:
                return batch.raised() if isinstance(batch, _Failure) else batch

    def _answer(self) -> tuple[int, Any]:
        """Wait for the next batch. Return the course of its request, and the batch."""
        began = time.monotonic()
        timeout = self._workers.timeout
        while True:
            try:
                course, batch = next(self._batches)
                return course, batch
            except BaseException as error:
                waits = isinstance(error, RuntimeError) and "timed out after" in str(error) and self._pins()
                if waits and not (timeout and time.monotonic() - began > timeout):
                    continue
                how = "" if waits else self._how_they_ended()
                self.close(at_once=True)
                if not isinstance(error, Exception):
                    raise
                if waits:
                    raise TrainingError(
                        f"no batch was loaded in {timeout:g} s, the DataLoader's timeout: loading hangs, or is slow. "
                        f"Raise the timeout if it is slow"
                    ) from error
                raise Died(how or f"{type(error).__name__}: {error}") from error

    def _pins(self) -> bool:
        """Return whether the thread that pins memory is alive; ``True`` if there is none."""
        thread = getattr(self._batches, "_pin_memory_thread", None)
        return thread is None or thread.is_alive()

    def adopt(self, samples: Samples) -> bool:
        """Continue with another data set, if it has the content of the one sent to the processes. Return whether it
        has."""
        if self._sent is not None:
            sent = self._what_is_sent(samples)
            parts = (samples.dataset, samples.collate), (self.samples.dataset, self.samples.collate)
            if not self._sent.is_still(sent, same_objects=all(map(is_, *parts))):
                return False
            self._sent = sent
        self.samples = samples
        return True

    def settle(self) -> None:
        """Prepare for training from another state. End the processes if the data set has changed since they started."""
        if self._sent is not None and self._sent.changed() is not None:
            self.close()

    def check(self) -> None:
        """Raise :class:`~hpstage.errors.StateError` if training has changed an object of which the processes have a
        copy."""
        if self._sent is not None:
            self._sent.check()

    def _start(self) -> None:
        workers = self._workers
        # A new tensor each time: a fork of this process, with worker processes of its own, would share an old one.
        self._course = torch.full((1,), self._requests.course).share_memory_()  # type: ignore[no-untyped-call]
        made = _Made(self.samples, self._course, workers.init, workers.prepare)
        loader: DataLoader[Any] = DataLoader(
            made,
            batch_size=None,
            sampler=self._requests,
            num_workers=workers.count,
            prefetch_factor=workers.prefetch_factor,
            collate_fn=_as_it_is,
            pin_memory=workers.pin_memory and torch.cuda.is_available(),
            timeout=_LOOK,
            worker_init_fn=_begin,
            # Fork by default: the data set need not be pickled, modules need not be imported, settings are inherited.
            multiprocessing_context=workers.context or ("fork" if sys.platform == "linux" else None),
            generator=torch.Generator(),  # not the global one, from which training draws
        )
        self._requests.sent.clear()
        # In the main thread, torch would set a handler that raises anywhere in training when a process dies.
        self._batches = batches = _in_a_thread(lambda: _iterator(loader))
        # Also when this object is deleted: torch would wait until all requested batches are loaded.
        self._end = weakref.finalize(self, _end, batches, self._course)
        self._sent = self._what_is_sent(self.samples)

    def _what_is_sent(self, samples: Samples) -> _Sent:
        parts = {"dataset": samples.dataset, "collate": samples.collate}
        return _Sent(parts, self._workers.owner, self._workers.stateless)

    def _how_they_ended(self) -> str:
        processes = self._batches._workers
        ended = wait([process.sentinel for process in processes], timeout=1)
        for process in processes:
            if process.sentinel in ended:
                process.join(timeout=1)
        codes = sorted({process.exitcode for process in processes if process.exitcode is not None})
        return "; ".join(f"one {how_it_ended(code)}" for code in codes)

    def close(self, *, at_once: bool = False) -> None:
        """End the processes. ``at_once``: kill them first, since they may hang. Idempotent."""
        batches, self._batches, self._sent = self._batches, None, None
        if at_once and batches is not None:
            for process in batches._workers:
                process.kill()
        if self._end is not None:
            self._end()


def _end(batches: Any, course: torch.Tensor) -> None:
    course[0] = -1  # processes skip all requests
    batches._shutdown_workers()


def _in_a_thread(call: Callable[[], Any]) -> Any:
    """Return the result of a call in a thread of its own. An executor's thread would not do: a process forked there
    ends with an error, since it waits for all threads of executors, and so for its own."""
    result = Future[Any]()

    def run() -> None:
        try:
            result.set_result(call())
        except Exception as error:
            result.set_exception(error)

    threading.Thread(target=run, name="hpstage-loading").start()
    return result.result()


def _iterator(loader: DataLoader[Any]) -> Any:
    with warnings.catch_warnings():
        # Python warns of forking a process that has threads. They hold no lock that loading needs.
        warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
        return iter(loader)


class _Requests:
    """The sampler: yields the requests that training is expected to make. It must not refer to the DataLoader's
    iterator, since deleting that ends the processes."""

    def __init__(self, order: SampleOrder, cut: Cut) -> None:
        self._order, self._cut = order, cut
        self.course = 0
        self.size = 1
        self.sent: deque[Request] = deque()
        self._next = Request(0, 0, 0, 0)

    @property
    def coming(self) -> Request:
        """The request that is answered next."""
        return self.sent[0] if self.sent else self._next

    def turn(self, seed: int, start: int, count: int) -> int:
        """Begin a new course with a request for ``count`` samples from ``start``. Return the number of the course."""
        self.course += 1
        self.size = count
        self._next = Request(self.course, seed, start, count)
        return self.course

    def __iter__(self) -> Iterator[tuple[Request, Indices]]:
        while True:
            request = self._next
            start, count = self._cut.batch(request.start + request.count, self.size)
            self._next = Request(request.course, request.seed, start, count)
            self.sent.append(request)
            yield request, self._order.take(request.seed, request.start, request.count)


class _Made(Dataset[Any]):
    """The data set of the worker processes: it answers requests with batches."""

    def __init__(
        self,
        samples: Samples,
        course: torch.Tensor,
        init: Callable[[int], None] | None,
        prepare: Callable[[], None] | None,
    ) -> None:
        self._samples, self._init, self._prepare = samples, init, prepare
        self._course = course
        self._dtype = torch.get_default_dtype()
        self._seen = False

    def __getstate__(self) -> dict[str, Any]:
        # Pickle by value, as Dask sends trainables: torch would move the user's tensors to shared memory.
        packed = cloudpickle.dumps((self._samples, self._init, self._prepare, self._dtype))
        return {"packed": packed, "course": self._course}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._samples, self._init, self._prepare, self._dtype = pickle.loads(state["packed"])  # noqa: S301  # ours
        self._course = state["course"]
        self._seen = False

    def begin(self, number: int, info: Any) -> None:
        # Ctrl-C reaches all processes of a terminal. The training process ends this one.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        threads.pin_thread()
        torch.set_default_dtype(self._dtype)
        object.__setattr__(info, "dataset", self._samples.dataset)  # worker_init_fn expects the user's data set
        if self._prepare is not None:
            self._prepare()
        if self._init is not None:
            self._init(number)

    def __getitem__(self, requested: tuple[Request, Indices]) -> tuple[int, Any]:
        request, indices = requested

        def is_wanted() -> bool:
            return bool(self._course.item() == request.course)

        try:
            if not is_wanted():
                return request.course, None
            if not self._seen:
                _see_repeatable(self._samples, request.seed, request.start, indices)
            batch = self._samples.load(request.seed, request.start, indices, is_wanted)
            if not self._seen:
                _see_plain(batch)
                self._seen = True
        except Exception as error:
            return request.course, _Failure(error)
        return request.course, batch


def _begin(number: int) -> None:
    info: Any = get_worker_info()
    info.dataset.begin(number, info)


def _as_it_is(answer: Any) -> Any:
    return answer


class _Failure:
    """An exception in a process that loads data, as it is sent to the training process."""

    def __init__(self, error: Exception) -> None:
        self._traceback = "".join(traceback.format_exception(error))
        self._error: Exception | None = error
        try:
            pickle.loads(pickle.dumps(error))  # noqa: S301  # just written
        except Exception:
            self._error = None  # pickling may raise any exception
        self._text = f"{type(error).__name__}: {error}"

    def raised(self) -> NoReturn:
        error = self._error or TrainingError(self._text)
        error.add_note(f"in a process that loads data:\n{self._traceback}")
        raise error


def _see_repeatable(samples: Samples, seed: int, start: int, indices: Indices) -> None:
    """Check that a sample is the same when it is loaded twice with the same random numbers.

    Raises:
        UsageError: it differs: the data set depends on the samples loaded before.
    """
    first = indices[:1].tolist()
    try:
        one, other = (digest(samples.made(seed, start, first)) for _ in range(2))
    except StateError:
        return  # a sample that is not made of plain values cannot be compared
    if one != other:
        name = type(samples.dataset).__name__
        raise UsageError(
            f"sample {first[0]} of {name} changed when it was loaded again with the same random numbers: it depends on "
            f"the samples loaded before (by a counter, or its own generator), but each process loads only some of "
            f"them. Let samples depend only on the index and the global generators (random, NumPy, torch), which are "
            f"seeded before each sample; or load with num_workers = 0, where changes of {name} are part of the state"
        )


def _see_plain(batch: Any) -> None:
    """Raise :class:`UsageError` if a batch cannot be sent to the training process: torch would wait for it for ever."""
    try:
        pickle.loads(pickle.dumps(batch))  # noqa: S301  # just written
    except Exception as error:
        raise UsageError(
            f"a batch cannot be sent from a worker process of the DataLoader to the training process ({error}). Build "
            f"it of tensors, arrays, numbers, and classes of an importable module; or load with num_workers = 0"
        ) from error


class _Sent:
    """The values of a data set and its collate function when worker processes were started.

    Args:
        parts: the two objects, by name.
        owner: the trainable, which is left out, since training changes it.
        stateless: paths to ignore.
    """

    def __init__(self, parts: dict[str, object], owner: object, stateless: Collection[str]) -> None:
        beyond = Survey()
        if owner is not None:
            beyond.records[id(owner)] = None  # type: ignore[assignment]  # only the key is read
        self._then = Surveyor(stateless).survey(parts.items(), beyond=beyond, sampled=True)

    def changed(self) -> Record | None:
        return next((record for record in self._then if record.kind is not CACHE and record.changed()), None)

    def is_still(self, other: _Sent, *, same_objects: bool) -> bool:
        """Return whether the values are the same now, and equal those of ``other``. ``same_objects``: whether both are
        known to hold the same objects."""
        return self.changed() is None and (same_objects or self._content() == other._content())

    def _content(self) -> dict[str, object]:
        """Return the values by path; for a large tensor or array, where its memory is."""
        found: dict[str, object] = {}
        for record in self._then:
            if record.kind is VALUES and nbytes(record.obj) > _COMPARED:
                memory = record.content.storage
                found[record.path] = id(record.obj if memory is None else memory), record.content.form
            elif record.kind is not CACHE:
                found |= texts_of(record, self._then)
        return found

    def check(self) -> None:
        """Raise :class:`StateError`, which names the object, if one has changed since."""
        record = self.changed()
        if record is None:
            return
        path = record.path
        if record.kind is not VALUES:
            now = Record(path, record.obj, record.kind, record.read(), record.skip)
            before, after = (dict(texts_of(one, self._then)) for one in (record, now))
            path = next((name for name in (*before, *after) if before.get(name) != after.get(name)), path)
        raise StateError(
            f"training has changed {path}, but the processes that load data ahead have an unchanged copy. Let samples "
            f"depend only on the index and the global generators (random, NumPy, torch); or load with num_workers = 0, "
            f"where changes are part of the state. If samples do not depend on {path}, name it in `stateless`"
        )
