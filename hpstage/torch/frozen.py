"""Frozen tensors of a model: they share memory with their copies, and with equal models in this process, until one of
them is written to.

A later write changes no other tensor, so it need not be foreseen: see :mod:`hpstage.checkpoints.lazy_copies`.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import takewhile

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from hpstage.checkpoints import lazy_copies, leaves


def frozen_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors that the optimizer does not hold, by name: buffers, and parameters that are not trained yet."""
    trained = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    for name, tensor in tensors_of(model).items():
        if id(tensor) not in trained:
            yield name, tensor


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    return dict(model.named_buffers()) | dict(model.named_parameters())


def frozen_shares(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[float, float]:
    """Return two shares of a model's weights: the frozen ones, and the frozen ones before the first trained one.

    The order is that of the model's modules, in which they are mostly applied. Weights of embeddings, which are looked
    up, and vectors do not count.
    """
    looked_up = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding | nn.EmbeddingBag)}
    kept = {id(tensor) for _, tensor in frozen_tensors(model, optimizer)}
    weights = [
        (weight.numel(), id(weight) in kept or not weight.requires_grad)
        for weight in model.parameters()
        if id(weight) not in looked_up and not nn.parameter.is_lazy(weight) and weight.dim() > 1
    ]
    total = max(1, sum(size for size, _ in weights))
    before = takewhile(operator.itemgetter(1), weights)
    return sum(size for size, frozen in weights if frozen) / total, sum(size for size, _ in before) / total


def share(tensor: Tensor, *others: Tensor) -> None:
    """Allow lazy copies of a tensor, or make the tensor itself a lazy copy of another one that is equal. A tensor in a
    mapped file, which cannot have lazy copies, is moved out of the file."""
    lazy = lazy_copies.allow_copies(tensor)
    if not lazy and not lazy_copies.is_mapped(tensor):
        return
    for other in others:
        if lazy_copies.allow_copies(other) and leaves.same_bytes(tensor, other):
            tensor.data = torch._lazy_clone(other.detach())
            return
    if not lazy:
        tensor.data = tensor.detach().clone()
        lazy_copies.allow_copies(tensor)


@contextmanager
def sharing_with(others: Iterable[Tensor], may: Callable[[Tensor], bool]) -> Iterator[None]:
    """Return a context in which to make a model: its parameters share memory with equal tensors among ``others``. At
    most one layer at a time is in memory twice.

    A parameter is compared when the next module registers a parameter: by then, its own module has filled it. A later
    write to the parameter copies it first.

    Args:
        others: tensors of models in this process.
        may: returns whether a parameter may be shared at all.
    """
    known: dict[object, list[Tensor]] = defaultdict(list)
    for other in others:
        if lazy_copies.is_lazy(other):
            known[_form(other)].append(other)
    if not known:
        yield
        return
    filled: list[tuple[nn.Module, nn.Parameter]] = []

    def registered(module: nn.Module, name: str, parameter: Tensor) -> None:
        while filled and filled[0][0] is not module:
            _, earlier = filled.pop(0)
            same = [other for other in known.get(_form(earlier), ()) if _begin_equally(earlier, other)]
            if same and may(earlier):
                share(earlier, *same)
        if type(parameter) is nn.Parameter:
            filled.append((module, parameter))

    handle = register_module_parameter_registration_hook(registered)
    try:
        yield
    finally:
        handle.remove()


def _form(tensor: Tensor) -> object:
    return tensor.shape, tensor.dtype, tensor.layout, tensor.device


def _begin_equally(one: Tensor, other: Tensor) -> bool:
    """Return whether the first elements of two tensors of the same form are equal."""
    return torch.equal(one.detach().flatten()[:16], other.detach().flatten()[:16])
