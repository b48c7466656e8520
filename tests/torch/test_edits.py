"""An edit of what training reaches gives another key or is refused; an edit of anything else does not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.torch.edits.cases import DECIDES, LIMITS, PRELUDE, SAME, filled

pytestmark = pytest.mark.ci

ROOT = Path(__file__).parents[2]
NAMES = {name: f"case_{number:03d}" for number, name in enumerate([*DECIDES, *SAME])}


Keys = tuple[dict[str, Any], dict[str, Any], dict[str, Any]]


@pytest.fixture(scope="module")
def keys(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Keys:
    """The keys of all cases that are tested with 1 in the gap; again, in another folder and under another hash seed;
    and with 2."""
    items = [
        item for item in request.session.items if isinstance(item, pytest.Function) and item.module is request.module
    ]
    tested = {*LIMITS, *(item.callspec.params["name"] for item in items if hasattr(item, "callspec"))}
    running = []
    for number, value in enumerate((1, 1, 2)):
        place = tmp_path_factory.mktemp(f"checkout{number}")
        for name in tested:
            (place / NAMES[name]).mkdir()
            (place / NAMES[name] / "edited.py").write_text(PRELUDE + filled((DECIDES | SAME)[name], value))
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONHASHSEED": str(number)}
        words = [sys.executable, "-m", "tests.torch.edits.process", str(place)]
        running.append(subprocess.Popen(words, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True))
    one, again, two = (json.loads(process.communicate()[0]) for process in running)
    return one, again, two


def refused(key: object) -> bool:
    return isinstance(key, str) and key.startswith(("UsageError", "StateError"))


@pytest.mark.parametrize("name", [*DECIDES, *SAME])
@pytest.mark.ci
def test_the_key_is_equal_in_every_process_and_folder(keys: Keys, name: str) -> None:
    one, again, _ = keys
    assert one[NAMES[name]] == again[NAMES[name]]
    assert refused(one[NAMES[name]]) or not isinstance(one[NAMES[name]], str)


@pytest.mark.parametrize("name", [name for name in DECIDES if name not in LIMITS])
def test_an_edit_that_affects_training_changes_the_key_or_is_refused(keys: Keys, name: str) -> None:
    one, _, two = keys
    assert one[NAMES[name]] != two[NAMES[name]] or refused(one[NAMES[name]])


@pytest.mark.parametrize("name", SAME)
def test_an_edit_that_does_not_affect_training_keeps_the_key(keys: Keys, name: str) -> None:
    one, _, two = keys
    assert not isinstance(one[NAMES[name]], str), one[NAMES[name]]
    assert one[NAMES[name]] == two[NAMES[name]]


def test_at_most_two_edits_are_known_to_be_undetected(keys: Keys) -> None:
    one, _, two = keys
    assert len(LIMITS) <= 2
    assert [name for name in LIMITS if one[NAMES[name]] != two[NAMES[name]]] == []
