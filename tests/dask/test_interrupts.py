"""Ctrl-C and SIGTERM: once stops a search with everything kept, twice at once. Real processes, real signals."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from hpstage import InlineExecutor
from hpstage.search.signals import Interruption
from tests.dask import interrupted
from tests.dask.processes import ROOT, Processes, end, is_running, until
from tests.dask.steady import Hanging

PAUSE = {Hanging.PAUSE: "0.02"}
RUNG = 12  # of the search: at most so many steps between checkpoints


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    """What the search finds when nothing happens to it."""
    folder = tmp_path_factory.mktemp("undisturbed")
    found = resumed(folder)
    assert found["trained"] == found["unique"] == steps(folder)
    return found


def resumed(folder: Path) -> dict[str, object]:
    """What the search finds when it resumes in this process, undisturbed."""
    return interrupted.found(interrupted.search(folder, InlineExecutor()))


@contextmanager
def searching(folder: Path, where: str) -> Iterator[subprocess.Popen[str]]:
    """The search in a process group of its own, as a shell would start it."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.dask.interrupted", str(folder), where],
        cwd=ROOT,
        env={**os.environ, **PAUSE},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        end(process)  # type: ignore[arg-type]
        assert process.stdout is not None
        process.stdout.close()


def steps(folder: Path) -> int:
    """Steps that all processes have begun, those included that are in no journal."""
    return (folder / "steps").stat().st_size if (folder / "steps").exists() else 0


def interrupted_after(folder: Path, where: str, count: int, number: signal.Signals) -> tuple[int, str]:
    """Search on until ``count`` more steps have begun, then signal the group, as a terminal does; its end and words."""
    with searching(folder, where) as process:
        before = steps(folder)
        until(lambda: steps(folder) >= before + count or process.poll() is not None, "steps")
        os.killpg(process.pid, number)
        output, _ = process.communicate(timeout=300)
    return process.returncode, output


def said(output: str) -> list[str]:
    """All that was said before the traceback of the KeyboardInterrupt."""
    return output.partition("Traceback")[0].splitlines()


def moments(where: str, most: int) -> list[int]:
    """Random ones, the same in each run."""
    chance = random.Random(f"{where} {most}")
    return [chance.randrange(1, 12) for _ in range(most)]


@contextmanager
def a_place(where: str, folder: Path) -> Iterator[str]:
    if where != "client":
        yield where
        return
    with Processes(folder, **PAUSE) as processes:
        processes.scheduler()
        processes.worker()
        processes.worker()
        yield processes.address


@pytest.mark.ci
@pytest.mark.parametrize(
    ("where", "times"),
    [
        ("inline", 2),
        ("client", 1),
        pytest.param("local", 1, marks=pytest.mark.slow),
        pytest.param("inline", 10, marks=pytest.mark.slow),
        pytest.param("local", 5, marks=pytest.mark.slow),
        pytest.param("client", 5, marks=pytest.mark.slow),
    ],
)
def test_a_search_interrupted_at_random_times_and_resumed_trains_each_unique_step_once(
    where: str, times: int, tmp_path: Path, undisturbed: dict[str, object]
) -> None:
    with a_place(where, tmp_path) as place:
        for moment in moments(where, times):
            if steps(tmp_path) + moment > undisturbed["unique"] - 10:
                break  # a call that has come to its end is not to be continued: another would add trials
            status, output = interrupted_after(tmp_path, place, moment, signal.SIGINT)
            assert status == -signal.SIGINT, output
            assert said(output) == ["Stopping: saving what runs; Ctrl-C again stops at once"]
            assert output.count("Traceback") == 1
            assert "KeyboardInterrupt: interrupted; all progress is kept" in output.splitlines()[-1]
    found = resumed(tmp_path)
    assert found == undisturbed
    assert found["wasted"] == 0
    assert steps(tmp_path) == found["trained"] == found["unique"]


@pytest.mark.ci
@pytest.mark.parametrize("where", ["inline", pytest.param("local", marks=pytest.mark.slow)])
def test_sigterm_stops_a_search_cleanly_and_then_ends_the_process(
    where: str, tmp_path: Path, undisturbed: dict[str, object]
) -> None:
    status, output = interrupted_after(tmp_path, where, 7, signal.SIGTERM)
    assert status == -signal.SIGTERM
    assert output.splitlines() == ["Stopping: saving what runs; Ctrl-C again stops at once"]
    assert resumed(tmp_path) == undisturbed
    assert steps(tmp_path) == undisturbed["unique"]


@pytest.mark.ci
@pytest.mark.parametrize("where", ["inline", pytest.param("local", marks=pytest.mark.slow)])
def test_a_second_signal_ends_a_search_whose_step_hangs(
    where: str, tmp_path: Path, undisturbed: dict[str, object]
) -> None:
    with searching(tmp_path, where) as process:
        until(lambda: steps(tmp_path) >= 15, "steps")
        (tmp_path / "hang").touch()
        until(lambda: settled(tmp_path), "the step that hangs")
        os.killpg(process.pid, signal.SIGINT)
        assert process.stdout is not None
        assert process.stdout.readline().startswith("Stopping: ")
        workers = children(process.pid)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.3)  # it waits for the step
        os.killpg(process.pid, signal.SIGINT)
        output, _ = process.communicate(timeout=300)
    assert process.returncode == -signal.SIGINT
    assert said(output) == []
    assert output.count("Traceback") == 1
    until(lambda: not any(map(is_running, workers)), "the end of all processes", seconds=10.0)  # the last end after it
    (tmp_path / "hang").unlink()
    found = resumed(tmp_path)
    assert found == undisturbed, "nothing that was acknowledged was trained again"
    assert steps(tmp_path) <= found["unique"] + 2 * RUNG


