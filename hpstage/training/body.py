"""Body: runs a training function in a separate thread, paused between steps; its local variables while paused."""

from __future__ import annotations

import contextvars
import ctypes
import gc
import inspect
import sys
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from dis import Instruction
from functools import partial
from types import CodeType, FrameType, GeneratorType
from typing import Any, TypeVar

from hpstage.errors import StateError
from hpstage.training.capture import liveness
from hpstage.training.capture.context_managers import letting_through, swallowing
from hpstage.training.capture.kind import same_value
from hpstage.training.capture.measured import OnRequest, on_request
from hpstage.training.capture.stateful import ITERATORS
from hpstage.training.capture.stateless import LOCAL, excluding, to_exclude
from hpstage.training.capture.variables import Variable
from hpstage.training.code.namespaces import MISSING, Slot
from hpstage.training.code.owner import of_user
from hpstage.training.handover import Abandoned
from hpstage.training.identity import threads
from hpstage.training.identity.settings import read_all, write_all
from hpstage.training.run import Run, Steps

_T = TypeVar("_T")

_AT_OTHER_STEPS = "Reports are requested at other steps if trials share their training than in a trial alone"
THREAD = "hpstage-function"
"""The name of the thread of a training function."""

_IN_A_THREAD = (
    "A training function runs in a thread of its own, not in the main thread. Create objects that belong to one thread "
    "in the function (an event loop by asyncio.run()), or let all threads use them (sqlite3.connect(..., "
    "check_same_thread=False)). Set up what needs the main thread, such as signal handlers, before the search."
)


@dataclass(frozen=True, slots=True)
class Pause:
    """Code and instruction offset where each function is paused, and the variables that may matter there."""

    places: tuple[tuple[CodeType, int], ...]
    variables: tuple[Variable, ...]


