"""A member's step as a function of tensors: ``update()``, with the model's tensors and the batch as arguments, and
stand-ins for the optimizer and the hyperparameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Never

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from hpstage.checkpoints import lazy_copies
from hpstage.schedule import Scalar
from hpstage.torch.backends.backend import NeedsPython, NotStackable
from hpstage.torch.backends.stacked.signature import overlapping
from hpstage.torch.trainable import TorchTrainable
from hpstage.training.step_log import checked_name, recording, snapshot


class OneStep:
    """Calls ``subject.update()`` and returns the loss, the gradients that the optimizer would step with, all other
    tensors of the model, and the tensors that are logged. The model, the optimizer and the batch stay as they are.

    Raises:
        NeedsPython: the optimizer trains parameters that the model does not have, or a parameter has hooks on its
            gradient.
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
                raise NeedsPython(f"the parameter {name} has hooks, which a stack would not call")
        self.groups: dict[str, int] = {}
        """The index of the param group of each parameter that the optimizer trains, by name."""
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
        dtype = next(iter(self._parameters.values())).dtype  # else numbers could turn results into float64
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
        """The logs of the last call: names and numbers, with None for the number if a tensor was logged."""

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
            raise NeedsPython(f"{self.who} has trained without calling optimizer.step()")
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


class StandInOptimizer:
    """Records the gradients that an optimizer would step with, by the parameters' names."""

    def __init__(
        self, who: str, optimizer: torch.optim.Optimizer, leaves: dict[str, Tensor], names: Mapping[int, str]
    ) -> None:
        self._who = who
        self.leaves = leaves
        self._trained = [names[id(p)] for group in optimizer.param_groups for p in group["params"]]
        self.param_groups = [
            _Group(who, [leaves[names[id(p)]] for p in group["params"]]) for group in optimizer.param_groups
        ]
        self.gradients: dict[str, Tensor | None] | None = None

    def zero_grad(self, set_to_none: bool = True) -> None:
        for name in self._trained:
            leaf = self.leaves[name]
            leaf.grad = None if set_to_none or leaf.grad is None else torch.zeros_like(leaf)

    def step(self, closure: Callable[[], Any] | None = None) -> None:
        if closure is not None:
            raise NeedsPython(f"{self._who} passes a closure to optimizer.step()")
        if self.gradients is not None:
            raise NeedsPython(f"{self._who} calls optimizer.step() twice")
        gradients = {name: self.leaves[name].grad for name in self._trained}
        self.gradients = {name: None if grad is None else grad.detach().clone() for name, grad in gradients.items()}

    def __getattr__(self, name: str) -> Never:
        raise NeedsPython(f"{self._who} uses optimizer.{name}")


class _Group(dict[str, Any]):
    """A param group of which only the parameters can be read."""

    def __init__(self, who: str, parameters: list[Tensor]) -> None:
        super().__init__(params=parameters)
        self._who = who

    def __missing__(self, name: str) -> Never:
        raise NeedsPython(f"{self._who} reads {name!r} of a param group")

    def __setitem__(self, name: str, value: Any) -> Never:
        raise NeedsPython(f"{self._who} sets {name!r} of a param group")


_LEAVES_TORCH = {"numpy", "tolist", "__array__", "__dlpack__", "data_ptr", "storage", "untyped_storage"}


