"""Decides which operations of a graph are done on all members at once, without changing any member's bits, and measures
what they cost.

The reference is the result of an operation on a single member. Results may depend on the number of members or on a
member's slot: through vectors and their tails, blocks, the order of sums, or another kernel. Whether they do is decided
by comparison with the reference, on members that differ in all their tensors.
"""

from __future__ import annotations

import operator
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from hpstage.checkpoints import lazy_copies
from hpstage.torch.backends.stacked.cleaning import is_random, last_uses
from hpstage.torch.backends.stacked.rules import Call, Site, is_exact, proposals
from hpstage.torch.backends.stacked.streams import Streams
from hpstage.torch.backends.stacked.tracing import Trace

ALIGNMENT = 64
"""Bytes to which torch aligns new tensors. At other addresses, a kernel may take another path."""

_CALLS = 4
_LONG = 0.01  # seconds after which two calls are enough
_FORM = 1e-5
"""Seconds per member by which a stacked operation may be slower than one member by member, since it saves its
neighbours a change of form."""

_COMPARED = 30_000  # elements that must agree
_ROUNDS = 100  # maximum number of comparisons to reach that
_INFINITE = 0.05  # share of infinite elements in a last round, to see whether one way adds a 0 * x that the other omits

_getitem = operator.getitem

# BLAS runs other code for operands at other addresses, and few values show it.
_PRODUCTS = {
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten.baddbmm.default,
    torch.ops.aten.mv.default,
    torch.ops.aten.addmv.default,
    torch.ops.aten.dot.default,
}

_HEAVY = _PRODUCTS | {
    torch.ops.aten.convolution.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
}

STREAM = -1
"""Stands for torch's generator among indices of inputs: if all members have it in one state, they draw the same
numbers."""

LOOP = 128
"""A vectorised loop over a multiple of this many bytes (two vectors of 64) has no remainder, which other code might
compute."""
VECTOR = LOOP // 4
"""The same number in elements of four bytes."""


@dataclass(frozen=True)
class Tried:
    """Measurements for the programs of one trainable, by the form of calls: a network repeats its layers, and two
    programs have most calls in common."""

    held: dict[object, bool] = field(default_factory=dict)
    """Whether the operation on all members agreed with the reference on other values, too."""
    taken: dict[object, float] = field(default_factory=dict)
    """Measured seconds, by number of members and form of the call."""


@dataclass
class Plan:
    """The computation of each node of a graph for a given number of members."""

    width: int
    constants: dict[Node, Any]
    """Values that are the same for all members and in all steps."""
    stacked: dict[Node, Call] = field(default_factory=dict)
    """The call that does an operation on all members at once, where this changes no member's bits."""
    slow: set[Node] = field(default_factory=set)
    """The stacked operations that are faster member by member."""
    strides: dict[Node, int] = field(default_factory=dict)
    """Bytes from one member to the next in the stacked result."""
    sizes: dict[Node, int] = field(default_factory=dict)
    """Bytes of a member's result."""
    contiguous: dict[Node, bool] = field(default_factory=dict)
    shared: frozenset[int] = frozenset()
    """Indices of inputs that are one tensor for all members; see also :data:`STREAM`."""
    once: frozenset[Node] = frozenset()
    """Values that are computed once in a step, since they depend on nothing that members differ in."""


def constants_of(trace: Trace) -> dict[Node, Any]:
    """Return the values of nodes that depend on no member."""
    values: dict[Node, Any] = dict(
        zip(trace.inputs[len(trace.inputs) - len(trace.constants) :], trace.constants, strict=True)
    )
    for node in trace.graph.nodes:
        if node.op == "call_function" and not is_random(node) and all(arg in values for arg in node.all_input_nodes):
            values[node] = _run(node, values.__getitem__)
    return values


