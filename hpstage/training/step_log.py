"""The log of training: scalars by step, and printed output.

The user's code calls :func:`log`, and the code that trains a chain sets the destination (:func:`recording`). The
trainable does not refer to the log, so no log is part of a state. Logging draws no random number and keeps no gradient.
"""

from __future__ import annotations

import math
import re
import sys
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

from hpstage.checkpoints.stage_log import Series, StageLog
from hpstage.errors import UsageError
from hpstage.errors.text import writable

POINTS = 1000
"""Upper bound on the number of points of a name between two boundaries. If there are more, every second one is dropped,
repeatedly; points that begin a run of NaN or infinite values are kept."""

OUTPUT = 1 << 16
"""Upper bound on the number of characters of output between two boundaries; the last ones are kept."""

_DRAWN_OVER = re.compile(r"[^\n]*\r(?!\n)")
_NAMES = 1000  # of a chain; more are a mistake, such as a name with the step in it
_LONGEST = 200  # characters of a name
_PENDING = 256  # values that are read together, waiting once for the device


class Sink(Protocol):
    """The current destination of logged values."""

    def log(self, name: str, value: Any) -> None: ...


_S = TypeVar("_S", bound=Sink | None)
_sink: Sink | None = None


def log(name: str, value: Any) -> None:
    """Log a number, or a tensor of one element, under a name, in the step that is being trained.

    A tensor is copied and read later, without waiting for the device. Several values of a name in one step are
    averaged. A call has no effect while no chain is trained: in ``evaluate``, whose metrics are recorded anyway, and in
    a rehearsal or a verification, which train a step once more.

    Raises:
        UsageError: ``name`` is not a valid name, or ``value`` is not a number.
    """
    if _sink is not None:
        _sink.log(name, value)


def exchanged(sink: Sink | None) -> Sink | None:
    """Set the destination of logged values, ``None`` for nowhere; return the previous one."""
    global _sink
    before, _sink = _sink, sink
    return before


@contextmanager
def recording(sink: _S) -> Iterator[_S]:
    """Set the destination of logged values within the context."""
    before = exchanged(sink)
    try:
        yield sink
    finally:
        exchanged(before)


class Noted:
    """A sink that keeps logged values, to log them elsewhere later."""

    def __init__(self) -> None:
        self.values: list[tuple[str, Any]] = []

    def log(self, name: str, value: Any) -> None:
        self.values.append((checked_name(name), snapshot(name, value)))

    def sums(self) -> dict[str, tuple[float, int]]:
        """Return, by name, the sum and the number of the values."""
        found: dict[str, tuple[float, int]] = {}
        for name, value in self.values:
            total, count = found.get(name, (0.0, 0))
            found[name] = total + float(value), count + 1
        return found

    def pass_on(self) -> None:
        """Log the recorded values, and forget them."""
        values, self.values = self.values, []
        for name, value in values:
            log(name, value)


class Recorder:
    """Records what a chain logs and prints, from one boundary to the next.

    Attributes:
        step: the step that is being trained.
    """

    def __init__(self, start: int) -> None:
        self.step = self._start = start
        self._names: set[str] = set()
        self._pending: list[tuple[int, str, Any]] = []
        self._columns: dict[str, _Column] = {}
        self._output: deque[tuple[int, str]] = deque()
        self._length = self._left_out = 0

    def log(self, name: str, value: Any) -> None:
        if value.__class__ is not float:
            value = snapshot(name, value)
        if name not in self._names:
            if len(self._names) == _NAMES:
                raise UsageError(
                    f"more than {_NAMES} names are logged, such as {name!r}; log under the same names in every step"
                )
            self._names.add(checked_name(name))
        self._pending.append((self.step, name, value))
        if len(self._pending) == _PENDING:
            self._read()

    def write(self, text: str) -> None:
        """Record printed text."""
        text = writable(text)
        if text.startswith("\r") and self._output and self._output[-1][1].startswith("\r"):
            self._length -= len(self._output.pop()[1])  # a progress bar overwrites its line
        self._output.append((self.step, text[-OUTPUT:]))
        self._left_out += max(0, len(text) - OUTPUT)
        self._length += len(self._output[-1][1])
        while self._length > OUTPUT:
            step, first = self._output.popleft()
            rest = first[self._length - OUTPUT :]
            self._length -= len(first) - len(rest)
            self._left_out += len(first) - len(rest)
            if rest:
                self._output.appendleft((step, rest))

    def take(self, stop: int) -> StageLog | None:
        """Remove and return the log of the steps before ``stop``; ``None`` if it is empty."""
        self._read()
        start, self._start = self._start, stop
        columns, self._columns = self._columns, {}
        series = {}
        for name, column in columns.items():
            if column.step >= stop:  # logged in a step that did not end
                self._columns[name] = column.last()
            if (found := column.series()).steps:
                series[name] = found
        printed = []
        while self._output and self._output[0][0] < stop:
            printed.append(self._output.popleft()[1])
        output = "".join(printed)
        self._length -= len(output)
        output = _DRAWN_OVER.sub("", output)
        left_out, self._left_out = self._left_out, 0
        if not (series or output):
            return None
        return StageLog(start, stop, series, output, left_out)

    def _read(self) -> None:
        pending, self._pending = self._pending, []
        for (step, name, _), value in zip(pending, _numbers([value for _, _, value in pending]), strict=True):
            column = self._columns.get(name)
            if column is None:
                column = self._columns[name] = _Column()
            column.add(step, value)


