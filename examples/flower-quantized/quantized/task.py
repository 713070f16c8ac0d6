"""Model, data and training of a client, independent of fedshift."""

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

TEST = 360  # number of examples of the server's test set


def new_model() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))


def digits() -> tuple[Tensor, Tensor]:
    x, y = load_digits(return_X_y=True)
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(0))
    return torch.tensor(x / 16, dtype=torch.float32)[order], torch.tensor(y)[order]


def train_data(partition: int, partitions: int) -> DataLoader:
    x, y = digits()
    mine = slice(TEST + partition, None, partitions)
    return DataLoader(TensorDataset(x[mine], y[mine]), batch_size=16, shuffle=True)


def test_data() -> DataLoader:
    x, y = digits()
    return DataLoader(TensorDataset(x[:TEST], y[:TEST]), batch_size=TEST)


def train(model: nn.Module, batches: DataLoader, epochs: int, lr: float) -> float:
    """Train the model; return the mean loss of the last epoch."""
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    for _ in range(epochs):
        total = 0.0
        for x, y in batches:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            total += loss.item()
    return total / len(batches)


@torch.no_grad()
def accuracy(model: nn.Module, batches: DataLoader) -> float:
    return sum(int((model(x).argmax(1) == y).sum()) for x, y in batches) / len(batches.dataset)
