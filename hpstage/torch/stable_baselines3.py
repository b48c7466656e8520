"""Reinforcement learning as a trainable, with Stable-Baselines3: a step is an iteration of ``learn``.

::

    def make(hp):
        return PPO("MlpPolicy", "CartPole-v1", n_steps=256, seed=0, device="cpu", policy_kwargs={"net_arch": [32, 32]})

    trainable = StableBaselines3Trainable(make, "CartPole-v1")

    def space(trial):
        drop_at = trial.suggest_categorical("drop_at", [40, 60])
        return {"learning_rate": s.multistep(3e-4, [drop_at], gamma=0.1), "clip_range": 0.2}

    hpstage.optimize(study, trainable, space, metric="mean_reward", steps=100)

Needs ``pip install hpstage[stable-baselines3]``.
"""

from __future__ import annotations

import copy
import logging
import random
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import version
from typing import Any

import gymnasium
import numpy as np
import torch
from stable_baselines3.common import utils, vec_env
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.logger import Logger
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.off_policy_algorithm import OffPolicyAlgorithm
from stable_baselines3.common.on_policy_algorithm import OnPolicyAlgorithm

from hpstage.errors import StateError, UsageError
from hpstage.errors.text import AT_FIRST, changed_after
from hpstage.schedule import Scalar
from hpstage.training.capture.kind import Captured
from hpstage.training.code.unread import may_read
from hpstage.training.randomness import mix, seed_of
from hpstage.training.run import Run

__all__ = ["StableBaselines3Trainable"]

logger = logging.getLogger("hpstage")

_SCHEDULES = {"learning_rate": "lr_schedule", "clip_range": "clip_range", "clip_range_vf": "clip_range_vf",
              "exploration_rate": "exploration_schedule"}  # fmt: skip
"""Hyperparameters that algorithms read from a function of their progress, and the attributes that hold the function."""
_WHOLE = "n_epochs", "batch_size", "gradient_steps", "learning_starts", "target_update_interval", "policy_delay"
_NUMBERS = (
    *("gamma", "gae_lambda", "ent_coef", "vf_coef", "max_grad_norm", "target_kl", "tau", "target_policy_noise"),
    *("target_noise_clip", *_WHOLE),
)
"""Hyperparameters that algorithms read from attributes of the same name whenever they need them."""
_ENDLESS = 1 << 62
_BY_SYSTEM = 1 << 64
"""Seeds of at least this value were drawn by the system."""
_STREAM = 36  # distinguishes the seeds of evaluation
_SHOWING = vec_env.VecVideoRecorder, gymnasium.wrappers.RecordVideo, gymnasium.wrappers.RecordEpisodeStatistics
_IN_C = "gymnasium.envs.mujoco.", "gymnasium.envs.box2d.", "ale_py", "shimmy."
_REMEDY = (
    "give the environment, or a gymnasium.Wrapper around it, state_dict() and load_state_dict(state) that return "
    "and restore all of its state (with MuJoCo: mj_getState and mj_setState; with the ALE: cloneState and "
    "restoreState), and name in the trainable's `stateless` the attributes that cannot be read"
)


