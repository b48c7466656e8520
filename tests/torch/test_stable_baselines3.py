"""Iterations of Stable-Baselines3 as steps: as its own learn trains, forked anywhere, bit for bit."""

from __future__ import annotations

import ctypes
import hashlib
import itertools
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import pytest
import torch
from distributed import Client

import hpstage
from hpstage import schedule as s
from hpstage.checkpoints.state_tree import clone, digest
from hpstage.cluster import local_cluster
from hpstage.errors import HpstageError, StateError, UsageError
from hpstage.training.trainables import as_trainable

pytest.importorskip("stable_baselines3", reason="pip install hpstage[stable-baselines3]")

import gymnasium
from gymnasium import spaces
from stable_baselines3 import A2C, DQN, PPO, SAC, TD3
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.noise import OrnsteinUhlenbeckActionNoise
from stable_baselines3.common.utils import FloatSchedule
from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv, VecFrameStack, VecMonitor, VecNormalize

from hpstage.torch.stable_baselines3 import StableBaselines3Trainable

STEPS = 6
ROLLOUT = 16


class Walk(gymnasium.Env[Any, Any]):
    """An environment with episodes of 7 steps, so that rollouts end within one."""

    observation_space: Any = spaces.Box(-10, 10, (2,), np.float32)
    action_space: Any = spaces.Discrete(2)
    t = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.t = 0
        return self.look(), {}

    def draw(self) -> float:
        return float(self.np_random.normal())

    def look(self) -> Any:
        return np.array([self.draw(), self.t / 10], np.float32)

    def step(self, action: Any) -> Any:
        self.t += 1
        seen = self.look()
        return seen, self.reward(seen, action), self.t >= 7, False, {}

    def reward(self, seen: Any, action: Any) -> float:
        return float(seen[0]) * (1 if action else -1)


def ppo(env: Any, policy: str = "MlpPolicy", **kwargs: Any) -> PPO:
    small: dict[str, Any] = {"n_steps": ROLLOUT, "batch_size": 8, "n_epochs": 2, "seed": 3, "device": "cpu"}
    return PPO(policy, env, policy_kwargs={"net_arch": [8]}, **{**small, **kwargs})


def off_policy(kind: Any, env: Any, **kwargs: Any) -> Any:
    small: dict[str, Any] = {"buffer_size": 60, "learning_starts": 4, "batch_size": 4, "seed": 3, "device": "cpu"}
    return kind("MlpPolicy", env, policy_kwargs={"net_arch": [8]}, **{**small, **kwargs})


def dqn(env: Any = "CartPole-v1", **kwargs: Any) -> DQN:
    fixed = {"exploration_initial_eps": 0.2, "exploration_final_eps": 0.2, "target_update_interval": 6}
    return off_policy(DQN, env, **{**fixed, **kwargs})  # type: ignore[no-any-return]


def td3(hp: Any) -> TD3:
    noise = OrnsteinUhlenbeckActionNoise(np.zeros(1), 0.1 * np.ones(1))
    return off_policy(TD3, "Pendulum-v1", action_noise=noise)  # type: ignore[no-any-return]


ALGORITHMS: dict[str, tuple[Callable[[Any], Any], Any]] = {
    "PPO": (lambda hp: ppo("CartPole-v1"), "CartPole-v1"),
    "A2C": (lambda hp: A2C("MlpPolicy", "CartPole-v1", seed=3, device="cpu"), "CartPole-v1"),
    "DQN": (lambda hp: dqn(), "CartPole-v1"),
    "SAC": (lambda hp: off_policy(SAC, "Pendulum-v1"), "Pendulum-v1"),
    "TD3": (td3, "Pendulum-v1"),
}


