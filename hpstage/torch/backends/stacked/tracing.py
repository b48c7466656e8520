"""A member's step as a flat graph: everything up to the gradients, as operations on tensors without side effects.

``update()`` is run once, on tensors that record what is done to them. A stand-in for the optimizer records the
gradients of the step. So everything that ``update()`` does to gradients before the step (clipping, scaling) is part of
the graph. Changes to Python objects are refused, since they would not happen again.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule, Interpreter, Node
from torch.fx.experimental.proxy_tensor import make_fx

from hpstage.checkpoints import lazy_copies
from hpstage.schedule import Scalar
from hpstage.torch.backends.backend import PASSING, NeedsPython, NotStackable
from hpstage.torch.backends.stacked.cleaning import clean, is_strided, lift_constants, without_mutations
from hpstage.torch.backends.stacked.images import substitute
from hpstage.torch.backends.stacked.one_step import OneStep, StandInValues, first_line
from hpstage.torch.backends.stacked.rules import is_large
from hpstage.torch.backends.stacked.signature import Signature, shape_key
from hpstage.torch.trainable import TorchTrainable
from hpstage.training.randomness import generators_restored

Effects = Callable[[str], AbstractContextManager[None]]
"""Given the name of the traced code (``"X.update()"``), watches what else it changes, and raises :class:`NotStackable`
if anything."""


@dataclass(frozen=True, eq=False)
class Trace:
    """The graph of one member's step, up to the gradients.

    Its inputs are, in this order, the tensors named in ``trained`` and ``kept``, one tensor without dimensions
    for each of ``values``, the tensors of the batch, and ``constants``. Its outputs are the loss (None if ``update()``
    returns none), a gradient for each of ``trained``, the new value of each of ``kept``, and the tensors among
    ``logged``.
    """

    graph: Graph
    trained: tuple[str, ...]
    """Parameters that the optimizer steps, by name, in the order of its groups."""
    groups: tuple[int, ...]
    """The param group of each."""
    kept: tuple[str, ...]
    """All other parameters and all buffers."""
    values: tuple[str, ...]
    """Hyperparameters that ``update()`` reads and that may differ between members."""
    read: StandInValues
    """The hyperparameters that the step has read. Those that are not floats are constants of the graph."""
    constants: tuple[Tensor, ...]
    """Tensors of the user's that the step reads and that belong to no member."""
    versions: tuple[int, ...]
    """The version of each constant when it was recorded."""
    logged: tuple[tuple[str, float | None], ...] = ()
    """What the step logs: names and numbers, with None for the number if it is a tensor."""
    movable: bool = True
    """Whether ``update()`` also trains on a batch whose samples are in another order."""

    @property
    def inputs(self) -> list[Node]:
        return [node for node in self.graph.nodes if node.op == "placeholder"]

    @property
    def batch(self) -> int:
        """The number of tensors of the batch."""
        others = len(self.trained) + len(self.kept) + len(self.values) + len(self.constants)
        return len(self.inputs) - others

    @cached_property
    def forms(self) -> list[object]:
        """Shapes and types of its inputs."""
        return [(node.meta["val"].shape, node.meta["val"].dtype) for node in self.inputs]

    @cached_property
    def unchanged(self) -> frozenset[str]:
        """The tensors of ``kept`` that the step does not change."""
        results: Any = self.graph.output_node().args[0]
        first = len(self.trained)
        columns = zip(self.kept, self.inputs[first:], results[1 + first :], strict=False)
        return frozenset(name for name, before, after in columns if before is after)

    def check_constants(self) -> None:
        """Raise :class:`NotStackable` if a tensor that was read has been changed: programs hold its value."""
        for constant, version in zip(self.constants, self.versions, strict=True):
            if constant._version != version:
                raise NotStackable(
                    f"a tensor of shape {tuple(constant.shape)}, which steps read and which does not belong to the "
                    "model, has been changed between steps"
                )

    def fits(self, hp: Mapping[str, Scalar]) -> bool:
        """Return whether these hyperparameters lead to this step."""
        return self.read.fits(hp) and all(type(hp.get(name)) is float for name in self.values)

    def same(self, other: Trace) -> bool:
        """Return whether another member takes the same step."""
        return (
            str(self.graph) == str(other.graph)
            and self.forms == other.forms  # which programs depend on, but the text may not show
            and (self.trained, self.groups, self.kept, self.values)
            == (other.trained, other.groups, other.kept, other.values)
            and self.read.decisive == other.read.decisive
            and repr(self.logged) == repr(other.logged)
            and len(self.constants) == len(other.constants)
            and all(
                a is b or (a.shape == b.shape and a.dtype == b.dtype and bool((a == b).all()))
                for a, b in zip(self.constants, other.constants, strict=True)
            )
        )


