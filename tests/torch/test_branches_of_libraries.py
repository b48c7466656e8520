"""Branches of trials that a library trains: each as that trial trained from its first step, bit for bit; what the
library reads at step 0 only is refused by name, before anything is trained."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import hpstage
from hpstage import schedule as s
from hpstage.checkpoints.state_tree import digest
from hpstage.errors import UsageError
from hpstage.search.results.trial import TrainedTrial

STEPS = 8
pytestmark = pytest.mark.filterwarnings("ignore:.*does not have many workers", "ignore:.*LeafSpec:FutureWarning")


@dataclass
class Case:
    make: Callable[[], Any]
    metric: str
    hp: dict[str, Any]
    changes: dict[str, Any]
    fixed: dict[str, Any] = field(default_factory=dict)
    """Of which one is refused, with the beginning of the reason."""


def transformers(**arguments: Any) -> Case:
    pytest.importorskip("transformers")
    from tests.torch import hugging_face as hf

    hp = {"learning_rate": 0.01, "weight_decay": 0.1, "warmup_steps": 0, "width": 16, "seed": 1}
    scheduled = "lr_scheduler_type" in arguments
    return Case(
        partial(hf.setup, model_init=hf.bert, args=hf.arguments(**arguments)),
        "eval_loss",
        hp,
        {"weight_decay": 0.3} if scheduled else {"learning_rate": s.linear(0.005), "seed": 5},
        {"learning_rate": (0.1, "lr_scheduler_type='cosine' of TrainingArguments sets it from its value at step 0")}
        if scheduled
        else dict.fromkeys(("width", "warmup_steps"), (8, "it is read only when a trial begins")),
    )


def own_order() -> Case:
    case = transformers(dataloader_drop_last=True)
    why = r"Trainer decides the order of samples itself, .* have their defaults\. Branch at step 0, at=0$"
    hp = {**case.hp, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 1}
    fixed = {"seed": (5, why), "per_device_train_batch_size": (8, why), "gradient_accumulation_steps": (2, why)}
    return replace(case, hp=hp, changes={"learning_rate": s.linear(0.005)}, fixed=fixed)


def lightning() -> Case:
    pytest.importorskip("lightning")
    from hpstage.torch.lightning import LightningTrainable
    from tests.torch.lit import CPU, LitShapes, ShapesDataModule

    return Case(
        lambda: LightningTrainable(LitShapes, datamodule=ShapesDataModule(), trainer=CPU),
        "val_loss",
        {"lr": 0.1, "width": 4, "batch_size": 5, "seed": 3},
        {"lr": 0.01, "batch_size": 7},
        {"width": (8, "the code reads it only where .* or read self.hparams.width in each step")},
    )


def skorch() -> Case:
    pytest.importorskip("skorch")
    from skorch import NeuralNetRegressor

    from hpstage.torch.skorch import SkorchTrainable

    x = np.random.RandomState(0).randn(40, 1).astype(np.float32)
    return Case(
        lambda: SkorchTrainable(
            NeuralNetRegressor(torch.nn.Linear, module__in_features=1, module__out_features=1), x, x
        ),
        "valid_loss",
        {"lr": 0.1, "module__bias": True, "seed": 3},
        {"lr": 0.01, "seed": 5},
        {"module__bias": (False, "it is read only when a trial begins")},
    )


def stable_baselines3() -> Case:
    pytest.importorskip("stable_baselines3")
    from stable_baselines3 import A2C

    from hpstage.torch.stable_baselines3 import StableBaselines3Trainable
    from tests.torch.test_stable_baselines3 import Walk

    def make(hp: Any) -> Any:
        return A2C("MlpPolicy", Walk(), n_steps=int(hp["n_steps"]), device="cpu")

    return Case(
        lambda: StableBaselines3Trainable(make, Walk, episodes=2),
        "mean_reward",
        {"learning_rate": 0.01, "n_steps": 8, "seed": 3},
        {"learning_rate": 0.1},
        {"n_steps": (4, "it is read only when a trial begins")},
    )


def boosting(library: str, metric: str, rate: str, fixed: str) -> Case:
    pytest.importorskip(library.lower())
    x = np.random.RandomState(0).randn(60, 3)
    data = (x, x[:, 0] + x[:, 1] ** 2)
    params = {"objective": "l2", "metric": "l2"} if library == "LightGBM" else {"eval_metric": "rmse"}
    return Case(
        lambda: getattr(hpstage.boosting, library)(data, data, params),
        metric,
        {rate: 0.1, fixed: 15},
        {rate: 0.3},
        {fixed: (7, f"it is read only when a trial begins; these can change later: .*{rate}")},
    )


CASES: dict[str, Callable[[], Case]] = {
    "transformers": transformers,
    "transformers with an order of its own": own_order,
    "transformers with a scheduler": partial(transformers, lr_scheduler_type="cosine", warmup_steps=0, max_steps=12),
    "lightning": lightning,
    "skorch": skorch,
    "stable-baselines3": stable_baselines3,
    "xgboost": partial(boosting, "XGBoost", "rmse", "eta", "num_parallel_tree"),
    "lightgbm": partial(boosting, "LightGBM", "l2", "learning_rate", "max_bin"),
}


def train(case: Case, hp: Any, steps: int, store: Path) -> TrainedTrial:
    here = hpstage.InlineExecutor()
    trained = hpstage.train(
        case.make(), hp, steps=steps, metric=case.metric, store=store, checkpoint_every=3, executor=here
    )
    assert isinstance(trained, TrainedTrial)
    return trained


@pytest.mark.ci
@pytest.mark.parametrize("name", CASES)
def test_a_branch_of_a_library_run_equals_a_run_trained_from_scratch(name: str, tmp_path: Path) -> None:
    case = CASES[name]()
    run = train(case, case.hp, STEPS, tmp_path / "store")
    for value, (other, why) in case.fixed.items():
        with pytest.raises(UsageError, match=rf"'{value}' cannot change at step 5 of trial runs/0: {why}"):
            run.branch(5, {value: other}, executor=hpstage.InlineExecutor())
    assert hpstage.open(tmp_path / "store").trials == ["runs/0"]
    at_first = {value: other for value, (other, _) in case.fixed.items()}
    for at, changes, steps in [(0, at_first, STEPS), (5, case.changes, STEPS), (STEPS, case.changes, STEPS + 3)]:
        branch = run.branch(at, changes, steps=steps, executor=hpstage.InlineExecutor())
        assert isinstance(branch, TrainedTrial)
        alone = train(case, branch.schedules, steps, tmp_path / f"alone from {at}")
        assert branch.metrics[steps] == alone.metrics[steps]
        assert digest(branch.state(steps)) == digest(alone.state(steps))
