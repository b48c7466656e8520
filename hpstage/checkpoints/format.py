"""The files of a checkpoint: ``state.safetensors``, ``state.json`` (structure), ``manifest.json`` (identity). A long
structure is compressed (zlib).

No pickle: whoever can write to the storage can damage a checkpoint, which is detected, but cannot run code. The tensors
file is written and read here rather than by the safetensors package, so that tensors are copied directly between their
memory and the file and hashed on the way; any reader of safetensors can open it.

The location of the files is a :class:`Place`: a folder, or a prefix of an object store. The manifest names the other
two files, so that a place without renaming can give each writer unique names (``state-<token>.safetensors``). Readers
accept any of these names, so a folder of checkpoints copied to an object store, or back, stays valid.

Leaves that several states have in common may be stored in separate checkpoints instead, called *parts*
(:mod:`hpstage.checkpoints.sharing`). The manifest names the parts. For each such leaf, the structure has the part and
the leaf's name in it.
"""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import Callable, Collection, Container, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple, Protocol

import msgspec
import xxhash

from hpstage.checkpoints import jax_arrays, leaves
from hpstage.checkpoints.leaves import Leaf
from hpstage.checkpoints.sharing import Division, key_of_part, name_in_part
from hpstage.checkpoints.state_tree import FlatState, Node, digest_of, marks_of, unflatten
from hpstage.checkpoints.store import Manifest, is_key, is_part
from hpstage.errors import CheckpointCorrupt, CheckpointForeign, StateError
from hpstage.plan.facts import StateKey

FORMAT = 2
WITH_PARTS = 3
"""Format of a checkpoint with parts."""
COMPRESSED = 4
"""Format of a checkpoint with a compressed structure, with or without parts. All others have an earlier format."""
TENSORS = "state.safetensors"
STRUCTURE = "state.json"
MANIFEST = "manifest.json"

LONGEST = 1 << 30
"""Maximum bytes of a structure or of a log."""
_SHORT = 4096
"""Structures of fewer bytes are not compressed."""
_RATIO = 64
"""Maximum ratio of a structure's length to its compressed length, so that a small file cannot fill the memory."""

_TENSORS = re.compile(r"state(-[0-9a-f]{1,64})?\.safetensors")
_STRUCTURE = re.compile(r"state(-[0-9a-f]{1,64})?\.json")
_PIECE = 1 << 20


class Sink(Protocol):
    """A file being written."""

    def write(self, content: bytes | memoryview, /) -> object: ...


class Source(Protocol):
    """A file being read from its start. ``readinto`` and ``read`` return less than requested only at its end."""

    @property
    def size(self) -> int: ...

    def readinto(self, memory: memoryview, /) -> object: ...

    def read(self, count: int, /) -> bytes: ...


class Place(Protocol):
    """The location of a checkpoint's files. All methods raise ``OSError``; ``FileNotFoundError`` if a file is
    missing."""

    def where(self, name: str) -> str:
        """Return a description of the file for messages."""

    def create(self, name: str) -> AbstractContextManager[Sink]:
        """Create a file, which is complete if the context is left without an error."""

    def open(self, name: str) -> AbstractContextManager[Source]: ...

    def manifest(self) -> bytes:
        """Read the manifest."""

    def write(self, name: str, content: bytes) -> None: ...


class _Structure(msgspec.Struct, frozen=True, omit_defaults=True):
    tree: Node
    leaves: tuple[Leaf, ...]
    elsewhere: dict[int, tuple[int, str]] = {}
    """Leaves in parts, by number: the number of the part in the manifest, and the xxh3_128 of the leaf's bytes."""


class _Sealed(msgspec.Struct, frozen=True):
    """The manifest's bytes and their checksum, so that a flipped bit in it is detected as well."""

    manifest: msgspec.Raw
    xxh3_128: str


_decode_structure = msgspec.json.Decoder(_Structure).decode
_decode_sealed = msgspec.json.Decoder(_Sealed).decode
_decode_manifest = msgspec.json.Decoder(Manifest).decode