def assert_equal(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> None:
    assert ours.keys() == theirs.keys() and all(torch.equal(value, theirs[name]) for name, value in ours.items())


def weights(adapter: Any) -> Mapping[str, Any]:
    return adapter._attached["training"].algorithm.policy.state_dict()  # type: ignore[no-any-return]


def straight(adapter: Any, hp: Any, steps: int = STEPS) -> tuple[list[Any], list[Any]]:
    """The states and metrics after each step."""
    adapter.setup(hp)
    states, metrics = [], []
    for step in range(steps):
        adapter.train(step, hp)
        metrics.append(adapter.evaluate())
        states.append(clone(adapter.state_dict()))
    return states, metrics


@pytest.mark.ci
@pytest.mark.parametrize(
    "name", ["PPO", *(pytest.param(name, marks=pytest.mark.ci) for name in ("A2C", "DQN", "SAC", "TD3"))]
)
def test_weights_equal_those_of_learn_also_after_a_fork_at_any_step(name: str) -> None:
    make, env = ALGORITHMS[name]
    adapter: Any = as_trainable(StableBaselines3Trainable(make, env, episodes=1))
    states, metrics = straight(adapter, {})
    alone = make({})
    alone.learn(STEPS * {"PPO": ROLLOUT, "A2C": 5, "DQN": 4}.get(name, 1))
    assert_equal(weights(adapter), alone.policy.state_dict())
    for fork in range(STEPS - 1):
        adapter.setup({})
        adapter.load_state_dict(states[fork])
        assert digest(adapter.state_dict()) == digest(states[fork])
        for step in range(fork + 1, STEPS):
            adapter.announce(step == STEPS - 1)  # that others are evaluated on the way does not matter
            adapter.train(step, {})
        assert digest(adapter.state_dict()) == digest(states[-1])
        assert adapter.evaluate() == metrics[-1]
    adapter.close()


GRID = {"drop_at": [2, 4], "clip": [0.01, 0.3], "rollouts": [5, 6]}


def make_ppo(hp: Mapping[str, Any]) -> PPO:
    return ppo("CartPole-v1", n_epochs=4)


def space(trial: optuna.Trial) -> dict[str, Any]:
    return {
        "lr": s.multistep(0.05, [trial.suggest_categorical("drop_at", [2, 4])], gamma=0.1),
        "clip_range": s.piecewise({0: 0.2, 3: trial.suggest_categorical("clip", [0.01, 0.3])}),
        "steps": trial.suggest_categorical("rollouts", [5, 6]),
    }


class Following(BaseCallback):
    """Sets what a trial's schedules say before each rollout."""

    def __init__(self, params: Mapping[str, Any]) -> None:
        super().__init__()
        self.params, self.rollout = params, -1

    def _on_step(self) -> bool:
        return True

    def _on_rollout_start(self) -> None:
        self.rollout += 1
        model: Any = self.model
        model.lr_schedule = FloatSchedule(0.05 if self.rollout < self.params["drop_at"] else 0.05 * 0.1)
        model.clip_range = FloatSchedule(0.2 if self.rollout < 3 else self.params["clip"])


def search(
    subject: Any, folder: Path, executor: Any = None, grid: Any = GRID, space: Any = space, **kwargs: Any
) -> Any:
    study = optuna.create_study(direction="maximize", sampler=optuna.samplers.GridSampler(grid, seed=0))
    executor = executor or hpstage.InlineExecutor()
    return hpstage.optimize(
        study, subject, space, metric="mean_reward", steps=STEPS, executor=executor, store=folder, **kwargs
    )


@pytest.mark.ci
def test_trials_of_a_search_on_two_workers_have_the_weights_of_learn(tmp_path: Path) -> None:
    with local_cluster(2, gpus=0) as cluster, Client(cluster, set_as_default=False) as client:
        subject = StableBaselines3Trainable(make_ppo, "CartPole-v1", episodes=2)
        result = search(subject, tmp_path / "there", client)
    assert len(result.study.trials) == 8 and result.savings.steps_trained == 16
    for trial in result.study.trials:
        alone = make_ppo({})
        alone.learn(ROLLOUT * trial.params["rollouts"], callback=Following(trial.params))
        assert_equal(result.load(trial).model.state_dict(), alone.policy.state_dict())
    best = result.load(result.best_trial).parts["training"].algorithm
    assert best.num_timesteps == ROLLOUT * result.best_trial.params["rollouts"]
    assert best.predict(np.zeros(4, np.float32))[0].shape == ()


class Jittered(gymnasium.Wrapper[Any, Any, Any, Any]):
    def __init__(self, env: Any) -> None:
        super().__init__(env)
        self.numbers = np.random.default_rng(5)

    def step(self, action: Any) -> Any:
        seen, *others = self.env.step(action)
        return seen + np.float32(self.numbers.normal()), *others


class Dicts(Walk):
    observation_space = spaces.Dict({"a": Walk.observation_space, "b": spaces.Discrete(3)})

    def look(self) -> Any:
        return {"a": super().look(), "b": int(self.np_random.integers(3))}

    def reward(self, seen: Any, action: Any) -> float:
        return float(seen["b"]) * (1 if action else -1)


class Pointing(Walk):
    """Its state is in memory of ctypes."""

    def __init__(self) -> None:
        self.memory = (ctypes.c_long * 1)(1)

    def draw(self) -> float:
        self.memory[0] = (self.memory[0] * 1103515245 + 12345) % (1 << 31)
        return self.memory[0] % 100 / 100


class Counted(Walk):
    """What its class counts decides what it shows, and evaluation counts, too."""

    total = 0

    def draw(self) -> float:
        Counted.total += 1
        return Counted.total * 0.37 % 1


class Simulator:
    count = 0


class Simulated(Walk):
    """Its ``env`` is no environment."""

    def __init__(self) -> None:
        self.env = Simulator()

    def draw(self) -> float:
        self.env.count += 1
        return self.env.count * 0.37 % 1


class Hashing(Walk):
    """Its state is where nothing can look into."""

    def __init__(self) -> None:
        self.hash, self.drawn = hashlib.sha256(), 0

    def draw(self) -> float:
        self.drawn += 1
        self.hash.update(b"x")
        return self.hash.digest()[0] / 255


class HashingWithState(Hashing):
    def state_dict(self) -> dict[str, int]:
        return {"drawn": self.drawn, "t": self.t}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.drawn, self.t = state["drawn"], state["t"]
        self.hash = hashlib.sha256(b"x" * self.drawn)


def stacked() -> Any:
    return gymnasium.wrappers.TimeLimit(gymnasium.wrappers.FrameStackObservation(Walk(), 3), 5)


def four(normalized: bool = True) -> Any:
    frames = VecFrameStack(make_vec_env(Walk, n_envs=4, seed=0), 2)
    return VecNormalize(frames) if normalized else frames


ENVIRONMENTS: dict[str, tuple[Callable[[Any], Any], Any]] = {
    "a generator of a wrapper": (lambda hp: ppo(Jittered(Walk())), Walk),
    "frames and a time limit": (lambda hp: ppo(stacked()), stacked),
    "dicts": (lambda hp: ppo(Dicts(), "MultiInputPolicy"), Dicts),
    "four, normalized": (lambda hp: ppo(four()), lambda: four(normalized=False)),
    "four, of DQN": (lambda hp: dqn(four(), train_freq=ROLLOUT), lambda: four(normalized=False)),
    "watched as one": (lambda hp: ppo(VecMonitor(DummyVecEnv([Walk, Walk]))), Walk),
    "memory of ctypes": (lambda hp: ppo(Pointing()), Pointing),
    "a count of its class": (lambda hp: ppo(Counted()), Counted),
    "a simulator": (lambda hp: ppo(Simulated()), Simulated),
    "state of its own": (lambda hp: ppo(HashingWithState()), HashingWithState),
    "state-dependent exploration": (lambda hp: ppo("Pendulum-v1", use_sde=True, sde_sample_freq=4), "Pendulum-v1"),
}


def dropping(trial: optuna.Trial) -> dict[str, Any]:
    return {"lr": s.multistep(0.1, [trial.suggest_categorical("drop_at", [2, 4])], gamma=0.1)}


@pytest.mark.ci
@pytest.mark.parametrize("name", ENVIRONMENTS)
@pytest.mark.ci_one_in(2)
def test_an_environment_forks_exactly_in_the_middle_of_an_episode(name: str, tmp_path: Path) -> None:
    make, evaluation = ENVIRONMENTS[name]
    subject = StableBaselines3Trainable(make, evaluation, episodes=1)
    if name == "state of its own":
        subject.stateless = ("environment_0.hash",)  # type: ignore[attr-defined]
    found = []
    for sharing in (True, False):
        result = search(
            subject, tmp_path / str(sharing), grid={"drop_at": [2, 4]}, space=dropping, sharing=sharing
        )  # fmt: skip
        found.append({trial.params["drop_at"]: trial for trial in result.study.trials})
        models = {drop_at: result.load(trial).model.state_dict() for drop_at, trial in found[-1].items()}
    for drop_at, trial in found[0].items():
        assert trial.value == found[1][drop_at].value
    alone = make({})
    alone.learn(STEPS * ROLLOUT * alone.n_envs, callback=Dropping())
    assert_equal(models[2], alone.policy.state_dict())


class Dropping(BaseCallback):
    rollout = -1

    def _on_step(self) -> bool:
        return True

    def _on_rollout_start(self) -> None:
        self.rollout += 1
        self.model.lr_schedule = FloatSchedule(0.1 if self.rollout < 2 else 0.1 * 0.1)


class Generating(Walk):
    def __init__(self) -> None:
        self.numbers = itertools.count()

    def draw(self) -> float:
        return next(self.numbers) * 0.37 % 1


class Timed(Walk):
    def draw(self) -> float:
        return time.time() % 1


class Unseeded(Walk):
    def __init__(self) -> None:
        self.numbers = np.random.default_rng()

    def draw(self) -> float:
        return float(self.numbers.normal())


class InC(Walk):
    """Draws from a generator of the C library, which belongs to the process."""

    library = ctypes.CDLL(None)

    def draw(self) -> float:
        return int(self.library.rand()) % 100 / 100


@pytest.mark.ci
@pytest.mark.forks
@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Generating, "numbers is a itertools.count that has moved on in training"),
        (Timed, "the time or the system's random numbers"),
        (Unseeded, "the time or the system's random numbers"),
        (InC, "the time or the system's random numbers"),
        (Hashing, r"env.hash is a _hashlib.HASH, which nothing can look into.*give the environment.*state_dict\(\)"),
    ],
)
def test_an_environment_that_cannot_be_captured_is_refused_by_name(kind: Any, message: str, tmp_path: Path) -> None:
    subject = StableBaselines3Trainable(lambda hp: ppo(kind()), kind, episodes=1)
    with pytest.raises((StateError, UsageError), match=message):
        search(subject, tmp_path, grid={"drop_at": [2, 4]}, space=dropping)


