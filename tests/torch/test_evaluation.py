"""What a model is called with in evaluate(): tensors of the CPU as well, where it is on another device."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from hpstage.torch.evaluation import evaluating

CUDA = torch.device("cuda", 0)


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.dropout = nn.Parameter(torch.ones(2, 3)), nn.Dropout()

    def forward(self, x: torch.Tensor, *, scale: torch.Tensor) -> dict[str, torch.Tensor]:
        assert x.device.type == scale.device.type == self.weight.device.type
        return {"logits": nn.functional.linear(self.dropout(x), self.weight) * scale}


def on_cuda() -> Two:
    with CUDA:
        return Two()


def devices(outputs: object) -> set[str]:
    return {leaf.device.type for leaf in pytree.tree_leaves(outputs)}


def test_evaluation_moves_cpu_tensors_to_the_model_and_its_results_back() -> None:
    with FakeTensorMode():
        model = on_cuda()
        x, scale = torch.ones(5, 3), torch.ones(1)
        with evaluating(model, CUDA):
            assert devices(model(x, scale=scale)) == {"cpu"}
            assert devices(model(x, scale=scale.to(CUDA))) == {"cuda"}
            assert devices(model(x.to(CUDA), scale=scale.to(CUDA))) == {"cuda"}
        with pytest.raises(AssertionError):
            model(x, scale=scale)


def test_evaluation_works_after_a_failed_call_and_names_the_remedy_for_mixed_devices() -> None:
    with FakeTensorMode():
        model = on_cuda()
        x, scale = torch.ones(5, 3), torch.ones(1)
        with evaluating(model, CUDA):
            with pytest.raises(RuntimeError):
                model(torch.ones(5, 4), scale=scale)
            assert devices(model(x.to(CUDA), scale=scale.to(CUDA))) == {"cuda"}
        with pytest.raises(RuntimeError) as caught, evaluating(model, CUDA):
            x + model(x.to(CUDA), scale=scale)["logits"].sum(1, keepdim=True)
    assert caught.value.__notes__ == [
        "The model is on cuda:0. Move the tensors there that evaluate() passes to it or compares with its results."
    ]


def test_evaluation_restores_training_modes_and_gradients() -> None:
    model = Two()
    model.dropout.eval()
    with evaluating(model, torch.device("cpu")):
        assert not model.training and not model.dropout.training and not torch.is_grad_enabled()
    assert model.training and not model.dropout.training and torch.is_grad_enabled()
    assert not model._forward_hooks and not model._forward_pre_hooks


def test_a_torchscript_module_is_evaluated_without_moving_tensors() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated
        model = torch.jit.trace(nn.Linear(3, 2), torch.ones(1, 3))
    with evaluating(model, torch.device("meta")):
        assert model(torch.ones(1, 3)).shape == (1, 2)
