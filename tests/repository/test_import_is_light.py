"""``import hpstage`` and the parts that decide load nothing heavy; the rest loads when it is first used."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

HEAVY = {"dask", "distributed", "torch", "redis", "optuna", "matplotlib", "numpy", "sklearn", "pandas", "jinja2"}
PURE = [
    "hpstage",
    "hpstage.schedule",
    "hpstage.plan.plan",
    "hpstage.scheduler.scheduler",
    "hpstage.scheduler.stage_tree",
    "hpstage.scheduler.chain_builder",
    "hpstage.execution.course",
    "hpstage.driver.driver",
    "hpstage.checkpoints.eviction",
    "hpstage.plan.keys",
    "hpstage.algorithm",
    "hpstage.executor",
    "hpstage.trainable",
    "hpstage.store.memory",
    "hpstage.store.sqlite",
    "hpstage.execution.simulated",
    "hpstage.execution.inline",
    "hpstage.accounting.causes",
    "hpstage.accounting.branches",
]


def fresh_interpreter(script: str) -> object:
    """What ``script`` puts into ``found``, run where nothing of this process is loaded."""
    done = subprocess.run(
        [sys.executable, "-c", f"import json, sys\n{script}\nprint(json.dumps(found))"],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_importing_hpstage_and_its_pure_modules_loads_no_heavy_package():
    imports = "\n".join(f"import {name}\nfound[{name!r}] = sorted(heavy & set(sys.modules))" for name in PURE)
    found = fresh_interpreter(f"heavy = {HEAVY!r}\nfound = {{}}\n{imports}")
    assert found == {name: [] for name in PURE}


@pytest.mark.ci
def test_subpackages_are_attributes_of_hpstage_after_import():
    found = fresh_interpreter(
        "import hpstage\n"
        "found = [callable(hpstage.optimize), isinstance(hpstage.InlineExecutor, type)]\n"
        "found += [hpstage.schedule.constant(1).value(0), isinstance(hpstage.torch.TorchTrainable, type)]"
    )
    assert found == [True, True, 1, True]


def test_dir_of_hpstage_lists_public_names_and_loads_no_heavy_package():
    names, heavy = fresh_interpreter(f"import hpstage\nfound = [dir(hpstage), sorted({HEAVY!r} & set(sys.modules))]")
    assert {"optimize", "schedule", "torch", "InlineExecutor", "Result", "errors", "algos", "cluster"} <= set(names)
    assert names == sorted(set(names))
    assert heavy == []


@pytest.mark.ci
def test_hpstage_has_every_name_that_dir_lists_and_no_unknown_name():
    found = fresh_interpreter(
        "import hpstage\n"
        "found = [name for name in [*dir(hpstage), *hpstage.__all__] if not hasattr(hpstage, name)]\n"
        "found += [name for name in ('nothing', 'Optimize') if hasattr(hpstage, name)]"
    )
    assert found == []


@pytest.mark.ci
def test_a_trainable_without_torch_is_trained_without_importing_torch() -> None:
    script = """
import hpstage, optuna
from hpstage.store import MemoryJournal
from hpstage.testing.toys import Tape
study = optuna.create_study()
hpstage.optimize(study, Tape(), lambda trial: {"a": trial.suggest_int("a", 1, 2)}, metric="score", steps=4, n_trials=2,
                 executor=hpstage.InlineExecutor(), store=MemoryJournal())
found = [[trial.state.name for trial in study.trials], "torch" in sys.modules]
"""
    assert fresh_interpreter(script) == [["COMPLETE", "COMPLETE"], False]
