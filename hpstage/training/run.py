"""Run: the ``run`` argument that a training function gets, with ``run.steps()``, ``run.report()`` and others."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NoReturn

from hpstage.checkpoints.state_tree import clone
from hpstage.errors import StateError, StopTraining, UsageError
from hpstage.schedule import Scalar
from hpstage.training.adapter import checked_metrics
from hpstage.training.capture.world import World
from hpstage.training.handover import Baton
from hpstage.training.randomness import seed_of
from hpstage.training.sample_order import Indices, SampleOrder
from hpstage.training.step_log import log

if TYPE_CHECKING:
    from hpstage.torch.follow import Follower


class Run:
    """The argument of a training function.

    ``hp`` maps every hyperparameter to its value at the current step (before the loop: at step 0); ``step`` is that
    step, counted from 0.
    ``wants_report`` is whether the state after this step will be evaluated or kept; only then is :meth:`report`
    needed.
    """

    def __init__(
        self,
        hp: Mapping[str, Scalar],
        state: Mapping[str, Any] | None,
        attached: dict[str, Any],
        world: World,
        open_batches: Callable[[Run, Any, int | None, int], Iterator[Any]],
        measured: bool,
    ) -> None:
        self._initial = hp
        self._open_batches = open_batches
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
        self._given: Any = None  # to batches()
        self._stream: dict[str, Any] | None = None if state is None else state.get("stream")
        self._metrics: dict[str, float] | None = None
        self._unwanted: dict[str, Any] | None = None  # a report that was not requested
        self.wants_report = True
        self._baton = Baton()
        self._measured = measured
        self._names = frozenset(vars(self))

    if not TYPE_CHECKING:  # type checkers know only the attributes that are written here

        def __getattr__(self, name: str) -> NoReturn:
            what = f"{type(self).__name__!r} object has no attribute {name!r}"
            if name.startswith("suggest_"):
                what += (
                    ": a training function is given a run, not a trial; suggest in space(trial), and read run.hp['...']"
                )
            raise AttributeError(what, name=name, obj=self)

        def __setattr__(self, name: str, value: object) -> None:
            if "_names" in vars(self) and name not in self._names:
                raise UsageError(f"run.{name} = ...: attributes of a run are in no state; keep it in a variable")
            super().__setattr__(name, value)

    def attach(self, /, *unnamed: object, **parts: Any) -> None:
        """Attach the objects that training changes, each with ``state_dict`` and ``load_state_dict``.

        Call it once, before the loop. Where the loop begins, a fork restores the state: parameters, gradients, buffers,
        attributes, and everything reachable from them. So code before the loop does in a fork what it does in every
        run. Fields of a torch optimizer's param groups that are named like a hyperparameter
        (``lr``, ``momentum``, ``weight_decay``; ``beta1`` and ``beta2`` for ``betas``) follow its schedule from now on.
        """
        if unnamed:
            names = ", ".join(f"{type(part).__name__.lower()}=..." for part in unnamed)
            raise UsageError(f"run.attach() takes objects by name: run.attach({names}), under any names")
        if self._looping or self._parts is not None:
            raise UsageError("call run.attach(...) once, before the loop over run.steps()")
        for name, part in parts.items():
            if not (callable(getattr(part, "state_dict", None)) and callable(getattr(part, "load_state_dict", None))):
                raise UsageError(
                    f"run.attach({name}=...): {type(part).__name__} has no state_dict and load_state_dict; give it "
                    f"both, or make it an attribute of an attached object, with which it is captured"
                )
        torch: Any = sys.modules.get("torch")
        for part in parts.values():
            if torch is not None and isinstance(part, torch.optim.Optimizer):
                from hpstage.torch.follow import Follower

                self._followers.append(Follower(part, self.hp))
        self._parts = parts
        self._attached.update(parts)
        self._world.begin()
        kept = parts if self._state is None else self._state["parts"]
        if sorted(kept) != sorted(parts):
            raise StateError(
                f"the saved state has the parts {sorted(kept)}, but run.attach() was given {sorted(parts)}: give it "
                f"parts with the same names in each call"
            )
        if self._measured:
            self._restore()

    def _restore(self, write: Callable[[dict[str, object], Mapping[str, str]], None] | None = None) -> None:
        """Restore the state, if this is a fork; ``write`` sets local variables."""
        state, self._state = self._state, None
        if state is not None:
            for name, own in state["own"].items():
                (self._parts or {})[name].load_state_dict(clone(own))
            self._world.load(state["captured"], state.get("locals"), write)
            self._metrics = state["metrics"]

    def _own(self) -> Iterator[str]:
        """Yield the names of parts captured by their ``state_dict``: all but torch's, which are captured entirely."""
        torch: Any = sys.modules.get("torch")
        optim: Any = torch and torch.optim
        kinds = (torch.nn.Module, optim.Optimizer, optim.lr_scheduler.LRScheduler) if torch else ()
        yield from (name for name, part in (self._parts or {}).items() if not isinstance(part, kinds))

    def steps(self) -> Iterator[int]:
        """Return an iterator over the steps to train. It ends by unwinding the function: code after it is not run."""
        return Steps(self)

    @property
    def step(self) -> int:
        """The step that is being trained, counted from 0."""
        return self._step

    def batches(self, data: Any, *, batch_size: int | None = None, num_workers: int = 0) -> Iterator[Any]:
        """Return an iterator over batches of ``data``, a DataLoader or a map-style data set.

        It replaces both the loop over epochs and the loop over the DataLoader: each step trains one batch::

            for x, y in run.batches(loader): ...

        It is then looped over once, like :meth:`steps`. Within a loop over ``run.steps()``, it is an iterator over the
        batches of one epoch, so that each step trains an epoch::

            for epoch in run.steps():
                for x, y in run.batches(loader): ...

        It has the loader's ``dataset`` and ``batch_size``, and its length is that of the epoch: functions that take a
        loader, such as ``train_one_epoch(model, loader)``, accept it unchanged, and so does tqdm.

        The batch size is the hyperparameter ``batch_size`` if there is one, else the argument, else the DataLoader's.
        A DataLoader keeps its meaning (a short last batch or ``drop_last``, ``collate_fn``, ``num_workers``), except
        that its sampler is replaced by an order of the same kind that is a function of (seed, epoch). A data set is
        shuffled. Batches stay where they are loaded: move them to a device yourself.

        Args:
            data: the DataLoader or data set; the data set must be the same in all calls.
            batch_size: used unless there is a hyperparameter of that name.
            num_workers: number of processes that load a data set; a DataLoader has its own setting. It does not affect
                the bits: random numbers drawn while a sample is made are a function of (seed, position).

        Raises:
            UsageError: the data cannot be addressed by their position, or no batch size is known.
        """
        return self._open_batches(self, data, batch_size, num_workers)

    def report(self, *unnamed: object, **metrics: Any) -> None:
        """Record the metrics of the state after this step, as floats. If ``wants_report`` is false, they count only if
        this step is the last one (:meth:`stop`).

        Before the loop, these are the metrics of the state that the run begins with. Measuring them must not change
        the attached objects (``model.eval()`` before, ``model.train()`` after).
        """
        if unnamed:
            raise UsageError(
                "run.report() takes metrics by name, and no step: run.report(accuracy=0.9), or run.report(**metrics)"
            )
        if self.wants_report:
            self._metrics = checked_metrics(metrics, "run.report()")
        else:
            self._unwanted = metrics

    def log(self, name: str, value: Any) -> None:
        """Log a number, or a tensor of one element, in this step; see :func:`hpstage.log`."""
        log(name, value)

    def stop(self) -> NoReturn:
        """End training with this step: its trials are complete. Report metrics before, even if ``wants_report`` is
        false.

        Like leaving the loop, this must depend on a value that every step computes (a loss), not on values measured for
        reports: the algorithm decides when reports are wanted. (``optuna.TrialPruned`` ends trials as pruned.)
        """
        raise StopTraining(f"stopped in step {self._step}")

    def indices(self, population: int, batch_size: int) -> Indices:
        """Return indices of the next batch among ``population`` samples: int64, shape ``(batch_size,)``.

        The order is a function of the hyperparameter ``seed`` and the number of samples consumed so far. The state
        keeps that number, so that the batch size may change at any step.
        """
        if not self._looping:
            raise UsageError("run.indices() was called outside the loop over run.steps(); call it inside the loop")
        if batch_size < 1:
            raise UsageError(f"run.indices(): the batch size is {batch_size}; it must be at least 1")
        if self._order is None:
            self._order = SampleOrder(population)
        if population != (self._population or population):
            raise UsageError(f"run.indices() was first given {self._population} samples, and now {population}")
        self._population = population
        taken = self._order.take(seed_of(self.hp), self._samples, batch_size)
        self._samples += batch_size
        return taken


class Steps(Iterator[int]):
    """The steps of one run. They cannot be restarted, since they may be consumed along with other iterators
    (``zip(range(100), steps)``)."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._begun = False

    def __iter__(self) -> Iterator[int]:
        if self._begun:
            raise UsageError(
                "run.steps() was looped over twice, but forks begin at the start of the first loop; loop over "
                "run.steps() once, and let the step decide what to do"
            )
        return self

    def __next__(self) -> int:
        run = self._run
        if not self._begun:
            if run._looping:
                raise UsageError(
                    "the steps of a run are looped over twice, or by run.steps() as well as run.batches(): "
                    "for batch in run.batches(...) is itself a loop over steps, in which run.step is the step"
                )
            if run._parts is None:
                raise UsageError("call run.attach(...) with all that training changes before the loop over run.steps()")
            run._looping = self._begun = True
        run._baton.give_back()
        return run._step
