"""Arguments are read by kinds: what means nothing is an error that names it, before anything is trained."""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy
import pytest

import hpstage
from hpstage.errors import ScheduleError, UsageError
from hpstage.errors.arguments import checked, number, one_of, optional, seconds, several, text, whole

ROOT = Path(__file__).parents[2]


@checked(count=whole(), share=optional(number(least=0, most=1)), names=several(text("names"), "names", least=1))
def read(count: int, share: float | None = None, *, names: Any = "a") -> tuple[Any, ...]:
    """Return what was read."""
    return count, share, names


def test_checked_functions_convert_given_arguments_and_keep_defaults() -> None:
    assert read(numpy.int64(3)) == (3, None, "a")
    assert type(read(numpy.int64(3))[0]) is int
    assert read(1, share=numpy.float32(0.5), names=["a", "b"]) == (1, 0.5, ("a", "b"))
    assert read.__doc__ == "Return what was read."


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"count": 0}, "count is 0; give a whole number of at least 1"),
        ({"count": True}, "count is True; give a whole number"),
        ({"count": 2.0}, "count is 2.0; give a whole number"),
        ({"count": numpy.bool_(True)}, f"count is {numpy.bool_(True)!r}; give a whole number"),
        ({"count": 10**30}, "give a whole number of at most 9,007,199,254,740,991"),
        ({"count": -(10**5000)}, "count is <int>; give a whole number"),  # Python writes no number of so many digits
        ({"share": math.nan}, "share is nan; give a number that is at least 0"),
        ({"share": 1.5}, "share is 1.5; give a number that is at most 1"),
        ({"share": 10**5000}, "share is <int>; give a number"),
        ({"names": []}, "names is []; give names"),
        ({"names": ["\udcff"]}, "give another, which is valid Unicode"),
        ({"names": {"a": 1}}, "names is {'a': 1}; give names"),
    ],
)
def test_invalid_arguments_are_named_with_the_remedy(given: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        read(**{"count": 1} | given)
    assert message in str(caught.value)


def test_an_invalid_argument_is_named_even_if_its_own_methods_raise() -> None:
    class Hostile:
        def __index__(self) -> int:
            raise RuntimeError

        def __repr__(self) -> str:
            raise RuntimeError

    with pytest.raises(ScheduleError, match="count is <Hostile>; give a whole number"):
        whole().of("count", Hostile(), ScheduleError)
    with pytest.raises(UsageError, match="give one of 'a', 'b'"):
        one_of("a", "b").of("word", numpy.array([1, 2]))
    with pytest.raises(UsageError, match="at most 1,000,000,000"):
        seconds(above=0).of("timeout", 1e308)


def space(trial: Any) -> dict[str, Any]:
    return {"lr": trial.suggest_categorical("lr", [0.1, 0.2])}


@pytest.mark.parametrize(
    "given",
    [
        *({"workers": wrong} for wrong in (3, b"x", (), (0,), (10**6,))),
        *({"n_trials": wrong} for wrong in (10**6, 10**30)),
        *({"step_seconds": wrong} for wrong in (math.inf, "1", 1e300, lambda values: None, lambda values: 1 / 0)),
        *({"steps": wrong} for wrong in (10**15, 2**53)),
        *({"sampler": wrong} for wrong in (0, [], "magic")),
        *({name: "x"} for name in ("seed", "deadline", "algorithm", "virtual_nodes", "precedent", "disruptions")),
        *({name: None} for name in ("evaluate_seconds", "checkpoint_bytes", "rehearsals", "start_seconds")),
    ],
    ids=lambda given: re.sub(" at 0x.*", "", repr(given)),
)
def test_preflight_names_invalid_arguments_and_oversized_searches(given: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=next(iter(given))):
        hpstage.preflight(space, **{"steps": 4, "n_trials": 3, "step_seconds": 1.0} | given)


@pytest.mark.parametrize("given", [{"n_workers": -1}, {"n_workers": 10**6}, {"gpus": False}, {"preload": "torch"}])
def test_local_cluster_names_invalid_arguments(given: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=next(iter(given))):
        hpstage.local_cluster(**given)


@pytest.mark.ci
def test_an_error_of_the_users_module_shows_only_the_users_frames(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("def space(trial):\n    return 1 / 0\n\n\nspace(None)\n")
    command = [sys.executable, "-m", "hpstage", "plan", "broken.py:space", "--steps", "4", "--n-trials", "2"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1
    header, folded, first, *_, last = done.stderr.splitlines()
    assert header == "Traceback (most recent call last):"
    assert "frames of hpstage and of libraries are not shown" in folded
    assert "broken.py" in first
    assert last == "ZeroDivisionError: division by zero"


@pytest.mark.slow
def test_the_input_matrix_script_finds_no_traceback_hang_or_wrong_acceptance(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "scripts" / "matrix_inputs.py")]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=3000)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-5000:]
