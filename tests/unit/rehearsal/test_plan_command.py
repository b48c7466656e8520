"""``hpstage plan``: the command says what the function says, and names what it cannot use."""

from __future__ import annotations

import json

import optuna
import pytest
from typer.testing import CliRunner

import hpstage
from hpstage.algos import Hyperband, SuccessiveHalving
from hpstage.cli.app import app
from hpstage.cli.naming import algorithm_named, named
from hpstage.errors import StoreError, UsageError
from hpstage.execution.simulated import SimulatedExecutor
from hpstage.execution.simulated_cluster import Disruptions
from hpstage.testing.toys import Tape
from tests.unit.rehearsal.drops import random

pytestmark = pytest.mark.sampled(8)

SCRIPT = """
from hpstage import schedule as s
from hpstage.testing.toys import Tape

def space(trial):
    drop = trial.suggest_categorical("drop", [10, 20])
    return {"lr": s.multistep(trial.suggest_categorical("lr", [0.1, 0.2]), milestones=[drop]), "momentum": 0.9}

steps = 7
"""


@pytest.fixture
def script(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    path = tmp_path / f"search_{tmp_path.name}.py"
    path.write_text(SCRIPT)
    return path


def command(*words):
    return CliRunner().invoke(app, ["plan", *map(str, words)])


@pytest.mark.ci
def test_the_plan_command_prints_what_preflight_returns(script, tmp_path):
    found = command(
        f"{script}:space", "--steps", 40, "--n-trials", 12, "--algorithm", "SuccessiveHalving(10, 2)", "--gpus", "1,2",
        "--step-seconds", 0.5, "--checkpoint-bytes", "200 kB",
        "--deadline", "2min", "--gpu-price", 2.5, "--json", tmp_path / "figures.json",
        "--lifetime", "5min", "--notice", "10s", "--slow", 0.1, "--start-seconds", 20,
    )  # fmt: skip
    assert found.exit_code == 0, found.output
    said = hpstage.preflight(
        named(f"{script}:space", "the space"),
        steps=40,
        n_trials=12,
        algorithm=SuccessiveHalving(10, 2),
        workers=(1, 2),
        step_seconds=0.5,
        checkpoint_bytes=200_000,
        deadline=120.0,
        gpu_price=2.5,
        start_seconds=20.0,
        disruptions=Disruptions(slow=0.1, lifetime_seconds=300.0, notice_seconds=10.0, replace_seconds=20.0),
    )
    assert found.output.rstrip("\n") == str(said)
    assert json.loads((tmp_path / "figures.json").read_text()) == json.loads(json.dumps(said.as_dict()))


def test_the_plan_command_takes_step_seconds_from_a_store(script, tmp_path):
    study = optuna.create_study(sampler=random())
    executor = SimulatedExecutor(2, step_seconds=3.0, state_bytes=1_000_000)
    hpstage.optimize(
        study,
        Tape(),
        named(f"{script}:space", "the space"),
        metric="value",
        steps=40,
        n_trials=4,
        executor=executor,
        store=tmp_path / "store",
    )
    found = command(f"{script}:space", "--steps", 40, "--n-trials", 1, "--gpus", 1, "--store", tmp_path / "store")
    assert found.exit_code == 0, found.output
    assert "2.0 min" in found.output and "2.0 MB" in found.output  # 40 steps of 3 s


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--seed", -1], "seed is -1; give a whole number from 0"),
        (["--seed", 2**32], "seed is 4294967296; give a whole number from 0"),
        (["--json", "no/such/folder/figures.json"], "cannot write to --json no/such/folder/figures.json: No such"),
    ],
)
def test_the_plan_command_names_an_argument_that_it_cannot_use(script, words, complaint):
    found = command(f"{script}:space", "--steps", 40, "--n-trials", 4, *words)
    assert isinstance(found.exception, UsageError) and str(found.exception).startswith(complaint)


def test_the_plan_command_takes_step_seconds_from_a_trainable(script):
    found = command(f"{script}:space", "--steps", 40, "--n-trials", 4, "--trainable", f"{script}:Tape")
    assert found.exit_code == 0, found.output
    assert "GPU-hours" in found.output


def test_code_in_the_algorithm_option_is_refused_and_not_executed(tmp_path):
    trap = tmp_path / "trap"
    for text in (
        f"__import__('pathlib').Path({str(trap)!r}).touch()",
        f"SuccessiveHalving(open({str(trap)!r}, 'w'))",
        f"SuccessiveHalving(min_steps=open({str(trap)!r}, 'w'))",
        "algos.SuccessiveHalving(1)",
        "Bracket(1)",
        "SuccessiveHalving(1",
        "SuccessiveHalving(1, surplus=2)",
        "Halving",
        "**{}",
        "SuccessiveHalving(*[1, 2])",
        "SuccessiveHalving(**{'min_steps': 2})",
        "",
    ):
        with pytest.raises(UsageError, match="--algorithm"):
            algorithm_named(text)
    assert not trap.exists()


def test_the_algorithm_option_is_parsed_with_its_arguments():
    assert algorithm_named("SuccessiveHalving(15, reduction_factor=2, tree_aware=False)") == SuccessiveHalving(
        15, 2, tree_aware=False
    )
    assert algorithm_named(" Hyperband ") == Hyperband()


@pytest.mark.parametrize(
    ("words", "kind"),
    [
        (["{script}:nothing"], UsageError),
        (["{script}"], UsageError),
        (["{script}:steps"], UsageError),
        (["no_such_module_here:space"], UsageError),
        (["no/such/script.py:space"], UsageError),
        (["{script}:space", "--sampler", "best"], UsageError),
        (["{script}:space", "--gpus", "many"], UsageError),
        (["{script}:space", "--gpus", "0"], UsageError),
        (["{script}:space", "--gpus", "1000000"], UsageError),
        (["{script}:space", "--step-seconds", "0"], UsageError),
        (["{script}:space", "--save-seconds", "1"], UsageError),
        (["{script}:space", "--checkpoint-bytes", "big"], UsageError),
        (["{script}:space", "--algorithm", "SuccessiveHalving(50)"], UsageError),
        (["{script}:space", "--store", "here", "--trainable", "{script}:Tape"], UsageError),
        (["{script}:space", "--store", "no/plan/here"], StoreError),
    ],
)
def test_invalid_arguments_of_the_plan_command_are_refused(script, words, kind):
    found = command(*(word.format(script=script) for word in words), "--steps", 40, "--n-trials", 2)
    assert isinstance(found.exception, kind), found.output


def test_a_deadline_that_is_not_a_time_is_refused(script):
    found = command(f"{script}:space", "--steps", 40, "--n-trials", 2, "--step-seconds", 1, "--deadline", "soon")
    assert isinstance(found.exception, UsageError)
    assert "--deadline 'soon': give a time, such as 45min, 8h or 2d" in str(found.exception)
