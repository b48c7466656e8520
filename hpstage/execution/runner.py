"""Trains chains in this process: the worker's side, shared by all executors that really train."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from typing import Literal

from msgspec.structs import replace

from hpstage.checkpoints.live import LiveCache
from hpstage.checkpoints.patient_store import PatientStore
from hpstage.checkpoints.store import CheckpointStore
from hpstage.errors import CheckpointError, CompilerFailed, DeviceFull, GangApart, GangLost, NonFiniteLoss, StateError
from hpstage.errors.text import writable
from hpstage.execution import gang
from hpstage.execution.control import Control
from hpstage.execution.first_steps import FirstSteps
from hpstage.execution.flight import Due, Flight, Gathering, Took, Values
from hpstage.execution.outcomes import failure_of, outcome_of, outcome_of_store
from hpstage.execution.position import Position
from hpstage.execution.recording import Logs, Recording, release_streams
from hpstage.execution.rerun import Reruns
from hpstage.execution.retraining import changing
from hpstage.execution.saving import Save, Saves, Writer
from hpstage.execution.trying_out import metrics_untrained
from hpstage.execution.untrained import UntrainedFork
from hpstage.execution.verifier import Verifier
from hpstage.plan.facts import (
    ChainOutcome,
    ForkVerified,
    InputsRead,
    Metrics,
    StateKey,
    TrainingEnded,
    UserFailure,
    WorkerId,
)
from hpstage.plan.messages import Boundary, BoundaryMissed, BoundaryReached, Chain, ChainEnded, ChainReport
from hpstage.schedule import Scalar
from hpstage.trainable import Trainable
from hpstage.training.adapter import checked_metrics
from hpstage.training.identity.inputs import Inputs, inputs_of

logger = logging.getLogger("hpstage")

_LEFT = "states that were kept on devices for faster forks were removed from them, and training continues"

Running = Generator[ChainReport | Gathering | Due | None, Took | None, None]


class ChainRunner:
    """Runs chains one after the other on one trainable.

    Not thread-safe. ``run`` is a generator of reports. Nothing is trained between two of them, so an executor in this
    process may act on each report at once.

    Args:
        trainable: the trainable; it stays set up between chains, so that a chain that continues where the last one
            ended loads nothing.
        live: states kept in memory.
        find_live: returns a live state; waits if it is still being fetched.
        worker: name used in reports.
        clock: returns the time used in reports.
        bundled: whether other runners train in this process, too: before each step, ``run`` yields a :class:`Due`, and
            expects a :class:`Took` once the step is trained.
        host: address at which other workers reach this one's host.
        inputs: records files and variables that training reads; by default, those of ``trainable``.
        writer: writes states while training continues, and delivers the reports that wait for a state. Without it,
            training waits for each state.
        untrained: a fork of this process that was made before training; parts of some chains are retrained in it.
    """

    def __init__(
        self,
        trainable: Trainable,
        checkpoints: CheckpointStore,
        live: LiveCache,
        find_live: Callable[[StateKey], object | None],
        *,
        worker: WorkerId,
        clock: Callable[[], float] = time.time,
        bundled: bool = False,
        host: str = "127.0.0.1",
        inputs: Inputs | None = None,
        writer: Writer | None = None,
        untrained: UntrainedFork | None = None,
    ) -> None:
        self._trainable = trainable
        self._bundled = bundled
        self._host = host
        self._checkpoints = PatientStore(checkpoints)
        self._live = live
        self._position = Position(trainable, self._checkpoints, live, find_live)
        self._worker = worker
        self._clock = clock
        self._writer = writer
        self._inputs = inputs_of(trainable) if inputs is None else inputs
        self._synchronize: Callable[[], None] | None = getattr(trainable, "synchronize", None)
        self._announce: Callable[[bool], None] | None = getattr(trainable, "announce", None)
        self._expect: Callable[[bool], None] | None = getattr(trainable, "expect", None)
        self._foresee: Callable[[frozenset[str]], None] | None = getattr(trainable, "foresee", None)
        self._first_steps = FirstSteps(trainable, bundled=bundled)
        self._verifier = Verifier(trainable, self._train_step)
        self._reruns = (
            None if untrained is None else Reruns(trainable, untrained, checkpoints, self._position.load, worker, clock)
        )
        self._logs = Logs(checkpoints)

    def run(self, chain: Chain, control: Control) -> Running:
        """Train a chain to its end; the last report is its ``ChainEnded``. Yields ``None`` at a pause, and a
        :class:`Gathering` when it waits for the others of its gang."""
        flight = Flight(chain, Saves(self._checkpoints, self._live, control, self._writer))
        try:
            yield from self._run(chain, flight, control)
        finally:
            release_streams()
            flight.saves.close()
            if flight.verification is not None:
                flight.verification.close()
            gang.dismiss(self._trainable, chain, None)  # if it was closed before its end

    def follow(self, chain: Chain, address: str, rank: int) -> None:
        """Train a chain with the worker that leads it and waits at ``address``, as number ``rank`` of its gang.

        Raises:
            CheckpointError: the chain's source cannot be loaded.
            GangApart: the leader cannot be reached.
            GangLost: a worker of the gang is gone.
        """
        self._checkpoints.enter(lambda: False)
        self._position.go_to(chain.source, chain.initial)
        self._position.key = None  # also if following fails
        self._position.key = gang.follow(self._trainable, chain, address, rank)

    def _run(self, chain: Chain, flight: Flight, control: Control) -> Running:
        try:
            self._checkpoints.enter(lambda: bool(control.stopped) or control.paused)
            if self._foresee is not None:
                self._foresee(changing(chain.stages, chain.initial))
            self._enter(chain, flight)
            began = time.perf_counter()
            yield from gang.gather(self._trainable, chain, self._host, control)
            flight.load_seconds += time.perf_counter() - began
        except CheckpointError as error:
            yield self._over(flight, outcome_of_store(error), message=str(error))
            return
        except GangApart as error:
            yield self._over(flight, "stopped" if control.stopped else "apart", message=str(error))
            return
        except Exception as error:
            if chain.source is None and outcome_of(error) == "pruned":
                yield from self._end(flight, error)
                yield self._over(flight, "done")
            else:
                self._logs.save_last(flight)
                yield self._over(flight, "failed", failure=failure_of(error, __file__, chain.initial))
            return
        try:
            try:
                outcome = yield from self._train(flight, control)
            except Exception:
                self._settle_saves(flight)  # if an earlier state cannot be saved, that error ends the chain instead
                raise
            self._settle_saves(flight)
        except CheckpointError as error:
            flight.take_back()
            yield self._over(flight, outcome_of_store(error), message=str(error))
        except (GangLost, CompilerFailed) as error:
            flight.take_back()
            yield self._over(flight, "lost", message=str(error))
        except Exception as error:
            if self._live.makes_room(error):
                flight.take_back()
                yield self._over(flight, "lost", message=f"{error}; {_LEFT}")
                return
            if flight.at_boundary:
                flight.step -= 1  # the state cannot be taken: the step before it counts as failed
            self._logs.save_last(flight)
            flight.take_back()
            yield self._over(flight, "failed", failure=failure_of(error, __file__, chain.initial))
        else:
            yield self._over(flight, outcome)

    def _train(
        self, flight: Flight, control: Control
    ) -> Generator[ChainReport | Due | None, Took | None, Literal["done", "stopped"]]:
        """Train from the chain's source; yield reports of boundaries, and return how the chain ended.

        At each step: report the boundary there, compare with retrained steps, obey the driver's latest orders, and
        train the step.
        """
        course = flight.course
        values = Values(flight.stage)
        self._verifier.enter(flight)
        if self._reruns is not None:
            self._reruns.follow(flight)
        flight.start_clock()
        while True:
            boundary = course.boundaries.pop(flight.step, None)
            metrics = None
            if boundary is not None:
                metrics = yield from self._pass(flight, boundary)
            at_end = boundary is not None and (flight.step == course.end or not (course.boundaries or control.called))
            for found in self._compare(flight, values, boundary, metrics, at_end=at_end):
                yield found
                if found.difference is not None:
                    return "stopped"
            if at_end:
                return "done"
            if flight.saves.error is not None:
                raise flight.saves.error
            if control.called:
                if (ending := self._left_over(flight)) is not None:
                    yield from self._end(flight, ending)
                    return "done"
                outcome = yield from self._obey(flight, control)
                if outcome == "again":
                    continue
                if outcome is not None:
                    return outcome
            if flight.step == flight.stage.stop:
                flight.turn()
                values = Values(flight.stage)
                self._verifier.enter(flight)
                continue
            flight.begin_step()
            values.move(flight.step)
            if self._bundled:
                flight.stop_clock()
                self._position.key = None  # the step is trained before this resumes, if it ever does
                took = yield Due(flight.step, values)
                assert took is not None, "it was trained"
                flight.train(took)
                flight.start_clock()
            flight.recorder.step = flight.step
            self._inputs.begin_step(first=flight.step == flight.chain.stages[0].start)
            ending = None
            try:
                with Recording(flight.recorder):
                    if self._expect is not None:
                        alone = not (control.called or flight.chain.gang)
                        self._expect(alone and flight.step + 1 not in course.boundaries)
                    self._train_step(flight.step, values, flight.announced)
            except Exception as error:
                if outcome_of(error) is None:
                    raise
                ending = error
            if ending is not None:
                flight.step -= getattr(ending, "steps_late", 0)
                yield from self._end(flight, ending)
                return "done"
            flight.step += 1
            self._first_steps.see(flight, values)

    def _pass(self, flight: Flight, boundary: Boundary) -> Generator[ChainReport, None, Metrics | None]:
        """Report a boundary, and return the metrics there."""
        self._settle()
        flight.stop_clock()
        reached, save = self._reach(flight, boundary)
        yield from self._read(flight)
        yield from flight.saves.give(reached, save)
        flight.start_clock()
        return reached.reached.metrics

    def _compare(
        self,
        flight: Flight,
        values: Mapping[str, Scalar],
        boundary: Boundary | None,
        metrics: Metrics | None,
        *,
        at_end: bool,
    ) -> Iterator[ForkVerified]:
        """Begin, continue and end the retraining of steps, and yield its results. Call it after the boundary is
        reported, so that nothing is lost if the process dies here."""
        reruns, verifier = self._reruns, self._verifier
        if reruns is not None:
            if at_end:
                self._settle_saves(flight)
                reruns.begin(flight, metrics)
            else:
                reruns.see(flight, boundary)
        if verifier.is_due(flight, boundary, at_end=at_end):
            self._settle_saves(flight)
            stood_at = self._position.key
            verified, moved = verifier.verify(flight, values, self._worker, self._clock, at_end=at_end)
            if flight.verification is None:
                self._position.key = None if moved else stood_at
            if verified is not None:
                yield verified
            flight.start_clock()
        if reruns is not None and boundary is not None:
            differs = reruns.ended(flight, at_end=at_end)
            if differs is not None:
                yield differs
            flight.start_clock()

    def _obey(
        self, flight: Flight, control: Control
    ) -> Generator[ChainReport | None, None, Literal["done", "stopped", "again"] | None]:
        """Carry out the orders since the last step. Return how the chain ends here, if it does, or "again" to check its
        boundaries and orders once more before the next step."""
        course = flight.course
        for amendment in control.take():
            for ref in course.amend(amendment, flight.step):
                missed = BoundaryMissed(flight.chain.id, self._worker, ref.node, ref.step, flight.step)
                yield from flight.saves.give(missed)
        stopped = control.stopped
        if stopped == "kept" and flight.step > flight.kept:
            at_once = self._announce is None or flight.announced
            course.end = flight.step if at_once else flight.step + 1
            course.keep_at(course.end)
            if at_once:
                return "again"
        elif stopped or not course.boundaries:
            self._settle()
            return "stopped" if stopped else "done"
        if control.paused:
            control.paused = False
            flight.stop_clock()
            yield None
            flight.start_clock()
            return "again"
        return None

    def _end(self, flight: Flight, error: Exception) -> Generator[ChainReport, None, None]:
        """Report that the user's code ended training in the current step, with the last state if there is a new one."""
        self._settle()
        flight.stop_clock()
        if flight.verification is not None:
            flight.verification.close()
            flight.verification = None
        step, outcome = flight.step, outcome_of(error)
        assert outcome is not None
        begun, source = flight.kept, flight.parent
        verify = self._verifier.is_end_due(flight)
        if verify:
            self._settle_saves(flight)
        last, save = None, None
        if outcome == "complete":
            flight.step += 1
            last, save = self._reach(flight, replace(flight.course.own(flight.step), evaluate=True), is_last=True)
        else:
            if step > flight.since:
                last, save = self._reach(flight, flight.course.own(step, keep=False))
            self._logs.save_last(flight)
        self._position.key = None
        if verify:
            self._position.go_to(source, flight.chain.initial)
            self._verifier.verify_end(flight, begun, step)
        yield from self._read(flight)
        ending = TrainingEnded(
            chain=flight.chain.id,
            worker=self._worker,
            node=flight.stage.node,
            step=step,
            at=self._clock(),
            outcome=outcome,
            message=writable(str(error)) or f"{type(error).__name__} in step {step}",
            diverged=isinstance(error, NonFiniteLoss),
        )
        yield from flight.saves.give(ending if last is None else replace(last, ending=ending), save)

    def _read(self, flight: Flight) -> Iterator[InputsRead]:
        """Report the inputs that training has read and that are in no key, before the results that depend on them."""
        if inputs := self._inputs.news():
            yield InputsRead(flight.chain.id, self._worker, self._clock(), inputs)

    def _train_step(self, step: int, values: Mapping[str, Scalar], report: bool) -> None:
        if self._announce is not None:
            self._announce(report)
        self._position.key = None
        with self._inputs:
            self._trainable.train(step, values)

    def close(self) -> None:
        """End the fork in which steps are retrained."""
        if self._reruns is not None:
            self._reruns.close()

    def _left_over(self, flight: Flight) -> Exception | None:
        """Return the exception that ended training in the last step, if a later step would have raised it."""
        if self._expect is not None:
            try:
                self._trainable.settle(flight.step)  # type: ignore[attr-defined]  # of trainables with expect()
            except NonFiniteLoss as error:
                flight.step -= error.steps_late
                return error
        return None

    def try_out(self, initial: Mapping[str, Scalar]) -> dict[str, float] | None:
        """Return metrics of the untrained model; ``None`` if it cannot be evaluated yet."""
        self._position.key = None
        with self._inputs:
            return metrics_untrained(self._trainable, initial)

    def _enter(self, chain: Chain, flight: Flight) -> None:
        """Bring the trainable to the chain's source, and record how."""
        began = time.perf_counter()
        train_by = getattr(self._trainable, "train_by", None)
        if chain.numerics and train_by is not None and not train_by(chain.numerics):
            self._position.key = None
        try:
            self._go_to_source(flight)
        except Exception as error:
            if not self._live.makes_room(error):
                raise
            error.__traceback__ = None  # whose frames hold memory
            logger.warning("%s; %s", error, _LEFT)
            self._go_to_source(flight)
        flight.load_seconds = time.perf_counter() - began

    def _go_to_source(self, flight: Flight) -> None:
        chain = flight.chain
        with Recording(flight.recorder if chain.source is None else None, logs=False), self._inputs:
            flight.source = self._position.go_to(chain.source, chain.initial)

    def _settle(self) -> None:
        """Wait for work that is queued on a device, so that its time is attributed to the right step."""
        if self._synchronize is not None:
            self._synchronize()

    def _settle_saves(self, flight: Flight) -> None:
        """Wait until every report so far is delivered. Raises the error of a state that could not be written."""
        flight.stop_clock()
        flight.saves.settle()

    def _reach(
        self, flight: Flight, boundary: Boundary, *, is_last: bool = False
    ) -> tuple[BoundaryReached, Save | None]:
        """Act at a boundary and reset the flight's counters. Return the report and, if it waits for one, the save.

        Args:
            is_last: no state follows, so a failed evaluation counts as failed training.
        """
        flight.at_boundary = True
        metrics: dict[str, float] | None = None
        failure: UserFailure | None = None
        save = None
        began = time.perf_counter()
        if boundary.evaluate:
            try:
                with Recording(flight.recorder, logs=False), self._inputs:
                    metrics = checked_metrics(self._trainable.evaluate())
            except StateError:
                raise  # training cannot continue from the resulting state
            except Exception as error:
                if is_last:
                    raise
                if self._live.makes_room(error):
                    raise DeviceFull(str(error)) from error
                failure = failure_of(error, __file__, flight.chain.initial)
        evaluated = time.perf_counter()
        if boundary.keep:
            self._position.key = boundary.key
            if boundary.key != flight.parent:
                state = self._trainable.state_dict()
                self._live.reserve(0 if flight.verification is None else flight.verification.held_bytes)
                save = flight.saves.save(boundary.key, state, step=boundary.step, parent=flight.parent)
        self._logs.save(flight, boundary.key, boundary.step)
        saved = time.perf_counter()
        reached = flight.reached(
            boundary,
            self._worker,
            self._clock(),
            metrics=metrics,
            evaluate_seconds=evaluated - began if boundary.evaluate else 0.0,
            save_seconds=saved - evaluated if save is not None else 0.0,
            alone_seconds=flight.alone or gang.alone_seconds(self._trainable, flight.chain),
        )
        flight.has_reported()
        flight.at_boundary = False
        if boundary.keep:
            flight.has_kept()
        if save is not None:
            flight.parent = boundary.key
        return BoundaryReached(reached, failure, noticed=self._first_steps.take(flight)), save

    def _over(
        self, flight: Flight, outcome: ChainOutcome, *, failure: UserFailure | None = None, message: str = ""
    ) -> ChainEnded:
        """Return the report of the chain's end. Training that was not reported before is wasted."""
        if outcome in ("failed", "unreadable", "lost"):
            self._position.key = None
        flight.stop_clock()
        gang.dismiss(self._trainable, flight.chain, self._position.key)
        return ChainEnded(
            chain=flight.chain.id,
            worker=self._worker,
            outcome=outcome,
            at=self._clock(),
            node=flight.stage.node,
            step=flight.step,
            failure=failure,
            message=message,
            wasted_steps=max(0, flight.step - flight.since),
            wasted_seconds=(flight.train_seconds + flight.load_seconds) * flight.workers,
        )
