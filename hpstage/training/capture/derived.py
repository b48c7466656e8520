"""Objects that torch derives from others: weights that it computes before each use, and counted optimizer steps."""

from __future__ import annotations

import functools
import sys
import types
import weakref
from collections.abc import Collection, Iterable, Iterator
from typing import Any

from hpstage.errors import StateError
from hpstage.training.capture.kind import torch
from hpstage.training.capture.values import NO_HOOKS, hooks_of, same_hooks
from hpstage.training.code.attributes import dict_of, own_of

# --- weights

# torch's hooks that compute a tensor of a module before each use: module, class, and attribute with the tensor's name.
_HOOKS = (
    ("torch.nn.utils.weight_norm", "WeightNorm", "name"),
    ("torch.nn.utils.spectral_norm", "SpectralNorm", "name"),
    ("torch.nn.utils.prune", "BasePruningMethod", "_tensor_name"),
)


def weights_among(objects: Iterable[object]) -> Iterator[Any]:
    """Yield the tensors of modules that a torch hook recomputes before each use. The graphs by which they were computed
    no longer matter."""
    library: Any = torch()
    hooks = [(vars(sys.modules[module])[name], where) for module, name, where in _HOOKS if module in sys.modules]
    for module in objects:
        if not isinstance(module, library.nn.Module):
            continue
        own = dict_of(module) or {}
        for hook in own.get("_forward_pre_hooks", {}).values():
            for kind, where in hooks:
                if isinstance(hook, kind) and type(hook).__call__ is kind.__call__:
                    yield own.get(vars(hook).get(where))


# --- tensors of a graph of gradients


def reached_by_gradients(tensor: Any, others: Collection[Any]) -> list[Any]:
    """Return the leaves that a backward pass from a tensor reaches; none if earlier passes have freed what it needs.

    Args:
        others: nodes of the graph, each of a tensor that training can reach. Of those on the way, the node is returned.
    """
    found: list[Any] = []
    met, todo = set[Any](), [tensor.grad_fn]
    while todo:
        node = todo.pop()
        if node in met:
            continue
        met.add(node)
        following = [one for one, _ in node.next_functions if one is not None]
        if not following or (node in others and node is not tensor.grad_fn):
            found.append(getattr(node, "variable", node))
        elif not _is_freed(node):
            todo += following
    return found


def _is_freed(node: Any) -> bool:
    if isinstance(node, _kept()._backward_cls):
        return bool(node.spent)
    for name in dir(node):
        if name.startswith("_saved_"):
            try:
                getattr(node, name)
            except RuntimeError as error:
                if "already been freed" in str(error):
                    return True
    return False


def is_plain(tensor: Any) -> bool:
    """Return whether a tensor of a graph is nothing but values, which another one can hold in the same form."""
    library: Any = torch()
    if type(tensor) is not library.Tensor or tensor.layout is not library.strided or own_of(tensor):
        return False
    if tensor.retains_grad or tensor.is_conj() or tensor.is_neg() or not same_hooks(hooks_of(tensor), NO_HOOKS):
        return False
    return bool(library.empty_like(tensor, device="meta").stride() == tensor.stride())


def without_graph(values: Any, path: str, leaves: list[Any]) -> Any:
    """Return a tensor with these values and no graph. Requesting gradients through it raises an explanatory error, also
    if they are requested for one of the ``leaves`` alone."""
    with torch().enable_grad():
        return _kept().apply(values if leaves else values.detach().requires_grad_(), path, not leaves, *leaves)


@functools.cache
def _kept() -> Any:
    class Kept(torch().autograd.Function):  # type: ignore[misc]
        @staticmethod
        def forward(context: Any, values: Any, path: str, spent: bool, *leaves: Any) -> Any:
            context.path, context.spent = path, spent
            return values.clone()

        @staticmethod
        def backward(context: Any, gradient: Any) -> Any:
            raise StateError(
                f"training has requested gradients through {context.path}, a tensor of an earlier step, whose graph no "
                f"state can hold: compute it again first (call its module)"
            )

    return Kept


# --- schedulers wrap an optimizer's ``step`` to see that it was called

_WRAPPER = "LRScheduler.__init__.<locals>.patch_track_step_called.<locals>.wrap_step.<locals>.wrapper"
_CLOSURE = ("func", "opt_ref")


def optimizer_counted_by(function: types.FunctionType) -> Any:
    """Return the optimizer whose ``step`` a scheduler wrapped in this function; ``None`` for any other function."""
    code = _code_of_wrapper()
    if code is None or function.__code__ is not code or code.co_freevars != _CLOSURE:
        return None
    step, reference = (cell.cell_contents for cell in function.__closure__ or ())
    optimizer = reference()
    return optimizer if optimizer is not None and type(optimizer).step is step else None


def counting_step(optimizer: Any) -> Any:
    """Return the function with which a scheduler wraps the ``step`` of this optimizer."""
    code: Any = _code_of_wrapper()
    if code is None or code.co_freevars != _CLOSURE or not isinstance(optimizer, torch().optim.Optimizer):
        raise StateError("the state holds an optimizer's step as wrapped by a scheduler of another torch version")
    step = type(optimizer).step
    closure = types.CellType(step), types.CellType(weakref.ref(optimizer))
    made = types.FunctionType(code, vars(sys.modules["torch.optim.lr_scheduler"]), "wrapper", None, closure)
    functools.update_wrapper(made, step)
    made._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    return made


def _code_of_wrapper() -> types.CodeType | None:
    module: Any = sys.modules.get("torch.optim.lr_scheduler")
    codes: list[types.CodeType] = [] if module is None else [module.LRScheduler.__init__.__code__]
    while codes:
        code = codes.pop()
        if code.co_qualname == _WRAPPER:
            return code
        codes += [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
    return None
