"""Errors about objects that no state can hold, with the reason and the remedy, and about states that no capture has
written, from a damaged or forged checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from hpstage.errors import HpstageError, StateError
from hpstage.training.capture.containers import BULK
from hpstage.training.capture.stateless import excluding, unmarked
from hpstage.training.capture.survey import Record
from hpstage.training.capture.values import is_lazy

Kinds = tuple[type, ...]


def mixed_up(path: str) -> StateError:
    return StateError(
        f"{unmarked(path)} is one of several objects of a class in a set, and cannot be identified in another process: "
        f"keep objects that training changes in a list or a dict"
    )


def unmoving(record: Record) -> StateError:
    kind, path, what = record.kind.name, record.path, _kind(record.obj)
    if kind == "modules":
        (name, *_) = (module.__name__ for module in record.read() if module not in record.content)
        return StateError(
            f"{name} was first imported in training, by a name that code computes, so it is not known what training "
            f"has changed in it: import it at the top of your module"
        )
    if kind == "iterator":
        numbered = ".default_factory" in path
        own = ", or number the keys of a defaultdict by its length: `d.default_factory = d.__len__`" if numbered else ""
        return StateError(
            f"{unmarked(path)} is a {what} that has moved on in training. No state can hold its position, so forks "
            f"would continue from another one. Make its items a function of the step, or keep a position of your "
            f"own{own}; {excluding(path)}"
        )
    if kind == "bulk":
        why = f"holds more than {BULK:,} containers, too many to know what has changed in which: use arrays"
    elif kind == "file":
        why = (
            "has been read or written in training, and no state can hold its position: open it for reading only, or "
            "where it is used"
        )
    else:
        why = "has changed in training, and no state can hold what is inside: keep plain values (numbers, tensors)"
    return StateError(f"{unmarked(path)} is a {what} that {why}; {excluding(path)}")


def based(path: str, attribute: str) -> StateError:
    return StateError(
        f"{unmarked(path)} is a view that training has made, and code reads a `{attribute}`, which no state can "
        f"restore: keep a copy of the view, or the whole that it is a part of, and take views where they are used"
    )


def of_a_graph(path: str) -> StateError:
    return StateError(
        f"{unmarked(path)} is a tensor that is part of a graph of gradients, which no state can hold: detach() it, or "
        f"take item(); {excluding(path)}"
    )


def see_depth(within: list[str]) -> None:
    """Raise :class:`StateError` if objects that training has made hold each other in a chain that is too long: a state
    is a tree, which is read and written recursively."""
    if len(within) > _DEEPEST:
        raise StateError(
            f"{unmarked(within[0])} leads to more than {_DEEPEST} objects that training has made, each held by the one "
            f"before (a linked list, a deep tree), which no state can hold: keep the objects in one list or dict, and "
            f"let them refer to each other by position or key; {excluding(within[0])}"
        )


_DEEPEST = 30  # three levels each in the state, of at most 100


def hooked(path: str) -> StateError:
    return StateError(
        f"{unmarked(path)} has been given a hook in training, which no state can hold: register hooks in model()"
    )


def unstorable(path: str, value: Any) -> StateError:
    if is_lazy(value):
        form, what = "lazy", "has been given its shape"
    else:
        layout = str(getattr(value, "layout", "")).removeprefix("torch.")
        form = f"{layout} {value.dtype}".strip().replace("torch.", "")
        what = "has changed"
    return StateError(
        f"{unmarked(path)} is a {_kind(value)} ({form}) that {what} in training, and no state can hold one: keep "
        f"ordinary tensors and arrays from which it can be made; {excluding(path)}"
    )


def made_in_training(path: str, value: object) -> StateError:
    return StateError(
        f"{unmarked(path)} holds a {_kind(value)} that training has made, and no state can hold one. Make it in "
        f"model(), in __init__() or before run.attach(), so that it exists when a fork begins, or keep plain values "
        f"(numbers, tensors, lists); {excluding(path)}"
    )


def dropped(record: Record) -> StateError:
    return StateError(
        f"{unmarked(record.path)} was a {_kind(record.obj)} that training has dropped. Its end runs your code "
        f"(`__del__`, weakref.finalize), and a fork runs that at another time: call the code in the step instead; "
        f"{excluding(record.path)}"
    )


def held_by_nothing(path: str) -> StateError:
    return StateError(
        f"{unmarked(path)} is referred to weakly, and held by nothing that training reaches. No state can hold it, "
        "since it may cease to exist at any time. Keep it in another attribute for as long as training depends on it; "
        "if training does not, name the object that refers to it in `stateless`"
    )


def _kind(value: object) -> str:
    module = type(value).__module__
    return type(value).__qualname__ if module == "builtins" else f"{module}.{type(value).__qualname__}"


@contextmanager
def cannot_be_read(what: str) -> Iterator[None]:
    """Convert errors that Python and libraries raise for unreadable parts of a state to :class:`StateError`, with
    ``what`` in its message and the error as its cause. Of the user's code, only comparisons of keys may run inside.

    Raises:
        StateError: a part cannot be read.
    """
    try:
        yield
    except (HpstageError, MemoryError):
        raise
    except Exception as error:
        raise StateError(f"{what}: {type(error).__name__}: {error}") from error


def see_form(state: Mapping[str, Any], form: Mapping[str, Kinds]) -> None:
    """Check the types of the parts of a state.

    Raises:
        StateError: a part is of another type.
    """
    for name, kinds in form.items():
        if type(state[name]) not in kinds:
            expected = " or ".join(kind.__name__ for kind in kinds)
            raise StateError(f"the state has a {type(state[name]).__name__} as its {name}, which must be a {expected}")
