"""A training function runs in a thread of its own: what belongs to another thread fails there, with the remedy."""

from __future__ import annotations

import asyncio
import signal
import sqlite3
from collections.abc import Callable
from contextlib import closing

import pytest

from hpstage.training.run import Run
from tests.torch.loops import HP, begun, made

DATABASE = sqlite3.connect(":memory:")


def handling_signals(run: Run) -> None:
    begun(run)
    for _ in run.steps():
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)


def asking_a_database(run: Run) -> None:
    begun(run)
    for _ in run.steps():
        DATABASE.execute("select 1")


def taking_the_event_loop(run: Run) -> None:
    begun(run)
    for _ in run.steps():
        asyncio.get_event_loop()


handling_signals.stateless = asking_a_database.stateless = ("DATABASE",)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("function", "error"),
    [
        (handling_signals, ValueError),
        (asking_a_database, sqlite3.ProgrammingError),
        (taking_the_event_loop, RuntimeError),
    ],
)
def test_an_object_of_another_thread_fails_in_a_training_function_with_the_remedy(
    function: Callable[[Run], None], error: type[Exception]
) -> None:
    with closing(made(function)) as trainable, pytest.raises(error, match="thread") as raised:
        trainable.train(0, HP)
    assert "A training function runs in a thread of its own" in "".join(raised.value.__notes__)


def failing_otherwise(run: Run) -> None:
    begun(run)
    for _ in run.steps():
        raise ValueError("a batch is empty")


def test_an_error_unrelated_to_threads_has_no_note_about_threads() -> None:
    with closing(made(failing_otherwise)) as trainable, pytest.raises(ValueError, match="empty") as raised:
        trainable.train(0, HP)
    assert not hasattr(raised.value, "__notes__")
