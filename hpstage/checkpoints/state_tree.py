"""The state tree: which states can be captured, and their structure as plain JSON.

A state is a tree of ``dict``, ``OrderedDict``, ``list``, ``tuple``, ``None``, ``bool``, ``int``, ``float``, ``str``,
``bytes``, ``torch.Tensor``, ``torch.Size``, ``numpy.ndarray``, numpy scalars and ``jax.Array`` (keys of random numbers
included), exactly of these types. It is restored with the same types, dtypes, shapes, values and order, with two
exceptions: ``nn.Parameter`` becomes a plain tensor, and shared memory is no longer shared. Anything else raises
:class:`StateError` with the path to it.

In the structure ``None``, ``bool``, ``str`` and 64-bit ``int`` represent themselves, everything else is ``[tag, ...]``.
"""

from __future__ import annotations

import struct
from collections import OrderedDict
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import msgspec
import xxhash

from hpstage.checkpoints import jax_arrays, leaves
from hpstage.checkpoints.leaves import Leaf
from hpstage.errors import StateError

# A node of the structure: JSON, as Python values.
Node = Any

# Far above any real state, far below Python's recursion limit; a state that contains itself reaches it.
MAX_DEPTH = 100
NOTHING: Mapping[int, Any] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class FlatState:
    """A flattened state: its structure, and its leaves with their values (not copied)."""

    tree: Node
    leaves: tuple[Leaf, ...]
    values: tuple[Any, ...]

    @property
    def nbytes(self) -> int:
        """The size of a copy in bytes: the leaves, and the structure as JSON."""
        return sum(leaf.nbytes for leaf in self.leaves) + len(msgspec.json.encode(self.tree))

    def copy(self, into: Room | None = None, known: Mapping[int, Any] = NOTHING) -> FlatState:
        """Return a deep copy, still flat.

        Args:
            into: memory of :meth:`room` for such a state; it then belongs to the copy.
            known: by number, values with the same bytes that nobody modifies, which are used as they are.
        """
        rooms = [None] * len(self.leaves) if into is None or into.leaves != self.leaves else into.values
        parts = zip(self.leaves, self.values, rooms, strict=True)
        values = [known[index] if index in known else leaves.copy(*part) for index, part in enumerate(parts)]
        return FlatState(self.tree, self.leaves, tuple(values))

    def same_in(self, other: Mapping[str, tuple[Leaf, Any]]) -> dict[int, Any]:
        """Return, by number, the values in another state that have the same bytes; ``other``: its leaves by name."""
        found = ((index, other.get(leaf.name)) for index, leaf in enumerate(self.leaves))
        candidates = [(index, one[1]) for index, one in found if one is not None and one[0] == self.leaves[index]]
        same = leaves.same((self.leaves[index], self.values[index], value) for index, value in candidates)
        return {index: value for (index, value), is_same in zip(candidates, same, strict=True) if is_same}

    def state(self) -> object:
        """Return the state as a tree, with these values."""
        return unflatten(self.tree, self.values)

    def room(self, known: Container[int] = ()) -> Room:
        """Return memory for a copy of such a state without the leaves ``known``. The memory was written to once, which
        takes several times as long as copying."""
        parts = enumerate(zip(self.leaves, self.values, strict=True))
        return Room(self.leaves, tuple(None if index in known else leaves.room(*part) for index, part in parts))


@dataclass(frozen=True, slots=True)
class Room:
    """Memory for a copy of a state with these leaves."""

    leaves: tuple[Leaf, ...]
    values: tuple[Any, ...]


def flatten(state: object) -> FlatState:
    """Flatten a state. Raises :class:`StateError` with the path to anything that cannot be captured."""
    flattener = _Flattener()
    tree = flattener.encode(state)
    return FlatState(tree=tree, leaves=tuple(flattener.leaves), values=tuple(flattener.values))


