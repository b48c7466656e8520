"""What a search has skipped of frozen layers is counted, and has one value wherever it is shown."""

from __future__ import annotations

import html
import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import optuna
import pytest
from torch import Tensor, nn
from typer.testing import CliRunner

import hpstage
from hpstage.accounting.savings import skipped_work
from hpstage.cli.app import app
from hpstage.cluster.dashboard.board import Board, Shown
from hpstage.cluster.dashboard.tiles import standing
from hpstage.report import open_book, write_report
from hpstage.store.opening import open_journal
from tests.bundled import Unmeasured
from tests.torch.backends.test_frozen_memory import Frozen

STEPS = 6  # batches, of which no two of a trial are equal; an epoch has four

COMPARED = 4  # first steps that may have been compared with eager ones, and so had been computed


class Mixed(Frozen):
    """What the frozen layers give for a sample depends on the others of its batch."""

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        inputs, labels = batch
        return super().loss(model, (inputs - inputs.mean(0), labels))


def search(store: Path, kind: type[Frozen] = Frozen, *, seeds: bool = False, slots: int = 2) -> hpstage.Result:
    """Search over a frozen backbone: two trials, on the same batches unless they have other seeds."""

    def space(trial: optuna.Trial) -> dict[str, Any]:
        number = trial.suggest_int("number", 1, 2)
        return {"lr": 0.01 * number, "seed": number if seeds else 0}

    subject = kind()
    subject.max_stacked = slots
    return hpstage.optimize(
        optuna.create_study(study_name="frozen", sampler=optuna.samplers.GridSampler({"number": [1, 2]}, seed=0)),
        *(subject, space),
        metric="loss",
        steps=STEPS,
        n_trials=2,
        executor=Unmeasured(),
        store=store,
    )


@pytest.mark.ci
@pytest.mark.parametrize("slots", [2, 1])
def test_a_frozen_layer_is_computed_once_for_each_batch_that_trials_share(slots: int, tmp_path: Path) -> None:
    saved = search(tmp_path, Mixed, slots=slots).savings
    assert saved.frozen_batches == saved.steps_trained == 2 * STEPS
    assert STEPS <= saved.frozen_skipped <= STEPS + COMPARED
    assert saved.frozen_seconds > 0


@pytest.mark.ci
def test_each_trial_computes_frozen_layers_if_trials_have_different_batches(tmp_path: Path) -> None:
    saved = search(tmp_path, Mixed, seeds=True).savings
    assert saved.frozen_batches == saved.steps_trained
    assert saved.frozen_skipped <= COMPARED


@pytest.mark.ci
def test_a_frozen_layer_is_computed_once_for_each_sample_if_it_does_not_mix_samples(tmp_path: Path) -> None:
    saved = search(tmp_path, seeds=True).savings
    assert saved.frozen_skipped >= 2 * STEPS - 2 * 4  # in its first epoch a trial may meet samples for the first time


@pytest.mark.ci
def test_all_outputs_show_the_same_savings_from_frozen_layers(tmp_path: Path) -> None:
    store = tmp_path / "store"
    saved = search(store).savings
    text = skipped_work(saved.frozen_batches, saved.frozen_skipped, saved.frozen_seconds)
    assert text.startswith(f"{saved.frozen_skipped} of {saved.frozen_batches} batches (")
    assert f"frozen layers skipped {text}" in " ".join(str(saved).split())
    shown = CliRunner().invoke(app, ["status", str(store)])
    assert text in " ".join(shown.output.split())
    plan = json.loads(CliRunner().invoke(app, ["status", str(store), "--json"]).output)["plan"]
    assert text in html.unescape(write_report(tmp_path / "report", store).read_text())
    figures = json.loads((tmp_path / "report" / "savings.json").read_text())
    book = open_book(store).savings
    for name in ("frozen_batches", "frozen_skipped", "frozen_seconds"):
        assert getattr(saved, name) == plan[name] == figures[name] == getattr(book, name)
    board = Board()
    with ExitStack() as closing:
        board.offer("plan", 0, open_journal(store, closing=closing, read_only=True).read(0))
    [view] = board.plans.values()
    assert f"frozen layers skipped: {text}" in standing(Shown("plan", view, view.studies["frozen"]))
