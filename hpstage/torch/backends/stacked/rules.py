"""Rules that turn an operation on one member's tensors into one on all members' tensors at once, with the members along
a new first dimension.

A rule only proposes: :mod:`hpstage.torch.backends.stacked.planning` checks whether the result has the bits of the
operation on each member. Operations without a rule are done member by member.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from hpstage.torch.backends.stacked.images import (
    convolution,
    gradients,
    gradients_of_all,
    max_pool,
    max_pool_gradients_of_all,
    samples_of_all,
)

_aten = torch.ops.aten


def is_large(tensor: Tensor) -> bool:
    """Return whether a tensor is so large that a copy of it is costly."""
    return tensor.layout is not torch.strided or tensor.nbytes >= 1 << 20


@dataclass(frozen=True)
class Call:
    """A function that is applied to values, to nodes of the graph and to other calls."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Site:
    """A node where a rule is to be applied."""

    node: Node
    width: int
    """Number of members."""
    examples: dict[Node, Any]
    """Values of one member, as examples."""
    constants: frozenset[Node]
    once: frozenset[Node] = frozenset()
    """Nodes whose value is the same for all members, in all steps or in this one, and so has no dimension for
    members."""

    def rank(self, node: Any) -> int:
        value: Tensor = self.examples[node]
        return value.dim()

    def is_stacked(self, value: Any) -> bool:
        return isinstance(value, Node) and value not in self.constants and value not in self.once

    @property
    def out(self) -> Tensor:
        result: Tensor = self.examples[self.node]
        return result


Rule = Callable[[Site], Call | None]


def proposals(site: Site) -> Iterator[Call]:
    """Yield the ways to do an operation on all members at once, best first. The first way reads a tensor that members
    have in common; the second way makes a copy of it for each member. A large tensor is not copied, since that takes
    longer than reading it for each member."""
    once = [arg for arg in site.node.all_input_nodes if arg in site.once]
    if (call := _rule_for(site)) is not None:
        yield call
    if not once or any(is_large(site.examples[arg]) for arg in once):
        return
    if (call := _rule_for(replace(site, once=frozenset()))) is not None:
        yield _spread(call, {arg: Call(_copies, (arg, site.width)) for arg in once})


def _spread(part: Any, copies: Mapping[Node, Call]) -> Any:
    if isinstance(part, Call):
        return Call(part.function, _spread(part.args, copies), {k: _spread(v, copies) for k, v in part.kwargs.items()})
    if isinstance(part, list | tuple):
        return type(part)(_spread(item, copies) for item in part)
    return copies.get(part, part) if isinstance(part, Node) else part


def _copies(value: Tensor, width: int) -> Tensor:
    return torch.stack([value] * width)


def _rule_for(site: Site) -> Call | None:
    target = site.node.target
    if target in _RULES:
        return _RULES[target](site)
    if not isinstance(target, torch._ops.OpOverload):
        return None
    if torch.Tag.pointwise in target.tags and isinstance(site.examples[site.node], Tensor):
        return _pointwise(site)
    return None


def is_exact(node: Node) -> bool:
    """Return whether a pointwise operation rounds at most once, so that any code for it gives the same bits."""
    return node.target in _EXACT and not node.kwargs


def _pointwise(site: Site) -> Call | None:
    rank = site.out.dim()
    dtypes = {
        site.examples[arg].dtype
        for arg in site.node.all_input_nodes
        if site.examples[arg].dim() and site.examples[arg].is_floating_point()
    }

    def aligned(arg: Any) -> Any:
        if not site.is_stacked(arg):
            return arg
        example: Tensor = site.examples[arg]
        if not example.dim() and rank and example.is_floating_point() and dtypes - {example.dtype}:
            arg = Call(Tensor.to, (arg, next(iter(dtypes))))  # a number among tensors takes their type
        if example.dim() < rank:
            missing = [1] * (rank - example.dim())
            return Call(Tensor.reshape, (arg, [site.width, *missing, *example.shape]))
        return arg

    if any(isinstance(arg, list | tuple) and any(isinstance(item, Node) for item in arg) for arg in site.node.args):
        return None
    args = tuple(aligned(arg) for arg in site.node.args)
    return Call(site.node.target, args, {name: aligned(value) for name, value in site.node.kwargs.items()})  # type: ignore[arg-type]


def _dims(site: Site, dims: Any, of: Node) -> Any:
    """Return dimensions of a member's tensor as dimensions of the stacked tensor."""
    rank = max(site.rank(of), 1)
    if isinstance(dims, int):
        return dims % rank + 1
    return [dim % rank + 1 for dim in dims]


