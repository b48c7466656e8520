"""Loading a saved state into new objects in this process, and its tensors into dicts and files."""

from __future__ import annotations

import copy
import logging
import os
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import FunctionType
from typing import TYPE_CHECKING, Any

from hpstage.errors import StateError, UsageError
from hpstage.plan.facts import TrialId
from hpstage.report.files import replacing
from hpstage.schedule import Scalar
from hpstage.training.identity import threads
from hpstage.training.identity.code_identity import packages
from hpstage.training.randomness import generators_restored
from hpstage.training.tensors import named_tensors
from hpstage.training.trainables import as_trainable

if TYPE_CHECKING:
    from torch import Tensor


logger = logging.getLogger("hpstage")


@dataclass(frozen=True, slots=True)
class LoadedState:
    """A saved state, loaded into new objects."""

    trial: TrialId
    step: int
    """Number of steps trained."""
    hp: dict[str, Scalar]
    """The values of the hyperparameters in the last of these steps."""
    metrics: dict[str, float] | None
    """The metrics measured in the search; ``None`` if the state was not evaluated there."""
    parts: dict[str, Any] = field(repr=False)
    """The objects by name. For a ``TorchTrainable``: ``"model"``, ``"optimizer"``, and ``"trainable"`` with its own
    attributes (averaged weights). For a function: the objects that it attached. For an object with five methods:
    ``"trainable"``."""

    @property
    def model(self) -> Any:
        """The part ``"model"``, in the mode in which it was trained: call ``model.eval()`` before you use it."""
        return self._part("model")

    @property
    def optimizer(self) -> Any:
        """The part ``"optimizer"``, with the state that it had."""
        return self._part("optimizer")

    @property
    def trainable(self) -> Any:
        """The part ``"trainable"``."""
        return self._part("trainable")

    def _part(self, name: str) -> Any:
        if name not in self.parts:
            raise UsageError(
                f"trial {self.trial} has no part {name!r}; it has {', '.join(sorted(self.parts))}: take what you need "
                f"from result.load(...).parts, or attach it under that name, run.attach({name}=...)"
            )
        return self.parts[name]


def load(
    subject: object,
    state: object | None,
    *,
    start: int,
    stop: int,
    values: Callable[[int], Mapping[str, Scalar]],
    trial: TrialId,
    name: str,
    metrics: dict[str, float] | None,
    evaluate: bool = False,
) -> LoadedState:
    """Load the state after ``start`` steps (``None``: the beginning), and train it further to ``stop``.

    Args:
        values: returns the values of the hyperparameters in a step.
        name: the state's name in errors.
        metrics: the known metrics of the state after ``stop`` steps.
        evaluate: whether to evaluate the state in this process instead of taking ``metrics``.

    Raises:
        StateError: the state belongs to another trainable. The message names it, and the part that does not fit.
    """
    adapter: Any = as_trainable(_own(subject))
    with ExitStack() as settings:
        settings.enter_context(generators_restored())
        settings.enter_context(threads.restored())
        threads.pin(packages(subject))
        if "torch" in sys.modules:
            import torch

            settings.enter_context(torch.inference_mode(False))
            settings.enter_context(torch.enable_grad())
        try:
            adapter.setup(values(0))
            if state is not None:
                try:
                    adapter.load_state_dict(state)
                except StateError as error:
                    raise StateError(f"{name} cannot be loaded: {error}") from error
            if start < stop:
                logger.info("Training steps %d to %d of trial %s again", start, stop, trial)
            for step in range(start, stop):
                if hasattr(adapter, "announce"):
                    adapter.announce(step == stop - 1)
                adapter.train(step, values(step))
            if evaluate:
                metrics = dict(adapter.evaluate())
            parts = adapter.hand_over()
        except BaseException:
            adapter.close()
            raise
    return LoadedState(trial, stop, dict(values(stop - 1)), metrics, parts)


def _own(subject: Any) -> object:
    """Return a copy of the trainable, to which the model may refer. A function has no state of its own."""
    if isinstance(subject, FunctionType):
        return subject
    try:
        return copy.deepcopy(subject)
    except Exception as error:  # a lock, a file, a connection: whatever the user's object holds
        raise UsageError(
            f"this {type(subject).__name__} cannot be copied ({error}), and the model may refer to it: make "
            f"copy.deepcopy work for it, or use state() or weights()"
        ) from error


_MODEL = "model"
_SHOWN = 20


def weights_of(state: object, part: str | None, trial: str) -> dict[str, Tensor]:
    """Return the tensors of ``part`` of a state, without the part's name; see ``TrainedTrial.weights``."""
    from torch import as_tensor

    return {name: as_tensor(leaf) for name, leaf in leaves_of(state, part, trial).items()}


def leaves_of(state: object, part: str | None, trial: str) -> dict[str, Any]:
    """Return the same as :func:`weights_of`, without converting arrays to tensors."""
    named = dict(named_tensors(state))
    if part is None:
        part = _MODEL if any(name.startswith(f"{_MODEL}.") for name in named) else ""
    prefix = f"{part}." if part else ""
    found = {name.removeprefix(prefix): value for name, value in named.items() if name.startswith(prefix)}
    if not found:
        there = sorted({name.rpartition(".")[0] for name in named} - {""})[:_SHOWN]
        raise UsageError(f"the state of trial {trial} has no tensors of {part!r}; it has {', '.join(there) or 'none'}")
    return found


def write_weights(
    path: str | os.PathLike[str], weights: Mapping[str, Tensor], about: Mapping[str, str], metrics: Mapping[str, float]
) -> None:
    """Write tensors into a safetensors file, with ``about`` and ``metrics`` as its metadata. Its folder is made if
    needed. Raises ``OSError``."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    file = Path(path)
    file.parent.mkdir(parents=True, exist_ok=True)
    metadata = {**{name: repr(value) for name, value in metrics.items()}, **about, "format": "pt"}
    try:
        with replacing(file) as aside:
            save_file({name: value.contiguous() for name, value in weights.items()}, aside, metadata=metadata)
    except SafetensorError as error:
        raise OSError(str(error)) from error
