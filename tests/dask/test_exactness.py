"""Law 1, exactness: under the stage tree every trial has the weights and metrics that it has alone, bit for bit."""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import optuna
import pytest
import torch
from distributed import Client
from torch import nn
from torch.utils.data import TensorDataset

import hpstage
import hpstage.torch
from hpstage import schedule as s
from hpstage.algos import SuccessiveHalving
from hpstage.checkpoints.state_tree import digest
from hpstage.cluster import DaskExecutor
from hpstage.executor import Executor
from hpstage.plan.facts import StateReached
from hpstage.schedule import Schedule
from hpstage.training.trainables import as_trainable
from tests.torch.test_endings import outcome as ends
from tests.torch.test_endings import pruning, search, stopping

pytestmark = pytest.mark.sampled(10)

optuna.logging.set_verbosity(optuna.logging.ERROR)

STEPS = 10
SAMPLES = 40
RUNGS = (2, 5, 10)


class Net(hpstage.torch.TorchTrainable):
    """An MLP with BatchNorm and dropout, trained with momentum; every hyperparameter may change at any step."""

    device = "cpu"

    def model(self, hp: Mapping[str, Any]) -> nn.Module:
        return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))

    def optimizer(self, model: nn.Module, hp: Mapping[str, Any]) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=hp["lr"], momentum=hp["momentum"])

    def dataset(self) -> TensorDataset:
        generator = torch.Generator().manual_seed(5)
        return TensorDataset(torch.randn(SAMPLES, 6, generator=generator), torch.arange(SAMPLES) % 3)

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        x, y = batch
        return nn.functional.cross_entropy(model(nn.functional.dropout(x, self.hp["dropout"], model.training)), y)

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        x, y = self.dataset().tensors
        logits = model(x)
        return {"loss": nn.functional.cross_entropy(logits, y).item(), "sum": logits.double().sum().item()}


def random_schedule(rng: random.Random, values: list[float]) -> Schedule:
    """Few values and places, so that lines often run together for a while."""
    kind = rng.choice(["constant", "pieces", "pieces", "pieces", "linear"])
    first = rng.choice(values[:2])
    if kind == "constant":
        return s.constant(first)
    if kind == "linear" and all(isinstance(value, float) for value in values):
        return s.linear(first, end_factor=0.1, start_factor=1.0, total_iters=rng.choice([4, 8]))
    starts = sorted({0, *rng.sample([1, 2, 4, 5, 7], rng.randint(1, 2))})
    return s.piecewise({start: first if start == 0 else rng.choice(values) for start in starts})


def random_trials(seed: int) -> list[dict[str, Schedule]]:
    rng = random.Random(seed)
    seeds = [0] if rng.random() < 0.7 else [0, 1]
    trials = [
        {
            "lr": random_schedule(rng, [0.1, 0.05, 0.01]),
            "momentum": random_schedule(rng, [0.9, 0.5, 0.0]) if rng.random() < 0.5 else s.constant(0.9),
            "dropout": random_schedule(rng, [0.2, 0.0, 0.5]) if rng.random() < 0.5 else s.constant(0.2),
            "batch_size": random_schedule(rng, [8, 12, 40]) if rng.random() < 0.5 else s.constant(8),
            "seed": s.constant(rng.choice(seeds)),
        }
        for _ in range(rng.randint(4, 8))
    ]
    trials.append(dict(rng.choice(trials)))  # two trials that are one
    rng.shuffle(trials)
    return trials


def alone(trainable: object, schedules: Mapping[str, Schedule]) -> dict[int, tuple[str, dict[str, float]]]:
    """Digest and metrics at each rung of a trial in a plain loop: no plan, no chain, no checkpoint."""
    line = {name: schedule.until(STEPS) for name, schedule in schedules.items()}
    net = as_trainable(trainable)
    net.setup({name: schedule.value(0) for name, schedule in line.items()})
    reached = {}
    for step in range(STEPS):
        net.train(step, {name: schedule.value(step) for name, schedule in line.items()})
        if step + 1 in RUNGS:
            reached[step + 1] = digest(net.state_dict()), dict(net.evaluate())
    return reached


