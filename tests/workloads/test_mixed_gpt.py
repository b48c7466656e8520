"""The GPT on two texts that ship with Python: each source is learnt by its weight, and micro-anneals are exact."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import optuna
import pytest

import hpstage
from hpstage.workloads.mixed_gpt import MixedGPT, space

HP: dict[str, Any] = {"lr": 0.01, "seed": 0, "mixture.prose": 0.8, "mixture.code": 0.2}


def small() -> MixedGPT:
    return MixedGPT(layers=2, heads=2, width=16, block=32)


@pytest.mark.ci
def test_a_microanneal_of_the_gpt_is_exact_and_lowers_the_loss_on_its_data_source(tmp_path: Path) -> None:
    here: dict[str, Any] = {"executor": hpstage.InlineExecutor()}
    trunk = hpstage.train(small(), HP, steps=20, store=tmp_path / "store", **here)
    mixtures = {"prose": {"prose": 1}, "code": {"code": 1}}
    found = trunk.microanneal(mixtures, control="prose", at=20, steps=10, seeds=2, **here)
    assert hpstage.open(tmp_path / "store").plan.totals.steps_trained == 20 + 4 * 10
    one = found.trials["code"][1]
    alone = hpstage.train(small(), one.schedules, steps=30, store=tmp_path / "alone", **here)
    assert alone.metrics[30] == one.metrics[30]
    code = {each.metric: each.difference for each in found.differences() if each.mixture == "code"}
    assert code["loss_code"] < 0 < code["loss_prose"]


def test_the_mixed_gpt_space_changes_the_data_mixture_where_the_lr_decay_begins() -> None:
    found: Any = space(optuna.trial.FixedTrial({"code": 0.6}), 100)
    assert [found["mixture.code"].value(step) for step in (79, 80)] == [0.2, 0.6]
    assert found["lr"].value(79) > found["lr"].value(81)
