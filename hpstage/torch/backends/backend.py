"""StepBackend: turns a TorchTrainable into a function that trains on one batch."""

from __future__ import annotations

import subprocess
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from hpstage.errors import UsageError
from hpstage.schedule import Scalar

if TYPE_CHECKING:
    from hpstage.torch.trainable import TorchTrainable


PASSING = (OSError, MemoryError, ImportError, EOFError, subprocess.SubprocessError, torch.OutOfMemoryError)
"""Errors that the host causes at the moment, not the code: the same code may be compiled or recorded later."""


class NotDeparting(BaseException):
    """Signals that ``update()`` itself has to train the step. ``except Exception`` in the user's code does not catch
    it."""


class NotStackable(UsageError):
    """Raised for a model, an optimizer or a step that cannot be trained together with its siblings. The message gives
    the reason."""


class NeedsPython(NotStackable):
    """Raised for a step that no recording can repeat, for any values of its tensors. ``update()`` itself can train it.

    The error does not depend on the other members, so it may decide that this member is trained without them.
    """

    member: object = None
    """The member whose step cannot be recorded, if several members were to be stacked."""


class StepBackend(ABC):
    """A way to train one TorchTrainable on one batch at a time. A process has one instance per trainable.

    A subclass is registered in the entry-point group ``hpstage.step_backends``, under its name for ``numerics``, and
    tested by :class:`hpstage.testing.StepBackendContract`.

    Contract. After ``train``, the model, the optimizer and everything else that training reaches depend only on their
    previous values, the batch and the hyperparameters. Earlier trials of this process, code that it has compiled, and
    caches on disk must not change any bit. Backends of one ``numerics`` give equal bits. A backend keeps no state of
    its own, except what :meth:`state` returns.

    Args:
        subject: the user's object. Its attribute ``hp`` holds the step's hyperparameters.
        device: the device to train on.
    """

    numerics: ClassVar[str]
    """Name of the numerics class; part of the workload's key. A backend whose bits change needs a new name."""

    begins: ClassVar[float] = 0.0
    """Known lower bound on the seconds until the backend has trained its first steps."""

    several: ClassVar[bool] = False
    """Whether the backend trains several models at a time. If so, a worker has a slot for each of their chains, and the
    seconds of a single model's step do not show the gain. Such a backend is a subclass of
    :class:`hpstage.torch.backends.stacked_backend.StackedBackend`."""

    draws_otherwise: ClassVar[bool] = False
    """Whether the backend draws other random numbers than ``update()`` from the same generators."""

    comparing: bool = False
    """Set while a step is compared with ``update()``. A backend that would call ``update()`` raises
    :class:`NotDeparting`."""

    as_it_is: bool = False
    """Set if the rest of a trial must be trained by ``update()``. The states of the trial record this, so that every
    fork does the same."""

    as_recorded: bool = False
    """Set while a step has to draw the same random numbers as ``update()``, if the backend otherwise draws different
    ones."""

    def __init__(self, subject: TorchTrainable, device: torch.device) -> None:
        self.subject = subject
        self.device = device

    @classmethod
    def missing(cls, device: torch.device) -> str | None:
        """Return, in a few words, why the backend cannot run on this host and device; ``None`` if it can."""
        return None

    @classmethod
    def describe(cls) -> dict[str, str]:
        """Return everything that decides the backend's bits but not those of eager training, as strings by short
        names."""
        return {}

    def begin(self, initial: Mapping[str, Scalar]) -> None:
        """Start over. Next, a trial begins that has these values at step 0, or a state of such a trial is loaded."""
        self.as_it_is = False

    def release(self) -> None:  # noqa: B027  # not needed by most
        """Release everything that belongs to the trained model, since another model follows."""

    @property
    def departs(self) -> bool:
        """Whether the backend may train the next batch without calling ``update()``. If so, its first steps are
        compared with ``update()``; see :class:`hpstage.torch.backends.meaning.Meaning`."""
        return not self.as_it_is

    @abstractmethod
    def train(
        self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, batch: Any
    ) -> torch.Tensor | float | None:
        """Train on one batch, as :meth:`hpstage.torch.TorchTrainable.update` does, and return the loss, detached."""

    def state(self) -> Any:
        """Return the backend's own state, on which the next steps depend; ``None`` if there is none."""
        return True if self.as_it_is else None

    def load(self, state: Any) -> None:
        """Load what :meth:`state` returned, possibly in another process; ``None`` if it returned nothing.

        A backend also loads states that it has not trained, if they are only inspected."""
        self.as_it_is = bool(state)
