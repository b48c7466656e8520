"""Function style: an ordinary training loop, stepped from outside.

::

    def train(run):
        model = Net(run.hp["width"])
        optimizer = torch.optim.SGD(model.parameters(), lr=run.hp["lr"])
        run.attach(model=model, optimizer=optimizer)
        for step in run.steps():
            batch = run.indices(len(x), run.hp["batch_size"])
            ...                                  # forward, backward, optimizer.step()
            if run.wants_report:
                run.report(accuracy=accuracy(model))

The function runs in a thread of its own with strict hand-over: either it runs or hpstage does, never both. It is paused
where ``run.steps()`` is asked for the next step. To fork, hpstage begins the function anew and ``run.attach`` fills
what it is given; so what training changes must be attached, and local variables are no state. Whenever a state is
taken, those that may be read before they are written again (:mod:`hpstage.capture.liveness`) must hold what they held
where the loop began: one that has changed is refused by name, however late that is. Those on which no training hangs (a
list of losses to look at) are named in the function's attribute ``stateless``: ``train.stateless = ("losses",)``.
"""

from __future__ import annotations

import contextvars
import inspect
import sys
import threading
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from types import CodeType, FrameType, FunctionType
from typing import TYPE_CHECKING, Any, TypeVar

from hpstage.capture.context_managers import letting_through, swallowing
from hpstage.capture.liveness import live, place
from hpstage.capture.portrait import LOCAL
from hpstage.capture.reach import MISSING, Slot, of_user
from hpstage.capture.variables import Variable
from hpstage.capture.world import World
from hpstage.checkpoints.state_tree import clone
from hpstage.errors import StateError, TrainingError, UsageError
from hpstage.identity import threads
from hpstage.schedule import Scalar
from hpstage.training.adapter import Adapter, checked_metrics, stateless_of
from hpstage.training.randomness import Purpose, libraries, rekey, seed_of
from hpstage.training.sample_order import SampleOrder

if TYPE_CHECKING:
    from hpstage.torch.follow import Follower
    from hpstage.training.sample_order import Indices


_T = TypeVar("_T")


class Run:
    """What a training function is given.

    ``hp`` maps every hyper-parameter to its value at the present step (before the loop: at step 0).
    ``wants_report`` tells whether the state after this step will be evaluated or kept: then, and only then,
    :meth:`report` is needed.
    """

    def __init__(
        self, hp: Mapping[str, Scalar], state: Mapping[str, Any] | None, attached: dict[str, Any], world: World
    ) -> None:
        self.hp: Mapping[str, Scalar] = hp
        self._state = state
        self._attached = attached
        self._world = world
        self._parts: dict[str, Any] | None = None
        self._followers: list[Follower] = []
        self._looping = False
        self._step = 0
        self._samples: int = 0 if state is None else state["samples"]
        self._population: int | None = None if state is None else state["population"]
        self._order: SampleOrder | None = None
        self._metrics: dict[str, float] | None = None if state is None else state["metrics"]
        self.wants_report = self._metrics is None
        self._baton = _Baton()

    def attach(self, **parts: Any) -> None:
        """Name what training changes: anything with ``state_dict`` and ``load_state_dict``. Once, before the loop.

        In a fork it is filled with the state here: parameters, gradients, buffers and attributes, and all that can be
        reached from them. Fields of a torch optimizer's param groups that are named like a
        hyper-parameter (``lr``, ``momentum``, ``weight_decay``; ``beta1`` and ``beta2`` for ``betas``) follow its
        schedule from now on.
        """
        if self._looping or self._parts is not None:
            raise UsageError("call run.attach(...) once, before the loop over run.steps()")
        for name, part in parts.items():
            if not (callable(getattr(part, "state_dict", None)) and callable(getattr(part, "load_state_dict", None))):
                raise UsageError(
                    f"run.attach({name}=...): {type(part).__name__} has no state_dict and load_state_dict; give it "
                    f"both, or make it an attribute of something that is attached, which is captured with it"
                )
        torch: Any = sys.modules.get("torch")
        for part in parts.values():
            if torch is not None and isinstance(part, torch.optim.Optimizer):
                from hpstage.torch.follow import Follower

                self._followers.append(Follower(part, self.hp))
        self._parts = parts
        self._attached.update(parts)
        self._world.begin()
        if self._state is not None:
            kept = self._state["parts"]
            if sorted(kept) != sorted(parts):
                raise StateError(f"the state has the parts {sorted(kept)}, but attached were {sorted(parts)}")
            for name, own in self._state["own"].items():
                parts[name].load_state_dict(clone(own))
            self._world.load(self._state["captured"])
            self._state = None

    def _own(self) -> Iterator[str]:
        """Names of the parts that tell their own state: all but torch's, which are captured whole."""
        torch: Any = sys.modules.get("torch")
        for name, part in (self._parts or {}).items():
            if torch is None or not isinstance(part, (torch.nn.Module, torch.optim.Optimizer, _scheduler(torch))):
                yield name

    def steps(self) -> Iterator[int]:
        """The steps to train, one by one. It ends only by leaving the function: code after the loop never runs."""
        return _Steps(self)

    def report(self, **metrics: Any) -> None:
        """Metrics of the state after this step. Ignored unless ``wants_report``.

        Before the loop: those of the state that the run begins with. Measuring them must not change what is attached
        (``model.eval()`` before, ``model.train()`` after).
        """
        if self.wants_report:
            self._metrics = checked_metrics(metrics, "run.report()")

    def indices(self, population: int, batch_size: int) -> Indices:
        """Indices of the next batch among ``population`` samples: int64, shape ``(batch_size,)``.

        The order is a function of the hyper-parameter ``seed`` and of the samples consumed so far; the state
        keeps that number, so that the batch size may change at any step.
        """
        if not self._looping:
            raise UsageError("run.indices() belongs into the loop over run.steps()")
        if batch_size < 1:
            raise UsageError(f"run.indices(): the batch size is {batch_size}; it must be at least 1")
        if self._order is None:
            self._order = SampleOrder(population)
        if population != (self._population or population):
            raise UsageError(f"run.indices() was given {self._population} samples before and {population} now")
        self._population = population
        taken = self._order.take(seed_of(self.hp), self._samples, batch_size)
        self._samples += batch_size
        return taken


