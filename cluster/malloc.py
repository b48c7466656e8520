"""Settings of glibc that make a training process keep memory between steps; no effect with other C libraries.

Dask's nanny sets ``MALLOC_TRIM_THRESHOLD_=65536``, and training processes inherit it. Freed memory is then returned to
the system at once, and glibc's adaptive threshold for mmap is switched off: in each step, every tensor of 128 KiB or
more is mapped, faulted in page by page, and unmapped again. Small CNNs train 1.8 to 2.8 times slower on the CPU
(``scripts/bench_worker_speed.py``). Raising the mmap threshold fixes this; a higher trim threshold alone does not help
larger models.
"""

from __future__ import annotations

from hpstage.checkpoints.host_memory import HostMemory

_TOTAL = HostMemory().total or 1 << 60

ENVIRONMENT = {
    # Blocks that are a large share of all memory are still mapped: in the heap, they would leave holes of their size.
    "MALLOC_MMAP_THRESHOLD_": str(min(2**30, max(2**25, _TOTAL // 64))),
    "MALLOC_TRIM_THRESHOLD_": str(min(2**32, max(2**27, _TOTAL // 16))),
    "MALLOC_TOP_PAD_": str(2**28),  # reserves address space, not memory: pages are allocated when touched
    "MALLOC_ARENA_MAX": "1",  # threads of the user's code share the main arena, since other arenas have only 64 MiB
}
"""Environment variables to start a training process with."""
