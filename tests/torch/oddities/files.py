"""Files and memory maps that training reads: captured exactly, or refused by name."""

from __future__ import annotations

import atexit
import io
import mmap
import os
import tempfile
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from tests.torch.oddities.oddity import Odd, odd


def written(content: bytes) -> Path:
    number, name = tempfile.mkstemp()
    atexit.register(os.unlink, name)
    with open(number, "wb") as file:
        file.write(content)
    return Path(name)


def saved(array: Any) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


NUMBERS = written((np.arange(3 << 17) % 97).astype("f8").tobytes())
"""3 MiB, more than is looked at of memory that nothing is known of."""
TABLE = written(saved(np.arange(12.0).reshape(3, 4)))
LINES = written("".join(f"{number} größer\n" for number in range(99)).encode())


def mapped() -> Any:
    return np.memmap(NUMBERS, dtype="f8", mode="r")


odd("a memmap that can only be read", mapped)(lambda kept, self: kept[self.steps])
odd("an array on a memmap", lambda: np.asarray(mapped()))(lambda kept, self: kept[self.steps])
odd("a part of a memmap", lambda: mapped()[5:])(lambda kept, self: kept[self.steps])
odd("a large memmap that can be written to", lambda: np.memmap(NUMBERS, dtype="f8", mode="r+"))(
    lambda kept, self: kept[self.steps]
)
odd("a memmap of records", lambda: np.memmap(NUMBERS, dtype="f4,i4", mode="r"))(
    lambda kept, self: kept["f1"][self.steps] % 7
)
odd("an array that is saved, as a map", lambda: np.load(TABLE, mmap_mode="r"))(
    lambda kept, self: kept[self.steps % 3, 1]
)


def hdf5(mode: str = "r") -> Any:
    if mode == "r+":  # of its own: an open file that can be written to is locked
        return h5py.File(written(HDF5.read_bytes()), mode)
    return h5py.File(HDF5, mode)


HDF5 = written(b"")
with h5py.File(HDF5, "w") as file:
    file["group/numbers"] = np.arange(12.0) * 7 % 5

odd("an HDF5 file", hdf5)(lambda kept, self: float(kept["group/numbers"][self.steps]))
odd("a data set of an HDF5 file", lambda: hdf5()["group/numbers"])(lambda kept, self: float(kept[self.steps]))
odd(
    "an HDF5 file that can be written to",
    lambda: hdf5("r+"),
    refused=r"self\.kept is a h5py\._hl\.files\.File, which nothing can look into",
)(lambda kept, self: float(kept["group/numbers"][self.steps]))


@odd("an HDF5 file that has an attribute of the user's", hdf5)
def _(kept: Any, self: Odd) -> float:
    kept.scale = getattr(kept, "scale", 1.0) + 1
    return float(kept["group/numbers"][self.steps]) * kept.scale


@odd("an HDF5 file of training's own, with an attribute", refused=r"self\.mine holds a h5py\._hl\.files\.File that tr")
def _(kept: Any, self: Odd) -> float:
    if self.steps == 1:
        self.mine = hdf5()
        self.mine.scale = 2.0
    return float(self.mine["group/numbers"][self.steps]) * self.mine.scale if self.steps else 0.0


odd(
    "a data set that can be written to",
    lambda: hdf5("r+")["group/numbers"],
    refused=r"self\.kept is a h5py\._hl\.dataset\.Dataset, which nothing can look into",
)(lambda kept, self: float(kept[self.steps]))


@odd("HDF5 files that training opens")
def _(kept: Any, self: Odd) -> float:
    if self.steps == 2:
        self.kept, self.group = hdf5(), hdf5()["group"]
        self.numbers = self.kept["group/numbers"]
    if self.steps < 2:
        return 0.0
    return float(self.kept["group/numbers"][self.steps] + self.group["numbers"][1] + self.numbers[3] * self.steps)


@odd("memmaps that training opens")
def _(kept: Any, self: Odd) -> float:
    if self.steps == 2:
        self.raw = np.memmap(NUMBERS, dtype="f8", mode="r", offset=8, shape=(5, 7), order="F")
        self.table = np.load(TABLE, mmap_mode="r")
    return 0 if self.steps < 2 else float(self.raw[1, self.steps % 7] + self.table[1, self.steps % 4])


@odd("a part of a memmap that training opens", refused=r"self\.part holds a numpy\.memmap that training has made")
def _(kept: Any, self: Odd) -> float:
    self.part = mapped()[3:9]
    return float(self.part[0])


def map_of(**how: Any) -> mmap.mmap:
    with NUMBERS.open("r+b") as file:
        return mmap.mmap(file.fileno(), 0, **how)


@odd("a map that can only be read", lambda: map_of(access=mmap.ACCESS_READ))
def _(kept: Any, self: Odd) -> float:
    return sum(kept.read(8)) + kept[self.steps]


@odd("a map that can be written to", map_of, refused=r"self\.kept is a mmap\.mmap, which nothing can look into")
def _(kept: Any, self: Odd) -> float:
    return kept[0]


@odd(
    "a map of memory alone",
    lambda: mmap.mmap(-1, 64),
    refused=r"self\.kept is a mmap\.mmap, which nothing can look into",
)
def _(kept: Any, self: Odd) -> float:
    kept[self.steps] = self.steps
    return sum(kept)


# --- files


def opened(path: Path, **how: Any) -> Any:
    """It is closed at the very end, since who reads by it may be gone before."""
    file = path.open(**how)
    atexit.register(file.close)
    return file


def number_at(file: Any, self: Odd) -> float:
    file.seek(8 * self.steps)
    return float(np.frombuffer(file.read(8))[0])


odd("a file that is read at places", lambda: opened(NUMBERS, mode="rb"))(number_at)
odd("a file without a buffer that is read at places", lambda: opened(NUMBERS, mode="rb", buffering=0))(number_at)
odd("bytes in memory that are read at places", lambda: io.BytesIO(NUMBERS.read_bytes()[:4096]))(number_at)
odd("a file that is read on and on", lambda: opened(NUMBERS, mode="rb"))(lambda kept, self: sum(kept.read(9)))


odd("a file of lines", lambda: opened(LINES, encoding="utf-8"))(lambda kept, self: int(kept.readline().split()[0]))
odd(
    "a file of lines, as an iterator",
    lambda: opened(LINES, encoding="utf-8"),
    refused=r"self\.kept is a _io\.TextIOWrapper that has been read",
)(lambda kept, self: int(next(kept).split()[0]))


@odd("a file that training opens")
def _(kept: Any, self: Odd) -> float:
    if self.steps == 2:
        self.file = NUMBERS.open("rb")
    if self.steps >= 2:
        atexit.register(self.file.close)
    return 0 if self.steps < 2 else number_at(self.file, self) + sum(self.file.read(3))


@odd(
    "a file that training closes",
    lambda: opened(NUMBERS, mode="rb"),
    refused=r"self\.kept is a _io\.BufferedReader that",
)
def _(kept: Any, self: Odd) -> float:
    if self.steps == 2:
        kept.close()
    return 0


@odd(
    "a file that is written to",
    lambda: opened(LINES, mode="r+b"),
    refused=r"self\.kept is a _io\.BufferedRandom that",
)
def _(kept: Any, self: Odd) -> float:
    kept.write(b"0")
    return kept.tell()
