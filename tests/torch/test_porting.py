"""The ordinary script of the book, ported by function and by class: few lines, equal to training alone, bit for bit."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import hpstage

pytestmark = pytest.mark.sampled(4)

FOLDER = Path(hpstage.__file__).parent.parent / "notebooks" / "porting"
PORTS = ["function", "trainable"]


@pytest.fixture(autouse=True)
def _in_the_folder_of_the_book(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER.parent))


def changed(port: str) -> list[str]:
    """Code for training that the ported script has and the script has not, wherever they stand there. Imports and
    the search are no part of it."""
    lines = [re.sub(r"\s*# (changed|new)$", "", line) for line in (FOLDER / f"{port}.py").read_text().splitlines()]
    code = lines[lines.index("digits = load_digits()") : lines.index('if __name__ == "__main__":')]
    if "def space(trial):" in code:
        code = code[: code.index("def space(trial):")]
    before = {_expression(line) for line in (FOLDER / "script.py").read_text().splitlines()}
    return [line for line in code if line.strip() and _expression(line) not in before]


def _expression(line: str) -> str:
    """A line without its indentation, and without the name that it gives its value or the return of it."""
    return re.sub(r"^(return |\w+ = )", "", line.strip())


@pytest.mark.parametrize("port", PORTS)
def test_a_ported_script_changes_at_most_ten_lines(port: str) -> None:
    assert len(changed(port)) <= 10, changed(port)


@pytest.mark.parametrize("port", PORTS)
def test_a_ported_script_has_the_same_values_and_models_with_and_without_sharing(port: str, tmp_path: Path) -> None:
    from porting import function, trainable  # type: ignore[import-not-found]

    subject = function.main if port == "function" else trainable.Digits()
    shared, alone = (
        function.search(subject, executor=hpstage.InlineExecutor(), store=tmp_path / str(sharing), sharing=sharing)
        for sharing in (True, False)
    )
    assert [trial.value for trial in shared.study.trials] == [trial.value for trial in alone.study.trials]
    assert shared.savings.steps_trained == 15 and alone.savings.steps_trained == 24
    assert min(trial.value for trial in shared.study.trials) > 0.8
    for trial in shared.study.trials:
        model = shared.load(trial).model
        assert function.accuracy(model) == trial.value
        other = alone.load(trial).model
        assert all((a == b).all() for a, b in zip(model.parameters(), other.parameters(), strict=True))
