"""A plugin of pytest that gives torch an accelerator of which hpstage knows nothing, as torch's plugins do."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import sysconfig
from types import ModuleType
from typing import Any

LIBRARY = "HPSTAGE_FAKE_NPU"
"""The variable that names the library of the fake device."""


def _loaded(path: str) -> Any:
    for name in ("libc10", "libtorch_cpu"):
        library = os.path.join(sysconfig.get_paths()["purelib"], "torch", "lib", f"{name}.so")
        ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL)
    ctypes.CDLL(path)
    import torch  # noqa: F401  # the module needs its types

    spec = importlib.util.spec_from_file_location("hpstage_fake_npu", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


fake = _loaded(os.environ[LIBRARY])


def _install() -> None:
    import torch

    generators = [torch.Generator() for _ in range(fake.count())]
    module: Any = ModuleType("torch.npu")
    module.is_available = module.is_initialized = lambda: True
    module.device_count = fake.count
    module.current_device = fake.current
    module.set_device = fake.set_current
    module._is_in_bad_fork = lambda: False
    module.get_amp_supported_dtype = lambda: [torch.bfloat16]
    module.get_device_name = lambda device=None: "Fake"
    module.synchronize = lambda device=None: None
    module.manual_seed_all = lambda seed: [generator.manual_seed(seed) for generator in generators]
    module.manual_seed = module.manual_seed_all
    module.get_rng_state_all = lambda: [generator.get_state() for generator in generators]
    module.set_rng_state_all = lambda states: [
        generator.set_state(state) for generator, state in zip(generators, states, strict=True)
    ]
    torch.utils.rename_privateuse1_backend("npu")
    torch._register_device_module("npu", module)
    torch.utils.generate_methods_for_privateuse1_backend()


_install()
