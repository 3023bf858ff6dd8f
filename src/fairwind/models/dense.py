"""Models of dense layers, and the layer that scales pixels."""

import torch
from torch import Tensor, nn


class Pixels(nn.Module):
    """Scales bytes from 0–255 to 0–1; passes other inputs through."""

    white: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("white", torch.tensor(255.0), persistent=False)  # of the model's own type

    def forward(self, x: Tensor) -> Tensor:
        return x if x.is_floating_point() else x / self.white


def linear(features: int, classes: int) -> nn.Module:
    """Multinomial logistic regression."""
    return nn.Linear(features, classes)


def mlp(features: int = 784, hidden: int = 128, classes: int = 62) -> nn.Module:
    """One hidden layer of ReLUs, over numbers or pixels."""
    layers = nn.Linear(features, hidden), nn.ReLU(), nn.Linear(hidden, classes)
    return nn.Sequential(Pixels(), nn.Flatten(), *layers)
