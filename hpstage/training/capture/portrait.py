"""Short strings that describe the contents of objects, equal in every process, by which two runs are compared."""

from __future__ import annotations

import enum
import re
import types
from collections.abc import Collection, Iterator
from typing import Any

import xxhash

from hpstage.checkpoints import jax_arrays, leaves
from hpstage.checkpoints.state_tree import digest
from hpstage.errors import StateError
from hpstage.training.capture.kind import is_atom, numpy, torch
from hpstage.training.capture.kinds import FOREIGN, VALUES, kind_of
from hpstage.training.capture.pointees import Address
from hpstage.training.capture.stateless import LOCAL, root_of, unmarked
from hpstage.training.capture.survey import Record, Survey, plainly
from hpstage.training.capture.values import cannot_change, is_tensor
from hpstage.training.code.namespaces import MISSING, ClassAttributes
from hpstage.training.code.owner import is_users_code, module_of
from hpstage.training.identity.settings import NEXT_HOOK

_LONGEST = 120
_ADDRESS = re.compile(r"\bat 0x[0-9a-f]+")
_CLASS = ".__class__"
GENERATOR = "a random generator at "
"""Prefix of the string for a random generator."""
_IDLE = ".defaults['differentiable']"
"""Attributes of a user's optimizer that torch sets when a state is loaded, and that no step reads."""


def texts_of(record: Record, survey: Survey) -> Iterator[tuple[str, str]]:
    """Yield paths, and strings that describe what a record holds: for tensors and arrays their form and a digest; for
    attributes and dicts with string keys one string per entry, in any order (torch's optimizers change it on loading).
    """
    if record.kind is VALUES:
        yield record.path, values_text(record.obj)
    elif record.kind.name == "storage":
        yield record.path, values_text(record.content)
    elif record.kind.name == "random state":
        yield record.path, GENERATOR + digest(record.content)[:16]
    elif record.kind.name == "settings":
        # Registered hooks show their numbers elsewhere; the number of the next one also counts removed hooks.
        settings = {name: value for name, value in record.content.items() if name != NEXT_HOOK}
        yield from _named(record.path, settings, survey)
    elif record.kind.name == "attributes":
        if _is_of_a_library(record.of):
            yield record.path + _CLASS, f"{module_of(record.of)}.{record.of.__qualname__}"
        yield from _named(record.path, record.content, survey)
    elif record.kind.name in ("items", "mapping"):
        items, own = record.content
        if record.kind.name == "mapping" and all(type(name) is str for name in items):
            yield from _labelled({f"{record.path}[{name!r}]": value for name, value in items.items()}, survey)
        else:
            yield record.path, _short(_entry(items, survey))
        yield from _named(record.path, own, survey)
    elif record.kind.name == "registrations":
        return  # another process may have imported other modules
    elif record.kind is FOREIGN and isinstance(record.content[1], Address):
        yield record.path, "an address"
    elif record.kind is FOREIGN:
        yield record.path, _short(_entry(record.content[:2], survey))
    elif record.content is not MISSING:  # omit unbound names
        yield record.path, _short(_entry(record.content, survey))


def _is_of_a_library(kind: type) -> bool:
    """Return whether a class belongs to a library whose objects get more attributes when they are used.

    Objects of torch have all attributes from the start, except optimizers, which record there that they have warned."""
    if kind is ClassAttributes or is_users_code(kind):
        return False
    library = module_of(kind).partition(".")[0]
    return library not in ("torch", "hpstage") or (library == "torch" and issubclass(kind, torch().optim.Optimizer))


def _named(path: str, items: dict[str, Any], survey: Survey) -> Iterator[tuple[str, str]]:
    yield from _labelled({f"{path}.{name}": value for name, value in items.items()}, survey)


def _labelled(items: dict[str, Any], survey: Survey) -> Iterator[tuple[str, str]]:
    for path, value in items.items():
        if survey.path_of(value) != path and not path.endswith(_IDLE):
            yield path, _short(_entry(value, survey))


def _short(text: str) -> str:
    if len(text) <= _LONGEST:
        return text
    return f"{text[:60]}... ({xxhash.xxh3_128_hexdigest(text.encode('utf-8', 'backslashreplace'))[:16]})"


def values_text(obj: Any) -> str:
    """Describe a tensor or array by its form and a digest of its values, or by the value if there is only one."""
    with plainly():
        try:
            content = "in a file" if not is_tensor(obj) and cannot_change(obj) else digest(obj)[:16]
        except StateError:
            content = "?"
        if is_tensor(obj):
            if not obj.is_nested and obj.numel() == 1 and obj.layout is torch().strided and not obj.is_meta:
                content = repr(obj.detach().cpu().reshape(-1)[0].item())
            form = [str(obj.dtype).removeprefix("torch."), "nested" if obj.is_nested else str(list(obj.shape))]
            if obj.layout is torch().strided and not obj.is_nested and not obj.is_contiguous():
                form.append(f"strides {list(obj.stride())}")
            if obj.requires_grad:
                form.append("requires_grad")
            return f"{' '.join(form)} {content}"
        order = "" if obj.flags.c_contiguous else f"strides {list(obj.strides)} "
        return f"{obj.dtype.str} {list(obj.shape)} {order}{'' if obj.flags.writeable else 'read-only '}{content}"


