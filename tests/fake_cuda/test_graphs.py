"""CUDA graphs: a step is recorded with every optimizer, changes what it trains where it is, and forks bit for bit."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import nn

from hpstage.checkpoints.state_tree import reread
from hpstage.errors import TrainingError
from hpstage.testing import StepBackendContract
from hpstage.torch.backends import graphed
from hpstage.torch.loop import TorchLoop
from tests.fake_cuda import graphs
from tests.fake_cuda.test_forks import OPTIMIZERS
from tests.torch.trainables import FORK, STEPS, Small, advance, fresh, hp_at, outcome

WHOLE = ["sgd", "fused sgd", "adam", "capturable adam", "fused adamw", "adamw foreach"]
"""Optimizers whose formula is part of the graph. With the others it holds the loss and its gradients."""


class Graphed(Small):
    numerics = "graphed"
    device = "cuda"

    def __init__(self, name: str = "adam") -> None:
        super().__init__(lambda params, hp: OPTIMIZERS[name](params))


class OnSecond(Graphed):
    device = "cuda:1"


class Large(Graphed):
    """With a parameter whose changes are noticed by their number only."""

    def model(self, hp: Mapping[str, Any]) -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 2000), nn.ReLU(), nn.Linear(2000, 3))


class Noisy(Graphed):
    """Changes its batch where it is, and reads a number of each step."""

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        x, y = batch
        x.mul_(2.0).add_(torch.rand_like(x), alpha=0.1)
        return nn.functional.cross_entropy(model(x), y) * (1.0 + self.hp["lr"])


class Mixed(Graphed):
    """Has a number on the host, of which a graph would hold the first value."""

    def model(self, hp: Mapping[str, Any]) -> nn.Module:
        self.scale = torch.tensor(2.0)
        return super().model(hp)

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        return super().loss(model, batch) * self.scale


class Decomposing(Graphed):
    """Decomposes a matrix; whether that has worked, torch reads from the GPU."""

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        return super().loss(model, batch) + 0.0 * torch.linalg.eigvalsh(torch.eye(2, device="cuda")).sum()


@pytest.fixture(autouse=True)
def _no_graphs() -> None:
    graphs.made.clear()


class TestGraphed(StepBackendContract):
    numerics = "graphed"


def loop_of(trainable: Small, start: int = 0, stop: int = 0) -> TorchLoop:
    loop = advance(fresh(trainable), start, stop)
    assert isinstance(loop, TorchLoop)
    return loop


def trained(loop: TorchLoop) -> dict[str, torch.Tensor]:
    """What a step of Adam's changes."""
    [optimizer] = loop.optimizers()
    model = loop._ready().model
    found = dict(model.named_parameters()) | dict(model.named_buffers())
    for number, held in enumerate(optimizer.state.values()):
        found |= {f"{name} {number}": value for name, value in held.items()}
    return found


def addresses(loop: TorchLoop) -> dict[str, int]:
    return {name: tensor.data_ptr() for name, tensor in trained(loop).items()}


def op_by_op(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphed.CudaGraph, "__call__", lambda self, arguments: self._function(list(arguments)))


CASES: dict[str, Callable[[], Small]] = {
    **{name: lambda name=name: Graphed(name) for name in (*WHOLE, "amsgrad", "radam", "adagrad")},
    "second device": OnSecond,
    "changed batch": Noisy,
    "large": Large,
}


# Of the optimizers one that is fused, one that counts its steps and one that branches on their number.
SAMPLE = ("fused sgd", "adam", "radam", "second device", "changed batch", "large")


@functools.cache
def trained_straight(case: str) -> tuple[object, object, list[bool]]:
    """Return the state at the fork, what training straight through comes to, and whether each graph was replayed. Two
    tests need it, and to record its graphs takes seconds."""
    graphs.made.clear()
    loop = loop_of(CASES[case](), 0, FORK)
    state = reread(loop.state_dict())
    return state, outcome(advance(loop, FORK, STEPS)), [graph.replays > 0 for graph in graphs.made]


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=() if case in SAMPLE else pytest.mark.slow) for case in CASES]
)
def test_a_fork_with_cuda_graphs_equals_training_without_a_fork_bit_for_bit(case: str) -> None:
    state, straight, replayed = trained_straight(case)
    assert replayed == [True, True], "one for each size of a batch"
    forked = fresh(CASES[case]())
    forked.load_state_dict(state)
    assert outcome(advance(forked, FORK, STEPS)) == straight


