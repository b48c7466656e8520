"""One call of ``Trainer.fit``, paused whenever it requests the next batch, and the end that its arguments state."""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.utilities.model_helpers import is_overridden

from hpstage.errors import NonFiniteLoss, TrainingError, UsageError
from hpstage.schedule.space import MIXTURE
from hpstage.torch.data import Batches
from hpstage.torch.horizon import Horizon, limits, no_end
from hpstage.torch.lightning.carried import checked_callbacks
from hpstage.torch.lightning.data import Data, TrainingBatches, training_set
from hpstage.torch.lightning.progress import Progress
from hpstage.torch.lightning.steering import Steering
from hpstage.torch.lightning.trainable import OWN, LightningTrainable
from hpstage.torch.loading.mixture import Mixture, seed_in
from hpstage.training.adapter import checked_metrics
from hpstage.training.code.graph import functions_reached
from hpstage.training.code.names import attributes_read_in
from hpstage.training.code.owner import by_type
from hpstage.training.handover import Abandoned
from hpstage.training.randomness import Purpose, rekey
from hpstage.training.run import Run, Steps
from hpstage.training.warned import warn_once

_TRAINER = "lightning.Trainer"


def fit(subject: LightningTrainable, data: Data | None, loaders: dict[str, Any], run: Run) -> None:
    """Train a new module of ``subject`` with a new Trainer, one batch per step of ``run``.

    Args:
        data: the data; ``None``: the module makes its own.
        loaders: receives, as ``"train"``, the batches of a training set that the module has made: they may have
            processes, which the caller closes.
    """
    with _quiet():
        module = subject.build(run.hp)
        session = Session(subject, run, module)
        if data is not None:
            datamodule: Any = data.datamodule
            datamodule.train_dataloader = lambda: session.training_batches(data.training)
            session.trainer.fit(module, datamodule=datamodule)
            return

        def train_dataloader() -> TrainingBatches:
            training = training_set(makes())
            if (earlier := loaders.pop("train", None)) is not None:
                earlier.close()
            loaders["train"] = training
            training.settle()
            return session.training_batches(training)

        makes, made = module.train_dataloader, cast(Any, module)
        made.train_dataloader = train_dataloader
        session.trainer.fit(module)


@by_type
def _attributes_read(kind: type) -> frozenset[str]:
    """Return the names of attributes that the user's code of a module or callback reads. Cached, since each fork calls
    it."""
    return frozenset(name for one in functions_reached(kind) for name in attributes_read_in(one.__code__))


