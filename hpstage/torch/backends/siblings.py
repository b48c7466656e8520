"""The worker's side of stacked siblings: a TorchLoop for each, whose steps are those of a bundle."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any

import torch

from hpstage.checkpoints.on_device import is_out_of_memory
from hpstage.errors import NonFiniteLoss, UsageError
from hpstage.plan.facts import NO_FROZEN_WORK
from hpstage.schedule import Scalar
from hpstage.torch.backends.common import changed_objects, changed_settings
from hpstage.torch.backends.device_memory import DeviceMemory
from hpstage.torch.backends.lookup import AUTO, backend_named, usable
from hpstage.torch.backends.measuring import SHORT_OVER_FROZEN, measure_pair
from hpstage.torch.backends.side_effects import put_back
from hpstage.torch.backends.stacked import Builder, Bundle, Member, NeedsPython, NotStackable, shape_key
from hpstage.torch.backends.stacked.signature import copied
from hpstage.torch.backends.stacked.streams import generator_of
from hpstage.torch.backends.stacked.tracing import Trace
from hpstage.torch.backends.stacked_backend import StackedBackend
from hpstage.torch.data import Batches
from hpstage.torch.frozen import frozen_shares
from hpstage.torch.loading.streams import StreamBatches
from hpstage.torch.loop import TorchLoop
from hpstage.torch.trainable import TorchTrainable
from hpstage.trainable import Trainable
from hpstage.training.randomness import rekey
from hpstage.training.step_log import Noted, recording
from hpstage.training.warned import each_once

logger = logging.getLogger("hpstage")


class StackedLoop(TorchLoop):
    """Trains one chain of a TorchTrainable, in one of several slots of a process, by a step backend that trains
    several models at a time (``numerics = "stacked"``, or a plugin's).

    Where a search has chosen another backend (``numerics="auto"``), it trains by that, one chain at a time.

    A slot has a model and an optimizer of its own. While it is a member of a bundle, they are behind; they are brought
    up to date before anything else looks at them. All slots train the same object of the user's, which holds nothing
    that differs between them but ``hp``.

    Args:
        stack: what the slots share, of another slot; without it, this is the first slot, which makes the others, and
            whose :meth:`close` closes them.
    """

    def __init__(self, subject: TorchTrainable, stack: Stack | None = None) -> None:
        super().__init__(subject)
        self.stack = Stack(subject, self) if stack is None else stack
        self._borrowed = self.stack.first._borrowed
        self._meaning = self.stack.first._meaning
        self.member: Member | None = None
        self.bundle: Bundle | None = None
        self.outcomes: list[Exception | None] = []  # of a step that was trained before it is requested
        self.noted = Noted()  # what that step has logged
        self.width = 1  # with how many it was trained as one in its last step, itself included
        self.frozen_work = NO_FROZEN_WORK  # of that step
        self._behind = False
        self._step: Iterator[tuple[Any, int]] = iter(())
        self.step = 0
        self.stream = generator_of(self.device).get_state()

    # --- several at a time --------------------------------------------------------------------------------

    @property
    def slots(self) -> int:
        return self.stack.most

    @property
    def _stacks(self) -> bool:
        return self._steps_by().several

    def members(self) -> Sequence[Trainable]:
        stack = self.stack
        if not stack.slots:
            stack.slots = [StackedLoop(self._user, stack) for _ in range(stack.most)]
        return stack.slots

    def train_together(
        self, steps: Mapping[int, tuple[int, Mapping[str, Scalar]]], most: int | None = None
    ) -> dict[int, int]:
        slots = self.stack.slots
        if not all(slots[index]._stacks for index in steps):
            return dict.fromkeys(steps, 1)  # each is trained by its own call
        self.stack.most_as_one = most
        self.stack.train({slots[index]: due for index, due in steps.items()})
        return {index: slots[index].width for index in steps}

    @property
    def worthwhile(self) -> int:
        return self.stack.builder.worthwhile

    def seconds(self) -> float:
        """What is computed of frozen layers does not count: that depends on which batches come again."""
        return super().seconds() - self.stack.builder.outputs.seconds

    def measure_backends(self, initial: Mapping[str, Scalar], steps: float) -> dict[str, float]:
        """Return the seconds of a step by each backend that can be chosen; by one that trains several siblings as one,
        those of one of them, and of two."""
        found = super().measure_backends(initial, steps)
        likely, built = False, self._built
        if built is not None:
            frozen, prefix = frozen_shares(built.model, built.optimizer)
            likely = prefix > 0.5 or (frozen > 0.5 and found["eager"] < SHORT_OVER_FROZEN)
        several = [name for name in usable(self.device) if backend_named(name).several]
        try:
            for name in several if self.slots > 1 else ():
                sides = [slot for slot in self.members() if isinstance(slot, StackedLoop)]
                found |= measure_pair(self, self, sides, name, initial, steps, found["eager"], likely=likely)
        finally:
            self.close()
            for slot in self.stack.slots:
                slot.train_by(AUTO)
        return found

    def train_by(self, numerics: str) -> bool:
        self.detach()
        return super().train_by(numerics)

    def _given_data(self) -> Batches | StreamBatches:
        first = self.stack.first
        if not self.data.is_made and self is not first:
            shared = first._given_data()
            stackable = isinstance(shared, Batches) and shared.processes is None
            if self.stack.most == 1 or not (self._stacks or stackable):
                return super()._given_data()
            if not stackable:
                raise UsageError(
                    f"{type(self._user).__name__} reads a stream, or data that processes load, of which each of "
                    f"several models trained at a time would need its own: give max_stacked = 1, or data that are "
                    f"loaded here (num_workers = 0)"
                )
            self.data.take_over(first.data)
        return super()._given_data()

    # --- the port -----------------------------------------------------------------------------------------

    def setup(self, hp: Mapping[str, Scalar]) -> None:
        self.outcomes.clear()  # of a step that nobody has requested, since its chain was ended
        self.noted = Noted()
        self.detach()
        super().setup(hp)

    def train(self, step: int, hp: Mapping[str, Scalar]) -> None:
        if not self._stacks:
            super().train(step, hp)
            return
        if not self.outcomes:
            self.stack.train({self: (step, hp)})
        self.noted.pass_on()
        error = self.outcomes.pop()
        if error is not None:
            raise error

    def evaluate(self) -> Mapping[str, float]:
        metrics = super().evaluate()
        self._see_shared("training")
        return metrics

    def state_dict(self) -> object:
        state = super().state_dict()
        self._see_shared("training")
        return state

    def load_state_dict(self, state: object) -> None:
        self.detach()
        super().load_state_dict(state)

    def hand_over(self) -> dict[str, object]:
        self.detach()
        return super().hand_over()

    def close(self) -> None:
        self.detach()
        if self is self.stack.first:
            for slot in self.stack.slots:
                slot.close()
            super().close()
            self.stack.settings.clear()
        else:
            self._built = None
            self._pending = True
            self.data.close()
            self._world.close()

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

    def _build(self) -> None:
        super()._build()
        self._see_shared("model() or optimizer()")

    def _other_models(self) -> list[torch.nn.Module]:
        slots = [slot._built for slot in (self.stack.first, *self.stack.slots) if slot is not self]
        return [built.model for built in slots if built is not None]

    def _see_shared(self, what: str) -> None:
        """Raise :class:`UsageError` if anything has changed that all slots share: to the others it would happen, too,
        and recorded steps hold its first value."""
        if not self._stacks:
            return
        changed = changed_objects(self._world.pristine or ())
        changed += changed_settings(self.stack.settings) if self.stack.most > 1 else []
        if changed:
            raise UsageError(
                f"{what} of {type(self._user).__name__} changes {changed[0]}, and under numerics = {self._numerics!r} "
                f"several models of this object are trained at a time: keep it in the model, or use numerics = 'eager'"
            )

    def rehearse(self, hp: Mapping[str, Scalar]) -> None:
        """Raise :class:`UsageError` if a first step changes what siblings share, or does not repeat what it does."""
        if not self._stacks:
            return
        self.setup(hp)
        try:
            self.train(0, hp)
            self._see_shared("training")
        except UsageError:
            raise
        except Exception:
            logger.debug("the first step of a rehearsal has failed", exc_info=True)  # training will say so
        self.close()

    # --- for the stack ------------------------------------------------------------------------------------

    def begin(self, step: int, hp: Mapping[str, Scalar]) -> None:
        """Begin a step: its batches are given by :meth:`batch`."""
        built = super()._ready()  # behind, if it is a member of a bundle
        self._give_values()
        self._step = self._batches_of(built, step, hp)
        self.stream = generator_of(self.device).get_state()
        self.step = step
        self.frozen_work = NO_FROZEN_WORK

    def batch(self) -> Any:
        """Return the step's next batch; StopIteration after the last."""
        batch, self._samples = next(self._step)
        if self.stack.most == 1:
            return batch
        # The user's code may fill one and the same buffer for each batch, and the next one is another slot's.
        return copied(batch)

    @property
    def is_stacked(self) -> bool:
        """Whether it is trained as one with others, where there are any."""
        return not self._stacking().as_it_is

    def train_as_it_is(self, *present: Any) -> Exception | None:
        """Train on the rest of a step's batches by ``update()``; return what that has ended in, if anything.

        Args:
            present: the batch that was taken last, if it has not been trained on.
        """
        self.detach()
        self._give_values()
        rekey(self._seed, self.step)  # all generators: a step that is recorded draws from torch's alone
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

    def fits(self) -> bool:
        """Return whether it is still stepped as when it joined: not where a momentum or a decay has become zero."""
        assert self.member is not None
        return self.member.fits()

    def detach(self) -> None:
        if self.bundle is not None and self.member is not None:
            self.bundle.leave(self.member)
        self.member = self.bundle = None
        self._behind = False

    def give_up(self) -> None:
        """Give up the model, of which a step may have been trained in part."""
        self.member = self.bundle = self._built = None
        self._behind = False

    def stepped(self, loss: float | None) -> NonFiniteLoss | None:
        """Note that it was trained on a batch; return what that has ended in, if anything."""
        self._behind = True
        assert self.member is not None
        self.stream = self.member.stream
        if loss is not None and self._user.terminate_on_nan and not math.isfinite(loss):
            return NonFiniteLoss(f"the training loss is {loss} in step {self.step}")
        return None


class Stack:
    """What the slots of a process share: the programs of their steps, and the bundles that they are members of."""

    def __init__(self, subject: TorchTrainable, first: StackedLoop) -> None:
        self.first = first
        self.slots: list[StackedLoop] = []  # besides the first
        # Whoever accounts for the state of an object does that for one trial.
        answered = type(subject).extra_state is not TorchTrainable.extra_state
        if type(subject.max_stacked) is not int or subject.max_stacked < 1:
            raise UsageError(f"max_stacked is {subject.max_stacked!r}; it must be a whole number of at least 1")
        self.most = 1 if subject.num_workers or answered else subject.max_stacked
        self.settings: dict[str, Any] = {}  # of the process, as they were when each was first seen
        self._subject = subject
        self.memory = DeviceMemory(type(subject).__name__)
        self.builder = Builder(subject, first.device, lambda who: put_back(who, self._tracing))
        self._bundles: dict[object, list[Bundle]] = {}  # by the shape of their batches
        self._tracing: tuple[StackedLoop, ...] = ()
        self._warn = each_once()
        self.most_as_one: int | None = None
        """How many are trained as one at most, as far as that is worthwhile; ``None``: all that can be."""

    def train(self, due: Mapping[StackedLoop, tuple[int, Mapping[str, Scalar]]]) -> None:
        """Train a step of several slots; each has its outcome then."""
        with self.memory.tried([slot.outcomes for slot in due]):
            self._train(due)

    def _train(self, due: Mapping[StackedLoop, tuple[int, Mapping[str, Scalar]]]) -> None:
        going: list[StackedLoop] = []
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
            groups: dict[object, list[tuple[StackedLoop, Any]]] = {}
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

    def _step(
        self, shape: object, batches: Mapping[StackedLoop, Any]
    ) -> Iterator[tuple[StackedLoop, Exception | None]]:
        """Train on one batch of each of these slots; yield those whose step has ended, and what it has raised."""
        for bundle in self._bundles.get(shape, ()):
            for slot in (self.first, *self.slots):
                if slot.bundle is bundle and slot not in batches:
                    slot.detach()
        bundles = self._bundles.setdefault(shape, [])
        for slot in batches:
            if slot.bundle is not None and (slot.bundle not in bundles or not slot.fits()):
                slot.detach()
            if slot.bundle is None and (refused := self._enter(slot, batches[slot], bundles)) is not None:
                yield slot, self._otherwise(slot, refused, batches[slot])
        bundles[:] = [bundle for bundle in bundles if bundle.members]
        for bundle in list(bundles):
            yield from self._run(bundle, [slot for slot in batches if slot.bundle is bundle], batches, bundles)

    def _otherwise(self, slot: StackedLoop, error: Exception, batch: Any) -> Exception | None:
        """Train a slot as it is, if it is that by which a step has failed; return what its step has ended in."""
        if isinstance(error, NeedsPython):
            self._warn("%s is trained without stacking it: %s", type(self._subject).__name__, str(error))
            return slot.train_as_it_is(batch)
        if not isinstance(error, NotStackable):
            return error
        return UsageError(
            f"numerics = {slot._numerics!r} cannot train {type(self._subject).__name__}: {error}. Give numerics = "
            f"'eager', or 'compiled'"
        )

    def _enter(self, slot: StackedLoop, batch: Any, bundles: list[Bundle]) -> NotStackable | None:
        """Let a slot join a bundle that takes the same step, or begin one; return why it can be in none."""
        trace = self._trace(slot, batch)
        for bundle in bundles:
            if bundle.trace is not trace or len(bundle.members) >= self.memory.most:
                continue
            try:
                slot.enter(bundle, trace)
            except NotStackable:
                continue  # of another kind
            return None
        alone = Bundle(self.builder, trace)
        try:
            slot.enter(alone, trace)
        except NotStackable as error:
            return error
        bundles.append(alone)
        return None

    def _trace(self, slot: StackedLoop, batch: Any) -> Trace | None:
        """Return the trace of a slot's step, if there is one."""
        self._tracing = (slot,)
        built = slot._ready()
        try:
            return self.builder.tracer.trace(built.model, built.optimizer, batch, slot._hp)
        except Exception:
            return None  # its step will raise it

    def _run(
        self, bundle: Bundle, slots: list[StackedLoop], batches: Mapping[StackedLoop, Any], bundles: list[Bundle]
    ) -> Iterator[tuple[StackedLoop, Exception | None]]:
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

    def _by_step(self, slots: list[StackedLoop], batches: Mapping[StackedLoop, Any]) -> list[list[StackedLoop]]:
        """Divide slots that failed as one into those that take the same step, or each by itself if the error is one's
        own."""
        found: dict[Trace | StackedLoop, list[StackedLoop]] = {}
        for slot in slots:
            found.setdefault(self._trace(slot, batches[slot]) or slot, []).append(slot)
        return [*found.values()] if len(found) > 1 else [[slot] for slot in slots]

    def _compare(self, slot: StackedLoop, batch: Any) -> None:
        """Compare a step with an eager one, if it is one of the first of its kind."""
        meaning = slot._meaning
        if meaning.is_due(slot._hp, batch):
            slot._ready()
            generator_of(slot.device).set_state(slot.stream)
            meaning.compare(slot, slot._stacking(), slot._hp, batch, partial(self._in_own_bundle, slot), slot._numerics)

    def _in_own_bundle(self, slot: StackedLoop, batch: Any) -> Any:
        """Train a slot's model on a batch, in a bundle of its own: with the bits that it has in any other."""
        self._tracing = (slot,)
        built, bundle, generator = slot._ready(), Bundle(self.builder), generator_of(slot.device)
        member = bundle.join(built.model, built.optimizer)
        member.stream = generator.get_state()
        losses = bundle.step([batch], [slot._hp])
        bundle.leave(member)
        generator.set_state(member.stream)
        return losses
