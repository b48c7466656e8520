"""The models of a search: what is loaded, exported and kept evaluates to what the search reported, bit for bit."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel
from typer.testing import CliRunner

import hpstage
from hpstage import schedule as s
from hpstage.algos import OptunaPruner, SuccessiveHalving
from hpstage.cli.app import app
from hpstage.errors import CheckpointCorrupt, CheckpointMissing, StateError, StoreError, UsageError
from hpstage.store import MemoryJournal
from hpstage.testing.toys import Tape
from tests.torch.trainables import Small, network, ordinary_loop, samples

pytestmark = pytest.mark.sampled(10)

STEPS = 8


def space(trial: optuna.Trial) -> dict[str, object]:
    return {
        "lr": s.multistep(trial.suggest_float("lr", 0.01, 0.1), [trial.suggest_categorical("drop", [3, 5])]),
        "momentum": 0.9,
        "batch_size": 8,
        "seed": 3,
    }


def search(trainable: object, store: object, metric: str = "loss", **options: Any) -> hpstage.Result:
    study = optuna.create_study(study_name="study", sampler=optuna.samplers.RandomSampler(seed=0))
    given = {"n_trials": 3, "steps": STEPS, "executor": hpstage.InlineExecutor(), **options}
    return hpstage.optimize(study, trainable, space, metric=metric, store=store, **given)


class WithAverage(Small):
    """Holds averaged weights itself, and evaluates those."""

    def model(self, hp: Mapping[str, Any]) -> nn.Module:
        model = network()
        self.average = AveragedModel(model)
        return model

    def update(self, model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> None:
        super().update(model, optimizer, batch)
        self.average.update_parameters(model)

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        self.average.eval()
        return super().evaluate(self.average)


class Frozen(Small):
    """The first layers were made once, before any trial, and no training changes them."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten()).requires_grad_(False)

    def model(self, hp: Mapping[str, Any]) -> nn.Module:
        return nn.Sequential(self.backbone, nn.Linear(144, 3))

    def optimizer(self, model: nn.Module, hp: Mapping[str, Any]) -> torch.optim.Optimizer:
        return super().optimizer(model[1], hp)  # type: ignore[index]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> hpstage.Result:
    return search(Small(), tmp_path_factory.mktemp("store"))


def evaluated(model: nn.Module, trainable: Small) -> dict[str, float]:
    model.eval()
    with torch.no_grad():
        return trainable.evaluate(model)


@pytest.mark.ci
@pytest.mark.parametrize("kind", [Small, WithAverage, Frozen])
def test_a_loaded_model_evaluates_to_the_reported_metrics(kind: type[Small], tmp_path: Path) -> None:
    trainable = kind()
    result = search(trainable, tmp_path)
    before = dict(vars(trainable))
    for trial in result.study.trials:
        loaded = result.load(trial)
        assert loaded.step == STEPS
        assert loaded.metrics == evaluated(loaded.model, loaded.trainable)
        assert loaded.metrics["loss"] == trial.value
        assert loaded.trainable is not trainable
        assert {id(p) for p in loaded.model.parameters()} >= {
            id(p) for group in loaded.optimizer.param_groups for p in group["params"]
        }
        assert loaded.optimizer.param_groups[0]["lr"] == loaded.hp["lr"] == result.schedules(trial)["lr"].value(7)
    assert vars(trainable) == before
    best = result.best_model()
    assert not best.training
    assert evaluated(best, result.load(result.best_trial).trainable)["loss"] == result.best_value


@pytest.mark.ci
def test_objects_attached_by_a_function_can_be_loaded(tmp_path: Path) -> None:
    result = search(ordinary_loop, tmp_path)
    x, y = samples()
    for trial in result.study.trials:
        loaded = result.load(trial)
        assert sorted(loaded.parts) == ["model", "optimizer"]
        loaded.model.eval()
        with torch.no_grad():
            assert float(nn.functional.cross_entropy(loaded.model(x), y)) == trial.value
    assert not result.best_model().training


