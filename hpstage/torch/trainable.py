"""TorchTrainable: what the user defines for a PyTorch model; hpstage runs the loop."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar, Literal

import torch
from torch.utils.data import DataLoader, Dataset, default_collate

from hpstage.errors import UsageError
from hpstage.schedule import Scalar
from hpstage.torch.follow import group_values
from hpstage.torch.horizon import Horizon
from hpstage.trainable import Numerics
from hpstage.training.capture.kind import Captured
from hpstage.training.step_log import log


class TorchTrainable(Captured, ABC):
    """A PyTorch model with its optimizer, data, loss and metrics.

    hpstage itself reads two hyperparameters: ``batch_size`` (or the attribute of that name) and ``seed`` (default 0),
    which decides initial weights, the order of data and all randomness. Param-group fields of the optimizer are set at
    every step from the schedules of the same name (see :meth:`group_values`).

    Everything that training changes is captured: the model, the optimizer, accumulated gradients, and all objects
    reachable from this object and its code, such as averaged weights, schedulers, scalers, generators, counters, lists,
    globals. An object that cannot be captured (an advancing iterator, an object of your own class created by training)
    is refused by name when the state is captured. Before each trial, everything is restored to how it was after
    ``__init__`` and :meth:`dataset`. ``__init__`` is up to the user and need not call ``super().__init__()``.

    The object itself is trained, not a copy, so objects that it holds may refer to it. When the search ends, it is as
    it was before. Within a process, only one search at a time can train it.

    Attributes:
        hp: the present value of every hyperparameter: in ``model`` and ``optimizer`` at step 0, in ``loss`` at the step
            being trained, in ``evaluate`` at the last step trained. Read-only: writing to it is an error.
        step_unit: ``"batch"`` (the default): a step trains one batch, which is always full (at the end of an epoch it
            is completed from the next epoch). ``"epoch"``: a step trains the rest of the epoch in batches, of which the
            last may be short.
        device: ``"cpu"``, ``"cuda"``, ...; ``None`` (the default): cuda if available, else another accelerator that
            torch has (mps, xpu), else cpu.
        terminate_on_nan: ``True`` (the default): if a training loss is NaN or infinite, its trials end before that
            step, as pruned, with a warning. ``False``: training continues; a GPU need not wait for each step's loss.
        deterministic: ``True`` (the default): on a GPU, use only deterministic algorithms, so that forks are
            bit-identical; torch raises if it has none. ``False``: use any algorithms.
        numerics: the step backend. ``"eager"`` (the default) runs the code as it is, ``"compiled"`` compiles a step
            with ``torch.compile``, ``"graphed"`` replays it as a CUDA graph, ``"stacked"`` trains siblings of one
            worker as one model. Each gives other bits (a *numerics class*), which is part of the keys of states: a
            search never mixes two. ``"auto"`` measures the backends before the search and uses the fastest for this
            store: it measures ``"stacked"`` with one model, and also with two if a worker is expected to train that
            many trials at a time. Plugins add names.
        max_stacked: with ``numerics = "stacked"``, the maximum number of siblings that a worker trains as one model
            (default 8). Sizes 1, 2, 4, ... are compared during training, and the fastest is used. It does not show in
            the bits.
        virtual_nodes: number of equal parts, a power of two (default 1), into which each batch is cut, so that up to as
            many workers can train one step together. Each part has its own random streams and begins with the same
            buffers; the gradients and buffers of all parts are averaged in a fixed order. The number shows in the bits
            and is part of the keys of states; the number of workers is neither. Above 1, ``numerics`` must be
            ``"eager"``, and :meth:`update` must not be overridden: see :mod:`hpstage.torch.elastic`.
        devices_per_stage: number of GPUs that the code itself uses (``nn.DataParallel``, layers on several devices;
            default 1). Each worker must see that many GPUs. Workers started by :class:`hpstage.cluster.DaskExecutor`
            do; start others with ``hpstage worker --gpus-per-worker``.
        num_workers: number of processes that make samples and batches ahead, as in torch's DataLoader; 0 (the default):
            the training process makes them. It does not show in the bits: random numbers drawn while a sample is made
            are functions of (seed, position).
        prefetch_factor: number of batches that each of these processes makes ahead (default 2).
        pin_memory: ``True``: on a GPU, batches are put into pinned memory, from which they are copied while the GPU
            computes. ``False`` (the default): they are not.
        stateless: attributes that training may change but does not depend on, such as caches and records of past
            losses: they are neither captured nor restored. Give names of attributes of this object, or whole paths as
            shown in errors (``"model.0.calls"``).
        noisy: metrics that measure the machine as well as the model, such as a latency, so that two evaluations of a
            state give different values. Neither checks nor audits compare them; the attribute ``hpstage:noisy`` of
            Optuna's trials names them.
        version: version of the code; equal versions are assumed to train equally. ``None`` (the default): a digest of
            the loaded code.
        defaults: values of hyperparameters that a trial may lack, such as ``{"dropout": 0.0}``: a trial without
            ``dropout`` equals a trial with that value, and shares its states. A store keeps them for ever and refuses
            other values.
        data_version: version of the data. ``None`` (the default): a digest of everything held by the data set and by
            attributes that ``dataset()`` sets (tensors, arrays, named files), and of 64 samples if the data set
            computes them. Data that ``evaluate()`` loads itself are not covered.
    """

    hp: Mapping[str, Scalar] = MappingProxyType({})
    step_unit: Literal["batch", "epoch"] = "batch"
    device: str | None = None
    terminate_on_nan: bool = True
    deterministic: bool = True
    numerics: Numerics = "eager"
    max_stacked: int = 8
    virtual_nodes: int = 1
    devices_per_stage: int = 1
    num_workers: int = 0
    prefetch_factor: int = 2
    pin_memory: bool = False
    stateless: tuple[str, ...] = ()
    noisy: tuple[str, ...] = ()
    version: str | None = None
    defaults: Mapping[str, Scalar] = MappingProxyType({})
    data_version: str | None = None

    _without_keys: ClassVar[tuple[str, ...]] = (
        "num_workers",
        "prefetch_factor",
        "pin_memory",
        "numerics",
        "max_stacked",
        "virtual_nodes",
    )
    _evaluates_by_library: ClassVar[bool] = False
    """Whether ``evaluate`` is the code of another library: changes that it makes are undone without a warning."""

    def _prepared_data(self) -> Any:
        """Return the data set or the batches that a library's trainer prepared when it created the trial's model;
        ``None`` if the trial trains on ``dataset()``."""
        return None

    def _unchangeable(self, name: str, hp: Mapping[str, Scalar]) -> str:
        """Return why a hyperparameter cannot change after step 0; ``""`` if it can, or if this is not known.

        Args:
            hp: the values at step 0.
        """
        return ""

    @property
    def _horizon(self) -> Horizon | None:
        """The end of training that a library's trainer states. Read it after model and optimizer were made."""
        return None

    @abstractmethod
    def model(self, hp: Mapping[str, Scalar]) -> torch.nn.Module:
        """Return a new model, on any device, in training mode (modules that are to be frozen may be in evaluation
        mode). The hyperparameter ``seed`` decides the random numbers.

        ``hp`` has the values at step 0. Read hyperparameters that change later from ``self.hp`` in :meth:`loss`.
        """

    @abstractmethod
    def optimizer(self, model: torch.nn.Module, hp: Mapping[str, Scalar]) -> torch.optim.Optimizer:
        """Return a new optimizer of the model's parameters, built with the values in ``hp``, those at step 0. At every
        step, fields of its param groups are set from the schedules of the same name; see :meth:`group_values`."""

    @abstractmethod
    def dataset(self) -> Dataset[Any] | DataLoader[Any]:
        """Return the map-style training set, with ``__len__``. Called once per process for all trials, so ``self.hp``
        cannot be read here. Return a TensorDataset if possible: it is fastest, since one indexing makes a batch.

        Or return a DataLoader. Its ``batch_size`` is used unless a hyperparameter or an attribute states one; the last
        batch of an epoch is short, or left out with ``drop_last``; ``num_workers``, ``collate_fn`` and so on are used.
        Its sampler is replaced by an order of the same kind (random, sequential, weighted, of a subset) that is a
        function of (seed, epoch).
        """

    def loss(self, model: torch.nn.Module, batch: Any) -> torch.Tensor:
        """Return the loss of a batch as a scalar tensor. Don't call ``backward``. Not needed if the class overrides
        :meth:`update`."""
        raise NotImplementedError(f"{type(self).__name__} has no loss(model, batch)")

    @abstractmethod
    def evaluate(self, model: torch.nn.Module) -> Mapping[str, float]:
        """Return metrics by name. The model is in evaluation mode and gradients are off; both are restored. A model on
        a GPU accepts tensors on the CPU as well, and then returns tensors on the CPU."""

    def collate(self, samples: list[Any]) -> Any:
        """Make a batch from a list of samples; by default with torch's ``default_collate``."""
        return default_collate(samples)

    def update(
        self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, batch: Any
    ) -> torch.Tensor | float | None:
        """Train on one batch. Override it to clip or accumulate gradients or to average weights; then gradients that
        remain after it are part of the state. Return the loss: :attr:`terminate_on_nan` needs it."""
        optimizer.zero_grad(set_to_none=True)
        loss = see_scalar(self.loss(model, batch), self)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return loss

    def group_values(self, group: dict[str, Any], hp: Mapping[str, Scalar]) -> Mapping[str, Any]:
        """Return the values of a param group's fields under ``hp``, e.g. ``{"lr": hp["lr"] * group["scale"]}``.

        By default, a field named like a hyperparameter has its value (``betas``: the values of ``beta1`` and
        ``beta2``).
        """
        return group_values(group, hp)

    def log(self, name: str, value: Any) -> None:
        """Log a number, or a tensor of one element, in the step that is being trained; see :func:`hpstage.log`.

        ::

            def loss(self, model, batch):
                loss = ...
                self.log("train_loss", loss)
                return loss
        """
        log(name, value)

    def extra_state(self) -> Any:
        """Return additional state that training changes and hpstage cannot capture, such as the position of a reader.
        :mod:`hpstage.checkpoints` lists the types that it may contain. If you define it, you are responsible for the
        attributes of this object that cannot be captured."""
        return None

    def load_extra_state(self, state: Any) -> None:
        """Load what :meth:`extra_state` returned. ``state`` is a copy that you may keep."""
        if state is not None:
            raise UsageError(f"{type(self).__name__} has extra_state() but no load_extra_state()")


def see_scalar(loss: object, subject: TorchTrainable) -> torch.Tensor:
    """Return the ``loss`` returned by ``subject.loss()``. Raise :class:`UsageError` if it is not a scalar tensor."""
    if isinstance(loss, torch.Tensor) and loss.numel() == 1:
        return loss
    what = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
    raise UsageError(f"{type(subject).__name__}.loss() returned {what}; it must return a scalar tensor")
