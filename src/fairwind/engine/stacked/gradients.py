"""Gradients of many rows, dense or factored, with the same interface.

The gradient of a dense layer's weight is the product of the layer's output gradients and its inputs. Stored,
it is as large as the weight, and is written only to be read once. A factored gradient is instead added
directly to the weights by the matrix product.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fairwind.layers.linear import Linear


class Product(NamedTuple):
    """What is still to be added to a part's rows: leftᵀ·right (rows, out, in)."""

    left: Tensor  # (rows, B, out)
    right: Tensor  # (rows, B, in)

    def add_to(self, part: Tensor) -> None:
        part.baddbmm_(self.left.mT, self.right)


class Dense(NamedTuple):
    """The gradient itself."""

    value: Tensor  # (rows, *shape)

    def add_to(self, part: Tensor, scale: Tensor | None, active: Tensor | None) -> Product | None:
        """Adds the gradient, times `scale`, () or (rows,), to the rows that are `active`, or to all."""
        value = self.value.to(part.dtype)
        if scale is not None:
            value = scale.view(-1, *[1] * (part.ndim - 1)) * value if scale.ndim else scale * value
        if active is not None:
            value = torch.where(active.view(-1, *[1] * (part.ndim - 1)), value, 0)
        part.add_(value)
        return None

    def minus(self, other: "Gradient") -> "Gradient":
        assert isinstance(other, Dense)
        return Dense(self.value - other.value)


class Factored(NamedTuple):
    """The gradient as output gradients (rows, B, out) and inputs (rows, B, in) of a layer."""

    outputs: Tensor
    inputs: Tensor

    def add_to(self, part: Tensor, scale: Tensor | None, active: Tensor | None) -> Product | None:
        """The pending product, which the caller adds outside compiled code."""
        outputs, inputs = self.outputs, self.inputs
        if scale is not None:
            outputs = (scale[:, None, None] if scale.ndim else scale) * outputs
        if active is None:
            return Product(outputs, inputs)
        here = active[:, None, None]
        return Product(torch.where(here, outputs, 0), torch.where(here, inputs, 0))

    def minus(self, other: "Gradient") -> "Gradient":
        assert isinstance(other, Factored)
        outputs = torch.cat([self.outputs, -other.outputs], dim=1)
        return Factored(outputs, torch.cat([self.inputs, other.inputs], dim=1))


Gradient = Dense | Factored


def watch(layer: Any) -> Callable[[], None]:
    """Records a layer's input as `seen`, and adds a `zero` tensor, if given, to its output.

    The gradient with respect to that zero is the output's gradient. Call the returned function to remove it.
    """
    layer.register_buffer("zero", None, persistent=False)
    layer.seen = None
    hook = layer.register_forward_hook(_see, prepend=True)  # before those that change the output

    def end() -> None:
        hook.remove()
        del layer.zero, layer.seen

    return end


def _see(layer: Any, given: tuple[Tensor, ...], out: Tensor) -> Tensor:
    if layer.zero is None:
        return out
    if layer.seen is not None:
        raise RuntimeError("the layer is used twice")
    (layer.seen,) = given
    found: Tensor = out + layer.zero
    return found


def is_linear(module: nn.Module, name: str) -> bool:
    """Whether a parameter is the weight of a linear layer inside the module."""
    layer, _, own = name.rpartition(".")
    return bool(layer) and own == "weight" and type(module.get_submodule(layer)) in (nn.Linear, Linear)