def test_a_plain_object_is_loaded_with_its_reported_metrics(tmp_path: Path) -> None:
    tape = Tape()
    result = search(tape, tmp_path, metric="score")
    loaded = result.load(1)
    assert loaded.trainable.evaluate() == loaded.metrics
    assert loaded.trainable is not tape and tape.digest == ""
    with pytest.raises(UsageError, match="has no part 'model'; it has trainable"):
        result.best_model()
    with pytest.raises(UsageError, match="no tensors"):
        result.trial(1).weights()


def test_loading_a_model_returns_a_copy_and_does_not_change_random_generators(found: hpstage.Result) -> None:
    torch.manual_seed(5), np.random.seed(5), random.seed(5)
    expected = torch.rand(1), np.random.rand(), random.random()
    torch.manual_seed(5), np.random.seed(5), random.seed(5)
    one, other = found.load(0), found.load(0)
    assert (torch.rand(1), np.random.rand(), random.random()) == expected
    with torch.no_grad():
        one.model[0].weight.zero_()
    assert other.model[0].weight.abs().sum() > 0
    assert torch.equal(found.load(0).model[0].weight, other.model[0].weight)


def test_a_state_without_a_checkpoint_is_trained_again_on_request_bit_for_bit(
    found: hpstage.Result, tmp_path: Path
) -> None:
    kept = search(Small(), tmp_path, checkpoint_every=1)
    for step in (1, 4, 7):
        assert step not in found.trial(0).kept
        with pytest.raises(CheckpointMissing, match=rf"trial study/0 after step {step} is kept; there are those after"):
            found.load(0, step)
        again, original = found.load(0, step, retrain=True), kept.load(0, step)
        assert again.model.state_dict().keys() == original.model.state_dict().keys()
        for name, value in original.model.state_dict().items():
            assert torch.equal(again.model.state_dict()[name], value), (step, name)
        assert again.hp == original.hp


def test_the_best_step_of_a_trial_has_the_best_value_of_the_studys_metric(tmp_path: Path) -> None:
    result = search(Small(), tmp_path, algorithm=SuccessiveHalving(2, 2), n_trials=6)
    trial = result.trial(result.best_trial)
    assert len(trial.metrics) > 1
    best = min(trial.metrics, key=lambda step: trial.metrics[step]["loss"])
    assert trial.step("best") == best and trial.step() == max(trial.metrics)
    loaded = result.load(result.best_trial, "best")
    assert evaluated(loaded.model, loaded.trainable) == trial.metrics[best]


ALONE = """
import json, sys, torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

torch.set_num_threads(1)
model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Dropout(.3), nn.Linear(144, 3))
model.eval()
x, y = torch.randn(30, 1, 8, 8, generator=torch.Generator().manual_seed(0)), torch.arange(30) % 3
for path in sys.argv[1:]:
    model.load_state_dict(load_file(path))
    with torch.no_grad(), safe_open(path, "pt") as file:
        print(json.dumps([float(nn.functional.cross_entropy(model(x), y)), file.metadata()]))
assert "hpstage" not in sys.modules
"""


def test_exported_weights_evaluate_to_the_reported_value_without_hpstage(found: hpstage.Result, tmp_path: Path) -> None:
    wanted: list[tuple[int, list[str]]] = [
        (found.best_trial.number, []),
        (1, ["--trial", "study/1"]),
        (2, ["--trial", "2", "--step", "8"]),
    ]
    paths = [str(tmp_path / f"{number}.safetensors") for number in range(len(wanted))]
    for (trial, words), path in zip(wanted, paths, strict=True):
        done = CliRunner().invoke(app, ["export", str(found.store), "weights", *words, path])
        assert done.exit_code == 0, done.output
        assert f"trial study/{trial} after step 8" in done.stdout
    alone = subprocess.run(
        [sys.executable, "-c", ALONE, *paths], capture_output=True, text=True, timeout=300, check=True
    )
    for (trial, _), line in zip(wanted, alone.stdout.splitlines(), strict=True):
        loss, about = json.loads(line)
        assert loss == found.study.trials[trial].value
        assert about["trial"] == f"study/{trial}" and float(about["loss"]) == loss


