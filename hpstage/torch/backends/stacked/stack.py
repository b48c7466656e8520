"""The stack of a process: what its slots share, and how their steps are trained together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, Generic, TypeVar

from hpstage.checkpoints.on_device import is_out_of_memory
from hpstage.errors import UsageError
from hpstage.schedule import Scalar
from hpstage.torch.backends.device_memory import DeviceMemory
from hpstage.torch.backends.side_effects import put_back
from hpstage.torch.backends.stacked import Builder, Bundle, NeedsPython, NotStackable, shape_key
from hpstage.torch.backends.stacked.slot import Slot
from hpstage.torch.backends.stacked.streams import generator_of
from hpstage.torch.backends.stacked.tracing import Trace
from hpstage.torch.trainable import TorchTrainable
from hpstage.training.warned import each_once

_Slot = TypeVar("_Slot", bound=Slot)


class Stack(Generic[_Slot]):
    """The programs of steps, and the bundles of members, that the slots of a process share."""

    def __init__(self, subject: TorchTrainable, first: _Slot) -> None:
        self.first = first
        self.slots: list[_Slot] = []  # besides the first
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
        self._tracing: tuple[_Slot, ...] = ()
        self._warn = each_once()
        self.most_as_one: int | None = None
        """Maximum number of members that are stacked, as far as it pays; ``None``: as many as possible."""

    def train(self, due: Mapping[_Slot, tuple[int, Mapping[str, Scalar]]]) -> None:
        """Train a step of several slots, and set the outcome of each."""
        with self.memory.tried([slot.outcomes for slot in due]):
            self._train(due)

    def _train(self, due: Mapping[_Slot, tuple[int, Mapping[str, Scalar]]]) -> None:
        going: list[_Slot] = []
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
            groups: dict[object, list[tuple[_Slot, Any]]] = {}
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

    def _step(self, shape: object, batches: Mapping[_Slot, Any]) -> Iterator[tuple[_Slot, Exception | None]]:
        """Train on one batch of each of these slots. Yield the slots whose step has ended, with the error if there is
        one."""
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

    def _otherwise(self, slot: _Slot, error: Exception, batch: Any) -> Exception | None:
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

    def _enter(self, slot: _Slot, batch: Any, bundles: list[Bundle]) -> NotStackable | None:
        """Add a slot to a bundle that takes the same step, or to a new one; return the reason if neither is
        possible."""
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

    def _trace(self, slot: _Slot, batch: Any) -> Trace | None:
        """Return the trace of a slot's step, if there is one."""
        self._tracing = (slot,)
        built = slot._ready()
        try:
            return self.builder.tracer.trace(built.model, built.optimizer, batch, slot._hp)
        except Exception:
            return None  # its step will raise it

    def _run(
        self, bundle: Bundle, slots: list[_Slot], batches: Mapping[_Slot, Any], bundles: list[Bundle]
    ) -> Iterator[tuple[_Slot, Exception | None]]:
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

    def _by_step(self, slots: list[_Slot], batches: Mapping[_Slot, Any]) -> list[list[_Slot]]:
        """Divide slots that failed as one into those that take the same step, or each by itself if the error is one's
        own."""
        found: dict[Trace | _Slot, list[_Slot]] = {}
        for slot in slots:
            found.setdefault(self._trace(slot, batches[slot]) or slot, []).append(slot)
        return [*found.values()] if len(found) > 1 else [[slot] for slot in slots]

    def _compare(self, slot: _Slot, batch: Any) -> None:
        """Compare a step with an eager one, if it is one of the first of its kind."""
        meaning = slot._meaning
        if meaning.is_due(slot._hp, batch):
            slot._ready()
            generator_of(slot.device).set_state(slot.stream)
            meaning.compare(slot, slot._stacking(), slot._hp, batch, partial(self._in_own_bundle, slot), slot._numerics)

    def _in_own_bundle(self, slot: _Slot, batch: Any) -> Any:
        """Train a slot's model on a batch, in a bundle of its own: with the bits that it has in any other."""
        self._tracing = (slot,)
        built, bundle, generator = slot._ready(), Bundle(self.builder), generator_of(slot.device)
        member = bundle.join(built.model, built.optimizer)
        member.stream = generator.get_state()
        losses = bundle.step([batch], [slot._hp])
        bundle.leave(member)
        generator.set_state(member.stream)
        return losses