class NotInThisProcess(Walk):
    __module__ = "gymnasium.envs.mujoco.walk"


class OwnLearn(PPO):
    def learn(self, *args: Any, **kwargs: Any) -> Any:
        return super().learn(*args, **kwargs)


@pytest.mark.parametrize(
    ("make", "hp", "message"),
    [
        (
            lambda hp: ppo(NotInThisProcess()),
            {},
            "the state of NotInThisProcess cannot be read from Python: give",
        ),
        (lambda hp: OwnLearn("MlpPolicy", Walk()), {}, r"OwnLearn overrides learn\(\)"),
        (
            lambda hp: ppo(gymnasium.wrappers.RecordEpisodeStatistics(Walk())),
            {},
            "RecordEpisodeStatistics records videos or times",
        ),
        (lambda hp: dqn(exploration_initial_eps=1.0), {}, "exploration_rate follows .* or give total_timesteps"),
        (lambda hp: ppo(Walk(), clip_range=lambda left: left), {}, "clip_range follows .* or give total_timesteps"),
        (
            lambda hp: PPO("MlpPolicy", Walk(), device="cpu"),
            {"entcoef": 1.0},
            "nothing reads the hyperparameter 'entcoef'",
        ),
        (lambda hp: ppo(Walk()), {"n_epochs": 1.5}, "'n_epochs' is 1.5; it must be a whole number"),
        (lambda hp: "PPO", {}, "make has returned a str"),
        (lambda hp: ppo(stacked()), {}, "evaluation_env has other spaces than the training environment"),
    ],
)
def test_an_unsupported_model_or_value_is_refused_by_name(make: Any, hp: Any, message: str) -> None:
    adapter: Any = as_trainable(StableBaselines3Trainable(make, Walk))
    adapter.setup(hp)
    with pytest.raises(HpstageError, match=message):
        adapter.train(0, hp)
    adapter.close()


