"""``audit="winner"``: before a search returns, its best trial is trained again alone, and compared."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import optuna
import pytest

import hpstage
from hpstage.errors import StateError
from hpstage.plan.facts import Audited, StateDiffers
from tests.torch.test_retraining import Leaking, space
from tests.torch.trainables import Small, ordinary_loop

pytestmark = pytest.mark.ci


def searched(trainable: object, store: Path, study: optuna.Study, **options: Any) -> hpstage.Result:
    return hpstage.optimize(
        study,
        trainable,
        space,
        metric="loss",
        steps=8,
        n_trials=2,
        executor=hpstage.InlineExecutor(),
        store=store,
        audit="winner",
        **options,
    )


def grid() -> optuna.Study:
    return optuna.create_study(sampler=optuna.samplers.GridSampler({"drop": [3, 5]}, seed=0), study_name="small")


class Remembering(Small):
    """What training changes on the object, on its class and in its module is part of what is sent to a process."""

    losses_seen = 0

    def __init__(self) -> None:
        super().__init__()
        self.history: list[float] = []

    def loss(self, model: Any, batch: Any) -> Any:
        loss = super().loss(model, batch)
        self.history.append(1.0)
        type(self).losses_seen += 1
        SEEN.append(1)
        return loss * (len(self.history) + self.losses_seen + len(SEEN))


SEEN: list[int] = []


@pytest.mark.parametrize("trainable", [Small(), ordinary_loop, Remembering()])
def test_the_audit_of_a_reproduced_best_trial_is_recorded(
    trainable: object, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "hpstage")
    result = searched(trainable, tmp_path, grid())
    (audited,) = [fact for fact in result.journal if isinstance(fact, Audited)]
    assert (audited.of, audited.outcome, audited.start, audited.step) == ("winner", "equal", 0, 8)
    assert audited.compared >= 1
    assert f"trial small/{result.best_trial.number} was trained again alone" in caplog.text


class Clean(Leaking):
    """In another process, what was left behind is gone."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        os.environ["HPSTAGE_TEST_LEAK"] = ""
        self.__dict__.update(state)


def test_a_best_trial_that_is_not_reproduced_raises_an_error_after_the_study_is_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HPSTAGE_TEST_LEAK", "x" * 3)  # what training has begun with here
    study = grid()

    with pytest.raises(StateError, match=r"trained again alone, from scratch.*weight is .* and was ") as raised:
        searched(Clean(), tmp_path, study, verify="off")
    assert "The result is safe" in str(raised.value)
    assert [trial.state.name for trial in study.trials] == ["COMPLETE", "COMPLETE"]
    (differs,) = hpstage.open(tmp_path).plan.differences
    assert isinstance(differs, StateDiffers)
    with pytest.raises(StateError):
        searched(Clean(), tmp_path, study, extend=True)


class Gone(Small):
    """In another process, its data are gone."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        os.environ["HPSTAGE_TEST_GONE"] = "1"
        self.__dict__.update(state)

    def loss(self, model: Any, batch: Any) -> Any:
        if os.environ.get("HPSTAGE_TEST_GONE"):
            raise FileNotFoundError("the data are gone")
        return super().loss(model, batch)


def test_a_best_trial_that_cannot_be_retrained_causes_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    result = searched(Gone(), tmp_path, grid())
    (audited,) = [fact for fact in result.journal if isinstance(fact, Audited)]
    assert audited.outcome == "failed"
    assert "could not be trained again alone" in caplog.text
