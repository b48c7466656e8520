"""LightningTrainable: a LightningModule and its data, as they are, for a search."""

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

    Hyperparameters go to ``__init__`` of the module by their names, with their values at step 0. Those that change on
    the way and name fields of the optimizer's param groups (``lr`` or ``learning_rate``, ``momentum``,
    ``weight_decay``; ``beta1`` and ``beta2`` for ``betas``) steer it from there on; others are read in its steps as
    ``self.hparams.NAME``, if the module calls ``save_hyperparameters()``. ``batch_size`` and ``seed`` are read by
    hpstage: the size of training batches (by default the DataLoader's) and all randomness, the order of data included.
    Each trial has a new module.

    The metrics of a state are what is logged when it is validated, and what its training has logged last. Steps are
    Lightning's batches, not its optimizer steps.

    Args:
        module: the class, or a function of hyperparameters, that makes the LightningModule.
        train_dataloaders: as for ``Trainer.fit``: a DataLoader, or a LightningDataModule. Its data are loaded once per
            process. hpstage decides the order, shuffled if the DataLoader shuffles. Without any data the module's own
            ``train_dataloader()`` is called, once more for each fork of a trial.
        val_dataloaders: as for ``Trainer.fit``: one DataLoader or several.
        datamodule: as for ``Trainer.fit``.
        trainer: arguments of ``lightning.Trainer`` (see :mod:`hpstage.torch.lightning.carried`). Unless it says
            ``max_epochs`` or ``max_steps``, which learning rate schedulers may go by, training has no end of its own,
            and code that reads one (``trainer.estimated_stepping_batches``) is refused. Where it has one, trials are
            complete there.
        step_unit: whether a step is a batch, or an epoch.
        terminate_on_nan, version, data_version, stateless: see :class:`hpstage.torch.TorchTrainable`. Paths of
            ``stateless`` begin with ``model``, ``optimizer``, ``callbacks`` or ``datamodule`` (``"model.seen"``).

    Raises:
        UsageError: something is not carried over; it is named.
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
            UsageError: a hyperparameter that it needs is missing, or this is not a LightningModule.
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
            raise UsageError(f"{self.name} needs {', '.join(missing)}: name it in the trial's hyperparameters")
        module = self.module(**{n: v for n, v in hp.items() if n in names or (takes_all and n not in OWN)})
        if not isinstance(module, LightningModule):
            raise UsageError(
                f"{self.name} made a {type(module).__module__}.{type(module).__qualname__}; it must make a "
                f"LightningModule of the package lightning (pytorch_lightning is another)"
            )
        return module


def _makes_data(module: Callable[..., LightningModule]) -> bool:
    """Whether modules have data of their own, as far as that can be seen of what makes them."""
    return not isinstance(module, type) or getattr(module, "train_dataloader", None) not in (
        None,
        LightningModule.train_dataloader,
    )
