"""Decides which operations compute each sample of a batch from that sample alone.

A value has its samples along one dimension, beginning with the rows of the first one. A rule gives the dimension of the
samples in the result of an operation, from those in its inputs. An operation without a rule, or with inputs that the
rule does not cover, is assumed to mix samples.

A sample must have the same bits at each position in a batch. So rules refuse cases in which kernels of the CPU are
known to run other code at the end of a tensor: last elements that fill no vector, samples along columns, and products
with few columns. :mod:`hpstage.torch.backends.stacked.outputs` tries out the rest.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Node

from hpstage.torch.backends.stacked.images import max_pool
from hpstage.torch.backends.stacked.planning import LOOP
from hpstage.torch.backends.stacked.rules import is_exact

_aten = torch.ops.aten

_COLUMNS = 16
"""Number of columns of a product from which on BLAS computes all its rows by the same code."""
_IN_ONE_THREAD = 32768
"""Number of elements up to which torch computes a pointwise operation in one thread. Further threads may begin within a
vector."""


class Rows(NamedTuple):
    """Describes which entries of a value belong to which sample."""

    dim: int
    of_sample: int
    """Number of entries of each sample along this dimension."""


class MixesSamples(Exception):
    """The operation is not known to compute each sample independently."""


def rows_of(graph: Iterable[Node], batch: Iterable[Node], samples: int) -> dict[Node, Rows] | None:
    """Return where the values that depend on a batch have their samples; None if an operation mixes samples.

    Args:
        graph: the operations, in order.
        batch: tensors of ``samples`` samples along their first dimension.
    """
    analysis = _Analysis(dict.fromkeys(batch, Rows(0, 1)), samples)
    of_batch = set(analysis.rows)
    for node in graph:
        inputs = node.all_input_nodes
        try:
            if not analysis.rows.keys().isdisjoint(inputs):
                analysis.rows[node] = analysis.of(node)
            elif _is_repeated(node, samples):
                analysis.rows[node] = Rows(0, 1)
        except MixesSamples:
            if not of_batch.isdisjoint(inputs):
                return None
        if not of_batch.isdisjoint(inputs):
            of_batch.add(node)
    return analysis.rows


def _is_repeated(node: Node, samples: int) -> bool:
    """Return whether a value is expanded to all samples, without depending on the batch."""
    if node.target is not _aten.expand.default:
        return False
    value: Tensor = node.meta["val"]
    return value.dim() > 0 and value.shape[0] == samples and value.stride(0) == 0


class _Analysis:
    """Where values have their samples, as far as that is known.

    Args:
        rows: the rows of the tensors of the batch; those of other values are added.
    """

    def __init__(self, rows: dict[Node, Rows], samples: int) -> None:
        self.rows = rows
        self._samples = samples

    def of(self, node: Node) -> Rows:
        """Return where the result of an operation has its samples; all results of one operation have them in the same
        dimension."""
        target: Any = node.target
        if target is operator.getitem:
            return self.rows[node.args[0]]  # type: ignore[index]
        if target in _RULES:
            return _RULES[target](self, node)
        pointwise = isinstance(target, torch._ops.OpOverload) and torch.Tag.pointwise in target.tags
        if not pointwise or not isinstance(node.meta["val"], Tensor):
            raise MixesSamples
        rows = self.aligned(node)
        if not is_exact(node) and any(arg.meta["val"].is_floating_point() for arg in node.all_input_nodes):
            self.require_whole_loops(node)
        return rows

    def require_outermost(self, node: Node) -> None:
        """Require that samples follow each other in memory."""
        value, rows = node.meta["val"], self.rows[node]
        strides = [stride for stride, size in zip(value.stride(), value.shape, strict=True) if size > 1]
        if strides and 0 < value.stride(rows.dim) < max(strides):
            raise MixesSamples

    def require_whole_loops(self, node: Node) -> None:
        """Require that no vector of torch's has elements of two samples, and that no element is computed outside
        vectors."""
        value: Tensor = node.meta["val"]
        for arg in node.all_input_nodes:
            if arg in self.rows:
                self.require_outermost(arg)
        if value.nbytes // self._samples % LOOP or (value.numel() > _IN_ONE_THREAD and torch.get_num_threads() > 1):
            raise MixesSamples

    def first(self, node: Node, *others: Any) -> Rows:
        """Return the rows of the first argument. Besides it, only ``others`` may depend on the batch."""
        first: Any = node.args[0]
        if first not in self.rows or any(
            arg in self.rows for arg in node.all_input_nodes if arg not in (first, *others)
        ):
            raise MixesSamples
        return self.rows[first]

    def aligned(self, node: Node) -> Rows:
        """Return the rows of a result whose shape is that of its inputs, broadcast."""
        rank = node.meta["val"].dim()
        found = set()
        for arg in node.all_input_nodes:
            if arg in self.rows:
                dim, of_sample = self.rows[arg]
                found.add(Rows(dim + rank - arg.meta["val"].dim(), of_sample))
        if len(found) != 1:
            raise MixesSamples
        (rows,) = found
        for arg in node.all_input_nodes:
            if arg not in self.rows:
                self.require_equal(arg, rows.dim - rank + arg.meta["val"].dim())
        return self.checked(node.meta["val"], rows)

    def require_equal(self, node: Node, dim: int) -> None:
        """Require that a value which does not depend on the batch is the same for all samples."""
        value: Tensor = node.meta["val"]
        if dim >= 0 and value.shape[dim] != 1 and value.stride(dim) != 0:
            raise MixesSamples

    def checked(self, value: Tensor, rows: Rows) -> Rows:
        if not 0 <= rows.dim < value.dim() or value.shape[rows.dim] != self._samples * rows.of_sample:
            raise MixesSamples
        return rows

    def in_order(self, node: Node) -> Rows:
        """Return the rows of a result that has the elements of its argument in the same order."""
        rows = self.first(node)
        before: Tensor = node.args[0].meta["val"]  # type: ignore[union-attr]
        after: Tensor = node.meta["val"]
        ahead, count = before.shape[: rows.dim].numel(), 1
        for dim, size in enumerate(after.shape):
            if count == ahead and size % self._samples == 0:
                return Rows(dim, size // self._samples)
            count *= size
        raise MixesSamples


_Rule = Callable[[_Analysis, Node], Rows]


def _shape(node: Any) -> torch.Size:
    shape: torch.Size = node.meta["val"].shape
    return shape


def _permute(analysis: _Analysis, node: Node) -> Rows:
    rows, rank = analysis.first(node), len(_shape(node))
    if node.target is _aten.permute.default:
        order = [dim % rank for dim in node.args[1]]  # type: ignore[union-attr, operator]
    else:
        order = [*range(rank)]
        given: Any = (0, rank - 1) if node.target is _aten.t.default else node.args[1:3]
        one, two = (dim % rank for dim in given)
        order[one], order[two] = order[two], order[one]
    return Rows(order.index(rows.dim), rows.of_sample)


def _expand(analysis: _Analysis, node: Node) -> Rows:
    rows = analysis.first(node)
    dim = rows.dim + len(_shape(node)) - len(_shape(node.args[0]))
    return analysis.checked(node.meta["val"], Rows(dim, rows.of_sample))


def _along(position: int, default: Any = None, *, removed: bool = False, computes: bool = False) -> _Rule:
    """Return the rule for an operation along dimensions of its first argument other than that of the samples.

    Args:
        position: index of the argument that gives these dimensions.
        default: the dimensions if this argument is left out.
        removed: whether the result lacks these dimensions.
        computes: whether numbers are computed along these dimensions. Then samples must be outermost in memory:
            otherwise vectors may run along them.
    """

    def rule(analysis: _Analysis, node: Node) -> Rows:
        rows, rank = analysis.first(node), len(_shape(node.args[0]))
        given: Any = node.args[position] if len(node.args) > position else default
        if given is None or given == []:
            raise MixesSamples  # all of them
        dims = {dim % rank for dim in (given if isinstance(given, list | tuple) else [given])}
        if rows.dim in dims:
            raise MixesSamples
        if computes:
            analysis.require_outermost(node.args[0])  # type: ignore[arg-type]
            if rows.dim > min(dims) or (not removed and dims != {rank - 1}):
                raise MixesSamples
        keepdim = node.args[position + 1] if len(node.args) > position + 1 else node.kwargs.get("keepdim", False)
        kept = not removed or keepdim is True
        if node.target in (_aten.select.int, _aten.unbind.int):
            kept = False
        return Rows(rows.dim if kept else rows.dim - sum(dim < rows.dim for dim in dims), rows.of_sample)

    return rule


def _layer_norm(analysis: _Analysis, node: Node) -> Rows:
    rows = analysis.first(node)
    shape: Any = node.args[1]
    if rows.dim >= len(_shape(node.args[0])) - len(shape):
        raise MixesSamples
    return rows


def _batches(*, evaluated: int | None = None) -> _Rule:
    """Return the rule for an operation whose first argument has the samples along its first dimension.

    Args:
        evaluated: for a normalisation, index of the argument that must be False: whether it uses statistics of the
            batch.
    """

    def rule(analysis: _Analysis, node: Node) -> Rows:
        rows = analysis.first(node)
        if rows.dim != 0 or (evaluated is not None and node.args[evaluated] is not False):
            raise MixesSamples
        return rows

    return rule


def _attention(analysis: _Analysis, node: Node) -> Rows:
    mask: Any = node.kwargs.get("attn_mask")
    rows = analysis.first(node, *node.args[1:3], mask)
    if any(analysis.rows.get(arg) != rows for arg in node.args[:3]) or rows.dim != 0:  # type: ignore[arg-type]
        raise MixesSamples
    if isinstance(mask, Node):
        if mask in analysis.rows and (analysis.rows[mask] != rows or len(_shape(mask)) != 4):
            raise MixesSamples
        if mask not in analysis.rows and len(_shape(mask)) == 4:
            analysis.require_equal(mask, 0)
    return rows


def _product(analysis: _Analysis, node: Node) -> Rows:
    """Return the rows of a product of a matrix whose rows are samples and a matrix that does not depend on the batch;
    an added bias must not depend on it either."""
    *bias, a, b = node.args
    if a not in analysis.rows or b in analysis.rows or analysis.rows[a].dim != 0:  # type: ignore[index]
        raise MixesSamples
    if _shape(b)[-1] < _COLUMNS:
        raise MixesSamples
    analysis.require_outermost(a)  # type: ignore[arg-type]
    for part in bias:
        if part in analysis.rows:
            raise MixesSamples
        analysis.require_equal(part, len(_shape(part)) - 2)  # type: ignore[arg-type]
    return analysis.rows[a]  # type: ignore[index]


def _products(analysis: _Analysis, node: Node) -> Rows:
    found = {analysis.rows[arg] for arg in node.all_input_nodes if arg in analysis.rows}
    for arg in node.all_input_nodes:
        if arg not in analysis.rows:
            analysis.require_equal(arg, len(_shape(arg)) - 3)
        elif len(_shape(arg)) != 3:
            raise MixesSamples
    if len(found) != 1 or next(iter(found)).dim != 0:
        raise MixesSamples
    return found.pop()


def _look_up(analysis: _Analysis, node: Node) -> Rows:
    weight, indices = node.args[:2]
    if weight in analysis.rows or indices not in analysis.rows:
        raise MixesSamples
    return analysis.rows[indices]  # type: ignore[index]


def _cat(analysis: _Analysis, node: Node) -> Rows:
    found = {analysis.rows[arg] for arg in node.all_input_nodes if arg in analysis.rows}
    dim: Any = node.args[1] if len(node.args) > 1 else 0
    if len(found) != 1 or (rows := found.pop()).dim == dim % len(_shape(node)):
        raise MixesSamples
    for arg in node.all_input_nodes:
        if len(_shape(arg)) != len(_shape(node)):
            raise MixesSamples
        if arg not in analysis.rows:
            analysis.require_equal(arg, rows.dim)
    return analysis.checked(node.meta["val"], rows)


_RULES: dict[Any, _Rule] = {
    **dict.fromkeys(
        [
            *(_aten.view.default, _aten._unsafe_view.default, _aten.reshape.default, _aten.unsqueeze.default),
            *(_aten.squeeze.dim, _aten.squeeze.dims, _aten.squeeze.default),
        ],
        _Analysis.in_order,
    ),
    **dict.fromkeys(
        [_aten.detach.default, _aten.alias.default, _aten.clone.default, _aten._to_copy.default],
        _Analysis.first,
    ),
    **dict.fromkeys([_aten.permute.default, _aten.transpose.int, _aten.t.default], _permute),
    _aten.expand.default: _expand,
    **dict.fromkeys([_aten.slice.Tensor, _aten.select.int, _aten.unbind.int], _along(1, 0)),
    **dict.fromkeys([_aten.split.Tensor, _aten.split_with_sizes.default], _along(2, 0)),
    **dict.fromkeys(
        [_aten._softmax.default, _aten._log_softmax.default, _aten._safe_softmax.default, _aten.cumsum.default],
        _along(1, computes=True),
    ),
    **dict.fromkeys(
        [
            *(_aten.sum.dim_IntList, _aten.mean.dim, _aten.amax.default, _aten.amin.default),
            *(_aten.var.correction, _aten.std.correction, _aten.var_mean.correction),
        ],
        _along(1, removed=True, computes=True),
    ),
    _aten.native_layer_norm.default: _layer_norm,
    _aten.native_group_norm.default: _batches(),
    _aten.convolution.default: _batches(),
    **dict.fromkeys(
        [
            *(_aten.max_pool2d_with_indices.default, max_pool, _aten.avg_pool2d.default),
            *(_aten._adaptive_avg_pool2d.default, _aten.adaptive_max_pool2d.default),
        ],
        _batches(),
    ),
    _aten._native_batch_norm_legit_no_training.default: _batches(),
    _aten.native_batch_norm.default: _batches(evaluated=5),
    _aten.cudnn_batch_norm.default: _batches(evaluated=5),
    _aten._scaled_dot_product_flash_attention_for_cpu.default: _attention,
    **dict.fromkeys([_aten.mm.default, _aten.addmm.default], _product),
    **dict.fromkeys([_aten.bmm.default, _aten.baddbmm.default], _products),
    _aten.embedding.default: _look_up,
    _aten.cat.default: _cat,
}
