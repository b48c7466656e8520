"""The likely cause of a difference and its remedy, derived from what differs and in which way of training."""

from __future__ import annotations

import builtins
import sys
from collections.abc import Iterator, Sequence
from itertools import pairwise
from types import CodeType, FunctionType, ModuleType
from typing import Any, Literal

from hpstage.checking import ways
from hpstage.checking.comparing import METRIC, WORKLOAD, Apart
from hpstage.execution.snapshot import GENERATOR, SETTING, STATE, THREADS
from hpstage.training.capture.stateless import LOCAL, excluding
from hpstage.training.code.bytecode import inner, operations_of, references
from hpstage.training.code.graph import functions_reached
from hpstage.training.pickles import REMEDY

Style = Literal["torch", "function", "object"]

_KEEP = {
    "torch": "keep it on the trainable, in the model or in an object that they reach, so that it is captured, or "
    "return it in extra_state() and restore it in load_extra_state(); or make it a function of the step",
    "function": "keep it in an attached object (run.attach(...)), or make it a function of the step",
    "object": "return it in state_dict() and restore it in load_state_dict(), or make it a function of the step",
}
_NAMELESS = STATE, GENERATOR, SETTING, THREADS, METRIC, WORKLOAD
_PICKLE = "bytes b'\\x80", 'bytes b"\\x80'
_DRAWS = (
    "draw from the global generators (random, numpy.random, torch), which hpstage keys from the seed and the step, or "
    "seed a generator of your own from hp['seed']; pass other inputs as hyperparameters or attributes"
)

_NAMED = 5
_SUSPECT = frozenset(
    (
        *("id", "hash", "open", "glob.glob", "os.environ", "os.getenv", "platform.node", "random.SystemRandom"),
        *("posix.getpid", "posix.getppid", "posix.urandom", "posix.listdir", "posix.scandir"),
        "torch.random.seed",
    )
)
_OF_SUSPECTS = frozenset(
    (
        *("time", "datetime", "secrets", "uuid", "threading", "multiprocessing", "concurrent"),
        *("subprocess", "socket", "tempfile"),
    )
)
_SEEDED = ("default_rng", "Random", "RandomState", "SeedSequence")


def cause_of(way: str, apart: Apart, style: Style, hashes: bool, suspected: Sequence[str]) -> tuple[str, str]:
    """Return cause and remedy, one sentence each.

    Args:
        hashes: whether processes agree under the same PYTHONHASHSEED.
        suspected: the user's code that names values which differ between processes.
    """
    of_path = _by_path(way, apart, style)
    if of_path is not None:
        return of_path
    cause, remedy = _by_way(way, apart, style, hashes)
    if suspected and way in (ways.AGAIN, ways.ELSEWHERE, ways.OTHER, ways.OTHER_FORK, ways.DISK):
        cause += f" ({'; '.join(suspected[:4])}{'; ...' if len(suspected) > 4 else ''})"
    return cause, remedy


def _by_path(way: str, apart: Apart, style: Style) -> tuple[str, str] | None:
    path = apart.path
    if path == THREADS:
        return (
            "your code sets torch's number of threads, for the whole process; hpstage keeps it at one, since the order "
            "of sums depends on it",
            "leave torch.set_num_threads() out",
        )
    if path.startswith(SETTING):
        return (
            "your code changes a setting of the whole process, which other trials on the same worker then use, too",
            "change it where the module is imported, so that it applies to all training, or restore it",
        )
    if path.startswith(LOCAL) and way not in (ways.AGAIN, ways.THREADS):
        return (
            "local variables are in no state: a fork runs the function again, up to its loop, and continues with the "
            "values that they have there",
            _KEEP[style] + _unless(apart),
        )
    if path.startswith(STATE) and apart.straight.startswith(_PICKLE) and apart.found.startswith(_PICKLE):
        cause, _, remedy = REMEDY.partition(": ")
        return cause, remedy
    if path.startswith(WORKLOAD) and apart.computed:
        names = ", ".join(apart.computed[:_NAMED]) + (", ..." if len(apart.computed) > _NAMED else "")
        return (
            f"{names}: made where the trainable is imported or created, with another value each time, so that a later "
            f"search could not use any state of this one",
            f"seed the generators at the start of the script: `{_seeds()}`. If it still differs, it depends on a "
            f"clock, a file or the order of a set: make it the same each time, or make it where each trial begins "
            f"(model(), setup(), the function)",
        )
    if path.startswith(WORKLOAD) and way != ways.THREADS:
        return (
            "the trainable's data, code or attributes are not the same in every process, so that workers would not "
            "agree",
            "make them the same everywhere: give the generator that makes or splits data a fixed seed, sort the items "
            "of a set, or set data_version or version",
        )
    if path.startswith(METRIC) and way == ways.AGAIN:
        return (
            "the states are the same, but evaluate() returns other metrics in every process",
            f"{_DRAWS}; name a metric that also measures the machine, such as a latency, in `noisy`",
        )
    if path.startswith(METRIC) and way == ways.EVALUATED:
        return (
            "what evaluate() returns depends on how often it was called",
            "keep nothing in evaluate(), or let training compute it",
        )
    if path.startswith(METRIC) and way not in (ways.AGAIN, ways.THREADS):
        return (
            "the states are the same, but evaluate() returns other metrics: it uses something that is in no state",
            _KEEP[style],
        )
    return None


