"""The files of a checkpoint: ``state.safetensors``, ``state.json`` (structure), ``manifest.json`` (identity).

No pickle: whoever can write to the storage can spoil a checkpoint, which is noticed, but cannot run code. The
tensors file is written and read here and not by the safetensors package, so that tensors go straight between
their own memory and the file, hashed on the way; any reader of safetensors can open it.
"""

from __future__ import annotations

import io
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import xxhash

from hpstage.checkpoints import leaves
from hpstage.checkpoints.leaves import Leaf
from hpstage.checkpoints.state_tree import FlatState, Node, digest_of, unflatten
from hpstage.checkpoints.store import Manifest
from hpstage.errors import CheckpointCorrupt

FORMAT = 1
TENSORS = "state.safetensors"
STRUCTURE = "state.json"
MANIFEST = "manifest.json"

# Small tensors are gathered to writes and reads of this many bytes; larger ones pass the buffer by.
_BUFFER = 1 << 18


class _Structure(msgspec.Struct, frozen=True):
    tree: Node
    leaves: tuple[Leaf, ...]


class _Sealed(msgspec.Struct, frozen=True):
    """The manifest's own bytes and their checksum: a flipped bit in it is noticed as well."""

    manifest: msgspec.Raw
    xxh3_128: str


class Written(msgspec.Struct, frozen=True):
    """What :func:`write` has written: xxh3_128 of each file, bytes in all, digest of the state."""

    files: dict[str, str]
    bytes: int
    digest: str


def write(folder: Path, flat: FlatState) -> Written:
    """Write tensors and structure of a state into an empty folder. Raises ``OSError``."""
    header, order = _layout(flat.leaves)
    whole = xxhash.xxh3_128(header)
    contents = [""] * len(order)
    with (folder / TENSORS).open("wb", buffering=_BUFFER) as file:
        file.write(header)
        for index in order:
            content = leaves.content(flat.leaves[index], flat.values[index])
            contents[index] = xxhash.xxh3_128_hexdigest(content)
            whole.update(content)
            file.write(content)
        size = file.tell()
    structure = msgspec.json.encode(_Structure(tree=flat.tree, leaves=flat.leaves))
    (folder / STRUCTURE).write_bytes(structure)
    return Written(
        files={TENSORS: whole.hexdigest(), STRUCTURE: xxhash.xxh3_128_hexdigest(structure)},
        bytes=size + len(structure),
        digest=digest_of(flat, contents),
    )


def read(folder: Path, manifest: Manifest) -> object:
    """Read a state and check every byte. Raises :class:`CheckpointCorrupt`; ``OSError`` if a file lacks."""
    structure_file = folder / STRUCTURE
    content = structure_file.read_bytes()
    _check(structure_file, xxhash.xxh3_128_hexdigest(content), manifest.files)
    try:
        structure = msgspec.json.decode(content, type=_Structure)
        values = _read_values(folder / TENSORS, structure.leaves, manifest.files)
        return unflatten(structure.tree, values)
    except (msgspec.DecodeError, ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        # Only another program's structure, or a dtype that this torch does not know, comes here: its checksum
        # holds.
        raise CheckpointCorrupt(f"{structure_file} does not describe a state: {error}") from error


def verify(folder: Path, manifest: Manifest) -> None:
    """Check every byte without building the state. Raises as :func:`read` does."""
    for name in (STRUCTURE, TENSORS):
        whole = xxhash.xxh3_128()
        with (folder / name).open("rb") as file:
            while chunk := file.read(1 << 20):
                whole.update(chunk)
        _check(folder / name, whole.hexdigest(), manifest.files)


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write the manifest, which makes the checkpoint complete. Raises ``OSError``."""
    content = msgspec.json.encode(manifest)
    sealed = _Sealed(manifest=msgspec.Raw(content), xxh3_128=xxhash.xxh3_128_hexdigest(content))
    (folder / MANIFEST).write_bytes(msgspec.json.encode(sealed))


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest and check it against itself. Raises :class:`CheckpointCorrupt` or ``OSError``."""
    path = folder / MANIFEST
    content = path.read_bytes()
    try:
        sealed = msgspec.json.decode(content, type=_Sealed)
        if xxhash.xxh3_128_hexdigest(sealed.manifest) != sealed.xxh3_128:
            raise CheckpointCorrupt(f"{path} does not agree with its checksum")
        manifest = msgspec.json.decode(sealed.manifest, type=Manifest)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CheckpointCorrupt(f"{path} is no manifest: {error}") from error
    if manifest.format != FORMAT:
        raise CheckpointCorrupt(f"{path} has format {manifest.format}; this hpstage reads format {FORMAT}")
    return manifest


def _layout(parts: Sequence[Leaf]) -> tuple[bytes, list[int]]:
    """The header of the safetensors file, and the order in which the leaves follow it.

    Both follow from the leaves alone, so that a reader never has to trust a header: it compares. Larger
    elements come first (as the safetensors package has it), by which each tensor is aligned in the file.
    """
    stored = [leaf.stored for leaf in parts]
    order = sorted(range(len(parts)), key=lambda index: (-stored[index][1], parts[index].name))
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


def _read_values(path: Path, parts: Sequence[Leaf], files: Mapping[str, str]) -> list[Any]:
    header, order = _layout(parts)
    values: list[Any] = [None] * len(parts)
    with io.BufferedReader(io.FileIO(path), _BUFFER) as file:
        # Before memory is set aside for what the structure promises.
        if os.fstat(file.fileno()).st_size != len(header) + sum(leaf.nbytes for leaf in parts):
            raise CheckpointCorrupt(f"{path} has another length than its structure promises")
        if file.read(len(header)) != header:
            raise CheckpointCorrupt(f"{path} has another header than its structure promises")
        whole = xxhash.xxh3_128(header)
        for index in order:
            leaf = parts[index]
            if leaf.kind == "bytes":
                values[index] = file.read(leaf.nbytes)
                whole.update(values[index])
            else:
                values[index], memory = leaves.empty(leaf)
                file.readinto(memory)
                whole.update(memory)
    _check(path, whole.hexdigest(), files)
    return values


def _check(path: Path, found: str, files: Mapping[str, str]) -> None:
    if files.get(path.name) != found:
        raise CheckpointCorrupt(f"{path} does not agree with the checksum in its manifest")
