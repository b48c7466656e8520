"""Ways to spoil a published checkpoint."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable
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


SPOILING: dict[str, Callable[[Path, random.Random], None]] = {
    "truncated": _truncate,
    "flipped": _flip,
    "undecodable": _describe_nothing,
    "swapped": _swap,
    "deleted": _delete,
}
