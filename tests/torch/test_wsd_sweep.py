"""Decays from one trunk have the weights and losses of separate runs, bit for bit; and their soups."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import optuna
import pytest
import torch
from torch import nn

import hpstage
from hpstage import schedule as s
from hpstage.checkpoints import FolderCheckpoints
from hpstage.checkpoints.state_tree import digest
from hpstage.cluster import DaskExecutor
from hpstage.errors import CheckpointMissing, TrainingError, UsageError
from tests.torch.trainables import Averaged, Small, network, ordinary_loop, samples, sgd

pytestmark = pytest.mark.ci  # the sweep itself: tests/unit/search/test_wsd_sweep.py

HORIZONS = [8, 10, 12, 15, 20, 25]
FRACTION = 0.2
HP = {"momentum": 0.9, "batch_size": 8, "seed": 3}


def sweep(**options: Any) -> s.WSDSweep:
    settings: dict[str, Any] = {"horizons": HORIZONS, "warmup": 3, "decay_fraction": FRACTION, "hp": HP}
    return s.wsd_sweep(options.pop("peak", 0.1), **settings | {"decay_form": ["linear", "1-sqrt"]} | options)


def search(space: Any, store: object, trainable: object = None, **options: Any) -> hpstage.Result:
    settings = {"metric": "loss", "executor": hpstage.InlineExecutor()} | options
    study = optuna.create_study(study_name=settings.pop("name", "wsd"))
    return hpstage.optimize(study, trainable or Small(), space, store=store, **settings)  # type: ignore[arg-type]


def same(weights: Mapping[str, torch.Tensor], others: Mapping[str, torch.Tensor]) -> bool:
    return weights.keys() == others.keys() and all(torch.equal(weights[name], others[name]) for name in weights)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> hpstage.Result:
    return search(sweep(), tmp_path_factory.mktemp("store"))


@pytest.mark.parametrize("dask", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["inline", "dask"])
def test_losses_and_weights_of_a_wsd_sweep_do_not_depend_on_the_order_of_horizons(
    found: hpstage.Result, dask: bool, tmp_path: Path
) -> None:
    horizons = list(HORIZONS)
    random.Random(1).shuffle(horizons)
    executor = DaskExecutor(n_workers=2) if dask else hpstage.InlineExecutor()
    result = search(sweep(horizons=horizons), tmp_path, executor=executor)
    trunk, decays = 20, [round(FRACTION * horizon) for horizon in HORIZONS]
    distinct = trunk + 1 + 2 * sum(decay - 1 for decay in decays)
    assert result.savings.steps_unique == distinct
    assert result.savings.steps_trained == distinct
    known = {(trial.params["horizon"], trial.params["decay_form"]): trial for trial in found.study.trials}
    for trial in result.study.trials:
        other = known[trial.params["horizon"], trial.params["decay_form"]]
        assert trial.value == other.value
        assert same(result.trial(trial).weights(), found.trial(other).weights())


def test_a_separate_run_in_its_own_store_has_the_loss_and_weights_of_the_wsd_sweep(
    found: hpstage.Result, tmp_path: Path
) -> None:
    for trial in found.study.trials[::3]:
        schedules = found.schedules(trial)
        alone = search(lambda _, schedules=schedules: schedules, tmp_path / f"{trial.number}", steps=25, n_trials=1)
        assert alone.savings.steps_trained == trial.params["horizon"]
        assert alone.best_value == trial.value
        assert same(alone.trial(0).weights(), found.trial(trial).weights())


# --- soups ------------------------------------------------------------------------------------------------


def test_a_soup_has_the_mean_weights_of_its_members_and_its_own_evaluated_metrics(
    found: hpstage.Result, tmp_path: Path
) -> None:
    members = [11, 3, 8]
    soup = found.soup(members)
    weights = [found.trial(number).weights() for number in members]
    for name, value in soup.weights().items():
        own = [each[name] for each in weights]
        if value.is_floating_point():
            assert torch.equal(value, torch.stack([one.double() for one in own]).mean(0).float())
        else:  # a counter: the first member's by its id
            assert torch.equal(value, found.trial(11).weights()[name])
    assert soup.members == (("wsd/11", 25), ("wsd/3", 10), ("wsd/8", 20))
    x, y = samples()
    model = soup.model.eval()
    with torch.no_grad():
        assert nn.functional.cross_entropy(model(x), y).item() == soup.metrics["loss"]
    assert same(found.soup([3, "wsd/8", found.study.trials[11]]).weights(), soup.weights())

    path = soup.save(tmp_path / "soups")
    assert sorted(file.name for file in Path(path).iterdir()) == ["manifest.json", "state.json", "state.safetensors"]
    kept = FolderCheckpoints(tmp_path / "soups", soup.workload).load(soup.key)
    assert digest(kept) == digest(soup.state)
    assert found.soup([8, 3, 11]).key == soup.key != found.soup([8, 3]).key

    soup.save_weights(tmp_path / "new" / "soup.safetensors")
    code = (
        "import json, sys; from safetensors import safe_open\n"
        "with safe_open(sys.argv[1], 'pt') as file: print(json.dumps([sorted(file.keys()), file.metadata()]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, tmp_path / "new" / "soup.safetensors"], capture_output=True, check=True, text=True
    )
    names, about = json.loads(done.stdout)
    assert names == sorted(soup.weights()) and about["loss"] == repr(soup.metrics["loss"])
    assert about["members"] == "wsd/11 after step 25, wsd/3 after step 10, wsd/8 after step 20"


def test_a_soup_of_one_trial_averages_its_checkpoints(found: hpstage.Result) -> None:
    steps = [step for step in found.trial(11).kept if step < 21][-3:]
    soup = found.soup((11, step) for step in steps)
    assert soup.members == tuple(("wsd/11", step) for step in steps)
    assert soup.metrics["loss"] > 0
    with pytest.raises(CheckpointMissing):
        found.soup([(11, 1), (11, 2)])


def test_making_a_soup_does_not_change_the_search_or_random_generators(found: hpstage.Result) -> None:
    before = torch.get_rng_state()
    kept = dict(found.plan.kept)
    first = found.soup([1, 2])
    second = found.soup([2, 1])
    assert first.metrics == second.metrics and first.model is not second.model
    assert torch.equal(torch.get_rng_state(), before) and found.plan.kept == kept
    assert same(found.trial(1).weights(), found.load(1).model.state_dict())


def test_a_soup_of_fewer_than_two_states_or_of_a_missing_part_is_refused(found: hpstage.Result) -> None:
    with pytest.raises(UsageError, match="at least two states; there is 1"):
        found.soup([1, 1])
    with pytest.raises(UsageError, match=r"has no tensors of 'self\.ema'"):
        found.soup([1, 2], part="self.ema")


def test_a_soup_of_weights_that_evaluation_may_not_use_causes_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Evaluated(Averaged):
        def evaluate(self, model: nn.Module) -> dict[str, float]:
            return super().evaluate(self.average.eval())

    result = search(sweep(horizons=[8, 10]), tmp_path, Evaluated())
    caplog.clear()
    result.soup([0, 2])
    assert "If evaluation uses other weights than 'model'" in caplog.text
    caplog.clear()
    assert result.soup([0, 2], part="self.average").metrics != result.trial(0).metrics[8]
    assert not caplog.records


def test_a_soup_of_a_function_can_be_evaluated_only_if_it_reports_before_its_loop(tmp_path: Path) -> None:
    result = search(sweep(horizons=[8, 10]), tmp_path / "plain", ordinary_loop)
    with pytest.raises(TrainingError, match="Report them before the loop, too"):
        result.soup([0, 2])
    result = search(sweep(horizons=[8, 10]), tmp_path / "before", reporting_before)
    soup = result.soup([0, 2])
    x, y = samples()
    with torch.no_grad():
        assert nn.functional.cross_entropy(soup.model.eval()(x), y).item() == soup.metrics["loss"]


def reporting_before(run: hpstage.Run) -> None:
    x, y = samples()
    model = network()
    optimizer = sgd(model.parameters(), run.hp)
    run.attach(model=model, optimizer=optimizer)

    def report() -> None:
        model.eval()
        with torch.no_grad():
            run.report(loss=nn.functional.cross_entropy(model(x), y).item())
        model.train()

    if run.wants_report:
        report()
    for _ in run.steps():
        indices = run.indices(len(x), run.hp["batch_size"])
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[indices]), y[indices]).backward()
        optimizer.step()
        if run.wants_report:
            report()
