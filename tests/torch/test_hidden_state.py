"""Whatever training changes is in the state, wherever it is kept; what cannot be is refused by name."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from hpstage.checkpoints import FolderCheckpoints
from hpstage.checkpoints.state_tree import clone
from hpstage.plan.facts import StateKey
from tests.torch.patterns import PATTERNS
from tests.torch.trainables import FORK, STEPS, advance, fresh, hp_at, outcome

pytestmark = [pytest.mark.sampled(10), pytest.mark.forks]


@functools.cache
def straight(name: str) -> Any:
    with begun(name) as trainable:
        return outcome(advance(trainable, 0, STEPS))


@contextmanager
def begun(name: str) -> Iterator[Any]:
    """A trainable that has been set up; what it changes outside of itself is put back."""
    trainable: Any = fresh(PATTERNS[name]())
    try:
        yield trainable
    finally:
        trainable.close()


@pytest.mark.parametrize("name", PATTERNS)
@pytest.mark.ci_one_in(3)
def test_a_fork_with_hidden_state_equals_training_straight_through(name: str) -> None:
    expected = straight(name)
    with begun(name) as trainable:
        state = clone(advance(trainable, 0, FORK).state_dict())
    with begun(name) as trainable:
        trainable.load_state_dict(state)
        assert outcome(advance(trainable, FORK, STEPS)) == expected


@pytest.mark.parametrize("name", PATTERNS)
@pytest.mark.ci_one_in(3)
def test_a_fork_on_a_worker_that_has_trained_before_equals_training_straight_through(name: str) -> None:
    expected = straight(name)
    with begun(name) as trainable:
        advance(trainable, 0, FORK)
        state = clone(trainable.state_dict())
        trainable.evaluate()
        advance(trainable, FORK, FORK + 3)  # other training, from where the fork is made
        trainable.setup(hp_at(0))
        trainable.load_state_dict(state)
        assert outcome(advance(trainable, FORK, STEPS)) == expected


@pytest.mark.parametrize("name", PATTERNS)
@pytest.mark.one_in(3)
def test_a_fork_at_an_early_step_is_not_affected_by_later_training(name: str) -> None:
    early = 2
    with begun(name) as trainable:
        expected = outcome(advance(trainable, 0, early + 1))
    with begun(name) as trainable:
        state = clone(advance(trainable, 0, early).state_dict())
        advance(trainable, early, STEPS)
        trainable.setup(hp_at(0))
        trainable.load_state_dict(state)
        assert outcome(advance(trainable, early, early + 1)) == expected


@pytest.mark.parametrize("name", PATTERNS)
@pytest.mark.one_in(3)
def test_a_trial_is_not_affected_by_the_previous_trial(name: str) -> None:
    expected = straight(name)
    with begun(name) as trainable:
        advance(trainable, 0, 5).evaluate()
        trainable.setup(hp_at(0))
        assert outcome(advance(trainable, 0, STEPS)) == expected


@pytest.mark.parametrize("name", PATTERNS)
@pytest.mark.one_in(3)
def test_evaluating_at_every_step_does_not_change_training(name: str) -> None:
    expected = straight(name)
    with begun(name) as trainable:
        for step in range(STEPS):
            advance(trainable, step, step + 1).evaluate()
        assert outcome(trainable) == expected


@pytest.mark.slow  # by default tests/torch/test_exactness.py continues in a new process; CI has these, too
def test_a_fork_in_a_new_process_equals_training_straight_through(tmp_path: Path) -> None:
    store = FolderCheckpoints(str(tmp_path), "tests")
    for number, name in enumerate(PATTERNS):
        with begun(name) as trainable:
            state = advance(trainable, 0, FORK).state_dict()
            store.save(StateKey(f"{number:032d}"), state, step=FORK, parent=None)
    done = subprocess.run(
        [sys.executable, "-m", "tests.torch.test_hidden_state", str(tmp_path)],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert [name for name in PATTERNS if found[name] != straight(name)] == []


def main(folder: str) -> None:
    import torch

    torch.set_num_threads(1)
    store = FolderCheckpoints(folder, "tests")
    found = {}
    for number, name in enumerate(PATTERNS):
        with begun(name) as trainable:
            trainable.load_state_dict(store.load(StateKey(f"{number:032d}")))
            found[name] = outcome(advance(trainable, FORK, STEPS))
    print(json.dumps(found))  # noqa: T201


if __name__ == "__main__":
    main(sys.argv[1])
