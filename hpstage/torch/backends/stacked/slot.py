"""A slot of stacked siblings: a TorchLoop whose steps may be those of a bundle."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any

from hpstage.errors import NonFiniteLoss
from hpstage.plan.facts import NO_FROZEN_WORK
from hpstage.schedule import Scalar
from hpstage.torch.backends.stacked import Bundle, Member
from hpstage.torch.backends.stacked.signature import copied
from hpstage.torch.backends.stacked.streams import generator_of
from hpstage.torch.backends.stacked.tracing import Trace
from hpstage.torch.backends.stacked_backend import StackedBackend
from hpstage.torch.loop import TorchLoop
from hpstage.torch.trainable import TorchTrainable
from hpstage.training.randomness import rekey
from hpstage.training.step_log import Noted, recording


class Slot(TorchLoop):
    """Trains one chain, each step as :class:`~hpstage.torch.backends.stacked.stack.Stack` requests it.

    A slot has its own model and optimizer. While it is a member of a bundle, they are behind; they are brought up to
    date before anything else looks at them.
    """

    copies_batches = False
    """Whether other slots take their batches before this one is trained on its own: the user's code may fill one and
    the same buffer for each batch."""

    def __init__(self, subject: TorchTrainable) -> None:
        super().__init__(subject)
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

    @property
    def _stacks(self) -> bool:
        return self._steps_by().several

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
        return copied(batch) if self.copies_batches else batch

    @property
    def is_stacked(self) -> bool:
        """Whether the model is trained in one stack with others, if there are any."""
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
        """Discard the model, which may be in the middle of a step."""
        self.member = self.bundle = self._built = None
        self._behind = False

    def stepped(self, loss: float | None) -> NonFiniteLoss | None:
        """Record that the model was trained on a batch; return the result that ended training, if any."""
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