class StableBaselines3Trainable(Captured):
    """Trains an algorithm of Stable-Baselines3, one iteration of its ``learn`` per step.

    For PPO and A2C, an iteration is a rollout of ``n_steps`` in each environment and the updates that follow; for DQN,
    SAC, TD3 and DDPG, ``train_freq`` steps in each environment and the ``gradient_steps`` that follow. Weights are bit
    for bit those of ``learn`` with as many time steps. The state contains policies, optimizers, replay buffers,
    statistics of ``VecNormalize``, all random generators, and the environments, even in the middle of an episode.

    These hyperparameters may follow schedules if the algorithm has them: ``learning_rate`` (or ``lr``),
    ``clip_range``, ``clip_range_vf``, ``exploration_rate``, ``gamma``, ``gae_lambda``, ``ent_coef``, ``vf_coef``,
    ``max_grad_norm``, ``target_kl``, ``n_epochs``, ``batch_size``, ``tau``, ``gradient_steps``, ``learning_starts``,
    ``target_update_interval``, ``policy_delay``, ``target_policy_noise``, ``target_noise_clip``. They are set on the
    algorithm at each step, whether or not ``make`` reads them. Only ``make`` reads the others, with their values at
    step 0. An algorithm that is made without a ``seed`` is seeded with the hyperparameter ``seed`` (default 0).

    Metrics are ``mean_reward``, ``std_reward`` and ``mean_ep_length`` of ``evaluate_policy``.

    Args:
        make: returns a new algorithm, given the values of the hyperparameters at step 0, by name.
        evaluation_env: name of an environment, or a function that returns a new environment with the wrappers of the
            training environment. Statistics of a ``VecNormalize`` around the training environment are used.
        episodes: number of episodes of an evaluation. Their seeds depend only on the hyperparameter ``seed`` and the
            step.
        deterministic: whether to evaluate without exploration.
        iterations: iterations per step.
        total_timesteps: the argument of ``learn``: schedules of Stable-Baselines3 depend on it, and trials end there.

    Raises:
        UsageError: the algorithm or environment has a feature that a search does not support, or not exactly; the
            message names it. Training may raise it, too.
    """

    def __init__(
        self,
        make: Callable[[Mapping[str, Scalar]], BaseAlgorithm],
        evaluation_env: str | Callable[[], Any],
        *,
        episodes: int = 10,
        deterministic: bool = True,
        iterations: int = 1,
        total_timesteps: int | None = None,
    ) -> None:
        if not callable(make) or isinstance(make, BaseAlgorithm):
            raise UsageError(f"make is a {type(make).__name__}; it must be a function of hp that returns an algorithm")
        if not (isinstance(evaluation_env, str) or callable(evaluation_env)):
            raise UsageError(
                f"evaluation_env is a {type(evaluation_env).__name__}; it must be the name of an environment, or a "
                f"function that returns a new one"
            )
        if episodes < 1 or iterations < 1:
            raise UsageError(f"episodes is {episodes} and iterations is {iterations}; they must be at least 1")
        self.make = make
        self.evaluation_env = evaluation_env
        self.episodes = episodes
        self.deterministic = deterministic
        self.iterations = iterations
        self.total_timesteps = total_timesteps
        self.libraries = {name: version(name) for name in ("gymnasium", "stable-baselines3")}

    @property
    def _read_by_library(self) -> list[str]:
        return ["lr", *_SCHEDULES, *_NUMBERS]

    def _unchangeable(self, name: str, hp: Mapping[str, Scalar]) -> str:
        if name == "seed" or name in self._read_by_library:
            return ""
        return AT_FIRST

    def __call__(self, run: Run) -> None:
        initial = dict(run.hp)
        training = _Training(self._made(initial), self.total_timesteps)
        algorithm = training.algorithm
        self._follow(training, run.hp, initial)
        try:
            own = [layer for layer in _layers(algorithm.env) if _has_own_state(layer)]
            environments = {f"environment_{index}": layer for index, layer in enumerate(own)}
            run.attach(**environments, training=training, model=algorithm.policy)
        except StateError as error:
            if ".env." not in str(error):
                raise
            raise UsageError(f"{error}. If it is part of an environment: {_REMEDY}") from error
        for step in run.steps():
            self._follow(training, run.hp, initial)
            ended = training.iterate(self.iterations)
            for name, value in training.logged().items():
                run.log(name, value)
            if run.wants_report or ended:
                with run._world.kept("evaluation", warn=False):
                    metrics = self._measured(algorithm, mix(seed_of(run.hp), step, _STREAM))
                run.report(**metrics)
            _forget(algorithm.policy)
            if ended:
                run.stop()

    def _made(self, hp: dict[str, Scalar]) -> Any:
        algorithm: Any = self.make(dict(hp))
        _see_algorithm(algorithm)
        if algorithm.seed is None:
            algorithm.set_random_seed(seed_of(hp) % (1 << 32))
        if algorithm.tensorboard_log is not None or algorithm._custom_logger:
            logger.warning("Stable-Baselines3's own logger is not used; `hpstage logs` prints what it would log")
        algorithm.set_logger(Logger(None, []))
        _settle(algorithm.env)
        return algorithm

    def _follow(self, training: _Training, hp: Mapping[str, Scalar], initial: Mapping[str, Scalar]) -> None:
        """Set the attributes of the algorithm that are hyperparameters to their present values."""
        for name, value in hp.items():
            if training.set("learning_rate" if name == "lr" else name, value):
                continue
            if value != initial[name]:
                raise UsageError(changed_after(name, initial[name], value))
            if name != "seed" and not may_read(self.make, name):
                raise UsageError(
                    f"nothing reads the hyperparameter {name!r}: make() does not mention it, and "
                    f"{type(training.algorithm).__name__} has no parameter of that name that can change"
                )
        if self.total_timesteps is None:
            for name, attribute in _SCHEDULES.items():
                schedule = getattr(training.algorithm, attribute, None)
                if schedule is not None and not _is_constant(schedule):
                    raise UsageError(
                        f"{name} follows {schedule!r}, which depends on the total number of time steps. Give {name} as "
                        f"a hyperparameter with a schedule of hpstage, such as s.linear(...), or give total_timesteps"
                    )

    def _measured(self, algorithm: Any, seed: int) -> dict[str, float]:
        env, space = self.evaluation_env, algorithm.action_space
        made: Any = gymnasium.make(env) if isinstance(env, str) else env()
        try:
            made = _normalized(BaseAlgorithm._wrap_env(made, 0, True), algorithm.get_vec_normalize_env())
            utils.check_for_correct_spaces(made, algorithm.observation_space, space)
            utils.set_random_seed(seed % (1 << 32))
            made.seed(seed % (1 << 31))
            algorithm.action_space = copy.deepcopy(space)  # DQN draws samples from it
            rewards, lengths = evaluate_policy(
                algorithm, made, self.episodes, self.deterministic, return_episode_rewards=True, warn=False
            )
        except ValueError as error:
            if "spaces do not match" not in str(error):
                raise
            raise UsageError(
                f"evaluation_env has other spaces than the training environment ({error}). Give it the same wrappers"
            ) from None
        finally:
            algorithm.action_space = space
            made.close()
        found = {"mean_reward": np.mean(rewards), "std_reward": np.std(rewards), "mean_ep_length": np.mean(lengths)}
        return {name: float(value) for name, value in found.items()}


