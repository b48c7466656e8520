"""The step at which a Lightning Trainer ends training, and the code that reads it."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from typing import Any

from lightning.pytorch import Trainer

from hpstage.torch.horizon import Horizon, no_end
from hpstage.torch.lightning.trainable import LightningTrainable

TRAINER = "lightning.Trainer"


def stated_by(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of a Trainer's arguments that state an end."""
    return {name: arguments[name] for name in ("max_epochs", "max_steps") if name in arguments}


class WatchedTrainer(Trainer):  # type: ignore[misc]  # its base has no types
    """A Trainer that notices code that reads its end, and refuses to answer if it has none: that would be infinity, or
    -1."""

    sizes = False
    """Whether code has read it that is not Lightning's."""

    @property
    def estimated_stepping_batches(self) -> int | float:
        self._notice("estimated_stepping_batches")
        estimated: int | float = super().estimated_stepping_batches
        return estimated

    @property
    def max_epochs(self) -> Any:
        self._notice("max_epochs")
        return self.fit_loop.max_epochs

    @property
    def max_steps(self) -> Any:
        self._notice("max_steps")
        return self.fit_loop.max_steps

    def _notice(self, name: str) -> None:
        reader = sys._getframe(2).f_globals.get("__name__", "")
        if reader.partition(".")[0] in ("lightning", "hpstage"):
            return
        if all(end in (None, -1) for end in (self.fit_loop.max_epochs, self.fit_loop.max_steps)):
            raise no_end(name, "LightningTrainable(..., trainer={'max_steps': STEPS}) with the steps of your search")
        self.sizes = True


def horizon_of(trainer: Any, subject: LightningTrainable) -> Horizon | None:
    """Return the end that the Trainer's arguments state; ``None`` if there is none, or it cannot be counted in steps of
    trials."""
    batches = trainer.num_training_batches
    epochs, updates = trainer.fit_loop.max_epochs, trainer.fit_loop.max_steps
    if not (trainer.lightning_module.automatic_optimization and 0 < batches < math.inf):
        return None
    ends = [] if epochs in (None, -1) else [epochs * batches]
    if updates != -1:
        # In each epoch the last update may accumulate fewer batches.
        whole, rest = divmod(updates, math.ceil(batches / trainer.accumulate_grad_batches))
        ends.append(whole * batches + rest * trainer.accumulate_grad_batches)
    if not ends:
        return None
    steps = min(ends) if subject.step_unit == "batch" else math.ceil(min(ends) / batches)
    return Horizon(TRAINER, tuple(stated_by(subject.arguments).items()), steps, trainer.sizes)
