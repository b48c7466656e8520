"""Where a step is a batch, its loss is read in the next step; what a chain reports is as if each step had waited."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from msgspec.structs import replace
from torch import nn
from torch.utils.data import default_collate

from hpstage.checkpoints import FolderCheckpoints
from hpstage.errors import NonFiniteLoss
from hpstage.plan.facts import StateKey, TrainingEnded
from hpstage.plan.messages import BoundaryReached, ChainEnded, ChainReport
from hpstage.testing.chains import chain
from hpstage.torch.loop import TorchLoop
from tests.torch.trainables import Small
from tests.unit.execution.background import Played

STEPS = 9


class Diverging(Small):
    """Has a loss that is not a number in a step. ``taken`` is called with the number of each batch that is taken."""

    device = "cuda"
    batch_size = 8
    stateless = ("taken", "batches")

    def __init__(self, at: int | None = None, taken: Callable[[int], None] = lambda number: None) -> None:
        super().__init__(lambda parameters, hp: torch.optim.SGD(parameters, lr=hp["x"]))
        self.at, self.taken = at, taken
        self.count = self.batches = 0

    def collate(self, batch: Any) -> Any:
        self.batches += 1
        self.taken(self.batches - 1)
        return default_collate(batch)

    def update(self, model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> Any:
        loss = super().update(model, optimizer, batch)
        self.count += 1
        return loss * float("nan") if self.count - 1 == self.at else loss

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        return {"norm": sum(float(weight.detach().norm()) for weight in model.parameters()), "count": self.count}


def waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make each step wait for its loss."""
    monkeypatch.setattr(TorchLoop, "expect", lambda self, more: None)


def ran(subject: Diverging, folder: Path, stop: tuple[int, Literal["at once", "kept", "paused"]] | None) -> list[Any]:
    played = Played(TorchLoop(subject), FolderCheckpoints(folder, StateKey("w" * 32)), background=False)

    def taken(number: int) -> None:
        if stop is not None and number == stop[0]:
            played.control.pause() if stop[1] == "paused" else played.control.stop(keep=stop[1] == "kept")

    subject.taken = taken
    return [without_times(report) for report in played.run(chain("c", STEPS, 3, 6, x=0.01))]


def without_times(report: ChainReport) -> Any:
    if isinstance(report, BoundaryReached):
        reached = replace(
            report.reached, at=0.0, train_seconds=0.0, load_seconds=0.0, evaluate_seconds=0.0, save_seconds=0.0,
            peak_bytes=None,
        )  # fmt: skip
        ending = None if report.ending is None else replace(report.ending, at=0.0)
        return replace(report, reached=reached, ending=ending)
    if isinstance(report, ChainEnded):
        return replace(report, at=0.0, wasted_seconds=0.0)
    return replace(report, at=0.0) if isinstance(report, TrainingEnded) else report


@pytest.mark.one_in(3)
@pytest.mark.parametrize("at", [None, 0, 3, 4, STEPS - 1])
@pytest.mark.parametrize("how", ["at once", "kept", "paused", None])
def test_reading_the_loss_one_step_late_changes_no_report(
    at: int | None, how: Literal["at once", "kept", "paused"] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stops = [None] if how is None else [(step, how) for step in range(STEPS)]
    late = [ran(Diverging(at), tmp_path / f"late{number}", stop) for number, stop in enumerate(stops)]
    waiting(monkeypatch)
    assert late == [ran(Diverging(at), tmp_path / f"waits{number}", stop) for number, stop in enumerate(stops)]
    if at is not None and how is None:
        assert f"the training loss is nan in step {at}" in str(late)


def test_the_next_batch_is_taken_before_the_previous_loss_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    read = torch.Tensor.item

    def reading(tensor: torch.Tensor) -> Any:
        if tensor.device.type == "cuda" and tensor.dtype == torch.float32 and tensor.numel() == 1:
            events.append("read")
        return read(tensor)

    loop = TorchLoop(Diverging(2, lambda number: events.append("take")))
    hp = {"x": 0.01}
    loop.setup(hp)
    loop.prepare()
    monkeypatch.setattr(torch.Tensor, "item", reading)
    for step in range(3):
        loop.expect(True)
        loop.train(step, hp)
    assert events == ["take", "take", "read", "take", "read"]
    with pytest.raises(NonFiniteLoss, match="nan in step 2") as raised:
        loop.train(3, hp)
    assert raised.value.steps_late == 1


def test_an_unread_loss_is_discarded_when_the_model_is_replaced(tmp_path: Path) -> None:
    loop, hp = TorchLoop(Diverging(0)), {"x": 0.01}
    loop.setup(hp)
    state = loop.state_dict()
    for start in (lambda: loop.setup(hp), lambda: loop.load_state_dict(state)):
        start()
        loop.expect(True)
        loop.train(0, hp)
    loop.setup(hp)
    assert loop.evaluate()["count"] == 0
    loop.settle(0)
    with pytest.raises(NonFiniteLoss):
        loop.train(0, hp)  # nothing is left to a step that is not expected