def state_texts(path: str, value: Any) -> Iterator[tuple[str, str]]:
    """Yield paths and strings for the leaves of a state."""
    if isinstance(value, dict):
        yield path, f"keys {', '.join(sorted(map(repr, value)))}"
        for key, item in value.items():
            yield from state_texts(f"{path}[{key!r}]", item)
    elif isinstance(value, list | tuple):
        yield path, f"{type(value).__name__} of {len(value)}"
        for index, item in enumerate(value):
            yield from state_texts(f"{path}[{index}]", item)
    elif not isinstance(value, bytes) and isinstance(leaves.describe("", value), leaves.Leaf):
        yield path, values_text(value).replace(" requires_grad", "")
    elif jax_arrays.is_array(value):
        yield path, f"{value.dtype} array of JAX {value.shape} {digest(value)}"
    else:
        plain = isinstance(value, str | int | float | None)
        yield path, _short(repr(value) if plain else f"{type(value).__name__} {value!r}")


def text_of(value: Any, survey: Survey) -> str:
    """Describe a value held by an object."""
    return values_text(value) if kind_of(value) is VALUES else _short(_entry(value, survey))


def _entry(value: Any, survey: Survey) -> str:
    if value is MISSING:
        return "nothing"
    if isinstance(value, enum.Enum):
        return f"{type(value).__qualname__}.{value.name}"
    if value is None or isinstance(value, bool | int | float | complex | str | bytes):
        return repr(value)
    path = survey.path_of(value)
    if path is not None:
        return f"-> {path}"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_entry(k, survey)}: {_entry(v, survey)}" for k, v in value.items()) + "}"
    if isinstance(value, tuple | list):
        return "(" + ", ".join(_entry(item, survey) for item in value) + ")"
    if isinstance(value, set | frozenset):
        return "{" + ", ".join(sorted(_entry(item, survey) for item in value)) + "}"
    if isinstance(value, types.MethodType):
        called = value.__func__
        name = called.__name__ if isinstance(called, types.FunctionType) else f"({_entry(called, survey)})"
        return f"{_entry(value.__self__, survey)}.{name}"
    if isinstance(value, types.MethodWrapperType):
        return f"{_entry(value.__self__, survey)}.{value.__name__}"
    if isinstance(value, (type, types.FunctionType, types.BuiltinFunctionType, type(numpy().mean))):
        return f"{value.__module__}.{value.__qualname__}"
    if isinstance(value, numpy().generic):
        return repr(value)
    if is_atom(value) and not _ADDRESS.search(text := repr(value)):
        return text
    return f"a {type(value).__qualname__}"


Difference = tuple[str, str, str]
"""A path, and the strings for it of the two runs."""


_CONSEQUENCES = ("model", "optimizer", "the state")


def by_likely_cause(
    straight: dict[str, str],
    forked: dict[str, str],
    *,
    suspected: Collection[str] = (),
    from_the_start: Collection[str] = (),
    answered: bool = False,
) -> list[Difference]:
    """Return all differences, with likely causes before their consequences.

    Args:
        suspected: paths that are the cause if they differ at all.
        from_the_start: paths that already differed right after the state was loaded.
        answered: see :func:`differences`.
    """
    return sorted(
        differences(straight, forked, suspected=suspected, answered=answered),
        key=lambda found: (found[0] not in suspected, found[0] not in from_the_start, rank(found[0])),
    )


def differences(
    straight: dict[str, str], forked: dict[str, str], *, suspected: Collection[str] = (), answered: bool = False
) -> Iterator[Difference]:
    """Yield all differences in the order in which they were met.

    Local variables that a fork has not set are ignored: they hold what was reported earlier, and code that reads them
    would fail in the fork.

    Args:
        suspected: paths that are not ignored because of ``answered``.
        answered: whether the user defines the state. Then attributes that a library sets on its objects (scikit-learn's
            ``n_features_in_``) are ignored in the same way.
    """
    for path in [*straight, *(path for path in forked if path not in straight)]:
        here, there = straight.get(path, "absent"), forked.get(path, "absent")
        if here == there:
            continue
        if path.startswith(LOCAL) and LOCAL + root_of(path) not in forked:
            continue
        of_a_library = path.rpartition(".")[0] + _CLASS in forked and not path.endswith("]")
        if answered and path not in forked and path not in suspected and of_a_library:
            continue
        yield path, here, there


def shown(path: str) -> str:
    """Return a path for display, without the marks that distinguish a variable from what it holds."""
    return unmarked(path)


def rank(path: str) -> int:
    """Return how unlikely a path is as the cause of other differences: 0 comes first."""
    if path.startswith(LOCAL):
        return 0
    return 2 if path.startswith(_CONSEQUENCES) or path.endswith(".grad") else 1


def follows(difference: Difference) -> bool:
    """Return whether a difference usually follows from another one, as differences of weights do."""
    path, here, _ = difference
    return rank(path) == 2 or "requires_grad" in here