def test_export_from_a_store_with_several_studies_explains_how_to_name_a_trial(tmp_path: Path) -> None:
    for name in ("one", "other"):
        hpstage.optimize(
            optuna.create_study(study_name=name),
            Small(),
            lambda trial: {"lr": 0.1, "momentum": 0.9, "batch_size": 8},
            metric="loss",
            steps=1,
            n_trials=1,
            executor=hpstage.InlineExecutor(),
            store=tmp_path,
        )
    for trial in (None, "0"):
        words = [] if trial is None else ["--trial", trial]
        done = CliRunner().invoke(app, ["export", str(tmp_path), "weights", str(tmp_path / "w"), *words])
        assert "name the study, or a trial as STUDY/NUMBER; there are: one, other" in str(done.exception)
        words += ["--study", "one"]
        done = CliRunner().invoke(app, ["export", str(tmp_path), "weights", str(tmp_path / "w"), *words])
        assert "trial one/0 after step 1" in done.output


@pytest.mark.ci
def test_averaged_weights_are_available_by_their_attribute_name(tmp_path: Path) -> None:
    result = search(WithAverage(), tmp_path)
    model = AveragedModel(network())
    model.load_state_dict(result.trial(0).weights(part="self.average"))
    assert evaluated(model.module, Small())["loss"] == result.study.trials[0].value
    with pytest.raises(UsageError, match=r"no tensors of 'self\.ema'; it has .*self\.average\.module"):
        result.trial(0).weights(part="self.ema")


def test_hpstage_open_gives_trials_and_models_of_a_store_without_the_study(found: hpstage.Result) -> None:
    assert found.store is not None
    plan = hpstage.open(found.store)
    assert plan.studies == ["study"] and plan.trials == [f"study/{number}" for number in range(3)]
    assert plan.best_trial().id == f"study/{found.best_trial.number}"
    trial = plan.trial("study/1")
    assert plan.trial(1).id == plan.trial("1", study="study").id == trial.id
    assert trial.metrics == found.trial(1).metrics and trial.schedules == found.schedules(1)
    assert Path(trial.checkpoint()).is_dir() and (Path(trial.checkpoint()) / "state.safetensors").exists()
    loaded = trial.load(Small())
    assert loaded.metrics == evaluated(loaded.model, loaded.trainable)
    assert hpstage.open(found.store, checkpoints=found.store / "checkpoints").trial(1).weights().keys()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda result: result.load(7), "no trial 'study/7'; it has 3 trials, study/0 to study/2"),
        (lambda result: result.load(0, 9), "no state after step 9: it has 8 steps"),
        (lambda result: result.load(0, 0), "no state after step 0"),
        (lambda result: result.load(0, "first"), "step is 'first'; give a number of steps, 'best', or None"),
        (lambda result: result.load(0).scheduler, "no attribute"),
        (lambda result: hpstage.open(result.store).trial(0, study="other"), "no study 'other'; there are: study"),
        (lambda result: hpstage.open(result.store / "nothing"), "there is no plan in"),
        (lambda result: result.trial(0).load(ordinary_loop), "this is not a state of a training function"),
    ],
)
def test_a_missing_trial_state_or_plan_is_named_in_the_error(found: hpstage.Result, wrong: Any, message: str) -> None:
    with pytest.raises((UsageError, StoreError, StateError, AttributeError), match=message):
        wrong(found)


def test_the_error_for_checkpoints_of_a_deleted_temporary_folder_names_the_remedy() -> None:
    result = search(Small(), MemoryJournal())
    with pytest.raises(CheckpointMissing, match=r"temporary folder.*give optimize\(\) a folder or URL"):
        result.best_model()
    assert result.load(0, retrain=True).metrics == {
        "loss": result.study.trials[0].value,
        "accuracy": result.trial(0).metrics[8]["accuracy"],
    }


