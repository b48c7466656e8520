"""An ordinary PyTorch loop on a stage tree.

.venv/bin/python scripts/example_function.py
"""

from __future__ import annotations

import optuna
import torch
from sklearn.datasets import load_digits

import hpstage
from hpstage import schedule as s


def train(run):  # type: ignore[no-untyped-def]
    images, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels)
    model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=run.hp["lr"])
    run.attach(model=model, optimizer=optimizer)  # forked states are loaded here
    for _ in run.steps():
        for group in optimizer.param_groups:
            group["lr"] = run.hp["lr"]
        batch = torch.as_tensor(run.indices(1437, batch_size=run.hp["batch_size"]))
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x[batch]), y[batch]).backward()
        optimizer.step()
        if run.wants_report:
            with torch.no_grad():
                run.report(accuracy=(model(x[1437:]).argmax(1) == y[1437:]).double().mean().item())


def space(trial: optuna.Trial) -> dict[str, object]:
    peak = trial.suggest_categorical("lr", [3e-3, 1e-3])
    decay = trial.suggest_categorical("decay_steps", [50, 100, 200])
    return {
        "lr": s.constant(peak).until(400 - decay).then(s.linear(peak, 1.0, 0.0, total_iters=decay)).until(400),
        "batch_size": 64,
    }


def main() -> None:
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    grid = {"lr": [3e-3, 1e-3], "decay_steps": [50, 100, 200]}
    study = optuna.create_study(direction="maximize", sampler=optuna.samplers.GridSampler(grid, seed=0))
    result = hpstage.optimize(study, train, space, metric="accuracy", steps=400, n_trials=6)
    print(f"accuracy {result.best_value:.4f} with {result.best_params}")
    print(result.savings)


if __name__ == "__main__":
    main()