class _Training(torch.nn.Module):
    """All objects that training changes. It is a module, so that all objects reachable from it, such as environments,
    are captured."""

    def __init__(self, algorithm: Any, total_timesteps: int | None) -> None:
        super().__init__()
        self.algorithm = algorithm
        self.total = total_timesteps or _ENDLESS
        algorithm._setup_learn(self.total)
        algorithm.start_time = 0
        self.schedules: dict[str, utils.FloatSchedule] = {}
        self.generators = random.Random(), np.random.RandomState(), torch.Generator()
        self._keep_generators()

    def iterate(self, times: int) -> bool:
        """Train ``times`` iterations of the loop of ``learn``, with the random generators of this training. Return
        whether the loop has ended."""
        algorithm = self.algorithm
        python, numbers, tensors = self.generators
        random.setstate(python.getstate())
        np.random.set_state(numbers.get_state())
        torch.default_generator.set_state(tensors.get_state())
        callback = algorithm._init_callback(None)
        for _ in range(times):
            (_off_policy if isinstance(algorithm, OffPolicyAlgorithm) else self._on_policy)(algorithm, callback)
            if algorithm.num_timesteps >= self.total:
                break
        self._keep_generators()
        return bool(algorithm.num_timesteps >= self.total)

    def _on_policy(self, algorithm: Any, callback: BaseCallback) -> None:
        algorithm.collect_rollouts(algorithm.env, callback, algorithm.rollout_buffer, algorithm.n_steps)
        algorithm._update_current_progress_remaining(algorithm.num_timesteps, self.total)
        algorithm.train()

    def _keep_generators(self) -> None:
        python, numbers, tensors = self.generators
        python.setstate(random.getstate())
        numbers.set_state(np.random.get_state())
        tensors.set_state(torch.default_generator.get_state())

    def logged(self) -> dict[str, Any]:
        """Return the numbers that the algorithm has recorded since the last call."""
        recorded = self.algorithm.logger.name_to_value
        found = {name: value for name, value in recorded.items() if isinstance(value, int | float | np.number)}
        for container in vars(self.algorithm.logger).values():
            if isinstance(container, dict):
                container.clear()
        return found

    def set(self, name: str, value: Scalar) -> bool:
        """Set a hyperparameter on the algorithm. Return ``False`` if the algorithm has none of this name that may
        change."""
        algorithm = self.algorithm
        attribute = _SCHEDULES.get(name, name)
        if name not in (*_SCHEDULES, *_NUMBERS) or not hasattr(algorithm, attribute) or isinstance(value, str | bool):
            return False
        if name == "ent_coef" and getattr(algorithm, "ent_coef_optimizer", None) is not None:
            return False  # the algorithm learns it
        if name in _WHOLE and type(value) is not int:
            raise UsageError(f"the hyperparameter {name!r} is {value!r}; it must be a whole number")
        if name in _SCHEDULES:
            # The schedule is created before the first step; later steps change its value.
            schedule = self.schedules.setdefault(name, utils.FloatSchedule(0.0))
            if value is not None:
                schedule.value_schedule.val = float(value)
            setattr(algorithm, attribute, None if value is None else schedule)
            return True
        new = value if value is None or name in _WHOLE else float(value)
        for holder in (
            algorithm,
            getattr(algorithm, "rollout_buffer", None),
            getattr(algorithm, "replay_buffer", None),
        ):
            if hasattr(holder, name):
                setattr(holder, name, new)
        if name == "ent_coef" and hasattr(algorithm, "ent_coef_tensor"):
            algorithm.ent_coef_tensor.fill_(new)
        return True


