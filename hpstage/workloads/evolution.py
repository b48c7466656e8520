"""Control without gradients: an evolution strategy in NumPy balances a pole.

The strategy is that of Salimans et al., "Evolution Strategies as a Scalable Alternative to Reinforcement Learning"
(arXiv 1703.03864): perturb the weights of a policy by mirrored noise, play episodes with each perturbation, rank the
returns, and step along the noise weighted by rank, with momentum. Cart and pole are those of Barto, Sutton and Anderson
(1983), as in Gym's CartPole-v1; all episodes of a generation are played at once, as arrays.

It needs no torch, and implements the Trainable port: ``setup``, ``train``, ``evaluate``, ``state_dict`` and
``load_state_dict``. Noise and starts come from NumPy's global generator, which hpstage seeds from the hyperparameter
``seed`` and the step, so that no generator is part of a state.

    hpstage run hpstage.workloads.evolution:Evolution hpstage.workloads.evolution:space \
        --metric length --direction maximize --steps 100 --n-trials 24 --algorithm 'SuccessiveHalving(25, 2)'
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from hpstage import schedule as s

if TYPE_CHECKING:
    import optuna

    Array = np.ndarray[Any, np.dtype[np.float64]]

GRAVITY, CART, POLE, HALF, FORCE, SECONDS = 9.8, 1.0, 0.1, 0.5, 10.0, 0.02


def moved(state: Array, right: np.ndarray[Any, np.dtype[np.bool_]]) -> Array:
    """Return the state after 0.02 s: position, velocity, angle and angular velocity on the last axis."""
    x, v, angle, spin = np.moveaxis(state, -1, 0)
    sine, cosine = np.sin(angle), np.cos(angle)
    push = (np.where(right, FORCE, -FORCE) + POLE * HALF * spin**2 * sine) / (CART + POLE)
    turn = (GRAVITY * sine - cosine * push) / (HALF * (4 / 3 - POLE * cosine**2 / (CART + POLE)))
    speed = push - POLE * HALF * turn * cosine / (CART + POLE)
    return np.stack([x + SECONDS * v, v + SECONDS * speed, angle + SECONDS * spin, spin + SECONDS * turn], axis=-1)


def lengths(policies: Array, starts: Array, limit: int) -> Array:
    """Return for how many steps each policy keeps the pole up, as a mean over the starts.

    Args:
        policies: weights of networks with one hidden layer of tanh, shape (policies, 6 x hidden).
        starts: states, shape (episodes, 4).
        limit: number of steps after which an episode ends.
    """
    count, hidden = len(policies), policies.shape[1] // 6
    into = policies[:, : 4 * hidden].reshape(count, 4, hidden)
    bias, out = policies[:, None, 4 * hidden : 5 * hidden], policies[:, 5 * hidden :, None]
    state = np.broadcast_to(starts, (count, *starts.shape))
    up = np.ones(state.shape[:2], dtype=bool)
    total = np.zeros(state.shape[:2])
    for _ in range(limit):
        state = moved(state, (np.tanh(state @ into + bias) @ out)[..., 0] > 0)
        up &= (np.abs(state[..., 0]) < 2.4) & (np.abs(state[..., 2]) < np.radians(12))
        if not up.any():
            break
        total += up
    found: Array = total.mean(axis=1)
    return found


class Evolution:
    """An evolution strategy on the pole. A step is a generation.

    Args:
        hidden: hidden units of the policy.
        episodes: number of episodes that each perturbation plays. All perturbations have the same starts.
        limit: maximum number of steps in an episode.
    """

    def __init__(self, *, hidden: int = 8, episodes: int = 4, limit: int = 500) -> None:
        self.hidden, self.episodes, self.limit = hidden, episodes, limit

    def setup(self, hp: Mapping[str, Any]) -> None:
        self.weights = 0.1 * np.random.standard_normal(6 * self.hidden)
        self.velocity = np.zeros_like(self.weights)

    def train(self, step: int, hp: Mapping[str, Any]) -> None:
        noise = np.random.standard_normal((hp["population"] // 2, len(self.weights)))
        starts = np.random.uniform(-0.05, 0.05, (self.episodes, 4))
        mirrored = np.concatenate([noise, -noise])
        found = lengths(self.weights + hp["sigma"] * mirrored, starts, self.limit)
        ranks = np.searchsorted(np.sort(found), found) + np.searchsorted(np.sort(found), found, side="right")
        fitness = ranks / (2 * len(found)) - 0.5  # equal returns have equal ranks
        gradient = fitness @ mirrored / (len(found) * hp["sigma"])
        self.velocity = hp["momentum"] * self.velocity + gradient
        self.weights = self.weights + hp["lr"] * self.velocity

    def evaluate(self) -> dict[str, float]:
        starts = np.random.uniform(-0.05, 0.05, (20, 4))  # the same in every evaluation
        return {"length": float(lengths(self.weights[None], starts, self.limit)[0])}

    def state_dict(self) -> dict[str, Any]:
        return {"weights": self.weights, "velocity": self.velocity}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.weights, self.velocity = state["weights"], state["velocity"]


def space(trial: optuna.Trial, steps: int = 100) -> dict[str, s.Schedule | s.Scalar]:
    """The noise shrinks at one of three generations; the population doubles at one of two generations, or never."""
    sigma = trial.suggest_categorical("sigma", [0.5, 0.2])
    shrink = steps * trial.suggest_categorical("shrink_at", [30, 50, 70]) // 100
    grow = steps * trial.suggest_categorical("grow_at", [60, 80, 100]) // 100
    return {
        "sigma": s.multistep(sigma, milestones=[shrink], gamma=0.5),
        "population": s.piecewise({0: 32, grow: 64}),
        "lr": 0.3,
        "momentum": 0.9,
    }
