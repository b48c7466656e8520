"""Trains chains in this process: the worker's side, shared by every executor that really trains."""

from __future__ import annotations

import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Generator, Mapping

import msgspec

from hpstage.checkpoints.live import LiveCache
from hpstage.checkpoints.store import CheckpointStore
from hpstage.course import Course
from hpstage.errors import CheckpointError
from hpstage.events import (
    Amendment,
    Boundary,
    BoundaryMissed,
    BoundaryReached,
    Chain,
    ChainEnded,
    NodeId,
    Stage,
    StateKey,
    UserFailure,
    WorkerId,
    to_metrics,
)
from hpstage.schedule import Scalar, varies
from hpstage.trainable import Trainable, checked_metrics

ChainReport = BoundaryReached | BoundaryMissed | ChainEnded


class Control:
    """How a running chain is reached from other threads: amendments and the wish that it stop."""

    def __init__(self) -> None:
        self._amendments: deque[Amendment] = deque()
        self._lock = threading.Lock()
        self.called = False  # read at every step without the lock: a stale value costs one step
        self.stopped = False

    def amend(self, amendment: Amendment) -> None:
        with self._lock:
            self._amendments.append(amendment)
            self.called = True

    def stop(self) -> None:
        with self._lock:
            self.stopped = True
            self.called = True

    def take(self) -> list[Amendment]:
        """Amendments since the last call, in order."""
        with self._lock:
            taken = list(self._amendments)
            self._amendments.clear()
            self.called = False
            return taken


class Values(dict[str, Scalar]):
    """Every hyper-parameter's value at the present step of a stage; only those that vary are computed anew."""

    def __init__(self, stage: Stage) -> None:
        super().__init__({name: form.value(stage.start) for name, form in stage.forms.items()})
        self._varying = [(name, form) for name, form in stage.forms.items() if varies(form)]

    def move(self, step: int) -> None:
        for name, form in self._varying:
            self[name] = form.value(step)


