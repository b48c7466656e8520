"""What becomes of senseless arguments: every public argument with wrong types, NaN, huge numbers, odd texts and so on.

    python scripts/matrix_inputs.py [--json FILE] [--only WORD] [--every N]

Prints, per public callable, how many inputs ended in

- ``clear``: an error of hpstage that names the argument or the value, before anything is trained;
- ``accepted``: training, or what the call does, was reached, and the argument's annotation and kind admit the value;
- ``unnamed``: an error of hpstage that names neither;
- ``raw``: a TypeError, AttributeError, ... from inside, or a traceback on the command line;
- ``hang``: no answer within a generous limit;
- ``wrong``: accepted, though the value means nothing.

The exit status is 1 if any of the last four is not 0. Calls stop where training, workers or servers would be started.
"""

from __future__ import annotations

import contextlib
import io
import math
import multiprocessing
import operator
import re
import signal
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Iterator, Mapping
from decimal import Decimal
from fractions import Fraction
from numbers import Real
from pathlib import Path
from typing import Any

import numpy
import optuna
from command_line import parser_of, write
from matrix_subjects import Reached, Subject, commands, options_of, stopped, subjects

from hpstage.errors import HpstageError
from hpstage.errors.arguments import Kind, shown
from hpstage.errors.text import clean

OUTCOMES = ("clear", "accepted", "unnamed", "raw", "hang", "wrong")
SECONDS = 60
"""Until a call counts as hanging."""

VALUES: dict[str, Any] = {
    "object()": object(),
    "b'x'": b"x",
    "'x'": "x",
    "'1'": "1",
    "'nan'": "nan",
    "[]": [],
    "[1]": [1],
    "['x']": ["x"],
    "[None]": [None],
    "{}": {},
    "{1}": {1},
    "()": (),
    "lambda": lambda *args: None,
    "int": int,
    "Ellipsis": ...,
    "1j": 1j,
    "range(3)": range(3),
    "Exception()": Exception("x"),
    "None": None,
    "True": True,
    "False": False,
    "nan": math.nan,
    "inf": math.inf,
    "-inf": -math.inf,
    "-1": -1,
    "0": 0,
    "-0.0": -0.0,
    "1": 1,
    "1.5": 1.5,
    "-1.5": -1.5,
    "5e-324": 5e-324,
    "1e308": 1e308,
    "10**6": 10**6,
    "2**31": 2**31,
    "2**53": 2**53,
    "2**63": 2**63,
    "10**30": 10**30,
    "10**5000": 10**5000,
    "''": "",
    "' '": " ",
    "'лр'": "лр",
    "'x' * 10**4": "x" * 10**4,
    "surrogate": "\udcff",
    "NUL": "\0",
    "np.int64(3)": numpy.int64(3),
    "np.int64(-1)": numpy.int64(-1),
    "np.float64(nan)": numpy.float64("nan"),
    "np.float64(2)": numpy.float64(2),
    "np.float32(0.5)": numpy.float32(0.5),
    "np.bool_(True)": numpy.bool_(True),
    "np.str_('x')": numpy.str_("x"),
    "np.array(3)": numpy.array(3),
    "np.array([1, 2])": numpy.array([1, 2]),
    "Decimal(1)": Decimal(1),
    "Fraction(1, 2)": Fraction(1, 2),
}
TEXTS = (
    *(
        "",
        " ",
        "x",
        "nan",
        "inf",
        "-inf",
        "-1",
        "0",
        "1",
        "1.5",
        "1e308",
        "1000000",
        "9007199254740993",
        "1" + "0" * 30,
    ),
    *("None", "[]", "()", "True", "лр", "\udcff", "x" * 300, "../x", "a\nb", "\x1b[31m"),
)
"""For options of the command line."""


class Hang(BaseException):
    """The call has taken too long."""


# --- what may be accepted ---------------------------------------------------------------------------------


def parts(annotation: str) -> list[str]:
    """Return the members of a union."""
    found, depth = [""], 0
    for sign in annotation:
        depth += (sign == "[") - (sign == "]")
        if sign == "|" and not depth:
            found.append("")
        else:
            found[-1] += sign
    return [part.strip() for part in found]


