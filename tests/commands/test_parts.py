"""What the states of a search have in common is stored once, and copied and freed with them."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import pytest
from typer.testing import CliRunner

import hpstage
from hpstage import schedule as s
from hpstage.checkpoints import CheckpointStore
from hpstage.checkpoints.opening import open_checkpoints
from hpstage.cli.app import app
from hpstage.errors.text import size
from hpstage.plan.log import open_existing_plan
from hpstage.plan.plan import SearchPlan
from hpstage.store.opening import open_journal
from hpstage.testing.toys import Tape
from tests.invariants import validate

optuna.logging.set_verbosity(optuna.logging.ERROR)
FROZEN = np.arange(100_000.0)
RATES = [0.1, 0.2, 0.3]


class Tuned(Tape):
    """Has weights that training leaves as they are, and some that it changes."""

    version = "tuned"

    def setup(self, hp: Any) -> None:
        super().setup(hp)
        self.frozen, self.tuned = FROZEN.copy(), np.zeros(1_000)

    def train(self, step: int, hp: Any) -> None:
        super().train(step, hp)
        self.tuned += hp["rate"]

    def state_dict(self) -> Any:
        return {"tape": super().state_dict(), "frozen": self.frozen, "tuned": self.tuned}

    def load_state_dict(self, state: Any) -> None:
        super().load_state_dict(state["tape"])
        self.frozen, self.tuned = state["frozen"].copy(), state["tuned"].copy()


def search(store: Path, **options: Any) -> hpstage.Result:
    return hpstage.optimize(
        optuna.create_study(study_name="tuned", sampler=optuna.samplers.GridSampler({"rate": RATES})),
        Tuned(),
        lambda trial: {"rate": s.piecewise({0: 0.5, 2: trial.suggest_categorical("rate", RATES)})},
        metric="score",
        steps=6,
        store=store,
        checkpoint_every=1,
        executor=hpstage.InlineExecutor(),
        **options,
    )


def plan_of(store: Path) -> SearchPlan:
    with ExitStack() as closing:
        return open_existing_plan(open_journal(store, closing=closing, read_only=True))


def checkpoints(store: Path) -> CheckpointStore:
    return open_checkpoints(store / "checkpoints", plan_of(store).workload)


def command(*words: object) -> str:
    done = CliRunner().invoke(app, [*map(str, words)])
    assert done.exit_code == 0, done.output
    return done.output


@pytest.mark.ci
def test_states_of_a_search_store_equal_tensors_once(tmp_path: Path) -> None:
    result = search(tmp_path)
    plan = plan_of(tmp_path)
    validate(plan)
    assert len(plan.kept) == 2 + 3 * 4 and [count for _, count in plan.parts.values()] == [len(plan.kept)]
    usage = checkpoints(tmp_path).usage()
    assert plan.kept_bytes <= usage.bytes < 1.1 * FROZEN.nbytes + len(plan.kept) * 10_000
    assert usage.checkpoints == len(plan.kept)
    for trial in result.study.trials:
        state = result.load(trial.number).trainable.state_dict()
        assert np.array_equal(state["frozen"], FROZEN)
        assert np.allclose(state["tuned"], 2 * 0.5 + 4 * trial.params["rate"])


@pytest.mark.ci
def test_copied_states_store_equal_tensors_once(tmp_path: Path) -> None:
    search(tmp_path / "a")
    for copied in (14, 0):
        assert f"14 checkpoints ({copied} copied now)" in command("copy", tmp_path / "a", tmp_path / "b")
    there, own = checkpoints(tmp_path / "a"), checkpoints(tmp_path / "b")
    assert own.parts() == there.parts() and own.parts()
    assert own.usage() == there.usage()
    assert {key: own.manifest(key).digest for key in own.sizes()} == {
        key: there.manifest(key).digest for key in own.sizes()
    }


@pytest.mark.ci
def test_gc_and_status_show_the_same_size_of_checkpoints(tmp_path: Path) -> None:
    search(tmp_path)
    shown = size(plan_of(tmp_path).kept_bytes)
    [before] = [line for line in command("gc", tmp_path, "--dry-run").splitlines() if line.startswith("before")]
    assert before.endswith(f" {shown}") and f"({shown})" in command("status", tmp_path)


@pytest.mark.ci
def test_gc_removes_shared_tensors_that_no_checkpoint_uses(tmp_path: Path) -> None:
    search(tmp_path)
    place = checkpoints(tmp_path)
    command("gc", tmp_path, "--budget", "0")
    assert len(place.parts()) == 1, "the best state has it"
    plan = plan_of(tmp_path)
    assert plan.kept_bytes <= place.usage().bytes < 1.1 * FROZEN.nbytes + len(plan.kept) * 10_000
    orphan = place.save("part-" + "0" * 32, {"x": np.zeros(3)}, step=0, parent=None)  # type: ignore[arg-type]
    command("gc", tmp_path)
    assert orphan.key not in place.parts() and len(place.parts()) == 1
    for key in place.sizes():
        place.delete(key)
    command("gc", tmp_path, "--dry-run")
    assert place.parts()


@pytest.mark.ci
def test_gc_keeps_shared_tensors_that_a_checkpoint_uses_even_if_no_record_names_them(tmp_path: Path) -> None:
    """Such as in a copy that was made in another way."""
    search(tmp_path)
    place = checkpoints(tmp_path)
    (part,) = place.parts()
    (tmp_path / "plan.sqlite").rename(tmp_path / "other.sqlite")
    search(tmp_path)
    assert place.parts().keys() == {part}
    command("gc", tmp_path)
    assert place.parts().keys() == {part}


@pytest.mark.ci
def test_states_with_damaged_shared_tensors_are_trained_again_to_the_same_weights(tmp_path: Path) -> None:
    search(tmp_path)
    (file,) = tmp_path.glob("checkpoints/pa/part-*/state.safetensors")
    content = bytearray(file.read_bytes())
    content[-5] ^= 1
    file.write_bytes(content)
    second = hpstage.optimize(
        optuna.create_study(study_name="more", sampler=optuna.samplers.GridSampler({"rate": RATES})),
        Tuned(),
        lambda trial: {"rate": s.piecewise({0: 0.5, 2: trial.suggest_categorical("rate", RATES), 6: 0.9})},
        metric="score",
        steps=8,
        store=tmp_path,
        checkpoint_every=1,
        executor=hpstage.InlineExecutor(),
    )
    assert all(trial.state.name == "COMPLETE" for trial in second.study.trials)
    for trial in second.study.trials:
        state = second.load(trial.number).trainable.state_dict()
        assert np.array_equal(state["frozen"], FROZEN)
        assert np.allclose(state["tuned"], 2 * 0.5 + 4 * trial.params["rate"] + 2 * 0.9)


@pytest.mark.parametrize("budget", ["1 MB", pytest.param("2 MB", marks=pytest.mark.ci)])
def test_a_checkpoint_budget_counts_shared_tensors_once(tmp_path: Path, budget: str) -> None:
    search(tmp_path, checkpoint_budget=budget)
    plan = plan_of(tmp_path)
    assert len(plan.kept) == 14 and plan.kept_bytes < 1_000_000
