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
from fairwind.layers.gpu import implicit, lstm, sixteen_bits

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


def prepare_compiler() -> None:
    """Makes `torch.compile` accept recurrent layers, and use our backward passes and batching rules.

    By default it refuses LSTM, GRU and RNN layers by their class. And in `grad` of `vmap` it traces only the
    forward pass of an autograd function, because its inputs do not seem to require gradients.
    """
    import torch._dynamo  # takes more than a second

    torch._dynamo.config.allow_rnn = True
    for constant in (sixteen_bits.tf32_allowed, sixteen_bits.has_shared_memory):
        torch._dynamo.assume_constant_result(constant)  # type: ignore[no-untyped-call]
    for function in (
        recurrent.Recurrence,
        lstm.Layer,
        embedding.Lookup,
        convolution.WindowProduct,
        implicit.Convolution,
        normalization.Grouped,
    ):
        torch.compiler.allow_in_graph(function)  # type: ignore[no-untyped-call]
