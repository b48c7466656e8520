"""FunctionTrainable: trains a function with an ordinary loop, one step at a time.

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

The function runs in a separate thread with strict hand-over: either it runs or hpstage does, never both. It is paused
where it requests the next step from ``run.steps()`` (or ``run.batches(loader)``). To fork, hpstage calls the function
again, and restores the state at the beginning of the loop: the objects that ``run.attach`` was given, and local
variables. So the code before the loop does the same in every run. A state contains the local variables that may be read
before they are written again (:mod:`hpstage.training.capture.liveness`), with all that only they reach. If not only
variables decide how the function continues (within a loop over another iterator, or if the steps come from
``next``), these variables must have the values that they had when the loop began. A variable that no state can hold is
refused by name, no matter how late it changes. Variables that training does not depend on (a clock, a list of losses to
inspect) are listed in the function's attribute ``stateless``: ``train.stateless = ("losses",)``.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import FunctionType
from typing import Any

from hpstage.errors import StateError, StopTraining, TrainingError
from hpstage.schedule import Scalar
from hpstage.training.adapter import Adapter, checked_metrics, optimizers_in, stateless_of
from hpstage.training.body import Body, Pause
from hpstage.training.capture.refusals import Kinds, see_form
from hpstage.training.capture.stateless import LOCAL, stated_on
from hpstage.training.capture.unwatched import world_of
from hpstage.training.randomness import Purpose, has_torch, rekey, seed_of
from hpstage.training.run import Run


class FunctionTrainable(Adapter):
    """A training function as a Trainable.

    Before each step, :meth:`announce` may be called with whether the state after it will be evaluated or saved. A
    saved state includes its metrics, so that it can be evaluated later without another step. Without announcements,
    metrics are always requested.
    """

    in_a_thread = True
    """The function runs in a separate thread, which no fork of the process has."""

    def __init__(self, function: Callable[[Run], object]) -> None:
        self.subject: object = function
        self._function = function
        self._name = getattr(function, "__qualname__", type(function).__name__)
        self._initial: dict[str, Scalar] = {}
        self._announced: bool | None = None
        self._body: Body | None = None
        self._finalizer: Callable[[], object] = lambda: None
        self._entered: Pause | None = None
        self._unmeasured: Mapping[str, Any] | None = None  # the state just loaded, whose metrics are not known
        self._attached: dict[str, Any] = {}
        self._loaders: dict[str, Any] = {}  # kept from run to run
        # The roots must not refer to self, whose garbage collection ends the function's thread.
        roots = {self._name: function}, self._attached
        self._world = world_of(stateless_of(function), lambda: [item for some in roots for item in some.items()])

    def setup(self, hp: Mapping[str, Scalar]) -> None:
        """Discard the current run. The user's function is not called yet, since a state may be loaded before a step."""
        self._end()
        self._initial = dict(hp)

    def announce(self, report: bool) -> None:
        self._announced = report

    def train(self, step: int, hp: Mapping[str, Scalar]) -> None:
        body = self._begun()
        run = body.run
        self._unmeasured = None
        if body.ended:
            raise TrainingError(f"{self._name} has ended; there is no step {step} to train")
        run._step = step
        run.hp = dict(hp)
        run._metrics = run._unwanted = None
        run.wants_report = self._announced is not False
        for follower in run._followers:
            follower.apply(hp)
        rekey(seed_of(hp), step)
        body.resume()
        if body.ended:
            raise StopTraining(f"{self._name} has left its loop in step {step}")
        body.see_reports(stateless_of(self.subject))
        if self._announced and run._metrics is None:
            raise TrainingError(
                f"{self._name} gave no metrics at step {step}, where run.wants_report was True: call run.report(...)"
            )

    def evaluate(self) -> Mapping[str, float]:
        body = self._begun()
        if self._unmeasured is not None:
            body = self._measured(self._unmeasured)
        run = body.run
        if body.ended and run._metrics is None and run._unwanted is not None:
            run._metrics = checked_metrics(run._unwanted, "run.report()")
        metrics = run._metrics
        if metrics is None and body.ended:
            raise TrainingError(
                f"{self._name} ended its training in step {run._step} without metrics: call run.report(...) before "
                "it leaves the loop, even if run.wants_report is false"
            )
        if metrics is None:
            raise TrainingError(
                f"the metrics of this state are not known: {self._name} did not report them, since they were not "
                "requested then. Report them before the loop, too (if run.wants_report: run.report(...))"
            )
        return dict(metrics)

    def state_dict(self) -> object:
        body = self._begun()
        pause = body.pause(stateless_of(self.subject))
        return body.in_its_thread(lambda: self._captured(body, pause))

    def _captured(self, body: Body, pause: Pause) -> object:
        run, entered = body.run, self._entered
        for follower in run._followers:
            follower.check()
        for loader in self._loaders.values():
            loader.check()
        if body.ended:
            self._world.leave()  # nothing is trained from this state: local variables do not matter
        elif entered is None or pause.places != entered.places:
            raise StateError(
                f"{self._name} waits for the next step at another place than for the first step, where every fork "
                f"begins: loop over the steps at one place, `for step in run.steps():`"
            )
        own = list(run._own())
        stream = run._stream  # where the run begins, until it takes its first batch
        if stream is None and run._given is not None:
            stream = next((loader.position() for loader in self._loaders.values()), None)
        captured = self._world.capture(pause.variables, but=lambda path: path.partition(".")[0] in own)
        # Older versions of hpstage, which do not set local variables, refuse a state that has any.
        local = {"locals": captured.pop("locals")} if "locals" in captured else {}
        return {
            "parts": sorted(run._parts or ()),
            "captured": captured,
            "own": {name: (run._parts or {})[name].state_dict() for name in own},
            "samples": run._samples,
            "population": run._population,
            "metrics": run._metrics,
            **({} if stream is None else {"stream": stream}),
            **local,
        }

    def load_state_dict(self, state: object) -> None:
        if not isinstance(state, dict) or state.keys() - {"stream", "locals"} != _PARTS:
            raise StateError("this is not a state of a training function")
        see_form(state, _FORM)
        own, parts = [*state["own"]], state["parts"]
        if any(type(name) is not str for name in parts) or any(name not in parts for name in own):
            raise StateError(
                f"the state contradicts itself: its parts are {parts}, but it has a state_dict() of each of {own}"
            )
        self._end()
        self._begin(state)
        self._unmeasured = state if state["metrics"] is None else None

    def _measured(self, state: Mapping[str, Any]) -> Body:
        """Restart from a state. Its metrics are those that the code before the loop reports."""
        self._end()
        try:
            metrics = self._run_to_loop(state, measured=True).run._metrics
        finally:
            self._end()
        body = self._begin(state)
        body.run._metrics = metrics
        return body

    def hand_over(self) -> dict[str, object]:
        self._begun()
        parts = dict(self._attached)
        shared = [name for name, part in parts.items() if self._world.pristine and part in self._world.pristine]
        memo: dict[int, object] = {}
        parts |= {name: copy.deepcopy(parts[name], memo) for name in shared}  # they are the user's: close restores them
        self.close()
        return parts

    def portrait(self) -> dict[str, str]:
        """Describe everything training can reach; see :meth:`hpstage.training.capture.world.World.portrait`."""
        body = self._begun()
        matter = {variable.name for variable in body.pause(stateless_of(self.subject)).variables}
        # Functions last, so that a variable they close over is first visited under its own name, even if unbound yet.
        variables = sorted(body.variables(), key=lambda found: isinstance(found[1].get(), FunctionType))
        shown = [(LOCAL + name, value) for name, value in variables if name in matter]
        return body.in_its_thread(lambda: self._world.portrait(shown))

    def close(self) -> None:
        """End the function if it is running: its ``finally`` blocks run and its thread ends. Undo its changes to
        anything outside itself."""
        self._end()
        for loader in self._loaders.values():
            loader.close()
        self._loaders.clear()
        self._world.close()

    def _end(self) -> None:
        if self._body is not None:
            self._body = self._entered = self._unmeasured = None
            self._finalizer()
            self._world.leave()

    def optimizers(self) -> list[Any]:
        return optimizers_in(self._attached.values())

    def prepare(self) -> None:
        self._begun()

    def _begun(self) -> Body:
        return self._body or self._begin(None)

    def _begin(self, state: Mapping[str, Any] | None) -> Body:
        before = has_torch()
        body = self._run_to_loop(state)
        if has_torch() != before:
            # The function has imported torch, and may have used its generators before they were keyed.
            self._end()
            body = self._run_to_loop(state)
        return body

    def _run_to_loop(self, state: Mapping[str, Any] | None, *, measured: bool = False) -> Body:
        """Run the function up to its loop. If ``measured`` is set, ``run.attach()`` restores the state to measure
        it."""
        self._attached.clear()
        with stated_on(self.subject):  # which its thread inherits
            self._world.reset()
            self._body = body = Body(
                self._function,
                Run(self._initial, state, self._attached, self._world, partial(_batches, self._loaders), measured),
            )
        # Also called when this object is garbage-collected: otherwise a paused thread would stay forever.
        self._finalizer = weakref.finalize(self, body.close)
        rekey(seed_of(self._initial), 0, Purpose.SETUP)
        try:
            body.resume()
        except BaseException:
            self._end()
            raise
        if body.ended:
            self._end()
            raise TrainingError(
                f"{self._name} returned before its first step: loop over run.steps(), or raise optuna.TrialPruned() "
                "to skip the trial"
            )
        self._entered = entered = body.pause(stateless_of(self.subject))
        try:
            if not measured:
                body.in_its_thread(lambda: self._entering(body, entered))
        except BaseException:
            self._end()
            raise
        return body

    def _entering(self, body: Body, entered: Pause) -> None:
        body.refuse_measured(stateless_of(self.subject))
        body.see_reports(stateless_of(self.subject))
        self._world.enter(entered.variables)
        body.run._restore(body.write)


_PARTS = {"parts", "captured", "own", "samples", "population", "metrics"}
_FORM: dict[str, Kinds] = {
    "parts": (list,),
    "captured": (dict,),
    "own": (dict,),
    "samples": (int,),
    "population": (int, type(None)),
    "metrics": (dict, type(None)),
}


def _batches(loaders: dict[str, Any], run: Run, data: Any, batch_size: int | None, num_workers: int) -> Iterator[Any]:
    from hpstage.torch.loading.in_functions import batches_of

    return batches_of(loaders, run, data, batch_size, num_workers)
