"""The Trainable port: what is trained, one step at a time, from state to state."""

from __future__ import annotations

import copy
import inspect
from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, Protocol, runtime_checkable

from hpstage.capture.world import World
from hpstage.checkpoints.state_tree import clone
from hpstage.errors import TrainingError, UsageError
from hpstage.identity.workload import packages
from hpstage.schedule import Scalar
from hpstage.training.randomness import Purpose, libraries, rekey, seed_of


@runtime_checkable
class Trainable(Protocol):
    """Any object with these five methods can be trained on a stage tree.

    Obligation: exactness. After ``setup(hp)`` and ``load_state_dict(s)``, ``train(step, hp)`` must do to the
    state what it would have done in the process that made ``s``: data order and randomness are functions of
    (seed, step) or are in the state. hpstage re-keys Python's, NumPy's and torch's global generators before each
    step from ``hp["seed"]`` (0 if there is none) and the step. ``hp`` maps every hyper-parameter to its value at
    that step (whole numbers are ``int``, others ``float``, ``str``, ``bool`` or ``None``).

    More methods are called where there are any: ``synchronize()`` before time is taken, ``announce(report)`` before
    each step with whether the state after it will be evaluated or kept, ``close()`` at the end, ``portrait()`` (paths
    and short texts of all that training has changed, by which two runs are compared), ``describe_data()`` (a short
    text) and ``describe_environment()`` (a dict of short texts) for what else decides bits.
    """

    @abstractmethod
    def setup(self, hp: Mapping[str, Scalar]) -> None:
        """Start afresh, under the values at step 0; forget all earlier training."""

    @abstractmethod
    def train(self, step: int, hp: Mapping[str, Scalar]) -> None:
        """Train step ``step`` (counted from 0)."""

    @abstractmethod
    def evaluate(self) -> Mapping[str, float]:
        """Metrics of the present state, which must not change."""

    @abstractmethod
    def state_dict(self) -> object:
        """Everything that training so far has produced; tensors may be those in use (they are copied)."""

    @abstractmethod
    def load_state_dict(self, state: object) -> None:
        """Take over a state, after ``setup`` under the same values; must copy what it keeps."""


_METHODS = ("setup", "train", "evaluate", "state_dict", "load_state_dict")


class Adapter:
    """Base of the Trainables that stand for something of the user's: ``subject``, whose identity counts."""

    subject: object

    def describe_environment(self) -> dict[str, str]:
        """What decides the bits of training here: that of torch, pinned, if the subject's code names torch.

        It depends on the code alone, not on what happens to be imported: workers of one cluster must agree.
        """
        if "torch" not in packages(self.subject):
            return {}
        from hpstage.torch import environment

        environment.pin()
        return environment.describe()


class Keyed(Adapter):
    """A user's own Trainable with the global generators keyed before each call that may use them.

    It trains a copy: what training sets on the object must not touch the user's, whose identity is asked for again.
    Its state is what ``state_dict()`` says; whatever else training reaches is put back before each setup.
    """

    answers_for_state = True
    """Attributes that a fork has not set are none of its state."""

    def __init__(self, subject: Trainable) -> None:
        self.subject: Trainable = subject
        self._user = copy.copy(subject)
        self._world = World(stateless_of(subject), lambda: [("self", self._user)])
        for name in ("synchronize", "announce", "describe_data", "describe_environment"):
            method = getattr(self._user, name, None)
            if callable(method):
                setattr(self, name, method)

    def setup(self, hp: Mapping[str, Scalar]) -> None:
        before = libraries()
        self._set_up(hp)
        if libraries() != before:
            # It has imported NumPy or torch: what it drew from them was not keyed.
            self._set_up(hp)

    def _set_up(self, hp: Mapping[str, Scalar]) -> None:
        self._world.reset()
        rekey(seed_of(hp), 0, Purpose.SETUP)
        self._user.setup(hp)

    def train(self, step: int, hp: Mapping[str, Scalar]) -> None:
        rekey(seed_of(hp), step)
        self._user.train(step, hp)

    def evaluate(self) -> Mapping[str, float]:
        rekey(0, 0, Purpose.EVALUATE)
        with self._world.kept(f"{type(self._user).__name__}.evaluate()"):
            return self._user.evaluate()

    def state_dict(self) -> object:
        return self._user.state_dict()

    def load_state_dict(self, state: object) -> None:
        # A copy: others may load the same state, and training in place would change it.
        self._user.load_state_dict(clone(state))

    def portrait(self) -> dict[str, str]:
        """All that training can reach, as texts: see :meth:`hpstage.capture.world.World.portrait`."""
        return self._world.portrait()

    def close(self) -> None:
        close = getattr(self._user, "close", None)
        if callable(close):
            close()
        self._world.close()