def once_of(trace: Trace, shared: Collection[int]) -> frozenset[Node]:
    """Return the nodes that depend only on constants and on inputs that all members have in common (``shared``: indices
    of inputs, or :data:`STREAM`), and on at least one of these inputs."""
    inputs = trace.inputs
    once = {inputs[index] for index in shared if index != STREAM}
    equal = once | set(inputs[len(inputs) - len(trace.constants) :])
    same_stream = STREAM in shared
    for node in trace.graph.nodes:
        if node.op != "call_function":
            continue
        random, known = is_random(node), equal.issuperset(node.all_input_nodes)
        if known and (same_stream or not random):
            equal.add(node)
            if random or not once.isdisjoint(node.all_input_nodes):
                once.add(node)
        elif random:
            same_stream = False  # how far a draw moves the generator may depend on values
    return frozenset(once)


def is_heavy(node: Node) -> bool:
    """Return whether an operation takes so long that it pays to look for what members have in common."""
    return node.target in _HEAVY


def plan(
    trace: Trace,
    members: list[list[Tensor]],
    streams: Streams,
    shared: frozenset[int] = frozenset(),
    tried: Tried | None = None,
) -> Plan:
    """Return the plan of a step for ``members``, each given by the inputs of the trace without its constants.

    Args:
        shared: indices of inputs that are one tensor for all members, or :data:`STREAM`.
        tried: measurements for earlier programs, on the same device and under the same settings.
    """
    width, tried = len(members), Tried() if tried is None else tried
    constants = constants_of(trace)
    result = Plan(width, constants, shared=shared, once=once_of(trace, shared))
    alone: dict[Node, list[Any]] = {}
    together: dict[Node, Any] = {}
    last = last_uses(trace.graph)
    for index, node in enumerate(trace.inputs[: len(members[0])]):
        alone[node] = [member[index] for member in members]
        _note(result, node, alone[node][0])
    for node in trace.graph.nodes:
        if node.op == "call_function" and node not in constants:
            if node in result.once:
                value = partial(_run, node, _of(alone, constants, 0))
                alone[node] = [streams.once(value) if is_random(node) else value()] * width
            elif is_random(node):
                alone[node] = streams.each(lambda slot, node=node: _run(node, _of(alone, constants, slot)))  # type: ignore[misc]
            elif width == 1:
                alone[node] = [_run(node, _of(alone, constants, 0))]
            else:
                first = _of(alone, constants, 0)
                form = _form(_call_of(node), lambda arg, first=first: _form_of(first(arg)))  # type: ignore[misc]
                seconds, alone[node] = _timed(
                    tried,
                    (width, form),
                    lambda node=node: [_run(node, _of(alone, constants, slot)) for slot in range(width)],  # type: ignore[misc]
                )
                _propose(result, tried, node, alone, together, seconds + width * _FORM)
            _note(result, node, alone[node][0])
        for done in last.get(node, ()):
            alone.pop(done, None)
            together.pop(done, None)
    return result


def _propose(
    plan: Plan, tried: Tried, node: Node, alone: dict[Node, list[Any]], together: dict[Node, Any], most: float
) -> None:
    """Look for a way to do an operation on all members at once, and add it to the plan. Beyond ``most`` seconds, it is
    slow."""
    reference = alone[node]
    inputs = [arg for arg in node.all_input_nodes if arg not in plan.constants and arg not in plan.once]
    if node.target in _PRODUCTS and not all(_fits(part) for part in (reference[0], *(alone[arg][0] for arg in inputs))):
        return
    if node.target is _getitem:
        source = inputs[0]
        if source in plan.stacked:
            together[node] = together[source][node.args[1]]
            plan.stacked[node] = Call(_getitem, node.args)
            if source in plan.slow:
                plan.slow.add(node)
            plan.strides[node] = together[node].stride(0) * together[node].element_size()
        return
    if plan.width == 1 or not _may(node, reference[0]):
        return
    examples = {arg: values[0] for arg, values in alone.items()} | plan.constants
    calls = list(proposals(Site(node, plan.width, examples, frozenset(plan.constants), plan.once)))
    if not calls:
        return
    for arg in inputs:
        if arg not in together:
            if not plan.contiguous[arg]:
                return
            together[arg] = torch.stack(alone[arg])
    once = {arg: alone[arg][0] for arg in node.all_input_nodes if arg in plan.once}
    values = {**plan.constants, **once, **{arg: together[arg] for arg in inputs}}
    for call in calls:
        form = _form(call, lambda arg: (_form_of(values[arg]), arg in alone and _form_of(alone[arg][0])))
        try:
            seconds, outcome = _timed(
                tried,
                (plan.width, form),
                lambda call=call: evaluate(call, values.__getitem__),  # type: ignore[misc]
            )
        except RuntimeError:  # there is no such kernel, or no such view
            continue
        if not _equal(outcome, reference):
            continue
        operation = node.target, form
        if operation not in tried.held:
            tried.held[operation] = _holds(plan, node, call, alone, together, outcome)
        if not tried.held[operation]:
            continue
        together[node] = outcome
        plan.stacked[node] = call
        parts = reference[0] if isinstance(reference[0], tuple | list) else reference[:1]
        if seconds > most and all(part is None or part.is_contiguous() for part in parts):  # so that it can be stacked
            plan.slow.add(node)
        if isinstance(outcome, Tensor):
            plan.strides[node] = outcome.stride(0) * outcome.element_size()
        return