def _off_policy(algorithm: Any, callback: BaseCallback) -> None:
    rollout = algorithm.collect_rollouts(
        algorithm.env,
        callback,
        algorithm.train_freq,
        algorithm.replay_buffer,
        algorithm.action_noise,
        algorithm.learning_starts,
    )
    steps = algorithm.gradient_steps if algorithm.gradient_steps >= 0 else rollout.episode_timesteps
    if algorithm.num_timesteps > algorithm.learning_starts and steps > 0:
        algorithm.train(steps, algorithm.batch_size)


def _is_constant(schedule: Any) -> bool:
    if isinstance(schedule, utils.FloatSchedule):
        schedule = schedule.value_schedule
    return isinstance(schedule, utils.ConstantSchedule) or (
        isinstance(schedule, utils.LinearSchedule) and schedule.start == schedule.end
    )


class _NoTime(Captured):
    """A start time of a Monitor from which all times that it measures are 0."""

    def __rsub__(self, now: float) -> float:
        return 0.0


def _layers(env: Any) -> Iterator[Any]:
    """Yield environments, each from the outermost wrapper to the innermost environment."""
    yield env
    if isinstance(env, vec_env.VecEnvWrapper):
        yield from _layers(env.venv)
    elif isinstance(env, gymnasium.Wrapper):
        yield from _layers(env.env)
    elif isinstance(env, vec_env.DummyVecEnv):
        for one in env.envs:
            yield from _layers(one)