class _Column:
    """The values of one name, thinned as they arrive. Which values are kept depends on the values alone."""

    __slots__ = ("_count", "_firsts", "_index", "_points", "_stride", "_total", "_was_finite", "step")

    def __init__(self) -> None:
        self.step = -1  # step of the last value
        self._total = 0.0
        self._count = 0  # number of values in that step
        self._index = 0  # index of that step among all points
        self._points: list[tuple[int, int, float, bool]] = []  # index, step, value, whether it is always kept
        self._stride = 1
        self._firsts = 0
        self._was_finite = True

    def add(self, step: int, value: float) -> None:
        if step != self.step:
            self._close()
            self.step, self._total, self._count = step, value, 1
        else:
            self._total += value
            self._count += 1

    def last(self) -> _Column:
        """Move the last step's values into a separate column."""
        other = _Column()
        other.step, other._total, other._count = self.step, self._total, self._count
        self._count = 0
        return other

    def series(self) -> Series:
        self._close()
        while sum(not stays for _, _, _, stays in self._points) > POINTS:
            self._thin()
        return Series([step for _, step, _, _ in self._points], [value for _, _, value, _ in self._points])

    def _close(self) -> None:
        if not self._count:
            return
        value, index = self._total / self._count, self._index
        finite = math.isfinite(value)
        stays = self._was_finite and not finite and self._firsts < POINTS
        self._firsts += stays
        if stays or index % self._stride == 0:
            self._points.append((index, self.step, value, stays))
        self._was_finite, self._index, self._count = finite, index + 1, 0
        if len(self._points) > 4 * POINTS:
            self._thin()

    def _thin(self) -> None:
        self._stride *= 2
        self._points = [point for point in self._points if point[3] or point[0] % self._stride == 0]


def checked_name(name: object) -> str:
    """Return ``name`` if it can be the name of logged values. Raises :class:`UsageError` otherwise."""
    if not isinstance(name, str) or not name or len(name) > _LONGEST or writable(name) != name:
        raise UsageError(f"log({name!r:.300}, ...): the name must be a string of 1 to {_LONGEST} characters")
    return str(name)


def snapshot(name: str, value: Any) -> Any:
    """Return a copy of a value that later changes do not affect: a float, or an object that ``float`` can convert
    later.

    Raises:
        UsageError: the value is not a number.
    """
    if _is_torch(value):
        try:
            if value.is_cpu:
                return float(value.item())
            if not (value.is_complex() or value.is_meta):
                return value.detach().reshape(()).clone()
        except (RuntimeError, TypeError):
            pass  # it has several elements, is complex, or has no value
        raise UsageError(
            f"log({name!r}, ...): a tensor of shape {tuple(value.shape)} and {value.dtype} is not a number"
        )
    jax: Any = sys.modules.get("jax")
    if jax is not None and isinstance(value, jax.Array) and value.size == 1 and value.dtype.kind != "c":
        return value.reshape(())  # it never changes
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.ndarray) and value.size == 1:
        value = value.item()
    if isinstance(value, str | bytes) or not hasattr(value, "__float__"):
        raise UsageError(f"log({name!r}, ...): {type(value).__name__} is not a number")
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise UsageError(f"log({name!r}, ...): {type(value).__name__} is not a number: {error}") from None


def _numbers(values: list[Any]) -> list[float]:
    """Return the values as numbers, waiting once for each device and type."""
    found = list(values)
    waiting: dict[object, list[int]] = {}
    for index, value in enumerate(values):
        if value.__class__ is not float:
            waiting.setdefault((value.device, value.dtype) if _is_torch(value) else None, []).append(index)
    for kind, places in waiting.items():
        chosen = [values[index] for index in places]
        read = chosen if kind is None else sys.modules["torch"].stack(chosen).tolist()
        for index, number in zip(places, read, strict=True):
            found[index] = float(number)
    return found


def _is_torch(value: Any) -> bool:
    torch: Any = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)
