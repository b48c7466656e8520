"""The total number of steps as the code of a Lightning or Hugging Face trainer reads it.

If the trainer's arguments state it (``max_steps``, ``max_epochs``, ``num_train_epochs``), code that reads it, such as a
scheduler, gets that number, as without hpstage. Like all arguments it is part of the workload's key, and trials end
there at the latest. If the arguments do not state it, code that reads it is refused by name: trials of different
lengths share their steps, so that no number is right for all of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hpstage.errors import UsageError


@dataclass(frozen=True, slots=True)
class Horizon:
    """The end of training that a trainer's arguments state.

    Attributes:
        trainer: the class that has the arguments, as users call it.
        stated: names and values of the arguments that state the end.
        steps: number of steps of a trial until the end.
        sizes: whether a scheduler, or other code of the user, depends on the end.
    """

    trainer: str
    stated: tuple[tuple[str, Any], ...]
    steps: int
    sizes: bool

    def __str__(self) -> str:
        return limits(self.trainer, dict(self.stated))


def limits(trainer: str, stated: Mapping[str, Any]) -> str:
    """Describe a trainer by the arguments that state its end."""
    return f"{trainer}({', '.join(f'{name}={value}' for name, value in stated.items())})"


def no_end(name: str, remedy: str) -> UsageError:
    """Return the error for code that reads ``trainer.{name}`` although no argument states the end of training."""
    return UsageError(
        f"your code reads trainer.{name}, but no argument of this trainer states the length of training. State it, "
        f"{remedy}, or let the space describe how the rate changes (s.onecycle, s.cosine, s.linear), so that trials of "
        f"all lengths share their steps"
    )
