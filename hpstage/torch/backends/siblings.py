"""The worker's side of stacked siblings: a TorchLoop for each, whose steps ``stacked/stack.py`` trains."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from hpstage.errors import UsageError
from hpstage.schedule import Scalar
from hpstage.torch.backends.lookup import AUTO, backend_named, usable
from hpstage.torch.backends.measuring import SHORT_OVER_FROZEN, measure_pair
from hpstage.torch.backends.stacked.stack import Slot, Stack
from hpstage.torch.data import Batches
from hpstage.torch.frozen import frozen_shares
from hpstage.torch.loading.streams import StreamBatches
from hpstage.torch.trainable import TorchTrainable
from hpstage.training.capture.kind import same_value
from hpstage.training.capture.kinds import CACHE, MODULES
from hpstage.training.capture.survey import Record
from hpstage.training.code.graph import OF_CODE
from hpstage.training.identity.settings import settings_here
from hpstage.training.step_log import Noted

logger = logging.getLogger("hpstage")


class StackedLoop(Slot):
    """Trains one chain of a TorchTrainable, in one of several slots of a process, by a step backend that trains
    several models at a time (``numerics = "stacked"``, or a plugin's).

    If a search has chosen another backend (``numerics="auto"``), the loop trains with that, one chain at a time.

    All slots train the same object of the user's; only its ``hp`` differs between them.

    Args:
        stack: the stack of an existing slot. Without it, this is the first slot, which creates the other slots and
            closes them in :meth:`close`.
    """

    def __init__(self, subject: TorchTrainable, stack: Stack | None = None) -> None:
        super().__init__(subject)
        self.stack = Stack(subject, self) if stack is None else stack
        self._borrowed = self.stack.first._borrowed
        self._meaning = self.stack.first._meaning
        self.copies_batches = self.stack.most > 1

    # --- several at a time --------------------------------------------------------------------------------

    @property
    def slots(self) -> int:
        return self.stack.most

    def members(self) -> Sequence[Slot]:
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
        """Work on frozen layers does not count here: it depends on which batches are repeated."""
        return super().seconds() - self.stack.builder.outputs.seconds

    def measure_backends(self, initial: Mapping[str, Scalar], steps: float) -> dict[str, float]:
        """Return the seconds of a step for each backend that can be chosen. For one that stacks siblings, return the
        seconds for one and for two siblings."""
        found = super().measure_backends(initial, steps)
        likely, built = False, self._built
        if built is not None:
            frozen, prefix = frozen_shares(built.model, built.optimizer)
            likely = prefix > 0.5 or (frozen > 0.5 and found["eager"] < SHORT_OVER_FROZEN)
        several = [name for name in usable(self.device) if backend_named(name).several]
        try:
            for name in several if self.slots > 1 else ():
                found |= measure_pair(self, self, self.members(), name, initial, steps, found["eager"], likely=likely)
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
                    f"{type(self._user).__name__} reads a stream, or data loaded by other processes; several models "
                    f"trained at a time cannot share these: give max_stacked = 1, or load data in the training "
                    f"process (num_workers = 0)"
                )
            self.data.take_over(first.data)
        return super()._given_data()

    # --- the port -----------------------------------------------------------------------------------------

    def setup(self, hp: Mapping[str, Scalar]) -> None:
        self.outcomes.clear()  # of a step that is no longer requested, since its chain was ended
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

    def _build(self) -> None:
        super()._build()
        self._see_shared("model() or optimizer()")

    def _other_models(self) -> list[torch.nn.Module]:
        slots = [slot._built for slot in (self.stack.first, *self.stack.slots) if slot is not self]
        return [built.model for built in slots if built is not None]

    def _see_shared(self, what: str) -> None:
        """Raise :class:`UsageError` if anything that all slots share has changed: the change would affect the other
        slots, too, and recorded steps hold the first value."""
        if not self._stacks:
            return
        changed = _changed_objects(self._world.pristine or ())
        changed += _changed_settings(self.stack.settings) if self.stack.most > 1 else []
        if changed:
            raise UsageError(
                f"{what} of {type(self._user).__name__} changes {changed[0]}, and under numerics = {self._numerics!r} "
                f"several models of this object are trained at a time: keep it in the model, or use numerics = 'eager'"
            )

    def rehearse(self, hp: Mapping[str, Scalar]) -> None:
        """Train a first step, to check what siblings share.

        Raises:
            UsageError: the step changes objects that siblings share, or a recording would not repeat the step.
        """
        if not self._stacks:
            return
        self.setup(hp)
        try:
            self.train(0, hp)
            self._see_shared("training")
        except UsageError:
            raise
        except Exception:
            logger.debug("the first step of a rehearsal has failed", exc_info=True)  # training will raise it
        self.close()


def _changed_settings(first: dict[str, Any]) -> list[str]:
    """Describe the settings of the process that decide bits and have changed since they were first seen. ``first`` has
    their first values; new settings are added to it."""
    return [
        f"the setting {name!r} of the process from {first[name]} to {value} (all trials need the same)"
        for name, value in settings_here(("torch", "jax")).items()
        if first.setdefault(name, value) != value
    ]


def _changed_objects(records: Iterable[Record]) -> list[str]:
    """Return the paths of all changes in the user's object, its data set and its code."""
    return [
        _changed(record)
        for record in records
        if (record.path.partition(".")[0] in ("self", "dataset") or OF_CODE.match(record.path))
        and record.kind not in (CACHE, MODULES)
        and record.changed()
    ]


def _changed(record: Record) -> str:
    """Return the path of a change in an object: that of the attribute or item that differs, if there is one."""
    present = record.read()
    if isinstance(record.content, Mapping) and isinstance(present, Mapping):
        for name in {**present, **record.content}:
            if not (name in present and name in record.content and same_value(record.content[name], present[name])):
                return f"{record.path}.{name}"
    return record.path
