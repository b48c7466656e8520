"""How long will I train? Schedulers sized by the trainer, as in the documentation of Lightning and Hugging Face."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import optuna
import pytest
import torch
from torch.optim import lr_scheduler

import hpstage
from hpstage.errors import StopTraining, TrainingError
from hpstage.testing.trainable import fresh
from hpstage.training.identity.code_identity import code_identity

pytest.importorskip("lightning")
pytest.importorskip("transformers")

from transformers import Trainer, get_linear_schedule_with_warmup

from hpstage.torch.lightning import LightningTrainable
from tests.torch import hugging_face
from tests.torch.hugging_face import arguments, setup, weights, without_dropout
from tests.torch.lit import CPU, EPOCH, HP, LitShapes, ShapesDataModule, fitted
from tests.torch.test_transformers import alone

pytestmark = [
    pytest.mark.sampled(10),
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning"),  # Lightning 2.6 under torch 2.13
]

# --- Lightning


class OneCycle(LitShapes):
    """As in the documentation of ``Trainer.estimated_stepping_batches``."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
        steps = self.trainer.estimated_stepping_batches
        scheduler = lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=steps)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


class LinearWithWarmup(LitShapes):
    """As in the tutorial "Finetune Transformers Models with PyTorch Lightning"."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams["lr"], eps=1e-8)
        scheduler = get_linear_schedule_with_warmup(
            optimizer, num_warmup_steps=2, num_training_steps=self.trainer.estimated_stepping_batches
        )
        return [optimizer], [{"scheduler": scheduler, "interval": "step", "frequency": 1}]


class CosineByEpochs(LitShapes):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=self.hparams["lr"])
        return [optimizer], [lr_scheduler.CosineAnnealingLR(optimizer, T_max=self.trainer.max_epochs)]


LENGTHS = {
    "epochs": {"max_epochs": 3},
    "steps": {"max_steps": 11},
    "both": {"max_epochs": 3, "max_steps": 11},
    "accumulation": {"max_epochs": 3, "accumulate_grad_batches": 2},
    "accumulation, steps": {"max_steps": 7, "accumulate_grad_batches": 2},
}
BATCHES = {"epochs": 15, "steps": 11, "both": 11, "accumulation": 15, "accumulation, steps": 12}


@pytest.mark.parametrize(
    ("module", "length"),
    [
        *((OneCycle, length) for length in LENGTHS),
        *((LinearWithWarmup, length) for length in ("epochs", "steps")),
        (CosineByEpochs, "epochs"),
    ],
)
def test_schedulers_sized_by_the_lightning_trainer_equal_those_of_lightning(
    module: type[LitShapes], length: str
) -> None:
    arguments, steps = LENGTHS[length], BATCHES[length]
    alone, trainer = fitted(module, {"lr": 0.1}, **arguments)
    adapter: Any = fresh(LightningTrainable(module, ShapesDataModule(), trainer={**CPU, **arguments}), lambda step: HP)
    assert len(alone.weights) == steps
    for step, expected in enumerate(alone.weights):
        with suppress(StopTraining):
            adapter.train(step, HP)
        found = adapter._attached["model"].state_dict()
        assert all(torch.equal(found[name], value) for name, value in expected.items()), step
    groups = adapter._attached["optimizer"].param_groups
    assert [group["lr"] for group in groups] == [group["lr"] for group in trainer.optimizers[0].param_groups]
    assert (adapter.horizon.steps, adapter.horizon.sizes) == (steps, True)


def test_max_epochs_sizes_no_schedule_if_no_code_reads_it() -> None:
    adapter: Any = fresh(
        LightningTrainable(LitShapes, ShapesDataModule(), trainer={**CPU, "max_epochs": 3}), lambda step: HP
    )
    adapter.train(0, HP)
    assert (adapter.horizon.steps, adapter.horizon.sizes) == (3 * EPOCH, False)


# --- Hugging Face


class OneCycleTrainer(Trainer):
    """With the scheduler that the documentation overrides ``create_scheduler`` for."""

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        optimizer = self.optimizer if optimizer is None else optimizer
        self.lr_scheduler = lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=num_training_steps)
        return self.lr_scheduler


SCRIPTS: Mapping[str, Callable[..., Any]] = {
    "OneCycle": lambda **length: setup(trainer_class=OneCycleTrainer, args=arguments(**length)),
    "linear with warm-up": lambda **length: setup(args=arguments(lr_scheduler_type="linear", warmup_steps=3, **length)),
    "cosine, a part is warm-up": lambda **length: setup(
        args=arguments(lr_scheduler_type="cosine", warmup_steps=0.2, **length)
    ),
}


@pytest.mark.ci
@pytest.mark.parametrize("name", SCRIPTS)
def test_schedulers_sized_by_training_arguments_equal_those_of_transformers(name: str) -> None:
    adapter = hugging_face.fresh(SCRIPTS[name](), {"seed": 42})
    for step in range(hugging_face.STEPS - 1):
        adapter.train(step, {"seed": 42})
    with pytest.raises(StopTraining, match=r"TrainingArguments\(max_steps=8\) ends training in update 8"):
        adapter.train(hugging_face.STEPS - 1, {"seed": 42})
    expected = alone(SCRIPTS[name](), 42)
    assert all(torch.equal(weights(adapter)[key], value) for key, value in expected.items())
    assert (adapter.horizon.steps, adapter.horizon.sizes) == (hugging_face.STEPS, True)
    with pytest.raises(TrainingError, match="no further update can be trained"):
        adapter.train(hugging_face.STEPS, {"seed": 42})


@pytest.mark.ci
@pytest.mark.parametrize("name", SCRIPTS)
def test_schedulers_sized_by_epochs_equal_those_of_transformers(name: str) -> None:
    """(Randomness is keyed once in an epoch.)"""
    length = {"max_steps": -1, "num_train_epochs": 2}
    here, there = SCRIPTS[name](**length), SCRIPTS[name](**length)
    here.model_init = there.model_init = without_dropout
    here.step_unit = "epoch"
    adapter = hugging_face.trained(hugging_face.fresh(here, {"seed": 42}), lambda step: {"seed": 42}, 0, 2)
    state, expected = here.trainer.state, alone(there, 42, by_epoch=True)
    assert (state.global_step, state.max_steps, state.num_train_epochs) == (14, 14, 2)
    assert all(torch.equal(weights(adapter)[key], value) for key, value in expected.items())
    assert adapter.horizon.steps == 2


def test_the_training_length_in_training_arguments_is_in_the_key() -> None:
    lengths = [{"max_steps": 8}, {"max_steps": 9}, {"max_steps": -1, "num_train_epochs": 2}, {"max_steps": -1}]
    assert len({str(code_identity(setup(args=arguments(**length)))) for length in lengths}) == 4


def test_max_steps_is_ignored_if_the_learning_rate_is_a_hyperparameter() -> None:
    hp = {"seed": 42, "learning_rate": 1e-3}
    adapter = hugging_face.fresh(setup(args=arguments(max_steps=2)), hp)
    for step in range(4):
        adapter.train(step, hp)
    assert adapter.horizon is None


# --- searches: trials of another length


def lightning_of(**length: int) -> Any:
    return LightningTrainable(OneCycle, ShapesDataModule(), trainer={**CPU, **length}), "val_loss"


def hugging_face_of(**length: int) -> Any:
    return setup(args=arguments(lr_scheduler_type="linear", **length)), "eval_loss"


@pytest.mark.ci
@pytest.mark.parametrize(
    ("make", "trainer"), [(lightning_of, "lightning.Trainer"), (hugging_face_of, "TrainingArguments")]
)
@pytest.mark.parametrize(
    ("steps", "warning"),
    [
        (6, ""),
        (4, "Trial 0: it has 4 steps, but a schedule is made for the 6 steps of {}(max_steps=6)"),
        (9, "Trial 0: it has 9 steps, but {}(max_steps=6) ends training after 6"),
    ],
)
@pytest.mark.ci_one_in(2)
def test_a_trial_whose_length_differs_from_that_of_the_trainer_is_logged_once(
    make: Any, trainer: str, steps: int, warning: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainable, metric = make(max_steps=6)
    study = optuna.create_study(study_name="study")
    with caplog.at_level(logging.WARNING, "hpstage"):
        result = hpstage.optimize(
            study,
            trainable,
            lambda trial: {"seed": trial.suggest_int("seed", 0, 10_000)},
            metric=metric,
            steps=steps,
            n_trials=2,
            store=tmp_path,
            executor=hpstage.InlineExecutor(),
        )
    found = [record.getMessage() for record in caplog.records if " steps, but " in record.getMessage()]
    assert len(found) == bool(warning) and all(text.startswith(warning.format(trainer)) for text in found)
    assert [trial.state for trial in study.trials] == [optuna.trial.TrialState.COMPLETE] * 2
    assert [result.load(number).step for number in range(2)] == [min(steps, 6)] * 2