class Session:
    """A Trainer within ``fit``, with its module and its data.

    Its state has everything that must be restored besides the objects attached to the run: progress of the Trainer,
    position in the data, and hyperparameters in effect.
    """

    _batches: TrainingBatches
    _progress: Progress
    _steering: Steering

    def __init__(self, subject: LightningTrainable, run: Run, module: LightningModule) -> None:
        self._subject = subject
        self._run = run
        self._steps = Steps(run)
        self._module = module
        self._begun = False
        parts = (type(module), *map(type, subject.callbacks))
        reads = frozenset().union(*map(_attributes_read, parts))
        self._reads_gradients = "grad" in reads
        logs = not reads.isdisjoint(("logger", "loggers"))
        if logs:
            warn_once(
                f"{type(module).__name__} or a callback uses a logger of Lightning, but a search has none: only values "
                f"passed to self.log() are kept"
            )
        self.ended = False
        self.trainer: Any = _WatchedTrainer(
            **({} if _stated_by(subject.arguments) else {"max_epochs": -1}),
            # With a logger, Lightning warns of epochs that are shorter than the steps between two logs.
            **({"log_every_n_steps": 1} if logs else {}) | subject.arguments,
            callbacks=[_End(self), *subject.callbacks],
            devices=1,
            logger=DummyLogger() if logs else False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            num_sanity_val_steps=0,
        )

        self._of_lightning = frozenset(vars(self.trainer))

    def training_batches(self, training: Batches) -> TrainingBatches:
        self._batches = TrainingBatches(training, self._next)
        self._batches.batch_size = self._size()
        return self._batches

    def measured(self) -> dict[str, float]:
        """Validate without changing training, and return all metrics, those that training has logged included."""
        trainer = self.trainer
        rekey(0, 0, Purpose.EVALUATE)
        before = self._progress.state_dict()
        with self._run._world.kept(f"the validation of {self._subject.name}"):
            if trainer.enable_validation:  # as the training epoch loop does
                first = trainer._logger_connector._first_loop_iter
                trainer.validating = True
                trainer.fit_loop.epoch_loop.val_loop.run()
                trainer.training = True
                trainer._logger_connector._first_loop_iter = first
            metrics = checked_metrics(dict(trainer.callback_metrics), "self.log()")
        self._progress.load_state_dict(before)
        if not metrics:
            raise UsageError(f"{self._subject.name} has logged no metric: call self.log() in validation_step()")
        return metrics

    def state_dict(self) -> dict[str, Any]:
        return {
            **self._progress.state_dict(),
            "samples": self._batches.samples,
            "batch_size": self._batches.batch_size,
            "hp": dict(self._steering.hp),
            "steered": sorted(self._steering.steered),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._progress.load_state_dict(state)
        self._batches.samples, self._batches.batch_size = state["samples"], state["batch_size"]
        # A hyperparameter that the state lacks had its default value, which is its value at step 0.
        self._steering.hp, self._steering.steered = {**self._steering.hp, **state["hp"]}, set(state["steered"])

    def refuse_scheduled_twice(self, names: Collection[str]) -> None:
        """Raise :class:`UsageError` if a scheduler sets the learning rate and one of these changing hyperparameters
        does, too."""
        for config in self.trainer.strategy.lr_scheduler_configs:
            self._steering.refuse_scheduled_twice(names, config.scheduler)

    def end(self) -> None:
        """Pause at the end of training. If a further step is requested, raise an error."""
        if not self._begun:
            raise UsageError("lightning.Trainer has trained no batch; check the data and the Trainer's arguments")
        self.ended = True
        self._pause()
        raise self._over()

    def see_loss(self, loss: Any) -> None:
        """Raise :class:`NonFiniteLoss` if a loss is NaN or infinite and ``terminate_on_nan`` is set."""
        if self._subject.terminate_on_nan and isinstance(loss, torch.Tensor) and not bool(loss.isfinite().all()):
            raise NonFiniteLoss(f"the training loss is {loss.sum().item()} in step {self._run._step}")

    def _next(self) -> int:
        """Pause until the next step is requested, apply its hyperparameters, and return the seed."""
        begins = not self._begun
        if begins:
            self._begin()
        epoch_loop = self.trainer.fit_loop.epoch_loop
        # A step that is an epoch pauses only before its first batch. The first pause loads a state, which may be one
        # within an epoch, if training had ended there.
        if begins or self._subject.step_unit == "batch" or epoch_loop.batch_progress.current.ready == 0:
            self._pause()
            if self.trainer.fit_loop.done:
                raise self._over()
            self._steering.apply(self._run.hp)
            self._resize()
        return seed_in(self._batches.dataset, self._run.hp)

    def _begin(self) -> None:
        """Attach the objects that training changes to the run, and load a state if there is one."""
        trainer, run = self.trainer, self._run
        self._progress = Progress(trainer, self._of_lightning)
        optimizers = list(trainer.optimizers)
        weights = [name for name in run.hp if name.startswith(MIXTURE) and isinstance(self._batches.dataset, Mixture)]
        self._steering = Steering(self._module, optimizers, run.hp, (*OWN, *weights))
        self._steering.refuse_unread(self._subject.module)
        self._begun = True
        callbacks = checked_callbacks([callback for callback in trainer.callbacks if type(callback) is not _End])
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        run._attached |= {
            "model": self._module,
            **({"optimizer": optimizers[0]} if len(optimizers) == 1 else {"optimizers": optimizers}),
            "lr_schedulers": trainer.strategy.lr_scheduler_configs,
            "callbacks": callbacks,  # including those of configure_callbacks()
            **({} if scaler is None else {"scaler": scaler}),
        }
        run.attach(model=self._module, fit=self)

    def _pause(self) -> None:
        self._drop_gradients()
        try:
            next(self._steps)
        except Abandoned:
            # Nothing has failed, so do not call on_exception() of callbacks and data.
            self.trainer.callbacks, self.trainer.datamodule = [], None
            raise

    def _drop_gradients(self) -> None:
        """Drop the gradients if the next batch zeroes them before it adds to them: they are not part of the state."""
        loop = self.trainer.fit_loop.epoch_loop
        if not self._module.automatic_optimization or is_overridden("optimizer_zero_grad", self._module):
            return
        if self._reads_gradients:  # maybe in training_step(), before they are zeroed
            return
        if loop.batch_progress.current.ready == 0 or not loop._should_accumulate():
            for optimizer in self.trainer.optimizers:
                optimizer.zero_grad()

    def _size(self) -> int:
        size = self._run.hp.get("batch_size", self._batches.default_size)
        if type(size) is not int or size < 1:
            raise UsageError(f"the hyperparameter 'batch_size' is {size!r}; it must be a whole number of at least 1")
        return size

    def _resize(self) -> None:
        """Apply a new batch size to the rest of the epoch and to later epochs."""
        size, loop = self._size(), self.trainer.fit_loop
        fetcher = loop._data_fetcher
        limited = "limit_train_batches" in self._subject.arguments
        if size == self._batches.batch_size and (
            limited or fetcher.fetched > 0 or fetcher.length == len(self._batches)
        ):
            return
        if limited:
            raise UsageError(
                f"the hyperparameter 'batch_size' changes to {size}, but trainer has limit_train_batches, which needs "
                f"a constant batch size. Leave out one of them"
            )
        self._batches.batch_size = size
        loop.max_batches = fetcher.length = fetcher.fetched + max(1, self._batches.batches_left)
        interval = self._subject.arguments.get("val_check_interval", 1.0)
        if isinstance(interval, float):
            self.trainer.val_check_batch = max(1, int(loop.max_batches * interval))

    def why(self) -> str:
        if self.trainer.should_stop:
            return f"{self._subject.name} has set trainer.should_stop"
        return f"{limits(_TRAINER, _stated_by(self._subject.arguments))} ends training"

    @property
    def horizon(self) -> Horizon | None:
        return _horizon_of(self.trainer, self._subject)

    def _over(self) -> Exception:
        return TrainingError(f"{self.why()}; there is no step {self._run._step} to train")


class _End(Callback):  # type: ignore[misc]  # its base has no types
    """Pauses at the end of training, before hooks of other callbacks that expect final weights. Refuses a loss that is
    NaN or infinite."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, outputs: Any, *args: Any) -> None:
        self._session.see_loss(outputs.get("loss") if isinstance(outputs, Mapping) else outputs)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._session.end()


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress the messages that Lightning logs for each Trainer, since each fork has one."""
    loggers = [logging.getLogger(name) for name in ("lightning.pytorch", "lightning.fabric")]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.WARNING)
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def _stated_by(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a Trainer that state the end of training."""
    return {name: arguments[name] for name in ("max_epochs", "max_steps") if name in arguments}


class _WatchedTrainer(Trainer):  # type: ignore[misc]  # its base has no types
    """A Trainer that records whether the user's code reads the end of training, and refuses it if no argument states
    the end (Lightning would return infinity or -1)."""

    sizes = False
    """Whether code other than Lightning's has read the end of training."""

    @property
    def estimated_stepping_batches(self) -> int | float:
        self._notice("estimated_stepping_batches")
        estimated: int | float = super().estimated_stepping_batches
        return estimated

    @property
    def max_epochs(self) -> Any:
        self._notice("max_epochs")
        return self.fit_loop.max_epochs

    @property
    def max_steps(self) -> Any:
        self._notice("max_steps")
        return self.fit_loop.max_steps

    def _notice(self, name: str) -> None:
        reader = sys._getframe(2).f_globals.get("__name__", "")
        if reader.partition(".")[0] in ("lightning", "hpstage"):
            return
        if all(end in (None, -1) for end in (self.fit_loop.max_epochs, self.fit_loop.max_steps)):
            raise no_end(name, "LightningTrainable(..., trainer={'max_steps': STEPS}) with the steps of your search")
        self.sizes = True


def _horizon_of(trainer: Any, subject: LightningTrainable) -> Horizon | None:
    """Return the end of training that the Trainer's arguments state; ``None`` if they state none, or if it cannot be
    counted in steps of trials."""
    batches = trainer.num_training_batches
    epochs, updates = trainer.fit_loop.max_epochs, trainer.fit_loop.max_steps
    if not (trainer.lightning_module.automatic_optimization and 0 < batches < math.inf):
        return None
    ends = [] if epochs in (None, -1) else [epochs * batches]
    if updates != -1:
        # The last update of an epoch may accumulate fewer batches.
        whole, rest = divmod(updates, math.ceil(batches / trainer.accumulate_grad_batches))
        ends.append(whole * batches + rest * trainer.accumulate_grad_batches)
    if not ends:
        return None
    steps = min(ends) if subject.step_unit == "batch" else math.ceil(min(ends) / batches)
    return Horizon(_TRAINER, tuple(_stated_by(subject.arguments).items()), steps, trainer.sizes)