def _form(part: Any, of: Callable[[Node], object]) -> object:
    """Return a key that is equal for calls of one operation if their tensors differ only in values."""
    if isinstance(part, Call):
        kwargs = sorted((name, _form(arg, of)) for name, arg in part.kwargs.items())
        return part.function, *(_form(arg, of) for arg in part.args), *kwargs
    if isinstance(part, list | tuple):
        return tuple(_form(item, of) for item in part)
    return of(part) if isinstance(part, Node) else repr(part)


def _form_of(value: Any) -> object:
    if not isinstance(value, Tensor):
        return tuple(map(_form_of, value)) if isinstance(value, tuple | list) else value
    # Taking the address of a lazy copy copies it.
    address = lazy_copies.address_of(value) if lazy_copies.is_lazy(value) else value.data_ptr()
    return value.shape, value.stride(), value.dtype, address % ALIGNMENT


def _fits(example: Tensor) -> bool:
    """Return whether each member in a stack is aligned like a tensor of its own, in any layout of the stack."""
    return example.numel() * example.element_size() % ALIGNMENT == 0


def _holds(
    plan: Plan, node: Node, call: Call, alone: dict[Node, list[Any]], together: dict[Node, Any], outcome: Any
) -> bool:
    """Return whether the call also agrees with the reference on other values: few elements, or special values, may
    agree by chance."""
    elements = sum(
        part.numel() for part in (outcome if isinstance(outcome, tuple | list) else [outcome]) if part is not None
    )
    inputs = [arg for arg in node.all_input_nodes if arg not in plan.constants]
    if is_exact(node) or not any(alone[arg][0].is_floating_point() for arg in inputs):
        return True
    generator = torch.Generator().manual_seed(0)
    floats = [arg for arg in inputs if alone[arg][0].is_floating_point()]
    smallest = min(floats, key=lambda arg: alone[arg][0].numel())  # each of its elements affects the most results
    once = [arg for arg in inputs if arg in plan.once]
    usual = {arg: [_usual(value) for value in (alone[arg][:1] if arg in once else alone[arg])] for arg in inputs}
    rounds = max(1, min(_ROUNDS, _COMPARED // max(1, elements)))
    for infinite in [None] * rounds + [smallest]:
        others = {arg: [_other(value, generator, infinite=arg is infinite) for value in usual[arg]] for arg in inputs}
        stacks = {
            arg: values[0] if arg in once else torch.empty_like(together[arg]).copy_(torch.stack(values))
            for arg, values in others.items()
        }
        others |= {arg: others[arg] * plan.width for arg in once}
        values = {**plan.constants, **stacks}
        reference = [_run(node, _of(others, plan.constants, slot)) for slot in range(plan.width)]
        if not _equal(evaluate(call, values.__getitem__), reference):
            return False
        del others, stacks, values  # before new ones are made: a frozen weight may be large
    return True


def _usual(value: Tensor) -> Tensor:
    """Return a tensor with ones for zeros and for values that are not finite, since all ways to compute agree on
    these."""
    if not value.is_floating_point():
        return value
    usual = torch.empty_like(value).copy_(value)
    return usual.masked_fill_(value.isfinite().logical_not_().logical_or_(value == 0), 1)


def _other(value: Tensor, generator: torch.Generator, *, infinite: bool) -> Tensor:
    if not value.is_floating_point():
        return value
    factor = torch.rand(value.shape, generator=generator).add_(0.5)
    if infinite:
        factor[torch.rand(value.shape, generator=generator) < _INFINITE] = torch.inf
    return torch.empty_like(value).copy_(factor).mul_(value)


def _may(node: Node, example: Any) -> bool:
    """Return whether a comparison is a sufficient check. It is not if other code computes a few of the elements."""
    if not isinstance(node.target, torch._ops.OpOverload) or torch.Tag.pointwise not in node.target.tags:
        return True
    return is_exact(node) or (isinstance(example, Tensor) and example.nbytes % LOOP == 0)


def _equal(outcome: Any, reference: list[Any]) -> bool:
    """Return whether all members have the bits, the shapes and the strides of the reference."""
    if isinstance(outcome, tuple | list):
        columns = [[member[index] for member in reference] for index in range(len(outcome))]
        return len(outcome) == len(reference[0]) and all(map(_equal, outcome, columns))
    if outcome is None:  # a gradient that nobody needs
        return all(part is None for part in reference)
    return len(outcome) == len(reference) and all(map(same, outcome.unbind(), reference))


def same(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors have the same bits and the same layout in memory."""
    if a.shape != b.shape or a.dtype != b.dtype or _strides(a) != _strides(b):
        return False
    if not a.is_floating_point():
        return torch.equal(a, b)
    whole = {2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    if torch.equal(a.contiguous().view(whole), b.contiguous().view(whole)):
        return True
    return bool(((a == b) & (a.signbit() == b.signbit()) | a.isnan() & b.isnan()).all())


def _strides(tensor: Tensor) -> list[int]:
    return [stride for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1]


def evaluate(call: Any, value: Callable[[Node], Any]) -> Any:
    if isinstance(call, Call):
        args = [evaluate(arg, value) for arg in call.args]
        return call.function(*args, **{name: evaluate(arg, value) for name, arg in call.kwargs.items()})
    if isinstance(call, Node):
        return value(call)
    if isinstance(call, list | tuple):
        return type(call)(evaluate(item, value) for item in call)
    return call


def _call_of(node: Node) -> Call:
    return Call(node.target, node.args, dict(node.kwargs))  # type: ignore[arg-type]


def _run(node: Node, value: Callable[[Node], Any]) -> Any:
    return evaluate(_call_of(node), value)


def _of(alone: Mapping[Node, list[Any]], constants: Mapping[Node, Any], slot: int) -> Callable[[Node], Any]:
    return lambda node: constants[node] if node in constants else alone[node][slot]


def _timed(tried: Tried, form: object, work: Callable[[], Any]) -> tuple[float, Any]:
    """Return the seconds that ``work()`` takes, and its result. The fastest of several calls counts, since the first
    ones allocate memory and may compile code. If a call of this form was timed before, one call is made."""
    if form in tried.taken:
        return tried.taken[form], work()
    best, spent = float("inf"), 0.0
    for call in range(_CALLS):
        begin = time.perf_counter()
        result = work()
        seconds = time.perf_counter() - begin
        best, spent = min(best, seconds), spent + seconds
        if call and spent > _LONG:
            break
    tried.taken[form] = best
    return best, result


def _note(plan: Plan, node: Node, example: Any) -> None:
    if isinstance(example, Tensor):
        plan.sizes[node] = example.numel() * example.element_size()
        plan.contiguous[node] = example.is_contiguous()
