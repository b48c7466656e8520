"""EagerBackend: runs the user's code as it is."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from hpstage.torch.backends.backend import StepBackend


class EagerBackend(StepBackend):
    """Calls :meth:`~hpstage.torch.TorchTrainable.update`."""

    numerics: ClassVar[str] = "eager-v1"  # in the keys of all plans made before there were other backends

    @property
    def departs(self) -> bool:
        return False

    def train(
        self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, batch: Any
    ) -> torch.Tensor | float | None:
        return self.subject.update(model, optimizer, batch)