def admits(annotation: str, value: Any) -> bool:
    """Whether a value is of a type, as it is annotated; of classes, none of these values is an instance."""
    if isinstance(value, numpy.ndarray) and value.shape == ():
        value = value.item()
    return any(_admits(part, value) for part in parts(annotation))


def _admits(part: str, value: Any) -> bool:
    many = re.fullmatch(r"(?:Sequence|Iterable|tuple|list)\[(.*?)(?:, \.\.\.)?\]", part)
    if many:
        return isinstance(value, list | tuple | set | range | numpy.ndarray) and all(
            admits(many[1], one) for one in (value.tolist() if isinstance(value, numpy.ndarray) else value)
        )
    if part.startswith("Mapping"):
        return isinstance(value, dict)
    if part.startswith("Literal"):
        return False  # no value here is one of the words
    match part:
        case "None":
            return value is None
        case "bool":
            return isinstance(value, bool)
        case "int":
            return not isinstance(value, bool) and hasattr(value, "__index__") and _index(value)
        case "Count":  # as a schedule reads steps
            return admits("int", value) or (isinstance(value, float) and value.is_integer())
        case "float":
            return isinstance(value, Real) and not isinstance(value, bool) and _finite(value)
        case "str":
            return isinstance(value, str) and not any("\ud800" <= sign <= "\udfff" for sign in value)
        case "os.PathLike[str]":  # names of files need not be valid Unicode
            return isinstance(value, str)
        case "Scalar":
            return isinstance(value, numpy.bool_) or admits("bool | int | float | str | None", value)
        case "object":
            return callable(value)
        case "Space" | "Say" | "StepSeconds" | "Callback" | "Constraints":
            return callable(value)
    return part.startswith("Callable") and callable(value)


def _index(value: Any) -> bool:
    try:
        operator.index(value)
    except TypeError:
        return False
    return True


def _finite(value: Any) -> bool:
    try:
        return math.isfinite(float(value))
    except OverflowError:
        return False


def kinds_of(subject: object) -> Mapping[str, Kind]:
    """Return the table of a function or a class; empty without one."""
    table: Any = getattr(subject, "kinds", None) or getattr(getattr(subject, "__init__", None), "kinds", None)
    return table or {}


def meaningful(of: Any, annotation: str, name: str, value: Any) -> bool:
    """Whether an argument's annotation and kind both admit a value."""
    kind = kinds_of(of).get(name)
    if kind is not None:
        try:
            kind.of(name, value)
        except HpstageError:
            return False
    return admits(annotation, value)


# --- calling ----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def limited(seconds: float) -> Iterator[None]:
    def hang(*_: object) -> None:
        raise Hang

    before = signal.signal(signal.SIGALRM, hang)
    signal.setitimer(signal.ITIMER_REAL, seconds, 1)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def outcome(one: Subject, name: str, value: Any) -> tuple[str, str]:
    """Call with the value; return the outcome, and what was raised."""
    try:
        with limited(SECONDS), contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
            one.call(name, value)
    except Reached:
        pass
    except HpstageError as error:
        text = f"{type(error).__name__}: {error}"
        words = {*one.names, shown(value), f"{type(value).__name__} cannot", f"{getattr(value, '__name__', '?')} is a"}
        said = text.lower().replace("_", " ")
        return ("clear" if any(word.lower().replace("_", " ") in said for word in words) else "unnamed"), text
    except BaseException as error:
        return of_error(error)
    return ("accepted" if meaningful(one.of, one.annotations[name], name, value) else "wrong"), ""


def of_error(error: BaseException) -> tuple[str, str]:
    if isinstance(error, Hang):
        return "hang", f"{SECONDS} s"
    last = traceback.extract_tb(error.__traceback__)[-1]
    return "raw", f"{type(error).__name__}: {error!s:.120} ({Path(last.filename).name}:{last.lineno})"


def sensible(type_of: str, name: str, text: str) -> bool:
    """Whether an option of a type may be given as a text."""
    if not type_of.startswith(("int", "float")):
        return True
    kind = int if type_of.startswith("int") else float
    try:
        value = kind(text)
    except ValueError:
        return False
    return math.isfinite(value) and value >= 0


