"""The same script as a class: hpstage runs the loop."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hpstage

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


class Digits(hpstage.torch.TorchTrainable):  # new
    step_unit = "epoch"  # new

    def model(self, hp):  # new
        return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 10))

    def optimizer(self, model, hp):  # new
        return torch.optim.SGD(model.parameters(), lr=hp["lr"], momentum=0.9)

    def dataset(self):  # new
        return DataLoader(train, batch_size=64, shuffle=True)

    def loss(self, model, batch):  # new
        images, labels = batch
        return nn.functional.cross_entropy(model(images), labels)

    def evaluate(self, model):  # new
        return {"accuracy": accuracy(model)}


if __name__ == "__main__":
    from function import search

    result = search(Digits())
    print(result.best_trial.params, result.best_value)
    print(result.savings)
