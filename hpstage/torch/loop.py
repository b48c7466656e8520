"""TorchLoop: trains a TorchTrainable through the Trainable port, exactly forkable at every step."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch.utils import _pytree as pytree

from hpstage.checkpoints.state_tree import clone
from hpstage.errors import StateError, UsageError
from hpstage.schedule import Scalar
from hpstage.torch import environment
from hpstage.torch.backends.backend import StepBackend
from hpstage.torch.backends.lookup import AUTO, backend_named, choices, usable, usable_backend
from hpstage.torch.backends.meaning import Meaning, Reached
from hpstage.torch.backends.measuring import measure
from hpstage.torch.backends.obstacles import names_gradients, read_in_training
from hpstage.torch.contents import DRAWS, Contents, undone_in
from hpstage.torch.data import Batches
from hpstage.torch.evaluation import evaluating
from hpstage.torch.follow import Follower
from hpstage.torch.frozen import frozen_tensors, share, sharing_with, tensors_of
from hpstage.torch.horizon import Horizon
from hpstage.torch.loading.mixture import seed_in
from hpstage.torch.loading.streams import StreamBatches
from hpstage.torch.losses import Losses
from hpstage.torch.trainable import TorchTrainable
from hpstage.torch.trial_data import TrialData, set_hp
from hpstage.training.adapter import Adapter, checked_metrics, is_subjects, stateless_of
from hpstage.training.borrowed import Borrowed
from hpstage.training.capture.refusals import cannot_be_read, see_form
from hpstage.training.capture.unwatched import world_of
from hpstage.training.identity import accelerators
from hpstage.training.randomness import Purpose, rekey, seed_of


class _Built:
    """Model and optimizer, created by the user's code under the values at step 0."""

    def __init__(self, subject: TorchTrainable, device: torch.device) -> None:
        hp = subject.hp
        self.hp = dict(hp)
        name = type(subject).__name__
        model = subject.model(hp)
        if not isinstance(model, torch.nn.Module):
            raise UsageError(f"{name}.model() returned {type(model).__name__}; it must return a torch.nn.Module")
        self.model = model.to(device)
        optimizer = subject.optimizer(self.model, hp)
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise UsageError(
                f"{name}.optimizer() returned {type(optimizer).__name__}; it must return a torch Optimizer"
            )
        self.optimizer = optimizer
        default = type(subject).group_values is TorchTrainable.group_values
        self.follower = Follower(optimizer, hp, None if default else subject.group_values)
        self.kind = f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"


