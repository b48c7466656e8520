"""Inspection of a trainable's code: does it mention gradients or settings, or what compiled code would silently leave
out?"""

from __future__ import annotations

from typing import Any

import torch

from hpstage.torch.trainable import TorchTrainable
from hpstage.training.code.graph import functions_reached
from hpstage.training.code.names import names_in

_BACKWARD_OF_BACKWARD = "create_graph"
_SEES_TYPES = {"isinstance", "type"}
_MODES = {"no_grad", "enable_grad", "set_grad_enabled", "requires_grad", "requires_grad_", "is_grad_enabled"}


def obstacle_in_code(code: type[TorchTrainable]) -> str | None:
    """Return why the code of a trainable must not be compiled; ``None`` if it may be."""
    own_update = code.update is not TorchTrainable.update
    for function in functions_reached(code):
        if "grad" in names_in(function.__code__) and not own_update:
            return f"{function.__qualname__} reads gradients, which belong to no parameter in compiled code"
        constants = function.__code__.co_consts
        if any(isinstance(value, tuple) and _BACKWARD_OF_BACKWARD in value for value in constants):
            return f"{function.__qualname__} differentiates gradients"
        if "hp" in names_in(function.__code__) and _SEES_TYPES.intersection(names_in(function.__code__)):
            return f"{function.__qualname__} reads the type of a hyperparameter, which is a tensor in compiled code"
    return None


def obstacle_in_training(model: torch.nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> str | None:
    """Return why this step cannot be compiled; ``None`` if it can be."""
    for group in optimizer.param_groups:
        if not any(param.requires_grad for param in group["params"]):
            return "a param group has no parameter that requires gradients"
        for param in group["params"]:
            if param._backward_hooks or param._post_accumulate_grad_hooks:
                return "a parameter has a hook that sees its gradient"
    for module in model.modules():
        if module._backward_hooks or module._backward_pre_hooks:
            return f"a {type(module).__name__} has a backward hook"
    return None if _is_tensors(batch) else "a batch holds other objects than tensors"


def _is_tensors(batch: Any) -> bool:
    if isinstance(batch, dict):
        return all(map(_is_tensors, batch.values()))
    if type(batch) in (tuple, list) or (isinstance(batch, tuple) and hasattr(batch, "_fields")):
        return all(map(_is_tensors, batch))
    return type(batch) is torch.Tensor


def names_gradients(code: type) -> bool:
    """Return whether the user's code mentions gradients, so that their values may matter."""
    names = {name for function in functions_reached(code) for name in names_in(function.__code__)}
    return any("grad" in name for name in names - _MODES)


def read_in_training(code: type[TorchTrainable]) -> list[str]:
    """Return the attributes meant only for speed that the user's code reads during training, where they may change
    results."""
    before = {"__init__", "dataset"}  # they set the attributes, or read them for data, whose key covers that
    functions = [function for function in functions_reached(code) if function.__name__ not in before]
    read = {name for function in functions for name in names_in(function.__code__)}
    return sorted(read.intersection(code._without_keys))
