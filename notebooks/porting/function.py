"""The same script as a training function of hpstage. Comments mark the lines that have changed."""

import optuna
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hpstage
from hpstage import schedule as s

digits = load_digits()
x = torch.tensor(digits.data, dtype=torch.float32) / 16
y = torch.tensor(digits.target)
train, test = TensorDataset(x[:1500], y[:1500]), TensorDataset(x[1500:], y[1500:])


def accuracy(model):
    model.eval()
    with torch.no_grad():
        found = model(test.tensors[0]).argmax(1)
    model.train()
    return (found == test.tensors[1]).float().mean().item()


def main(run):  # changed
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=run.hp["lr"], momentum=0.9)  # changed
    loader = DataLoader(train, batch_size=64, shuffle=True)
    run.attach(model=model, optimizer=optimizer)  # new
    for epoch in run.steps():  # changed
        for images, labels in run.batches(loader):  # changed
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
        run.report(accuracy=accuracy(model))  # changed


def space(trial):
    return {"lr": s.multistep(0.1, [trial.suggest_int("drop_at", 2, 5)], gamma=0.1)}


def search(trainable, **options):
    study = optuna.create_study(direction="maximize", sampler=optuna.samplers.GridSampler({"drop_at": [2, 3, 4, 5]}))
    return hpstage.optimize(study, trainable, space, metric="accuracy", steps=6, **options)


if __name__ == "__main__":
    result = search(main)
    print(result.best_trial.params, result.best_value)
    print(result.savings)
