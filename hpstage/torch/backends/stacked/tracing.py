"""A member's step as a flat graph: everything up to the gradients, as operations on tensors without side effects.

``update()`` is run once, on tensors that record what is done to them, with a stand-in for the optimizer that notes the
gradients it is asked to step with. So whatever ``update()`` does to gradients before the step (clipping, scaling) is
part of the graph. What it does besides, to Python objects, would not happen again and is refused.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call, functionalize
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from hpstage.schedule import Scalar
from hpstage.torch.backends.stacked.cleaning import clean, lift_constants
from hpstage.torch.backends.stacked.refusal import NotStackable
from hpstage.torch.backends.stacked.stand_ins import Recorded, StandInOptimizer, StandInValues
from hpstage.torch.trainable import TorchTrainable

Effects = Callable[[], Mapping[str, str]]
"""Describes all that training can reach, by path (:meth:`hpstage.torch.loop.TorchLoop.portrait`)."""


@dataclass(frozen=True, eq=False)
class Trace:
    """The graph of one member's step, up to the gradients.

    Its inputs are, in this order, the tensors named in ``trained`` and ``kept``, one float64 tensor without dimensions
    for each of ``values``, the tensors of the batch, and ``constants``. Its outputs are the loss (None if ``update()``
    returns none), a gradient for each of ``trained``, and the new value of each of ``kept``.
    """

    graph: Graph
    trained: tuple[str, ...]
    """Parameters that the optimizer steps, by name, in the order of its groups."""
    groups: tuple[int, ...]
    """The param group of each."""
    kept: tuple[str, ...]
    """All other parameters and all buffers."""
    values: tuple[str, ...]
    """Hyper-parameters that ``update()`` reads and that may differ between members."""
    fixed: Mapping[str, Scalar]
    """Hyper-parameters that it reads and that are part of the graph."""
    constants: tuple[Tensor, ...]
    """Tensors of the user's that the step reads and that belong to no member."""
    versions: tuple[int, ...]
    """How often each of these has been changed."""
    draws: bool
    """Whether it draws random numbers from torch's generator."""

    @property
    def inputs(self) -> list[Node]:
        return [node for node in self.graph.nodes if node.op == "placeholder"]

    def check_constants(self) -> None:
        """Raise :class:`NotStackable` if a tensor that was read has been changed: programs hold its value."""
        for constant, version in zip(self.constants, self.versions, strict=True):
            if constant._version != version:
                raise NotStackable(
                    f"a tensor of shape {tuple(constant.shape)} that steps read, and that is not the "
                    "model's, has been changed between steps"
                )

    def same(self, other: Trace) -> bool:
        """Return whether another member takes the same step."""
        return (
            str(self.graph) == str(other.graph)
            and (self.trained, self.groups, self.kept, self.values)
            == (other.trained, other.groups, other.kept, other.values)
            and self.fixed == other.fixed
            and len(self.constants) == len(other.constants)
            and all(
                a is b or (a.shape == b.shape and a.dtype == b.dtype and bool((a == b).all()))
                for a, b in zip(self.constants, other.constants, strict=True)
            )
        )


def trace(
    subject: TorchTrainable,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: Any,
    hp: Mapping[str, Scalar],
    effects: Effects | None = None,
) -> Trace:
    """Trace ``subject.update(model, optimizer, batch)``. Nothing is trained: all objects are as before.

    Raises:
        NotStackable: ``update()`` needs Python at each step, or does more than compute gradients and step.
    """
    who = f"{type(subject).__name__}.update()"
    parameters, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    names = {id(parameter): name for name, parameter in parameters.items()}
    order = [(names.get(id(p)), index) for index, group in enumerate(optimizer.param_groups) for p in group["params"]]
    if any(name is None for name, _ in order):
        raise NotStackable(f"{type(optimizer).__name__} trains parameters that the model does not have")
    for name, parameter in parameters.items():
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            raise NotStackable(f"the parameter {name} has hooks, which see no gradients of a stack")
    state = {name: tensor.detach().clone() for name, tensor in (parameters | buffers).items()}
    numbers = {name: float(value) for name, value in hp.items() if type(value) is float}
    leaves, spec = pytree.tree_flatten(batch)
    tensors = [leaf.detach().clone() for leaf in leaves if isinstance(leaf, Tensor)]
    read = StandInValues(hp)
    stepped: list[str] = []

    def step(
        state: dict[str, Tensor], values: dict[str, Tensor], tensors: list[Tensor], left: dict[str, Tensor]
    ) -> list[Tensor | None]:
        members = {
            name: tensor.detach().requires_grad_(parameters[name].requires_grad)
            if name in parameters
            else tensor.clone()
            for name, tensor in state.items()
        }
        for name, gradient in left.items():
            members[name].grad = gradient.clone()
        stand_in = StandInOptimizer(who, optimizer, {name: members[name] for name in parameters}, names)
        read.tensors = values
        batch_tensors = [tensor.clone() for tensor in tensors]
        given = iter(batch_tensors)
        inputs = pytree.tree_unflatten([next(given) if isinstance(leaf, Tensor) else leaf for leaf in leaves], spec)

        def update(model: nn.Module) -> Any:
            with Recorded(who, stand_in, (*members.values(), *batch_tensors)) as recorded:
                loss = subject.update(model, stand_in, inputs)  # type: ignore[arg-type]
            recorded.check()
            return loss

        with torch.enable_grad():
            loss = functional_call(_Holder(model), {f"model.{k}": v for k, v in members.items()}, (update,))
        if stand_in.gradients is None:
            raise NotStackable(f"{who} has trained without a call of optimizer.step()")
        if loss is not None and not isinstance(loss, Tensor):
            raise NotStackable(f"{who} returned {type(loss).__name__}, where a stack needs a tensor")
        stepped[:] = [name for name, gradient in stand_in.gradients.items() if gradient is not None]
        kept = [members[name].detach() for name in members if name not in stepped]
        gradients = [stand_in.gradients[name] for name in stepped]
        return [None if loss is None else loss.detach().reshape(()), *gradients, *kept]

    before = (random.getstate(), np.random.get_state(), torch.get_rng_state())
    described = None if effects is None else dict(effects())
    values = {name: torch.tensor(value, dtype=torch.float64) for name, value in numbers.items()}
    left = {name: torch.zeros_like(state[name]) for name, parameter in parameters.items() if parameter.requires_grad}
    hp_before = subject.hp
    object.__setattr__(subject, "hp", read)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            graph = make_fx(step, decomposition_table=_IN_PLACE)(state, values, tensors, left)
    except NotStackable:
        raise
    except Exception as error:
        raise NotStackable(f"{who} needs Python at each step{read.blamed()}: {_first_line(error)}") from error
    finally:
        object.__setattr__(subject, "hp", hp_before)
        drew = random.getstate() != before[0] or not _same_state(np.random.get_state(), before[1])
        random.setstate(before[0])
        np.random.set_state(before[1])
        torch.set_rng_state(before[2])
    if drew:
        raise NotStackable(f"{who} draws from the generator of Python's random or of NumPy, not from torch's")
    if described is not None:
        _no_effects(who, described, dict(effects()))  # type: ignore[misc]
    return _finished(who, graph, (state, values, tensors, left), order, stepped, read)