def write(
    place: Place,
    flat: FlatState,
    *,
    key: StateKey,
    step: int,
    parent: StateKey | None,
    workload: str,
    token: str = "",
    division: Division | None = None,
) -> Manifest:
    """Write tensors and structure of a state; return the manifest that would make the checkpoint complete.

    ``token`` (hexadecimal) becomes part of the files' names. ``division``: which leaves are in parts; the parts must
    have been written before. Raises ``OSError``.
    """
    tensors, structure = (f"state-{token}.safetensors", f"state-{token}.json") if token else (TENSORS, STRUCTURE)
    placed = {} if division is None else division.parts
    header, order = _layout(flat.leaves, placed)
    whole = xxhash.xxh3_128(header)
    contents = [""] * len(flat.leaves) if division is None else [*division.contents]
    size = len(header)
    with place.create(tensors) as file:
        file.write(header)
        for index in order:
            content = leaves.content(flat.leaves[index], flat.values[index])
            if division is None:
                contents[index] = xxhash.xxh3_128_hexdigest(content)
            whole.update(content)
            file.write(content)
            size += content.nbytes
    parts = tuple(dict.fromkeys(placed.values()))
    numbers = {part: number for number, part in enumerate(parts)}
    elsewhere = {index: (numbers[part], contents[index]) for index, part in placed.items()}
    described = msgspec.json.encode(_Structure(tree=flat.tree, leaves=flat.leaves, elsewhere=elsewhere))
    if len(described) > LONGEST:
        raise StateError(
            f"the state of step {step} has {len(described):,} bytes of text besides its arrays, more than "
            f"{LONGEST:,}: keep long lists of numbers as arrays"
        )
    packed = _compressed(described)
    place.write(structure, packed)
    size += len(packed)
    whole_size = size
    if parts:
        plain = _compressed(msgspec.json.encode(_Structure(tree=flat.tree, leaves=flat.leaves)))
        whole_size = len(_layout(flat.leaves)[0]) + sum(leaf.nbytes for leaf in flat.leaves) + len(plain)
    before = WITH_PARTS if parts else FORMAT
    return Manifest(
        format=before if packed is described else COMPRESSED,
        key=key,
        step=step,
        parent=parent,
        workload=workload,
        digest=digest_of(flat, contents),
        marks=marks_of(contents),
        files={tensors: whole.hexdigest(), structure: xxhash.xxh3_128_hexdigest(packed)},
        bytes=whole_size,
        parts=parts,
        rest=size if parts else None,
    )


ReadPart = Callable[[StateKey, Collection[str]], Mapping[str, Any]]
"""Returns the named values of a part, or all, in memory to which nobody else writes. Raises
:class:`CheckpointError`."""


def read(place: Place, manifest: Manifest, read_part: ReadPart) -> tuple[object, Iterator[str]]:
    """Read a state and check every byte. Return the state, and the names that its leaves have in parts. Raises
    :class:`CheckpointCorrupt`, or ``OSError`` if a file is missing."""
    content = _read(place, manifest, read_part)
    with _understanding(place):  # such as JAX arrays that this process cannot create
        state = unflatten(content.structure.tree, content.values)
    return state, map(name_in_part, content.structure.leaves, content.contents)


def read_for_part(place: Place, manifest: Manifest) -> Mapping[str, Any]:
    """Read the values of a part by their names. Raises as :func:`read` does."""
    content = _read(place, manifest, None)
    return {leaf.name: value for leaf, value in zip(content.structure.leaves, content.values, strict=True)}


class Names(NamedTuple):
    """Names of leaves."""

    own: frozenset[str]
    in_parts: list[tuple[StateKey, str]]
    """For each leaf that is in a part: the part's key, and the leaf's name there."""


def verify(place: Place, manifest: Manifest) -> Names:
    """Check every byte of the files, but not of the parts, and that the files describe a state, without building it.
    Raises as :func:`read` does."""
    structure = _read(place, manifest, None, build=False).structure
    return Names(
        frozenset(leaf.name for leaf in structure.leaves),
        [
            (manifest.parts[number].key, name_in_part(structure.leaves[index], digest))
            for index, (number, digest) in structure.elsewhere.items()
        ],
    )


def data_files(place: Place, manifest: Manifest) -> tuple[str, str]:
    """Return the names of the tensors file and of the structure file. Raises :class:`CheckpointCorrupt`.

    Other names in a manifest are not accepted: paths must not leave the place.
    """
    tensors = [name for name in manifest.files if _TENSORS.fullmatch(name)]
    structures = [name for name in manifest.files if _STRUCTURE.fullmatch(name)]
    if len(tensors) != 1 or len(structures) != 1:
        raise CheckpointCorrupt(f"{place.where(MANIFEST)} does not name the two files of a state")
    return tensors[0], structures[0]