def _spaces(space: Any) -> Iterator[Any]:
    yield space
    inner = getattr(space, "spaces", ())
    for one in inner.values() if isinstance(inner, Mapping) else inner:
        yield from _spaces(one)


def _settle(env: Any) -> None:
    """Make environments repeatable: seed the generators of spaces that are not seeded, and let Monitors measure no time
    and write no file."""
    for layer in _layers(env):
        for space in (*_spaces(layer.observation_space), *_spaces(layer.action_space)):
            source = getattr(space, "_np_random", None)
            entropy = None if source is None else getattr(source.bit_generator.seed_seq, "entropy", None)
            if isinstance(entropy, int) and entropy >= _BY_SYSTEM:
                space.seed(0)
        if "class_attributes" in vars(layer):  # a VecEnvWrapper reads only the names, so drop the values
            layer.class_attributes = dict.fromkeys(layer.class_attributes)
        if isinstance(layer, Monitor | vec_env.VecMonitor):
            layer.t_start = _NoTime()
            if layer.results_writer is not None:
                logger.warning("a Monitor writes no file in a search; `hpstage export` writes the metrics")
                layer.results_writer.close()
                layer.results_writer = None


def _has_own_state(env: Any) -> bool:
    return all(callable(getattr(type(env), name, None)) for name in ("state_dict", "load_state_dict"))


def _see_algorithm(algorithm: Any) -> None:
    """Refuse an algorithm or environment that cannot be trained step by step, or not exactly."""
    kind = type(algorithm)
    if not isinstance(algorithm, OnPolicyAlgorithm | OffPolicyAlgorithm):
        raise UsageError(f"make has returned a {kind.__name__}, which is not an on-policy or off-policy algorithm")
    owner = next(base for base in kind.__mro__ if "learn" in vars(base))
    if not owner.__module__.startswith("stable_baselines3."):
        raise UsageError(f"{owner.__name__} overrides learn(); hpstage can only step through Stable-Baselines3's own")
    if algorithm.device.type != "cpu":
        raise UsageError(f"make has returned a {kind.__name__} on {algorithm.device}. Give it device='cpu'")
    if algorithm.env is None:
        raise UsageError(f"make has returned a {kind.__name__} without an environment. Give it one")
    for layer in _layers(algorithm.env):
        name = type(layer).__name__
        if isinstance(layer, vec_env.SubprocVecEnv):
            raise UsageError(
                f"{name} has its environments in other processes, whose state cannot be captured. Use a DummyVecEnv"
            )
        if isinstance(layer, _SHOWING):
            raise UsageError(f"{name} records videos or times. Leave it out; the algorithm adds a Monitor itself")
    for env in getattr(algorithm.env.unwrapped, "envs", ()):
        inner = env.unwrapped
        if type(inner).__module__.startswith(_IN_C) and not any(map(_has_own_state, _layers(env))):
            raise UsageError(f"the state of {type(inner).__name__} cannot be read from Python: {_REMEDY}")


def _forget(policy: torch.nn.Module) -> None:
    """Drop the tensors of the last batch, and their graph, that policies keep but never read again."""
    for module in policy.modules():
        holder = getattr(module, "action_dist", None)
        for name, value in vars(holder).items() if holder is not None else ():
            if isinstance(value, torch.distributions.Distribution | list):
                setattr(holder, name, None)
            elif isinstance(value, torch.Tensor):
                setattr(holder, name, value.detach())


def _normalized(env: Any, of_training: vec_env.VecNormalize | None) -> Any:
    """Return the environment, normalized with the statistics of training if there are any."""
    if of_training is None:
        return env
    names = "norm_obs", "clip_obs", "epsilon", "norm_obs_keys"
    kept = {name: getattr(of_training, name) for name in names}
    normalized = vec_env.VecNormalize(env, training=False, norm_reward=False, **kept)
    normalized.obs_rms = of_training.obs_rms
    return normalized
