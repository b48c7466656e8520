"""s.plateau trains as an ordinary loop with torch's scheduler does, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import optuna
import pytest
import torch
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

import hpstage
from hpstage import schedule as s

STEPS = 14
X = torch.linspace(-1, 1, 16).reshape(-1, 1)
DATA = TensorDataset(X, X.sin())


def fitted(run: hpstage.Run) -> None:
    torch.manual_seed(3)
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=run.hp["lr"])
    run.attach(model=model, optimizer=optimizer)
    for _ in run.steps():
        for x, y in run.batches(DataLoader(DATA, batch_size=16)):
            optimizer.zero_grad()
            mse_loss(model(x), y).backward()
            optimizer.step()
        if run.wants_report:
            run.report(loss=distance(model))


def distance(model: torch.nn.Module) -> float:
    with torch.no_grad():
        return mse_loss(model(X), X.sin()).item()


def space(trial: optuna.Trial) -> dict[str, Any]:
    return {"lr": s.plateau(1.9, factor=0.5, patience=trial.suggest_categorical("patience", [0, 1, 2]))}


@pytest.mark.ci
def test_plateau_trains_like_a_loop_with_reduce_lr_on_plateau_bit_for_bit(tmp_path: Path) -> None:
    study = optuna.create_study(sampler=optuna.samplers.GridSampler({"patience": [0, 1, 2]}))
    here = hpstage.InlineExecutor()
    result = hpstage.optimize(study, fitted, space, metric="loss", steps=STEPS, executor=here, store=tmp_path)
    parted = set()
    for trial in study.trials:
        torch.manual_seed(3)
        model = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.9)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=trial.params["patience"])
        losses, rates = [], []
        for _ in range(STEPS):
            rates.append(optimizer.param_groups[0]["lr"])
            optimizer.zero_grad()
            mse_loss(model(X), X.sin()).backward()
            optimizer.step()
            losses.append(distance(model))
            scheduler.step(losses[-1])
        parted.add(tuple(rates))
        assert list(result.schedules(trial.number)["lr"].values(STEPS)) == rates
        assert [trial.intermediate_values[step] for step in range(1, STEPS + 1)] == losses
        assert all(map(torch.equal, result.load(trial).model.parameters(), model.parameters()))
    assert len(parted) == 3
    assert STEPS < result.savings.steps_trained == result.savings.steps_unique < 3 * STEPS
