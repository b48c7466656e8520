"""Threads and kernels of the libraries that compute: pinned while training, put back afterwards, and in the key."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from threadpoolctl import threadpool_info, threadpool_limits

import hpstage
from hpstage.training.identity.environment import describe
from hpstage.training.identity.threads import VARIABLES
from hpstage.training.run import Run
from hpstage.training.trainables import as_trainable

ROOT = Path(__file__).parents[2]

SEARCH = """
import json, os, sys
import optuna
import hpstage
from hpstage.store import MemoryJournal
from threadpoolctl import threadpool_info

optuna.logging.set_verbosity(optuna.logging.ERROR)

class Products:
    def setup(self, hp):
        import numpy
        self.x = numpy.random.standard_normal((600, 600))
    def train(self, step, hp):
        product = self.x @ self.x.T
        self.x = product / abs(product).max()
    def evaluate(self): return {"sum": float(self.x.sum())}
    def state_dict(self): return {"x": self.x}
    def load_state_dict(self, state): self.x = state["x"].copy()

def threads():
    return [library["num_threads"] for library in threadpool_info() if library["user_api"] == "blas"]

def search(executor):
    result = hpstage.optimize(
        optuna.create_study(), Products(), lambda trial: {"a": 1}, metric="sum", steps=3, n_trials=1,
        executor=executor, store=MemoryJournal(),
    )
    return [result.plan.workload, result.best_value.hex()]

if __name__ == "__main__":
    for module in sys.argv[2:]: __import__(module)
    before = threads()
    if sys.argv[1] == "inline":
        found = search(hpstage.InlineExecutor())
    else:
        from hpstage.cluster import DaskExecutor
        found = search(DaskExecutor(n_workers=1, gpus=0))
    assert threads()[:len(before)] == before, (before, threads())
    print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def usual(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The key and the metric under no setting of the user's."""
    return search(tmp_path_factory.mktemp("usual"), "inline")


def search(folder: Path, *words: str, **variables: str) -> list[str]:
    (folder / "script.py").write_text(SEARCH)
    environment = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    done = subprocess.run(
        [sys.executable, "script.py", *words],
        cwd=folder,
        env={**environment, "PYTHONPATH": str(ROOT), **variables},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    found: list[str] = json.loads(done.stdout)
    return found


@pytest.mark.ci
def test_key_and_bits_do_not_depend_on_threads_imports_or_the_executor(usual: list[str], tmp_path: Path) -> None:
    assert search(tmp_path, "inline", OPENBLAS_NUM_THREADS="1", OMP_NUM_THREADS="1") == usual
    several = {"OPENBLAS_NUM_THREADS": "2"}
    assert search(tmp_path, "inline", "torch", "sklearn.linear_model", "numpy.linalg", **several) == usual
    assert search(tmp_path, "workers") == usual


def openblas() -> bool:
    return any(library["internal_api"] == "openblas" for library in threadpool_info())


@pytest.mark.ci
@pytest.mark.skipif(not openblas(), reason="NumPy stands on another BLAS")
def test_other_kernels_of_openblas_change_the_key(usual: list[str], tmp_path: Path) -> None:
    other = "Nehalem" if os.uname().machine == "x86_64" else "ARMV8"
    assert search(tmp_path, "inline", OPENBLAS_CORETYPE=other)[0] != usual[0]


@pytest.mark.ci
def test_other_vector_extensions_of_numpy_change_the_key(usual: list[str], tmp_path: Path) -> None:
    found = np.show_config("dicts")["SIMD Extensions"].get("found", [])  # type: ignore[call-overload]
    if not found:
        pytest.skip("this processor has none that NumPy could do without")
    assert search(tmp_path, "inline", NPY_DISABLE_CPU_FEATURES=found[-1])[0] != usual[0]


def naming_sklearn(run: Run) -> Any:
    from sklearn.linear_model import SGDClassifier

    return SGDClassifier


def naming_numpy(run: Run) -> Any:
    return np.zeros(3)


def test_blas_of_scipy_is_in_the_key_if_the_code_names_a_package_that_requires_scipy() -> None:
    assert "scipy" in describe(as_trainable(naming_sklearn)).described["blas"]
    assert "scipy" not in describe(as_trainable(naming_numpy)).described["blas"]


def counts() -> list[int]:
    return [library["num_threads"] for library in threadpool_info()]


class Threads:
    """Its metric is the largest number of threads of any library."""

    def setup(self, hp: Any) -> None: ...
    def train(self, step: int, hp: Any) -> None: ...
    def evaluate(self) -> dict[str, float]:
        return {"threads": float(max(*counts(), torch.get_num_threads()))}

    def state_dict(self) -> object:
        return {}

    def load_state_dict(self, state: object) -> None: ...


class Nothing:
    def state_dict(self) -> object:
        return {}

    def load_state_dict(self, state: object) -> None: ...


def threads_of_a_function(run: Run) -> None:
    run.attach(nothing=Nothing())
    for _ in run.steps():
        run.report(threads=max(*counts(), torch.get_num_threads()))


@pytest.mark.parametrize("trainable", [Threads(), threads_of_a_function])
def test_inline_training_uses_one_thread_and_restores_the_users_thread_settings(trainable: Any) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with threadpool_limits(limits=2):
            set_by_user = counts()
            executor = hpstage.InlineExecutor()
            executor.open(trainable, None)
            trained = as_trainable(trainable)
            trained.setup({})
            trained.train(0, {})
            assert trained.evaluate() == {"threads": 1.0}
            trained.close() if hasattr(trained, "close") else None
            executor.close()
            assert (counts(), torch.get_num_threads()) == (set_by_user, 2)
            executor.close()
    finally:
        torch.set_num_threads(before)
