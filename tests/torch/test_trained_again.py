"""A state that was kept and is trained again must be the same: else it is said what differs, and remembered."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import optuna
import pytest
import torch
from torch import nn

import hpstage
from hpstage.checkpoints import FolderCheckpoints, open_checkpoints
from hpstage.checkpoints.state_tree import differing, marks_of, summary
from hpstage.errors import StateError
from hpstage.plan.facts import StateDiffers, StateKey, StateLost
from hpstage.plan.log import open_existing_plan, read_facts
from hpstage.store import MemoryJournal
from tests.torch.trainables import Small

pytestmark = pytest.mark.forks


class Outside(Small):
    """Training depends on something outside the process, which is declared not to matter."""

    stateless = ("HPSTAGE_TEST_SCALE",)

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        return super().loss(model, batch) * float(os.environ["HPSTAGE_TEST_SCALE"])


def search(trainable: object, journal: MemoryJournal, checkpoints: Path, steps: int) -> None:
    hpstage.optimize(
        optuna.create_study(),
        trainable,
        lambda trial: {"lr": 0.1, "momentum": 0.9, "batch_size": 8, "seed": 3},
        metric="loss",
        steps=steps,
        n_trials=1,
        executor=hpstage.InlineExecutor(),
        store=journal,
        checkpoints=str(checkpoints),
        checkpoint_every=2,
        verify="off",
    )


@pytest.mark.parametrize("lost", [True, False], ids=["lost and trained again", "kept by another that was faster"])
@pytest.mark.ci
def test_a_state_that_differs_when_trained_again_is_an_error_that_names_the_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lost: bool
) -> None:
    journal = MemoryJournal()
    monkeypatch.setenv("HPSTAGE_TEST_SCALE", "1.0")
    search(Outside(), journal, tmp_path, 4)
    plan = open_existing_plan(journal)
    checkpoints = open_checkpoints(tmp_path, plan.workload)
    if lost:
        for key in list(plan.kept):
            checkpoints.delete(key)
    else:
        import msgspec

        facts = [StateLost(s.node.id, s.step, "unreadable", "by mistake") for s in plan.kept.values()]
        journal.append([msgspec.json.encode(fact) for fact in facts])
    monkeypatch.setenv("HPSTAGE_TEST_SCALE", "2.0")
    with pytest.raises(StateError, match=r"state after step 2 .* first difference is in model\.") as error:
        search(Outside(), journal, tmp_path, 6)
    assert "from step 0 on worker inline, from the beginning of training" in str(error.value)
    (fact,) = [fact for fact in read_facts(journal) if isinstance(fact, StateDiffers)]
    assert fact.where is not None
    assert fact.where.startswith("model.")
    page = hpstage.report.write_report(tmp_path / "report", journal)
    assert "Training that was not exact" in page.read_text()
    assert fact.where in page.read_text()


def test_a_lost_state_that_is_equal_when_trained_again_is_not_reported(tmp_path: Path) -> None:
    journal = MemoryJournal()
    search(Small(), journal, tmp_path, 4)
    plan = open_existing_plan(journal)
    checkpoints = open_checkpoints(tmp_path, plan.workload)
    for key in list(plan.kept):
        checkpoints.delete(key)
    search(Small(), journal, tmp_path, 6)
    assert not any(isinstance(fact, StateDiffers) for fact in read_facts(journal))


def test_marks_of_a_state_name_the_tensor_that_differs_or_a_few_that_include_it() -> None:
    few = {f"leaf{index}": torch.tensor(float(index)) for index in range(5)}
    many = {f"leaf{index:03d}": torch.tensor(float(index)) for index in range(200)}
    for state, changed, named in ((few, "leaf3", "leaf3"), (many, "leaf121", "one of leaf120 to leaf123")):
        _, one = summary(state)
        _, other = summary({**state, changed: torch.tensor(-1.0)})
        assert differing(one, other, list(state)) == named
        assert differing(one, one, list(state)) is None
        assert len(one) <= 256
    assert marks_of([]) == ""


def test_saving_an_existing_key_again_returns_the_digest_of_the_given_state(tmp_path: Path) -> None:
    store = FolderCheckpoints(str(tmp_path), "workload")
    first = store.save(StateKey("ab" * 16), {"x": torch.zeros(2)}, step=1, parent=None)
    second = store.save(StateKey("ab" * 16), {"x": torch.ones(2)}, step=1, parent=None)
    assert first.digest != second.digest
    assert store.manifest(StateKey("ab" * 16)).digest == first.digest