class _Steps(Iterator[int]):
    """The steps of one run. Whether somebody counts them besides (``zip(range(100), steps)``) is not known, so that
    nobody may begin anew to."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._begun = False

    def __iter__(self) -> Iterator[int]:
        if self._begun:
            raise UsageError(
                "the steps of run.steps() were looped over twice: forks begin where the first loop does; loop over "
                "run.steps() once, and find out by the step what is to be done there"
            )
        return self

    def __next__(self) -> int:
        run = self._run
        if not self._begun:
            if run._looping:
                raise UsageError("run.steps() was called twice; loop over it once")
            if run._parts is None:
                raise UsageError("call run.attach(...) with all that training changes before the loop over run.steps()")
            run._looping = self._begun = True
        run._baton.give_back()
        return run._step


def _scheduler(torch: Any) -> Any:
    return torch.optim.lr_scheduler.LRScheduler


class _Abandoned(BaseException):
    """Unwinds a training function that is needed no more; no ``except Exception`` stops it."""


class _Baton:
    """Strict hand-over between the engine's thread and the function's: who has it runs, the other waits."""

    def __init__(self) -> None:
        self._function = threading.Lock()
        self._engine = threading.Lock()
        self._function.acquire()
        self._engine.acquire()
        self._errand: Callable[[], object] | None = None
        self.abandoned = False
        self.away = False  # the function has it

    def give_back(self) -> None:
        """The function's side: pause until it is handed over again, and do errands meanwhile."""
        while not self.abandoned:
            self._engine.release()
            self._function.acquire()
            if self._errand is None:
                break
            self._errand()
        if self.abandoned:
            raise _Abandoned

    def wait(self) -> None:
        """The function's side, at its beginning."""
        self._function.acquire()
        if self.abandoned:
            raise _Abandoned

    def end(self) -> None:
        """The function's side, at its end. An abandoned one is waited for by joining its thread."""
        if not self.abandoned:
            self._engine.release()

    def hand_over(self) -> None:
        """The engine's side: let the function run until it pauses or ends."""
        self.away = True
        self._function.release()
        self._engine.acquire()
        self.away = False

    def send(self, errand: Callable[[], _T]) -> _T:
        """The engine's side: have something done in the function's thread, while the function is paused."""
        done: Future[_T] = Future()

        def do() -> None:
            try:
                done.set_result(errand())
            except BaseException as error:
                done.set_exception(error)

        self._errand = do
        try:
            self.hand_over()
        finally:
            self._errand = None
        return done.result()


@dataclass(frozen=True, slots=True)
class _Pause:
    """Code and offset of the instructions at which functions are paused, and variables that may matter there."""

    places: tuple[tuple[CodeType, int], ...]
    variables: tuple[Variable, ...]