class Tracer:
    """Traces steps of ``subject``, and returns the same trace for equal steps.

    Args:
        subject: whose ``update()`` is traced.
        effects: watches objects other than tensors, to refuse a step that changes any.
    """

    def __init__(self, subject: TorchTrainable, effects: Effects | None = None) -> None:
        self.subject = subject
        self._effects = effects
        self._traces: dict[object, list[tuple[StandInValues, Trace | str, Signature]]] = {}
        """The hyperparameters that steps have read, with the trace or the reason why there is none, which takes as long
        to find."""
        self.traced = 0
        """Number of traces made."""

    def trace(self, model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any, hp: Mapping[str, Scalar]) -> Trace:
        """Return the trace of a step. Raises :class:`NotStackable`."""
        signature = Signature(model)
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        groups = tuple(tuple(names.get(id(p)) for p in group["params"]) for group in optimizer.param_groups)
        floats = frozenset(name for name, value in hp.items() if type(value) is float)
        key = (signature.text, groups, floats, shape_key(batch))
        known = self._traces.setdefault(key, [])
        for read, found, _ in known:
            if read.fits(hp):
                if isinstance(found, str):
                    raise NeedsPython(found)
                found.check_constants()
                return found
        one = OneStep(self.subject, model, optimizer, batch, hp)
        try:
            made = trace(one, self._effects)
        except NeedsPython as error:
            known.append((one.read, str(error), signature))
            raise
        self.traced += 1
        # Two models with objects of their own may still take the same step: then there is one trace of both.
        all_known = (other for others in self._traces.values() for _, other, _ in others)
        same = next((other for other in all_known if isinstance(other, Trace) and made.same(other)), made)
        known.append((one.read, same, signature))
        return same


def trace(one: OneStep, effects: Effects | None = None) -> Trace:
    """Trace a step. Nothing is trained: all objects are as before.

    Raises:
        NeedsPython: ``update()`` needs Python at each step, or does more than compute gradients and step.
        NotStackable: it behaves differently with other values.
    """
    before = random.getstate(), np.random.get_state()
    # By default make_fx creates a FakeTensorMode for each value of a graph, which takes half of the tracing time.
    described = tracing(TracingContext(FakeTensorMode(allow_fallback_kernels=True)))
    with warnings.catch_warnings(), nullcontext() if effects is None else effects(one.who), described:
        warnings.simplefilter("ignore")
        with generators_restored(), _explained(NeedsPython, one, "needs Python at each step"):
            recorded = make_fx(one, decomposition_table=_IN_PLACE)(one.state, one.values, one.tensors, one.left)
            if random.getstate() != before[0] or not all(map(np.array_equal, np.random.get_state(), before[1])):
                raise NeedsPython(
                    f"{one.who} draws from the generator of Python's random or of NumPy, not from torch's"
                )
        with generators_restored():
            made = _finished(one, recorded)
        for names in one.overlapping:
            if not made.unchanged.issuperset(names):
                raise NeedsPython(f"{one.who} changes memory that {' and '.join(names)} have in common")
        # Such an error depends on the present values. Unlike NeedsPython, it is not remembered for others.
        with _explained(NotStackable, one, "fails with other values"):
            return replace(made, movable=compared(made, one))


