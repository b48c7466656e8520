"""An edit of what training reaches gives another key or is refused; an edit of anything else does not."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from tests.torch.edits.cases import DECIDES, HEAD, LIMITS, SAME, filled

pytestmark = pytest.mark.sampled(16)

ROOT = Path(__file__).parents[2]
NAMES = {name: f"case_{number:03d}" for number, name in enumerate([*DECIDES, *SAME])}


@functools.cache
def keys() -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """The keys of all cases with 1 in the gap; again, in another folder and under another hash seed; and with 2."""
    with tempfile.TemporaryDirectory() as folder:
        running = []
        for number, value in enumerate((1, 1, 2)):
            place = Path(folder, f"checkout{number}")
            place.mkdir()
            for name, text in (DECIDES | SAME).items():
                (place / f"{NAMES[name]}.py").write_text(HEAD + filled(text, value))
            environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONHASHSEED": str(number)}
            words = [sys.executable, "-m", "tests.torch.edits.process", str(place)]
            running.append(subprocess.Popen(words, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True))
        one, again, two = (json.loads(process.communicate()[0]) for process in running)
    return one, again, two


def refused(key: object) -> bool:
    return isinstance(key, str) and key.startswith(("UsageError", "StateError"))


@pytest.mark.parametrize("name", [*DECIDES, *SAME])
@pytest.mark.ci
def test_the_key_is_equal_in_every_process_and_folder(name: str) -> None:
    one, again, _ = keys()
    assert one[NAMES[name]] == again[NAMES[name]]
    assert refused(one[NAMES[name]]) or not isinstance(one[NAMES[name]], str)


@pytest.mark.parametrize("name", [name for name in DECIDES if name not in LIMITS])
def test_an_edit_that_decides_training_gives_another_key_or_is_refused(name: str) -> None:
    one, _, two = keys()
    assert one[NAMES[name]] != two[NAMES[name]] or refused(one[NAMES[name]])


@pytest.mark.parametrize("name", SAME)
def test_an_edit_that_does_not_decide_training_keeps_the_key(name: str) -> None:
    one, _, two = keys()
    assert not isinstance(one[NAMES[name]], str), one[NAMES[name]]
    assert one[NAMES[name]] == two[NAMES[name]]


def test_the_limits_are_few_and_still_limits() -> None:
    one, _, two = keys()
    assert len(LIMITS) <= 6
    assert [name for name in LIMITS if one[NAMES[name]] != two[NAMES[name]]] == []