def unflatten(tree: Node, values: Sequence[Any], join: Callable[[Any, Any], Any] = jax_arrays.join) -> object:
    """Rebuild a state. Raises an error of any type for an invalid structure.

    Args:
        join: creates a JAX array from its description and a NumPy array of its bytes.
    """
    if not isinstance(tree, list):
        if isinstance(tree, (dict, float)):
            raise ValueError(f"{type(tree).__name__} in the structure")
        return tree
    tag, *rest = tree
    if tag == "leaf":
        return values[rest[0]]
    if tag == "float":
        return struct.unpack(">d", bytes.fromhex(rest[0]))[0]
    if tag == "list":
        return [unflatten(node, values, join) for node in rest[0]]
    if tag == "tuple":
        return tuple(unflatten(node, values, join) for node in rest[0])
    if tag == "dict":
        return {unflatten(key, values, join): unflatten(value, values, join) for key, value in rest[0]}
    if tag == "odict":
        ordered = OrderedDict((unflatten(key, values, join), unflatten(value, values, join)) for key, value in rest[0])
        vars(ordered).update({name: unflatten(value, values, join) for name, value in rest[1]})
        return ordered
    if tag == "size":
        import torch

        return torch.Size(rest[0])
    if tag == "int":
        return int(rest[0], 16)
    if tag == "str":
        return bytes.fromhex(rest[0]).decode("utf-8", "surrogatepass")
    if tag == "scalar":
        return leaves.make_numpy_scalar(rest[0], bytes.fromhex(rest[1]))
    if tag == "jax":
        return join(rest[0], unflatten(rest[1], values, join))
    raise ValueError(f"unknown tag {tag!r} in the structure")


def digest(state: object) -> str:
    """Return the xxh3_128 of types, structure, dtypes, shapes and bytes: 32 hex digits, equal for equal states.

    Independent of devices, gradients, shared memory and the order of dicts.
    """
    return summary(state)[0]


MARKS = 64


