"""A user's module, made to run under `torch.func.vmap` with other parameters in every row."""

from torch import nn

from fairwind.layers import (
    attention,
    cells,
    convolution,
    dropout,
    embedding,
    implicit,
    linear,
    masks,
    normalization,
    pooling,
    recurrent,
)

STACKABLE: dict[type[nn.Module], type[nn.Module]] = {
    **attention.STACKABLE,
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
    """Gives the module's PyTorch layers, in place, forward passes that stack; returns the module.

    Only a layer's class changes, so parameters, their names and ties, and hooks stay as they are. Subclasses
    of PyTorch's layers are left alone, as their forward pass may be the user's.
    """
    masks.leave_masks_unread()
    for number, (_, layer) in enumerate(list(module.named_modules(remove_duplicate=False))):
        ours = STACKABLE.get(type(layer))
        if ours is not None:
            layer.__class__ = ours
            dropout.add_key(layer, number)
    return module


def prepare_compiler() -> None:
    """Makes `torch.compile` accept recurrent layers, and use backward passes and batching rules written here.

    By itself it refuses LSTM, GRU and RNN layers for their class. And in `grad` of `vmap` it traces only the
    forward pass of an autograd function, whose inputs do not require gradients as the compiler sees them.
    """
    import torch._dynamo  # takes more than a second

    torch._dynamo.config.allow_rnn = True
    for function in (
        recurrent.Recurrence,
        embedding.Lookup,
        convolution.WindowProduct,
        implicit.Convolution,
        normalization.Grouped,
    ):
        torch.compiler.allow_in_graph(function)  # type: ignore[no-untyped-call]