def run(
    trials: list[dict[str, Schedule]],
    executor: Executor,
    folder: Path,
    *,
    halving: bool,
    trainable: object,
    **more: Any,
) -> hpstage.Result:
    study = optuna.create_study(direction="minimize", sampler=optuna.samplers.RandomSampler(seed=0))
    return hpstage.optimize(
        study,
        trainable,
        lambda trial: trials[trial.number],
        metric="loss",
        steps=STEPS,
        n_trials=len(trials),
        algorithm=SuccessiveHalving(min_steps=RUNGS[0], reduction_factor=2) if halving else None,
        executor=executor,
        store=folder,
        **more,
    )


def check(result: hpstage.Result, expected: list[dict[int, tuple[str, dict[str, float]]]]) -> None:
    """Equal bits where a trial was evaluated or a state was kept, and no step of a node twice."""
    compared = 0
    for number, reached in enumerate(expected):
        planned = result.plan.trials[f"{result.study.study_name}/{number}"]
        for step, (weights, metrics) in reached.items():
            state = planned.node_at(step).states.get(step)
            if state is None:
                continue
            if state.metrics is not None:
                assert state.metrics == metrics, (number, step)
                compared += 1
            if state.kept is not None:
                assert state.kept.digest == weights, (number, step)
    assert compared >= len(expected)
    trained: set[tuple[int, int]] = set()
    for fact in result.journal:
        if isinstance(fact, StateReached):
            steps = {(fact.node, step) for step in range(fact.start, fact.step)}
            assert not steps & trained, f"steps {fact.start} to {fact.step} of node {fact.node} were trained twice"
            trained |= steps


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.parametrize("seed", [*range(2), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 60))])
@pytest.mark.parametrize("halving", [False, True])
def test_every_trial_on_the_inline_executor_equals_training_without_sharing(seed, halving, tmp_path):
    trials = random_trials(seed)
    every = random.Random(seed).choice([None, 1, 3])
    result = run(trials, hpstage.InlineExecutor(), tmp_path, halving=halving, trainable=Net(), checkpoint_every=every)
    check(result, [alone(Net(), schedules) for schedules in trials])
    assert result.savings.steps_trained == result.savings.steps_unique < result.savings.steps_asked


@pytest.mark.slow  # with seeds of its own; the last test here is such a one
@pytest.mark.parametrize("seed", range(100, 120))
@pytest.mark.parametrize("halving", [False, True])
def test_every_trial_on_dask_equals_training_without_sharing(client: Client, seed, halving, tmp_path):
    client.wait_for_workers(2, timeout=120)
    trials = random_trials(seed)
    result = run(trials, DaskExecutor(client), tmp_path, halving=halving, trainable=Net(), checkpoint_every=3)
    check(result, [alone(Net(), schedules) for schedules in trials])


@pytest.mark.ci
def test_a_search_without_sharing_gives_the_same_values_as_one_with_sharing(tmp_path):
    trials = random_trials(7)
    shared = run(trials, hpstage.InlineExecutor(), tmp_path / "shared", halving=False, trainable=Net())
    apart = run(trials, hpstage.InlineExecutor(), tmp_path / "apart", halving=False, trainable=Net(), sharing=False)
    assert [t.value for t in shared.study.trials] == [t.value for t in apart.study.trials]
    assert apart.savings.steps_trained == STEPS * len(trials)
    check(apart, [alone(Net(), schedules) for schedules in trials])


@pytest.mark.ci
def test_successive_halving_on_dask_equals_one_worker_and_training_without_sharing(client_of_nannies: Client, tmp_path):
    client, trials = client_of_nannies, random_trials(9)
    expected = [alone(Net(), schedules) for schedules in trials]

    def listed(executor: Executor, name: str) -> list[tuple[object, ...]]:
        result = run(trials, executor, tmp_path / name, halving=True, trainable=Net(), checkpoint_every=3)
        check(result, expected)
        return [(t.number, t.state, t.value, t.intermediate_values) for t in result.study.trials]

    client.wait_for_workers(2, timeout=120)
    assert listed(DaskExecutor(client), "two") == listed(hpstage.InlineExecutor(), "one")
    # What trained is in processes of their own: those of the workers have had no need of it.
    assert set(client.run(lambda: "torch" in sys.modules).values()) == {False}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("function", [stopping, pruning])
@pytest.mark.ci
def test_a_training_function_that_stops_or_prunes_itself_ends_the_same_on_dask_as_inline(client: Client, function):
    assert ends(search(function, executor=client)) == ends(search(function))