def encode_manifest(manifest: Manifest) -> bytes:
    """Return the content of the manifest's file, which makes the checkpoint complete."""
    content = msgspec.json.encode(manifest)
    return msgspec.json.encode(_Sealed(manifest=msgspec.Raw(content), xxh3_128=xxhash.xxh3_128_hexdigest(content)))


def decode_manifest(content: bytes, where: str) -> Manifest:
    """Decode the manifest and check its checksum. Raises :class:`CheckpointCorrupt`, which names ``where``."""
    try:
        sealed = _decode_sealed(content)
        if xxhash.xxh3_128_hexdigest(sealed.manifest) != sealed.xxh3_128:
            raise CheckpointCorrupt(f"{where} does not match its checksum")
        manifest = _decode_manifest(sealed.manifest)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CheckpointCorrupt(f"{where} is not a manifest: {error}") from error
    if manifest.format not in (FORMAT, WITH_PARTS, COMPRESSED):
        known = f"{FORMAT} to {COMPRESSED}"
        raise CheckpointCorrupt(f"{where} has format {manifest.format}; this hpstage reads formats {known}")
    if not all(is_part(part.key) and is_key(part.key) for part in manifest.parts):  # each becomes a path
        raise CheckpointCorrupt(f"{where} names a part by an invalid key")
    return manifest


def check_identity(manifest: Manifest, key: StateKey, workload: str, where: str) -> None:
    """Check that a manifest belongs to this state and workload. Raises :class:`CheckpointCorrupt` for another state,
    and :class:`CheckpointForeign` for another workload."""
    if manifest.key != key:
        raise CheckpointCorrupt(f"{where} holds the checkpoint of another state, {manifest.key}")
    if manifest.workload != workload:
        raise CheckpointForeign(f"{where} belongs to workload {manifest.workload}, not to {workload}")


def _compressed(described: bytes) -> bytes:
    """Compress a structure if it is long: the structure of many small leaves would be larger than the leaves."""
    if len(described) < _SHORT:
        return described
    packed = zlib.compress(described, 1)
    return packed if len(packed) < len(described) <= _RATIO * len(packed) else described


def _decompressed(content: bytes) -> bytes:
    reader = zlib.decompressobj()
    described = reader.decompress(content, min(_RATIO * len(content), LONGEST))
    if not reader.eof or reader.unused_data:
        raise ValueError("it is not compressed as structures are")
    return described


def _layout(parts: Sequence[Leaf], elsewhere: Container[int] = ()) -> tuple[bytes, list[int]]:
    """Return the header of the safetensors file, and the order of the leaves that are stored in it.

    Both are determined by the leaves alone, so that a reader compares a header instead of trusting it. Larger elements
    come first (as in the safetensors package), so that each tensor is aligned in the file.
    """
    stored = [leaf.stored for leaf in parts]
    there = (index for index in range(len(parts)) if index not in elsewhere)
    order = sorted(there, key=lambda index: (-stored[index][1], parts[index].name))
    entries: dict[str, Any] = {}
    offset = 0
    for index in order:
        dtype, size, shape = stored[index]
        end = offset + size * math.prod(shape)
        entries[parts[index].name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, end]}
        offset = end
    text = msgspec.json.encode(entries)
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, order


class _Content(NamedTuple):
    structure: _Structure
    values: list[Any]
    """The values of the leaves; ``None`` for those that were not built."""
    contents: list[str]
    """The xxh3_128 of each leaf's bytes."""


