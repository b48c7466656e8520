"""Compiles the fake device, which takes half a minute, once for each version of torch and of the fake.

Writes the library's path."""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

import torch
from torch.utils import cpp_extension

if __name__ == "__main__":
    source = Path(__file__).with_name("device.cpp")
    version = f"{torch.__version__}_{hashlib.sha256(source.read_bytes()).hexdigest()[:12]}"
    folder = Path(cpp_extension.get_default_build_root()) / f"hpstage_fake_cuda_{version}"
    folder.mkdir(parents=True, exist_ok=True)
    cpp_extension.load(
        "hpstage_fake_cuda",
        [str(source)],
        extra_cflags=["-O0", "-w"],
        build_directory=str(folder),
        is_python_module=False,
    )
    sys.stdout.write(f"{folder / 'hpstage_fake_cuda.so'}\n")
