"""VirtualNodes: the step backend that cuts a batch into micro-batches, one for each of several virtual nodes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from hpstage.errors import UsageError
from hpstage.torch.backends.backend import StepBackend
from hpstage.torch.elastic.reduction import Gradient, Rows, Share, Tree, mean
from hpstage.torch.trainable import TorchTrainable, see_scalar
from hpstage.training.randomness import Purpose, mix, rekey
from hpstage.training.step_log import Noted, log, recording

_PLAIN = (str, bytes, int, float, bool, type(None))

Failed = tuple[int, Exception]
"""The number of a virtual node, and the exception that the user's code has raised in it."""
Exchange = Callable[[Share | Failed, Sequence[Tensor], Sequence[Tensor]], Share]
"""Combines the share of this process's nodes with those of the other processes, given the parameters and buffers that
it belongs to. If nodes have failed, it raises the error of the first one."""


class _Slot:
    """A buffer of a model: where it is, the tensor itself, and its values at the beginning of the step."""

    __slots__ = ("buffer", "key", "module", "name", "start")

    def __init__(self, name: str, module: nn.Module, key: str, buffer: Tensor) -> None:
        self.name, self.module, self.key, self.buffer = name, module, key, buffer
        self.start = buffer.detach().clone()

    def put(self, value: Tensor) -> None:
        self.module._buffers[self.key] = self.buffer
        self.buffer.copy_(value)

    def read(self) -> Tensor:
        """Return a copy of the values that a virtual node leaves."""
        now = self.module._buffers.get(self.key)
        if now is None or (now.shape, now.dtype) != (self.start.shape, self.start.dtype):
            raise UsageError(
                f"the buffer {self.name} is no longer a tensor of shape {tuple(self.start.shape)} and "
                f"{self.start.dtype}, so it cannot be averaged over virtual nodes: keep the shape and dtype of buffers"
            )
        return now.detach().clone()


