"""StackedBackend: a step of one model as a stack of one takes it."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from hpstage.errors import UsageError
from hpstage.torch.backends.backend import StepBackend
from hpstage.torch.backends.stacked import Builder, Bundle, NotStackable
from hpstage.torch.backends.stacked.streams import generator_of


class StackedBackend(StepBackend):
    """Trains one model. Several at a time are trained by :class:`hpstage.torch.backends.lanes.StackedLoop`."""

    numerics: ClassVar[str] = "stacked-v1"
    several: ClassVar[bool] = True

    _builder: Builder | None = None

    def train(
        self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, batch: Any
    ) -> torch.Tensor | float | None:
        if self._builder is None:
            self._builder = Builder(self.subject, self.device)
        bundle, generator = Bundle(self._builder), generator_of(self.device)
        try:
            member = bundle.join(model, optimizer)
            member.stream = generator.get_state()
            losses = bundle.step([batch], [self.subject.hp])
            bundle.leave(member)
        except NotStackable as error:
            raise refusal(self.subject, error) from None
        generator.set_state(member.stream)
        return None if losses is None else losses[0]


def refusal(subject: object, error: NotStackable) -> UsageError:
    """Return the error for a trainable of which no step can be stacked."""
    return UsageError(
        f"numerics = 'stacked' cannot train {type(subject).__name__}: {error}. Give numerics = 'eager', or 'compiled'"
    )
