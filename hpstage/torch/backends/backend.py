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
"""Errors caused by the host at that moment, not by the code, which may be compiled or recorded after all."""


class NotDeparting(BaseException):
    """Signals that ``update()`` itself has to train the step. ``except Exception`` in the user's code does not catch
    it."""


class NotStackable(UsageError):
    """A model, an optimizer or a step that cannot be trained together with its siblings. The message names why."""


class NeedsPython(NotStackable):
    """A step that no recording repeats, whatever the values of its tensors: ``update()`` itself can train it.

    Whoever trains by itself for that may decide so by this error: it does not depend on the other members.
    """

    member: object = None
    """The member whose step it is, if several were to be stacked."""


class StepBackend(ABC):
    """Trains one TorchTrainable on one batch at a time. One per trainable and process.

    A subclass is registered in the entry-point group ``hpstage.step_backends``, under its name for ``numerics``, and
    tested by :class:`hpstage.testing.StepBackendContract`.

    Contract. After ``train`` the model, the optimizer and everything else that training reaches are what a function of
    their previous values, the batch and the hyperparameters makes them: neither earlier trials of this process, nor
    what it has compiled, nor caches on disk may show in the bits. Backends of one ``numerics`` give equal bits.
    A backend keeps no state of its own, except what :meth:`state` returns.

    Args:
        subject: the user's object. Its attribute ``hp`` has the values of the step.
        device: where it is trained.
    """

    numerics: ClassVar[str]
    """Name of the numerics class; part of the workload's key. A change of the bits needs another name."""

    begins: ClassVar[float] = 0.0
    """Known lower bound on the seconds until the backend has trained its first steps."""

    several: ClassVar[bool] = False
    """Whether the backend trains several models at a time. A worker then has as many slots for chains, and the seconds
    of a single model's step do not show the gain. Such a backend is a subclass of
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
    """Set while a step has to draw the random numbers of ``update()``, if the backend otherwise draws others."""

    def __init__(self, subject: TorchTrainable, device: torch.device) -> None:
        self.subject = subject
        self.device = device

    @classmethod
    def missing(cls, device: torch.device) -> str | None:
        """Return, in a few words, why the backend cannot run on this host and device; ``None`` if it can."""
        return None

    @classmethod
    def describe(cls) -> dict[str, str]:
        """Return all that decides the backend's bits and that eager training does not depend on, as short names and
        strings."""
        return {}

    def begin(self, initial: Mapping[str, Scalar]) -> None:
        """Start over: next, a trial with these values at step 0 begins, or one of its states is loaded."""
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

        To look at a state, it is also loaded by a backend that has not trained it."""
        self.as_it_is = bool(state)
