"""A user's module with PyTorch's own layers, but dropout and batch norm as in the stacked executor."""

from typing import Any

from torch import nn

from fairwind.layers import batch_norm, dropout
from fairwind.layers.conversion import STACKABLE


def counted(module: nn.Module) -> nn.Module:
    """Replaces, in place, dropout by counter-based dropout, and batch norm; returns the module."""
    for number, (_, layer) in enumerate(list(module.named_modules(remove_duplicate=False))):
        rate: Any = getattr(layer, "dropout", 0)
        inside = isinstance(rate, int | float) and rate > 0  # attention's and recurrent layers'
        ours = STACKABLE.get(type(layer))
        replaced = type(layer) in dropout.STACKABLE or type(layer) in batch_norm.STACKABLE
        if ours is not None and (replaced or inside):
            layer.__class__ = ours
            dropout.add_key(layer, number)
    return module
