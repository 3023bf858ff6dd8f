"""Tasks to be timed: the four setups and modules that users bring, on data of their shapes and sizes."""

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from fairwind import Federation, Solver, setups
from fairwind.data.partition import dirichlet
from fairwind.data.synthetic import synthetic
from fairwind.models import lstm, mlp, vgg11
from fairwind.models.dense import linear
from modules import GPT2, Encoder, Lstm, leaf_cnn, resnet18, small_cnn

WORDS, TOKENS, WIDTH = 20_000, 25, 100


class Task(NamedTuple):
    """What is timed: our engine and a plain loop, on the same model and data."""

    title: str
    data: Callable[[int], Federation]  # of so many clients
    clients: int  # on a GPU
    few: int
    """Clients of the loop, and of both on a CPU: the cost of a client's step there does not depend on it."""
    model: Callable[[], nn.Module]
    solver: Solver
    user: bool = False
    """A module that users bring, not a setup's."""


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


def noise(shape: tuple[int, ...], classes: int, low: int, high: int) -> Callable[[int], Federation]:
    """Random numbers, with clients of `low` to `high` samples."""

    def make(clients: int) -> Federation:
        owner = np.repeat(np.arange(clients), np.random.default_rng(0).integers(low, high + 1, clients))
        bytes_ = _dealt(owner, shape, torch.uint8, 256, classes)
        assert isinstance(bytes_.inputs, Tensor)
        return replace(bytes_, inputs=bytes_.inputs / 255)

    return make


def texts(words: int, length: int, low: int, high: int) -> Callable[[int], Federation]:
    """Random words, with clients of `low` to `high` texts in two classes."""

    def make(clients: int) -> Federation:
        owner = np.repeat(np.arange(clients), np.random.default_rng(0).integers(low, high + 1, clients))
        return _dealt(owner, (length,), torch.int64, words, 2)

    return make


def _vectors() -> Tensor:
    return torch.randn(WORDS, WIDTH, generator=torch.Generator().manual_seed(0))


def _linear() -> nn.Module:
    return linear(60, 10)


def _solver(setup: str) -> Solver:
    return setups.SETUPS[setup].solver


BATCH_10, BATCH_32 = Solver(lr=0.01, batch_size=10), Solver(lr=0.01, batch_size=32)


def small_convolutions(channels: int, first: int, second: int, pixels: int) -> Task:
    """Clients that train a small convolutional network."""
    return Task(
        f"Convolutions {channels}-{first}-{second}",
        noise((channels, pixels, pixels), 10, 60, 140),
        24,
        24,
        lambda: small_cnn(channels, first, second, pixels),
        BATCH_10,
        True,
    )


TASKS = {
    "synthetic": Task(
        "Synthetic, linear 60×10", lambda n: synthetic(clients=n), 100, 100, _linear, _solver("synthetic")
    ),
    "femnist": Task("FEMNIST, MLP 784-128-62", written, 3500, 40, mlp, _solver("femnist")),
    "cifar10": Task("CIFAR-10, VGG11", pictures, 16, 1, vgg11, _solver("cifar10")),
    "sent140": Task(
        "Sent140, LSTM 2×100", tweets, 697, 20, lambda: lstm(vectors=_vectors()), _solver("sent140")
    ),
    "leaf": Task("LEAF's CNN", noise((1, 28, 28), 62, 50, 150), 64, 10, leaf_cnn, BATCH_10, True),
    "convolutions": small_convolutions(1, 16, 32, 28),
    "resnet": Task("ResNet-18, group norm", noise((3, 32, 32), 10, 80, 160), 32, 2, resnet18, BATCH_32, True),
    "lstm": Task("nn.LSTM", texts(5000, 32, 50, 150), 128, 12, Lstm, BATCH_10, True),
    "encoder": Task("Transformer encoder", texts(5000, 32, 50, 150), 128, 8, Encoder, BATCH_10, True),
    "lora": Task("LoRA on GPT-2, 124 M", texts(50257, 64, 40, 40), 16, 1, GPT2, Solver(batch_size=8), True),
}