def marks_of(contents: Sequence[str]) -> str:
    """Return four hex digits per leaf, or per group of neighbouring leaves if there are more than :data:`MARKS`. They
    allow comparing two states with the same key when the first is gone. ``contents``: the xxh3_128 of each leaf's
    bytes."""
    size = -(-len(contents) // MARKS) or 1
    groups = [contents[start : start + size] for start in range(0, len(contents), size)]
    return "".join(xxhash.xxh3_64_hexdigest("".join(group).encode())[:4] for group in groups)


def differing(one: str, other: str, names: Sequence[str]) -> str | None:
    """Return the leaf, or the first and last of some neighbours, whose marks differ; ``None`` if all are equal, or if
    the leaves are not the same."""
    size = -(-len(names) // MARKS) or 1
    if len(one) != len(other):
        return None
    for index in range(0, len(one), 4):
        if one[index : index + 4] != other[index : index + 4]:
            group = names[index // 4 * size : (index // 4 + 1) * size]
            return group[0] if len(group) == 1 else f"one of {group[0]} to {group[-1]}"
    return None


def summary(state: object) -> tuple[str, str]:
    """Return digest and marks of a state."""
    return summary_of(flatten(state))


def summary_of(flat: FlatState) -> tuple[str, str]:
    """Return digest and marks of a flattened state."""
    contents = contents_of(flat)
    return digest_of(flat, contents), marks_of(contents)


def contents_of(flat: FlatState) -> tuple[str, ...]:
    """Return the xxh3_128 of each leaf's bytes."""
    return tuple(map(leaves.hash_of, flat.leaves, flat.values))


def digest_of(flat: FlatState, contents: Sequence[str]) -> str:
    """Return the digest of a state from the xxh3_128 of each leaf's bytes."""
    marks = [["leaf", f.kind, f.dtype, f.shape, f.strides, c] for f, c in zip(flat.leaves, contents, strict=True)]
    return xxhash.xxh3_128_hexdigest(msgspec.json.encode(_canonical(flat.tree, marks)))


def clone(state: object) -> object:
    """Return a deep copy: tensors and arrays own their memory, on their original device, without gradient."""
    return flatten(state).copy().state()


def reread(state: object) -> object:
    """Return the state as it would be restored from a checkpoint: a copy on the CPU, serialized and deserialized."""
    flat = flatten(state)
    tree = msgspec.json.decode(msgspec.json.encode(flat.tree))
    return unflatten(tree, [leaves.reread(leaf, value) for leaf, value in zip(flat.leaves, flat.values, strict=True)])


def nbytes(state: object) -> int:
    """Return the bytes that a copy of the state takes: its leaves, and its structure as JSON."""
    return flatten(state).nbytes


class _Flattener:
    def __init__(self) -> None:
        self.leaves: list[Leaf] = []
        self.values: list[Any] = []
        self._path: list[object] = []
        # Reserved for the header's metadata entry in a safetensors file.
        self._names = {"__metadata__"}

    def encode(self, value: Any) -> Node:
        scalar, node = _encode_scalar(value)
        if scalar:
            return node
        if len(self._path) > MAX_DEPTH:
            raise StateError(f"{self._where()} is nested more than {MAX_DEPTH} deep, or contains itself")
        kind = type(value)
        if kind is dict:
            return ["dict", self._encode_items(value)]
        if kind is list or kind is tuple:
            return [kind.__name__, [self._encode_at(index, item) for index, item in enumerate(value)]]
        if kind is OrderedDict:
            # torch stores the versions of modules in an attribute of their state_dict().
            return ["odict", self._encode_items(value), self._encode_items(vars(value))]
        if leaves.is_torch_size(value):
            return ["size", list(value)]
        return self._encode_leaf(value)

    def _encode_items(self, mapping: dict[object, object]) -> Node:
        return [[self._encode_key(key), self._encode_at(key, value)] for key, value in mapping.items()]

    def _encode_at(self, key: object, value: object) -> Node:
        # Not undone if an error is raised, so that the path shows where it happened.
        self._path.append(key)
        node = self.encode(value)
        self._path.pop()
        return node

    def _encode_key(self, key: object) -> Node:
        scalar, node = _encode_scalar(key)
        if scalar:
            return node
        if type(key) is tuple:
            return ["tuple", [self._encode_key(item) for item in key]]
        raise StateError(
            f"{self._where()} has a key of type {type(key).__name__}; keys can be str, int, float, bool, "
            "None and tuples of these; convert it in state_dict()"
        )

    def _encode_leaf(self, value: object) -> Node:
        scalar = leaves.numpy_scalar(value)
        if scalar is not None:
            return ["scalar", scalar[0], scalar[1].hex()]
        if jax_arrays.is_array(value):
            parts = jax_arrays.split(value)
            if isinstance(parts, str):
                raise StateError(f"{self._where()} {parts}; convert it in state_dict()")
            return ["jax", list(parts[0]), self._encode_leaf(parts[1])]
        leaf = leaves.describe(self._name(), value)
        if isinstance(leaf, Leaf):
            self.leaves.append(leaf)
            self.values.append(value)
            self._names.add(leaf.name)
            return ["leaf", len(self.leaves) - 1]
        reason = f"is a {type(value).__name__}" if leaf is None else leaf
        raise StateError(f"{self._where()} {reason}; convert it in state_dict()")

    def _where(self) -> str:
        steps = [f"[{key!r}]" for key in self._path]
        if len(steps) > 12:
            steps[6:-6] = ["..."]
        return "state" + "".join(steps)

    def _name(self) -> str:
        """Return a unique, readable name: two paths may look the same (``1`` and ``"1"``)."""
        name = ".".join(map(str, self._path)).encode("utf-8", "replace").decode() or "state"
        while name in self._names:
            name += "'"
        return name


def _encode_scalar(value: Any) -> tuple[bool, Node]:
    """Return whether ``value`` is a built-in scalar, and its node."""
    kind = type(value)
    if kind is str:
        try:
            value.encode()
        except UnicodeEncodeError:
            return True, ["str", value.encode("utf-8", "surrogatepass").hex()]
        return True, value
    if value is None or kind is bool:
        return True, value
    if kind is int:
        return True, value if -(2**63) <= value < 2**63 else ["int", hex(value)]
    if kind is float:
        # The bits: exact for NaN with its payload, infinities and -0.0.
        return True, ["float", struct.pack(">d", value).hex()]
    return False, None


def _canonical(tree: Node, marks: Sequence[Node]) -> Node:
    """Return the structure with its dicts sorted by their encoded keys and its leaves replaced by ``marks``."""
    if not isinstance(tree, list):
        return tree
    tag, *rest = tree
    if tag == "leaf":
        return marks[rest[0]]
    if tag in ("list", "tuple"):
        return [tag, [_canonical(node, marks) for node in rest[0]]]
    if tag == "jax":
        return [tag, rest[0], _canonical(rest[1], marks)]
    if tag in ("dict", "odict"):
        ordered = [sorted(items, key=lambda item: msgspec.json.encode(item[0])) for items in rest]
        return [tag, *([[key, _canonical(node, marks)] for key, node in items] for items in ordered)]
    return tree
