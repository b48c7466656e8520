"""TorchTrainable: what the user states about a PyTorch model; the loop is hpstage's."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch.utils.data import Dataset, default_collate

from hpstage.errors import UsageError
from hpstage.schedule import Scalar
from hpstage.torch.follow import group_values


class TorchTrainable(ABC):
    """A PyTorch model with its optimizer, data, loss and metrics.

    Two hyper-parameters are read by hpstage itself: ``batch_size`` (or the attribute of that name) and ``seed``
    (default 0), which decides initial weights, the order of data and all randomness. Param-group fields of the
    optimizer that are named like a hyper-parameter follow its schedule (see :meth:`group_values`).

    Whatever training changes is captured: the model, the optimizer, gradients that are accumulated, and all that can be
    reached from this object and from its code: averaged weights, schedulers, scalers, generators, counters, lists,
    globals. What cannot be (an iterator that moves on, an object of a class of your own that training makes) is
    refused by name when the state is taken. Before each trial everything is put back as it was after ``__init__`` and
    :meth:`dataset`. ``__init__`` is the user's own and need not call ``super().__init__()``.

    The object itself is trained, not a copy: what it holds may refer to it. When the search ends, it is as it was
    before; in one process, one search at a time can train it.
    """

    hp: Mapping[str, Scalar] = MappingProxyType({})
    """The present value of every hyper-parameter: in ``model`` and ``optimizer`` at step 0, in ``loss`` at the step
    being trained, in ``evaluate`` at the last one trained. To be read only: what is written to it is an error."""

    step_unit: Literal["batch", "epoch"] = "batch"
    """A step trains one batch, always full (at the end of an epoch it takes the rest and begins the next); or it trains
    the rest of the epoch in batches, the last of which may be short."""

    device: str | None = None
    """``None``: cuda where there is one, else cpu."""

    deterministic: bool = True
    """On a GPU, use deterministic algorithms only, so that forks are bit-identical; torch raises where it has none."""

    stateless: tuple[str, ...] = ()
    """Attributes that training may change though nothing in training hangs on them, such as caches and records of past
    losses: they are not captured, and not put back. Names of attributes of this object, or whole paths as errors give
    them (``"model.0.calls"``)."""

    version: str | None = None
    """States the version of the code: equal versions are held to train equally. ``None``: the loaded code tells."""

    data_version: str | None = None
    """States the version of the data. ``None``: a digest tells, of all that the data set and the attributes that
    ``dataset()`` sets hold (tensors, arrays, files that are named), and of 64 samples of a data set that computes them.
    What ``evaluate()`` loads itself is not seen."""

    @abstractmethod
    def model(self, hp: Mapping[str, Scalar]) -> torch.nn.Module:
        """A new model, on any device, in the mode it is to be trained in. Randomness is keyed by the seed."""

    @abstractmethod
    def optimizer(self, model: torch.nn.Module, hp: Mapping[str, Scalar]) -> torch.optim.Optimizer:
        """A new optimizer of the model's parameters, built with the values in ``hp``."""

    @abstractmethod
    def dataset(self) -> Dataset[Any]:
        """The map-style training set, with ``__len__``; asked for once per process, for all trials: ``self.hp``
        cannot be read here. Give a TensorDataset if you can: its batches are indexed at once."""

    @abstractmethod
    def loss(self, model: torch.nn.Module, batch: Any) -> torch.Tensor:
        """The loss of a batch: a scalar tensor. Don't call ``backward``."""

    @abstractmethod
    def evaluate(self, model: torch.nn.Module) -> Mapping[str, float]:
        """Metrics by name. The model is in evaluation mode and gradients are off; both are put back."""

    def collate(self, samples: list[Any]) -> Any:
        """A batch from a list of samples; default: torch's ``default_collate``."""
        return default_collate(samples)

    def update(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> None:
        """Train on one batch. Override it to clip or accumulate gradients or to average weights; gradients that it
        leaves behind are part of the state then."""
        optimizer.zero_grad(set_to_none=True)
        loss = self.loss(model, batch)
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            what = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
            raise UsageError(f"{type(self).__name__}.loss() returned {what}; it must return a scalar tensor")
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    def group_values(self, group: dict[str, Any], hp: Mapping[str, Scalar]) -> Mapping[str, Any]:
        """The values that fields of a param group have under ``hp``, e.g. ``{"lr": hp["lr"] * group["scale"]}``.

        Default: fields named like a hyper-parameter have its value (``betas`` those of ``beta1`` and ``beta2``).
        """
        return group_values(group, hp)

    def extra_state(self) -> Any:
        """What else training changes and hpstage cannot capture (the position of a reader): see
        :mod:`hpstage.checkpoints` for what it may hold. Whoever defines it answers for the attributes of this object
        that cannot be captured."""
        return None

    def load_extra_state(self, state: Any) -> None:
        """Take over what :meth:`extra_state` gave. ``state`` is a copy of your own."""
        if state is not None:
            raise UsageError(f"{type(self).__name__} has extra_state() but no load_extra_state()")
