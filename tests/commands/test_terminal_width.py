"""Commands on real terminals (ptys that pyte reads): nothing is cut at 60 columns, and only terminals get colours."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
from contextlib import closing
from pathlib import Path

import optuna
import pyte
import pytest

import hpstage
from hpstage import schedule as s
from hpstage.execution.simulated import SimulatedExecutor
from hpstage.store import SQLiteJournal
from tests.unit.reports import search

pytestmark = pytest.mark.sampled(4)

HOSTILE = "evil \x1b[31m\x07<b>模型🙂</b>\r\n'\""
LONG = "momentum_of_the_" * 12
ENVIRONMENT = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "COLUMNS", "FORCE_COLOR")}
ENVIRONMENT |= {"TERM": "xterm-256color", "PYTHONUTF8": "1"}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of two studies, one of which has names that nobody should give."""
    folder = tmp_path_factory.mktemp("terminal")

    def space(trial: optuna.Trial) -> dict[str, s.Schedule | str]:
        return {HOSTILE: trial.suggest_categorical(HOSTILE, [HOSTILE, "b"]), LONG: s.piecewise({0: 1, 4: trial.number})}

    with closing(SQLiteJournal(folder / "plan.sqlite")) as journal:
        search(journal, name="digits", n_trials=6)
        hpstage.optimize(
            optuna.create_study(study_name=HOSTILE, direction="maximize"),
            object(),
            space,
            metric=HOSTILE,
            steps=8,
            n_trials=3,
            executor=SimulatedExecutor(2, measure=lambda key, step: {HOSTILE: int(key, 16) / 16 ** len(key)}),
            store=journal,
        )
    return folder


def on_terminal(width: int, *words: str, **environment: str) -> tuple[list[str], bytes]:
    """What stands on a terminal at last, scrolled off lines included, and the bytes that were written to it."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 50, width, 0, 0))
    process = subprocess.Popen(
        [sys.executable, "-m", "hpstage", *words],
        stdin=slave, stdout=slave, stderr=slave, start_new_session=True, env=ENVIRONMENT | environment,
    )  # fmt: skip
    written = b""
    while process.poll() is None or select.select([master], [], [], 0)[0]:
        if select.select([master], [], [], 0.1)[0]:
            written += os.read(master, 65536)
    os.close(master)
    os.close(slave)
    assert process.returncode == 0, written
    screen = pyte.HistoryScreen(width, 50, history=10_000, ratio=1.0)
    pyte.ByteStream(screen).feed(written)
    lines = ["".join(line[x].data for x in range(width)) for line in screen.history.top] + screen.display
    return [line.rstrip() for line in lines], written


def piped(*words: str) -> str:
    command = [sys.executable, "-m", "hpstage", *words]
    return subprocess.run(command, env=ENVIRONMENT, capture_output=True, check=True, timeout=300).stdout.decode()


@pytest.mark.ci
@pytest.mark.parametrize("width", [60, 80, 120])
@pytest.mark.parametrize("command", ["status", "tree"])
def test_status_and_tree_show_the_same_words_on_a_terminal_as_in_a_pipe(store: Path, command: str, width: int) -> None:
    through_pipe = piped(command, str(store))
    assert "\x1b" not in through_pipe and "\x07" not in through_pipe and "evil \\x1b[31m\\x07<b>" in through_pipe
    lines, _ = on_terminal(width, command, str(store))
    on_it = {word for line in lines for word in re.split(r"[\s;│├└─]+", line)}
    words = {word for word in re.split(r"[\s;│├└─]+", through_pipe) if len(word) <= width - 20}
    assert words and words <= on_it
    # A word longer than a line of the terminal continues on the next line.
    assert LONG not in through_pipe or LONG in "".join(line.lstrip(" │") for line in lines)


@pytest.mark.ci
def test_tree_uses_colours_on_a_terminal_unless_no_color_is_set(store: Path) -> None:
    _, plain = on_terminal(80, "tree", str(store), NO_COLOR="1")
    assert not re.search(rb"\x1b\[(\d+;)*3\d", plain)
    _, coloured = on_terminal(80, "tree", str(store))
    assert re.search(rb"\x1b\[(\d+;)*3\d", coloured)