@pytest.mark.ci  # processes that import torch
def test_environments_in_subprocesses_are_refused() -> None:
    env = SubprocVecEnv([Walk], start_method="spawn")
    with pytest.raises(
        UsageError, match=r"SubprocVecEnv has its environments in other processes, .* Use a DummyVecEnv"
    ):
        straight(as_trainable(StableBaselines3Trainable(lambda hp: ppo(env), Walk)), {})
    env.close()


def test_invalid_arguments_are_refused_by_name() -> None:
    with pytest.raises(UsageError, match="make is a PPO; it must be a function of hp"):
        StableBaselines3Trainable(ppo(Walk()), Walk)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="evaluation_env is a Walk; it must be the name"):
        StableBaselines3Trainable(make_ppo, Walk())  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="at least 1"):
        StableBaselines3Trainable(make_ppo, Walk, episodes=0)


def test_hyperparameters_read_only_by_the_function_make_cannot_change() -> None:
    adapter: Any = as_trainable(StableBaselines3Trainable(lambda hp: ppo(Walk(), n_steps=hp["n_steps"]), Walk))
    adapter.setup({"n_steps": 8})
    adapter.train(0, {"n_steps": 8})
    with pytest.raises(UsageError, match="'n_steps' changes from 8 to 16, but is read only when a trial begins"):
        adapter.train(1, {"n_steps": 16})
    adapter.close()


