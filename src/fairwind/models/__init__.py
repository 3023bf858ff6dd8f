"""The setups' models: ordinary modules."""

from torch import nn


def linear(features: int, classes: int) -> nn.Module:
    """Multinomial logistic regression."""
    return nn.Linear(features, classes)


def mlp(features: int = 784, hidden: int = 128, classes: int = 62) -> nn.Module:
    """One hidden layer of ReLUs."""
    return nn.Sequential(nn.Flatten(), nn.Linear(features, hidden), nn.ReLU(), nn.Linear(hidden, classes))
