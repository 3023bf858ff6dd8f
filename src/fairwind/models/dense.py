"""Models of dense layers."""

from torch import nn

from fairwind.models.pixels import Pixels


def linear(features: int, classes: int) -> nn.Module:
    """Multinomial logistic regression."""
    return nn.Linear(features, classes)


def mlp(features: int = 784, hidden: int = 128, classes: int = 62) -> nn.Module:
    """One hidden layer of ReLUs, over numbers or pixels."""
    layers = nn.Linear(features, hidden), nn.ReLU(), nn.Linear(hidden, classes)
    return nn.Sequential(Pixels(channels=None), nn.Flatten(), *layers)