class _Body:
    """One call of the training function. It refers to no FunctionTrainable, whose end is to end it."""

    def __init__(self, function: Callable[[Run], object], run: Run) -> None:
        self.run = run
        self.ended = False
        self._function = function
        self._error: BaseException | None = None
        context = contextvars.copy_context()
        self._thread = threading.Thread(target=context.run, args=(self._main,), name="hpstage-function", daemon=True)
        self._thread.start()

    def _main(self) -> None:
        baton = self.run._baton
        try:
            threads.pin_thread()
            baton.wait()
            self._function(self.run)
        except _Abandoned:
            pass  # unwound as asked
        except BaseException as error:
            # From here on the traceback is the user's.
            self._error = error.with_traceback(error.__traceback__ and error.__traceback__.tb_next)
        finally:
            self.ended = True
            baton.end()

    def go_on(self) -> None:
        """Let the function run to its next pause; raises what it raised."""
        self.run._baton.hand_over()
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def in_its_thread(self, errand: Callable[[], _T]) -> _T:
        """What the function has set for its thread alone (modes of torch's, context variables) is seen there only."""
        return errand() if self.ended else self.run._baton.send(errand)

    def variables(self) -> Iterator[tuple[str, Slot]]:
        """The local variables of the user's functions, while they are paused."""
        for frame in self._frames():
            variables = _locals(frame)
            for name, value in variables.items():
                if not isinstance(value, Run):
                    yield name, Slot(LOCAL + name, variables, name)

    def pause(self, passed_by: Collection[str]) -> _Pause:
        """Where the user's own functions are paused, and their variables that may matter, but for those passed by."""
        frames = list(self._frames())
        places, variables = [], []
        for index, frame in enumerate(frames):
            code, held = frame.f_code, _locals(frame)
            at = place(code, frame.f_lasti)
            places.append((code, at))
            matter = partial(live, code, at, innermost=not index, outermost=index == len(frames) - 1)
            bound = matter(untaken=swallowing(code))
            for name in sorted(matter(untaken=letting_through(frame, held))):
                value = held.get(name, MISSING)
                if name not in passed_by and not isinstance(value, Run | _Steps):
                    variables.append(Variable(name, code, value, needed=name in bound))
        return _Pause(tuple(places), tuple(variables))

    def _frames(self) -> Iterator[FrameType]:
        """Those of the user's functions, the innermost first."""
        frame = sys._current_frames().get(self._thread.ident or 0)
        while frame is not None:
            module = frame.f_globals.get("__name__")
            if of_user(module) or module == getattr(self._function, "__module__", None):
                yield frame
            frame = frame.f_back

    def close(self) -> None:
        """Unwind the function; its ``finally`` blocks run. Idempotent."""
        baton = self.run._baton
        if self._thread.is_alive():
            if baton.away:
                # The engine was interrupted while it waited (Ctrl-C): the function still runs.
                baton._engine.acquire()
                baton.away = False
            baton.abandoned = True
            if not self.ended:
                baton._function.release()
            self._thread.join()
        # What the function attached may be large, and on a device.
        self.run._parts = None
        self.run._followers.clear()


