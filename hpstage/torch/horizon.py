"""The total number of steps that a trainer's code may read: one rule for the libraries' trainers, Lightning's and
Hugging Face's.

What their arguments state (``max_steps``, ``max_epochs``, ``num_train_epochs``) is what code gets that reads it,
schedulers above all, as under that trainer alone. It is in the workload's key as all arguments are, and trials end
there at the latest. Where the arguments state nothing, there is no answer, since trials of different lengths share
their steps: code that reads it is refused by name.
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
        trainer: whose arguments these are, as users call it.
        stated: the arguments.
        steps: where training ends, in steps of trials.
        sizes: whether a scheduler, or other code of the user's, goes by it.
    """

    trainer: str
    stated: tuple[tuple[str, Any], ...]
    steps: int
    sizes: bool

    def __str__(self) -> str:
        return limits(self.trainer, dict(self.stated))


def limits(trainer: str, stated: Mapping[str, Any]) -> str:
    """Describe a trainer by what its arguments state."""
    return f"{trainer}({', '.join(f'{name}={value}' for name, value in stated.items())})"


def no_end(name: str, remedy: str) -> UsageError:
    """Return the error for code that reads the attribute ``name`` of a trainer whose arguments state no end."""
    return UsageError(
        f"your code reads trainer.{name}, but no argument of this trainer states its length. State it, {remedy}, or "
        f"let the space describe how the rate changes (s.onecycle, s.cosine, s.linear), so that trials of all lengths "
        f"share their steps"
    )
