"""What training must not change besides model and optimizer, since each virtual node would change it for itself."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from hpstage.checkpoints.state_tree import digest
from hpstage.errors import StateError
from hpstage.training.capture.kinds import VALUES
from hpstage.training.capture.survey import Survey

_OPTIMIZER = "optimizer"
_MODEL = "model."


class Besides:
    """Everything else that setup has made: training has to leave it as it is.

    Args:
        base: all that training can reach, as setup has left it.
        pristine: all that was there before; what training changes of that shows in a state.
        model: its parameters and buffers are averaged.
        optimizer: it makes one step for all nodes.
        nodes: the number of virtual nodes.
    """

    def __init__(
        self, base: Survey, pristine: Survey, model: torch.nn.Module, optimizer: torch.optim.Optimizer, nodes: int
    ) -> None:
        self._nodes = nodes
        averaged = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
        averaged |= {id(tensor) for group in optimizer.param_groups for tensor in group["params"]}
        values = [record for record in base if record.kind is VALUES]
        self._allowed = {record.path for record in values if id(record.obj) in averaged}
        self._made = {
            record.path: digest(record.obj)
            for record in values
            if record.path not in self._allowed and record.obj not in pristine and record.content.plain
        }

    def check(self, state: Mapping[str, Any]) -> None:
        """Raise :class:`~hpstage.errors.StateError` if anything else has changed in a state of TorchLoop's."""
        for path in self._changed(state):
            raise StateError(
                f"{path} changes in training, and each of {self._nodes} virtual nodes would change it for itself: "
                f"keep what training changes in parameters and buffers of the model, or name it in `stateless` if "
                f"training does not depend on it"
            )

    def _changed(self, state: Mapping[str, Any]) -> Iterator[str]:
        values = {_MODEL + name: value for name, value in state["model"].items()} | state["values"]
        for path, value in values.items():
            if path in self._allowed or _is_optimizers(path):
                continue
            if path not in self._made or digest(value) != self._made[path]:
                yield path
        yield from (path for path in state["changed"] if not _is_optimizers(path))


def _is_optimizers(path: str) -> bool:
    return path.startswith((f"{_OPTIMIZER}.", f"{_OPTIMIZER}["))