class ChainRunner:
    """Runs chains one after the other on one trainable.

    Not thread-safe: one chain at a time. ``run`` is a generator of reports; between two of them nothing is
    trained, so that an executor in this process may act on each report at once.

    Args:
        trainable: what is trained; it stays set up between chains, so that a chain that goes on where the last
            one ended loads nothing.
        checkpoints: where states are kept.
        live: states kept in memory.
        worker: the name in reports.
        clock: the time in reports.
    """

    def __init__(
        self,
        trainable: Trainable,
        checkpoints: CheckpointStore,
        live: LiveCache,
        *,
        worker: WorkerId,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._trainable = trainable
        self._checkpoints = checkpoints
        self._live = live
        self._worker = worker
        self._clock = clock
        self._stands_at: StateKey | None = None  # the state that the trainable is in, if it has a key
        self._synchronize: Callable[[], None] | None = getattr(trainable, "synchronize", None)
        self._announce: Callable[[bool], None] | None = getattr(trainable, "announce", None)

    def run(self, chain: Chain, control: Control) -> Generator[ChainReport, None, None]:
        """Train a chain to its end; the last report is its ``ChainEnded``."""
        course = Course(chain)
        here = course.stages[0]
        began = time.perf_counter()
        try:
            source = self._enter(chain)
        except CheckpointError as error:
            self._stands_at = None
            yield self._over(chain, "unreadable", here.node, here.start, message=str(error))
            return
        except Exception as error:
            self._stands_at = None
            yield self._over(chain, "failed", here.node, here.start, failure=_failure(error))
            return
        load_seconds: float | None = time.perf_counter() - began
        parent = chain.source
        index, step, since = 0, here.start, here.start
        values = Values(here)
        train_seconds = 0.0
        began = time.perf_counter()
        while True:
            boundary = course.boundaries.pop((index, step), None)
            if boundary is not None:
                self._settle()
                train_seconds += time.perf_counter() - began
                try:
                    report = self._reach(chain, boundary, since, train_seconds, parent)
                except CheckpointError as error:
                    yield self._over(
                        chain,
                        "full",
                        here.node,
                        step,
                        message=str(error),
                        wasted=(step - since, train_seconds),
                    )
                    return
                except Exception as error:
                    # The state cannot be had, as if the step before it had failed.
                    yield self._over(
                        chain,
                        "failed",
                        here.node,
                        step - 1,
                        failure=_failure(error),
                        wasted=(step - since, train_seconds),
                    )
                    return
                if load_seconds is not None:
                    report = msgspec.structs.replace(report, load_seconds=load_seconds, source=source)
                    load_seconds = None
                if report.kept is not None:
                    parent = boundary.key
                since, train_seconds = step, 0.0
                yield report
                if (index, step) == course.end or not (course.boundaries or control.called):
                    yield self._over(chain, "done", here.node, step)
                    return
                began = time.perf_counter()
            if control.called:
                stopped = control.stopped
                for amendment in control.take():
                    for node, at in course.amend(amendment, (index, step)):
                        yield BoundaryMissed(
                            chain.id, self._worker, node, at, step if node == here.node else here.start
                        )
                if stopped or not course.boundaries:
                    self._settle()
                    train_seconds += time.perf_counter() - began
                    yield self._over(
                        chain,
                        "stopped" if stopped else "done",
                        here.node,
                        step,
                        wasted=(step - since, train_seconds),
                    )
                    return
            if step == here.stop:
                index += 1
                here = course.stages[index]
                since = here.start
                values = Values(here)
                continue
            if self._announce is not None:
                coming = course.boundaries.get((index, step + 1))
                self._announce(coming is not None and (coming.evaluate or coming.keep))
            values.move(step)
            self._stands_at = None
            try:
                self._trainable.train(step, values)
            except Exception as error:
                train_seconds += time.perf_counter() - began
                yield self._over(
                    chain,
                    "failed",
                    here.node,
                    step,
                    failure=_failure(error),
                    wasted=(step - since, train_seconds),
                )
                return
            step += 1

    def try_out(self, initial: Mapping[str, Scalar]) -> dict[str, float] | None:
        """Metrics of the untrained model; ``None`` if it cannot be evaluated yet."""
        self._stands_at = None
        try:
            self._trainable.setup(initial)
            return checked_metrics(self._trainable.evaluate())
        except Exception:
            # Many models cannot be evaluated untrained (scikit-learn's raise NotFittedError). What is really wrong
            # comes up again, with its traceback, in the first chain.
            return None

    def _enter(self, chain: Chain) -> str:
        """Bring the trainable to the chain's source; how: fresh, continued, live or disk."""
        if chain.source is None:
            self._stands_at = None
            self._trainable.setup(chain.initial)
            return "fresh"
        if self._stands_at == chain.source:
            return "continued"
        self._stands_at = None
        state = self._live.get(chain.source)
        source = "live"
        if state is None:
            state = self._checkpoints.load(chain.source)
            source = "disk"
        self._trainable.setup(chain.initial)
        self._trainable.load_state_dict(state)
        self._stands_at = chain.source
        return source

    def _settle(self) -> None:
        """Let work that was handed to a device finish, so that its time is counted where it belongs."""
        if self._synchronize is not None:
            self._synchronize()

    def _reach(
        self, chain: Chain, boundary: Boundary, since: int, train_seconds: float, parent: StateKey | None
    ) -> BoundaryReached:
        metrics: dict[str, float] | None = None
        failure: UserFailure | None = None
        kept = None
        began = time.perf_counter()
        if boundary.evaluate:
            try:
                metrics = checked_metrics(self._trainable.evaluate())
            except Exception as error:
                failure = _failure(error)
        evaluated = time.perf_counter()
        if boundary.keep:
            self._stands_at = boundary.key
            if boundary.key != parent:
                state = self._trainable.state_dict()
                kept = self._checkpoints.save(boundary.key, state, step=boundary.step, parent=parent)
                self._live.put(boundary.key, state)
        saved = time.perf_counter()
        return BoundaryReached(
            chain=chain.id,
            worker=self._worker,
            node=boundary.node,
            start=since,
            step=boundary.step,
            at=self._clock(),
            train_seconds=train_seconds,
            evaluate_seconds=evaluated - began if boundary.evaluate else 0.0,
            save_seconds=saved - evaluated if kept is not None else 0.0,
            metrics=None if metrics is None else to_metrics(metrics),
            kept=kept,
            failure=failure,
        )

    def _over(
        self,
        chain: Chain,
        outcome: str,
        node: NodeId,
        step: int,
        *,
        failure: UserFailure | None = None,
        message: str = "",
        wasted: tuple[int, float] = (0, 0.0),
    ) -> ChainEnded:
        return ChainEnded(
            chain=chain.id,
            worker=self._worker,
            outcome=outcome,  # type: ignore[arg-type]
            at=self._clock(),
            node=node,
            step=step,
            failure=failure,
            message=message,
            wasted_steps=wasted[0],
            wasted_seconds=wasted[1],
        )


def _failure(error: BaseException) -> UserFailure:
    """An exception as text, its traceback cut to the user's own frames."""
    frames = error.__traceback__
    here = __file__
    while frames is not None and frames.tb_frame.f_code.co_filename == here:
        frames = frames.tb_next
    text = "".join(traceback.format_exception(type(error), error, frames))
    kinds = tuple(f"{kind.__module__}.{kind.__qualname__}" for kind in type(error).__mro__ if kind is not object)
    summary = traceback.format_exception_only(type(error), error)[-1].strip()
    return UserFailure(summary=summary, traceback=text, kinds=kinds)