@contextmanager
def _explained(kind: type[NotStackable], one: OneStep, what: str) -> Iterator[None]:
    """Raise an error of the user's code as one of this kind, for a step that cannot be stacked. ``what`` completes its
    message."""
    try:
        yield
    except (NotStackable, *PASSING):
        raise
    except Exception as error:
        raise kind(f"{one.who} {what}{one.read.blamed()}: {first_line(error)}") from error


def _finished(one: OneStep, recorded: GraphModule) -> Trace:
    who, state, values, left, stepped = one.who, one.state, one.values, one.left, one.stepped
    graph, constants = lift_constants(recorded)
    if not all(isinstance(constant, Tensor) for constant in constants):
        raise NeedsPython(f"{who} uses an object of torch that is no tensor, such as a generator of its own")
    flat = [*state.values(), *values.values(), *one.tensors, *left.values(), *constants]
    graph = without_mutations(graph, flat)
    clean(graph)
    if not all(map(is_strided, graph.output_node().all_input_nodes)):
        raise NeedsPython(f"{who} computes sparse gradients, as an embedding with sparse=True has them")
    for node in graph.nodes:
        if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
            continue
        if node.target._schema.is_mutable:
            raise NeedsPython(f"{who} changes a tensor that is neither a parameter nor a buffer, by {node.target}")
        tags = node.target.tags
        if torch.Tag.dynamic_output_shape in tags or torch.Tag.data_dependent_output in tags:
            raise NeedsPython(f"{who} uses {node.target}, whose result has a shape or a value that Python must see")
    trained = set(stepped)
    inputs = graph.find_nodes(op="placeholder")
    by_name = dict(zip((*state, *values), inputs, strict=False))
    for name, node in zip(left, inputs[len(inputs) - len(constants) - len(left) :], strict=False):
        if node.users:
            raise NeedsPython(f"{who} accumulates gradients from one call to the next, for example that of {name}")
        graph.erase_node(node)
    used = tuple(name for name in values if by_name[name].users)
    for name in values.keys() - set(used):
        graph.erase_node(by_name[name])
    kept = tuple(name for name in state if name not in trained)
    for name in reversed((*stepped, *kept)):
        graph._root.append(by_name[name])  # the documented order of inputs
    substitute(graph)
    versions = tuple(constant._version for constant in constants)
    groups = tuple(one.groups[name] for name in stepped)
    return Trace(
        *(graph, tuple(stepped), groups, kept, used, one.read, tuple(constants), versions, tuple(one.logged)),
    )


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
    """Batch normalisation by an operator that states whether it changes the running statistics."""
    if mean is not None and not training:
        return torch.ops.aten._native_batch_norm_legit_no_training.default(
            x, weight, bias, mean, variance, momentum, eps
        )
    if mean is None:
        return torch.ops.aten._native_batch_norm_legit.no_stats(x, weight, bias, training, momentum, eps)
    return torch.ops.aten._native_batch_norm_legit.default(x, weight, bias, mean, variance, training, momentum, eps)


_IN_PLACE: dict[Any, Callable[..., Any]] = {torch.ops.aten.native_batch_norm.default: _batch_norm}


