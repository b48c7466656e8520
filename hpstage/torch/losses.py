"""The losses of training: a loss that is NaN or infinite ends the trial."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from hpstage.errors import NonFiniteLoss
from hpstage.training.warned import each_once

if TYPE_CHECKING:
    from hpstage.torch.trainable import TorchTrainable

_UNSEEN = (
    "%s.update() returns no loss, so a loss that is NaN or infinite is not noticed. Return the loss, or set "
    "terminate_on_nan = False to continue regardless"
)


class Losses:
    """Reads the losses of batches. Reading a loss from a GPU waits for the GPU, so each loss is read when the next
    batch is ready: the GPU computes while that batch is made.

    Args:
        user: the object whose losses are read.
    """

    def __init__(self, user: TorchTrainable) -> None:
        self._user = user
        self._unread: tuple[torch.Tensor | float | None, int] | None = None
        self._warn = each_once()

    def add(self, loss: torch.Tensor | float | None, step: int) -> None:
        """Add the loss of a batch. The loss of the batch before must have been read."""
        if self._user.terminate_on_nan:
            self._unread = loss, step

    def read(self, now: int) -> None:
        """Read the loss that was added last, in step ``now``.

        Raises:
            NonFiniteLoss: training has diverged.
        """
        if self._unread is None:
            return
        (loss, step), self._unread = self._unread, None
        if isinstance(loss, torch.Tensor):  # mostly of one element, which needs no sum
            loss = (loss if loss.numel() == 1 else loss.detach().sum()).item()
        if isinstance(loss, float):
            if not math.isfinite(loss):
                error = NonFiniteLoss(f"the training loss is {loss} in step {step}")
                error.steps_late = now - step
                raise error
        elif loss is None:
            self._warn(_UNSEEN, type(self._user).__name__)

    def forget(self) -> None:
        """Discard the unread loss, since training continues from another state."""
        self._unread = None
