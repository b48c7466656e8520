"""A description of what decides the bits of training in JAX; part of the workload's key."""

from __future__ import annotations

import os
import sys

JAX_SETTINGS = (
    "jax_enable_x64",
    "jax_default_matmul_precision",
    "jax_default_prng_impl",
    "jax_threefry_partitionable",
)
"""The settings that decide bits."""


def describe() -> dict[str, str]:
    """Describe JAX's version, device and settings, and on a CPU the threads among which it divides what it computes:
    their number is that of the cores, and cannot be set once JAX is in use."""
    import jax

    device = jax.devices()[0]
    described = {
        "jax": jax.__version__,
        "jax device": f"{device.platform} ({device.device_kind})",
        "jax settings": ", ".join(f"{name.removeprefix('jax_')} {getattr(jax.config, name)}" for name in JAX_SETTINGS),
    }
    if device.platform == "cpu":
        described["jax threads"] = str(len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count())
    return described
