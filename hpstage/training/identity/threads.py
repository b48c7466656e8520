"""Pins numerical libraries to one thread, since the number of threads decides the bits of sums, and describes them.

The kernels that such a library selects for the processor also decide bits.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
import re
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from hpstage.training.code.source import distributions_of

VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "BLIS_NUM_THREADS")
"""Environment variables that libraries read when they are loaded."""

_before: list[Callable[[], object]] = []
"""Callables that undo the pinning."""
_holders = 0
_of_threads: Any = None
"""The OpenMP libraries, which keep a number of threads for each thread of the process."""


def pin(packages: Collection[str]) -> None:
    """Limit each library, loaded now or later, to one thread, in this thread and those started later.

    ``packages`` are the packages that the training code names. Their libraries are loaded first, so that the result
    does not depend on whether they already were.
    """
    global _of_threads
    from threadpoolctl import ThreadpoolController

    _load(packages)
    controller = ThreadpoolController()
    if _holders and not _before:
        _remember(controller)
    for variable in VARIABLES:
        os.environ[variable] = "1"
    _of_threads = controller.select(user_api="openmp")
    controller.limit(limits=1)


def pin_thread() -> None:
    """Apply the limits to the calling thread, which was started after :func:`pin`."""
    if _of_threads is not None:
        _of_threads.limit(limits=1)


@contextmanager
def restored() -> Iterator[None]:
    """Restore the numbers of threads on exit, for a process that belongs to the user."""
    global _holders
    _holders += 1
    try:
        yield
    finally:
        _holders -= 1
        if not _holders:
            while _before:
                _before.pop()()


def describe(packages: Collection[str]) -> dict[str, str]:
    """Describe the linear algebra libraries of NumPy, and of SciPy where code uses it, and NumPy's SIMD extensions."""
    from threadpoolctl import threadpool_info

    _load(packages)
    found = []
    for library in threadpool_info():
        parts = Path(library["filepath"]).parts
        owner = next((name for name in ("numpy", "scipy") if {name, f"{name}.libs"} & set(parts)), None)
        # Skip libraries that are bundled with other packages, since these may or may not be imported here. Shared
        # libraries of the system are in no package.
        if library["user_api"] != "blas" or (owner is None and {"site-packages", "dist-packages"} & set(parts)):
            continue
        if owner == "scipy" and not _uses_scipy(packages):
            continue
        items = (library.get(item) for item in ("internal_api", "version", "architecture", "threading_layer"))
        found.append(" ".join(map(str, filter(None, [owner, *items]))))
    import numpy

    simd: Any = numpy.show_config("dicts").get("SIMD Extensions", {})
    extensions = [*simd.get("baseline", []), *simd.get("found", [])]
    return {"blas": "; ".join(sorted(found)) or "none that tells", "simd": " ".join(extensions)}


def _load(packages: Collection[str]) -> None:
    importlib.import_module("numpy")
    if _uses_scipy(packages):
        importlib.import_module("scipy.linalg")
    if "torch" in packages and importlib.util.find_spec("torch") is not None:
        importlib.import_module("torch")


def _uses_scipy(packages: Collection[str]) -> bool:
    """Return whether code names SciPy or a package that requires it, regardless of what is imported."""
    if importlib.util.find_spec("scipy") is None:
        return False
    return any(
        package == "scipy"
        or any(
            re.match(r"scipy\b(?!.*\bextra\b)", requirement, re.IGNORECASE)
            for distribution in distributions_of(package)
            for requirement in importlib.metadata.requires(distribution) or []
        )
        for package in packages
    )


def _remember(controller: Any) -> None:
    variables = {name: os.environ.get(name) for name in VARIABLES}
    _before.append(partial(_set, variables))
    for library in controller.lib_controllers:
        _before.append(partial(library.set_num_threads, library.num_threads))
    torch: Any = sys.modules.get("torch")
    if torch is not None:
        # Restored first: it sets OpenMP's number of threads, which is then restored, too.
        _before.append(partial(torch.set_num_threads, torch.get_num_threads()))


def _set(variables: dict[str, str | None]) -> None:
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
