"""Converts a user's module to run under `torch.func.vmap` with different parameters in every row."""

from torch import nn

from fairwind.layers import (
    attention,
    batch_norm,
    cells,
    convolution,
    dropout,
    embedding,
    linear,
    masks,
    normalization,
    pooling,
    recurrent,
)

STACKABLE: dict[type[nn.Module], type[nn.Module]] = {
    **attention.STACKABLE,
    **batch_norm.STACKABLE,
    **cells.STACKABLE,
    **convolution.STACKABLE,
    **dropout.STACKABLE,
    **embedding.STACKABLE,
    **linear.STACKABLE,
    **normalization.STACKABLE,
    **pooling.STACKABLE,
    **recurrent.STACKABLE,
}


def stackable(module: nn.Module) -> nn.Module:
    """Replaces, in place, the forward passes of PyTorch's layers by ones that can be stacked.

    Only a layer's class changes, so parameters, names, tied weights and hooks stay the same. Subclasses of
    PyTorch's layers are not changed, because their forward pass may be the user's.
    """
    masks.leave_masks_unread()
    for number, (_, layer) in enumerate(list(module.named_modules(remove_duplicate=False))):
        ours = STACKABLE.get(type(layer))
        if ours is not None:
            layer.__class__ = ours
            dropout.add_key(layer, number)
    return module