def _by_way(way: str, apart: Apart, style: Style, hashes: bool) -> tuple[str, str]:
    path = apart.path
    if way == ways.AGAIN:
        if hashes:
            return (
                "the order of a set or hash() of a string, which differs in every process, or the host's name: "
                "processes that are given the same PYTHONHASHSEED and HOSTNAME agree",
                "sort the items of a set, use a digest (zlib.crc32) instead of hash(), and do not use the host's name",
            )
        when = "setting up gives" if apart.step == 0 else "a step gives"
        what = "it draws random numbers another number of times, which" if path.startswith(GENERATOR) else "it"
        return (
            f"{when} something else in every process: {what} depends on the time, on the process or an address (id()), "
            f"on entropy (os.urandom, secrets, a generator without a seed), on a concurrent thread, on a "
            f"file, or on a variable of the environment",
            _DRAWS + _unless(apart),
        )
    if way == ways.THREADS:
        return (
            "a library computes with another number of threads, which hpstage could not pin",
            "set its number of threads to one where the module is imported, or leave the library out of training",
        )
    if way == ways.MEMORY:
        return _of_forks(apart, style)
    if way == ways.DISK:
        return (
            "a checkpoint restores plain values, and tensors and arrays with their dtype, strides and content; the "
            "state contains other objects",
            "let state_dict() return such values alone, and make all other objects again in load_state_dict()",
        )
    if way == ways.ELSEWHERE:
        return (
            "training depends on something that is in the process, but in no state: a cache, the environment, a file, "
            "an object of a library",
            _KEEP[style] + _unless(apart),
        )
    if way in (ways.OTHER, ways.OTHER_FORK):
        return (
            "a trial that was trained before in the same process has left something behind: a cache, the environment, "
            "a file, an object of a library",
            "make it where each trial begins (model(), setup(), the beginning of the function), or clear it there",
        )
    if way == ways.EVALUATED:
        return (
            "evaluating changes what training continues from",
            "restore everything that evaluate() changes, or work on a copy",
        )
    return "taking a state changes what training continues from", "let state_dict() change nothing"


def _of_forks(apart: Apart, style: Style) -> tuple[str, str]:
    """Return cause and remedy for something that training changes and the state does not hold, or not correctly."""
    forms = _form(apart.straight), _form(apart.found)
    if style == "object" and all(forms) and forms[0] != forms[1]:
        return (
            "load_state_dict() restores it in another form (dtype, shape, strides)",
            "save and restore tensors unchanged: torch's Optimizer.load_state_dict() casts to the dtype of weights",
        )
    if style == "object" and apart.loaded:
        return (
            "right after loading, it differs from when the state was saved: state_dict() leaves it out or returns "
            "something old, or load_state_dict() does not restore it",
            _KEEP[style] + _unless(apart),
        )
    if apart.path.startswith(GENERATOR):
        return (
            "the step draws random numbers a different number of times than straight through: it depends on something "
            "that is in no state",
            _KEEP[style],
        )
    return (
        "something that training changes is in no state: straight through it keeps its value, and a fork begins "
        "without it",
        _KEEP[style] + _unless(apart),
    )


def _seeds() -> str:
    """Return the line that seeds the global generators of the imported libraries."""
    seeds = {"random": "random.seed(0)", "numpy": "numpy.random.seed(0)", "torch": "torch.manual_seed(0)"}
    here = [name for name in seeds if name in sys.modules]
    return f"import {', '.join(here)}; {'; '.join(seeds[name] for name in here)}"


def _unless(apart: Apart) -> str:
    named = [path for path in (apart.path, *apart.causes) if not path.startswith(_NAMELESS)]
    return f"; {excluding(*named)}" if named else ""


def _form(text: str) -> str:
    """Return the string for a tensor or array without the values; nothing for another object."""
    return text.rpartition(" ")[0] if "[" in text and not text.startswith("->") else ""


def suspects(subject: object) -> list[str]:
    """List the user's functions that name values which differ between processes (the time, entropy, addresses), as
    ``Digits.loss (search.py, line 12) names time.time``."""
    root = subject if isinstance(subject, FunctionType) else type(subject)
    found: dict[str, None] = {}
    for function in functions_reached(root):
        code = function.__code__
        place = f"{function.__qualname__} ({code.co_filename.rpartition('/')[2]}, line {code.co_firstlineno})"
        for maker in unseeded(code):
            found[f"{place} calls {maker}() without a seed"] = None
        named = references(code, {**vars(builtins), **function.__globals__}, {}, is_open=lambda module: True).named
        for name in named:
            if _is_suspect(name.content, name.path):
                found[f"{place} names {name.path}"] = None
    return list(found)


def unseeded(code: CodeType) -> Iterator[str]:
    """Yield the names of random generators that a code object, or one nested in it, creates without a seed."""
    for part in inner(code):
        for made, call in pairwise(operations_of(part)):
            if made.argval in _SEEDED and call.opname == "CALL" and call.arg == 0:
                yield made.argval


def _is_suspect(content: Any, path: str) -> bool:
    """Return whether an object is suspect by its origin or, if it has no name of its own, by its path."""
    if isinstance(content, ModuleType):
        return content.__name__ in _OF_SUSPECTS
    owner = getattr(content, "__module__", None) or ""
    name = f"{owner}.{getattr(content, '__qualname__', '')}".removeprefix("builtins.")
    return path in _SUSPECT or name in _SUSPECT or owner.partition(".")[0] in _OF_SUSPECTS
