"""Runs the tests on a fake of CUDA (:mod:`tests.fake_cuda`) or of another accelerator in a process of their own."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

TESTS = Path(__file__).parent.parent
FILES = TESTS / "store/test_live_cache.py", TESTS / "torch/test_measure.py"
"""With tests that are marked as needing a device."""


def library_of(kind: str) -> str:
    if shutil.which("c++") is None or shutil.which("ninja") is None:
        pytest.skip("the fake device needs a C++ compiler and ninja")
    return subprocess.run(
        [sys.executable, "-m", "tests.fake_cuda.build", kind], check=True, capture_output=True, text=True
    ).stdout.split()[-1]


@pytest.fixture(scope="module")
def library() -> str:
    return library_of("cuda")


@pytest.mark.ci
@pytest.mark.timeout(1800)  # many tests, each of which has its own limit
@pytest.mark.parametrize("which", ["not slow", pytest.param("slow", marks=pytest.mark.slow)])
def test_tests_of_fake_cuda_pass_on_fake_devices(library: str, which: str) -> None:
    """All that is about the fake devices; in one process, as each imports torch and compiles what it traces."""
    run(
        *("tests.fake_cuda.plugin", "-m", which, TESTS / "fake_cuda"),
        HPSTAGE_FAKE_CUDA=library,
        CUDA_VISIBLE_DEVICES="0,1",
    )


@pytest.mark.ci
def test_tests_marked_gpu_pass_on_fake_devices(library: str) -> None:
    run("tests.fake_cuda.plugin", "-m", "gpu", *FILES, HPSTAGE_FAKE_CUDA=library, CUDA_VISIBLE_DEVICES="0,1")


@pytest.mark.ci
def test_tests_of_another_accelerator_pass_on_a_fake_device() -> None:
    if not hasattr(torch, "accelerator"):
        pytest.skip("torch 2.6 is the first that says which accelerator it has")
    run("tests.fake_npu.plugin", TESTS / "fake_npu", HPSTAGE_FAKE_NPU=library_of("npu"))


def run(plugin: str, *words: str | Path, **variables: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", plugin, "-p", "no:cacheprovider", *words],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr[-2_000:]


@pytest.fixture(scope="module")
def drivers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a fake of NVIDIA's management library, and an empty one in the place of its driver."""
    folder = tmp_path_factory.mktemp("drivers")
    for name, source in (("nvidia-ml", TESTS / "fake_cuda/nvml.c"), ("cuda", Path(os.devnull))):
        subprocess.run(["c++", "-x", "c", "-shared", "-fPIC", "-o", folder / f"lib{name}.so.1", source], check=True)
    (folder / "sitecustomize.py").write_text("import tests.fake_cuda.plugin\n")
    return folder


NUMBERS = "0,1"
UUIDS = [f"{index:08d}-0000-0000-0000-000000000000" for index in range(2)]


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        pytest.param("rebuilt", NUMBERS, marks=pytest.mark.ci),
        pytest.param("rebuilt", ",".join(f"GPU-{uuid}" for uuid in UUIDS), marks=pytest.mark.slow),
        pytest.param("dask_cuda", NUMBERS, marks=pytest.mark.slow),
        pytest.param("dask_cuda", ",".join(f"GPU-{uuid}" for uuid in UUIDS), marks=pytest.mark.slow),
    ],
    ids=["rebuilt, by number", "rebuilt, by UUID", "dask-cuda, by number", "dask-cuda, by UUID"],
)
def test_a_cluster_of_dask_cuda_trains_with_the_first_device_of_each_worker(
    library: str, drivers: Path, kind: str, names: str
) -> None:
    if kind == "dask_cuda" and importlib.util.find_spec(kind) is None:
        pytest.skip("pip install --no-deps dask-cuda nvidia-ml-py cuda-core cuda-bindings cuda-pathfinder")
    done = subprocess.run(
        [sys.executable, "-c", "from tests.fake_cuda.cuda_cluster import main; main()", kind, names],
        env={
            **os.environ,
            "HPSTAGE_FAKE_CUDA": library,
            "CUDA_VISIBLE_DEVICES": NUMBERS,
            "LD_LIBRARY_PATH": str(drivers),
            "PYTHONPATH": os.pathsep.join([str(drivers), str(TESTS.parent), *sys.path]),
            "DASK_CUDA_TEST_SINGLE_GPU": "1",  # continue without a CUDA context, which needs a driver
        },
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-5_000:] + done.stderr[-10_000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["seen"] == [names, ",".join(names.split(",")[::-1])]
    assert found["used"] == [[uuid] for uuid in UUIDS]
    assert found["equal"]
    assert re.search(rf"would both train on GPU ({'|'.join(UUIDS)})", found["refused"])