def _with_dims(*positions: int) -> Rule:
    """Return the rule for an operation whose arguments at ``positions`` are dimensions of its first argument."""

    def rule(site: Site) -> Call | None:
        args: list[Any] = list(site.node.args)
        if not all(site.is_stacked(arg) for arg in args if isinstance(arg, Node)) or site.rank(args[0]) == 0:
            return None
        if len(args) == positions[0]:
            args.append(0)  # the first dimension, by default
        if any(args[position] is None for position in positions):
            return None
        for position in positions:
            args[position] = _dims(site, args[position], args[0])
        return _call(site, args)

    return rule


def _call(site: Site, args: Any) -> Call:
    return Call(site.node.target, tuple(args), dict(site.node.kwargs))  # type: ignore[arg-type]


def _shape(site: Site) -> Call | None:
    return Call(site.node.target, (site.node.args[0], [site.width, *site.out.shape]))  # type: ignore[arg-type]


def _expand(site: Site) -> Call | None:
    x = site.node.args[0]
    example: Tensor = site.examples[x]  # type: ignore[index]
    missing = [1] * (site.out.dim() - example.dim())
    if missing:
        x = Call(Tensor.reshape, (x, [site.width, *missing, *example.shape]))  # type: ignore[assignment]
    return Call(Tensor.expand, (x, [site.width, *site.out.shape]))


def _t(site: Site) -> Call | None:
    x = site.node.args[0]
    return Call(_aten.transpose.int, (x, 1, 2)) if site.rank(x) == 2 else None


def _permute(site: Site) -> Call | None:
    x, dims = site.node.args
    return _call(site, (x, [0, *_dims(site, dims, x)]))  # type: ignore[arg-type]


def _unsqueeze(site: Site) -> Call | None:
    x, dim = site.node.args
    return _call(site, (x, dim % (site.rank(x) + 1) + 1))  # type: ignore[operator]


def _sum(site: Site) -> Call | None:
    x = site.node.args[0]
    if not site.rank(x) or site.node.kwargs:
        return None
    return Call(_aten.sum.dim_IntList, (x, list(range(1, site.rank(x) + 1))))


def _list_along(site: Site) -> Call | None:
    """Return a call that concatenates tensors, if all of them are stacked."""
    tensors: Any = site.node.args[0]
    if not all(site.is_stacked(tensor) for tensor in tensors):
        return None
    dim: Any = site.node.args[1] if len(site.node.args) > 1 else 0
    rank = site.out.dim()
    return _call(site, (tensors, dim % rank + 1))


def _mm(site: Site) -> Call | None:
    a, b = site.node.args
    if site.is_stacked(a) and site.is_stacked(b):
        return Call(_aten.bmm.default, (a, b))
    return _product(site, a, b)


def _addmm(site: Site) -> Call | None:
    bias, a, b = site.node.args
    if site.node.kwargs or site.rank(bias) != 1:
        return None
    if all(map(site.is_stacked, (bias, a, b))):
        return Call(_aten.baddbmm.default, (Call(_aten.unsqueeze.default, (bias, 1)), a, b))
    if site.is_stacked(bias) == site.is_stacked(b) != site.is_stacked(a):
        return _product(site, a, b, bias)
    return None


def _product(site: Site, a: Any, b: Any, *bias: Any) -> Call:
    """Return one product for all members, which have one factor in common.

    The other factor is made contiguous: members' parameters are in rows with gaps, and those of a check are not, so
    that the same view would be a different operand for BLAS.
    """
    function = _aten.addmm.default if bias else _aten.mm.default
    rows, columns = site.out.shape
    if site.is_stacked(a):
        rows_of_all = Call(Tensor.contiguous, (Call(Tensor.flatten, (a, 0, 1)),))
        joint = Call(function, (*bias, rows_of_all, b))
        return Call(Tensor.view, (joint, [site.width, rows, columns]))
    bias = tuple(Call(Tensor.flatten, (part,)) for part in bias)
    columns_of_all = Call(Tensor.flatten, (Call(Tensor.transpose, (b, 0, 1)), 1, 2))
    joint = Call(function, (*bias, a, Call(Tensor.contiguous, (columns_of_all,))))
    by_member = Call(Tensor.transpose, (Call(Tensor.view, (joint, [rows, site.width, columns])), 0, 1))
    return Call(Tensor.contiguous, (by_member,))


