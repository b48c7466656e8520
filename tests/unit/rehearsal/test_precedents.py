"""Rehearsals on a plan that was trained before: what it has measured is not drawn at random."""

from __future__ import annotations

import optuna
import pytest
from typer.testing import CliRunner

import hpstage
from hpstage.algos import ASHA, MedianStopping, SuccessiveHalving
from hpstage.cli.app import app
from hpstage.errors import UsageError
from hpstage.execution.simulated import SimulatedExecutor
from hpstage.plan.log import open_existing_plan
from hpstage.plan.messages import BoundaryReached
from hpstage.rehearsal.stand_in_metrics import Precedent
from hpstage.store import MemoryJournal
from hpstage.testing.toys import Tape
from tests.unit.rehearsal.drops import STEPS, random, space

pytestmark = pytest.mark.sampled(4)

SYNCHRONOUS = [SuccessiveHalving(15, 4, tree_aware=False), SuccessiveHalving(15, 2), MedianStopping(interval=20)]


def searched(algorithm, *, store=None, n_trials=48, seed=3, direction="maximize", workers=2):
    return hpstage.optimize(
        optuna.create_study(sampler=random(seed), direction=direction),
        Tape(),
        space,
        metric="value",
        steps=STEPS,
        n_trials=n_trials,
        algorithm=algorithm,
        executor=SimulatedExecutor(workers),
        store=MemoryJournal() if store is None else store,
    )


def said_of(algorithm, precedent, *, n_trials=48, seed=3, rehearsals=5):
    return hpstage.preflight(
        space,
        steps=STEPS,
        n_trials=n_trials,
        sampler=random(seed),
        algorithm=algorithm,
        workers=(1, 2),
        rehearsals=rehearsals,
        precedent=precedent,
    )


@pytest.mark.ci
@pytest.mark.parametrize("direction", ["maximize", "minimize"])
@pytest.mark.parametrize("algorithm", SYNCHRONOUS, ids=repr)
def test_a_rehearsal_with_the_plan_of_a_finished_search_predicts_that_search_exactly(algorithm, direction):
    result = searched(algorithm, direction=direction)
    said = said_of(algorithm, Precedent(result.plan, "value", maximize=direction == "maximize"))
    assert said.drawn.high == 0
    for figure, true in (
        (said.steps_asked, result.savings.steps_asked),
        (said.steps_unique, result.savings.steps_unique),
        (said.merge_rate, result.savings.merge_rate),
    ):
        assert (figure.low, figure.high) == (true, true)
    assert "All of them were measured before" in str(said)


def test_a_rehearsal_with_measured_metrics_predicts_the_steps_of_another_algorithm():
    """Here everything that the other requests was measured."""
    wide = searched(MedianStopping(interval=15, grace=15, min_trials=1000))  # never stops one
    narrow = searched(SuccessiveHalving(15, 4, tree_aware=False))
    said = said_of(SuccessiveHalving(15, 4, tree_aware=False), Precedent(wide.plan, "value", maximize=True))
    assert said.drawn.high == 0
    assert said.steps_unique.median == narrow.savings.steps_unique


def test_a_rehearsal_draws_metrics_that_the_plan_has_not_measured():
    result = searched(SuccessiveHalving(15, 4, tree_aware=False), n_trials=10)
    said = said_of(SuccessiveHalving(15, 4, tree_aware=False), Precedent(result.plan, "value", maximize=True))
    assert said.measured.low > 0
    assert said.drawn.high > 0
    assert "which are not known yet, except" in str(said)


def test_a_rehearsal_with_an_unknown_metric_is_refused_with_the_known_names():
    result = searched(ASHA(15, 4), n_trials=4)
    with pytest.raises(UsageError, match=r"metric is 'acuracy'.*give one of: 'value'"):
        Precedent(result.plan, "acuracy", maximize=True)


def test_the_plan_command_rehearses_with_metrics_measured_in_the_store(tmp_path):
    algorithm = SuccessiveHalving(15, 4, tree_aware=False)
    result = searched(algorithm, store=tmp_path / "store", seed=0)
    words = ["plan", "tests.unit.rehearsal.test_preflight:space", "--steps", STEPS, "--n-trials", 48, "--gpus", 2]
    words += ["--algorithm", repr(algorithm), "--store", tmp_path / "store"]
    found = CliRunner().invoke(app, [*map(str, words)])
    assert found.exit_code == 0, found.output
    assert f"unique steps      {result.savings.steps_unique}\n" in found.output
    refused = CliRunner().invoke(app, [*map(str, words), "--metric", "loss"])
    assert isinstance(refused.exception, UsageError)
    alone = CliRunner().invoke(app, [*map(str, words[:-2]), "--metric", "value"])
    assert isinstance(alone.exception, UsageError)


def test_the_plan_command_uses_random_metrics_if_the_store_has_no_evaluations(tmp_path):
    class Interrupted(SimulatedExecutor):
        boundaries = 0

        def wait(self, timeout):
            reports = super().wait(timeout)
            self.boundaries += sum(isinstance(report, BoundaryReached) for report in reports)
            if self.boundaries > 1:
                raise KeyboardInterrupt
            return reports

    with pytest.raises(KeyboardInterrupt):
        hpstage.optimize(
            optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0), direction="maximize"),
            object(),
            space,
            metric="value",
            steps=STEPS,
            n_trials=4,
            executor=Interrupted(1, step_seconds=3.0),
            store=tmp_path / "store",
            checkpoint_every=5,
        )
    words = ["plan", "tests.unit.rehearsal.test_preflight:space", "--steps", STEPS, "--n-trials", 4, "--gpus", 1]
    words += ["--store", tmp_path / "store", "--algorithm", "SuccessiveHalving(15, 4)"]
    found = CliRunner().invoke(app, [*map(str, words)])
    assert found.exit_code == 0, found.exception
    assert "rehearsals with random metrics" in found.output


def test_measured_metrics_are_found_under_the_keys_of_another_workload():
    """The precedent's states under the keys of a plan of another workload are that plan's own."""
    journal = MemoryJournal()
    result = searched(SuccessiveHalving(15, 4), store=journal, n_trials=12)
    plan = open_existing_plan(journal)
    again = Precedent(plan, "value", maximize=True).values(plan.workload)
    true = {
        plan.key(node, step): state.metrics["value"]
        for node in plan.nodes
        for step, state in node.states.items()
        if state.metrics is not None
    }
    assert again == true
    other = Precedent(result.plan, "value", maximize=True).values("0" * 32)
    assert not other.keys() & true.keys()
    assert sorted(other.values()) == sorted(true.values())