class Recorded(TorchFunctionMode):
    """Refuses operations that a recording would not see or not repeat: values that leave torch, changes to tensors that
    do not belong to the step, and uses of parameters after the optimizer's step, when they still have their old values.

    Args:
        own: tensors of the step: parameters, buffers, the batch. Tensors that the step creates are added.
        numbers: tensors that stand for numbers. A value that code computes only from numbers is also a number, and is
            not changed in place.
    """

    def __init__(
        self, who: str, optimizer: StandInOptimizer, own: Iterable[Tensor], numbers: Iterable[Tensor] = ()
    ) -> None:
        super().__init__()
        self._who = who
        self._optimizer = optimizer
        self._leaves = {id(leaf) for leaf in optimizer.leaves.values()}
        self._own = {id(tensor): tensor for tensor in own}
        self._foreign: dict[int, tuple[Tensor, int]] = {}
        self._numbers = {id(tensor): tensor for tensor in numbers}
        self._error: Exception | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        given = [value for value in _flat((args, kwargs)) if isinstance(value, Tensor)]
        if self._optimizer.gradients is not None and any(id(tensor) in self._leaves for tensor in given):
            raise NeedsPython(f"{self._who} uses parameters after optimizer.step() (an average of weights?)")
        if name in _LEAVES_TORCH:
            raise NeedsPython(f"{self._who} looks at a tensor's values in Python, by {name}()")
        of_numbers = bool(given) and all(id(tensor) in self._numbers for tensor in given)
        if given and id(given[0]) in self._numbers and _is_in_place(name):
            name = name.rstrip("_")
            func = getattr(Tensor, name)
        for tensor in given:
            if id(tensor) not in self._own:
                self._foreign.setdefault(id(tensor), (tensor, tensor._version))
        changed = [*given[:1], kwargs.get("out")] if _is_in_place(name) else [kwargs.get("out")]
        if any(id(tensor) in self._foreign for tensor in changed):
            self._refuse(name)
        try:
            result = func(*args, **kwargs)
        except Exception as error:
            self._error = error
            raise
        for tensor in _flat(result):
            if isinstance(tensor, Tensor) and id(tensor) not in self._foreign:
                self._own[id(tensor)] = tensor  # held, so that no other tensor gets its id
                if of_numbers and hasattr(Tensor, name):
                    self._numbers[id(tensor)] = tensor
        return result

    def check(self) -> None:
        """Raise an error if the step has changed further tensors, or if the user's code has caught torch's error."""
        if self._error is not None:
            caught = f"{self._who} catches an error of torch's, {first_line(self._error)}"
            # An error that depends on the present values does not rule out a recording with other values.
            raise (NeedsPython if needs_value(self._error) else NotStackable)(caught)
        if any(tensor._version != version for tensor, version in self._foreign.values()):
            self._refuse("an operation")

    def _refuse(self, name: str) -> Never:
        raise NeedsPython(f"{self._who} changes a tensor that is neither a parameter nor a buffer, by {name}")


def needs_value(error: Exception) -> bool:
    """Return whether an error says that a value was needed where only operations are recorded."""
    return "tracing tensor" in str(error)


def first_line(error: Exception) -> str:
    """Return an error's message in one line."""
    if needs_value(error):
        return "Python looks at a tensor's value"
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0].rstrip('.') if lines else ''}"


def _is_in_place(name: str) -> bool:
    if name.startswith("__"):
        return name == "__setitem__" or name.startswith("__i")
    return name.endswith("_")


def _flat(value: Any) -> Iterator[Any]:
    if isinstance(value, tuple | list):
        for item in value:
            yield from _flat(item)
    elif isinstance(value, dict):
        yield from _flat(tuple(value.values()))
    else:
        yield value


class StandInValues(Mapping[str, Any]):
    """Hyperparameters while ``update()`` is traced. Floats are 0-dimensional tensors, so that members may differ in
    them. All other values stay as they are, and must be equal for all members."""

    def __init__(self, hp: Mapping[str, Scalar]) -> None:
        self._hp = dict(hp)
        self.tensors: Mapping[str, Tensor] | None = None
        """The tensors that stand for floats; None if floats stay as they are, too."""
        self.fixed: dict[str, Scalar] = {}
        self.absent: set[str] = set()
        """Names that were looked up, but do not exist."""
        self.listed = False
        """Whether the step has listed the names, so that it may depend on all of them."""
        self._last: str | None = None

    def __getitem__(self, name: str) -> Any:
        if name not in self._hp:
            self.absent.add(name)
        value = self._hp[name]
        if type(value) is not float:
            self.fixed[name] = value
        elif self.tensors is not None:
            self._last = name
            return self.tensors[name]
        return value

    def __iter__(self) -> Iterator[str]:
        self.listed = True
        return iter(self._hp)

    def __len__(self) -> int:
        self.listed = True
        return len(self._hp)

    def fits(self, hp: Mapping[str, Scalar]) -> bool:
        """Return whether the step would read the same values from these hyperparameters, except for those read as
        tensors."""
        return (
            all(name in hp and (type(hp[name]), hp[name]) == (type(v), v) for name, v in self.fixed.items())
            and self.absent.isdisjoint(hp)
            and (not self.listed or self._hp.keys() == hp.keys())
        )

    @property
    def decisive(self) -> object:
        """The values read that decide the step, equal for equal steps; True differs from 1."""
        fixed = {name: (type(value), value) for name, value in self.fixed.items()}
        return fixed, self.absent, self._hp.keys() if self.listed else None

    def blamed(self) -> str:
        """Return a hint to the possible cause of an error: the float that was read last."""
        return "" if self._last is None else f", perhaps since the hyperparameter {self._last!r} is a tensor here"
