"""The step at which TrainingArguments end training, and whether a scheduler depends on it."""

from __future__ import annotations

import math
from typing import Any

from transformers import Trainer, TrainingArguments

from hpstage.torch.horizon import Horizon, limits

LENGTH = ("max_steps", "num_train_epochs")
"""Fields that state the end. One of them always states it: the default is 3 epochs."""
_TRAINER = "TrainingArguments"
_EVEN = ("constant", "constant_with_warmup", "inverse_sqrt")
"""Schedulers that do not depend on the end, unless their warm-up is a fraction of all steps."""


def updates_in(args: TrainingArguments, batches: int) -> tuple[int, int]:
    """Return the number of updates in an epoch, and in all training, as Trainer counts them."""
    of_epoch = math.ceil(batches / args.gradient_accumulation_steps)
    return of_epoch, args.max_steps if args.max_steps > 0 else math.ceil(args.num_train_epochs * of_epoch)


def see_end(trainer: Any, batches: int) -> None:
    """Set the end of training in a Trainer's state, as ``Trainer.train()`` does."""
    args, state = trainer.args, trainer.state
    of_epoch, state.max_steps = updates_in(args, batches)
    state.num_train_epochs = math.ceil(state.max_steps / of_epoch if args.max_steps > 0 else args.num_train_epochs)


def end_of(trainer: Any) -> str | None:
    """Return why training has ended; ``None`` if it continues. If no scheduler of the arguments is used, the steps of
    the trial decide its end, not the arguments."""
    if trainer.lr_scheduler is None or trainer.state.global_step < trainer.state.max_steps:
        return None
    return f"{limits(_TRAINER, _stated(trainer.args))} ends training in update {trainer.state.global_step}"


def has_own_scheduler(kind: type) -> bool:
    """Return whether a subclass of Trainer overrides ``create_scheduler``."""
    usual = Trainer.create_scheduler
    return getattr(kind, "create_scheduler", usual) is not usual


def horizon_of(trainer: Any, batches: int, *, by_epoch: bool) -> Horizon | None:
    """Return the end of training that the arguments state, in steps of trials; ``None`` without a scheduler."""
    if trainer.lr_scheduler is None:
        return None
    args, steps = trainer.args, trainer.state.max_steps
    sizes = 0 < args.warmup_steps < 1 or str(args.lr_scheduler_type.value) not in _EVEN
    sizes |= has_own_scheduler(type(trainer))
    if by_epoch:
        steps = math.ceil(steps / updates_in(args, batches)[0])
    return Horizon(_TRAINER, tuple(_stated(args).items()), steps, sizes)


def _stated(args: TrainingArguments) -> dict[str, Any]:
    name = LENGTH[args.max_steps <= 0]
    return {name: getattr(args, name)}