def _read(place: Place, manifest: Manifest, read_part: ReadPart | None, *, build: bool = True) -> _Content:
    """Check the files of a checkpoint. With ``build``, also create the values of its leaves."""
    name, described = data_files(place, manifest)
    with place.open(described) as file:
        if file.size > min(manifest.own, LONGEST):  # checked before reading
            raise CheckpointCorrupt(f"{place.where(described)} is longer than it can be")
        content = file.read(file.size)
    _check(place, described, xxhash.xxh3_128_hexdigest(content), manifest.files)
    with _understanding(place):
        structure = _decode_structure(_decompressed(content) if manifest.format == COMPRESSED else content)
        parts, elsewhere = structure.leaves, structure.elsewhere
        for leaf in parts:
            leaves.check(leaf)
        for index, (number, _) in elsewhere.items():
            _ = parts[index], manifest.parts[number]
            if min(index, number) < 0:
                raise ValueError("a negative number of a leaf")
        unflatten(structure.tree, parts, join=jax_arrays.check)
        header, order = _layout(parts, elsewhere)
    values: list[Any] = [None] * len(parts)
    contents = [""] * len(parts)
    with place.open(name) as file:
        # Checked before allocating the memory that the structure claims.
        if file.size != len(header) + sum(parts[index].nbytes for index in order):
            raise CheckpointCorrupt(f"{place.where(name)} does not have the length that its structure gives")
        if manifest.own != file.size + len(content):
            raise CheckpointCorrupt(f"{place.where(MANIFEST)} does not give the length of its files")
        if file.read(len(header)) != header:
            raise CheckpointCorrupt(f"{place.where(name)} does not have the header that its structure gives")
        whole = xxhash.xxh3_128(header)
        for index in order:
            own = xxhash.xxh3_128()
            for piece in _pieces(file, index, parts[index], values if build else None):
                own.update(piece)
                whole.update(piece)
            contents[index] = own.hexdigest()
    _check(place, name, whole.hexdigest(), manifest.files)
    for index, (_, digest) in elsewhere.items():
        contents[index] = digest
    if build and read_part is not None:
        _fill_from_parts(place, structure, manifest, values, read_part)
    with _understanding(place):
        if digest_of(FlatState(structure.tree, parts, ()), contents) != manifest.digest:
            raise ValueError("its digest is not that of the manifest")
        if is_part(manifest.key):
            _check_part(manifest, parts, contents)
    return _Content(structure, values, contents)


def _fill_from_parts(
    place: Place, structure: _Structure, manifest: Manifest, values: list[Any], read_part: ReadPart
) -> None:
    """Set the values of the leaves that are in parts. No two leaves share memory."""
    used: set[tuple[int, str]] = set()
    names = {index: name_in_part(structure.leaves[index], digest) for index, (_, digest) in structure.elsewhere.items()}
    wanted: dict[int, set[str]] = {}
    for index, (number, _) in structure.elsewhere.items():
        wanted.setdefault(number, set()).add(names[index])
    found = {number: read_part(manifest.parts[number].key, of_part) for number, of_part in wanted.items()}
    for index, (number, _) in structure.elsewhere.items():
        leaf, name = structure.leaves[index], names[index]
        if name not in found[number]:
            raise CheckpointCorrupt(f"{place.where(STRUCTURE)}: {leaf.name!r} is not in part {manifest.parts[number]}")
        value = found[number][name]
        values[index] = leaves.copy(leaf, value) if (number, name) in used else value
        used.add((number, name))


def _check_part(manifest: Manifest, parts: Sequence[Leaf], contents: Sequence[str]) -> None:
    """Check that a part's key is the digest of the leaves that it holds. Raises ``ValueError``."""
    names = [*map(name_in_part, parts, contents)]
    if key_of_part(manifest.workload, names) != manifest.key or names != [leaf.name for leaf in parts]:
        raise ValueError("its leaves do not match its key")
    if manifest.parts:
        raise ValueError("a part has no parts itself")


@contextmanager
def _understanding(place: Place) -> Iterator[None]:
    """Convert errors in interpreting a structure. Its checksum is correct, so another program has written it."""
    try:
        yield
    except (ImportError, MemoryError):
        raise
    except Exception as error:
        raise CheckpointCorrupt(f"{place.where(STRUCTURE)} does not describe a state: {error}") from error


def _pieces(file: Source, index: int, leaf: Leaf, values: list[Any] | None) -> Iterator[memoryview | bytes]:
    """Read the bytes of a leaf and yield them. If ``values`` is given, the leaf's value is put into it; else the bytes
    are read in pieces."""
    if values is None:
        left = leaf.nbytes
        while left and (piece := file.read(min(left, _PIECE))):
            yield piece
            left -= len(piece)
    elif leaf.kind == "bytes":
        values[index] = file.read(leaf.nbytes)
        yield values[index]
    else:
        value, memory = leaves.empty(leaf)
        file.readinto(memory)
        yield memory
        values[index] = leaves.arranged(leaf, value)


def _check(place: Place, name: str, found: str, files: Mapping[str, str]) -> None:
    if files.get(name) != found:
        raise CheckpointCorrupt(f"{place.where(name)} does not match the checksum in its manifest")
