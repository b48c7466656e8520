"""The stack of a process: its slots, what they share, and how their steps are trained together."""

from __future__ import annotations

import logging
import math
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import Any

from hpstage.checkpoints.on_device import is_out_of_memory
from hpstage.errors import DeviceFull, NonFiniteLoss, UsageError
from hpstage.plan.facts import NO_FROZEN_WORK
from hpstage.schedule import Scalar
from hpstage.torch.backends.stacked import Builder, Bundle, Member, NeedsPython, NotStackable, shape_key
from hpstage.torch.backends.stacked.signature import copied
from hpstage.torch.backends.stacked.streams import generator_of
from hpstage.torch.backends.stacked.tracing import Trace
from hpstage.torch.backends.stacked_backend import StackedBackend
from hpstage.torch.loop import TorchLoop
from hpstage.torch.trainable import TorchTrainable
from hpstage.training.randomness import rekey
from hpstage.training.step_log import Noted, recording
from hpstage.training.warned import each_once

logger = logging.getLogger("hpstage")

_OWN = re.compile(r"(model|optimizer)(?![\w:])")  # "model:" is a user's module of that name


class Slot(TorchLoop):
    """Trains one chain, each step as :class:`~hpstage.torch.backends.stacked.stack.Stack` requests it.

    A slot has its own model and optimizer. While it is a member of a bundle, they are behind; they are brought up to
    date before anything else looks at them.
    """

    copies_batches = False
    """Whether to copy batches, since other slots take theirs before this slot is trained: the user's code may fill the
    same buffer for each batch."""

    def __init__(self, subject: TorchTrainable) -> None:
        super().__init__(subject)
        self.member: Member | None = None
        self.bundle: Bundle | None = None
        self.outcomes: list[Exception | None] = []  # of a step that is trained before it is requested
        self.noted = Noted()  # what that step has logged
        self.width = 1  # number of slots trained as one in its last step, itself included
        self.frozen_work = NO_FROZEN_WORK  # of that step
        self._behind = False
        self._step: Iterator[tuple[Any, int]] = iter(())
        self.step = 0
        self.stream = generator_of(self.device).get_state()

    @property
    def _stacks(self) -> bool:
        return self._steps_by().several

    def begin(self, step: int, hp: Mapping[str, Scalar]) -> None:
        """Begin a step: its batches are given by :meth:`batch`."""
        built = super()._ready()  # behind, if it is a member of a bundle
        self._give_values()
        self._step = self._begin_step(built, step, hp)
        self.stream = generator_of(self.device).get_state()
        self.step = step
        self.frozen_work = NO_FROZEN_WORK

    def batch(self) -> Any:
        """Return the step's next batch; raise StopIteration after the last."""
        batch, self._samples = next(self._step)
        return copied(batch) if self.copies_batches else batch

    @property
    def is_stacked(self) -> bool:
        """Whether the model is trained in one stack with others, if there are any."""
        return not self._stacking().as_it_is

    def train_as_it_is(self, *present: Any) -> Exception | None:
        """Train on the rest of a step's batches by ``update()``; return the error that ended training, if any.

        Args:
            present: the batch that was taken last, if it has not been trained on.
        """
        self.detach()
        self._give_values()
        rekey(self._seed, self.step)  # all generators, since a recorded step draws only from torch's
        generator_of(self.device).set_state(self.stream)
        self._stacking().as_it_is = True
        try:
            with recording(self.noted):
                self._train_on(chain([(batch, self._samples) for batch in present], self._step), self.step)
        except Exception as error:
            return error
        return None

    def enter(self, bundle: Bundle, trace: Trace | None = None) -> None:
        built = self._built
        assert built is not None
        self.member, self.bundle = bundle.join(built.model, built.optimizer, trace), bundle

    def detach(self) -> None:
        if self.bundle is not None and self.member is not None:
            self.bundle.leave(self.member)
        self.member = self.bundle = None
        self._behind = False

    def give_up(self) -> None:
        """Discard the model, which may be in the middle of a step."""
        self.member = self.bundle = self._built = None
        self._behind = False

    def stepped(self, loss: float | None) -> NonFiniteLoss | None:
        """Record that the model was trained on a batch; return the error that ends training, if any."""
        self._behind = True
        assert self.member is not None
        self.stream = self.member.stream
        if loss is not None and self._user.terminate_on_nan and not math.isfinite(loss):
            return NonFiniteLoss(f"the training loss is {loss} in step {self.step}")
        return None

    def _ready(self) -> Any:
        built = super()._ready()
        if self._behind and self.bundle is not None and self.member is not None:
            self.bundle.sync(self.member)
            self._behind = False
        self._give_values()
        return built

    def _stacking(self) -> StackedBackend:
        backend = self._steps_by()
        assert isinstance(backend, StackedBackend)
        return backend


