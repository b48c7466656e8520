"""Refuses, before a search starts, methods of a Trainer subclass or of a callback that the search never calls."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

from transformers import Trainer, TrainerCallback
from transformers.trainer_callback import DefaultFlowCallback, PrinterCallback

from hpstage.errors import UsageError
from hpstage.training.warned import warn_once

_NEVER_CALLED = {
    "train": "hpstage runs the loop",
    "_inner_training_loop": "hpstage runs the loop",
    "_run_epoch": "hpstage runs the loop",
    "create_optimizer_and_scheduler": "override create_optimizer and create_scheduler",
}
"""Methods of Trainer that decide training but that hpstage replaces, with the reason or the remedy."""

_EVENTS = frozenset(
    f"on_{name}"
    for name in (
        *("init_end", "train_begin", "step_begin", "substep_end", "pre_optimizer_step", "optimizer_step", "step_end"),
        "prediction_step",
    )
)
"""Events of callbacks that happen at the same steps, no matter how training is cut into stages."""


_SHOW = frozenset(("trl.trainer.callbacks", f"{name}Callback") for name in ("RichProgress", "LogCompletions", "Weave"))
"""Callbacks of other libraries that only display."""


def see_trainer(make: Any) -> None:
    """Raise :class:`UsageError` if a subclass of Trainer overrides a method that is not called."""
    kind = make.func if isinstance(make, partial) else make
    for name, why in _NEVER_CALLED.items():
        if isinstance(kind, type) and getattr(kind, name, None) is not getattr(Trainer, name, None):
            raise UsageError(f"{kind.__name__}.{name}() is not called in a search: {why}")


def see_collator(collator: Any) -> None:
    """Raise :class:`UsageError` if a data collator seeds its own generator, since each process would seed it again."""
    seed = getattr(collator, "seed", None)
    if seed is not None and hasattr(collator, "create_rng"):
        raise UsageError(
            f"{type(collator).__name__}(seed={seed!r}) seeds a generator in each process that uses it, so a trial's "
            f"random numbers would depend on the process that trains it. Leave `seed` out to use the trial's own seed"
        )


def used_callbacks(callbacks: Iterable[Any]) -> list[Any]:
    """Return the callbacks without those of transformers that only display or save, which a warning names.

    Raises:
        UsageError: a callback stops trials early, or has a method for an event that does not happen.
    """
    used = []
    for callback in callbacks:
        kind = callback if isinstance(callback, type) else type(callback)
        if not issubclass(kind, TrainerCallback):
            raise UsageError(f"callbacks has a {kind.__name__}; it must be a TrainerCallback")
        if kind.__name__ == "EarlyStoppingCallback":
            raise UsageError(
                "EarlyStoppingCallback is not supported in a search. Use an algorithm that ends trials early (ASHA, "
                "MedianStopping); result.load(trial, 'best') gives the best state"
            )
        if kind.__module__.partition(".")[0] == "transformers" or (kind.__module__, kind.__name__) in _SHOW:
            warn_once(f"{kind.__name__} is not used in a search, which does its own logging and saving")
            continue
        events = (name for name in dir(kind) if name.startswith("on_"))
        strange = [
            name
            for name in events
            if name not in _EVENTS and getattr(kind, name) is not getattr(TrainerCallback, name, None)
        ]
        if strange:
            raise UsageError(
                f"{kind.__name__}.{strange[0]}() is not called in a search, which cuts training into stages and "
                f"decides when to evaluate and save. Use {', '.join(sorted(_EVENTS))}, and state.global_step"
            )
        used.append(callback)
    return used


def drop_callbacks(trainer: Any) -> None:
    """Remove from a Trainer the callbacks that only display or save; its class may have added some.

    Raises:
        UsageError: as :func:`used_callbacks`.
    """
    for callback in [*trainer.callback_handler.callbacks]:
        root = type(callback).__module__.partition(".")[0]
        if root == "sentence_transformers":  # they collect data for a model card
            continue
        if isinstance(callback, _USUAL) or not used_callbacks([callback]):
            trainer.remove_callback(callback)


_USUAL = (DefaultFlowCallback, PrinterCallback)
