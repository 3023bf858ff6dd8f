"""The four setups as tasks to be timed: data of their shapes and sizes, and their models."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from fairwind import Federation, Solver, setups
from fairwind.data.partition import dirichlet
from fairwind.data.synthetic import synthetic
from fairwind.models import lstm, mlp, vgg11
from fairwind.models.dense import Pixels, linear

WORDS, TOKENS, WIDTH = 20_000, 25, 100


class Task(NamedTuple):
    """What is timed: the stacked engine on `model`, a loop on `plain`, which has PyTorch's own layers."""

    title: str
    data: Callable[[int], Federation]  # of so many clients
    clients: int
    few: int
    """Clients of the loop, and of both on a CPU: the cost of a client's step there does not depend on it."""
    model: Callable[[], nn.Module]
    plain: Callable[[], nn.Module]
    solver: Solver
    reference: bool = False
    """Whether the package's own loop, too, is timed; it takes long with the larger models."""


def written(clients: int) -> Federation:
    """Noise in the shape of FEMNIST, with clients of about LEAF's sizes (mean 227, standard deviation 89)."""
    draw = np.random.default_rng(0)
    sizes = draw.normal(227, 89, clients).round().clip(20, 600).astype(int)
    return _dealt(np.repeat(np.arange(clients), sizes), (784,), torch.uint8, 256, 62)


def pictures(clients: int) -> Federation:
    """Noise in the shape of CIFAR-10's images, 50,000 for 16 clients, dealt by Dir(0.05)."""
    labels = np.repeat(np.arange(10), 5000 * clients // 16)
    return _dealt(dirichlet(labels, clients, 0.05, 0), (3, 32, 32), torch.uint8, 256, 10)


def tweets(clients: int) -> Federation:
    """Random words, with clients of some 50 to 150 texts."""
    sizes = np.random.default_rng(0).integers(50, 151, clients)
    return _dealt(np.repeat(np.arange(clients), sizes), (TOKENS,), torch.int32, WORDS, 2)


def _dealt(
    owner: np.ndarray, shape: tuple[int, ...], dtype: torch.dtype, values: int, classes: int
) -> Federation:
    g = torch.Generator().manual_seed(0)
    inputs = torch.randint(0, values, (len(owner), *shape), generator=g, dtype=dtype)
    targets = torch.randint(0, classes, (len(owner),), generator=g)
    names = [str(client) for client in range(int(owner.max()) + 1)]
    return Federation.from_owners(inputs, targets, owner, names=names, classes=classes)


def plain_vgg11() -> nn.Module:
    layers: list[nn.Module] = [Pixels()]
    inputs = 3
    for width in (64, 0, 128, 0, 256, 256, 0, 512, 512, 0, 512, 512, 0):
        layers += [nn.Conv2d(inputs, width, 3, padding=1), nn.ReLU()] if width else [nn.MaxPool2d(2)]
        inputs = width or inputs
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(512, 10))


class PlainText(nn.Module):
    """nn.LSTM, which is cuDNN's on a GPU, over frozen vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH, _weight=_vectors(), _freeze=True)
        self.layers = nn.LSTM(WIDTH, 100, num_layers=2, batch_first=True)
        self.dense = nn.Linear(100, 2)

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.dense(self.layers(self.embedding(ids))[0][:, -1])
        return out


def _vectors() -> Tensor:
    return torch.randn(WORDS, WIDTH, generator=torch.Generator().manual_seed(0))


def _solver(setup: str) -> Solver:
    return setups.SETUPS[setup].solver


TASKS = {
    "synthetic": Task(
        "Synthetic, linear 60×10",
        lambda clients: synthetic(clients=clients),
        100,
        100,
        lambda: linear(60, 10),
        lambda: linear(60, 10),
        _solver("synthetic"),
        reference=True,
    ),
    "femnist": Task(
        "FEMNIST, MLP 784-128-62", written, 3500, 40, mlp, mlp, _solver("femnist"), reference=True
    ),
    "cifar10": Task("CIFAR-10, VGG11", pictures, 16, 16, vgg11, plain_vgg11, _solver("cifar10")),
    "sent140": Task(
        "Sent140, LSTM 2×100",
        tweets,
        697,
        20,
        lambda: lstm(vectors=_vectors()),
        PlainText,
        _solver("sent140"),
    ),
}
