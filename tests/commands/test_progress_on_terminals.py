"""A search in a process of its own, on a real terminal (a pty that pyte reads) and on pipes."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
from functools import cache
from pathlib import Path

import pyte
import pytest

pytestmark = pytest.mark.sampled(8)

ROOT = Path(__file__).parents[2]

# Argument 1: the study's name; 2: what happens at trial 12.
SEARCH = """
import logging, os, signal, sys, warnings
import optuna, hpstage
from hpstage import schedule as s
from hpstage.execution.simulated import SimulatedExecutor
from hpstage.testing.toys import Tape

optuna.logging.set_verbosity(optuna.logging.WARNING)
logging.basicConfig(format="LOG %(message)s")  # holds the standard error of now
name, at_12 = sys.argv[1:]

def space(trial):
    return {"a": s.piecewise({0: 1, trial.suggest_int("at", 2, 30): trial.suggest_int("a", 2, 9)})}

def speak(study, trial):
    print(f"printed {trial.number}")
    print(f"error {trial.number}", file=sys.stderr)
    logging.getLogger("other").warning("logged %d", trial.number)
    warnings.warn(f"warned {trial.number}", stacklevel=1)
    if trial.number == 12:
        match at_12:
            case "raise": raise ValueError("at 12")
            case "int": os.kill(os.getpid(), signal.SIGINT)
            case "kill": os.kill(os.getpid(), signal.SIGKILL)
            case "term": os.kill(os.getpid(), signal.SIGTERM)

