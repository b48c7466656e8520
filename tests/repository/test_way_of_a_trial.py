"""The files that a trial passes are those that the book lists. Read from the calls of a search in this process."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from pathlib import Path
from types import FrameType
from typing import Any

import optuna
import pytest
import torch

import hpstage
from hpstage.optuna.ledger import Ledger
from hpstage.plan.log import Log
from hpstage.scheduler.answers import Answers
from hpstage.scheduler.chain_builder import ChainBuilder
from hpstage.scheduler.reports import Reports

PACKAGE = Path(__file__).parents[2] / "hpstage"
MOST = 24
OF_A_CLUSTER = {
    *("cluster/executor.py", "cluster/site.py", "cluster/trainer.py"),
    *("cluster/training_process.py", "cluster/inbox.py"),
}
APART = {"errors/arguments.py", "search/dry_run.py", "driver/membership.py", "execution/inline.py"}
"""What checks arguments, joins the plan, and stands for a cluster."""
passed: set[str] = set()


def note() -> None:
    """Note the files of hpstage's that are being called."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(PACKAGE):
            passed.add(str(path.relative_to(PACKAGE)))
        frame = frame.f_back


class Line(hpstage.torch.TorchTrainable):
    device = "cpu"
    stateless = (f"{__name__}:passed",)

    def model(self, hp: Mapping[str, Any]) -> torch.nn.Module:
        return torch.nn.Linear(2, 1)

    def optimizer(self, model: torch.nn.Module, hp: Mapping[str, Any]) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=hp["lr"])

    def dataset(self) -> Any:
        return torch.utils.data.TensorDataset(torch.ones(8, 2), torch.ones(8, 1))

    def loss(self, model: torch.nn.Module, batch: Any) -> torch.Tensor:
        note()
        return (model(batch[0]) - batch[1]).square().mean()

    def evaluate(self, model: torch.nn.Module) -> Mapping[str, float]:
        return {"loss": 0.5}


def space(trial: optuna.Trial) -> dict[str, Any]:
    note()
    return {"lr": trial.suggest_float("lr", 0.01, 0.1), "batch_size": 4}


def test_the_book_lists_the_files_that_a_trial_passes_through(monkeypatch: pytest.MonkeyPatch) -> None:
    def noted(owner: type, name: str) -> None:
        method = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            note()
            passed.add(str(Path(str(sys.modules[owner.__module__].__file__)).relative_to(PACKAGE)))
            return method(*args, **kwargs)

        monkeypatch.setattr(owner, name, call)

    for owner, name in (
        (Log, "write"),
        (ChainBuilder, "begin"),
        (Reports, "facts"),
        (Answers, "reach"),
        (Ledger, "finish"),
    ):
        noted(owner, name)
    hpstage.optimize(
        optuna.create_study(),
        Line(),
        space,
        metric="loss",
        steps=2,
        n_trials=1,
        executor=hpstage.InlineExecutor(),
        verify="off",
    )
    page = (PACKAGE.parent / "notebooks/architecture.md").read_text()
    (paragraph,) = re.findall(r"^The files that a trial passes, .*?\n\n", page, re.DOTALL | re.MULTILINE)
    listed = re.findall(r"`([a-z_/]+\.py)`", paragraph)
    assert set(listed) == passed - APART | OF_A_CLUSTER
    assert len(listed) <= MOST and all((PACKAGE / name).is_file() for name in listed)