class Stack:
    """The programs of steps, and the bundles of members, that the slots of a process share."""

    def __init__(self, subject: TorchTrainable, first: Slot) -> None:
        self.first = first
        self.slots: list[Slot] = []  # besides the first
        # extra_state() accounts for the object's state in one trial.
        answered = type(subject).extra_state is not TorchTrainable.extra_state
        if type(subject.max_stacked) is not int or subject.max_stacked < 1:
            raise UsageError(f"max_stacked is {subject.max_stacked!r}; it must be a whole number of at least 1")
        self.most = 1 if subject.num_workers or answered else subject.max_stacked
        self.settings: dict[str, Any] = {}  # of the process, as each was first seen
        self._subject = subject
        self.memory = DeviceMemory(type(subject).__name__)
        self.builder = Builder(subject, first.device, lambda who: put_back(who, self._tracing))
        self._bundles: dict[object, list[Bundle]] = {}  # by the shape of their batches
        self._tracing: tuple[Slot, ...] = ()
        self._warn = each_once()
        self.most_as_one: int | None = None
        """Maximum number of members that are stacked, as far as it pays; ``None``: as many as possible."""

    def train(self, due: Mapping[Slot, tuple[int, Mapping[str, Scalar]]]) -> None:
        """Train a step of several slots, and set the outcome of each."""
        with self.memory.tried([slot.outcomes for slot in due]):
            self._train(due)

    def _train(self, due: Mapping[Slot, tuple[int, Mapping[str, Scalar]]]) -> None:
        going: list[Slot] = []
        for slot, (step, hp) in due.items():
            try:
                slot.begin(step, hp)
            except Exception as error:
                slot.outcomes.append(error)
            else:
                if slot.is_stacked:
                    going.append(slot)
                else:
                    slot.outcomes.append(slot.train_as_it_is())
        while going:
            groups: dict[object, list[tuple[Slot, Any]]] = {}
            for slot in list(going):
                try:
                    batch = slot.batch()
                except Exception as error:
                    slot.outcomes.append(None if isinstance(error, StopIteration) else error)
                    going.remove(slot)
                else:
                    groups.setdefault(shape_key(batch), []).append((slot, batch))
            for shape, group in groups.items():
                batches = dict(group)
                for slot, outcome in self._step(shape, batches):
                    slot.outcomes.append(outcome)
                    going.remove(slot)

    def _step(self, shape: object, batches: Mapping[Slot, Any]) -> Iterator[tuple[Slot, Exception | None]]:
        """Train on one batch of each of these slots. Yield the slots whose step has ended, with the error if there is
        one."""
        for bundle in self._bundles.get(shape, ()):
            for slot in (self.first, *self.slots):
                if slot.bundle is bundle and slot not in batches:
                    slot.detach()
        bundles = self._bundles.setdefault(shape, [])
        for slot in batches:
            # A momentum or a decay that has become zero makes it a member of another kind.
            if slot.member is not None and (slot.bundle not in bundles or not slot.member.fits()):
                slot.detach()
            if slot.bundle is None and (refused := self._enter(slot, batches[slot], bundles)) is not None:
                yield slot, self._otherwise(slot, refused, batches[slot])
        bundles[:] = [bundle for bundle in bundles if bundle.members]
        for bundle in list(bundles):
            yield from self._run(bundle, [slot for slot in batches if slot.bundle is bundle], batches, bundles)

    def _otherwise(self, slot: Slot, error: Exception, batch: Any) -> Exception | None:
        """Train a slot without stacking if its step needs Python. Return the error that ended its step, if any."""
        if isinstance(error, NeedsPython):
            self._warn("%s is trained without stacking it: %s", type(self._subject).__name__, str(error))
            return slot.train_as_it_is(batch)
        if not isinstance(error, NotStackable):
            return error
        return UsageError(
            f"numerics = {slot._numerics!r} cannot train {type(self._subject).__name__}: {error}. Give numerics = "
            f"'eager', or 'compiled'"
        )

    def _enter(self, slot: Slot, batch: Any, bundles: list[Bundle]) -> NotStackable | None:
        """Add a slot to a bundle that takes the same step, or to a new one; return the reason if neither is
        possible."""
        trace = self._trace(slot, batch)
        fitting = [bundle for bundle in bundles if bundle.trace is trace and len(bundle.members) < self.memory.most]
        refused = None
        for bundle in (*fitting, Bundle(self.builder, trace)):
            try:
                slot.enter(bundle, trace)
            except NotStackable as error:
                refused = error  # it differs in kind from the members, or cannot be stacked at all
                continue
            if bundle not in fitting:
                bundles.append(bundle)
            return None
        return refused

    def _trace(self, slot: Slot, batch: Any) -> Trace | None:
        """Return the trace of a slot's step, if there is one."""
        self._tracing = (slot,)
        built = slot._ready()
        try:
            return self.builder.tracer.trace(built.model, built.optimizer, batch, slot._hp)
        except Exception:
            return None  # the step will raise it

    def _run(
        self, bundle: Bundle, slots: list[Slot], batches: Mapping[Slot, Any], bundles: list[Bundle]
    ) -> Iterator[tuple[Slot, Exception | None]]:
        for slot in list(slots):
            try:
                self._compare(slot, batches[slot])
            except Exception as error:
                slots.remove(slot)
                slot.detach()
                yield slot, error
        if not slots:
            return
        places = {id(member): place for place, member in enumerate(bundle.members)}
        slots.sort(key=lambda slot: places[id(slot.member)])
        for slot in slots:
            assert slot.member is not None
            slot.member.stream = slot.stream
        self._tracing = tuple(slots)
        try:
            losses = bundle.step([batches[slot] for slot in slots], [slot._hp for slot in slots], self.most_as_one)
        except Exception as error:
            if is_out_of_memory(error):
                bundle.give_up()
                for slot in slots:
                    slot.give_up()
                raise
            blamed = error.member if isinstance(error, NeedsPython) else None
            odd = slots[0] if len(slots) == 1 else next((slot for slot in slots if slot.member is blamed), None)
            if odd is not None:
                slots.remove(odd)
                odd.detach()
                yield odd, self._otherwise(odd, error, batches[odd])
                if slots:
                    yield from self._run(bundle, slots, batches, bundles)
                return
            for slot in slots:
                slot.detach()
            for group in self._by_step(slots, batches):
                bundles.append(other := Bundle(self.builder))
                for slot in group:
                    slot.enter(other)
                yield from self._run(other, group, batches, bundles)
            return
        for slot, width, work in zip(slots, bundle.widths, bundle.frozen_work, strict=True):
            slot.width = width
            slot.frozen_work += work
        for name, values in bundle.logged:
            for slot, value in zip(slots, values, strict=True):
                slot.noted.log(name, value)
        for slot, loss in zip(slots, [None] * len(slots) if losses is None else losses.tolist(), strict=True):
            if (ending := slot.stepped(loss)) is not None:
                yield slot, ending

    def _by_step(self, slots: list[Slot], batches: Mapping[Slot, Any]) -> list[list[Slot]]:
        """Divide slots that failed together into groups that take the same step. If all take the same step, each slot
        is returned by itself."""
        found: dict[Trace | Slot, list[Slot]] = {}
        for slot in slots:
            found.setdefault(self._trace(slot, batches[slot]) or slot, []).append(slot)
        return [*found.values()] if len(found) > 1 else [[slot] for slot in slots]

    def _compare(self, slot: Slot, batch: Any) -> None:
        """Compare a step with an eager one, if it is one of the first of its kind."""
        meaning = slot._meaning
        if meaning.is_due(slot._hp, batch):
            slot._ready()
            generator_of(slot.device).set_state(slot.stream)
            meaning.compare(slot, slot._stacking(), slot._hp, batch, partial(self._in_own_bundle, slot), slot._numerics)

    def _in_own_bundle(self, slot: Slot, batch: Any) -> Any:
        """Train a slot's model on a batch, in a bundle of its own. Its bits are the same in any other bundle."""
        self._tracing = (slot,)
        built, bundle, generator = slot._ready(), Bundle(self.builder), generator_of(slot.device)
        member = bundle.join(built.model, built.optimizer)
        member.stream = generator.get_state()
        losses = bundle.step([batch], [slot._hp])
        bundle.leave(member)
        generator.set_state(member.stream)
        return losses


