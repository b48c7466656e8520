"""Compiles the fake device, which takes half a minute, once for each version of torch and of the fake.

Writes the library's path."""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

import torch
from torch.utils import cpp_extension

if __name__ == "__main__":
    kind = sys.argv[1]  # cuda, or npu for a device of a plugin
    name = f"hpstage_fake_{kind}"
    source = Path(__file__).with_name("device.cpp")
    version = f"{torch.__version__}_{hashlib.sha256(source.read_bytes()).hexdigest()[:12]}"
    folder = Path(cpp_extension.get_default_build_root()) / f"{name}_{version}"
    folder.mkdir(parents=True, exist_ok=True)
    flags = ["-O0", "-w", *(["-DPLUGIN"] if kind == "npu" else [])]
    cpp_extension.load(name, [str(source)], extra_cflags=flags, build_directory=str(folder), is_python_module=False)
    sys.stdout.write(f"{folder / f'{name}.so'}\n")
