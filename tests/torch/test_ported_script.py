"""An ordinary script on a stage tree: few lines change, and shared trials are those trained alone."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any

import optuna
import pytest

import hpstage
from hpstage.store import MemoryJournal
from hpstage.training.trainables import as_trainable
from tests.torch.ordinary_script import main
from tests.torch.ported_script import space, train

optuna.logging.set_verbosity(optuna.logging.ERROR)
FOLDER = Path(__file__).parent


def within(name: str) -> list[str]:
    """The function that trains, line by line."""
    text = (FOLDER / name).read_text()
    lines = text[text.index("    train_loader =") :].splitlines()
    return lines[: lines.index("")]


def test_few_lines_of_an_ordinary_script_change() -> None:
    lines = difflib.ndiff(within("ordinary_script.py"), within("ported_script.py"))
    assert sum(line.startswith("+ ") for line in lines) <= 6


def test_the_ordinary_script_runs(capsys: pytest.CaptureFixture[str]) -> None:
    main()
    assert capsys.readouterr().out.count("\n") == 4


def test_its_shared_trials_are_those_trained_alone() -> None:
    result = hpstage.optimize(
        optuna.create_study(direction="maximize", sampler=optuna.samplers.GridSampler({"drop": [1, 2, 3]}, seed=0)),
        train,
        space,
        metric="accuracy",
        steps=4,
        n_trials=3,
        executor=hpstage.InlineExecutor(),
        store=MemoryJournal(),
    )
    assert result.savings.steps_unique < result.savings.steps_asked
    for trial in result.study.trials:
        alone: Any = as_trainable(train)
        line = {name: schedule.until(4) for name, schedule in result.schedules(trial.number).items()}
        alone.setup({name: schedule.value(0) for name, schedule in line.items()})
        for step in range(4):
            alone.train(step, {name: schedule.value(step) for name, schedule in line.items()})
        assert trial.value == dict(alone.evaluate())["accuracy"]
        alone.close()