class DeviceMemory:
    """Memory of the device on which several models are trained. When it first runs out, states kept on the device are
    removed from it. After that, each time it runs out, half as many models are trained as one. If a single model still
    finds no memory, its step has failed.

    Args:
        who: the trainable's class, for messages.
    """

    def __init__(self, who: str) -> None:
        self._who = who
        self._ran_out = False
        self.most = sys.maxsize
        """Maximum number of models that are stacked."""

    @contextmanager
    def tried(self, outcomes: Sequence[list[Exception | None]]) -> Iterator[None]:
        """Try a step of several slots. Those that run out of memory are given :class:`DeviceFull` as their outcome, so
        that they are tried again if more memory can be found.

        Args:
            outcomes: the outcomes of each slot, the last one for this step. A slot without an outcome is given the
                error that ends the step.
        """
        try:
            yield
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            for of in outcomes:
                if not of:
                    of.append(error)
        short = [of for of in outcomes if is_out_of_memory(of[-1])]
        if not short or self.most == 1:
            return
        if self._ran_out:
            self.most = max(1, len(short) // 2)
            as_many = "one at a time" if self.most == 1 else f"at most {self.most} at a time"
            logger.warning("The memory of the device is short: models of %s are trained %s.", self._who, as_many)
        self._ran_out = True
        for of in short:
            of[-1] = DeviceFull(str(of[-1]))


@contextmanager
def put_back(who: str, loops: Sequence[TorchLoop]) -> Iterator[None]:
    """Watch everything that training can reach. On exit, changes are undone, and refused by name.

    Raises:
        NeedsPython: only models or optimizers have changed. Each slot has its own, and can be trained by itself.
        NotStackable: an object that all slots share has changed.
    """
    before = [(loop, loop.portrait(), loop.snapshot()) for loop in loops]
    try:
        yield
    finally:
        changed: set[str] = set()
        for loop, described, snapshot in before:
            now = loop.portrait()
            paths = {path for path in described.keys() | now.keys() if described.get(path) != now.get(path)}
            if paths:
                loop.put_back(snapshot)
            changed |= paths
        if changed:
            kind = NeedsPython if all(map(_OWN.match, changed)) else NotStackable
            first = ", ".join(sorted(changed)[:3])
            raise kind(f"{who} changes {first}; in a stack, Python code runs once, not at each step")
