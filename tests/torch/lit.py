"""LightningModules as the tutorials of Lightning write them, and plain ``lightning.Trainer`` to compare with."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
import torchmetrics
from lightning.pytorch.callbacks import WeightAveraging
from torch import nn
from torch.optim.swa_utils import get_ema_avg_fn
from torch.utils.data import DataLoader, Dataset, Sampler, TensorDataset, random_split

from hpstage.checkpoints import FolderCheckpoints
from hpstage.plan.facts import StateKey
from hpstage.testing.trainable import fresh, outcome, trained
from hpstage.torch.lightning import LightningTrainable
from hpstage.training.randomness import Purpose, rekey
from hpstage.training.sample_order import SampleOrder

HP = {"lr": 0.1, "seed": 3}
CPU = {"accelerator": "cpu"}
SAMPLES, BATCH, EPOCH = 44, 8, 5
"""Of 60 samples 44 are for training: five full batches and a short one, which the DataModule drops."""


class ShapesDataModule(L.LightningDataModule):
    def __init__(self, batch_size: int = BATCH, drop_last: bool = True, shuffle: bool = True) -> None:
        super().__init__()
        self.save_hyperparameters()

    def prepare_data(self) -> None:
        pass

    def setup(self, stage: str) -> None:
        generator = torch.Generator().manual_seed(0)
        x, y = torch.randn(60, 1, 8, 8, generator=generator), torch.arange(60) % 3
        self.train, self.val = random_split(TensorDataset(x, y), [SAMPLES, 16], generator)

    def train_dataloader(self) -> DataLoader[Any]:
        hp = self.hparams
        return DataLoader(self.train, batch_size=hp.batch_size, shuffle=hp.shuffle, drop_last=hp.drop_last)

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.val, batch_size=6)


class LitShapes(L.LightningModule):
    """BatchNorm and dropout, SGD with a step-wise decay per epoch."""

    def __init__(self, width: int = 4, lr: float = 0.1, momentum: float = 0.9, dropout: float = 0.2) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(
            nn.Conv2d(1, width, 3),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Flatten(),
            nn.Dropout(dropout),
            nn.Linear(36 * width, 3),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        self.log("train_loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        logits = self(x)
        accuracy = (logits.argmax(1) == y).float().mean()
        self.log_dict({"val_loss": F.cross_entropy(logits, y), "val_acc": accuracy}, prog_bar=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.hparams.lr, momentum=self.hparams.momentum)


class WithData(LitShapes):
    """Makes its loaders itself, as Lightning's first tutorials do."""

    def setup(self, stage: str) -> None:
        self.data = ShapesDataModule(shuffle=self.hparams.width == 4)
        self.data.setup(stage)

    def train_dataloader(self) -> DataLoader[Any]:
        return self.data.train_dataloader()

    def val_dataloader(self) -> DataLoader[Any]:
        return self.data.val_dataloader()


class InOrder(Sampler[int]):
    """hpstage's order of samples, for a plain DataLoader."""

    def __init__(self, dataset: Dataset[Any], seed: int, shuffle: bool) -> None:
        self._order, self._seed, self._shuffle, self.epoch = SampleOrder(len(dataset)), seed, shuffle, -1

    def __len__(self) -> int:
        return self._order.population

    def __iter__(self) -> Iterator[int]:
        self.epoch += 1
        size = len(self)
        return iter(self._order.take(self._seed, self.epoch * size, size).tolist() if self._shuffle else range(size))


class Alone(L.Callback):
    """Keys the generators as hpstage does, and keeps weights after each batch, and metrics after each epoch."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._validated = False
        self.weights: list[dict[str, torch.Tensor]] = []
        self.metrics: dict[int, dict[str, float]] = {}

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: L.LightningModule, *args: Any) -> None:
        if trainer.fit_loop.total_batch_idx > 0:
            self._keep(trainer, pl_module)
        rekey(self._seed, trainer.fit_loop.total_batch_idx)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._validated = True

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._keep(trainer, pl_module)

    def _keep(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Keep weights, and metrics if they have just been measured, after all hooks of the last batch and epoch."""
        self.weights.append({name: value.clone() for name, value in pl_module.state_dict().items()})
        if self._validated:
            self.metrics[len(self.weights)] = {name: float(value) for name, value in trainer.callback_metrics.items()}
        self._validated = False