class Body:
    """One call of the training function. It must not refer to its FunctionTrainable, whose deletion ends the call."""

    def __init__(self, function: Callable[[Run], object], run: Run) -> None:
        self.run = run
        self.ended = False
        self._function = function
        self._forked = run._state is not None
        self._unset: Mapping[str, str] = {}
        self._seen: dict[tuple[str, str], object] | None = {}
        self._error: BaseException | None = None
        self._around: list[tuple[str, object]] | None = None
        self._settings = read_all()  # some belong to a thread
        context = contextvars.copy_context()
        self._thread = threading.Thread(target=context.run, args=(self._main,), name=THREAD, daemon=True)
        self._thread.start()

    def _main(self) -> None:
        baton = self.run._baton
        try:
            threads.pin_thread()
            baton.wait()
            write_all(self._settings)
            self._function(self.run)
        except Abandoned:
            pass  # unwound on request
        except BaseException as error:
            if isinstance(error, UnboundLocalError) and self._forked:
                error.add_note(self._why_unset(str(error)))
            if "thread" in str(error):
                error.add_note(_IN_A_THREAD)
            # Drop our own frame, so that the traceback starts in the user's code.
            self._error = error.with_traceback(error.__traceback__ and error.__traceback__.tb_next)
        finally:
            self.ended = True
            baton.end()

    def _why_unset(self, message: str) -> str:
        for name, why in self._unset.items():
            if f"'{name}'" in message:
                return f"This is a fork, in which {name} has no value, since no state can hold its value: {why}"
        return (
            "This is a fork: local variables that no state can hold, such as tensors with a graph of gradients, have "
            "no value in it. Keep values for later steps as loss.detach() or loss.item()."
        )

    def resume(self) -> None:
        """Run the function to its next pause. Re-raise its exception."""
        self.run._baton.hand_over()
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def in_its_thread(self, errand: Callable[[], _T]) -> _T:
        """Call ``errand`` in the training function's thread, where its torch modes and context variables are active."""
        return errand() if self.ended else self.run._baton.send(errand)

    def variables(self) -> Iterator[tuple[str, Slot]]:
        """Yield the local variables of the user's functions while they are paused."""
        for frame in self._frames():
            variables = _locals(frame)
            for name, value in variables.items():
                if not isinstance(value, Run):
                    yield name, Slot(LOCAL + name, variables, name)

    def pause(self, passed_by: Collection[str]) -> Pause:
        """Return where the user's functions are paused, and their variables that may matter except ``passed_by``."""
        frames = list(self._frames())
        places = [(frame.f_code, liveness.place(frame.f_code, frame.f_lasti)) for frame in frames]
        variables = []
        settable = bool(frames) and all(
            liveness.keeps_only_variables(code, at, innermost=not index) for index, (code, at) in enumerate(places)
        )
        for index, (frame, (code, at)) in enumerate(zip(frames, places, strict=True)):
            held, innermost, outermost = _locals(frame), not index, index == len(frames) - 1
            runs = frozenset(name for name, value in held.items() if isinstance(value, Run))
            entered = liveness.never_empty(code, runs, counted="enumerate" not in frame.f_globals)
            matter = partial(liveness.live, code, at, innermost=innermost, outermost=outermost, entered=entered)
            bound = matter(untaken=swallowing(code))
            fresh = liveness.written_first(code, at, outermost=outermost, runs=runs) if innermost else frozenset()
            for name in sorted(matter(untaken=letting_through(frame, held)) | liveness.operands(code, at)):
                value = held.get(name, MISSING)
                if name not in passed_by and not isinstance(value, Run | Steps):
                    variables.append(Variable(name, code, value, name in bound, fresh, settable and innermost))
        if frames and self._around is None:
            self._around = _around_steps(frames[0], [*self._stack()])
        for name, one in self._around or ():
            if name not in passed_by:
                variables.append(Variable(name, frames[-1].f_code, one, needed=True))
        return Pause(tuple(places), tuple(variables))

    def refuse_measured(self, passed_by: Collection[str]) -> None:
        """Check that neither training nor later reports depend on what the function does only if a report is wanted.
        The variables ``passed_by`` are not checked.

        Raises:
            StateError: training or a later report depends on that.
        """
        for frame, found in self._on_request():
            name = frame.f_code.co_name
            if found.leaves:
                raise StateError(
                    f"{name} leaves its loop where run.wants_report is true. {_AT_OTHER_STEPS}, so the end of training "
                    f"must not depend on them: decide in every step, by a value that every step computes (the loss); "
                    f"to stop trials by their metrics, give hpstage.optimize an algorithm"
                )
            if assigned := found.assigned - set(passed_by):
                variable = min(assigned)
                raise StateError(
                    f"{name} assigns {variable} where run.wants_report is true, and reads it where it is not. "
                    f"{_AT_OTHER_STEPS}, so training must not depend on values measured for them: compute {variable} "
                    f"in every step; {excluding(LOCAL + variable)}"
                )
            if reported := found.reported - set(passed_by):
                variable = min(reported)
                raise StateError(
                    f"{name} reports {variable}, which also depends on earlier reports. {_AT_OTHER_STEPS}, so a metric "
                    f"must depend on the present state alone: report the value measured now (a trial's best value is "
                    f"among its intermediate values); if another value is no error, name it in `stateless`: "
                    f"{to_exclude(LOCAL + variable)}"
                )

    def see_reports(self, passed_by: Collection[str]) -> None:
        """Check that a step with a report has not changed a local variable that steps without a report read. Call this
        after each step.

        Raises:
            StateError: the step has changed such a variable.
        """
        if self._seen is None:
            return
        seen, now = self._seen, dict[tuple[str, str], object]()
        for frame, found in self._on_request():
            held = _locals(frame) if found.watched else {}
            for name, part in found.watched:
                whole = held.get(name, MISSING)
                if name in passed_by or any(whole is attached for attached in (self.run._parts or {}).values()):
                    continue
                now[name, part] = value = _shown(whole, part)
                before = seen.get((name, part), value)
                if self.run.wants_report and not same_value(before, value):
                    raise StateError(
                        f"{frame.f_code.co_name} has changed {name}{part} in a step where run.wants_report is true, "
                        f"and reads it where it is not. {_AT_OTHER_STEPS}, so training must not depend on values "
                        f"measured for them: change it in every step; {excluding(LOCAL + name)}"
                    )
        self._seen = now or None

    def _on_request(self) -> Iterator[tuple[FrameType, OnRequest]]:
        for frame in self._frames():
            runs = frozenset(name for name, value in _locals(frame).items() if isinstance(value, Run))
            yield frame, on_request(frame.f_code, liveness.place(frame.f_code, frame.f_lasti), runs)

    def write(self, values: dict[str, object], unset: Mapping[str, str]) -> None:
        """Set local variables of the innermost of the user's functions. Call it in their thread.

        ``unset``: the variables without a value, and why they have none.
        """
        self._unset = unset
        frame = next(self._frames())
        variables: Any = frame.f_locals
        variables.update(values)
        if type(variables) is dict:  # a copy, before 3.13
            ctypes.pythonapi.PyFrame_LocalsToFast(ctypes.py_object(frame), ctypes.c_int(0))
            variables.clear()

    def _frames(self) -> Iterator[FrameType]:
        """Yield the frames of the user's functions, innermost first."""
        for frame in self._stack():
            module = frame.f_globals.get("__name__")
            if of_user(module) or module == getattr(self._function, "__module__", None):
                yield frame

    def _stack(self) -> Iterator[FrameType]:
        if not self._thread.is_alive():
            return
        # Not sys._current_frames(): it looks at all threads, and a process with threads of JAX was once found waiting
        # in that line forever.
        own = threading.current_thread() is self._thread
        frame = sys._getframe() if own else self.run._baton.paused_in
        while frame is not None:
            yield frame
            frame = frame.f_back

    def close(self) -> None:
        """Unwind the function, which runs its ``finally`` blocks. Idempotent."""
        if self._thread.is_alive():
            self.run._baton.abandon(ended=self.ended)
            self._thread.join()
        # Attached objects may be large and on a device.
        self.run._parts = None
        self.run._followers.clear()