class FunctionTrainable(Adapter):
    """A training function as a Trainable.

    :meth:`announce` tells before each step whether the state after it will be evaluated or kept; a kept state holds its
    metrics, so that it can be evaluated later without another step. Never announced, the function is always asked.
    """

    subject: Callable[[Run], object]

    def __init__(self, function: Callable[[Run], object]) -> None:
        self.subject = function
        self._name = getattr(function, "__qualname__", type(function).__name__)
        self._initial: dict[str, Scalar] = {}
        self._announced: bool | None = None
        self._body: _Body | None = None
        self._finalizer: Callable[[], object] = _nothing
        self._entered: _Pause | None = None
        self._attached: dict[str, Any] = {}
        # Its roots refer to nothing of this object, whose end is to end the function's thread.
        roots = {self._name: function}, self._attached
        self._world = World(stateless_of(function), lambda: [item for some in roots for item in some.items()])

    def setup(self, hp: Mapping[str, Scalar]) -> None:
        """Forget the run so far; the function begins when it is needed, since a state may be loaded first."""
        self._end()
        self._initial = dict(hp)

    def announce(self, report: bool) -> None:
        self._announced = report

    def train(self, step: int, hp: Mapping[str, Scalar]) -> None:
        body = self._begun()
        run = body.run
        if body.ended:
            raise TrainingError(f"{self._name} has ended; there is no step {step} to train")
        run._step = step
        run.hp = dict(hp)
        run._metrics = None
        run.wants_report = self._announced is not False
        for follower in run._followers:
            follower.apply(hp)
        rekey(seed_of(hp), step)
        body.go_on()
        if body.ended:
            raise TrainingError(
                f"{self._name} returned at step {step}, before run.steps() was over: leave its loop without "
                f"`break` and `return`. What ends trials early is the algorithm (ASHA, MedianStopping); where a trial "
                f"has seen enough, go on without training"
            )
        if self._announced and run._metrics is None:
            raise TrainingError(
                f"{self._name} gave no metrics at step {step}, where run.wants_report was True: call run.report(...)"
            )

    def evaluate(self) -> Mapping[str, float]:
        metrics = self._begun().run._metrics
        if metrics is None:
            raise TrainingError(
                f"the metrics of this state are not known: {self._name} was not asked for them when it was trained; "
                "report them before the loop too (if run.wants_report: run.report(...))"
            )
        return dict(metrics)

    def state_dict(self) -> object:
        body = self._begun()
        pause = body.pause(stateless_of(self.subject))
        return body.in_its_thread(lambda: self._captured(body.run, pause))

    def _captured(self, run: Run, pause: _Pause) -> object:
        for follower in run._followers:
            follower.check()
        entered = self._entered
        if entered is None or pause.places != entered.places:
            raise StateError(
                f"{self._name} waits for the next step at another place than for the first one, where every fork "
                f"begins: ask for the steps at one place, `for step in run.steps():`"
            )
        own = list(run._own())
        return {
            "parts": sorted(run._parts or ()),
            "captured": self._world.capture(pause.variables, but=lambda path: path.partition(".")[0] in own),
            "own": {name: (run._parts or {})[name].state_dict() for name in own},
            "samples": run._samples,
            "population": run._population,
            "metrics": run._metrics,
        }

    def load_state_dict(self, state: object) -> None:
        if not isinstance(state, dict) or state.keys() != _PARTS:
            raise StateError("this is no state of a training function")
        self._end()
        self._begin(state)

    def portrait(self) -> dict[str, str]:
        """All that training can reach, as texts: see :meth:`hpstage.capture.world.World.portrait`."""
        body = self._begun()
        matter = {variable.name for variable in body.pause(stateless_of(self.subject)).variables}
        # Functions last: what they close over is met by its own name, whether one is there yet or not.
        variables = sorted(body.variables(), key=lambda found: isinstance(found[1].get(), FunctionType))
        shown = [(LOCAL + name, value) for name, value in variables if name in matter]
        return body.in_its_thread(lambda: self._world.portrait(shown))

    def close(self) -> None:
        """End the function, if it runs: its ``finally`` blocks run, its thread ends. What it has changed outside of
        itself is put back."""
        self._end()
        self._world.close()

    def _end(self) -> None:
        if self._body is not None:
            self._body = self._entered = None
            self._finalizer()
            self._world.leave()

    def _begun(self) -> _Body:
        return self._body or self._begin(None)

    def _begin(self, state: Mapping[str, Any] | None) -> _Body:
        """Run the function up to its first step."""
        before = libraries()
        body = self._run_to_loop(state)
        if libraries() != before:
            # It has imported torch or NumPy: what it made with them came from unkeyed generators.
            self._end()
            body = self._run_to_loop(state)
        return body

    def _run_to_loop(self, state: Mapping[str, Any] | None) -> _Body:
        self._attached.clear()
        self._world.reset()
        self._body = body = _Body(self.subject, Run(self._initial, state, self._attached, self._world))
        # Also when this object is dropped: a paused thread would stay for ever.
        self._finalizer = weakref.finalize(self, body.close)
        rekey(seed_of(self._initial), 0, Purpose.SETUP)
        try:
            body.go_on()
        except BaseException:
            self._end()
            raise
        if body.ended:
            self._end()
            raise UsageError(f"{self._name} returned without a step: it must loop over run.steps()")
        self._entered = entered = body.pause(stateless_of(self.subject))
        try:
            body.in_its_thread(lambda: self._world.enter(entered.variables))
        except BaseException:
            self._end()
            raise
        return body


_PARTS = {"parts", "captured", "own", "samples", "population", "metrics"}


def _locals(frame: FrameType) -> dict[str, Any]:
    """A frame's variables and what they hold."""
    variables: Any = frame.f_locals
    held = dict(variables)
    if type(variables) is dict and frame.f_code.co_flags & inspect.CO_OPTIMIZED:
        variables.clear()  # before 3.13 a copy, which would keep the batch and the loss of this step
    return held


def _nothing() -> None:
    """Nothing is to be closed."""
