"""Ways to spoil a published checkpoint, or a pack of small ones."""

from __future__ import annotations

import json
import os
import random
import shutil
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import xxhash

from hpstage.checkpoints import Manifest
from hpstage.checkpoints import format as files


def spoil(folder: Path, how: str, seed: int) -> None:
    """Spoil a published checkpoint: ``truncated``, ``flipped``, ``undecodable``, ``swapped`` or ``deleted``."""
    SPOILING[how](folder, random.Random(seed))


def _truncate(folder: Path, rng: random.Random) -> None:
    path = rng.choice(sorted(folder.iterdir()))
    os.truncate(path, rng.randrange(path.stat().st_size))


def _flip(folder: Path, rng: random.Random) -> None:
    path = rng.choice(sorted(folder.iterdir()))
    with path.open("r+b") as file:
        place = rng.randrange(path.stat().st_size)
        file.seek(place)
        (byte,) = file.read(1)
        file.seek(place)
        file.write(bytes([byte ^ 1 << rng.randrange(8)]))


def _describe_nothing(folder: Path, rng: random.Random) -> None:
    """Replace what describes the state by something else, with the right checksums and lengths."""
    (path,) = folder.glob("state*.json")
    sealed = json.loads((folder / "manifest.json").read_bytes())["manifest"]
    structure = json.loads(path.read_bytes())
    structure["tree"] = rng.choice([["float", "00"], ["leaf", 10**12], ["unknown"], None, ["dict", []]])
    content = json.dumps(structure).encode()
    sealed["bytes"] += len(content) - path.stat().st_size
    sealed["files"][path.name] = xxhash.xxh3_128_hexdigest(content)
    path.write_bytes(content)
    (folder / "manifest.json").write_bytes(files.encode_manifest(msgspec.convert(sealed, Manifest)))


def _swap(folder: Path, rng: random.Random) -> None:
    """Put another state in its place, whole."""
    others = sorted(path.parent for path in folder.parents[1].glob("??/*/manifest.json") if path.parent != folder)
    other = rng.choice(others or [folder])
    aside = folder.with_name(f"{folder.name}-aside")
    try:
        shutil.copytree(other, aside)
    except (shutil.Error, FileNotFoundError):  # it is evicted at this moment
        shutil.rmtree(aside, ignore_errors=True)
        return
    shutil.rmtree(folder)
    aside.rename(folder)


def _delete(folder: Path, rng: random.Random) -> None:
    shutil.rmtree(folder)


def spoil_pack(pack: Path, how: str, seed: int) -> set[str]:
    """Spoil a pack: ``truncated``, ``flipped`` or ``deleted``. Return the names of the entries that it has lost."""
    return PACK_SPOILING[how](pack, random.Random(seed))


def entries_in(pack: bytes) -> Iterator[tuple[str, int, int]]:
    """Yield the name, the begin and the end of each whole entry, also after damage; read without hpstage."""
    magic, fixed = b"hpstage\x01", struct.Struct("<8scBI")
    start = pack.find(magic)
    while 0 <= start <= len(pack) - fixed.size:
        _, _, length, size = fixed.unpack_from(pack, start)
        name = pack[start + fixed.size : start + fixed.size + length]
        end = start + fixed.size + length + 8 + size
        if end <= len(pack) and name.isascii():
            yield name.decode(), start, end
        start = pack.find(magic, start + 1)


def _truncate_pack(pack: Path, rng: random.Random) -> set[str]:
    content = pack.read_bytes()
    at = rng.randrange(len(content) + 1)
    os.truncate(pack, at)
    return {name for name, _, end in entries_in(content) if end > at}


def _flip_in_pack(pack: Path, rng: random.Random) -> set[str]:
    content = pack.read_bytes()
    if not content:
        return set()
    at = rng.randrange(len(content))
    with pack.open("r+b") as file:
        file.seek(at)
        file.write(bytes([content[at] ^ 1 << rng.randrange(8)]))
    return {name for name, begin, end in entries_in(content) if begin <= at < end}


def _delete_pack(pack: Path, rng: random.Random) -> set[str]:
    with pack.open("rb") as file:
        pack.unlink()
        time.sleep(0.05)  # who is writing to it writes again elsewhere
        return {name for name, _, _ in entries_in(file.read())}


PACK_SPOILING: dict[str, Callable[[Path, random.Random], set[str]]] = {
    "truncated": _truncate_pack,
    "flipped": _flip_in_pack,
    "deleted": _delete_pack,
}

SPOILING: dict[str, Callable[[Path, random.Random], None]] = {
    "truncated": _truncate,
    "flipped": _flip,
    "undecodable": _describe_nothing,
    "swapped": _swap,
    "deleted": _delete,
}