def compared(made: Trace, one: OneStep) -> bool:
    """Compare a recording with ``update()`` itself, on other parameters and on a batch in another order.

    A large tensor that the step does not change keeps its values if nothing has taken its address so far: then only
    operations have read it, and these are recorded.

    Returns:
        Whether ``update()`` accepts a batch in another order. If not, it was compared on the recorded order.

    Raises:
        NotStackable: they differ by more than rounding.
    """
    example = [one.state[name] for name in (*made.trained, *made.kept)]
    example += [one.values[name] for name in made.values] + one.tensors
    generator = torch.Generator().manual_seed(0)
    read = {name for name in made.unchanged if is_large(one.state[name]) and lazy_copies.is_lazy(one.state[name])}
    given = {len(made.trained) + index for index, name in enumerate(made.kept) if name in read}
    states = len(made.trained) + len(made.kept)
    for moved in (True, False):
        inputs = probe(example, generator, states, len(one.tensors), moved=moved, given=given)
        state = dict(zip((*made.trained, *made.kept), inputs, strict=False))
        for tensor in state.values():
            lazy_copies.allow_copies(tensor)
        try:
            with generators_restored():
                expected = one(
                    {name: lazy_copies.clone(state[name]) for name in one.state},
                    None,
                    inputs[len(inputs) - len(one.tensors) :],
                    one.left,
                )
        except NotStackable:
            raise
        except Exception:
            if not moved:
                raise
            continue
        break
    with generators_restored():  # it draws the same numbers, on any device
        found = Interpreter(GraphModule({}, made.graph)).run(*inputs, *made.constants, enable_io_processing=False)
    gradients = slice(1, 1 + len(made.trained))
    decisive = gradients.stop + len(made.kept)  # not what is logged
    largest = max((_largest(gradient) for gradient in expected[gradients] if gradient is not None), default=0.0)
    if one.stepped != list(made.trained) or not all(
        _close(a, b, largest if index < gradients.stop else 0.0)
        for index, (a, b) in enumerate(zip(found[:decisive], expected, strict=False))
    ):
        raise NotStackable(
            f"{one.who} behaves differently for other values: its Python code depends on values not recorded"
        )
    return moved


def probe(
    example: Sequence[Tensor],
    generator: torch.Generator,
    states: int,
    batch: int,
    *,
    moved: bool,
    given: Collection[int] = (),
) -> list[Tensor]:
    """Return the inputs of a made-up member, close to those of a real one.

    Numbers of the model are multiplied by positive factors, so that signs stay. The batch keeps its values, since
    others may not be allowed; its samples change places.

    Args:
        example: a member's inputs: ``states`` tensors of its model, hyperparameters, ``batch`` tensors of its batch.
        moved: whether samples change places.
        given: indices of tensors of the model that are not changed, and not copied.
    """
    first = len(example) - batch
    made = [tensor if index in given else _near(tensor, generator) for index, tensor in enumerate(example[:states])]
    made += [tensor.clone() for tensor in example[states:first]]
    tensors = example[first:]
    samples = tensors[0].shape[0] if tensors and tensors[0].dim() else 0
    order = torch.randperm(samples, generator=generator)
    for tensor in tensors:
        if moved and tensor.dim() and tensor.shape[0] == samples:
            tensor = tensor[order.to(tensor.device)]
        made.append(tensor.contiguous().clone())
    return made


def _near(tensor: Tensor, generator: torch.Generator) -> Tensor:
    if not tensor.is_floating_point():
        return tensor.clone()
    # In place: a frozen tensor may be large, and each copy of it counts.
    factor = torch.rand(tensor.shape, generator=generator).mul_(0.4).add_(0.8)
    return factor.to(tensor).mul_(tensor)


_NOISE = 64
"""Rounding errors of the largest gradient below which other gradients are noise, as is that of a bias before batch
normalisation."""


def _close(a: Tensor | None, b: Tensor | None, largest: float) -> bool:
    if a is None or b is None:
        return a is b
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if torch.equal(a, b):  # frozen tensors may be large, and this takes no memory
        return True
    if not a.is_floating_point():
        return False
    noise = _NOISE * torch.finfo(b.dtype).eps * largest
    return torch.allclose(a, b, rtol=1e-3, atol=max(1e-4 * _largest(b), noise) + 1e-12, equal_nan=True)


def _largest(tensor: Tensor) -> float:
    return float(tensor.detach().nan_to_num().abs().max()) if tensor.numel() else 0.0
