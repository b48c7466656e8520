"""A notebook from scratch: a run, three branches, their difference, a search over the rest. No step is trained twice,
and every trial is bit for bit the one trained by itself."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest

import hpstage

nbclient = pytest.importorskip("nbclient")

CELLS = [
    """
import torch
import optuna
import hpstage
from hpstage import schedule as s
from hpstage.checkpoints.state_tree import digest

optuna.logging.set_verbosity(optuna.logging.ERROR)
""",
    """
class Line(hpstage.torch.TorchTrainable):
    device, batch_size = "cpu", 8

    def dataset(self):
        x = torch.linspace(-1, 1, 64).unsqueeze(1)
        return torch.utils.data.TensorDataset(x, torch.sin(3 * x))

    def model(self, hp):
        return torch.nn.Sequential(torch.nn.Linear(1, 8), torch.nn.Tanh(), torch.nn.Dropout(0.1), torch.nn.Linear(8, 1))

    def optimizer(self, model, hp):
        return torch.optim.SGD(model.parameters(), lr=hp["lr"], momentum=hp["momentum"])

    def loss(self, model, batch):
        return torch.nn.functional.mse_loss(model(batch[0]), batch[1])

    def evaluate(self, model):
        x, y = self.dataset().tensors
        return {"loss": torch.nn.functional.mse_loss(model(x), y).item()}
""",
    """
run = hpstage.train(
    Line(), {"lr": s.cosine(0.1, T_max=60), "momentum": 0.9, "seed": 0}, steps=60, store="runs", checkpoint_every=20
)
run
""",
    """
low = run.branch(at=20, lr=0.03)
low
""",
    """
others = run.branch(at=40, lr=[0.05, s.linear(0.03)], seed=7, steps=80)
others
""",
    "print(run.diff(low))",
    """
def space(trial):
    rest = s.linear(trial.suggest_float("lr", 0.01, 0.1, log=True), end_factor=0.1, total_iters=40)
    return run.then({"lr": rest, "momentum": trial.suggest_categorical("momentum", [0.5, 0.9])}, at=20)

study = optuna.create_study(study_name="rest", sampler=optuna.samplers.RandomSampler(seed=0))
result = hpstage.optimize(study, Line(), space, metric="loss", steps=60, n_trials=4, store="runs")
""",
    "result",
    """
opened = hpstage.open("runs")
trials = [opened.trial(name) for name in opened.trials]
values = [{name: one.value for name, one in trial.schedules.items()} for trial in trials]
unique = {
    tuple(tuple(value(step) for _, value in sorted(one.items())) for step in range(steps))
    for trial, one in zip(trials, values)
    for steps in range(1, trial.planned.steps + 1)
}
assert opened.plan.totals.steps_trained == len(unique) == 60 + 40 + 2 * 40 + 4 * 40
""",
    """
here = hpstage.InlineExecutor()
for trial in trials:
    last = trial.planned.steps
    alone = hpstage.train(
        Line(), trial.schedules, steps=last, metric="loss", store=f"alone/{trial.id}", executor=here
    )
    assert alone.metrics[last] == trial.metrics[last], trial
    assert digest(alone.state(last)) == digest(trial.state(last)), trial
print(len(trials), "trials, each as trained by itself")
""",
]


@pytest.mark.ci
def test_a_notebook_of_ten_cells_trains_branches_and_searches_without_repeating_a_step(tmp_path: Path) -> None:
    assert len(CELLS) == 10
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell.strip()) for cell in CELLS])  # type: ignore[no-untyped-call]
    place = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(notebook, timeout=300, kernel_name="python3", resources=place).execute()
    texts = ["".join(output.get("text", "") for output in cell.outputs) for cell in notebook.cells]
    assert "runs/0 and runs/1: the same for 20 steps" in texts[5]
    assert "8 trials, each as trained by itself" in texts[9]
    assert len(hpstage.open(tmp_path / "runs").trials) == 8
