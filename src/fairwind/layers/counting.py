"""A user's module with PyTorch's own layers, and dropout masks that are the same in both executors."""

from typing import Any

from torch import nn

from fairwind.layers import dropout
from fairwind.layers.conversion import STACKABLE


def counted(module: nn.Module) -> nn.Module:
    """Replaces, in place, the dropout of the module's layers by counter-based dropout; returns the module."""
    for number, (_, layer) in enumerate(list(module.named_modules(remove_duplicate=False))):
        rate: Any = getattr(layer, "dropout", 0)
        inside = isinstance(rate, int | float) and rate > 0  # attention's and recurrent layers'
        ours = STACKABLE.get(type(layer))
        if ours is not None and (type(layer) in dropout.STACKABLE or inside):
            layer.__class__ = ours
            dropout.add_key(layer, number)
    return module
