"""Evaluation of a model: in evaluation mode, without gradients, and with tensors on the CPU as inputs as well."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

_CPU = torch.device("cpu")


@contextmanager
def evaluating(model: torch.nn.Module, device: torch.device) -> Iterator[None]:
    """Put a model on ``device`` into evaluation mode; every module's own mode is restored at the end.

    Code such as ``model(self.test_x)``, written on a machine without a GPU, passes tensors on the CPU. They are moved
    to ``device``, and if all inputs were on the CPU, outputs are moved back. This concerns calls of the model itself,
    not of its methods and submodules, and tensors in tuples, lists and dicts, too.
    """
    modes = [(module, module.training) for module in model.modules()]
    # A ScriptModule has no such hooks.
    hooks = [] if device.type == "cpu" or isinstance(model, torch.jit.ScriptModule) else _hooked(model, device)
    model.eval()
    try:
        with torch.no_grad():
            yield
    except RuntimeError as error:
        if "device" in str(error) or "cuda" in str(error).lower():
            error.add_note(
                f"The model is on {device}. Move the tensors there that evaluate() passes to it or compares with its "
                f"results."
            )
        raise
    finally:
        for module, training in modes:
            module.training = training
        for hook in hooks:
            hook.remove()


def _hooked(model: torch.nn.Module, device: torch.device) -> list[Any]:
    returns: list[bool] = []  # of each call that has not ended, whether its outputs go to the CPU

    def before(module: torch.nn.Module, args: Any, kwargs: Any) -> Any:
        devices = {leaf.device.type for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        returns.append(devices == {"cpu"})
        if "cpu" in devices:
            return _moved((args, kwargs), device)
        return None

    def after(module: torch.nn.Module, args: Any, outputs: Any) -> Any:
        return _moved(outputs, _CPU) if returns.pop() else None

    return [
        model.register_forward_pre_hook(before, with_kwargs=True),
        model.register_forward_hook(after, always_call=True),
    ]


def _moved(values: Any, device: torch.device) -> Any:
    return pytree.tree_map_only(Tensor, lambda tensor: tensor.to(device), values)
