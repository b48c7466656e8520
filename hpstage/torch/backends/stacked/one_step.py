"""A member's step as a function of tensors: ``update()``, with the model's tensors and the batch as arguments."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils import _pytree as pytree

from hpstage.checkpoints import lazy_copies
from hpstage.schedule import Scalar
from hpstage.torch.backends.backend import NeedsPython
from hpstage.torch.backends.stacked.signature import overlapping
from hpstage.torch.backends.stacked.stand_ins import Recorded, StandInOptimizer, StandInValues
from hpstage.torch.trainable import TorchTrainable
from hpstage.training.step_log import checked_name, recording, snapshot


class OneStep:
    """Calls ``subject.update()`` and returns the loss, the gradients it would step with, all other tensors of the
    model's, and the tensors that it logs. The model, the optimizer and the batch stay as they are.

    Raises:
        NeedsPython: the optimizer trains what the model does not have, or gradients are seen by hooks.
    """

    def __init__(
        self,
        subject: TorchTrainable,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        batch: Any,
        hp: Mapping[str, Scalar],
    ) -> None:
        self.who = f"{type(subject).__name__}.update()"
        self._subject, self._model, self._optimizer = subject, model, optimizer
        self._parameters = dict(model.named_parameters())
        self._names = {id(parameter): name for name, parameter in self._parameters.items()}
        for name, parameter in self._parameters.items():
            if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
                raise NeedsPython(f"the parameter {name} has hooks, which see no gradients of a stack")
        self.groups: dict[str, int] = {}
        """The param group of each parameter that the optimizer has."""
        for index, group in enumerate(optimizer.param_groups):
            for parameter in group["params"]:
                if id(parameter) not in self._names:
                    raise NeedsPython(f"{type(optimizer).__name__} trains parameters that the model does not have")
                self.groups[self._names[id(parameter)]] = index
        tensors = self._parameters | dict(model.named_buffers())
        self.overlapping = list(overlapping(tensors))
        self.state = {name: lazy_copies.clone(tensor) for name, tensor in tensors.items()}
        self._leaves, self._spec = pytree.tree_flatten(batch)
        self.tensors = [leaf.detach().clone() for leaf in self._leaves if isinstance(leaf, Tensor)]
        dtype = next(iter(self._parameters.values())).dtype  # of double precision, numbers would make tensors so
        self.values = {name: torch.tensor(value, dtype=dtype) for name, value in hp.items() if type(value) is float}
        self.left = {
            name: torch.zeros_like(self.state[name])
            for name, parameter in self._parameters.items()
            if parameter.requires_grad
        }
        """Gradients that an earlier step might have left behind."""
        self.read = StandInValues(hp)
        self.stepped: list[str] = []
        """Parameters that had gradients in the last call, by name."""
        self.logged: list[tuple[str, float | None]] = []
        """What the last call has logged: names, and numbers that are no tensors."""

    def __call__(
        self,
        state: Mapping[str, Tensor],
        values: Mapping[str, Tensor] | None,
        tensors: list[Tensor],
        left: Mapping[str, Tensor],
    ) -> list[Tensor | None]:
        """Take a step, with hyperparameters as tensors, or as plain numbers if ``values`` is ``None``."""
        members = {
            name: tensor.detach().requires_grad_(self._parameters[name].requires_grad)
            if name in self._parameters
            else tensor.clone()
            for name, tensor in state.items()
        }
        for name, gradient in left.items():
            members[name].grad = gradient.clone()
        leaves = {name: members[name] for name in self._parameters}
        optimizer = StandInOptimizer(self.who, self._optimizer, leaves, self._names)
        self.read.tensors = values
        batch_tensors = [tensor.clone() for tensor in tensors]
        given = iter(batch_tensors)
        filled = [next(given) if isinstance(leaf, Tensor) else leaf for leaf in self._leaves]
        batch = pytree.tree_unflatten(filled, self._spec)

        def update(model: nn.Module) -> Any:
            own, numbers = (*members.values(), *batch_tensors), () if values is None else values.values()
            with recording(logged), Recorded(self.who, optimizer, own, numbers) as recorded:
                loss = self._subject.update(model, optimizer, batch)  # type: ignore[arg-type]
            recorded.check()
            members.update(self._after(model, members))
            return loss

        logged = _Logged()
        hp = self._subject.hp
        object.__setattr__(self._subject, "hp", self.read)
        try:
            with torch.enable_grad():
                given_members = {f"model.{name}": tensor for name, tensor in members.items()}
                loss = functional_call(_Holder(self._model), given_members, (update,))
        finally:
            object.__setattr__(self._subject, "hp", hp)
        if optimizer.gradients is None:
            raise NeedsPython(f"{self.who} has trained without a call of optimizer.step()")
        if loss is not None and not isinstance(loss, Tensor):
            raise NeedsPython(f"{self.who} returned {type(loss).__name__}, where a stack needs a tensor")
        self.stepped = [name for name, gradient in optimizer.gradients.items() if gradient is not None]
        gradients = [optimizer.gradients[name] for name in self.stepped]
        kept = [members[name].detach() for name in members if name not in self.stepped]
        self.logged = [(name, None if isinstance(value, Tensor) else value) for name, value in logged.values]
        tensors_logged = [value for _, value in logged.values if isinstance(value, Tensor)]
        return [None if loss is None else loss.detach().reshape(()), *gradients, *kept, *tensors_logged]

    def _after(self, model: nn.Module, before: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the buffers that the model has replaced by other tensors."""
        now = dict(model.named_parameters()) | dict(model.named_buffers())
        replaced = {name: tensor for name, tensor in now.items() if tensor is not before.get(name)}
        if now.keys() != before.keys() or replaced.keys() & self._parameters.keys():
            raise NeedsPython(f"{self.who} replaces parameters of the model, or adds or removes buffers")
        for name, tensor in replaced.items():
            if (tensor.shape, tensor.dtype) != (before[name].shape, before[name].dtype):
                raise NeedsPython(f"{self.who} replaces the buffer {name} by one of another shape")
        return replaced


class _Logged:
    """Records logged values unchanged: tensors are part of the recording."""

    def __init__(self) -> None:
        self.values: list[tuple[str, Tensor | float]] = []

    def log(self, name: str, value: Any) -> None:
        if isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex():
            self.values.append((checked_name(name), value.detach().reshape(())))
        else:
            self.values.append((checked_name(name), snapshot(name, value)))


class _Holder(nn.Module):
    """Calls a function of a model whose parameters are replaced during the call."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, function: Callable[[nn.Module], Any]) -> Any:
        return function(self.model)
