"""The Trainable port: what is trained, one step at a time, from state to state."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Protocol, runtime_checkable

from hpstage.schedule import Scalar


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


METHODS = ("setup", "train", "evaluate", "state_dict", "load_state_dict")