@pytest.mark.ci
def test_ctrl_c_while_local_workers_start_interrupts_only_the_search(tmp_path: Path) -> None:
    with searching(tmp_path, "local") as process:
        until(lambda: servers_of(process.pid), "the server of training processes")
        os.killpg(process.pid, signal.SIGINT)
        output, _ = process.communicate(timeout=300)
    assert process.returncode == -signal.SIGINT
    assert said(output) == ["Stopping as soon as the executor has started; Ctrl-C twice more stops at once"]
    assert output.count("Traceback") == 1


def servers_of(pid: int) -> list[int]:
    """Its children that fork training processes."""
    return [child for child in children(pid) if b"forking_process" in Path(f"/proc/{child}/cmdline").read_bytes()]


def settled(folder: Path) -> bool:
    """Have no steps begun for much longer than one takes?"""
    before = steps(folder)
    threading.Event().wait(0.3)
    return steps(folder) == before


def children(pid: int) -> list[int]:
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it has ended by now
        if int(fields[1]) == pid:
            found.append(int(stat.parent.name))
    return found


# --- the handlers -----------------------------------------------------------------------------------------


def nobody() -> None:
    """There is nothing to wake."""


def test_the_first_signal_requests_a_stop_and_the_second_raises_keyboard_interrupt() -> None:
    deeds = []

    def search() -> None:
        with Interruption() as interruption:
            interruption.started(lambda: deeds.append("woken"))
            signal.raise_signal(signal.SIGINT)
            deeds.append(f"requested: {interruption.requested}")
            signal.raise_signal(signal.SIGINT)
            deeds.append("never comes here")

    with pytest.raises(KeyboardInterrupt):
        search()
    assert deeds == ["woken", "requested: True"]


def test_a_search_that_ends_after_a_stop_request_raises_keyboard_interrupt() -> None:
    def search() -> None:
        with Interruption() as interruption:
            interruption.started(nobody)
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        search()


def test_a_completed_search_is_interrupted_only_by_a_second_signal() -> None:
    with Interruption() as interruption:
        interruption.started(nobody)
        interruption.completed()
        signal.raise_signal(signal.SIGINT)
        interruption.check()

    def search() -> None:
        with Interruption() as interruption:
            interruption.started(nobody)
            signal.raise_signal(signal.SIGINT)
            interruption.completed()
            interruption.check()
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        search()


class Closing(InlineExecutor):
    def close(self) -> None:
        signal.raise_signal(signal.SIGINT)
        super().close()


def test_ctrl_c_during_the_closing_of_a_completed_search_keeps_its_result(tmp_path: Path) -> None:
    found = interrupted.found(interrupted.search(tmp_path, Closing()))
    assert found["trained"] == found["unique"] == steps(tmp_path)


def test_the_setup_of_a_search_is_interrupted_only_by_the_third_signal() -> None:
    deeds = []

    def search() -> None:
        with Interruption():
            for number in range(4):
                signal.raise_signal(signal.SIGINT)
                deeds.append(number)

    with pytest.raises(KeyboardInterrupt):
        search()
    assert deeds == [0, 1]


def test_a_search_stopped_before_its_start_does_not_start() -> None:
    def search() -> None:
        with Interruption() as interruption:
            signal.raise_signal(signal.SIGINT)
            interruption.started(nobody)
            pytest.fail("it has started")

    with pytest.raises(KeyboardInterrupt):
        search()


@pytest.mark.parametrize("signals", [1, 2])
def test_the_closing_of_an_interrupted_search_is_aborted_only_by_two_more_signals(signals: int) -> None:
    deeds = []

    def search() -> None:
        with Interruption() as interruption:
            interruption.started(nobody)
            try:
                for _ in range(signals):
                    signal.raise_signal(signal.SIGINT)
                interruption.check()
            finally:
                signal.raise_signal(signal.SIGINT)
                deeds.append("closed")
                signal.raise_signal(signal.SIGINT)
                deeds.append("never comes here")

    with pytest.raises(KeyboardInterrupt):
        search()
    assert deeds == ["closed"]


@pytest.mark.parametrize("own", [signal.SIG_IGN, lambda *_: None], ids=["ignored", "handled"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_handlers_set_by_the_user_are_kept(number: signal.Signals, own: Callable[..., object]) -> None:
    before = signal.signal(number, own)  # type: ignore[arg-type]
    try:
        with Interruption() as interruption:
            interruption.started(nobody)
            signal.raise_signal(number)
            assert not interruption.requested
        assert signal.getsignal(number) is own
    finally:
        signal.signal(number, before)


def test_the_signal_handlers_are_restored_after_a_search() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with Interruption():
        pass
    with pytest.raises(ZeroDivisionError), Interruption():
        _ = 1 / 0
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


def test_a_search_in_another_thread_sets_no_signal_handlers() -> None:
    before = signal.getsignal(signal.SIGINT)
    seen = []

    def search() -> None:
        with Interruption():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=search)
    thread.start()
    thread.join()
    assert seen == [before]
