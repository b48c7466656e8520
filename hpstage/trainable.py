"""Trainable: the five methods by which any training is run. Objects without them: :mod:`hpstage.training.adapter`."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, Protocol, TypeAlias, TypeGuard, runtime_checkable

from hpstage.schedule import Scalar

Numerics: TypeAlias = Literal["eager", "compiled", "graphed", "stacked", "auto"] | str
"""The name of a step backend, of hpstage or of a plugin; ``"auto"``: the fastest of all that can run."""


@runtime_checkable
class Trainable(Protocol):
    """Any object with these five methods can be trained on a stage tree.

    Training must be exact: after ``setup(hp)`` and ``load_state_dict(s)``, ``train(step, hp)`` must change the
    state as it would have in the process that produced ``s``. Data order and randomness must be functions of
    (seed, step) or part of the state. hpstage re-keys Python's, NumPy's and torch's global generators before each
    step from ``hp["seed"]`` (0 if there is none) and the step. ``hp`` maps every hyperparameter to its value at
    that step (whole numbers are ``int``, others ``float``, ``str``, ``bool`` or ``None``).

    Optional methods, called if defined:

    - ``synchronize()``: called before time is measured.
    - ``announce(report)``: called before each step, with whether the state after it will be evaluated or saved.
    - ``expect(more)``: called before each step, with whether another step follows at once. If so, that step may finish
      work that this one begins. If none follows after all, ``settle(step)`` is called.
    - ``foresee(names)``: called before each stretch of training, with the hyperparameters that change in it.
    - ``portrait()``: returns paths and short strings of everything that training has changed, to compare two runs.
    - ``describe_data()`` (a short string) and ``describe_environment()`` (a dict of short strings): anything else that
      affects bits.
    - ``close()``: called at the end.
    """

    @abstractmethod
    def setup(self, hp: Mapping[str, Scalar]) -> None:
        """Start afresh with the values at step 0, discarding all earlier training."""

    @abstractmethod
    def train(self, step: int, hp: Mapping[str, Scalar]) -> None:
        """Train step ``step`` (counted from 0)."""

    @abstractmethod
    def evaluate(self) -> Mapping[str, float]:
        """Return the metrics of the current state, without changing it."""

    @abstractmethod
    def state_dict(self) -> object:
        """Return everything that training has produced so far; tensors may be those in use (they are copied)."""

    @abstractmethod
    def load_state_dict(self, state: object) -> None:
        """Load a state, after ``setup`` with the same values; must copy anything it keeps."""


@runtime_checkable
class Bundling(Protocol):
    """A Trainable that trains several chains of one process side by side, one step of each at a time, in less time than
    one after the other. A member's state must not depend on its companions, nor on whether it has any.

    Members may have ``frozen_work``, the :class:`~hpstage.plan.facts.FrozenWork` of the last step. A bundle may have
    ``worthwhile``: upper bound on the number of chains that are worth training as one, as far as is known."""

    slots: int
    """Upper bound on the number of chains that it trains at a time."""

    @abstractmethod
    def members(self) -> Sequence[Trainable]:
        """Return the Trainables of a bundle, each for one chain at a time. They may share everything but their states:
        only one of them is called at a time."""

    @abstractmethod
    def train_together(
        self, steps: Mapping[int, tuple[int, Mapping[str, Scalar]]], most: int | None = None
    ) -> Mapping[int, int]:
        """Train one step of several members. ``steps`` maps a member's index to the step's number and values.

        Return, by index, how many members were trained as one with this member, itself included: at most ``most`` (by
        default, all), and fewer if more would not be faster.

        ``train`` is then called on each member for that step, and raises what the step has raised.
        """

    @abstractmethod
    def seconds(self) -> float:
        """Wait until the steps so far are done, and return the time, in seconds since any point, to compare steps."""


def is_bundling(trainable: object) -> TypeGuard[Bundling]:
    """Whether a trainable is :class:`Bundling`; also if its ``slots`` have the name that they had until 0.3."""
    return isinstance(trainable, Bundling) or all(
        hasattr(trainable, name) for name in ("lanes", "members", "train_together", "seconds")
    )


@runtime_checkable
class Elastic(Protocol):
    """A Trainable whose steps can be trained by several processes together (a gang), with the same bits as by one.

    Each step is cut into virtual nodes, of which every process trains an equal share. One process leads: it alone
    receives instructions, and the others follow it. Gangs are formed and dissolved between any two steps.
    """

    virtual_nodes: int
    """Upper bound on the number of processes of a gang, a power of two; 1: it forms no gangs."""

    @abstractmethod
    def open_gang(self, host: str) -> str:
        """Begin to lead: listen on the network interface of ``host``. Return the address at which others join. The
        address holds a secret that lets any process join: it must not be logged or stored.

        Raises:
            GangApart: this machine has no such interface.
        """

    @abstractmethod
    def lead(self, size: int, timeout: float, in_vain: Callable[[], bool]) -> None:
        """Wait until the other ``size - 1`` processes have joined, for at most ``timeout`` seconds, and only while
        ``in_vain()`` is false. From then on, ``train`` trains together with them.

        Raises:
            GangApart: they did not join in time, or cannot be reached. This process continues without them.
        """

    @abstractmethod
    def follow(self, address: str, rank: int, size: int, timeout: float) -> str:
        """Join a gang as process ``rank``, counted from 1, in the same state as its leader. Train with the leader until
        it dismisses this process, then return the ``word`` that it sends.

        Raises:
            GangApart: the leader cannot be reached, or does not form the gang within ``timeout`` seconds.
            GangLost: the leader or another process is gone, or training has failed in this process alone.
        """

    @abstractmethod
    def dismiss(self, word: str) -> None:
        """End the gang, if there is one, and send the others ``word``: the key of the state that all of them are in, or
        ``""`` if it has none. From then on, ``train`` trains without them."""

    @abstractmethod
    def shared_seconds(self) -> float:
        """Return the estimated seconds that this process by itself needs for the steps since the last call."""


METHODS = ("setup", "train", "evaluate", "state_dict", "load_state_dict")


def close(trainable: object) -> None:
    """Close a trainable, if it has a method for that."""
    getattr(trainable, "close", lambda: None)()