class VirtualNodes(StepBackend):
    """Trains this process's virtual nodes of a batch, by default all of them, and then makes the optimizer's step.

    Attributes:
        nodes: number of virtual nodes in a batch.
        own: the virtual nodes that this process trains.
        exchange: see :data:`Exchange`; ``None`` if this process trains all nodes.
        seconds: total seconds that this process's nodes have taken.
    """

    numerics: ClassVar[str] = "virtual-nodes-v1"

    def __init__(self, subject: TorchTrainable, device: torch.device, counts: Callable[[], int | None]) -> None:
        """``counts`` returns the number of samples of the batch that is trained next, if it is known."""
        super().__init__(subject, device)
        self.nodes = subject.virtual_nodes
        self.own = range(self.nodes)
        self.exchange: Exchange | None = None
        self.seconds = 0.0
        self._counts = counts
        self._key = 0
        self._number = 0

    @property
    def departs(self) -> bool:
        """Always ``False``. A step is not that of ``update()`` on the whole batch, and none is compared with it, since
        each node by design draws from a separate stream and normalizes its own part of the batch."""
        return False

    def begin_step(self, seed: int, step: int) -> None:
        self._key = mix(seed, step, Purpose.NODE)
        self._number = 0

    def train(self, model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> float:
        parts = cut(batch, self.nodes, self._counts())
        stream = self._number * (self.nodes + 1)
        self._number += 1
        parameters = dict(_parameters(model, optimizer))
        slots = list(_slots(model))
        try:
            share = self._own(model, parts, stream, parameters, slots)
            if self.exchange is not None:
                share = self.exchange(share, list(parameters), [slot.start for slot in slots])
            if not isinstance(share, Share):
                raise share[1]
            if share.unequal:
                raise UsageError(
                    f"the buffer {slots[min(share.unequal)].name} holds whole numbers, which virtual nodes have "
                    f"changed in different ways. Whole numbers cannot be averaged: make the buffer independent of "
                    f"samples, or let it hold floats"
                )
        except BaseException:
            with torch.no_grad():
                _begin(parameters, slots)  # else buffers would depend on which nodes were trained here
            raise
        with torch.no_grad():
            for slot, value in zip(slots, share.buffers, strict=True):
                slot.put(value)
            for (parameter, _), gradient in zip(parameters.items(), share.gradients, strict=True):
                parameter.grad = mean(gradient, parameter, self.nodes)
        rekey(self._key, stream + self.nodes, Purpose.NODE)
        optimizer.step()
        for parameter in parameters:
            parameter.grad = None
        for name, (total, count) in share.logged.items():
            log(name, total / count)
        return share.loss / self.nodes

    def _own(
        self, model: nn.Module, parts: list[Any], stream: int, parameters: dict[Tensor, str], slots: list[_Slot]
    ) -> Share | Failed:
        began = time.perf_counter()
        grown = Tree()
        for node in self.own:
            try:
                grown.add(self._node(model, parts[node], stream + node, parameters, slots))
            except Exception as error:
                return node, error
        self.seconds += time.perf_counter() - began
        return grown.root()

    def _node(
        self, model: nn.Module, part: Any, stream: int, parameters: dict[Tensor, str], slots: list[_Slot]
    ) -> Share:
        with torch.no_grad():
            _begin(parameters, slots)
        rekey(self._key, stream, Purpose.NODE)
        versions = [parameter._version for parameter in parameters]
        noted = Noted()
        with recording(noted):
            loss = see_scalar(self.subject.loss(model, part), self.subject)
        loss.backward()  # type: ignore[no-untyped-call]
        for (parameter, name), version in zip(parameters.items(), versions, strict=True):
            if parameter._version != version:
                raise UsageError(
                    f"{type(self.subject).__name__}.loss() changes {name}, which each of {self.nodes} virtual nodes "
                    f"would do for itself: let only the optimizer change parameters"
                )
        gradients = [_gradient(parameter, name) for parameter, name in parameters.items()]
        return Share(float(loss.detach()), gradients, [slot.read() for slot in slots], logged=noted.sums())


def cut(batch: Any, parts: int, count: int | None = None) -> list[Any]:
    """Return ``parts`` micro-batches of equal length, in order.

    Tensors are cut along their first dimension, lists and tuples of plain values by their items. The dicts, lists,
    tuples and named tuples that hold them are created again for each part.

    Args:
        batch: the batch, as collated.
        count: the number of its samples; ``None``: the length of its first tensor.

    Raises:
        UsageError: ``parts`` does not divide the batch, or something in it cannot be cut. The message names it.
    """
    if count is None:
        tensors = (leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.dim())
        count = next(map(len, tensors), None)
    if count is None:
        raise UsageError("virtual nodes cannot share the batch, since none of its tensors has a dimension")
    if count % parts:
        raise UsageError(
            f"a batch of {count} samples cannot be cut into {parts} virtual nodes: let each batch have a multiple of "
            f"{parts}; a short one at the end of an epoch or a pass is left out by a DataLoader with drop_last=True"
        )
    size = count // parts
    return [_part(batch, slice(node * size, (node + 1) * size), count, "batch") for node in range(parts)]


def _part(value: Any, rows: slice, count: int, path: str) -> Any:
    kind = type(value)
    if isinstance(value, Tensor):
        if not value.dim() or len(value) != count:
            raise UsageError(
                f"virtual nodes cannot share {path}, a tensor of shape {tuple(value.shape)} in a batch of {count} "
                f"samples: let each tensor of a batch have its samples in the first dimension, and keep "
                f"what is the same for all batches on the trainable or in the model"
            )
        return value[rows]
    if value is None:
        return None
    if kind is dict:
        return {key: _part(item, rows, count, f"{path}[{key!r}]") for key, item in value.items()}
    if kind in (list, tuple) and len(value) == count and all(type(item) in _PLAIN for item in value):
        return value[rows]
    if kind in (list, tuple) or (isinstance(value, tuple) and hasattr(kind, "_make")):
        items = [_part(item, rows, count, f"{path}[{index}]") for index, item in enumerate(value)]
        return kind(items) if kind in (list, tuple) else kind._make(items)
    raise UsageError(
        f"{path} is a {kind.__qualname__}, which virtual nodes cannot share: let collate() make batches of tensors, "
        f"and of dicts, lists and tuples of them"
    )


def _parameters(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[tuple[Tensor, str]]:
    """Yield all parameters of the model and of the optimizer, with a name."""
    for name, parameter in model.named_parameters():
        yield parameter, f"model.{name}"
    known = {id(parameter) for parameter in model.parameters()}
    for index, group in enumerate(optimizer.param_groups):
        for number, parameter in enumerate(group["params"]):
            if id(parameter) not in known:
                yield parameter, f"parameter {number} of param group {index}"


def _slots(model: nn.Module) -> Iterator[_Slot]:
    known = set()
    for path, module in model.named_modules():
        for key, buffer in module._buffers.items():
            # torch does not write to a tensor that overlaps itself, such as an expanded one.
            if buffer is not None and id(buffer) not in known and torch._debug_has_internal_overlap(buffer) != 1:
                known.add(id(buffer))
                yield _Slot(f"{path}.{key}" if path else key, module, key, buffer)


def _begin(parameters: dict[Tensor, str], slots: list[_Slot]) -> None:
    for parameter in parameters:
        parameter.grad = None
    for slot in slots:
        slot.put(slot.start)


def _gradient(parameter: Tensor, name: str) -> Gradient:
    gradient = parameter.grad
    parameter.grad = None
    if gradient is None:
        return None
    gradient = gradient.detach()
    if gradient.layout is torch.strided:
        return gradient
    if gradient.layout is torch.sparse_coo:
        return Rows(gradient._indices(), gradient._values())
    raise UsageError(
        f"{name} has a gradient of the layout {gradient.layout}, which virtual nodes cannot add up: let it be dense, "
        f"or a sparse COO tensor"
    )