def _around_steps(frame: FrameType, stack: Sequence[FrameType]) -> list[tuple[str, object]]:
    """Return the iterators that a loop puts around its steps, as ``zip(run.steps(), ...)`` does, each after its name.
    They are not in variables, and iterators zipped with the steps advance with them."""
    instructions = liveness.all_instructions_of(frame.f_code)
    at = liveness.place(frame.f_code, frame.f_lasti)
    before = [item for item in instructions if item.offset <= at and item.opname not in ("PRECALL", "CACHE")]
    while before and before[-1].opname != "GET_ITER":
        before.pop()
    if len(before) > 2 and before[-3].argval in ("steps", "batches"):
        return []  # the usual case; the search below takes tens of milliseconds
    found: dict[int, object] = {}
    todo = _running(stack)
    while todo:
        # Since 3.13, the tuple of arguments is among the referrers.
        referring = [holder for holder in gc.get_referrers(*todo) if holder is not todo]
        holders = [holder for holder in referring if type(holder) in (*_LEADING_ON, *ITERATORS)]
        todo = tuple(holder for holder in holders if id(holder) not in found)
        found |= {id(holder): holder for holder in todo}
    uncounted = not _reads_count([item for item in instructions if item.offset > at], instructions)
    kinds = (*_LEADING_ON, enumerate) if uncounted else _LEADING_ON
    iterators = [one for one in found.values() if type(one) not in kinds]
    return [(type(one).__name__, one) for one in iterators]


def _running(stack: Sequence[FrameType]) -> tuple[object, ...]:
    """Return the iterators whose code is on the stack: the steps, and those that a library (tqdm) has put around them.
    The garbage collector does not see the objects that a running generator holds."""
    calls = [frame for frame in stack if frame.f_code.co_name == "__next__"]
    objects = (held for frame in calls for held in list(_locals(frame).values())[:1])  # arguments come first: self
    generators = {frame for frame in stack if frame.f_code.co_flags & inspect.CO_GENERATOR}
    made = (one for one in gc.get_objects() if type(one) is GeneratorType and one.gi_frame in generators)
    return *objects, *made


_LEADING_ON = tuple, GeneratorType


def _reads_count(following: Sequence[Instruction], instructions: Sequence[Instruction]) -> bool:
    """Return whether code reads the first of the variables into which a loop unpacks its items."""
    names = [item.argval for item in following[:2]]
    if len(names) < 2:
        return True  # no loop unpacks it
    name = names[1][0] if isinstance(names[1], tuple) else names[1]
    loads = [item.argval for item in instructions if item.opname.startswith("LOAD_")]
    return any(name == loaded or (isinstance(loaded, tuple) and name in loaded) for loaded in loads)


def _shown(whole: object, part: str) -> object:
    """Return a part of an object without calling any code; for a container, a copy, so that a change is detected."""
    found: object = whole
    if part.startswith("."):
        found = getattr(whole, "__dict__", {}).get(part[1:], MISSING)
    elif part and type(whole) is dict:
        found = next((value for key, value in whole.items() if f"[{key!r}]" == part), MISSING)
    if type(found) in (list, tuple, deque):
        return tuple(found)  # type: ignore[arg-type]
    if type(found) is dict:
        return tuple(found.items())
    own = getattr(found, "__dict__", None)
    return found if part or type(own) is not dict else tuple(own.items())


def _locals(frame: FrameType) -> dict[str, Any]:
    variables: Any = frame.f_locals
    held = dict(variables)
    if type(variables) is dict and frame.f_code.co_flags & inspect.CO_OPTIMIZED:
        variables.clear()  # before 3.13 this is a copy, which would keep this step's batch and loss alive
    return held
