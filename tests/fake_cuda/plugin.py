"""A plugin of pytest that puts the fake device in the place of CUDA, before torch is imported."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

__name__ = "torch.cuda"  # so that what is defined here is torch's own, no patch by the user whose code trains
LIBRARY = "HPSTAGE_FAKE_CUDA"
"""The variable that names the library of the fake device."""


def _loaded(path: str) -> Any:
    for name in ("libc10", "libtorch_cpu"):
        library = os.path.join(sysconfig.get_paths()["purelib"], "torch", "lib", f"{name}.so")
        ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL)
    ctypes.CDLL(path)
    import torch  # noqa: F401  # the module needs its types

    spec = importlib.util.spec_from_file_location("hpstage_fake_cuda", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


fake = _loaded(os.environ[LIBRARY])


def _index(device: Any) -> int:
    import torch

    index = device if device is None or isinstance(device, int) else torch.device(device).index
    return int(fake.current()) if index is None else index


@contextmanager
def _selected(device: Any) -> Iterator[None]:
    before = fake.current()
    fake.set_current(_index(device))
    try:
        yield
    finally:
        fake.set_current(before)


def _uuid(index: int) -> str:
    """As tests/fake_cuda/nvml.c has it of the GPU that is selected by number, or by UUID."""
    name = os.environ["CUDA_VISIBLE_DEVICES"].split(",")[index]
    return name.removeprefix("GPU-") if name.startswith("GPU-") else f"{int(name):08d}-0000-0000-0000-000000000000"


def _install() -> None:
    import torch

    cuda: Any = torch.cuda
    generators = (torch.default_generator,) * fake.count()  # from which the CPU's kernels draw
    cuda.is_available = cuda.is_initialized = lambda: True
    cuda.init = cuda._lazy_init = lambda: None
    cuda.device_count = fake.count
    cuda.current_device = fake.current
    cuda.set_device = lambda device: fake.set_current(_index(device))
    cuda.device = _selected
    cuda.synchronize = lambda device=None: None
    cuda.get_device_name = lambda device=None: "Fake"
    cuda.get_device_properties = lambda device=None: SimpleNamespace(name="Fake", uuid=_uuid(_index(device)))
    cuda.Stream = lambda device=None: torch.Stream(torch.device("cuda", _index(device)))
    cuda.current_stream = cuda.Stream
    cuda.stream = lambda stream: _selected(stream.device)
    cuda.default_generators = generators
    cuda.manual_seed_all = lambda seed: [generator.manual_seed(seed) for generator in generators]
    cuda.get_rng_state_all = lambda: [generator.get_state() for generator in generators]
    cuda.get_rng_state = lambda device=None: generators[_index(device)].get_state()
    cuda.set_rng_state = lambda state, device=None: generators[_index(device)].set_state(state)
    cuda.set_rng_state_all = lambda states: [
        generator.set_state(state) for generator, state in zip(generators, states, strict=True)
    ]
    cuda.mem_get_info = lambda device=None: (
        max(0, fake.total(_index(device)) - fake.reserved(_index(device))),
        fake.total(_index(device)),
    )
    cuda.memory_allocated = lambda device=None: fake.allocated(_index(device))
    cuda.memory_reserved = lambda device=None: fake.reserved(_index(device))
    cuda.max_memory_allocated = cuda.max_memory_reserved = lambda device=None: fake.peak(_index(device))
    cuda.reset_peak_memory_stats = lambda device=None: fake.reset_peak(_index(device))
    cuda.empty_cache = fake.empty_cache
    from tests.fake_cuda import graphs

    graphs.install(cuda)


_install()
