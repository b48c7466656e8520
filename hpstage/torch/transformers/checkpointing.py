"""Lets a trainer switch activation checkpointing off and on again within a step without creating new hooks.

TRL does so to generate text and to run the reference model.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel


@contextmanager
def only_switched(model: torch.nn.Module) -> Iterator[None]:
    """Return a context in which switching a model's activation checkpointing only sets flags.

    Otherwise, transformers would create hooks and functions each time, which are equal to the previous ones but cannot
    be part of a state. The existing hooks, which make the model's inputs require gradients, can stay: they have no
    effect without gradients, as in generation.
    """
    models = [module for module in model.modules() if isinstance(module, PreTrainedModel)]
    switched: list[Any] = [module for module in model.modules() if getattr(module, "gradient_checkpointing", False)]

    def switch(enable: bool = True, **others: object) -> None:
        for module in switched:
            module.gradient_checkpointing = enable

    for module in models:
        vars(module).update({**dict.fromkeys(_HOOKS, _nothing), _SWITCH: switch})
    try:
        yield
    finally:
        for module in models:
            for name in (*_HOOKS, _SWITCH):
                del vars(module)[name]


_HOOKS = ("enable_input_require_grads", "disable_input_require_grads")
_SWITCH = "_set_gradient_checkpointing"


def _nothing() -> None:
    """Leave the hooks as they are."""
