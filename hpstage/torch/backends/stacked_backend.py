"""StackedBackend: trains one of several siblings where it cannot be stacked with the others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from hpstage.errors import UsageError
from hpstage.schedule import Scalar
from hpstage.torch.backends.backend import StepBackend
from hpstage.torch.backends.stacked import NotStackable


class StackedBackend(StepBackend):
    """One for each slot of :class:`hpstage.torch.backends.siblings.StackedLoop`, which trains what can be stacked.

    A model of which no step can be recorded is trained as it is for the rest of its trial, by ``update()``. That is so
    whichever models are trained with it, and its states record it, so that every fork of it does the same.
    """

    numerics: ClassVar[str] = "stacked-v3"
    several: ClassVar[bool] = True
    begins: ClassVar[float] = 2.0  # measured, besides what grows with the seconds of a step

    @classmethod
    def missing(cls, device: torch.device) -> str | None:
        return None if device.type in ("cpu", "cuda") else f"siblings are not stacked on {device.type}"

    as_it_is = False
    """Whether the model is trained by itself, by ``update()``."""

    def begin(self, initial: Mapping[str, Scalar]) -> None:
        self.as_it_is = False

    def state(self) -> Any:
        return True if self.as_it_is else None

    def load(self, state: Any) -> None:
        self.as_it_is = bool(state)

    @property
    def departs(self) -> bool:
        return not self.as_it_is

    def train(
        self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, batch: Any
    ) -> torch.Tensor | float | None:
        assert self.as_it_is, "what can be stacked is trained by a Bundle"
        return self.subject.update(model, optimizer, batch)


def refusal(subject: object, numerics: str, error: NotStackable) -> UsageError:
    """Return the error for a trainable of which no step can be trained in this numerics class."""
    return UsageError(
        f"numerics = {numerics!r} cannot train {type(subject).__name__}: {error}. Give numerics = 'eager', or "
        f"'compiled'"
    )
