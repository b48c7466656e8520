"""Mixtures that Lightning and a Hugging Face Trainer train on: weights decide what is sampled, or are refused."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

import hpstage
from hpstage.checkpoints.state_tree import digest
from hpstage.errors import TrainingError, UsageError
from hpstage.torch.data import batches_of
from hpstage.torch.loading.mixture import Mixture
from tests.torch.test_mixtures import HP, MIXTURES

pytest.importorskip("lightning")
pytest.importorskip("transformers")

import lightning as L

from hpstage.torch.lightning import LightningTrainable
from tests.torch import hugging_face as hf
from tests.torch.lit import CPU

NOISE = torch.linspace(-0.1, 0.1, 22)
pytestmark = pytest.mark.filterwarnings("ignore:.*does not have many workers", "ignore:.*LeafSpec:FutureWarning")


def here() -> dict[str, Any]:
    return {"executor": hpstage.InlineExecutor()}


class Mean(L.LightningModule):
    """Learns the mean of what it is given: 0 of ``low``, 1 of ``high``."""

    def __init__(self, lr: float) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = torch.nn.Sequential(torch.nn.Dropout(0.1), torch.nn.Linear(1, 1))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.log("seen", batch[0].sum())
        return (self.net(torch.ones(len(batch[0]), 1)).squeeze(1) - batch[0]).square().mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        mean = self.net(torch.ones(1, 1)).item()
        self.log_dict({"loss": mean**2, "high": (mean - 1) ** 2})

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.hparams.lr)


def mixture() -> Mixture:
    return Mixture({"low": TensorDataset(NOISE), "high": TensorDataset(1 + NOISE)})


def validation() -> DataLoader[Any]:
    return DataLoader(TensorDataset(NOISE), batch_size=22)


class MixedData(L.LightningDataModule):
    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(mixture(), batch_size=8, shuffle=True)  # an epoch ends with a short batch

    def val_dataloader(self) -> DataLoader[Any]:
        return validation()


class WithMixedData(Mean):
    train_dataloader, val_dataloader = MixedData.train_dataloader, MixedData.val_dataloader


def loaders(**options: Any) -> LightningTrainable:
    train = DataLoader(mixture(), batch_size=8, **options)
    return LightningTrainable(Mean, train, validation(), trainer=CPU)


def trainer(**given: Any) -> Any:
    data = Mixture({"low": hf.sentences(26, 0), "high": hf.sentences(20, 3)})
    return hf.setup(**{"train_dataset": data, "model_init": hf.bert, **given})


class Tokenizing(hf.Trainer):
    """As TRL's trainers, which take data sets of the library datasets."""

    def __init__(self, *args: Any, train_dataset: Any = None, **kwargs: Any) -> None:
        super().__init__(*args, train_dataset=train_dataset.map(dict), **kwargs)


LIT = {**HP, "batch_size": 4}
BERT = {("learning_rate" if name == "lr" else name): value for name, value in HP.items()} | {"dropout": 0.1}
KINDS: dict[str, tuple[Callable[[], Any], dict[str, Any], str]] = {
    "datamodule": (lambda: LightningTrainable(Mean, datamodule=MixedData(), trainer=CPU), HP, "loss"),
    "train_dataloaders": (lambda: loaders(shuffle=True, drop_last=True), LIT, "loss"),
    "loading ahead": (lambda: loaders(shuffle=True, num_workers=2), HP, "loss"),
    "of the module": (lambda: LightningTrainable(WithMixedData, trainer=CPU), LIT, "loss"),
    "transformers": (lambda: trainer(args=hf.arguments(gradient_accumulation_steps=2)), BERT, "eval_loss"),
}


@pytest.mark.ci
@pytest.mark.parametrize(
    "kind",
    # Two of Lightning's four ways to give data are slow: they end in the same loader.
    [
        pytest.param(kind, marks=pytest.mark.slow if kind in ("train_dataloaders", "of the module") else ())
        for kind in KINDS
    ],
)
def test_micro_anneals_of_trainers_equal_training_without_sharing(kind: str, tmp_path: Path) -> None:
    make, hp, metric = KINDS[kind]
    trunk = hpstage.train(make(), hp, steps=10, metric=metric, store=tmp_path / "store", checkpoint_every=5, **here())
    found = trunk.microanneal(MIXTURES, control="as before", at=7, steps=5, seeds=2, **here())
    assert hpstage.open(tmp_path / "store").plan.totals.steps_trained == 10 + 2 + 10 * 5  # step 5 to 7 again
    for number, (name, trials) in enumerate(found.trials.items()):
        one = trials[number % 2]
        alone = hpstage.train(make(), one.schedules, steps=12, metric=metric, store=tmp_path / name, **here())
        assert alone.metrics[12] == one.metrics[12]
        assert digest(alone.state(12)) == digest(one.state(12))
    assert len({digest(trial.state(12)) for trials in found.trials.values() for trial in trials}) == 10
    rate = next(name for name in hp if name in ("lr", "learning_rate"))
    assert found.trials["high"][0].schedules[rate].value(11) == pytest.approx(hp[rate] / 5)


def test_lightning_trains_on_the_samples_that_the_mixture_weights_select(tmp_path: Path) -> None:
    made = LightningTrainable(Mean, datamodule=MixedData(), trainer=CPU)
    run = hpstage.train(made, HP, steps=10, metric="loss", store=tmp_path, evaluate_every=1, **here())
    batches, start = batches_of(mixture(), None, None), 0
    for step in range(10):
        count = 4 if step == 5 else 8  # the rest of an epoch of 44
        hp = {name: value.value(step) for name, value in run.schedules.items()}
        taken = batches.take(mixture().seed(hp), start, count)  # type: ignore[union-attr]
        assert run.metrics[step + 1]["seen"] == taken[0].sum().item()
        start += count


@pytest.mark.parametrize(
    ("make", "hp", "message"),
    [
        (loaders, HP, "whose weights decide the order; give the DataLoader shuffle=True, and no other sampler"),
        (lambda: loaders(sampler=WeightedRandomSampler([1.0] * 44, 44)), HP, "shuffle=True, and no other sampler"),
        (lambda: loaders(shuffle=True), {"lr": 0.1}, "source 'low' of the mixture has no weight; give"),
        (lambda: loaders(shuffle=True), {**HP, "mixture.mid": 1}, "'mixture.mid' is the weight of no source"),
        (lambda: trainer(), {**BERT, "mixture.mid": 1}, "'mixture.mid' is the weight of no source"),
        (lambda: hf.setup(), HP, "nothing reads the hyperparameter 'lr'"),
        (
            lambda: trainer(args=hf.arguments(dataloader_drop_last=True)),
            BERT,
            "Trainer decides the order itself. Leave train_sampling_strategy, dataloader_drop_last",
        ),
        (lambda: trainer(trainer_class=hf.OwnOrder), BERT, "but OwnOrder decides the order itself"),
        (
            lambda: trainer(trainer_class=Tokenizing),
            BERT,
            "but Tokenizing makes other data from it. Prepare the sources",
        ),
        (
            lambda: trainer(trainer_class=hf.Filtering),
            BERT,
            "Filtering makes other data from it. Prepare the sources first",
        ),
    ],
)
def test_settings_that_would_ignore_the_mixture_weights_are_refused(
    make: Callable[[], Any], hp: dict[str, Any], message: str, tmp_path: Path
) -> None:
    metric = "eval_loss" if hp is BERT else "loss"
    with pytest.raises((UsageError, TrainingError), match=re.escape(message)):
        hpstage.train(make(), hp, steps=4, metric=metric, store=tmp_path, **here())
