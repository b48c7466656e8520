"""The schedules of one trial, side by side. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from hpstage.errors import ScheduleError
from hpstage.schedule import Form, Schedule


def pieces(schedules: Sequence[Schedule], steps: int) -> Iterator[tuple[int, int, tuple[Form, ...]]]:
    """``(start, stop, forms)`` for each stretch of ``[0, steps)`` on which no schedule changes its form."""
    columns = [list(schedule.pieces()) for schedule in schedules]
    at = [0] * len(columns)
    start = 0
    while start < steps:
        stop = steps
        for column, i in zip(columns, at, strict=True):
            end = column[i][1]
            if end is not None and end < stop:
                stop = end
        yield start, stop, tuple([column[i][2] for column, i in zip(columns, at, strict=True)])
        for j, (column, i) in enumerate(zip(columns, at, strict=True)):
            if column[i][1] == stop:
                at[j] = i + 1
        start = stop


def check_trial(schedules: Mapping[str, Schedule], steps: int, trial: str) -> None:
    """Refuse schedules that do not reach the trial's end, or that end apart.

    Raises:
        ScheduleError: naming the hyper-parameter and the remedy.
    """
    if not schedules:
        raise ScheduleError(f"{trial}: there are no hyper-parameters; the space must return at least one")
    lengths = {name: schedule.length for name, schedule in schedules.items() if schedule.length is not None}
    for name, length in sorted(lengths.items()):
        if length < steps:
            raise ScheduleError(
                f"{trial}: the schedule of {name!r} ends at step {length}, but the trial has {steps} steps; add "
                f".then(...) or train fewer steps"
            )
    if len(set(lengths.values())) > 1:
        ends = ", ".join(f"{name!r} at {length}" for name, length in sorted(lengths.items()))
        raise ScheduleError(f"{trial}: schedules end at different steps ({ends}); bound them with .until({steps})")
