"""A member of a bundle: its own model and optimizer, and how they are read and written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from hpstage.torch.backends.backend import NotStackable
from hpstage.torch.backends.stacked.optimizers import formula_of
from hpstage.torch.backends.stacked.streams import generator_of
from hpstage.torch.backends.stacked.tracing import Trace


class Member:
    """A model with its optimizer, which a bundle trains in their place until it writes into them.

    Args:
        trace: of its next step, if that is known.

    Raises:
        NeedsPython: there is no stacked form of the optimizer.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, trace: Trace | None = None) -> None:
        self.model, self.optimizer = model, optimizer
        self.parameters = dict(model.named_parameters())
        self.formulas = [formula_of(optimizer, group) for group in optimizer.param_groups]
        self._form: list[object] = [(name, tensor.shape, tensor.dtype) for name, tensor in self.tensors().items()]
        names = {id(parameter): name for name, parameter in self.parameters.items()}
        self._form += [[names.get(id(p)) for p in group["params"]] for group in optimizer.param_groups]
        self.frozen: dict[str, Tensor] = {}
        """Copies of its tensors that steps leave as they are, which others may have in common with it; its model has
        their values."""
        self.taken = 0
        """Steps since it joined."""
        self.trace: Trace | None = trace
        """The trace of its step on batches of the shape that it had last."""
        self._steps: dict[int, int] = {}
        """Steps of each param group, by the optimizer's state."""
        device = next(iter(self.parameters.values())).device
        self.stream: Tensor = generator_of(device).get_state()
        """The state of torch's generator from which the next step draws. Set it before each step."""

    def steps_like(self, other: Member) -> bool:
        """Return whether the optimizer of ``other`` has the same formulas, and its tensors the same form."""
        return self.formulas == other.formulas and self._form == other._form

    def fits(self) -> bool:
        """Return whether the optimizer still steps by the formulas with which the member joined."""
        groups = self.optimizer.param_groups
        return all(formula.fits(group) for formula, group in zip(self.formulas, groups, strict=True))

    def numbers(self, index: int) -> list[float]:
        return list(self.formulas[index].numbers(self.optimizer.param_groups[index], self._steps[index]))

    def count_step(self) -> None:
        self.taken += 1
        for index in self._steps:
            self._steps[index] += 1

    def tensors(self) -> dict[str, Tensor]:
        """Return parameters and buffers by name."""
        return self.parameters | dict(self.model.named_buffers())

    def state(self, index: int, names: Sequence[str]) -> list[list[Tensor] | None]:
        """Return the optimizer's tensors for the trained parameters of a group, by what they are; None before its first
        step."""
        formula = self.formulas[index]
        states = [self.optimizer.state.get(self.parameters[name], {}) for name in names]
        found = set()
        for known in states:
            there = bool(formula.state) and all(isinstance(known.get(what), Tensor) for what in formula.state)
            found.add(int(known["step"]) if there and formula.counts else int(there))
        if len(found) > 1:
            raise NotStackable(f"the parameters of param group {index} have taken different numbers of steps")
        (self._steps[index],) = found
        return [[known[what] for known in states] if self._steps[index] else None for what in formula.state]

    def write(
        self, index: int, names: Sequence[str], weights: Sequence[Tensor], state: Sequence[Sequence[Tensor]]
    ) -> None:
        """Write a group's parameters and what the optimizer knows of them."""
        formula = self.formulas[index]
        with torch.no_grad():
            for position, name in enumerate(names):
                parameter = self.parameters[name]
                parameter.copy_(weights[position])
                parameter.grad = None
                known = self.optimizer.state[parameter] if formula.state else {}
                if formula.counts:
                    dtype = torch.float64 if torch.get_default_dtype() == torch.float64 else torch.float32
                    known.setdefault("step", torch.zeros((), dtype=dtype)).fill_(float(self._steps[index]))
                for what, tensors in zip(formula.state, state, strict=True):
                    if isinstance(known.get(what), Tensor):
                        known[what].copy_(tensors[position])
                    else:
                        known[what] = tensors[position].clone(memory_format=torch.contiguous_format)

    def write_kept(self, tensors: Mapping[str, Tensor]) -> None:
        """Write buffers, and parameters that are not trained."""
        own = self.tensors()
        with torch.no_grad():
            for name, tensor in tensors.items():
                own[name].copy_(tensor)