class TorchLoop(Adapter):
    """The training loop of a TorchTrainable. A process has one such loop, since torch's generators are global.

    A state contains everything that training has changed (:mod:`hpstage.training.capture.world`), the number of samples
    consumed, and the last hyperparameters. Randomness is a function of (seed, step), the order of data a function of
    (seed, position).
    """

    subject: TorchTrainable

    def __init__(self, subject: TorchTrainable) -> None:
        if subject.step_unit not in ("batch", "epoch"):
            raise UsageError(f"step_unit is {subject.step_unit!r}; it must be 'batch' or 'epoch'")
        kind = type(subject)
        if (kind.loss, kind.update) == (TorchTrainable.loss, TorchTrainable.update):
            raise UsageError(f"{kind.__name__} has neither loss(model, batch) nor an update() of its own: add one")
        self.subject = subject
        self._user = subject
        self._borrowed = Borrowed(subject, self)
        self.device = environment.default_device() if subject.device is None else torch.device(subject.device)
        self._by_epoch = subject.step_unit == "epoch"
        self._numerics: str = subject.numerics
        self._backend: StepBackend | None = None
        self._initial: dict[str, Scalar] = {}
        self._pending = True  # set up, but not built yet: a state may be loaded into an existing model
        self._built: _Built | None = None
        self.data = TrialData(subject, self.device)
        self._samples = 0
        self._losses = Losses(subject)
        self._more_follow = False
        self._meaning = Meaning(type(subject).__name__)
        self._hp: dict[str, Scalar] = {}
        self._seed = 0
        self._batch_size = 0
        self._world = world_of({"self.hp", *stateless_of(subject)}, self._roots)
        # A user who defines extra_state is responsible for attributes that cannot be captured.
        self._answered = type(subject).extra_state is not TorchTrainable.extra_state
        self._gradients_count = type(subject).update is not TorchTrainable.update or names_gradients(type(subject))

    def setup(self, hp: Mapping[str, Scalar]) -> None:
        """Start again at step 0. The model is built when needed, since a state may first be loaded into the old one."""
        self._initial = dict(hp)
        self._pending = True

    def train(self, step: int, hp: Mapping[str, Scalar]) -> None:
        more_follow, self._more_follow = self._more_follow, False
        self._train_on(self._begin_step(self._ready(), step, hp), step, more_follow=more_follow)

    def _begin_step(self, built: _Built, step: int, hp: Mapping[str, Scalar]) -> Iterator[tuple[Any, int]]:
        """Apply the hyperparameters of a step and seed the generators. Return the step's batches, each with the number
        of samples consumed up to its end."""
        if hp != self._hp:
            self._apply_hp(hp)
        built.follower.apply(self._hp)
        batches = self._data()
        rekey(self._seed, step)
        return batches.of_step(self._seed, self._samples, self._batch_size, by_epoch=self._by_epoch)

    def _train_on(self, batches: Iterable[tuple[Any, int]], step: int, *, more_follow: bool = False) -> None:
        """Train on batches, each with the number of samples consumed up to its end. ``more_follow``: the last loss is
        left for the next step to read."""
        built, backend = self._ready(), self._steps_by()
        batches = iter(batches)
        while True:
            try:
                taken = next(batches, None)
            except Exception:
                self._losses.read(step)  # training may have diverged before
                raise
            if taken is not None or not more_follow:
                self._losses.read(step)  # of the batch before
            if taken is None:
                break
            batch, self._samples = taken
            if backend.departs and self._meaning.is_due(self._hp, batch):
                train = partial(backend.train, built.model, built.optimizer)
                self._meaning.compare(self, backend, self._hp, batch, train, self._numerics)
            self._losses.add(backend.train(built.model, built.optimizer, batch), step)
        self._see_values("update() or loss()")

    def expect(self, more: bool) -> None:
        """Announce whether another step immediately follows the coming one. If so, on a GPU, the last loss of the
        coming step is read in the step after it, so that no step has to wait for its own loss."""
        self._more_follow = more and self.device.type != "cpu"

    def settle(self, step: int) -> None:
        """Read the loss that :meth:`expect` left to step ``step``, if that step does not follow after all.

        Raises:
            NonFiniteLoss: training has diverged.
        """
        self._losses.read(step)

    def evaluate(self) -> Mapping[str, float]:
        built = self._ready()
        self._give_values()
        name = type(self._user).__name__
        rekey(0, 0, Purpose.EVALUATE)
        with (
            self._world.kept(f"{name}.evaluate()", warn=not self._user._evaluates_by_library),
            evaluating(built.model, self.device),
        ):
            metrics = self._user.evaluate(built.model)
        self._see_values("evaluate()")
        return checked_metrics(metrics, f"{name}.evaluate()")

    def state_dict(self) -> object:
        """Return the state; its tensors are not copies. Raise :class:`StateError` if it cannot be captured."""
        built = self._ready()
        built.follower.check()
        self._data().check()
        stream = self._data().position()
        backend = self._steps_by().state()
        self._drop_gradients(built)
        captured = self._world.capture(but=self._answers_for)
        values = captured.pop("values")
        return {
            "model": {name.removeprefix(_MODEL): value for name, value in values.items() if name.startswith(_MODEL)},
            "values": {name: value for name, value in values.items() if not name.startswith(_MODEL)},
            **captured,
            "optimizer_class": built.kind,
            "samples": self._samples,
            "hp": dict(self._hp),
            "extra": self._user.extra_state(),
            **({} if stream is None else {"stream": stream}),
            **({} if backend is None else {"backend": backend}),
        }

    def load_state_dict(self, state: object) -> None:
        """Load a state into the existing model if it was built under the same values at step 0, else into a new one.

        Raises:
            StateError: the state belongs to another model or optimizer.
        """
        built, self._built = self._built, None  # if loading fails halfway, it must not be used again
        self._losses.forget()
        if built is None or built.hp != self._initial:
            built = None
            self._build()
            built, self._built = self._built, None
        assert built is not None
        if not isinstance(state, dict) or state.keys() - {"stream", "backend"} != _PARTS:
            raise StateError("this is not a state of a TorchTrainable")
        if state["optimizer_class"] != built.kind:
            raise StateError(
                f"the state was trained with {state['optimizer_class']}, but optimizer() returns {built.kind}. Use the "
                "optimizer of the state"
            )
        see_form(state, _FORM)
        values = {f"{_MODEL}{name}": value for name, value in state["model"].items()} | state["values"]
        self._built = built
        try:
            self._apply_hp(state["hp"])
            self._user.load_extra_state(clone(state["extra"]))
            self._world.load({**state, "values": values})
        except BaseException:
            self._built = None
            raise
        built.follower.forget()
        self._pending = False
        self._samples = state["samples"]
        with cannot_be_read("the state was trained with other numerics"):
            self._steps_by().load(state.get("backend"))
        self._data().go_to(state.get("stream"))
        self._data().settle()

    @property
    def beside_eager(self) -> str:
        """A sentence on how the first steps compared with eager steps; empty if the steps are eager."""
        backend = self._steps_by()
        return self._meaning.summary(backend.numerics, departs=backend.departs) if self._numerics != "eager" else ""

    @property
    def horizon(self) -> Horizon | None:
        """The end of training that a library's trainer states; ``None`` before it is built."""
        return self._user._horizon if self._built is not None else None

    def in_use(self) -> tuple[object, ...]:
        return self._user, self._built, self.data

    def optimizers(self) -> list[Any]:
        return [self._built.optimizer] if self._built is not None else []

    def portrait(self) -> dict[str, str]:
        """Describe everything training can reach; see :meth:`hpstage.training.capture.world.World.portrait`."""
        self._drop_gradients(self._ready())
        return self._world.portrait()

    def snapshot(self) -> object:
        """Return copies of all that training has changed, for :meth:`put_back`."""
        self._drop_gradients(self._ready())
        return clone((self._world.capture(but=self._answers_for), self._user.extra_state()))

    def put_back(self, snapshot: Any) -> None:
        """Restore everything that training can reach from a :meth:`snapshot`, within a step."""
        captured, extra = snapshot
        self._give_values()
        self._user.load_extra_state(clone(extra))
        self._world.load(captured)
        self._ready().follower.forget()

    def contents(self) -> Reached:
        """Return all objects that training can reach, except the data set, by path: tensors and arrays themselves, and
        descriptions of all others. Paths of the optimizer's state contain the name of the parameter."""
        built = self._ready()
        self._drop_gradients(built)
        optimizer = built.optimizer
        found = self._world.contents(but=("dataset", "optimizer", "torch"))
        names = {id(parameter): f"model.{name}" for name, parameter in built.model.named_parameters()}
        for parameter, kept in optimizer.state.items():
            of = names.get(id(parameter), "another parameter")
            for path, value in pytree.tree_leaves_with_path(kept):
                number = isinstance(value, int | float)
                found[f"optimizer's {pytree.keystr(path)} of {of}"] = torch.tensor(value) if number else value
        return found

    def update(self, batch: Any, hp: Mapping[str, Scalar] | None = None) -> Any:
        """Train on a batch with the user's ``update()``. ``hp``: hyperparameters that replace the present ones."""
        built = self._ready()
        set_hp(self._user, dict(self._hp if hp is None else hp))
        try:
            return self._user.update(built.model, built.optimizer, batch)
        finally:
            self._give_values()

    def hand_over(self) -> dict[str, object]:
        built, self._built = self._ready(), None
        self._give_values()
        self._pending = True
        self.data.close()
        self._world.close(but=is_subjects)
        self._borrowed.hand_over()
        return {"model": built.model, "optimizer": built.optimizer, "trainable": self._user}

    def close(self) -> None:
        """Discard model and optimizer, and restore the user's object and all objects that it shares with others, as in
        a new process."""
        self._built = None
        self._pending = True
        self.data.close()
        self._world.close()
        self._borrowed.give_back()

    def synchronize(self) -> None:
        """Wait until the device has finished its work, before time is measured."""
        accelerators.synchronize(self.device)

    def describe_data(self) -> str:
        """Return the data's part of the workload's key: the stated version, else the text of :meth:`see_data`."""
        stated = self._user.data_version
        return self.see_data().text if stated is None else f"version {stated}, {DRAWS}"

    def see_data(self) -> Contents:
        """Return the identity of the data: of the data set and of attributes that ``dataset()`` has set."""
        with self._borrowed.taken():
            self._given_data()
            return self.data.contents(undone_in(self._world, self._user))

    def describe_environment(self) -> dict[str, str]:
        """Describe what decides the bits of training here (see :func:`hpstage.torch.environment.describe`)."""
        environment.see_devices(type(self._user).__name__, self._user.devices_per_stage)
        environment.warm_up()
        self._make_deterministic()
        auto = self._numerics == AUTO
        backend = usable_backend("eager" if auto else self._numerics, self.device)
        return {
            **environment.describe(self.device),
            "numerics": AUTO if auto else backend.numerics,
            **backend.describe(),
            **(choices(self.device) if auto else {}),
            "deterministic": "yes" if self.device.type == "cpu" or self._user.deterministic else "no",
            "step": self._user.step_unit,
            **{
                "numerics read" if name == "numerics" else name: repr(getattr(self._user, name))
                for name in read_in_training(type(self._user))
            },
        }

    def train_by(self, numerics: str) -> bool:
        """Select the step backend of this name, for a trainable that leaves the choice to the search. Return whether it
        was selected before; otherwise, training starts again.

        Raises:
            UsageError: there is no such backend, or it cannot run here.
        """
        if numerics == self._numerics:
            return True
        self._numerics, self._backend, self._pending = numerics, None, True
        self._steps_by()
        return False

    def seconds(self) -> float:
        """Return the time in seconds by which backends are compared; see :meth:`hpstage.trainable.Bundling.seconds`."""
        self.synchronize()
        # If one thread does all the work, take its CPU time: on a busy machine, it waits for other processes.
        alone = self.device.type == "cpu" and torch.get_num_threads() == 1 and not self._user.num_workers
        return time.thread_time() if alone else time.perf_counter()

    def measure_backends(self, initial: Mapping[str, Scalar], steps: float) -> dict[str, float]:
        """Return the seconds per step with each backend, as :meth:`hpstage.executor.Executor.measure` does. Afterwards,
        no backend is selected."""
        try:
            names = [name for name in usable(self.device) if not backend_named(name).several]
            return measure(self, names, initial, steps)
        finally:
            self.train_by(AUTO)

    def _steps_by(self) -> StepBackend:
        if self._backend is None:
            # If no backend was measured and selected (a check, the user's own process), train eagerly.
            name = "eager" if self._numerics == AUTO else self._numerics
            self._backend = usable_backend(name, self.device)(self._user, self.device)
        return self._backend

    def _make_deterministic(self) -> None:
        if self.device.type != "cpu" and self._user.deterministic:
            environment.use_deterministic_algorithms()

    def prepare(self) -> None:
        self._ready()

    def _ready(self) -> _Built:
        if self._pending:
            self._build()
        assert self._built is not None, "a failed load_state_dict is followed by setup"
        return self._built

    def _build(self) -> None:
        """Build a new model and optimizer, at step 0."""
        self._make_deterministic()
        if self.device.type == "cuda":
            torch.cuda.init()  # type: ignore[no-untyped-call]  # so that its generators can be keyed
        self._built = None  # frees the memory of the previous one first
        self.data.end_trial()
        self._losses.forget()
        backend = self._steps_by()
        backend.release()
        environment.give_memory_back(self.device)
        self._borrowed.take()
        self._given_data()  # first, since attributes that dataset() sets on the object belong to no trial
        self._world.reset()
        self._hp = self._initial
        self._give_values()
        rekey(seed_of(self._initial), 0, Purpose.SETUP)
        pristine = self._world.pristine
        assert pristine is not None
        named = [tensors_of(model) for model in self._other_models()]
        with sharing_with((one for model in named for one in model.values()), lambda tensor: tensor not in pristine):
            self._built = _Built(self._user, self.device)
        self._see_values("model() or optimizer()")
        # Frozen tensors share memory with their copies, and with equal models.
        for name, tensor in frozen_tensors(self._built.model, self._built.optimizer):
            tensors = [tensor, *(other[name] for other in named if name in other)]
            if not any(one in pristine for one in tensors):  # if model() has made all of them
                share(*tensors)
        self._world.begin()
        self._apply_hp(self._initial)
        self._samples = 0
        backend.begin(self._initial)
        self._data().go_to(None)
        self._data().settle()
        self._pending = False

    def _other_models(self) -> Sequence[torch.nn.Module]:
        """Return the models in this process with which a new model may share memory."""
        return ()

    def _drop_gradients(self, built: _Built) -> None:
        """Drop the gradients of the last step if nothing reads them: the default update zeroes gradients before it
        computes new ones."""
        if self._gradients_count or type(built.optimizer).zero_grad is not torch.optim.Optimizer.zero_grad:
            return
        for group in built.optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None

    def _roots(self) -> Iterator[tuple[str, object]]:
        if self._built is not None:
            yield "model", self._built.model
            yield "optimizer", self._built.optimizer
        yield "self", self._user
        if (dataset := self.data.dataset) is not None:
            yield "dataset", dataset
            yield "collate_fn", self.data.collate

    def _answers_for(self, path: str) -> bool:
        return self._answered and path.partition(".")[0] == "self"

    def _apply_hp(self, hp: Mapping[str, Scalar]) -> None:
        self._hp = dict(hp)
        self._give_values()
        size = hp["batch_size"] if "batch_size" in hp else getattr(self._user, "batch_size", None)
        batches = self._data()
        self._seed = seed_in(getattr(batches, "dataset", None), hp)
        if size is None:
            size = batches.batch_size
        if type(size) is not int or size < 1:
            raise UsageError(
                f"{type(self._user).__name__}: the batch size is {size!r}; it must be a whole number of at least 1. "
                "Give a hyperparameter 'batch_size', or an attribute batch_size"
            )
        batches.see_size(size)
        self._batch_size = size

    def _data(self) -> Batches | StreamBatches:
        self._given_data()
        return self.data.of_trial(self._built)

    def _given_data(self) -> Batches | StreamBatches:
        return self.data.given()

    def _give_values(self) -> None:
        set_hp(self._user, dict(self._hp))

    def _see_values(self, who: str) -> None:
        """Refuse changes of ``self.hp`` by the user's code: they would be lost at the next step, or in a fork."""
        if self._user.hp != self._hp:
            raise UsageError(
                f"{type(self._user).__name__}.{who} has changed self.hp from {self._hp} to {dict(self._user.hp)}, but "
                f"only schedules may change hyperparameters. Work on a copy, dict(hp), read a hyperparameter that may "
                f'be absent with hp.get("name", default), and put computed values into another attribute'
            )


_MODEL = "model."
_PARTS = {"model", "values", "changed", "memory", "optimizer_class", "samples", "hp", "extra"}
_FORM = {"model": (dict,), "values": (dict,), "samples": (int,), "hp": (dict,)}
