"""Hooks of modules, optimizers and tensors; scripted modules."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from tests.torch.oddities.oddity import Odd, odd

# --- hooks


PASSED: list[int] = []


def passed(*given: Any) -> None:
    PASSED.append(len(PASSED))


@odd("a hook of all modules, that training places")
def _(kept: Any, self: Odd) -> float:
    if self.steps == 2:
        nn.modules.module.register_module_forward_hook(passed)
    return len(PASSED)


@odd("a full backward hook of all modules, that training places")
def _(kept: Any, self: Odd) -> float:
    if self.steps == 2:
        nn.modules.module.register_module_full_backward_hook(passed)
    return len(PASSED)


@odd("hooks of all modules and optimizers, counting in a closure", network=lambda: with_hooks_of_all())
def _(kept: Any, self: Odd) -> float:
    return float(self.net.counted())


def with_hooks_of_all() -> Any:
    network = nn.Sequential(nn.Flatten(), nn.Linear(16, 3))
    calls: list[int] = []

    def hook(*given: Any) -> None:
        calls.append(len(calls))

    nn.modules.module.register_module_forward_hook(hook)
    register_optimizer_step_post_hook(hook)
    network.counted = lambda: len(calls)  # type: ignore[assignment]
    return network


@odd(
    "a hook of all optimizers, made in training",
    refused=r"torch\.optim\.optimizer\._global_optimizer_pre_hooks\[\d\] holds a function that training has made",
)
def _(kept: Any, self: Odd) -> float:
    if self.steps == 2:
        register_optimizer_step_pre_hook(lambda *given: None)
    return 0


class Packing:
    count = 0

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        self.count += 1
        return tensor

    def unpack(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor


@odd("hooks of saved tensors", Packing)
def _(kept: Any, self: Odd) -> float:
    if self.steps == 2:
        torch.autograd.graph.saved_tensors_hooks(kept.pack, kept.unpack).__enter__()
    return kept.count


@odd("a hook of a module, for the length of a step")
def _(kept: Any, self: Odd) -> float:
    seen: list[float] = []
    handle = self.net[1].register_forward_hook(lambda module, given, made: seen.append(float(made.detach().sum())))
    self.net(torch.ones(1, 4, 4))
    handle.remove()
    return seen[0]


@odd("hooks of tensors, for the length of a step", lambda: torch.ones(2, requires_grad=True))
def _(kept: Any, self: Odd) -> float:
    handles = [kept.register_hook(lambda gradient: gradient * 2)]
    handles.append(kept.register_post_accumulate_grad_hook(lambda tensor: None))
    kept.grad = None
    (kept * self.steps).sum().backward()
    for handle in handles:
        handle.remove()
    return float(kept.grad.sum())


def hooked() -> torch.Tensor:
    made = torch.ones(2, requires_grad=True)
    made.register_hook(lambda gradient: gradient * 2)
    return made


@odd("a hook of a tensor that training has made", refused=r"self\.kept has been given a hook in training")
def _(kept: Any, self: Odd) -> float:
    if self.steps == 2:
        self.kept = hooked()
    return 0


# --- TorchScript


class ListOfNumbers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.seen: Any = torch.jit.Attribute([], list[float])

    def forward(self, x: torch.Tensor) -> float:
        self.seen.append(1.0)
        return float(len(self.seen))


class TableOfNumbers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.seen: Any = torch.jit.Attribute({"a": 0}, dict[str, int])

    def forward(self, x: torch.Tensor) -> int:
        self.seen["a"] += 1
        return self.seen["a"]


class ListOfTensors(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.seen: Any = torch.jit.Attribute([torch.ones(1)], list[torch.Tensor])
        self.limit: Any = torch.jit.Attribute([float("nan")], list[float])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen[0].add_(1.0)
        self.seen.append(self.seen[0] * 2.0)
        return self.seen[-1].clone()


class PlainTensor(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.seen = torch.zeros(1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.add_(1.0)
        return self.seen.clone()


Pair = NamedTuple("Pair", [("count", int), ("total", torch.Tensor)])  # noqa: UP014  # TorchScript reads no text


class NamedFields(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.seen: Any = torch.jit.Attribute(Pair(0, torch.zeros(1)), Pair)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = Pair(self.seen.count + 1, self.seen.total + 2.0)
        return self.seen.total * self.seen.count


for module in (ListOfNumbers, TableOfNumbers, ListOfTensors, PlainTensor, NamedFields):
    odd(f"{module.__name__} of a scripted module", lambda module=module: torch.jit.script(module()))(  # type: ignore[misc]
        lambda kept, self: kept(torch.zeros(1))
    )


class Counter:
    def __init__(self) -> None:
        self.count = 0

    def more(self) -> int:
        self.count += 1
        return self.count


class Holding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.counter = Counter()

    def forward(self, x: torch.Tensor) -> int:
        return self.counter.more()


odd(
    "an object of TorchScript's in a scripted module",
    lambda: torch.jit.script(Holding()),
    refused=r"counter of a module of TorchScript holds a .*, which nothing can look into",
)(lambda kept, self: kept(torch.zeros(1)))