def fitted(
    make: Callable[..., L.LightningModule],
    hp: Mapping[str, Any],
    *,
    seed: int = 3,
    data: ShapesDataModule | None = None,
    callbacks: Any = (),
    **arguments: Any,
) -> tuple[Alone, L.Trainer]:
    """Train by ``lightning.Trainer`` alone, with nothing of hpstage's but the order of data and the random numbers."""
    data = data or ShapesDataModule()
    data.setup("fit")
    loader = data.train_dataloader()
    ordered = DataLoader(
        loader.dataset,
        batch_size=loader.batch_size,
        drop_last=loader.drop_last,
        sampler=InOrder(loader.dataset, seed, data.hparams.shuffle),
    )
    rekey(seed, 0, Purpose.SETUP)
    module, alone = make(**hp), Alone(seed)
    trainer = L.Trainer(
        **{**CPU, **arguments},
        callbacks=[alone, *callbacks],
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    )
    trainer.fit(module, ordered, data.val_dataloader())
    return alone, trainer


class Scheduled(LitShapes):
    """Every form in which ``configure_optimizers`` returns schedulers."""

    form = "step"

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        schedulers = torch.optim.lr_scheduler
        if self.form == "onecycle":
            steps = self.trainer.estimated_stepping_batches
            one = schedulers.OneCycleLR(optimizer, max_lr=self.hparams.lr, total_steps=steps)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": one, "interval": "step"}}
        if self.form == "plateau":
            plateau = schedulers.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "val_loss"}}
        if self.form == "plateau of training":
            plateau = schedulers.ReduceLROnPlateau(optimizer, patience=0, factor=0.5, threshold=0.5)
            of = {"scheduler": plateau, "monitor": "train_loss_epoch"}
            return {"optimizer": optimizer, "lr_scheduler": of}
        if self.form == "frequency":
            step = schedulers.ExponentialLR(optimizer, 0.5)
            return [optimizer], [{"scheduler": step, "interval": "step", "frequency": 3}]
        return [optimizer], [schedulers.StepLR(optimizer, 1, 0.5)]


class OneCycle(Scheduled):
    form = "onecycle"


class Plateau(Scheduled):
    form = "plateau"


class PlateauOfTraining(Scheduled):
    form = "plateau of training"


class Frequency(Scheduled):
    form = "frequency"


class Hooked(LitShapes):
    """With hooks, counters, clipping of its own, torchmetrics, an average, and a callback of its own."""

    def __init__(self, lr: float = 0.1) -> None:
        super().__init__(lr=lr)
        self.accuracy = torchmetrics.classification.MulticlassAccuracy(3)
        self.seen: list[float] = []
        self.outputs: list[torch.Tensor] = []

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.scale = 1 + 0.1 * batch_idx

    def on_train_epoch_start(self) -> None:
        self.seen.clear()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        logits = self(x)
        self.accuracy(logits, y)
        self.log("train_acc", self.accuracy, on_step=False, on_epoch=True)
        loss = F.cross_entropy(logits, y) * self.scale
        return {"loss": loss, "logits": logits.detach()}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append(outputs["logits"].sum().item())

    def on_train_epoch_end(self) -> None:
        self.log("seen", sum(self.seen) / len(self.seen))
        with torch.no_grad():
            self.net[-1].bias.mul_(0.5)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.outputs.append(self(batch[0]).sum())

    def on_validation_epoch_end(self) -> None:
        self.log("val_sum", torch.stack(self.outputs).sum())
        self.outputs.clear()

    def configure_gradient_clipping(self, optimizer: Any, gradient_clip_val: Any, gradient_clip_algorithm: Any) -> None:
        self.clip_gradients(
            optimizer, gradient_clip_val=0.3 + 0.01 * self.current_epoch, gradient_clip_algorithm="norm"
        )

    def configure_callbacks(self) -> Any:
        return [Average()]


class Average(L.Callback):
    """A moving average of the weights, which is what is validated."""

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.average = {name: value.clone() for name, value in pl_module.state_dict().items()}
        self.batches = 0

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *args: Any) -> None:
        self.batches += 1
        for name, value in pl_module.state_dict().items():
            if value.is_floating_point():
                self.average[name].lerp_(value, 0.2)

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.kept = {name: value.clone() for name, value in pl_module.state_dict().items()}
        pl_module.load_state_dict(self.average)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        pl_module.load_state_dict(self.kept)