@pytest.mark.ci
@pytest.mark.parametrize("name", ["PPO", "DQN"])
def test_total_timesteps_sizes_the_schedules_of_stable_baselines3_and_ends_the_trial(name: str) -> None:
    makes: dict[str, Callable[[Any], Any]] = {
        "PPO": lambda hp: ppo(Walk(), learning_rate=lambda left: 0.05 * left),
        "DQN": lambda hp: dqn(Walk(), train_freq=ROLLOUT, exploration_initial_eps=1.0, exploration_fraction=0.5),
    }
    total = 4 * ROLLOUT - 3
    subject = StableBaselines3Trainable(makes[name], Walk, episodes=1, iterations=3, total_timesteps=total)
    adapter: Any = as_trainable(subject)
    adapter.setup({})
    adapter.train(0, {})
    state = clone(adapter.state_dict())
    adapter.setup({})
    adapter.load_state_dict(state)
    with pytest.raises(hpstage.StopTraining):
        adapter.train(1, {})
    alone = makes[name]({})
    alone.learn(total)
    assert_equal(weights(adapter), alone.policy.state_dict())
    adapter.close()


CHANGES: dict[str, tuple[Callable[[Any], Any], Any]] = {
    "gamma": (lambda hp: ppo(Walk()), 0.5),
    "gae_lambda": (lambda hp: ppo(Walk()), 0.5),
    "ent_coef": (lambda hp: off_policy(SAC, "Pendulum-v1", ent_coef=0.1), 0.9),
    "vf_coef": (lambda hp: ppo(Walk()), 0.1),
    "max_grad_norm": (lambda hp: ppo(Walk()), 0.01),
    "target_kl": (lambda hp: ppo(Walk()), 1e-9),
    "n_epochs": (lambda hp: ppo(Walk()), 5),
    "batch_size": (lambda hp: ppo(Walk()), 16),
    "clip_range_vf": (lambda hp: ppo(Walk()), 1e-3),
    "tau": (lambda hp: off_policy(SAC, "Pendulum-v1", train_freq=4), 0.5),
    "gradient_steps": (lambda hp: off_policy(SAC, "Pendulum-v1", train_freq=4), 3),
    "exploration_rate": (lambda hp: dqn(Walk(), train_freq=ROLLOUT), 1.0),
}


@pytest.mark.ci
@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.ci_one_in(2)
def test_a_scheduled_hyperparameter_changes_training_and_forks_exactly(name: str) -> None:
    make, after = CHANGES[name]
    algorithm: Any = make({})
    before = 0.2 if name in ("exploration_rate", "clip_range_vf") else getattr(algorithm, name)
    env = "Pendulum-v1" if isinstance(algorithm, SAC) else Walk
    adapter: Any = as_trainable(StableBaselines3Trainable(make, env, episodes=1))
    ends = []
    for change in (STEPS, 3):
        hps = [{name: before if step < change else after} for step in range(STEPS)]
        adapter.setup(hps[0])
        states = []
        for step, hp in enumerate(hps):
            adapter.train(step, hp)
            states.append(clone(adapter.state_dict()))
        for fork in (2, 3):
            adapter.setup(hps[0])
            adapter.load_state_dict(states[fork])
            for step in range(fork + 1, STEPS):
                adapter.train(step, hps[step])
            assert digest(adapter.state_dict()) == digest(states[-1]), fork
        ends.append({key: value.clone() for key, value in weights(adapter).items()})
    assert any(not torch.equal(value, ends[1][key]) for key, value in ends[0].items())
    adapter.close()


def test_a_monitor_writes_no_file_and_the_hyperparameter_seed_sets_the_seed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make: Callable[[Any], Any] = lambda hp: ppo(Monitor(Walk(), str(tmp_path / "log")), seed=None)  # noqa: E731
    ends = {}
    for seed in (1, 2, 1):
        adapter: Any = as_trainable(StableBaselines3Trainable(make, Walk, episodes=1))
        states, _ = straight(adapter, {"seed": seed}, 2)
        assert ends.setdefault(seed, digest(states[-1])) == digest(states[-1])
        adapter.close()
    assert ends[1] != ends[2] and "a Monitor writes no file in a search" in caplog.text
