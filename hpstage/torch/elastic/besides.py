"""What training must not change besides model and optimizer, since each virtual node would change it for itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from hpstage.checkpoints.state_tree import digest
from hpstage.training.capture.survey import Survey


def besides(
    state: Mapping[str, Any], base: Survey, model: torch.nn.Module, optimizer: torch.optim.Optimizer
) -> dict[str, str]:
    """Describe what a state has besides the parameters and buffers, which are averaged, and what the optimizer makes of
    them in one step for all nodes.

    Args:
        state: a TorchLoop's.
        base: all that training can reach, as setup has left it.
    """
    averaged = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
    averaged |= {id(tensor) for group in optimizer.param_groups for tensor in group["params"]}
    values = {f"model.{name}": value for name, value in state["model"].items()} | state["values"]
    others = {path: value for path, value in values.items() if id(base.paths[path].obj) not in averaged}
    return {
        path: "changed" if path in state["changed"] else digest(others[path])
        for path in (*others, *state["changed"])
        if not path.startswith(("optimizer.", "optimizer["))
    }
