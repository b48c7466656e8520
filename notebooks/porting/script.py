"""An ordinary training script: digits, a small network, SGD with momentum, a learning rate that drops."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

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


def main():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones=[4], gamma=0.1)
    loader = DataLoader(train, batch_size=64, shuffle=True)
    for epoch in range(6):
        for images, labels in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
        scheduler.step()
        print(epoch, accuracy(model))


if __name__ == "__main__":
    main()
