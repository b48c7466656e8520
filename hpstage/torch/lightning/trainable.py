"""LightningTrainable: an unchanged LightningModule and its data as a trainable."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from lightning.pytorch import Callback, LightningDataModule, LightningModule

from hpstage.errors import UsageError
from hpstage.schedule import Scalar
from hpstage.torch.lightning.carried import checked_arguments, checked_callbacks

OWN = ("batch_size", "seed")
"""Hyperparameters that hpstage itself reads."""


class LightningTrainable:
    """A LightningModule with its data, trained by ``lightning.Trainer`` itself, which hpstage pauses at each batch.

    ::

        trainable = LightningTrainable(LitDigits, DigitsDataModule(), trainer={"gradient_clip_val": 1.0})
        hpstage.optimize(study, trainable, space, metric="val_acc", steps=400, n_trials=48)

    Hyperparameters are passed to ``__init__`` of the module by name, with their values at step 0. If one changes later
    and names a field of the optimizer's param groups (``lr`` or ``learning_rate``, ``momentum``, ``weight_decay``;
    ``beta1`` and ``beta2`` for ``betas``), the field is set from it from then on. The module can read any other one in
    its steps as ``self.hparams.NAME``, if it calls ``save_hyperparameters()``. hpstage itself reads ``batch_size``, the
    size of training batches (by default the DataLoader's), and ``seed``, which decides all randomness, the order of
    data included. Each trial has a new module.

    The metrics of a state are those logged when it is validated, and those that training has logged last. A step is a
    batch, also if several batches are accumulated for one optimizer step.

    Args:
        module: the class of the LightningModule, or a function of hyperparameters that returns one.
        train_dataloaders: as for ``Trainer.fit``: a DataLoader, or a LightningDataModule. Its data are loaded once per
            process. hpstage decides the order, shuffled if the DataLoader shuffles. If no data are given, the module's
            own ``train_dataloader()`` is called, again for each fork of a trial.
        val_dataloaders: as for ``Trainer.fit``: one DataLoader or several.
        datamodule: as for ``Trainer.fit``.
        trainer: arguments of ``lightning.Trainer`` (see :mod:`hpstage.torch.lightning.carried`). ``max_epochs`` or
            ``max_steps`` states an end of training, at which trials are complete, and which learning rate schedulers
            may read. Without them, code that reads an end (``trainer.estimated_stepping_batches``) is refused.
        step_unit: whether a step is a batch, or an epoch.
        terminate_on_nan, version, data_version, stateless: see :class:`hpstage.torch.TorchTrainable`. Paths of
            ``stateless`` begin with ``model``, ``optimizer``, ``callbacks`` or ``datamodule`` (``"model.seen"``).

    Raises:
        UsageError: an argument, or a feature that it uses, is not supported. The message names it.
    """

    def __init__(
        self,
        module: Callable[..., LightningModule],
        train_dataloaders: Any = None,
        val_dataloaders: Any = None,
        datamodule: LightningDataModule | None = None,
        *,
        trainer: Mapping[str, Any] | None = None,
        step_unit: Literal["batch", "epoch"] = "batch",
        terminate_on_nan: bool = True,
        version: str | None = None,
        data_version: str | None = None,
        stateless: Sequence[str] = (),
    ) -> None:
        if isinstance(module, LightningModule):
            name = type(module).__name__
            raise UsageError(
                f"module is an instance of {name}; pass the class {name}, so that each trial makes its own"
            )
        if not callable(module):
            raise UsageError(f"{module!r} is not a class of a LightningModule, nor a function that makes one")
        if step_unit not in ("batch", "epoch"):
            raise UsageError(f"step_unit is {step_unit!r}; it must be 'batch' or 'epoch'")
        if isinstance(train_dataloaders, LightningDataModule):
            train_dataloaders, datamodule = None, train_dataloaders
        if datamodule is not None and train_dataloaders is not None:
            raise UsageError("pass a datamodule, or train_dataloaders and val_dataloaders, and not both")
        if datamodule is None and train_dataloaders is None and not _makes_data(module):
            raise UsageError(
                f"{module.__name__} has no train_dataloader(): pass a datamodule, or train_dataloaders and "
                f"val_dataloaders"
            )
        self.module = module
        self.train_dataloaders = train_dataloaders
        self.val_dataloaders = val_dataloaders
        self.datamodule = datamodule
        arguments = dict(trainer or {})
        given = arguments.pop("callbacks", None) or []
        self.callbacks: list[Callback] = checked_callbacks([given] if isinstance(given, Callback) else list(given))
        self.arguments = checked_arguments(arguments)
        self.step_unit = step_unit
        self.terminate_on_nan = terminate_on_nan
        self.version = version
        self.data_version = data_version
        self.stateless = tuple(stateless)

    @property
    def makes_data(self) -> bool:
        """Whether each module makes its own data."""
        return self.datamodule is None and self.train_dataloaders is None

    @property
    def name(self) -> str:
        return getattr(self.module, "__qualname__", type(self.module).__name__)

    def build(self, hp: Mapping[str, Scalar]) -> LightningModule:
        """Return a new module, made with the hyperparameters that it takes.

        Raises:
            UsageError: a hyperparameter that it needs is missing, or it is not a LightningModule.
        """
        parameters = inspect.signature(self.module).parameters.values()
        takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
        names = {parameter.name for parameter in parameters if parameter.kind is not parameter.POSITIONAL_ONLY}
        missing = [
            parameter.name
            for parameter in parameters
            if parameter.default is parameter.empty
            and parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
            and parameter.name not in hp
        ]
        if missing:
            raise UsageError(
                f"{self.name} needs {', '.join(missing)}, which is missing in the trial's hyperparameters. Return it "
                f"from the space"
            )
        module = self.module(**{n: v for n, v in hp.items() if n in names or (takes_all and n not in OWN)})
        if not isinstance(module, LightningModule):
            raise UsageError(
                f"{self.name} made a {type(module).__module__}.{type(module).__qualname__}; it must make a "
                f"LightningModule of the package lightning (pytorch_lightning is another)"
            )
        return module


def _makes_data(module: Callable[..., LightningModule]) -> bool:
    """Return whether modules may have data of their own. For a function that makes modules, this is assumed."""
    return not isinstance(module, type) or getattr(module, "train_dataloader", None) not in (
        None,
        LightningModule.train_dataloader,
    )