class Manual(LitShapes):
    """Two optimizers, stepped by hand."""

    def __init__(self, lr: float = 0.1) -> None:
        super().__init__(lr=lr)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        for index, optimizer in enumerate(self.optimizers()):
            self.toggle_optimizer(optimizer)
            loss = F.cross_entropy(self(x), y)
            if batch_idx % 2 == 0:
                optimizer.zero_grad()
            self.manual_backward(loss)
            if batch_idx % 2 or index:
                optimizer.step()
            self.untoggle_optimizer(optimizer)
        self.log("train_loss", loss)

    def configure_optimizers(self) -> Any:
        layers = list(self.net)
        first = torch.optim.SGD(nn.ModuleList(layers[:3]).parameters(), lr=self.hparams.lr)
        return first, torch.optim.Adam(layers[-1].parameters(), lr=0.01)


@dataclass(frozen=True)
class Case:
    module: Callable[..., L.LightningModule] = LitShapes
    hp: Mapping[str, Any] = field(default_factory=lambda: {"lr": 0.1})
    data: Callable[[], ShapesDataModule] = ShapesDataModule
    callbacks: Callable[[], list[L.Callback]] = list
    trainer: Mapping[str, Any] = field(default_factory=dict)
    own_data: bool = False

    def trainable(self) -> LightningTrainable:
        arguments = {**CPU, **self.trainer, "callbacks": self.callbacks()}
        return LightningTrainable(self.module, None if self.own_data else self.data(), trainer=arguments)


class ReadsGradients(LitShapes):
    """Weighs the loss by what the batch before has left: Lightning zeroes gradients after ``training_step``."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        gradient = self.net[-1].bias.grad
        return super().training_step(batch, batch_idx) * (1.0 if gradient is None else 1 + float(gradient.norm()))


class ListOnTrainer(L.Callback):
    """Keeps the last losses on the Trainer, from the first batch or from the second epoch on."""

    def __init__(self, first: int) -> None:
        self.first = first

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.current_epoch >= self.first:
            if not hasattr(trainer, "losses"):
                trainer.losses, trainer.means = [], {}
            trainer.losses.append(outputs["loss"].item())
            trainer.means[len(trainer.losses)] = outputs["loss"].detach()
            with torch.no_grad():
                module.net[-1].bias.add_(1e-3 * sum(trainer.losses[-5:]) * trainer.means[1])


CASES = {
    "plain": Case(),
    "short last batch": Case(data=lambda: ShapesDataModule(drop_last=False)),
    "in order": Case(data=lambda: ShapesDataModule(shuffle=False)),
    "data of the module": Case(WithData, own_data=True),
    "data by a hyperparameter": Case(
        WithData, {"lr": 0.1, "width": 5}, lambda: ShapesDataModule(shuffle=False), own_data=True
    ),
    "step per epoch": Case(Scheduled),
    "onecycle": Case(OneCycle, trainer={"max_epochs": 3}),
    "plateau": Case(Plateau),
    "plateau of training": Case(PlateauOfTraining),
    "frequency": Case(Frequency),
    "hooks": Case(Hooked),
    "manual": Case(Manual),
    "accumulation and clipping": Case(
        Frequency, trainer={"accumulate_grad_batches": 2, "gradient_clip_val": 0.1, "gradient_clip_algorithm": "value"}
    ),
    "double": Case(trainer={"precision": "64-true"}),
    "gradients of the batch before": Case(ReadsGradients),
    "bf16": Case(trainer={"precision": "bf16-mixed"}),
    "validation within epochs": Case(Plateau, trainer={"val_check_interval": 0.5, "limit_val_batches": 2}),
    "max_steps": Case(trainer={"max_steps": 7, "max_epochs": -1}),
    "limit_train_batches": Case(Scheduled, trainer={"limit_train_batches": 3}),
    "a list on the trainer": Case(callbacks=lambda: [ListOnTrainer(0)]),
    "a list on the trainer, late": Case(callbacks=lambda: [ListOnTrainer(1)]),
    "weight averaging": Case(callbacks=lambda: [WeightAveraging(avg_fn=get_ema_avg_fn(0.7))]),
}


def continued(folder: str, steps: int, names: list[str]) -> None:
    """Print what comes of training on from the states of these cases after three steps."""
    store, ends = FolderCheckpoints(folder, "tests"), []
    for index, name in enumerate(names):
        hp = {**CASES[name].hp, "seed": 3}
        trainer = fresh(CASES[name].trainable(), lambda step, hp=hp: hp)
        trainer.load_state_dict(store.load(StateKey(f"{index:032}")))
        ends.append(outcome(trained(trainer, lambda step, hp=hp: hp, 3, steps)))
    print(repr(ends))  # noqa: T201