def _samples(count: int) -> Rule:
    """Return the rule for an operation that computes each sample of its first ``count`` arguments by itself."""

    def rule(site: Site) -> Call | None:
        args = site.node.args
        common = [*args[count:], *site.node.kwargs.values()]
        if not all(map(site.is_stacked, args[:count])) or any(map(site.is_stacked, common)):
            return None
        if site.node.target is _aten.convolution_backward.default and any(args[-1][1:]):  # type: ignore[index, arg-type]
            return None  # gradients of weights are sums over samples
        return Call(samples_of_all, (site.node.target, count, *args), dict(site.node.kwargs))

    return rule


def _convolution(site: Site) -> Call | None:
    return _samples(1)(site) or _image(convolution)(site)


def _layer_norm(site: Site) -> Call | None:
    """Return a call that normalises each row by itself, if the weights are in common and need no gradients."""
    args: list[Any] = list(site.node.args)
    backward = site.node.target is _aten.native_layer_norm_backward.default
    rows, weights = ([args[0], args[1], *args[3:5]], args[5:7]) if backward else (args[:1], args[2:4])
    if any(map(site.is_stacked, weights)) or not all(map(site.is_stacked, rows)) or (backward and any(args[7][1:])):
        return None
    return _call(site, site.node.args)


def _image(function: Callable[..., Any]) -> Rule:
    """Return the rule for an operation on images that all members share."""

    def rule(site: Site) -> Call | None:
        images = [site.examples[node] for node in site.node.all_input_nodes if site.rank(node) == 4]
        if not all(site.is_stacked(arg) for arg in site.node.all_input_nodes) or not images:
            return None
        transposed = function is convolution and site.node.args[6]
        if transposed or any(image.device.type != "cpu" for image in images):
            return None
        return Call(function, site.node.args, dict(site.node.kwargs))

    return rule


def _same(site: Site) -> Call | None:
    return _call(site, site.node.args)


_RULES: dict[Any, Rule] = {
    _aten.view.default: _shape,
    _aten._unsafe_view.default: _shape,
    _aten.reshape.default: _shape,
    _aten.expand.default: _expand,
    _aten.t.default: _t,
    _aten.transpose.int: _with_dims(1, 2),
    _aten.permute.default: _permute,
    _aten.unsqueeze.default: _unsqueeze,
    _aten.squeeze.dim: _with_dims(1),
    _aten.slice.Tensor: _with_dims(1),
    _aten.select.int: _with_dims(1),
    _aten.unbind.int: _with_dims(1),
    _aten.detach.default: _same,
    _aten.clone.default: _same,
    _aten.cat.default: _list_along,
    _aten.sum.dim_IntList: _with_dims(1),
    _aten.mean.dim: _with_dims(1),
    _aten.sum.default: _sum,
    _aten._log_softmax.default: _with_dims(1),
    _aten._softmax.default: _with_dims(1),
    _aten._safe_softmax.default: _with_dims(1),
    _aten._log_softmax_backward_data.default: _with_dims(2),
    _aten._softmax_backward_data.default: _with_dims(2),
    _aten.mm.default: _mm,
    _aten.addmm.default: _addmm,
    _aten.bmm.default: _samples(2),
    _aten.native_layer_norm.default: _layer_norm,
    _aten.native_layer_norm_backward.default: _layer_norm,
    _aten._scaled_dot_product_flash_attention_for_cpu.default: _samples(3),
    _aten._scaled_dot_product_flash_attention_for_cpu_backward.default: _samples(6),
    _aten.convolution.default: _convolution,
    _aten.convolution_backward.default: _samples(2),
    gradients: _image(gradients_of_all),
    max_pool: _samples(1),
    _aten.max_pool2d_with_indices_backward.default: _image(max_pool_gradients_of_all),
}

_EXACT = {
    *(_aten.add.Tensor, _aten.sub.Tensor, _aten.mul.Tensor, _aten.div.Tensor, _aten.mul.Scalar, _aten.div.Scalar),
    *(_aten.neg.default, _aten.abs.default, _aten.relu.default, _aten.sqrt.default, _aten.threshold_backward.default),
    *(_aten.maximum.default, _aten.minimum.default, _aten.clamp.default, _aten.clamp_min.default),
    *(_aten.where.self, _aten.masked_fill.Scalar, _aten.eq.Scalar, _aten.ne.Scalar, _aten.lt.Scalar, _aten.le.Scalar),
    *(_aten.gt.Scalar, _aten.ge.Scalar, _aten.eq.Tensor, _aten.bitwise_not.default, _aten.logical_not.default),
}
