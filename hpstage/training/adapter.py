"""Adapter: the base class to write an adapter for another library's objects; ``trainables.py`` finds the one to use."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping
from typing import Any

from hpstage.errors import MetricsError, TrainingError, UsageError
from hpstage.errors.text import writable
from hpstage.schedule import Scalar, constant
from hpstage.schedule.space import RESERVED
from hpstage.trainable import Trainable
from hpstage.training.capture.world import World
from hpstage.training.identity.code_identity import StandsFor, identify, packages
from hpstage.training.identity.settings import described_jax


class Adapter(StandsFor, Trainable):
    """Base class of Trainables that wrap a user's object, ``subject``. The key of a state depends on the code of
    ``subject``, not on theirs. A subclass defines the five methods of a Trainable (``hpstage/trainable.py``); the
    shortest is ``Keyed`` (``trainables.py``).

    A function that returns the adapter of an object is registered in the entry-point group ``hpstage.trainables``,
    under the dotted path of the object's class or one of its bases.
    """

    _world: World
    """All that training can reach. Only adapters that capture it have this attribute, such as ``Keyed``."""

    def take_patches(self, patched: Iterable[tuple[str, object]]) -> None:
        """Use the patches that :func:`~hpstage.training.code.patches.standing` has found, instead of letting ``setup``
        look for them."""
        if hasattr(self, "_world"):
            self._world.take_patches(patched)

    def describe_environment(self) -> dict[str, str]:
        """Return the settings that decide the bits of training: those of torch, which are pinned, and of JAX, if the
        subject's code names these libraries, or Keras, which computes with one of them.

        The result depends on the code alone, not on the modules that happen to be imported: all workers must agree.
        """
        named, described = packages(self.subject), dict[str, str]()
        if "keras" in named:
            import keras

            named |= {keras.backend.backend()}
            described["keras"] = f"{keras.__version__} on {keras.backend.backend()}, {keras.config.floatx()}"
        if "jax" in named:
            described |= described_jax()
        if "torch" in named:
            from hpstage.torch import environment

            environment.pin()
            if "keras" not in named:
                environment.warm_up()  # before forks, each of which would do it with its first optimizer
            described |= environment.describe()
        return described

    def optimizers(self) -> list[Any]:
        """Return torch's optimizers in the present training, as far as they can be found."""
        return []

    def in_use(self) -> tuple[object, ...]:
        """Return the objects through which training reaches the user's objects at present."""
        return (self.subject,)

    def prepare(self) -> None:
        """Complete the parts of the setup that ``setup`` leaves to the first step."""

    def hand_over(self) -> dict[str, object]:
        """Return the objects that hold the present state, by name, and end training. They keep that state; so does the
        subject, which is not restored."""
        raise NotImplementedError


def optimizers_in(parts: Iterable[object]) -> list[Any]:
    """Return the optimizers of torch among objects, and in lists of them."""
    torch: Any = sys.modules.get("torch")
    if torch is None:
        return []
    several = [list(part) if isinstance(part, list | tuple) else [part] for part in parts]
    return [part for some in several for part in some if isinstance(part, torch.optim.Optimizer)]


def is_subjects(path: str) -> bool:
    """Return whether the object at a path belongs to the subject, not to modules, libraries or the process."""
    return re.match(r"(self|model|optimizer|dataset)\b", path) is not None


def stateless_of(subject: object) -> tuple[str, ...]:
    """Return the paths in the subject's attribute ``stateless``. Raises :class:`UsageError` if they are not strings."""
    return _names(subject, "stateless", "names of attributes, such as ('cache',)")


def noisy_of(subject: object) -> tuple[str, ...]:
    """Return the metrics in the subject's attribute ``noisy``. Raises :class:`UsageError` if they are not strings."""
    return _names(subject, "noisy", "names of metrics, such as ('latency',)")


def defaults_of(subject: object) -> dict[str, Scalar]:
    """Return the values of hyperparameters in the subject's attribute ``defaults``. If the attribute is no dict, or if
    the subject's code reads it, it is not meant for hpstage, and the result is empty.

    Raises:
        UsageError: a name or a value in it is none that a hyperparameter can have.
    """
    stated = getattr(subject, "defaults", None)
    if not isinstance(stated, Mapping) or not stated or identify(subject, ()).reads_own_defaults:
        return {}
    try:
        return {_hyperparameter(name): constant(value).value(0) for name, value in stated.items()}
    except UsageError as error:
        raise UsageError(
            f"defaults of {type(subject).__name__}: {error}. They are values of hyperparameters that a trial may "
            f"lack, such as {{'dropout': 0.0}}; rename the attribute if it is something else"
        ) from None


def _hyperparameter(name: object) -> str:
    if not isinstance(name, str) or name in RESERVED:
        raise UsageError(f"{name!r} is not a name of a hyperparameter")
    if name in ("seed", "batch_size"):
        raise UsageError(f"a trial without {name!r} has a default for it already; let the space return another value")
    return name


def _names(subject: object, attribute: str, what: str) -> tuple[str, ...]:
    named = getattr(subject, attribute, ())
    if isinstance(named, str) or not all(isinstance(name, str) for name in named):
        raise UsageError(f"{attribute} is {named!r}; it must be a tuple of {what}")
    return tuple(named)


MOST_METRICS = 10_000
"""Most metrics of a state. Each is an attribute of the state's trials, and Optuna copies all attributes to set one."""


def checked_metrics(metrics: object, source: str = "evaluate()") -> dict[str, float]:
    """Return metrics as ``{name: float}``; tensors and arrays with a single element count as numbers.

    Raises:
        MetricsError: ``metrics``, which came from ``source``, is not a mapping, or has more than :data:`MOST_METRICS`.
        TrainingError: a name is not a string of valid Unicode or begins with ``hpstage:``, or a value is not a number.
    """
    if not isinstance(metrics, Mapping):
        raise MetricsError(
            f"{source} returned {type(metrics).__name__}; return a dict of names to numbers, such as "
            f"{{'accuracy': value}}"
        )
    if len(metrics) > MOST_METRICS:
        raise MetricsError(
            f"{source} returned {len(metrics):,} metrics, more than {MOST_METRICS:,}: log values that are only "
            f"looked at (run.log(), self.log()), or save them as part of the state"
        )
    checked: dict[str, float] = {}
    for name, value in metrics.items():
        if not isinstance(name, str) or writable(name) != name:
            raise TrainingError(f"{source} gave the metric {name!r}; names of metrics are str, of valid Unicode")
        if name.startswith("hpstage:"):
            raise TrainingError(f"{source} gave the metric {name!r}; names that begin with hpstage: are reserved")
        try:
            if isinstance(value, str):
                raise TypeError("float() would read a text")
            checked[name] = float(value)
        except OverflowError:
            raise TrainingError(f"{source} gave a number for {name!r} that is too large for a float") from None
        except (TypeError, ValueError, RuntimeError):
            raise TrainingError(f"{source} gave {type(value).__name__} for {name!r}; metrics are numbers") from None
    return checked
