"""The signature of a step: all that its trace depends on besides tensors' values, as far as is known without
tracing."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from itertools import combinations
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from hpstage.training.code.owner import HEAP

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)


class Signature:
    """The signature of a model. Models of the same code with equal signatures take the same steps, unless
    :attr:`objects` says that they may not."""

    def __init__(self, model: nn.Module) -> None:
        self.objects: list[object] = []
        """Objects kept alive so that no other object gets the same id; some are equal only to themselves."""
        self._described: dict[int, int] = {}  # numbers of objects, by id
        own = (*model.named_parameters(), *model.named_buffers())
        self._names = {id(tensor): name for name, tensor in own}
        self.text = "\n".join(self._lines(model))

    def _lines(self, model: nn.Module) -> Iterator[str]:
        first: dict[int, str] = {}
        for path, module in model.named_modules(remove_duplicate=False):
            if first.setdefault(id(module), path) != path:
                yield f"{path} is {first[id(module)]}"
                continue
            self.objects.append(type(module))
            yield f"{path}: {type(module).__module__}.{type(module).__qualname__} {id(type(module))}"
            for name, value in sorted(vars(module).items()):
                if name == "_modules":
                    yield f"  {sorted((child, inner is None) for child, inner in value.items())}"
                elif name in ("_parameters", "_buffers"):
                    for key, tensor in value.items():
                        yield f"  {key}: {_form(tensor)}"
                else:
                    yield f"  {name}: {self._text_of(value)}"
        tied: dict[int, str] = {}
        named = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
        for name, tensor in named:
            if tied.setdefault(id(tensor), name) != name:
                yield f"{name} is {tied[id(tensor)]}"
        for one, other in overlapping(dict(named)):
            yield f"{one} overlaps {other}"

    def _text_of(self, value: Any) -> str:
        if type(value) in _PLAIN:
            return repr(value)
        if type(value) in (tuple, list, set, frozenset):
            parts = map(self._text_of, value)
            return f"{type(value).__name__}({', '.join(parts if isinstance(value, tuple | list) else sorted(parts))})"
        if isinstance(value, dict):
            return f"dict({', '.join(f'{self._text_of(key)}: {self._text_of(item)}' for key, item in value.items())})"
        if id(value) in self._names:
            return f"the tensor {self._names[id(value)]}"
        if isinstance(value, weakref.ref):
            return f"ref({self._text_of(value())})"
        if id(value) in self._described:
            return f"object {self._described[id(value)]}"
        self.objects += [value, type(value)]
        if not _is_its_attributes(value):
            return f"{type(value).__name__} {id(value)}"
        self._described[id(value)] = len(self._described)
        return f"{type(value).__name__} {id(type(value))} {self._text_of(vars(value))}"


def _is_its_attributes(value: object) -> bool:
    """Return whether an object consists of its attributes: its classes are written in Python, without slots. A model's
    configuration is an example; it is often equal to another model's."""
    return hasattr(value, "__dict__") and all(
        of is object or (of.__flags__ & HEAP and not vars(of).get("__slots__")) for of in type(value).__mro__
    )


def overlapping(tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, str]]:
    """Yield the names of each pair of tensors that have memory in common, so that a change of one changes the other."""
    by_storage: dict[int, list[tuple[int, int, str]]] = {}
    for name, tensor in {id(tensor): (name, tensor) for name, tensor in tensors.items()}.values():
        if type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided and tensor.numel():
            first = int(tensor.storage_offset()) * tensor.element_size()
            steps = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
            place = first, first + (int(steps) + 1) * tensor.element_size(), name
            by_storage.setdefault(tensor.untyped_storage()._cdata, []).append(place)
    for places in by_storage.values():
        for (begin, end, one), (start, stop, other) in combinations(places, 2):
            if begin < stop and start < end:
                yield one, other


def _form(tensor: Tensor | None) -> str:
    if tensor is None:
        return "None"
    hooks = bool(tensor._backward_hooks) or bool(getattr(tensor, "_post_accumulate_grad_hooks", None))
    return f"{tuple(tensor.shape)} {tensor.dtype} {tensor.device} {tensor.requires_grad} {tensor.layout} {hooks}"


def shape_key(batch: Any) -> object:
    """Return a hashable key, which must be equal for batches that are trained on together. It has their structure, and
    everything about their tensors except values."""
    if _is_plain(batch):
        return type(batch), tuple((leaf.shape, leaf.dtype, leaf.device) for leaf in batch)
    leaves, spec = pytree.tree_flatten(batch)
    return spec, tuple((leaf.shape, leaf.dtype, leaf.device) if isinstance(leaf, Tensor) else leaf for leaf in leaves)


def tensors_of(batch: Any) -> list[Tensor]:
    """Return a batch's tensors in the order of a trace's inputs, contiguous and aligned as new ones are."""
    leaves = batch if _is_plain(batch) else pytree.tree_leaves(batch)
    return [_aligned(leaf) for leaf in leaves if isinstance(leaf, Tensor)]


def copied(batch: Any) -> Any:
    """Return a batch with copies of its tensors."""
    if _is_plain(batch):
        return type(batch)([leaf.clone() for leaf in batch])
    return pytree.tree_map_only(Tensor, torch.clone, batch)


def _is_plain(batch: Any) -> bool:
    """Return whether a batch is a list or tuple of tensors, as most are. Other batches take ten times as long."""
    return type(batch) in (list, tuple) and all(type(leaf) is Tensor for leaf in batch)


def _aligned(tensor: Tensor) -> Tensor:
    tensor = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return tensor if tensor.data_ptr() % 64 == 0 else tensor.clone()
