"""Stand-ins for the optimizer and the hyperparameters while ``update()`` is traced."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Never

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from hpstage.schedule import Scalar
from hpstage.torch.backends.backend import NeedsPython, NotStackable


class StandInOptimizer:
    """Notes the gradients that an optimizer would step with, by the parameters' names."""

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
            raise NeedsPython(f"{self._who} gives the optimizer a closure")
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
    """Refuses what a recording would not see, or not repeat: values that leave torch, changes to tensors of nobody's,
    and parameters that are used after the optimizer's step, where they still have their values from before it.

    Args:
        own: tensors of the step: parameters, buffers, the batch. Tensors that it makes are added.
        numbers: tensors that stand for numbers. What code makes of numbers alone is a number as well, and is not
            changed in place.
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
                self._own[id(tensor)] = tensor  # held, so that no other has its identity
                if of_numbers and hasattr(Tensor, name):
                    self._numbers[id(tensor)] = tensor
        return result

    def check(self) -> None:
        """Look, at the end, whether anything else has been changed after all, or an error has been caught."""
        if self._error is not None:
            caught = f"{self._who} catches an error of torch's, {first_line(self._error)}"
            # An error for the values at hand says nothing of other values, with which others may have been recorded.
            raise (NeedsPython if needs_value(self._error) else NotStackable)(caught)
        if any(tensor._version != version for tensor, version in self._foreign.values()):
            self._refuse("an operation")

    def _refuse(self, name: str) -> Never:
        raise NeedsPython(f"{self._who} changes a tensor that is neither a parameter nor a buffer, by {name}")


def needs_value(error: Exception) -> bool:
    """Return whether an error says that a value was needed where only operations are recorded."""
    return "tracing tensor" in str(error)


def first_line(error: Exception) -> str:
    """Return what an error says, in a line."""
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
    """Hyperparameters while ``update()`` is traced: floats are tensors without dimensions, so that members may differ
    in them; all others are themselves, and then members may not."""

    def __init__(self, hp: Mapping[str, Scalar]) -> None:
        self._hp = dict(hp)
        self.tensors: Mapping[str, Tensor] | None = None
        """What stands for floats, or None: then these are themselves, too."""
        self.fixed: dict[str, Scalar] = {}
        self.absent: set[str] = set()
        """Names that were looked up, but do not exist."""
        self.listed = False
        """Whether it matters which names there are."""
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
        """Return whether other hyperparameters give all that was read from these, except tensors in their place."""
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
        """Return what an error may come from: the float that was read last."""
        return "" if self._last is None else f", perhaps for the hyperparameter {self._last!r}, here a tensor"