def test_the_checkpoint_of_the_best_trial_is_never_evicted(tmp_path: Path) -> None:
    result = search(Small(), tmp_path, checkpoint_budget=1, n_trials=5)
    best = f"study/{result.best_trial.number}"
    assert len(result.plan.kept) == 1
    assert evaluated(result.best_model(), Small())["loss"] == result.best_value
    subprocess.run([sys.executable, "-m", "hpstage", "gc", str(tmp_path), "--budget", "0"], check=True, timeout=300)
    assert hpstage.open(tmp_path).trial(best).load(Small()).metrics == result.trial(result.best_trial).metrics[STEPS]


class HookedInTraining(Small):
    """The model calls a function that reads what the trainable has learned."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = [1.0]

    def model(self, hp: Mapping[str, Any]) -> nn.Module:
        model = network()
        model.register_forward_hook(lambda module, inputs, output: output * self.scale[0])
        nn.utils.weight_norm(model[5])  # type: ignore[arg-type]
        return model

    def update(self, model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> None:
        super().update(model, optimizer, batch)
        self.scale[0] *= 1.01


@pytest.mark.filterwarnings("ignore:.*weight_norm")
def test_objects_that_a_model_refers_to_are_loaded_with_the_model(tmp_path: Path) -> None:
    trainable = HookedInTraining()
    result = search(trainable, tmp_path)
    for trial in result.study.trials:
        loaded = result.load(trial)
        assert evaluated(loaded.model, loaded.trainable) == loaded.metrics
        assert loaded.trainable.scale != [1.0] == trainable.scale


def test_a_damaged_checkpoint_is_an_error_and_is_trained_again_on_request(tmp_path: Path) -> None:
    result = search(Small(), tmp_path)
    whole = result.load(0).model.state_dict()
    (Path(result.checkpoint(0)) / "state.safetensors").write_bytes(b"nothing")
    with pytest.raises(CheckpointCorrupt, match=r"trial study/0 after step 8 cannot be read.*retrain=True"):
        result.load(0)
    again = result.load(0, retrain=True).model.state_dict()
    assert all(torch.equal(again[name], value) for name, value in whole.items())


class Wider(Small):
    def model(self, hp: Mapping[str, Any]) -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 9), nn.Linear(9, 3))


def test_loading_a_state_into_another_model_is_an_error_that_names_state_and_model(found: hpstage.Result) -> None:
    trial = found.trial(0)
    assert found.plan is not None
    key = found.plan.key(trial.planned.node_at(STEPS), STEPS)
    named = (
        rf"^state {key} of the store, of trial study/0 after step {STEPS}, cannot be loaded: "
        r"the state belongs to .*model"
    )
    with pytest.raises(StateError, match=named) as caught:
        trial.load(Wider())
    assert isinstance(caught.value.__cause__, StateError)


def test_best_model_with_several_objectives_and_evaluate_every_with_a_pruner_are_refused(tmp_path: Path) -> None:
    study = optuna.create_study(study_name="two", directions=["minimize", "maximize"])
    result = hpstage.optimize(
        study, Small(), space, metric=["loss", "accuracy"], steps=4, n_trials=2,
        executor=hpstage.InlineExecutor(), store=tmp_path,
    )  # fmt: skip
    with pytest.raises(UsageError, match=r"load\(result.best_trials\[0\]\)"):
        result.best_model()
    assert result.load(result.best_trials[0]).metrics is not None
    with pytest.raises(UsageError, match="interval"):
        search(Small(), tmp_path, algorithm=OptunaPruner(2), evaluate_every=2)


def test_an_inline_executor_can_be_used_again_after_a_failed_search(tmp_path: Path) -> None:
    executor = hpstage.InlineExecutor()
    with pytest.raises(ZeroDivisionError):
        hpstage.optimize(
            optuna.create_study(), Small(), lambda trial: 1 / 0, metric="loss", steps=8, executor=executor,  # type: ignore[arg-type, return-value]
            store=tmp_path,
        )  # fmt: skip
    assert search(Small(), tmp_path, executor=executor).best_trial.value is not None