class _Holder(nn.Module):
    """Calls a function of a model whose parameters are replaced meanwhile."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, function: Callable[[nn.Module], Any]) -> Any:
        return function(self.model)


def _finished(
    who: str,
    recorded: GraphModule,
    examples: tuple[dict[str, Tensor], dict[str, Tensor], list[Tensor], dict[str, Tensor]],
    order: list[tuple[str | None, int]],
    stepped: list[str],
    read: StandInValues,
) -> Trace:
    state, values, tensors, left = examples
    run, constants = lift_constants(recorded)
    if not all(isinstance(constant, Tensor) for constant in constants):
        raise NotStackable(f"{who} draws from a generator of its own, or uses another object of torch's")
    flat = [*state.values(), *values.values(), *tensors, *left.values(), *constants]
    graph = make_fx(functionalize(run, remove="mutations"))(*flat).graph
    clean(graph)
    draws = False
    for node in graph.nodes:
        if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
            continue
        if node.target._schema.is_mutable:
            raise NotStackable(f"{who} changes a tensor that is neither a parameter nor a buffer, by {node.target}")
        tags = node.target.tags
        if torch.Tag.dynamic_output_shape in tags or torch.Tag.data_dependent_output in tags:
            raise NotStackable(f"{who} uses {node.target}, whose result has a shape or a value that Python must see")
        draws |= torch.Tag.nondeterministic_seeded in tags
    trained = set(stepped)
    inputs = graph.find_nodes(op="placeholder")
    by_name = dict(zip((*state, *values), inputs, strict=False))
    for name, node in zip(left, inputs[len(inputs) - len(constants) - len(left) :], strict=False):
        if node.users:
            raise NotStackable(f"{who} accumulates gradients over its calls, of {name} for one")
        graph.erase_node(node)
    used = tuple(name for name in values if by_name[name].users)
    for name in values.keys() - set(used):
        graph.erase_node(by_name[name])
    kept = tuple(name for name in state if name not in trained)
    for name in reversed((*stepped, *kept)):
        graph._root.append(by_name[name])  # the order that is promised
    index = {name: index for name, index in order if name is not None}
    versions = tuple(constant._version for constant in constants)
    groups = tuple(index[name] for name in stepped)
    return Trace(graph, tuple(stepped), groups, kept, used, read.fixed, tuple(constants), versions, draws)


def _batch_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor | None,
    variance: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
) -> Any:
    """Batch normalisation by an operator that states that it changes the running statistics."""
    if mean is None:
        return torch.ops.aten._native_batch_norm_legit.no_stats(x, weight, bias, training, momentum, eps)
    return torch.ops.aten._native_batch_norm_legit.default(x, weight, bias, mean, variance, training, momentum, eps)


_IN_PLACE: dict[Any, Callable[..., Any]] = {torch.ops.aten.native_batch_norm.default: _batch_norm}


def _same_state(a: Any, b: Any) -> bool:
    return all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))


def _no_effects(who: str, before: dict[str, str], after: dict[str, str]) -> None:
    changed = sorted(path for path in before.keys() | after.keys() if before.get(path) != after.get(path))
    if changed:
        raise NotStackable(f"{who} changes {', '.join(changed[:3])}: Python runs once for a stack, not at each step")


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"
