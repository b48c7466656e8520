"""The schedules of one trial, side by side. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from operator import itemgetter

from hpstage.errors import ScheduleError
from hpstage.schedule import Form, Schedule


def pieces(schedules: Sequence[Schedule], steps: int) -> Iterator[tuple[int, int, tuple[Form, ...]]]:
    """Yield ``(start, stop, forms)`` for each range within ``[0, steps)`` on which no schedule changes its form."""
    forms = [schedule.segments[0].form for schedule in schedules]
    joints: list[tuple[int, int, Form]] = []  # (step, index of the schedule, its form from there on)
    for index, schedule in enumerate(schedules):
        if len(schedule.segments) > 1:
            joints += [(begin, index, form) for begin, _, form in schedule.pieces()[1:] if begin < steps]
    joints.sort(key=_step)
    start = 0
    for step, index, form in joints:
        if step > start:
            yield start, step, tuple(forms)
            start = step
        forms[index] = form
    yield start, steps, tuple(forms)


_step = itemgetter(0)


def check_trial(schedules: Mapping[str, Schedule], steps: int, trial: str) -> None:
    """Raise for schedules that do not reach the trial's end, or that end at different steps.

    Raises:
        ScheduleError: names the hyper-parameter and the remedy.
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
