"""The Trainable port: user-defined training, one step at a time, from state to state."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, Protocol, TypeAlias, runtime_checkable

from hpstage.schedule import Scalar

Numerics: TypeAlias = Literal["eager", "compiled", "graphed", "stacked", "auto"] | str
"""The name of a step backend: one of hpstage's, the fastest of them, or one of a plugin."""


@runtime_checkable
class Trainable(Protocol):
    """Any object with these five methods can be trained on a stage tree.

    Training must be exact: after ``setup(hp)`` and ``load_state_dict(s)``, ``train(step, hp)`` must change the
    state as it would have in the process that produced ``s``. Data order and randomness must be functions of
    (seed, step) or part of the state. hpstage re-keys Python's, NumPy's and torch's global generators before each
    step from ``hp["seed"]`` (0 if there is none) and the step. ``hp`` maps every hyperparameter to its value at
    that step (whole numbers are ``int``, others ``float``, ``str``, ``bool`` or ``None``).

    Optional methods are called if defined: ``synchronize()`` before time is measured, ``announce(report)`` before
    each step with whether the state after it will be evaluated or kept, ``expect(more)`` with whether another step
    follows it at once, which may then finish what this one has begun (if none follows after all, ``settle(step)`` is
    called),
    ``foresee(names)`` before each stretch of training with the hyperparameters that change in it, ``close()`` at the
    end, ``portrait()`` (paths and short strings of everything that training has changed, by which two runs are
    compared), ``describe_data()`` (a short string) and ``describe_environment()`` (a dict of short strings) for
    anything else that affects bits.
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
    """A Trainable that trains several chains of one process side by side, a step of each at a time, for less than they
    take one after the other. What a member's state is must not depend on its companions, or on there being any.

    Members may have ``frozen_work``, the :class:`~hpstage.plan.facts.FrozenWork` of the last step. A bundle may have
    ``worthwhile``, the most chains whose training as one is worth trying, as far as is known."""

    slots: int
    """The most chains that it trains at a time."""

    @abstractmethod
    def members(self) -> Sequence[Trainable]:
        """Return the Trainables of a bundle, each for one chain at a time. They may share all but their states: only
        one of them is called at a time."""

    @abstractmethod
    def train_together(
        self, steps: Mapping[int, tuple[int, Mapping[str, Scalar]]], most: int | None = None
    ) -> Mapping[int, int]:
        """Train a step of several members: by index, its number and the values at it. Return as how many each was
        trained as one, itself included: at most ``most``, and fewer where more do not pay; by default as many as
        there are.

        Then ``train`` is called of each for that step, and raises what its step has raised.
        """

    @abstractmethod
    def seconds(self) -> float:
        """Return a time by which steps are compared, once those so far are done: seconds since any point."""


@runtime_checkable
class Elastic(Protocol):
    """A Trainable whose steps several processes can train together, a gang, with the bits that one process has.

    Each step is cut into virtual nodes, of which every process trains an equal share. One process leads: it alone is
    given orders, and the others do the same. Gangs are formed and dissolved between any two steps.
    """

    virtual_nodes: int
    """The most processes of a gang, a power of two; 1: it forms none."""

    @abstractmethod
    def open_gang(self, host: str) -> str:
        """Begin to lead: listen on the interface that ``host`` names. Return the address to join at. Whoever has it can
        join: it holds a secret, and is neither logged nor kept.

        Raises:
            GangApart: there is no such interface here.
        """

    @abstractmethod
    def lead(self, size: int, timeout: float, in_vain: Callable[[], bool]) -> None:
        """Wait for the other ``size - 1`` processes, for at most ``timeout`` seconds, or until ``in_vain()``. From now
        on ``train`` trains with them.

        Raises:
            GangApart: they did not come in time, or cannot be reached. This process continues without them.
        """

    @abstractmethod
    def follow(self, address: str, rank: int, size: int, timeout: float) -> str:
        """Join a gang as number ``rank``, counted from 1, in the state that its leader is in; train as it does until it
        dismisses this process, and return its word.

        Raises:
            GangApart: the leader cannot be reached, or does not form the gang within ``timeout`` seconds.
            GangLost: the leader or another process is gone, or training has failed in this process alone.
        """

    @abstractmethod
    def dismiss(self, word: str) -> None:
        """End the gang, if there is one, and send the others ``word``: by what name the state that all of them are in
        is known, or ``""``. From now on ``train`` trains without them."""

    @abstractmethod
    def shared_seconds(self) -> float:
        """Return the estimated seconds of the steps since the last call if this process had trained them by itself."""


METHODS = ("setup", "train", "evaluate", "state_dict", "load_state_dict")