@pytest.mark.one_in(2)
@pytest.mark.parametrize("case", ["adam", "fused sgd", "changed batch", "radam", "second device"])
def test_cuda_graph_replay_has_the_same_bits_as_running_its_operations_one_by_one(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, straight, replayed = trained_straight(case)
    assert replayed
    op_by_op(monkeypatch)
    assert outcome(loop_of(CASES[case](), 0, STEPS)) == straight


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", WHOLE)
def test_a_cuda_graph_updates_weights_and_optimizer_state_in_place(name: str) -> None:
    loop = loop_of(Graphed(name), 0, 4)
    found = trained(loop)
    assert all(tensor.is_cuda for tensor in found.values()), "the optimizer's steps, too"
    [graph] = graphs.made
    assert {args[0].data_ptr() for function, args, _, _ in graph.calls if function._schema.is_mutable} == {
        tensor.data_ptr() for tensor in found.values()
    }


def test_a_state_is_loaded_into_the_memory_that_the_cuda_graph_uses() -> None:
    loop = loop_of(Graphed(), 0, 4)
    before, state = addresses(loop), reread(loop.state_dict())
    straight = outcome(advance(loop, 4, STEPS))
    count = len(graphs.made)
    loop.load_state_dict(state)
    assert outcome(advance(loop, 4, STEPS)) == straight
    assert addresses(loop) == before
    assert len(graphs.made) == count, "nothing was recorded again"


def test_the_step_counter_of_the_optimizer_moves_to_the_device_for_a_cuda_graph() -> None:
    loop = loop_of(Graphed())
    loop.update(tuple(value.to("cuda") for value in next(iter(_batches()))))
    assert {str(tensor.device) for name, tensor in trained(loop).items() if name.startswith("step")} == {"cpu"}
    advance(loop, 0, 3)
    assert {str(tensor.device) for name, tensor in trained(loop).items() if name.startswith("step")} == {"cuda:0"}
    assert [graph.replays > 0 for graph in graphs.made] == [True]


def _batches() -> Any:
    return torch.utils.data.DataLoader(Graphed().dataset(), batch_size=8)


def test_two_models_trained_in_turn_by_cuda_graphs_equal_training_without_graphs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def outcomes() -> list[object]:
        loop, found = loop_of(Graphed()), []
        for seed in (3, 4):
            loop.setup({**hp_at(0), "seed": seed})
            for step in range(4):
                loop.train(step, {**hp_at(0), "seed": seed})
            found.append(outcome(loop))
        return found

    replayed = outcomes()
    assert graphs.made
    op_by_op(monkeypatch)
    assert outcomes() == replayed and replayed[0] != replayed[1]


def test_cuda_graphs_of_a_replaced_model_hold_no_memory() -> None:
    loop = loop_of(Graphed(), 0, 4)
    held = [weakref.ref(tensor) for tensor in trained(loop).values()]
    graphs.made.clear()
    loop.setup({**hp_at(0), "seed": 4})
    loop.prepare()
    assert [found() for found in held if found() is not None] == []


def test_a_step_that_cannot_be_a_cuda_graph_runs_eagerly_and_the_reason_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    loop_of(Mixed(), 0, 3)
    assert graphs.made == []
    assert (
        "Mixed is trained without a CUDA graph: cpu device (arg11_1): a graph needs all tensors of loss()"
        in caplog.text
    )


def test_a_cuda_graph_of_a_step_that_waits_for_the_gpu_is_refused_by_name() -> None:
    with pytest.raises(
        TrainingError, match=r"a step of Decomposing cannot be recorded as a CUDA graph: .*Give numerics = 'eager'"
    ):
        loop_of(Decomposing(), 0, 3)
