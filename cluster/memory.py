"""How a worker's C library keeps memory between steps. Settings of glibc; elsewhere nothing is done.

Dask's nanny sets ``MALLOC_TRIM_THRESHOLD_=65536``. That returns freed memory to the system at once, and it also
switches off glibc's adaptive threshold for mmap, so that every tensor from 128 KiB on is mapped, faulted in page by
page and unmapped again, in each step: small CNNs train 1.8 to 2.8 times slower on the CPU
(``scripts/bench_worker_speed.py``). What cures is the mmap threshold; generous trimming alone does not help larger
models, since threads other than the main one allocate from arenas of 64 MiB.

A process can still be cured when it runs (:func:`hold`), but for tensors of 64 MiB and more; those need the variables
of ``ENVIRONMENT`` when it starts.
"""

from __future__ import annotations

import ctypes

_THRESHOLD = 2**30
_TOP_PAD = 2**28  # reserved address space, not memory: pages are taken when they are touched

ENVIRONMENT = {
    "MALLOC_MMAP_THRESHOLD_": str(_THRESHOLD),
    "MALLOC_TRIM_THRESHOLD_": str(2**32),
    "MALLOC_TOP_PAD_": str(_TOP_PAD),
    "MALLOC_ARENA_MAX": "1",
}
"""For processes still to be started. One arena: the training thread then shares the main one, which has no limit."""

# From malloc.h.
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3


def hold() -> None:
    """Let this process keep what it frees, from now on."""
    _set({_M_TRIM_THRESHOLD: 2**31 - 1, _M_TOP_PAD: _TOP_PAD, _M_MMAP_THRESHOLD: _THRESHOLD})


def let_go() -> None:
    """Back to what Dask's nanny sets, and give free memory back."""
    _set({_M_TRIM_THRESHOLD: 65536, _M_TOP_PAD: 0, _M_MMAP_THRESHOLD: 128 << 10})
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _set(parameters: dict[int, int]) -> None:
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        for parameter, value in parameters.items():
            mallopt(parameter, value)
