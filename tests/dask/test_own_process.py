"""What a script sets or alters for its own process alone: settings apply where trials train, patches are refused."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

SCRIPT = """
import functools, sys, tempfile
import optuna, torch
import numpy as np
import hpstage
import hpstage.torch
from hpstage.cluster import DaskExecutor
{imports}

X = torch.linspace(-1, 1, 32)[:, None]

class Fit(hpstage.torch.TorchTrainable):
    device = "cpu"
    batch_size = 8
    data_version = "1"

    def model(self, hp):
        return torch.nn.Linear(1, 1, device="cpu")

    def optimizer(self, model, hp):
        return torch.optim.SGD(model.parameters(), lr=hp["lr"])

    def dataset(self):
        return torch.utils.data.TensorDataset(X, X ** 3)

    def loss(self, model, batch):
        x, y = (part.to(model.weight.dtype) for part in batch)
        return ((torch.relu(model(x)) - y) ** 2).mean()

    def evaluate(self, model):
        return {{"weight": model.weight.item(), {metric}}}

{module}

def search(executor):
    study = optuna.create_study(sampler=optuna.samplers.GridSampler({{"lr": [0.1, 0.2]}}, seed=1))
    hpstage.optimize(
        study, Fit(), lambda trial: {{"lr": trial.suggest_categorical("lr", [0.1, 0.2])}}, metric="weight", steps=3,
        n_trials=2, executor=executor, store=tempfile.mkdtemp(),
    )
    return [(trial.value, trial.params) for trial in study.trials]

if __name__ == "__main__":
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    {main}
    keys = []
    for kind in (DaskExecutor, hpstage.InlineExecutor):
        def opened(self, *given, begun=kind.open):
            environment = begun(self, *given)
            keys.append({{**environment.described, **environment.identity}})
            return environment
        kind.open = opened
    there = search(DaskExecutor(n_workers=1, gpus=0))
    assert there == search(hpstage.InlineExecutor()), "other bits"
    there, here = keys
    assert there == here, {{name for name in there | here if there.get(name) != here.get(name)}}
    print("same")
"""


def ran(folder: Path, *, main: str = "pass", module: str = "", imports: str = "", metric: str = "") -> str:
    """Run a script that searches on a cluster and in its own process. Return the last line that it prints."""
    text = SCRIPT.format(main=main, module=module, imports=imports, metric=metric or '"other": 0.0')
    (folder / "script.py").write_text(text)
    done = subprocess.run(
        [sys.executable, "script.py"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    return (done.stdout or done.stderr).splitlines()[-1]


SHOWN = {
    "torch.set_default_dtype(torch.float64)": "model.weight.dtype is torch.float64",
    "torch.set_default_device('meta')": "torch.get_default_device().type == 'meta'",
    "torch.set_flush_denormal(True)": "not torch.tensor(1.2e-38, dtype=torch.float32, device='cpu') / 2 > 0",
    "torch.backends.mkldnn.matmul.fp32_precision = 'bf16'": "torch.backends.mkldnn.matmul.fp32_precision == 'bf16'",
    "torch.backends.opt_einsum.strategy = 'optimal'": "torch.backends.opt_einsum.strategy == 'optimal'",
    "np.seterr(over='raise')": "np.geterr()['over'] == 'raise'",
}
PATCH = "torch.relu = lambda x: x * 0.5"
ANOTHER = "torch.nn.functional.relu = lambda x: x * 0.5"


@pytest.mark.ci
def test_settings_made_under_the_main_guard_apply_in_training_processes(tmp_path: Path) -> None:
    """Bits and key are those of a search in the script's process; a setting that is not made is a division by zero."""
    metric = f'"made": 1 / all([{", ".join(SHOWN.values())}])'
    assert ran(tmp_path, main="; ".join(SHOWN), metric=metric) == "same"


@pytest.mark.ci
def test_a_patch_made_under_the_main_guard_is_refused_with_a_remedy_that_works(tmp_path: Path) -> None:
    last = ran(tmp_path, main=PATCH)
    assert last.startswith("hpstage.errors.UsageError: the trainable cannot be set up on worker")
    assert "your code has set torch.relu in the search's process, but not in the training process" in last
    assert (
        'at module level, above `if __name__ == "__main__":` or in a module that the trainable\'s module imports'
        in last
    )
    (tmp_path / "patch.py").write_text(f"import torch\n{ANOTHER}\n")
    assert ran(tmp_path, module=PATCH, imports="import patch") == "same"
