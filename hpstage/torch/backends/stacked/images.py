"""Convolutions and pooling of images, as operations that several members can share on a CPU.

Members become the groups of one convolution, in channels-last memory. A single member has too few channels to fill a
vector, and a call for each member would cost as much as its computation. Gradients of large images, and of images with
many channels, are computed by torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

_aten = torch.ops.aten

_CHANNELS = 16
"""A convolution of one member with at least this many input channels fills its vectors."""
_PIXELS = 256
"""Maximum number of pixels of an image: up to it, the gradients of two members take at most 1.5 times as long as
torch's for one, and those of eight take about half as long for each (measured)."""


def substitute(graph: Graph) -> None:
    """Replace torch's operations by those of this module that compute the same."""
    for node in graph.nodes:
        if node.target is _aten.convolution_backward.default and _is_small(node):
            node.target = gradients
        elif node.target is _aten.max_pool2d_with_indices.default and _is_image(node.args[0]):
            node.target = max_pool


def _is_image(node: Any) -> bool:
    value: Tensor = node.meta["val"]
    return value.device.type == "cpu" and value.dim() == 4 and value.is_contiguous()


def _is_small(backward: Node) -> bool:
    outer, images, *_ = backward.args
    transposed, groups = backward.args[7], backward.args[9]
    if not (_is_image(outer) and _is_image(images)) or transposed or groups != 1:
        return False
    example: Tensor = images.meta["val"]  # type: ignore[union-attr]
    few = example.shape[1] < _CHANNELS and example.shape[2:].numel() <= _PIXELS
    return few and example.dtype == torch.float32


def convolution(images: Tensor, weights: Tensor, biases: Tensor | None, *options: Any) -> Tensor:
    """Return the result of ``aten.convolution`` for each member. The first dimension of all tensors is that of the
    members."""
    *geometry, groups = options
    biases = None if biases is None else biases.flatten()
    width = len(images)
    return _by_member(
        _aten.convolution.default(_as_channels(images), weights.flatten(0, 1), biases, *geometry, groups * width), width
    )


def gradients_of_all(
    outer: Tensor, images: Tensor, weights: Tensor, bias_sizes: Sequence[int] | None, *options: Any
) -> tuple[Tensor | None, ...]:
    """Return the result of ``aten.convolution_backward`` for each member; see :func:`convolution`."""
    width = len(images)
    of_images, *of_others = _gradients(
        _as_channels(outer), _as_channels(images), weights.flatten(0, 1), width, bias_sizes, *options
    )
    return (
        None if of_images is None else _by_member(of_images, width),
        *(None if part is None else _split(part.contiguous(), width) for part in of_others),
    )


def gradients(outer: Tensor, images: Tensor, weights: Tensor, *options: Any) -> tuple[Tensor | None, ...]:
    """Return the result of ``aten.convolution_backward``, except for rounding. It is computed as for two equal members:
    from two on, the number of members changes no bit."""
    of_images, *of_others = _gradients(_twice(outer), _twice(images), torch.cat([weights, weights]), 2, *options)
    return (
        None if of_images is None else of_images[:, : images.shape[1]].contiguous(),
        *(None if part is None else part[: len(weights)].contiguous() for part in of_others),
    )


def _gradients(
    outer: Tensor, images: Tensor, weights: Tensor, width: int, bias_sizes: Sequence[int] | None, *options: Any
) -> tuple[Tensor | None, ...]:
    *geometry, groups, mask = options
    sizes = None if bias_sizes is None else [width * size for size in bias_sizes]
    return _aten.convolution_backward.default(  # type: ignore[no-any-return]
        *(outer, images, weights, sizes, *geometry, groups * width, mask)
    )


def max_pool(images: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    """Return the result of ``aten.max_pool2d_with_indices``, computed in channels-last memory: with vectors, and
    without branches."""
    values, places = _aten.max_pool2d_with_indices.default(
        images.contiguous(memory_format=torch.channels_last), *options
    )
    return values.contiguous(), places.contiguous()


def max_pool_gradients_of_all(outer: Tensor, images: Tensor, *options: Any) -> Tensor:
    """Return the result of ``aten.max_pool2d_with_indices_backward`` for each member; see :func:`convolution`."""
    *geometry, places = options
    flat = (tensor.flatten(0, 1) for tensor in (outer, images))
    inner = _aten.max_pool2d_with_indices_backward.default(*flat, *geometry, places.flatten(0, 1))
    return _split(inner, len(images))


def samples_of_all(function: Any, count: int, *args: Any, **kwargs: Any) -> Any:
    """Return the result of a function for each member. Its first ``count`` arguments hold samples; all others are the
    same for all members."""
    width = len(args[0])
    results = function(*(tensor.flatten(0, 1) for tensor in args[:count]), *args[count:], **kwargs)
    if isinstance(results, Tensor):
        return _split(results, width)
    return tuple(None if part is None else _split(part, width) for part in results)


def _split(joint: Tensor, width: int) -> Tensor:
    return joint.view(width, len(joint) // width, *joint.shape[1:])


def _as_channels(images: Tensor) -> Tensor:
    """Return the members' images as joint images that have the channels of all members, in channels-last memory."""
    width, count, channels, height, breadth = images.shape
    joint = images.permute(1, 3, 4, 0, 2).contiguous()
    return joint.view(count, height, breadth, width * channels).permute(0, 3, 1, 2)


def _by_member(images: Tensor, width: int) -> Tensor:
    count, _, height, breadth = images.shape
    return images.view(count, width, -1, height, breadth).transpose(0, 1).contiguous()


def _twice(images: Tensor) -> Tensor:
    once = images.contiguous(memory_format=torch.channels_last)
    return torch.cat([once, once], 1).contiguous(memory_format=torch.channels_last)