def command_outcome(command: str, name: str, option: str, type_of: str, text: str) -> tuple[str, str]:
    from hpstage.cli.app import main

    stopped(command)
    base = commands()[command]
    words = [*base, f"{option}={text}"] if option else [text, *base[1:]]
    errors, output = io.StringIO(), io.StringIO()
    status: object = 0
    before = sys.argv
    sys.argv = ["hpstage", command, *words]
    try:
        with limited(SECONDS), contextlib.redirect_stderr(errors), contextlib.redirect_stdout(output):
            main()
    except Reached:
        pass
    except SystemExit as left:
        status = left.code
    except BaseException as error:
        return of_error(error)
    finally:
        sys.argv = before
    lines = errors.getvalue() or output.getvalue()
    if "Traceback (most" in lines:
        return "raw", " | ".join(lines.strip().splitlines()[-3:])
    if status:
        word = (option or name).lstrip("-").replace("-", "_")
        named = word in lines.replace("-", "_") or (text and (text in lines or clean(text) in lines))
        return ("clear" if named or not option else "unnamed"), lines.strip()[-300:]
    return ("accepted" if sensible(type_of, name, text) else "wrong"), ""


Row = tuple[str, str, str, str, str]
"""Callable, argument, value, outcome, what was said."""


def of_one(task: tuple[str, str, int]) -> list[Row]:
    """Call with all values of one argument, in a process of the pool."""
    where, name, every = task
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    import logging
    import warnings

    logging.disable()
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        if where.startswith("hpstage "):
            command = where.split()[1]
            option, type_of = next(rest for one, *rest in options_of(command) if one == name)
            return [
                (where, name, ascii(text), *command_outcome(command, name, option, type_of, text))
                for text in TEXTS[len(name) % every :: every]
            ]
        one = next(each for each in subjects() if each.name == where)
        picked = list(VALUES.items())[len(name) % every :: every]
        return [(where, name, label, *outcome(one, name, value)) for label, value in picked]


def tasks(only: str, every: int) -> list[tuple[str, str, int]]:
    found = [(one.name, name, every) for one in subjects() for name in one.names]
    for command in (*("plan", "run", "check", "audit", "gc", "status", "tree", "report", "logs", "export"), "deploy"):
        found += [(f"hpstage {command}", name, every) for name, *_ in options_of(command)]
    for command in ("scheduler", "worker"):
        found += [(f"hpstage {command}", name, every) for name, *_ in options_of(command)]
    return [task for task in found if only in f"{task[0]} {task[1]}"]


def table(rows: list[Row]) -> str:
    """Return the counts by outcome per callable."""
    counts: dict[str, Counter[str]] = {}
    for where, _, _, how, _ in rows:
        counts.setdefault(where, Counter())[how] += 1
    counts["all"] = Counter(row[3] for row in rows)
    lines = [f"{'':<34}{'inputs':>8}" + "".join(f"{how:>10}" for how in OUTCOMES)]
    for where, of in counts.items():
        lines.append(f"{where:<34}{of.total():>8,}" + "".join(f"{of[how]:>10,}" for how in OUTCOMES))
    return "\n".join(lines)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--only", default="", help="callables and arguments whose names hold this")
    parser.add_argument("--every", type=int, default=1, help="try every N-th value only")
    options = parser.parse_args()
    rows: list[Row] = []
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        given = tasks(options.only, options.every)
        for task, waiting in [(task, pool.apply_async(of_one, (task,))) for task in given]:
            try:
                rows += waiting.get(timeout=SECONDS * len(VALUES))
            except multiprocessing.TimeoutError:
                rows.append((task[0], task[1], "?", "hang", "the process does not answer"))
    print(table(rows))
    bad = [row for row in rows if row[3] not in ("clear", "accepted")]
    for (where, name, how), count in Counter((row[0], row[1], row[3]) for row in bad).items():
        _, _, value, _, said = next(row for row in bad if (row[0], row[1], row[3]) == (where, name, how))
        print(f"{count:4} {how}: {where}({name}={value}) {said!a}")
    write(options, rows)
    sys.exit(bool(bad))


if __name__ == "__main__":
    main()
