"""StackedBackend: trains one of several siblings where it cannot be stacked with the others."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from hpstage.torch.backends.backend import StepBackend


class StackedBackend(StepBackend):
    """The backend of one slot of :class:`hpstage.torch.backends.siblings.StackedLoop`. The loop itself trains all steps
    that can be stacked.

    If no step of a model can be recorded, the model is trained as it is, independently of the other models.
    """

    numerics: ClassVar[str] = "stacked-v3"
    several: ClassVar[bool] = True
    begins: ClassVar[float] = 2.0  # measured, without the share that grows with the seconds of a step

    @classmethod
    def missing(cls, device: torch.device) -> str | None:
        return None if device.type in ("cpu", "cuda") else f"siblings are not stacked on {device.type}"

    def train(
        self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, batch: Any
    ) -> torch.Tensor | float | None:
        assert self.as_it_is, "a Bundle trains the steps that can be stacked"
        return self.subject.update(model, optimizer, batch)
