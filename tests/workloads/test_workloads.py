"""Every workload is exact, however it is reached, and its space shares training."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import pytest
import torch

import hpstage
from hpstage.checking import Children
from hpstage.checkpoints.state_tree import clone, digest
from hpstage.cli.naming import space_named, trainable_named
from hpstage.torch import TorchTrainable
from hpstage.torch.environment import pin
from hpstage.training.identity.code_identity import identify
from hpstage.training.trainables import as_trainable
from tests.workloads.cases import CASES, STEPS, Case, schedules_of, write_files

pytestmark = [
    pytest.mark.sampled(4),
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),  # PEFT reads it
]

pin()  # as on a worker: the number of threads changes bits
N_TRIALS, FORK = 5, STEPS // 2
WITHOUT_BACKENDS = ("gpt", "evolution")  # a function, and an object with a step of its own: no backend takes it over
WITH_BACKENDS = [name for name in CASES if name not in WITHOUT_BACKENDS]
SHARED = {"recommender": "self.dense", "unet": "self.kind", "bert": "self.initial"}
"""What belongs to a trial, and is kept on the object, which stacked siblings share."""


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("files")
    write_files(folder)
    return folder


@pytest.fixture(scope="module")
def children() -> Iterator[Children]:
    with Children(["numpy", "torch", "hpstage.torch"]) as shared:
        yield shared


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> Case:
    return CASES[request.param]


@pytest.mark.ci
def test_a_fork_of_a_workload_equals_training_without_a_fork(case: Case, files: Path) -> None:
    values_at = schedules_of(case.space)
    straight = trained(as_trainable(case.make(files)), values_at, 0, FORK)
    state = clone(straight.state_dict())
    trained(straight, values_at, FORK, STEPS)
    forked = as_trainable(case.make(files))
    forked.setup(values_at(0))
    forked.load_state_dict(state)
    trained(forked, values_at, FORK, STEPS)
    assert digest(forked.state_dict()) == digest(straight.state_dict())
    assert forked.evaluate() == straight.evaluate()


def trained(trainable: Any, values_at: Callable[[int], dict[str, Any]], start: int, stop: int) -> Any:
    if start == 0:
        trainable.setup(values_at(0))
    for step in range(start, stop):
        torch.rand(1), np.random.rand()  # others draw from the generators, too
        trainable.train(step, values_at(step))
    return trainable


@pytest.mark.ci
@pytest.mark.parametrize(
    "case",
    [pytest.param(name, marks=[] if name == "recommender" else pytest.mark.slow) for name in CASES],
    indirect=True,
)
def test_check_finds_no_fault_in_a_workload(case: Case, files: Path, children: Children) -> None:
    report = hpstage.check(case.make(files), case.space, steps=4, n_forks=1, children=children)
    assert report.ok, str(report)


def checked(name: str, numerics: str, files: Path, children: Children) -> hpstage.CheckReport:
    trainable = CASES[name].make(files)
    assert isinstance(trainable, TorchTrainable)
    trainable.numerics = numerics
    return hpstage.check(trainable, CASES[name].space, steps=4, n_forks=1, children=children)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a compiler")
@pytest.mark.parametrize("name", WITH_BACKENDS)
def test_check_finds_no_fault_in_a_workload_with_compiled_steps(name: str, files: Path, children: Children) -> None:
    report = checked(name, "compiled", files, children)
    assert report.ok, str(report)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in WITH_BACKENDS if name not in SHARED])
def test_check_finds_no_fault_in_a_workload_with_stacked_steps(name: str, files: Path, children: Children) -> None:
    report = checked(name, "stacked", files, children)
    assert report.ok, str(report)


@pytest.mark.parametrize("name", SHARED)
@pytest.mark.ci
def test_check_names_the_state_that_stacked_trials_would_share(name: str, files: Path, children: Children) -> None:
    report = checked(name, "stacked", files, children)
    assert not report.ok and f"changes {SHARED[name]}, and under numerics = 'stacked'" in str(report)


@pytest.mark.ci
@pytest.mark.one_in(2)
def test_a_search_shares_training_and_its_trials_equal_training_without_sharing(
    case: Case, files: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    study = optuna.create_study(direction=case.direction, sampler=optuna.samplers.RandomSampler(seed=0))
    result = hpstage.optimize(
        study,
        case.make(files),
        case.space,
        metric=case.metric,
        steps=STEPS,
        n_trials=N_TRIALS,
        executor=hpstage.InlineExecutor(),
        store=tmp_path / "store",
    )
    assert not [record.message for record in caplog.records if record.name == "hpstage"]
    assert result.savings.merge_rate > 1.1
    assert result.savings.steps_trained == result.savings.steps_unique
    for number in (0, N_TRIALS - 1):
        trial = result.trial(number)
        alone = trained(as_trainable(case.make(files)), trial.hyperparameters, 0, STEPS)
        state = trial.planned.node_at(STEPS).states[STEPS]
        assert state.kept is not None
        assert state.kept.digest == digest(alone.state_dict())
        assert trial.metrics[STEPS] == alone.evaluate()


@pytest.mark.parametrize("name", CASES)
def test_the_code_of_a_workload_is_part_of_its_key(name: str, files: Path) -> None:
    identity = identify(CASES[name].make(files))
    own = [loaded for loaded in identity.loaded if loaded.startswith(f"hpstage.workloads.{name}")]
    assert len(own) > 5
    assert not any("library hpstage.workloads" in text for text in identity.described.values())


def test_workloads_can_be_named_as_in_a_command_and_find_data_by_an_environment_variable(
    files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CIFAR10", str(files))
    subject: Any = trainable_named("hpstage.workloads.resnet:ResNet")
    assert (subject.folder, subject.depth) == (str(files), 20)
    assert callable(space_named("hpstage.workloads.resnet:space"))