warnings.simplefilter("always")
study = optuna.create_study(study_name=name, sampler=optuna.samplers.RandomSampler(seed=0))
hpstage.optimize(
    study, Tape(), space, metric="value", steps=32, n_trials=40, callbacks=[speak], show_progress_bar=at_12 != "silent",
    executor=SimulatedExecutor(2), store=hpstage.store.MemoryJournal(),
)
print("the search is over", end="")
"""
ENVIRONMENT = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "COLUMNS", "LINES")}
ENVIRONMENT |= {"TERM": "xterm-256color", "PYTHONUTF8": "1"}


def command(name: str, at_12: str) -> list[str]:
    return [sys.executable, "-c", SEARCH, name, at_12]


class Terminal:
    """What a program wrote to a terminal: the bytes, and the text as it stood at last, scrolled off lines included."""

    def __init__(self, name: str = "digits", at_12: str = "", *, width: int = 80, **environment: str) -> None:
        master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, width, 0, 0))
        before = termios.tcgetattr(slave)
        process = subprocess.Popen(
            command(name, at_12),
            cwd=ROOT, stdin=slave, stdout=slave, stderr=slave, start_new_session=True, env=ENVIRONMENT | environment,
        )  # fmt: skip
        self.written = b""
        while process.poll() is None or select.select([master], [], [], 0)[0]:
            if select.select([master], [], [], 0.1)[0]:
                self.written += os.read(master, 65536)
        self.restored = termios.tcgetattr(slave) == before
        os.close(master)
        os.close(slave)
        self.status = process.returncode
        screen = pyte.HistoryScreen(width, 24, history=10_000, ratio=1.0)
        pyte.ByteStream(screen).feed(self.written)
        lines = ["".join(line[x].data for x in range(width)) for line in screen.history.top] + screen.display
        self.lines = [line.rstrip() for line in lines]
        while self.lines and not self.lines[-1]:
            self.lines.pop()
        self.cursor = screen.cursor


# Searches that several tests look at run once.
on_terminal = cache(Terminal)


def spoken(upto: int) -> set[str]:
    kinds = ("printed {}", "error {}", "LOG logged {}")
    return {kind.format(number) for number in range(upto) for kind in kinds}


def of_the_display(lines: list[str]) -> list[str]:
    """Lines that are neither the search's own speech nor a warning's."""
    own = re.compile(r"Setting up the workers$|(printed|error|LOG logged) \d+$|<string>:\d+: UserWarning: warned \d+$")
    return [line for line in lines if not own.match(line)]


@pytest.mark.ci
@pytest.mark.parametrize("width", [40, 80])
def test_printed_logged_and_warning_lines_stand_above_the_progress_display(width):
    terminal = on_terminal(width=width)
    assert terminal.status == 0
    assert spoken(40) <= set(terminal.lines)
    assert sum("UserWarning" in line for line in terminal.lines) == 40
    first = next(i for i, line in enumerate(terminal.lines) if line.startswith("digits "))
    assert not of_the_display(terminal.lines[:first]), "nothing of an older drawing is left"
    assert terminal.lines[first].endswith("40/40 trials")
    assert terminal.lines[-1] == "the search is over"
    assert 2 <= len(terminal.lines) - first - 1 <= 7


@pytest.mark.ci
def test_the_progress_display_is_redrawn_during_a_search_and_terminal_modes_stay_unchanged():
    terminal = on_terminal(width=80)
    assert terminal.written.count(b"/40 trials") > 3
    assert terminal.restored and b"\x1b[?" not in terminal.written, "no mode is set that a kill would leave set"


@pytest.mark.parametrize("at_12", ["raise", "int", "term", "kill"])
def test_the_cursor_is_visible_below_the_progress_display_after_an_aborted_search(at_12):
    terminal = Terminal(at_12=at_12)
    assert (
        terminal.status == {"raise": 1, "int": -signal.SIGINT, "term": -signal.SIGTERM, "kill": -signal.SIGKILL}[at_12]
    )
    assert terminal.restored and not terminal.cursor.hidden and terminal.cursor.x == 0
    assert sum(line.startswith("digits ") for line in terminal.lines) == 1
    assert spoken(12) <= set(terminal.lines)
    if at_12 in ("raise", "int"):
        start = next(i for i, line in enumerate(terminal.lines) if line.startswith("digits "))
        assert any(line.startswith("Traceback") for line in terminal.lines[start:]), "tracebacks come below"
        assert not any(" left" in line for line in terminal.lines)


def test_escape_sequences_in_a_study_name_are_shown_and_not_sent_to_the_terminal():
    name = "<script>$x_{[bold]\x1b]0;owned\x07\x1b[2J\n"
    terminal = Terminal(name, width=200)
    assert r"<script>$x_{[bold]\x1b]0;owned\x07\x1b[2J\n" in next(line for line in terminal.lines if "40/40" in line)
    assert b"owned\x07" not in terminal.written and b"\x1b[2J" not in terminal.written


@pytest.mark.ci
def test_no_color_removes_colours_from_the_progress_display():
    colour = re.compile(rb"\x1b\[[0-9;]*(3[0-7]|9[0-7]|38;[0-9;]+)[0-9;]*m")
    assert colour.search(on_terminal(width=80).written)
    assert not colour.search(Terminal(NO_COLOR="1").written)


def test_a_dumb_terminal_gets_progress_lines_without_control_characters():
    terminal = Terminal(TERM="dumb", width=200)
    assert b"\x1b" not in terminal.written
    assert sum(line.startswith("digits: ") for line in terminal.lines) == 2


def test_characters_outside_the_terminal_encoding_are_escaped_in_the_progress_display():
    terminal = Terminal("学習", PYTHONIOENCODING="ascii")
    assert terminal.status == 0
    assert terminal.written.isascii()
    assert any(r"\u5b66\u7fd2" in line and "40/40 trials" in line for line in terminal.lines)


def piped(at_12: str = "") -> tuple[str, str]:
    done = subprocess.run(command("digits", at_12), cwd=ROOT, capture_output=True, text=True, env=ENVIRONMENT)
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


def test_a_pipe_gets_one_progress_line_at_the_start_and_one_at_the_end():
    output, errors = piped()
    assert output.splitlines() == [
        *(f"printed {line.split()[1]}" for line in output.splitlines()[:-1]),
        "the search is over",
    ]
    assert not re.search(r"[\x00-\x08\x0b-\x1f]", errors)
    lines = [line for line in errors.splitlines() if line.startswith("digits: ")]
    assert len(lines) == 2
    assert lines[0].startswith("digits: 0/40 trials; ")
    assert lines[1].startswith("digits: 40/40 trials; 40 complete; best value 0.")


def test_no_progress_is_shown_with_show_progress_bar_false():
    _, errors = piped("silent")
    assert "digits" not in errors
    terminal = Terminal(at_12="silent")
    assert b"\x1b" not in terminal.written
    assert not of_the_display(terminal.lines[:-1])


def test_redirected_standard_output_is_not_mixed_with_progress(tmp_path):
    master, slave = pty.openpty()
    with (tmp_path / "output").open("w") as output:
        process = subprocess.Popen(
            command("digits", ""), cwd=ROOT, stdin=slave, stdout=output, stderr=slave, env=ENVIRONMENT
        )
        os.set_blocking(master, False)
        while process.poll() is None:
            if select.select([master], [], [], 0.1)[0]:
                os.read(master, 65536)
    os.close(master)
    os.close(slave)
    lines = (tmp_path / "output").read_text().splitlines()
    assert len(lines) == 41 and all(line.startswith("printed ") for line in lines[:-1])


def test_importing_optimize_does_not_load_rich():
    script = "import sys, hpstage.search.optimize; print('rich' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "False\n", done.stderr