def stateless_of(subject: object) -> tuple[str, ...]:
    """The paths that a trainable names in its attribute ``stateless``. Raises :class:`UsageError` for other things."""
    named = getattr(subject, "stateless", ())
    if isinstance(named, str) or not all(isinstance(name, str) for name in named):
        raise UsageError(f"stateless is {named!r}; it must be a tuple of names of attributes, such as ('cache',)")
    return tuple(named)


def as_trainable(obj: object) -> Trainable:
    """The Trainable that trains ``obj``, whose attribute ``subject`` is ``obj``; one that is made already, itself.

    ``obj`` is a :class:`~hpstage.torch.TorchTrainable`, an object with the five methods of :class:`Trainable`, or a
    function of one argument (:mod:`hpstage.training.function`). Raises :class:`UsageError` for anything else.
    """
    from hpstage.training.function import FunctionTrainable

    if isinstance(obj, type):
        raise UsageError(f"{obj.__name__} is a class: pass an instance of it, {obj.__name__}(...)")
    if isinstance(obj, Adapter):
        return obj  # type: ignore[return-value]
    offered = getattr(obj, "__trainable__", None)
    if callable(offered):
        trainable: Trainable = offered()
        return trainable
    missing = [name for name in _METHODS if not callable(getattr(obj, name, None))]
    if not missing:
        return Keyed(obj)  # type: ignore[arg-type]
    kind = type(obj).__name__
    if len(missing) < len(_METHODS):
        raise UsageError(f"this {kind} cannot be trained: it has no {' and no '.join(missing)}")
    if not callable(obj):
        raise UsageError(
            f"{kind} cannot be trained: pass a hpstage.torch.TorchTrainable, a function of one argument (run), or an "
            f"object with {', '.join(_METHODS)}"
        )
    if not _takes_one_argument(obj):
        name = getattr(obj, "__qualname__", kind)
        raise UsageError(f"{name}{inspect.signature(obj)} cannot be trained: it must take one argument, the run")
    return FunctionTrainable(obj)


def _takes_one_argument(function: Callable[..., Any]) -> bool:
    try:
        inspect.signature(function).bind(None)
    except TypeError:
        return False
    except ValueError:
        return True  # written in C, its signature unknown
    return True


def checked_metrics(metrics: object, source: str = "evaluate()") -> dict[str, float]:
    """Metrics as ``{name: float}``; tensors and arrays of one number are numbers too.

    Raises:
        TrainingError: ``metrics``, which ``source`` gave, is no mapping of names to numbers.
    """
    if not isinstance(metrics, Mapping):
        raise TrainingError(f"{source} gave {type(metrics).__name__}; it must give a dict of names to numbers")
    checked: dict[str, float] = {}
    for name, value in metrics.items():
        if not isinstance(name, str):
            raise TrainingError(f"{source} gave the metric {name!r}; names of metrics are str")
        try:
            if isinstance(value, str):
                raise TypeError("float() would read a text")
            checked[name] = float(value)
        except (TypeError, ValueError, RuntimeError):
            raise TrainingError(f"{source} gave {type(value).__name__} for {name!r}; metrics are numbers") from None
    return checked
